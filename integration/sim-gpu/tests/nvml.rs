//! Tests of the simulated NVML with the crate that the controller uses.

#![allow(clippy::unwrap_used, reason = "a panic in a test is its failure")]

mod support;

use nvml_wrapper::Nvml;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use support::{CONTEXT, MIB, Node, products, wait_for};

/// Checks that the simulated NVML reports the daemon's state. It is the only test in this test
/// binary, because it changes the environment.
#[test]
#[allow(unsafe_code)]
fn nvml_shows_what_the_driver_knows() {
    let library = products().libraries.join("libnvidia-ml.so.1");
    let init = || Nvml::builder().lib_path(library.as_os_str()).init();
    // SAFETY: no other thread of this test binary reads the environment.
    unsafe { std::env::set_var("AFFINODE_SIM_SOCKET", "/nowhere") };
    assert!(matches!(init(), Err(NvmlError::DriverNotLoaded)));

    let node = Node::start(&["--gpus", "2", "--vram-mib", "256"]);
    // SAFETY: no other thread of this test binary reads the environment.
    unsafe { std::env::set_var("AFFINODE_SIM_SOCKET", node.socket()) };
    let faults = tempfile::tempdir().unwrap();
    // SAFETY: no other thread of this test binary reads the environment.
    unsafe { std::env::set_var("AFFINODE_SIM_NVML_FAULTS", faults.path()) };
    let nvml = init().unwrap();
    assert_eq!(nvml.device_count().unwrap(), 2);
    assert_eq!(nvml.sys_driver_version().unwrap(), "580.0-simulated");
    assert_eq!(nvml.sys_cuda_driver_version().unwrap(), 13000);

    let device = nvml.device_by_index(0).unwrap();
    let uuid = device.uuid().unwrap();
    assert!(uuid.starts_with("GPU-") && uuid.len() == 40, "{uuid}");
    assert_eq!(nvml.device_by_uuid(uuid).unwrap().index().unwrap(), 0);
    assert_eq!(nvml.device_by_index(1).unwrap().minor_number().unwrap(), 1);
    assert!(matches!(nvml.device_by_index(2), Err(NvmlError::InvalidArg)));
    assert!(device.name().unwrap().contains("Simulated"));
    assert_eq!(device.pci_info().unwrap().bus_id, "00000000:01:00.0");
    assert!(device.is_in_persistent_mode().unwrap());
    assert!(matches!(device.mig_mode(), Err(NvmlError::NotSupported)));
    let lost = faults.path().join("lost-0");
    std::fs::write(&lost, "").unwrap();
    assert!(matches!(nvml.device_by_index(0), Err(NvmlError::GpuLost)));
    assert!(matches!(device.memory_info(), Err(NvmlError::GpuLost)));
    assert!(nvml.device_by_index(1).unwrap().memory_info().is_ok());
    std::fs::remove_file(&lost).unwrap();
    let capability = device.cuda_compute_capability().unwrap();
    assert_eq!((capability.major, capability.minor), (9, 0));
    assert!(device.running_compute_processes().unwrap().is_empty());

    let mut worker = node.worker(32);
    let memory = device.memory_info().unwrap();
    assert_eq!((memory.total, memory.used), (256 * MIB, 32 * MIB + CONTEXT));
    assert_eq!(memory.free, memory.total - memory.used);
    let processes = device.running_compute_processes().unwrap();
    assert_eq!(processes.len(), 1);
    assert_eq!(processes[0].pid, worker.pid());
    assert!(
        matches!(processes[0].used_gpu_memory, UsedGpuMemory::Used(bytes) if bytes == 32 * MIB + CONTEXT)
    );
    assert!(device.running_graphics_processes().unwrap().is_empty());
    assert!(device.utilization_rates().unwrap().gpu <= 100);
    let busy = || device.process_utilization_stats(None);
    wait_for("no kernel to run", || matches!(busy(), Err(NvmlError::NotFound)));
    worker.expect("spin 600000", 0);
    wait_for("a kernel to be seen", || {
        busy().is_ok_and(|busy| busy[0].pid == worker.pid() && busy[0].sm_util > 0)
    });
    // This is the largest time stamp, so no sample is newer.
    let stale = device.process_utilization_stats(u64::MAX);
    assert!(matches!(stale, Err(NvmlError::NotFound)), "{stale:?}");
    drop(worker);
    let worker = node.worker(32);

    assert_eq!(node.checkpoint(worker.pid(), &["lock", "checkpoint"]), [0, 0]);
    assert!(device.running_compute_processes().unwrap().is_empty());
    assert_eq!(device.memory_info().unwrap().used, 0);
    nvml.shutdown().unwrap();
}
