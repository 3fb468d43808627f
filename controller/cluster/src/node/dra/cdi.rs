//! The CDI specification of a prepared claim. containerd reads it when it creates a container of
//! the claim. The specification also records what was prepared, so that a restarted agent gives the
//! kubelet the same answer.
//!
//! The specification has one device for each allocated GPU, because a container may name one
//! request of the claim. It then gets only the policy of that request. The device nodes and
//! libraries of the GPU are in the specification that NVIDIA's container toolkit makes.

use serde::{Deserialize, Serialize};

use super::{allocation::AllocatedGpu, messages::PreparedDevice};

/// CDI kind of the devices that this driver defines for claims.
pub const KIND: &str = "gpu.affinode.io/claim";
/// Version of the CDI specification that introduced annotations.
const VERSION: &str = "0.6.0";
/// Environment variable that shows a container its claim: `namespace/name`.
const CLAIM_ENV: &str = "AFFINODE_CLAIM";

/// Namespace, name and UID of a resource claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimName {
    /// Namespace of the claim.
    pub namespace: String,
    /// Name of the claim.
    pub name: String,
    /// UID of the claim.
    pub uid: ClaimUid,
}

/// A UID that is safe as a part of a file name.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ClaimUid(String);

/// Error for a text that is not a valid UID of a claim.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is not the UID of a claim; accepted: 1 to 63 letters, digits and hyphens")]
pub struct UidError(String);

impl std::str::FromStr for ClaimUid {
    type Err = UidError;

    fn from_str(text: &str) -> Result<ClaimUid, UidError> {
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        match (1..=63).contains(&text.len()) && text.bytes().all(fits) {
            true => Ok(ClaimUid(text.to_owned())),
            false => Err(UidError(text.chars().take(80).collect())),
        }
    }
}

impl std::fmt::Display for ClaimUid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// A CDI specification, with the fields that this driver writes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClaimSpec {
    cdi_version: String,
    kind: String,
    devices: Vec<SpecDevice>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SpecDevice {
    name: String,
    annotations: DeviceRecord,
    container_edits: ContainerEdits,
}

/// Properties of a device that the driver reports to the kubelet, stored as annotations of the CDI
/// device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct DeviceRecord {
    #[serde(rename = "affinode.io/request")]
    request: String,
    #[serde(rename = "affinode.io/pool")]
    pool: String,
    #[serde(rename = "affinode.io/device")]
    device: String,
    #[serde(rename = "affinode.io/share-id", default, skip_serializing_if = "Option::is_none")]
    share_id: Option<String>,
    /// The CDI device with the GPU's device nodes and libraries.
    #[serde(rename = "affinode.io/gpu")]
    gpu: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct ContainerEdits {
    env: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    mounts: Vec<SpecMount>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SpecMount {
    host_path: String,
    container_path: String,
    options: Vec<String>,
}

/// A GPU of a claim, and what the claim's containers get for it: a CDI device and a policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimDevice {
    /// The GPU, as the scheduler allocated it.
    pub allocated: AllocatedGpu,
    /// The CDI device with the GPU's device nodes and libraries, such as `nvidia.com/gpu=GPU-…`.
    pub gpu: String,
    /// Path of the file with the policy, first on the node and then in containers. `None`: the
    /// claim has no policy for this GPU.
    pub policy_file: Option<[String; 2]>,
}

impl ClaimSpec {
    /// Returns whether the specification was made for exactly these GPUs. A claim with the same UID
    /// can later be allocated to other GPUs.
    #[must_use]
    pub fn is_for(&self, gpus: &[AllocatedGpu]) -> bool {
        let same = |(device, gpu): (&SpecDevice, &AllocatedGpu)| {
            let known = &device.annotations;
            (&known.request, &known.pool, &known.device, &known.share_id)
                == (&gpu.request, &gpu.pool, &gpu.device, &gpu.share_id)
        };
        self.devices.len() == gpus.len() && self.devices.iter().zip(gpus).all(same)
    }

    /// Makes the specification of a claim.
    #[must_use]
    pub fn new(claim: &ClaimName, devices: &[ClaimDevice]) -> ClaimSpec {
        let env = vec![format!("{CLAIM_ENV}={}/{}", claim.namespace, claim.name)];
        let device = |(number, device): (usize, &ClaimDevice)| SpecDevice {
            name: device_name(&claim.uid, number),
            annotations: DeviceRecord {
                request: device.allocated.request.clone(),
                pool: device.allocated.pool.clone(),
                device: device.allocated.device.clone(),
                share_id: device.allocated.share_id.clone(),
                gpu: device.gpu.clone(),
            },
            container_edits: ContainerEdits {
                env: env.clone(),
                mounts: device.policy_file.iter().map(policy_mount).collect(),
            },
        };
        ClaimSpec {
            cdi_version: VERSION.into(),
            kind: KIND.into(),
            devices: devices.iter().enumerate().map(device).collect(),
        }
    }

    /// Returns the devices in the form in which the driver reports them to the kubelet.
    #[must_use]
    pub fn prepared(&self) -> Vec<PreparedDevice> {
        let prepared = |device: &SpecDevice| {
            let record = &device.annotations;
            PreparedDevice {
                // The kubelet knows requests by their main name.
                request_names: vec![main_request(&record.request).to_owned()],
                pool_name: record.pool.clone(),
                device_name: record.device.clone(),
                cdi_device_ids: vec![record.gpu.clone(), format!("{KIND}={}", device.name)],
                share_id: record.share_id.clone(),
            }
        };
        self.devices.iter().map(prepared).collect()
    }
}

/// Returns the name of a claim's CDI device from its position in the specification.
#[must_use]
pub fn device_name(uid: &ClaimUid, number: usize) -> String {
    format!("{uid}-{number}")
}

fn main_request(request: &str) -> &str {
    request.split('/').next().unwrap_or_default()
}

fn policy_mount([host_path, container_path]: &[String; 2]) -> SpecMount {
    SpecMount {
        host_path: host_path.clone(),
        container_path: container_path.clone(),
        options: ["bind", "ro", "nosuid", "nodev", "noexec"].map(str::to_owned).to_vec(),
    }
}

#[cfg(test)]
mod tests;
