//! Creates the devices of a node, and compares them with the node's ResourceSlices.

use std::collections::BTreeMap;

use affinode_controller::inventory::gpu_facts::{GpuFacts, NodeGpus};
use k8s_openapi::{
    api::resource::v1::{
        CapacityRequestPolicy, CapacityRequestPolicyRange, Device, DeviceAttribute, DeviceCapacity,
        DeviceTaint, ResourcePool, ResourceSlice, ResourceSliceSpec,
    },
    apimachinery::pkg::{
        api::resource::Quantity,
        apis::meta::v1::{ObjectMeta, OwnerReference},
    },
};
use kube::ResourceExt;

use super::{
    DRIVER, MEMORY,
    capacity::{self, OversubscriptionFactor},
};
use crate::node::gpu_conditions::{GpuConditions, GpuLoad};

/// Maximum number of devices in a slice. The Kubernetes API has the same limit.
const MAX_DEVICES: usize = 128;
/// Maximum length of an attribute's text. The Kubernetes API has the same limit.
const MAX_ATTRIBUTE: usize = 64;

/// Key of the taint of a GPU that is full of VRAM that no offload can free.
pub const FULL_TAINT: &str = "gpu.affinode.io/full";

/// Name of the attribute with the class of load.
const LOAD: &str = "load";

/// The node that owns a ResourceSlice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SliceOwner {
    /// Name of the node object.
    pub node: String,
    /// UID of the node object. When the node object is deleted, the API server deletes the slices
    /// of the node.
    pub node_uid: String,
}

/// The next change that brings the slices of a node to the wanted state.
#[derive(Clone, Debug, PartialEq)]
pub enum SliceChange {
    /// The slice is up to date.
    Keep,
    /// The node has no slice yet.
    Create(Box<ResourceSlice>),
    /// The slice does not have the wanted devices. Contains the new slice, which has the next
    /// generation of the pool.
    Replace(Box<ResourceSlice>),
    /// Delete the slices with these names.
    Delete(Vec<String>),
}

/// Returns the device name of a GPU. It is the UUID in lower case, because a device name must be a
/// DNS label.
#[must_use]
pub fn device_name(uuid: &str) -> String {
    uuid.to_ascii_lowercase()
}

/// Returns one device for each GPU. A GPU in MIG mode is left out, because Affinode does not move
/// containers on MIG instances. A GPU that is full of unmovable VRAM has a taint. The class of load is
/// an attribute.
#[must_use]
pub fn devices(
    node: &NodeGpus,
    factor: OversubscriptionFactor,
    conditions: &GpuConditions,
) -> Vec<Device> {
    let whole = node.gpus.iter().filter(|gpu| !gpu.mig && is_label(&device_name(&gpu.uuid)));
    let device = |gpu: &GpuFacts| Device {
        taints: conditions.full.contains(&gpu.uuid).then(|| vec![full_taint()]),
        ..device(node, gpu, factor, conditions.loads.get(&gpu.uuid).copied().unwrap_or_default())
    };
    whole.take(MAX_DEVICES).map(device).collect()
}

/// Gives the devices the taints and the classes of load that they have in these slices, because the
/// conditions of the GPUs are unknown.
pub fn keep_conditions(devices: &mut [Device], slices: &[ResourceSlice]) {
    let known = slices.iter().flat_map(|slice| slice.spec.devices.iter().flatten());
    for known in known {
        let Some(device) = devices.iter_mut().find(|device| device.name == known.name) else {
            continue;
        };
        device.taints = without_times(std::slice::from_ref(known)).remove(0).taints;
        let load = known.attributes.as_ref().and_then(|attributes| attributes.get(LOAD));
        if let (Some(load), Some(attributes)) = (load, device.attributes.as_mut()) {
            attributes.insert(LOAD.to_owned(), load.clone());
        }
    }
}

/// The taint of a GPU that is full of VRAM that no offload can free. Running pods continue.
fn full_taint() -> DeviceTaint {
    DeviceTaint {
        key: FULL_TAINT.into(),
        value: None,
        effect: "NoSchedule".into(),
        time_added: None,
    }
}

/// Returns the devices as an API server stores them that does not know taints of devices.
#[must_use]
pub fn without_taints(devices: &[Device]) -> Vec<Device> {
    devices.iter().cloned().map(|device| Device { taints: None, ..device }).collect()
}

/// Returns the devices without the times of their taints. The API server adds these times, so they
/// say nothing about whether two lists of devices differ.
#[must_use]
pub fn without_times(devices: &[Device]) -> Vec<Device> {
    let mut devices = devices.to_vec();
    for taint in devices.iter_mut().filter_map(|device| device.taints.as_mut()).flatten() {
        taint.time_added = None;
    }
    devices
}

fn is_label(name: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=63).contains(&name.len())
        && name.bytes().all(inner)
        && !name.starts_with('-')
        && !name.ends_with('-')
}

fn device(
    node: &NodeGpus,
    gpu: &GpuFacts,
    factor: OversubscriptionFactor,
    load: GpuLoad,
) -> Device {
    let memory = capacity::memory(node, gpu.vram_bytes, factor);
    // Without a policy, a claim that names no amount would get the whole capacity.
    let policy = CapacityRequestPolicy {
        default: Some(mebibytes(memory.vram_bytes)),
        valid_range: Some(CapacityRequestPolicyRange {
            min: mebibytes(1 << 20),
            max: Some(mebibytes(memory.vram_bytes)),
            step: Some(mebibytes(1 << 20)),
        }),
        valid_values: None,
    };
    let memory =
        DeviceCapacity { value: mebibytes(memory.total_bytes), request_policy: Some(policy) };
    Device {
        name: device_name(&gpu.uuid),
        allow_multiple_allocations: Some(true),
        attributes: Some(attributes(node, gpu, load)),
        capacity: Some(BTreeMap::from([(MEMORY.to_owned(), memory)])),
        ..Device::default()
    }
}

/// Formats a number of whole MiB as the API server returns it: `1Gi`, not `1024Mi`. Otherwise the
/// comparison of a slice with the wanted devices would fail.
fn mebibytes(bytes: u64) -> Quantity {
    let (mut value, mut unit) = (bytes >> 20, "Mi");
    for larger in ["Gi", "Ti"] {
        if value == 0 || value % 1024 != 0 {
            break;
        }
        (value, unit) = (value / 1024, larger);
    }
    Quantity(format!("{value}{unit}"))
}

/// Returns the attributes of a GPU. They have the names that NVIDIA's DRA driver uses for whole
/// GPUs, so that existing selector expressions of claims work. A property of the GPU that is
/// unknown is left out.
fn attributes(node: &NodeGpus, gpu: &GpuFacts, load: GpuLoad) -> BTreeMap<String, DeviceAttribute> {
    let text = |value: &str| DeviceAttribute {
        string: Some(value.chars().take(MAX_ATTRIBUTE).collect()),
        ..DeviceAttribute::default()
    };
    let version = |value: &str| {
        Some(DeviceAttribute { version: Some(semantic_version(value)?), ..Default::default() })
    };
    let index = DeviceAttribute { int: Some(gpu.index.into()), ..DeviceAttribute::default() };
    let known = [
        ("type", Some(text("gpu"))),
        ("uuid", Some(text(&gpu.uuid))),
        ("index", Some(index)),
        (LOAD, Some(text(load.as_str()))),
        ("productName", Some(text(&gpu.name))),
        ("brand", gpu.brand.as_deref().map(text)),
        ("architecture", gpu.architecture.as_deref().map(text)),
        ("cudaComputeCapability", gpu.compute_capability.as_deref().and_then(version)),
        ("driverVersion", version(&node.driver_version)),
        ("cudaDriverVersion", node.cuda_driver_version.as_deref().and_then(version)),
    ];
    known.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect()
}

/// Converts a version to three numbers without leading zeros, as the API requires. `580.159.04`
/// becomes `580.159.4`, and `9.0` becomes `9.0.0`. `None`: the text does not start with a number.
fn semantic_version(text: &str) -> Option<String> {
    let mut numbers = text.split('.').map(|part| part.parse::<u32>().ok());
    let first = numbers.next()??;
    let mut rest = || numbers.next().flatten().unwrap_or(0);
    Some(format!("{first}.{}.{}", rest(), rest()))
}

/// Compares the driver's slices of this node with the wanted devices, and returns the next change.
/// `wanted` is `None` if the node offers no devices.
#[must_use]
pub fn change(
    found: &[ResourceSlice],
    wanted: Option<&[Device]>,
    owner: &SliceOwner,
) -> SliceChange {
    let names = |slices: &[ResourceSlice]| -> Vec<String> {
        slices.iter().map(ResourceExt::name_any).collect()
    };
    let generation = found.iter().map(|slice| slice.spec.pool.generation).max().unwrap_or(0);
    match (found, wanted.filter(|devices| !devices.is_empty())) {
        ([], None) => SliceChange::Keep,
        (_, None) => SliceChange::Delete(names(found)),
        ([], Some(devices)) => SliceChange::Create(Box::new(slice(devices, owner, 1))),
        ([one], Some(devices)) => {
            let mut fresh = slice(devices, owner, one.spec.pool.generation);
            let mut found = one.spec.clone();
            found.devices = found.devices.map(|devices| without_times(&devices));
            if fresh.spec == found {
                return SliceChange::Keep;
            }
            fresh.spec.pool.generation = generation.saturating_add(1);
            // With its name and version, the API server replaces this form only.
            fresh.metadata = one.metadata.clone();
            SliceChange::Replace(Box::new(fresh))
        }
        // All devices of a pool are in one slice, so that no pool is ever incomplete.
        (several, Some(_)) => {
            let newest = several.iter().position(|slice| slice.spec.pool.generation == generation);
            let mut others = names(several);
            others.remove(newest.unwrap_or(0));
            SliceChange::Delete(others)
        }
    }
}

fn slice(devices: &[Device], owner: &SliceOwner, generation: i64) -> ResourceSlice {
    ResourceSlice {
        metadata: ObjectMeta {
            generate_name: Some(format!("{}-{DRIVER}-", owner.node)),
            owner_references: Some(vec![OwnerReference {
                api_version: "v1".into(),
                kind: "Node".into(),
                name: owner.node.clone(),
                uid: owner.node_uid.clone(),
                controller: Some(true),
                block_owner_deletion: None,
            }]),
            ..ObjectMeta::default()
        },
        spec: ResourceSliceSpec {
            driver: DRIVER.into(),
            node_name: Some(owner.node.clone()),
            pool: ResourcePool { name: owner.node.clone(), generation, resource_slice_count: 1 },
            devices: Some(devices.to_vec()),
            ..ResourceSliceSpec::default()
        },
    }
}

#[cfg(test)]
mod tests;
