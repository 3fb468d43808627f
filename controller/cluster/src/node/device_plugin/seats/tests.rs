use super::*;
use crate::node::device_plugin::fake_kubelet::{health, reading, seat_list};

fn found(gpu: &GpuNames) -> Result<String, LookupError> {
    Ok(format!("nvidia.com/gpu={}", gpu.device))
}

fn seats(known: &KnownGpus, factor: &str) -> SeatList {
    known.seats(factor.parse().unwrap(), true, found)
}

#[test]
fn only_exact_identities_name_a_seat() {
    let list = seat_list(&[("GPU-a", 2), ("GPU-b", 1)]);
    assert_eq!(list.find("GPU-a::1"), Some((0, 1)));
    assert_eq!(list.find("GPU-b::0"), Some((1, 0)));
    for other in ["GPU-a::2", "GPU-b::1", "GPU-a::01", "GPU-a::+1", "GPU-a", "gpu-a::0", "::0", ""]
    {
        assert_eq!(list.find(other), None, "{other:?}");
    }
}

#[test]
fn each_gpu_has_the_seats_of_its_capacity() {
    let mut known = KnownGpus::default();
    known.add(reading(&["GPU-a", "GPU-b"]));
    let devices = seats(&known, "2").devices().devices;
    let all = ["GPU-a::0", "GPU-a::1", "GPU-b::0", "GPU-b::1"].map(|id| format!("{id} Healthy"));
    assert_eq!(health(&devices), all);
    let mut tight = reading(&["GPU-a", "GPU-b"]);
    tight.host_memory_bytes = 1 << 30;
    known.add(tight);
    assert_eq!(seats(&known, "2").devices().devices.len(), 2, "1 GiB allows one seat for each GPU");
}

#[test]
fn vanished_gpu_keeps_unhealthy_seats() {
    let mut known = KnownGpus::default();
    let mut node = reading(&["GPU-a", "GPU-b"]);
    // Host memory for one more seat of each. Without the other GPU, it would be two.
    node.host_memory_bytes = 2 << 30;
    known.add(node.clone());
    let mut less = node.clone();
    less.gpus.remove(0);
    known.add(less);
    let list = seats(&known, "4");
    let faults: Vec<_> = list.gpus.iter().map(|gpu| gpu.fault.clone()).collect();
    assert_eq!(faults, [Some(GpuFault::Gone), None]);
    assert!(list.gpus.iter().all(|gpu| gpu.seats == 2), "{list:?}");
    known.add(node);
    assert!(seats(&known, "4").gpus.iter().all(|gpu| gpu.fault.is_none()), "it is back");
    known.lose_all();
    let lost = seats(&known, "4");
    assert!(lost.gpus.iter().all(|gpu| gpu.fault == Some(GpuFault::Gone)), "{lost:?}");
}

#[test]
fn mig_and_odd_names_are_not_offered() {
    let mut node = reading(&["GPU-a", "GPU::0", "", &"x".repeat(59), "GPU-e"]);
    node.gpus[4].mig = true;
    let mut known = KnownGpus::default();
    known.add(node.clone());
    assert_eq!(seats(&known, "1").gpus.len(), 1);
    node.gpus[0].mig = true;
    known.add(node);
    assert_eq!(seats(&known, "1").gpus[0].fault, Some(GpuFault::Gone));
}

#[test]
fn unserved_node_and_missing_cdi_are_faults() {
    let mut known = KnownGpus::default();
    known.add(reading(&["GPU-a"]));
    let away = known.seats("1".parse().unwrap(), false, found);
    assert_eq!(away.gpus[0].fault, Some(GpuFault::NotServed));
    assert_eq!(health(&away.devices().devices), ["GPU-a::0 Unhealthy"]);
    let missing = |_: &GpuNames| {
        Err(LookupError::NoSpec { kind: "nvidia.com/gpu".into(), folders: "/etc/cdi".into() })
    };
    let list = known.seats("1".parse().unwrap(), true, missing);
    let fault = list.gpus[0].fault.as_ref().unwrap().to_string();
    assert!(fault.contains("nvidia-ctk cdi generate"), "{fault}");
}
