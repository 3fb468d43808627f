//! Reads the properties of a node's GPUs that do not change while the driver is loaded. Also reads
//! the size of the host memory that can hold offloaded memory. The node agent of a cluster
//! publishes these values.

use std::io;

use nvml_wrapper::{
    Device, Nvml, enum_wrappers::device::Brand, enums::device::DeviceArchitecture, error::NvmlError,
};
use serde::{Deserialize, Serialize};

use super::memory;
use crate::{config::Config, driver_library::DriverLibrary};

/// GPUs and host memory of a node, as `affinode gpus` prints them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeGpus {
    /// Version of the driver, such as `580.159.04`.
    pub driver_version: String,
    /// Highest version of CUDA that the driver supports, such as `13.0`. `None` if it is unknown.
    pub cuda_driver_version: Option<String>,
    /// Host memory of the node that can hold offloaded memory, in bytes. It is the total memory
    /// minus the reserve that offloads leave free.
    pub host_memory_bytes: u64,
    /// The GPUs that NVML can read, in order of their index.
    pub gpus: Vec<GpuFacts>,
    /// GPUs that NVML cannot read, for example because they have fallen off the bus. Each entry has
    /// the index and NVML's error.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unreadable: Vec<String>,
}

/// Properties of one GPU. A property that NVML does not report is `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuFacts {
    /// NVML's index of the GPU.
    pub index: u32,
    /// UUID of the GPU, such as `GPU-8b2e6a5c-…`.
    pub uuid: String,
    /// Product name of the GPU.
    pub name: String,
    /// Total VRAM in bytes.
    pub vram_bytes: u64,
    /// Whether the GPU is in MIG mode. Affinode does not move containers on MIG instances.
    pub mig: bool,
    /// Brand of the GPU, by the name that NVIDIA's DRA driver uses.
    pub brand: Option<String>,
    /// Architecture of the GPU, by the name that NVIDIA's DRA driver uses.
    pub architecture: Option<String>,
    /// CUDA compute capability of the GPU, such as `9.0`.
    pub compute_capability: Option<String>,
}

/// Reason why the properties of the GPUs cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum GpuFactsError {
    /// The NVIDIA driver is missing, or NVML returns an error.
    #[error("NVML ({library}) cannot be used; check that nvidia-smi works on this node")]
    Nvml {
        /// Name or path of NVML's library.
        library: String,
        /// Error that NVML returned.
        #[source]
        source: NvmlError,
    },
    /// The size of the host memory cannot be read.
    #[error("cannot read /proc/meminfo")]
    Memory(#[from] io::Error),
}

/// Reads the properties of this machine's GPUs.
///
/// # Errors
/// [`GpuFactsError`]: NVML or the size of the host memory cannot be read.
pub fn read(config: &Config) -> Result<NodeGpus, GpuFactsError> {
    let library = DriverLibrary::nvml(config).path();
    let failed = |source| GpuFactsError::Nvml { library: library.display().to_string(), source };
    let nvml = Nvml::builder().lib_path(library.as_os_str()).init().map_err(failed)?;
    let mut node = read_driver(&nvml).map_err(failed)?;
    let total_bytes = memory::total_bytes()?;
    let reserve_bytes = memory::reserve_in_force(config.memory.node_reserve_bytes())?;
    node.host_memory_bytes = total_bytes.saturating_sub(reserve_bytes);
    Ok(node)
}

fn read_driver(nvml: &Nvml) -> Result<NodeGpus, NvmlError> {
    let cuda = nvml.sys_cuda_driver_version().ok();
    let (mut gpus, mut unreadable) = (Vec::new(), Vec::new());
    for index in 0..nvml.device_count()? {
        match nvml.device_by_index(index).and_then(|device| read_gpu(&device, index)) {
            Ok(gpu) => gpus.push(gpu),
            Err(error) => unreadable.push(format!("GPU {index}: {error}")),
        }
    }
    Ok(NodeGpus {
        driver_version: nvml.sys_driver_version()?,
        // NVML reports 13.0 as 13000.
        cuda_driver_version: cuda.map(|v| format!("{}.{}", v / 1000, v % 1000 / 10)),
        host_memory_bytes: 0,
        gpus,
        unreadable,
    })
}

fn read_gpu(device: &Device<'_>, index: u32) -> Result<GpuFacts, NvmlError> {
    let capability = device.cuda_compute_capability().ok();
    Ok(GpuFacts {
        index,
        uuid: device.uuid()?,
        name: device.name()?,
        vram_bytes: device.memory_info()?.total,
        // `nvmlDeviceGetMigMode` returns NOT_SUPPORTED on GPUs without MIG.
        mig: device.mig_mode().is_ok_and(|mode| mode.current != 0),
        brand: device.brand().ok().map(|brand| brand_name(&brand)),
        architecture: device.architecture().ok().map(|known| architecture_name(&known)),
        compute_capability: capability.map(|of| format!("{}.{}", of.major, of.minor)),
    })
}

/// Returns the brand's name in NVIDIA's library go-nvlib, which NVIDIA's DRA driver uses.
fn brand_name(brand: &Brand) -> String {
    match brand {
        Brand::GRID => "Grid".into(),
        Brand::VApps | Brand::VPC | Brand::VCS | Brand::VWS | Brand::CloudGaming => {
            format!("Nvidia{brand:?}")
        }
        // The other variants have the same names there.
        _ => format!("{brand:?}"),
    }
}

fn architecture_name(architecture: &DeviceArchitecture) -> String {
    match architecture {
        DeviceArchitecture::Ada => "Ada Lovelace".into(),
        _ => format!("{architecture:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_nvidias_driver() {
        let brands = [Brand::Tesla, Brand::Nvidia, Brand::GeForceRTX, Brand::VCS, Brand::GRID];
        let names = brands.map(|brand| brand_name(&brand));
        assert_eq!(names, ["Tesla", "Nvidia", "GeForceRTX", "NvidiaVCS", "Grid"]);
        assert_eq!(architecture_name(&DeviceArchitecture::Hopper), "Hopper");
        assert_eq!(architecture_name(&DeviceArchitecture::Ada), "Ada Lovelace");
    }

    #[test]
    fn missing_driver_is_named_in_the_error() {
        let mut config = Config::default();
        config.nvml.library = "/nonexistent.so".into();
        let error = read(&config).unwrap_err().to_string();
        assert!(error.contains("/nonexistent.so") && error.contains("nvidia-smi"), "{error}");
    }
}
