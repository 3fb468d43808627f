use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
use serde_json::json;

use super::*;

const UUID: &str = "GPU-8B2e6a5c-0000-0000-0000-000000000001";

fn gpu(index: u32) -> GpuFacts {
    GpuFacts {
        index,
        uuid: format!("{}{index}", &UUID[..UUID.len() - 1]),
        name: "NVIDIA H200".into(),
        vram_bytes: 1024 << 20,
        brand: Some("Nvidia".into()),
        architecture: Some("Hopper".into()),
        compute_capability: Some("9.0".into()),
        ..GpuFacts::default()
    }
}

fn node(gpus: Vec<GpuFacts>) -> NodeGpus {
    NodeGpus {
        unreadable: Vec::new(),
        driver_version: "580.159.04".into(),
        cuda_driver_version: Some("13.0".into()),
        host_memory_bytes: 64 << 30,
        gpus,
    }
}

fn offered(gpus: Vec<GpuFacts>) -> Vec<Device> {
    devices(&node(gpus), "2".parse().unwrap(), &GpuConditions::default())
}

fn conditions_of_full(gpu: &GpuFacts) -> GpuConditions {
    GpuConditions { full: [gpu.uuid.clone()].into(), ..GpuConditions::default() }
}

fn owner() -> SliceOwner {
    SliceOwner { node: "one".into(), node_uid: "u".into() }
}

/// Returns a slice in the form in which the API server would return it.
fn published(devices: &[Device], name: &str, generation: i64) -> ResourceSlice {
    let mut slice = slice(devices, &owner(), generation);
    slice.metadata.name = Some(name.into());
    slice.metadata.resource_version = Some("7".into());
    slice
}

#[test]
fn device_has_all_that_the_driver_reports() {
    let device = serde_json::to_value(&offered(vec![gpu(1)])[0]).unwrap();
    let text = |value: &str| json!({"string": value});
    let version = |value: &str| json!({"version": value});
    let expected = json!({
        "name": "gpu-8b2e6a5c-0000-0000-0000-000000000001",
        "allowMultipleAllocations": true,
        "attributes": {
            "type": text("gpu"), "uuid": text(UUID), "index": {"int": 1},
            "load": text("idle"),
            "productName": text("NVIDIA H200"), "brand": text("Nvidia"),
            "architecture": text("Hopper"), "cudaComputeCapability": version("9.0.0"),
            "driverVersion": version("580.159.4"), "cudaDriverVersion": version("13.0.0"),
        },
        "capacity": {"memory": {"value": "2Gi", "requestPolicy": {
            "default": "1Gi",
            "validRange": {"min": "1Mi", "max": "1Gi", "step": "1Mi"},
        }}},
    });
    assert_eq!(device, expected);
}

/// A change of a GPU's class of load must change only the attribute of this GPU.
#[test]
fn load_of_a_gpu_is_an_attribute() {
    let loads = [(gpu(1).uuid, GpuLoad::Busy)].into();
    let conditions = GpuConditions { loads, ..GpuConditions::default() };
    let idle = offered(vec![gpu(0), gpu(1)]);
    let mut devices = devices(&node(vec![gpu(0), gpu(1)]), "2".parse().unwrap(), &conditions);
    assert_eq!(devices[0], idle[0]);
    let found = published(&idle, "s", 3);
    let SliceChange::Replace(slice) = change(&[found], Some(&devices), &owner()) else {
        panic!("the slice is not replaced")
    };
    assert_eq!(slice.spec.pool.generation, 4);
    let load = devices[1].attributes.as_mut().unwrap().insert(
        "load".into(),
        DeviceAttribute { string: Some("idle".into()), ..DeviceAttribute::default() },
    );
    assert_eq!(load.unwrap().string.as_deref(), Some("busy"));
    assert_eq!(devices[1], idle[1]);
}

/// An agent that has just started does not know the conditions of the GPUs.
#[test]
fn unknown_conditions_stay_as_published() {
    let loads = [(gpu(0).uuid, GpuLoad::Busy)].into();
    let conditions = GpuConditions { loads, ..conditions_of_full(&gpu(0)) };
    let before = devices(&node(vec![gpu(0)]), "2".parse().unwrap(), &conditions);
    let mut found = published(&before, "s", 3);
    let stored = &mut found.spec.devices.as_mut().unwrap()[0];
    stored.taints.as_mut().unwrap()[0].time_added = Some(Time(Timestamp::UNIX_EPOCH));
    let mut wanted = offered(vec![gpu(0), gpu(1)]);
    let new = wanted[1].clone();
    keep_conditions(&mut wanted, &[found]);
    assert_eq!(wanted, [before[0].clone(), new]);
}

#[test]
fn quantities_have_the_servers_form() {
    let text = |mib: u64| mebibytes(mib << 20).0;
    let all = [1, 1023, 1024, 1536, 80 * 1024, 2 << 20].map(text);
    assert_eq!(all, ["1Mi", "1023Mi", "1Gi", "1536Mi", "80Gi", "2Ti"]);
}

#[test]
fn unknown_properties_have_no_attribute() {
    let bare = GpuFacts { brand: None, architecture: None, compute_capability: None, ..gpu(0) };
    let mut node = node(vec![bare]);
    node.cuda_driver_version = None;
    node.driver_version = "unknown".into();
    let device = devices(&node, "1".parse().unwrap(), &GpuConditions::default()).remove(0);
    let names: Vec<String> = device.attributes.unwrap().into_keys().collect();
    assert_eq!(names, ["index", "load", "productName", "type", "uuid"]);
}

#[test]
fn gpus_that_cannot_be_shared_are_left_out() {
    let mig = GpuFacts { mig: true, ..gpu(1) };
    let odd = GpuFacts { uuid: "GPU 2".into(), ..gpu(2) };
    let names: Vec<_> = offered(vec![gpu(0), mig, odd]).into_iter().map(|one| one.name).collect();
    assert_eq!(names, ["gpu-8b2e6a5c-0000-0000-0000-000000000000"]);
}

#[test]
fn unchanged_devices_change_nothing() {
    let devices = offered(vec![gpu(0)]);
    let there = [published(&devices, "a", 4)];
    assert_eq!(change(&there, Some(&devices), &owner()), SliceChange::Keep);
    assert_eq!(change(&[], None, &owner()), SliceChange::Keep);
    assert_eq!(change(&[], Some(&[]), &owner()), SliceChange::Keep);
}

#[test]
fn first_slice_belongs_to_the_node() {
    let devices = offered(vec![gpu(0)]);
    let SliceChange::Create(made) = change(&[], Some(&devices), &owner()) else { panic!() };
    assert_eq!(made.metadata.generate_name.as_deref(), Some("one-gpu.affinode.io-"));
    let owners = made.metadata.owner_references.unwrap();
    assert_eq!((owners[0].kind.as_str(), owners[0].uid.as_str()), ("Node", "u"));
    let pool = ResourcePool { name: "one".into(), generation: 1, resource_slice_count: 1 };
    assert_eq!((made.spec.driver.as_str(), made.spec.pool), (DRIVER, pool));
}

#[test]
fn changed_devices_get_the_next_generation() {
    let there = [published(&offered(vec![gpu(0)]), "a", 4)];
    let devices = offered(vec![gpu(0), gpu(1)]);
    let SliceChange::Replace(fresh) = change(&there, Some(&devices), &owner()) else { panic!() };
    assert_eq!(fresh.spec.pool.generation, 5);
    assert_eq!(fresh.spec.devices.as_ref().map(Vec::len), Some(2));
    assert_eq!(fresh.metadata, there[0].metadata, "name and version of the stored slice");
}

#[test]
fn slices_are_deleted_with_their_devices() {
    let devices = offered(vec![gpu(0)]);
    let there = [published(&devices, "a", 1), published(&devices, "b", 2)];
    let all = SliceChange::Delete(vec!["a".into(), "b".into()]);
    assert_eq!(change(&there, None, &owner()), all);
    assert_eq!(change(&there, Some(&[]), &owner()), all);
    let older = SliceChange::Delete(vec!["a".into()]);
    assert_eq!(change(&there, Some(&devices), &owner()), older, "the newest slice stays");
}

#[test]
fn full_gpu_has_a_taint() {
    let full = conditions_of_full(&gpu(1));
    let tainted = devices(&node(vec![gpu(0), gpu(1)]), "2".parse().unwrap(), &full);
    let taints = tainted.iter().map(|device| device.taints.clone());
    assert_eq!(taints.collect::<Vec<_>>(), [None, Some(vec![full_taint()])]);
    assert_eq!(without_taints(&tainted), offered(vec![gpu(0), gpu(1)]));
}

#[test]
fn time_of_a_taint_changes_nothing() {
    let full = conditions_of_full(&gpu(0));
    let tainted = devices(&node(vec![gpu(0)]), "2".parse().unwrap(), &full);
    let mut stored = published(&tainted, "a", 4);
    let time = serde_json::from_value(json!("2026-11-26T21:00:00Z")).unwrap();
    let found = stored.spec.devices.as_mut().unwrap();
    found[0].taints.as_mut().unwrap()[0].time_added = Some(time);
    let stored = [stored];
    assert_eq!(change(&stored, Some(&tainted), &owner()), SliceChange::Keep);
    let untainted = offered(vec![gpu(0)]);
    let SliceChange::Replace(fresh) = change(&stored, Some(&untainted), &owner()) else { panic!() };
    assert_eq!(fresh.spec.devices, Some(untainted));
}
