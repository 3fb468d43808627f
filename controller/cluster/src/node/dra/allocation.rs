//! Reads from a ResourceClaim which GPUs the scheduler allocated to it.

use affinode_proto::annotations::set_the_same;
use k8s_openapi::{
    api::resource::v1::{
        DeviceAllocationConfiguration, DeviceRequestAllocationResult, ResourceClaim,
    },
    apimachinery::pkg::api::resource::Quantity,
};
use kube::ResourceExt;

use super::{
    DRIVER, MEMORY,
    policy::{self, Annotations, PolicyError},
};

/// Maximum number of devices of a claim. The Kubernetes API has the same limit.
const MAX_DEVICES: usize = 32;

/// A GPU that is allocated to a claim, as a whole or as a share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllocatedGpu {
    /// Name of the request in the claim: `name` or `name/subrequest`.
    pub request: String,
    /// Pool of the device. It has the name of the node.
    pub pool: String,
    /// Name of the device in the pool.
    pub device: String,
    /// Identity of the allocated share. `None`: the device is allocated as a whole.
    pub share_id: Option<String>,
    /// Policy for the containers of the claim, in the form of pod annotations.
    pub policy: Annotations,
    /// Memory of the GPU that the scheduler allocated, in bytes. `None`: the allocation names no
    /// amount.
    pub memory_bytes: Option<u64>,
}

/// Reason why a claim cannot be prepared.
#[derive(Debug, thiserror::Error)]
pub enum AllocationError {
    /// Another claim with the same name has replaced the claim that the kubelet names. The UIDs of
    /// the two claims differ.
    #[error(
        "claim {claim} was replaced by a claim of the same name (UID {found:?} instead of \
         {wanted}); delete the pod, so that its replacement uses the new claim"
    )]
    Replaced {
        /// `namespace/name` of the claim.
        claim: String,
        /// UID that the API server reports.
        found: String,
        /// UID for which the kubelet asks.
        wanted: String,
    },
    /// The claim has no device of this driver.
    #[error("claim {0} has no device of driver {DRIVER}; its allocation was removed")]
    NotAllocated(String),
    /// The claim has more devices than the API allows.
    #[error("claim {claim} has {count} devices; at most {MAX_DEVICES} are supported")]
    Many {
        /// `namespace/name` of the claim.
        claim: String,
        /// Number of the claim's devices that belong to this driver.
        count: usize,
    },
    /// The device belongs to another node.
    #[error("claim {claim} has a device of pool {pool}, but the pool of this node is {node}")]
    OtherNode {
        /// `namespace/name` of the claim.
        claim: String,
        /// Pool of the device.
        pool: String,
        /// Name of this node.
        node: String,
    },
    /// The allocated amount of memory cannot be parsed.
    #[error(
        "claim {claim} has the invalid memory amount {amount:?}; expected a whole number with a \
         unit, such as 20Gi"
    )]
    Amount {
        /// `namespace/name` of the claim.
        claim: String,
        /// The amount as the API server returned it, cut to 80 characters.
        amount: String,
    },
    /// An opaque configuration in the claim's allocation is invalid.
    #[error("claim {claim}: opaque configuration {number} (counted from 0) is invalid")]
    Policy {
        /// `namespace/name` of the claim.
        claim: String,
        /// Position in `status.allocation.devices.config`, from 0.
        number: usize,
        /// Reason why the configuration is invalid.
        #[source]
        source: PolicyError,
    },
}

/// Returns the devices of a claim that belong to this driver.
///
/// # Errors
/// [`AllocationError`]: the claim is not allocated to this node, or its configuration is invalid.
pub fn allocated(
    claim: &ResourceClaim,
    uid: &str,
    node: &str,
) -> Result<Vec<AllocatedGpu>, AllocationError> {
    let name = format!("{}/{}", claim.namespace().unwrap_or_default(), claim.name_any());
    let found = claim.uid().unwrap_or_default();
    if found != uid {
        return Err(AllocationError::Replaced { claim: name, found, wanted: uid.to_owned() });
    }
    let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
    let devices = allocation.and_then(|allocation| allocation.devices.as_ref());
    let results = devices.and_then(|devices| devices.results.as_deref()).unwrap_or_default();
    let ours: Vec<_> = results.iter().filter(|result| result.driver == DRIVER).collect();
    match ours.len() {
        0 => return Err(AllocationError::NotAllocated(name)),
        count if count > MAX_DEVICES => return Err(AllocationError::Many { claim: name, count }),
        _ => {}
    }
    let configs = devices.and_then(|devices| devices.config.as_deref()).unwrap_or_default();
    let policies = policies(configs, &name)?;
    ours.into_iter().map(|result| allocated_gpu(result, &policies, &name, node)).collect()
}

fn allocated_gpu(
    result: &DeviceRequestAllocationResult,
    policies: &[(&[String], Annotations)],
    claim: &str,
    node: &str,
) -> Result<AllocatedGpu, AllocationError> {
    if result.pool != node {
        let (claim, node) = (claim.to_owned(), node.to_owned());
        return Err(AllocationError::OtherNode { claim, pool: result.pool.clone(), node });
    }
    let mut policy = Annotations::new();
    for (_, further) in policies.iter().filter(|(requests, _)| applies(requests, &result.request)) {
        let is_set = |name: &str| further.keys().any(|other| set_the_same(other, name));
        policy.retain(|name, _| !is_set(name));
        policy.extend(further.clone());
    }
    Ok(AllocatedGpu {
        request: result.request.clone(),
        pool: result.pool.clone(),
        device: result.device.clone(),
        share_id: result.share_id.clone(),
        policy,
        memory_bytes: memory_bytes(result, claim)?,
    })
}

/// Returns the memory that the scheduler allocated in this result, in bytes. `None`: the result
/// names no amount.
fn memory_bytes(
    result: &DeviceRequestAllocationResult,
    claim: &str,
) -> Result<Option<u64>, AllocationError> {
    let amount = result.consumed_capacity.as_ref().and_then(|all| all.get(MEMORY));
    let read = |amount: &Quantity| {
        bytes(&amount.0).ok_or_else(|| AllocationError::Amount {
            claim: claim.to_owned(),
            amount: amount.0.chars().take(80).collect(),
        })
    };
    amount.map(read).transpose()
}

/// Parses an amount of bytes as the API server writes it. It is a whole number, which a unit
/// (`20Gi`) or a decimal exponent (`2e10`) may follow.
fn bytes(text: &str) -> Option<u64> {
    let end = text.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let binary = |unit: &str| "KMGTPE".find(unit).map(|power| 1_u64 << (10 * (power + 1)));
    let scale = match unit {
        "" => 1,
        "k" => 1_000,
        "M" => 1_000_000,
        "G" => 1_000_000_000,
        "T" => 1_000_000_000_000,
        "P" => 1_000_000_000_000_000,
        "E" => 1_000_000_000_000_000_000,
        _ => match unit.strip_suffix('i') {
            Some(letter) if letter.len() == 1 => binary(letter)?,
            _ => 10_u64.checked_pow(unit.strip_prefix(['e', 'E'])?.parse().ok()?)?,
        },
    };
    number.parse::<u64>().ok()?.checked_mul(scale)
}

/// Parses the opaque configurations for this driver. Each result contains the requests to which the
/// configuration applies, and the annotations in it. The configurations of the device class come
/// first, so that those of the claim override them.
fn policies<'a>(
    configs: &'a [DeviceAllocationConfiguration],
    claim: &str,
) -> Result<Vec<(&'a [String], Annotations)>, AllocationError> {
    let mut ordered: Vec<_> = configs.iter().enumerate().collect();
    ordered.sort_by_key(|(_, config)| config.source != "FromClass");
    let ours = ordered.into_iter().filter_map(|(number, config)| {
        let opaque = config.opaque.as_ref().filter(|opaque| opaque.driver == DRIVER)?;
        Some((number, config.requests.as_deref().unwrap_or_default(), &opaque.parameters.0))
    });
    let parsed = ours.map(|(number, requests, parameters)| match policy::parse(parameters) {
        Ok(policy) => Ok((requests, policy)),
        Err(source) => Err(AllocationError::Policy { claim: claim.to_owned(), number, source }),
    });
    parsed.collect()
}

/// Returns whether a configuration applies to a device. `requests` are the requests that the
/// configuration names: an empty list means all requests, and the name of a request includes its
/// subrequests. `of_result` is the request for which the device was allocated.
fn applies(requests: &[String], of_result: &str) -> bool {
    let main = of_result.split('/').next().unwrap_or_default();
    requests.is_empty() || requests.iter().any(|request| request == of_result || request == main)
}

#[cfg(test)]
mod tests;
