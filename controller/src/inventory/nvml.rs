//! Reads GPUs through NVML. The library is opened when it is first needed, and again after a
//! failure. A driver that is loaded or reloaded later is therefore found.

use std::{
    collections::BTreeMap,
    ffi::CStr,
    time::{Duration, Instant},
};

use affinode_core::{
    GpuSample, Millis,
    input::{GpuFigures, Work},
};
use nvml_wrapper::{
    Nvml, enum_wrappers::device::TemperatureSensor, enums::device::UsedGpuMemory, error::NvmlError,
    struct_wrappers::device::ProcessUtilizationSample,
};

use crate::{driver_library::DriverLibrary, sys::memory_limits::MemoryLimits};

/// Minimum time between two attempts to open NVML's library.
const AGAIN: Duration = Duration::from_secs(5);

/// Maximum age at which a sample counts as recent use of a GPU, in microseconds. NVML takes a
/// sample at least once a second.
const RECENT_US: u64 = 1_200_000;

/// First driver release that enforces VRAM limits of cgroups.
const MEMORY_LIMITS_DRIVER: u32 = 615;

/// Reason why the driver enforces no VRAM limit of a cgroup.
#[derive(Debug, thiserror::Error)]
pub enum MemoryLimitError {
    /// The driver enforces no VRAM limits of cgroups.
    #[error("the driver enforces no VRAM limits of its own")]
    TooOld,
    /// NVML cannot be used.
    #[error("{0}")]
    Nvml(String),
    /// NVML refuses the limit.
    #[error("NVML refuses it for the cgroup {cgroup} on GPU {uuid}")]
    Refused {
        /// Folder of the cgroup.
        cgroup: String,
        /// UUID of the GPU.
        uuid: String,
        /// Error that NVML returned.
        #[source]
        source: NvmlError,
    },
}

/// Returns whether a driver of this version enforces VRAM limits of cgroups, such as `615.10`.
#[must_use]
pub fn has_memory_limits(driver_version: &str) -> bool {
    let major = driver_version.split('.').next().and_then(|major| major.parse().ok());
    major.is_some_and(|major: u32| major >= MEMORY_LIMITS_DRIVER)
}

/// NVML's library, opened as soon as it is available.
#[derive(Debug)]
pub struct NvmlDevices {
    library: DriverLibrary,
    nvml: Option<Nvml>,
    /// NVML's function that limits the VRAM of a cgroup, found when the library was opened. `None`:
    /// the driver is too old.
    memory_limits: Option<MemoryLimits>,
    failed: Option<(Instant, String)>,
    known: KnownDevices,
}

impl NvmlDevices {
    /// Creates a reader that knows where the library is. Does not open the library yet.
    #[must_use]
    pub fn new(library: DriverLibrary) -> NvmlDevices {
        let known = KnownDevices::default();
        NvmlDevices { library, nvml: None, memory_limits: None, failed: None, known }
    }

    /// Reads every GPU. Includes its processes and utilization if `whole` is true. The sample of a
    /// GPU that cannot be read, for example because it has fallen off the bus, has the error.
    ///
    /// # Errors
    /// NVML or all GPUs cannot be read. The text has the reason.
    pub fn read(&mut self, whole: bool) -> Result<Vec<GpuSample>, String> {
        let readings = self.attempt(|nvml| {
            read_each(nvml.device_count()?, |index| read_device(nvml, index, whole))
        })?;
        Ok(self.known.samples(readings))
    }

    /// Reads which processes used a GPU recently. `now_us` is the time in microseconds since 1970.
    /// A GPU whose utilization cannot be read (lost, MIG, no permission, not supported) has no
    /// samples.
    ///
    /// # Errors
    /// NVML or all GPUs cannot be read. The text has the reason.
    pub fn read_work(&mut self, now_us: u64) -> Result<Vec<Work>, String> {
        let read = |nvml: &Nvml, index| {
            let device = nvml.device_by_index(index)?;
            let uuid = device.uuid()?;
            let samples = device.process_utilization_stats(now_us.saturating_sub(RECENT_US));
            let samples = samples.unwrap_or_default();
            let work = samples.iter().filter_map(|sample| work_of(sample, &uuid, now_us));
            Ok(work.collect::<Vec<Work>>())
        };
        let readings =
            self.attempt(|nvml| read_each(nvml.device_count()?, |index| read(nvml, index)))?;
        Ok(readings.into_iter().flat_map(Result::unwrap_or_default).collect())
    }

    /// Checks whether the driver enforces VRAM limits of cgroups.
    ///
    /// # Errors
    /// [`MemoryLimitError`]: it does not, or NVML cannot be used.
    pub fn check_memory_limits(&mut self) -> Result<(), MemoryLimitError> {
        self.attempt(|_| Ok(())).map_err(MemoryLimitError::Nvml)?;
        if self.memory_limits.is_some() { Ok(()) } else { Err(MemoryLimitError::TooOld) }
    }

    /// Sets the maximum VRAM of a cgroup on a GPU, in bytes. `None` removes the limit.
    ///
    /// # Errors
    /// [`MemoryLimitError`]: the driver enforces no such limits, or refuses this one.
    pub fn limit_memory(
        &mut self,
        uuid: &str,
        cgroup: &CStr,
        bytes: Option<u64>,
    ) -> Result<(), MemoryLimitError> {
        self.check_memory_limits()?;
        // A refused limit must not close NVML for the readings, so this is no part of `attempt`.
        let (Some(nvml), Some(limits)) = (&self.nvml, &self.memory_limits) else {
            return Err(MemoryLimitError::TooOld);
        };
        let set = nvml.device_by_uuid(uuid).and_then(|gpu| limits.set(&gpu, cgroup, bytes));
        set.map_err(|source| match source {
            NvmlError::FunctionNotFound => MemoryLimitError::TooOld,
            source => {
                let cgroup = cgroup.to_string_lossy().into_owned();
                MemoryLimitError::Refused { cgroup, uuid: uuid.to_owned(), source }
            }
        })
    }

    fn attempt<T>(&mut self, ask: impl FnOnce(&Nvml) -> Result<T, NvmlError>) -> Result<T, String> {
        if let Some((when, why)) = &self.failed
            && when.elapsed() < AGAIN
        {
            return Err(why.clone());
        }
        match self.opened().and_then(ask) {
            Ok(answer) => {
                self.failed = None;
                Ok(answer)
            }
            Err(error) => {
                let why =
                    format!("NVML ({}) cannot be used: {error}", self.library.path().display());
                (self.nvml, self.memory_limits) = (None, None);
                self.failed = Some((Instant::now(), why.clone()));
                Err(why)
            }
        }
    }

    fn opened(&mut self) -> Result<&Nvml, NvmlError> {
        if self.nvml.is_none() {
            let path = self.library.path();
            let nvml = Nvml::builder().lib_path(path.as_os_str()).init()?;
            let is_new = nvml.sys_driver_version().is_ok_and(|version| has_memory_limits(&version));
            self.memory_limits = if is_new { MemoryLimits::find(&path) } else { None };
            self.nvml = Some(nvml);
        }
        self.nvml.as_ref().ok_or(NvmlError::Uninitialized)
    }
}

/// Reads each of `count` GPUs. One lost GPU must not prevent the readings of the others.
///
/// # Errors
/// No GPU can be read. NVML itself is then probably at fault, so it is opened again.
fn read_each<T>(
    count: u32,
    read: impl FnMut(u32) -> Result<T, NvmlError>,
) -> Result<Vec<Result<T, NvmlError>>, NvmlError> {
    let mut readings: Vec<_> = (0..count).map(read).collect();
    match readings.iter().any(Result::is_ok) {
        false if count > 0 => Err(readings.remove(0).err().unwrap_or(NvmlError::Unknown)),
        _ => Ok(readings),
    }
}

/// What the earlier readings showed. NVML does not return the UUID of a lost GPU.
#[derive(Debug, Default)]
struct KnownDevices {
    /// UUID of each GPU by its index.
    uuids: BTreeMap<u32, String>,
    /// Error of each GPU that the last reading could not read, by its index.
    errors: BTreeMap<u32, String>,
}

impl KnownDevices {
    /// Returns a sample for each reading, in the order of the indexes. Logs a GPU that cannot be
    /// read once, and not at each reading.
    fn samples(&mut self, readings: Vec<Result<GpuSample, NvmlError>>) -> Vec<GpuSample> {
        let read = readings.iter().flatten();
        self.uuids.extend(read.map(|gpu| (gpu.index, gpu.uuid.clone())));
        let is_read: Vec<String> = readings.iter().flatten().map(|gpu| gpu.uuid.clone()).collect();
        let samples: Vec<GpuSample> = (0..)
            .zip(readings)
            .map(|(index, reading)| {
                reading.unwrap_or_else(|error| {
                    // The indexes may have changed since the UUID was read.
                    let uuid = self.uuids.get(&index).filter(|uuid| !is_read.contains(uuid));
                    unreadable(index, uuid.cloned().unwrap_or_default(), &error)
                })
            })
            .collect();
        self.log(&samples);
        samples
    }

    fn log(&mut self, samples: &[GpuSample]) {
        for gpu in samples {
            let before = match &gpu.error {
                Some(error) => self.errors.insert(gpu.index, error.clone()),
                None => self.errors.remove(&gpu.index),
            };
            match (&gpu.error, before) {
                (Some(error), before) if before.as_ref() != Some(error) => {
                    tracing::error!("gpu {}: containers on it are not moved: {error}", gpu.index);
                }
                (None, Some(_)) => tracing::info!("gpu {}: NVML can read it again", gpu.index),
                _ => {}
            }
        }
    }
}

/// Returns the sample of a GPU that cannot be read.
fn unreadable(index: u32, uuid: String, error: &NvmlError) -> GpuSample {
    let named = if uuid.is_empty() { String::new() } else { format!(" ({uuid})") };
    let why = format!(
        "NVML cannot read GPU {index}{named}: {error}; look for Xid errors of this GPU in the \
         kernel's log"
    );
    GpuSample { index, uuid, error: Some(why), ..GpuSample::default() }
}

/// Converts a utilization sample of NVML into the work of its process. Returns `None` if the sample
/// is empty or old, because NVML can return such samples.
fn work_of(sample: &ProcessUtilizationSample, uuid: &str, now_us: u64) -> Option<Work> {
    let shares = [sample.sm_util, sample.mem_util, sample.enc_util, sample.dec_util];
    let percent = shares.into_iter().max().filter(|most| (1..=100).contains(most))?;
    // A timestamp ahead of this machine's clock would count as recent until the clock reaches it.
    let is_ahead = sample.timestamp > now_us.saturating_add(RECENT_US);
    let age_us = now_us.saturating_sub(sample.timestamp);
    let age_ms: Millis = (age_us <= RECENT_US && !is_ahead).then_some(age_us / 1_000)?;
    Some(Work { uuid: uuid.to_owned(), pid: sample.pid, percent, age_ms })
}

fn read_device(nvml: &Nvml, index: u32, whole: bool) -> Result<GpuSample, NvmlError> {
    let device = nvml.device_by_index(index)?;
    let memory = device.memory_info()?;
    let mut sample = GpuSample {
        index,
        uuid: device.uuid()?,
        minor: device.minor_number().ok(),
        // `nvmlDeviceGetMigMode` returns NOT_SUPPORTED on GPUs without MIG.
        mig: device.mig_mode().is_ok_and(|mode| mode.current != 0),
        total_bytes: memory.total,
        // NVML's `used` is not taken, because memory that the driver reserves for itself is neither
        // in `used` nor in `free`.
        used_bytes: memory.total.saturating_sub(memory.free),
        ..GpuSample::default()
    };
    if whole {
        sample.name = device.name()?;
        let rates = device.utilization_rates().ok();
        sample.utilization_percent = rates.as_ref().map_or(0, |rates| rates.gpu);
        sample.figures = GpuFigures {
            reserved_bytes: memory.reserved,
            gpu_percent: rates.as_ref().map(|rates| rates.gpu),
            memory_percent: rates.as_ref().map(|rates| rates.memory),
            temperature_c: device.temperature(TemperatureSensor::Gpu).ok(),
            power_mw: device.power_usage().ok(),
        };
        for process in device.running_compute_processes()? {
            let bytes = match process.used_gpu_memory {
                UsedGpuMemory::Used(bytes) => bytes,
                UsedGpuMemory::Unavailable => 0,
            };
            sample.processes.push((process.pid, bytes));
        }
    }
    Ok(sample)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_need_driver_615() {
        for (version, has_limits) in
            [("615.10", true), ("620.5.1", true), ("580.159.04", false), ("615", true), ("", false)]
        {
            assert_eq!(has_memory_limits(version), has_limits, "{version}");
        }
    }

    fn sample(index: u32) -> GpuSample {
        GpuSample { index, uuid: format!("GPU-{index}"), ..GpuSample::default() }
    }

    fn read_with_lost(known: &mut KnownDevices, lost: &[u32]) -> Vec<GpuSample> {
        let read = |index| match lost.contains(&index) {
            true => Err(NvmlError::GpuLost),
            false => Ok(sample(index)),
        };
        known.samples(read_each(3, read).unwrap())
    }

    #[test]
    fn lost_gpu_does_not_hide_the_others() {
        let mut known = KnownDevices::default();
        // The UUID is unknown until the GPU was read once.
        let gpus = read_with_lost(&mut known, &[1]);
        assert_eq!((gpus[0].clone(), gpus[2].clone()), (sample(0), sample(2)));
        assert_eq!((gpus[1].index, gpus[1].uuid.as_str()), (1, ""));
        assert_eq!(read_with_lost(&mut known, &[]), [sample(0), sample(1), sample(2)]);
        let gpus = read_with_lost(&mut known, &[1]);
        assert_eq!((gpus[0].clone(), gpus[2].clone()), (sample(0), sample(2)));
        assert_eq!(gpus[1].uuid, "GPU-1");
        let error = gpus[1].error.as_ref().unwrap();
        assert!(error.contains("GPU 1 (GPU-1)") && error.contains("fell off the bus"), "{error}");
    }

    #[test]
    fn error_of_all_gpus_is_an_error_of_nvml() {
        let lost = |_| Err::<GpuSample, _>(NvmlError::GpuLost);
        assert!(matches!(read_each(2, lost), Err(NvmlError::GpuLost)));
        assert!(read_each(0, lost).unwrap().is_empty());
    }

    #[test]
    fn only_recent_samples_count_as_work() {
        const NOW: u64 = 1_000_000_000;
        let sample = |sm_util, mem_util, timestamp| {
            let (enc_util, dec_util) = (0, 0);
            let sample = ProcessUtilizationSample {
                pid: 7,
                timestamp,
                sm_util,
                mem_util,
                enc_util,
                dec_util,
            };
            work_of(&sample, "GPU-1", NOW)
        };
        let work = Work { uuid: "GPU-1".into(), pid: 7, percent: 40, age_ms: 200 };
        assert_eq!(sample(40, 10, NOW - 200_000), Some(work));
        // A memory copy uses no multiprocessor, but must count as work.
        assert_eq!(sample(0, 10, NOW).map(|work| work.percent), Some(10));
        assert_eq!(sample(0, 0, NOW), None);
        assert_eq!(sample(40, 0, NOW - 2_000_000), None);
        assert_eq!(sample(40, 0, 0), None);
        assert_eq!(sample(40, 0, NOW + 10_000_000), None);
        assert_eq!(sample(u32::MAX, 0, NOW), None);
    }
}
