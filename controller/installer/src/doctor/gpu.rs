//! Checks of NVML, the driver and the GPUs.

use std::path::{Path, PathBuf};

use affinode_controller::inventory::nvml::has_memory_limits;
use nvml_wrapper::{Device, Nvml, error::NvmlError};

use super::{CheckGroup, DoctorCheck, containerd};

/// First driver release that has the checkpoint functions.
const MIN_DRIVER: u32 = 570;

/// Values that the checks of NVML, the driver and the GPUs examine.
#[derive(Clone, Debug)]
pub struct GpuFacts {
    /// Name or path of the NVML library.
    pub library: PathBuf,
    /// Driver version and GPUs, or the reason why they cannot be read.
    pub seen: Result<SeenGpus, String>,
    /// Whether the daemon of CUDA's Multi-Process Service (MPS) is running.
    pub mps: bool,
}

/// NVML's report about the GPUs.
#[derive(Clone, Debug, Default)]
pub struct SeenGpus {
    /// Version of the driver, such as `580.159.04`.
    pub driver: String,
    /// The GPUs in order of their index.
    pub gpus: Vec<GpuCheck>,
}

/// One GPU as NVML reports it.
#[derive(Clone, Debug, Default)]
pub struct GpuCheck {
    /// Product name of the GPU.
    pub name: String,
    /// Total VRAM in bytes.
    pub vram_bytes: u64,
    /// VRAM in use, in bytes.
    pub vram_used_bytes: u64,
    /// Whether persistence mode is on, which keeps the driver loaded while no process uses the GPU.
    /// `None`: unknown.
    pub persistent: Option<bool>,
    /// Whether the GPU is in MIG mode.
    pub mig: bool,
}

impl GpuFacts {
    /// Reads the values for the checks of the GPUs through NVML, and searches for the daemon of
    /// MPS.
    #[must_use]
    pub fn gather(library: &Path) -> GpuFacts {
        let seen = look(library).map_err(|error| error.to_string());
        GpuFacts {
            library: library.into(),
            seen,
            mps: containerd::process_runs(&["nvidia-cuda-mps"]),
        }
    }

    /// Returns the VRAM in use on all GPUs, in bytes.
    #[must_use]
    pub fn vram_used_bytes(&self) -> u64 {
        let gpus = self.seen.as_ref().map(|seen| seen.gpus.as_slice()).unwrap_or_default();
        gpus.iter().map(|gpu| gpu.vram_used_bytes).sum()
    }
}

fn look(library: &Path) -> Result<SeenGpus, NvmlError> {
    let nvml = Nvml::builder().lib_path(library.as_os_str()).init()?;
    let gpus = (0..nvml.device_count()?).map(|index| gpu(&nvml.device_by_index(index)?));
    Ok(SeenGpus { driver: nvml.sys_driver_version()?, gpus: gpus.collect::<Result<_, _>>()? })
}

fn gpu(device: &Device<'_>) -> Result<GpuCheck, NvmlError> {
    let memory = device.memory_info()?;
    Ok(GpuCheck {
        name: device.name()?,
        vram_bytes: memory.total,
        vram_used_bytes: memory.total.saturating_sub(memory.free),
        persistent: device.is_in_persistent_mode().ok(),
        // `nvmlDeviceGetMigMode` returns NOT_SUPPORTED on GPUs without MIG.
        mig: device.mig_mode().is_ok_and(|mode| mode.current != 0),
    })
}

/// Returns the checks of NVML, the driver and the GPUs.
#[must_use]
pub fn judge(facts: &GpuFacts) -> Vec<DoctorCheck> {
    let mut group = CheckGroup::new("GPU");
    match &facts.seen {
        Ok(seen) => judge_seen(&mut group, seen, &facts.library),
        Err(why) => group.bad(
            "NVML",
            format!("cannot load {}: {why}", facts.library.display()),
            format!(
                "install the NVIDIA driver, version {MIN_DRIVER} or newer, and check that nvidia-smi works. If the driver is installed under another root folder, set driver.root in the configuration"
            ),
        ),
    }
    if facts.mps {
        let hint = "the driver cannot checkpoint clients of MPS, so their contexts stay on the GPU, and \
                    the engine checkpoint does not offload them: if that is too much VRAM, stop the MPS \
                    daemon (echo quit | nvidia-cuda-mps-control) and start the programs again";
        group.warning("MPS", "the MPS daemon runs", hint);
    }
    group.checks
}

fn judge_seen(group: &mut CheckGroup, seen: &SeenGpus, library: &Path) {
    let major = seen.driver.split('.').next().and_then(|major| major.parse::<u32>().ok());
    if major.is_some_and(|major| major >= MIN_DRIVER) {
        group.good("driver", format!("{} ({})", seen.driver, library.display()));
    } else {
        group.bad(
            "driver",
            format!("driver {} cannot checkpoint processes", seen.driver),
            format!("install driver {MIN_DRIVER} or newer"),
        );
    }
    let limits = match has_memory_limits(&seen.driver) {
        true => "enforced by the library, and with cgroup v2 by the driver too",
        false => "enforced by the library",
    };
    group.good("VRAM limits", limits);
    if seen.gpus.is_empty() {
        group.bad(
            "devices",
            "NVML lists no GPU",
            "find the cause with nvidia-smi and dmesg | grep NVRM",
        );
        return;
    }
    for gpu in &seen.gpus {
        let simulated =
            if gpu.name.contains("Simulated") { ", simulated: no real GPU" } else { "" };
        group.good("device", format!("{}, {} MiB{simulated}", gpu.name, gpu.vram_bytes >> 20));
    }
    let indexes = |wanted: fn(&GpuCheck) -> bool| {
        let found = seen.gpus.iter().enumerate().filter(|(_, gpu)| wanted(gpu));
        found.map(|(index, _)| index.to_string()).collect::<Vec<_>>().join(", ")
    };
    let off = indexes(|gpu| gpu.persistent == Some(false));
    if off.is_empty() {
        group.good("persistence mode", "on");
    } else {
        group.warning(
            "persistence mode",
            format!("persistence mode is off on GPU {off}"),
            "start nvidia-persistenced, or run nvidia-smi -pm 1: otherwise the driver is unloaded \
             when no process uses the GPU, and the next process waits until it is loaded again",
        );
    }
    let cut = indexes(|gpu| gpu.mig);
    if !cut.is_empty() {
        let hint = "NVML does not report the free VRAM of MIG instances, so containers on them are not \
             offloaded: turn MIG off with nvidia-smi -mig 0";
        group.warning("MIG", format!("MIG is on for GPU {cut}"), hint);
    }
}

#[cfg(test)]
mod tests {
    use super::{super::CheckVerdict, *};

    fn facts(driver: &str, gpu: GpuCheck) -> GpuFacts {
        let seen = SeenGpus { driver: driver.into(), gpus: vec![gpu] };
        GpuFacts { library: "libnvidia-ml.so.1".into(), seen: Ok(seen), mps: false }
    }

    fn healthy() -> GpuCheck {
        GpuCheck { name: "NVIDIA H200".into(), persistent: Some(true), ..GpuCheck::default() }
    }

    fn verdict(checks: &[DoctorCheck], name: &str) -> CheckVerdict {
        checks.iter().find(|check| check.name == name).unwrap().verdict
    }

    #[test]
    fn a_simulated_gpu_passes_and_is_named() {
        let checks = judge(&facts("580.159.04", healthy()));
        assert!(checks.iter().all(|check| check.verdict == CheckVerdict::Good), "{checks:?}");
        let simulated = GpuCheck { name: "Affinode Simulated GPU".into(), ..healthy() };
        let checks = judge(&facts("580.0.0", simulated));
        assert!(checks.iter().any(|check| check.found.contains("no real GPU")), "{checks:?}");
    }

    #[test]
    fn driver_615_enforces_vram_limits_too() {
        for (driver, found) in [("580.1", false), ("615.10", true)] {
            let checks = judge(&facts(driver, healthy()));
            let check = checks.iter().find(|check| check.name == "VRAM limits").unwrap();
            assert_eq!(check.found.contains("driver"), found, "{driver}: {}", check.found);
        }
    }

    #[test]
    fn an_old_or_missing_driver_fails() {
        assert_eq!(verdict(&judge(&facts("565.57.01", healthy())), "driver"), CheckVerdict::Bad);
        assert_eq!(verdict(&judge(&facts("new", healthy())), "driver"), CheckVerdict::Bad);
        let none = GpuFacts { seen: Err("no such file".into()), ..facts("", healthy()) };
        assert_eq!(verdict(&judge(&none), "NVML"), CheckVerdict::Bad);
        let empty =
            GpuFacts { seen: Ok(SeenGpus { driver: "580.1".into(), gpus: vec![] }), ..none };
        assert_eq!(verdict(&judge(&empty), "devices"), CheckVerdict::Bad);
    }

    #[test]
    fn mps_mig_and_no_persistence_are_warnings() {
        let gpu = GpuCheck { persistent: Some(false), mig: true, ..healthy() };
        let checks = judge(&GpuFacts { mps: true, ..facts("580.1", gpu) });
        for name in ["persistence mode", "MIG", "MPS"] {
            assert_eq!(verdict(&checks, name), CheckVerdict::Warning, "{name}");
        }
    }
}
