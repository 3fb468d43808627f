//! Devices, through NVML. The library is opened when it is first needed and again
//! after a failure, so a driver that comes later, or is reloaded, is found.

use std::time::{Duration, Instant};

use nvml_wrapper::{Nvml, enums::device::UsedGpuMemory, error::NvmlError};

use crate::core::GpuSample;

/// How long a library that could not be opened is left alone.
const AGAIN: Duration = Duration::from_secs(5);

/// NVML, when it is there.
#[derive(Debug)]
pub struct Devices {
    library: String,
    nvml: Option<Nvml>,
    failed: Option<(Instant, String)>,
}

impl Devices {
    /// Names the library; opens nothing yet.
    #[must_use]
    pub fn new(library: String) -> Devices {
        Devices { library, nvml: None, failed: None }
    }

    /// Reads every device; its processes and utilisation only when `whole`.
    ///
    /// # Errors
    /// Why NVML cannot be read, for people.
    pub fn read(&mut self, whole: bool) -> Result<Vec<GpuSample>, String> {
        if let Some((when, why)) = &self.failed
            && when.elapsed() < AGAIN
        {
            return Err(why.clone());
        }
        match self.try_read(whole) {
            Ok(gpus) => {
                self.failed = None;
                Ok(gpus)
            }
            Err(error) => {
                let why = format!("NVML ({}): {error}", self.library);
                self.nvml = None;
                self.failed = Some((Instant::now(), why.clone()));
                Err(why)
            }
        }
    }

    fn try_read(&mut self, whole: bool) -> Result<Vec<GpuSample>, NvmlError> {
        let nvml = match &self.nvml {
            Some(nvml) => nvml,
            None => self.nvml.insert(Nvml::builder().lib_path(self.library.as_ref()).init()?),
        };
        (0..nvml.device_count()?).map(|index| read_device(nvml, index, whole)).collect()
    }
}

fn read_device(nvml: &Nvml, index: u32, whole: bool) -> Result<GpuSample, NvmlError> {
    let device = nvml.device_by_index(index)?;
    let memory = device.memory_info()?;
    let mut sample = GpuSample {
        index,
        uuid: device.uuid()?,
        // A device that cannot be cut answers that it does not know the question.
        mig: device.mig_mode().is_ok_and(|mode| mode.current != 0),
        total_bytes: memory.total,
        // Not `used`: what the driver keeps for itself is in neither.
        used_bytes: memory.total.saturating_sub(memory.free),
        ..GpuSample::default()
    };
    if whole {
        sample.name = device.name()?;
        sample.utilization_percent = device.utilization_rates().map_or(0, |rates| rates.gpu);
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
