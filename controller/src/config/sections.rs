//! Configuration sections `[timing]`, `[memory]`, `[driver]`, `[nvml]`, `[copier]` and `[log]`.

use std::path::PathBuf;

use affinode_core::Millis;
use serde::Deserialize;

use super::{ConfigError, duration};

/// Maximum of `memory.disk_max_mib`: a pebibyte.
const MAX_DISK_MIB: u64 = 1 << 30;

/// Section `[timing]`: intervals and deadlines of the controller.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TimingSection {
    /// Interval at which the controller reads the counters of processes, in milliseconds.
    #[serde(deserialize_with = "duration")]
    pub sample_interval: Millis,
    /// Maximum time that an offload waits for CUDA calls in progress to return, in milliseconds.
    #[serde(deserialize_with = "duration")]
    pub close_deadline: Millis,
    /// Maximum time that the driver waits for running kernels when it locks a process, in
    /// milliseconds.
    #[serde(deserialize_with = "duration")]
    pub lock_timeout: Millis,
}

/// Section `[memory]`: limits of host memory.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MemorySection {
    /// Host memory that the driver needs for an offloaded process in addition to the size of its
    /// VRAM, in MiB (measured: 530 MiB).
    pub driver_overhead_mib: u64,
    /// Host memory that an offload must leave free on the node, in MiB. `None` means a sixteenth of
    /// the node's memory, but at least 1 GiB.
    pub node_reserve_mib: Option<u64>,
    /// Maximum size of the host pool, in percent of the node's memory. 0: the node has no host pool.
    pub host_pool_percent: u64,
    /// Name of the memory cgroup that is charged for the host pool.
    pub host_pool_cgroup: String,
    /// Folder for the disk files of containers that are offloaded for long. Empty: their content
    /// stays in host memory.
    pub disk_folder: PathBuf,
    /// Maximum size of all disk files, in MiB.
    pub disk_max_mib: u64,
}

/// The folder for disk files of offloaded containers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskFolder {
    /// Absolute path of the folder.
    pub path: PathBuf,
    /// Maximum size of all disk files, in bytes.
    pub max_bytes: u64,
}

/// Section `[driver]`: where the NVIDIA driver is installed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DriverSection {
    /// Root folder of the driver's installation. If empty, the host's root is searched first, then
    /// the folders that Kubernetes operators and node images are known to use.
    pub root: PathBuf,
}

/// Section `[nvml]`: the location of NVML's library.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NvmlSection {
    /// Name or path of the library of NVML.
    pub library: String,
}

/// Section `[copier]`: copiers, the processes that copy GPU memory for other processes.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CopierSection {
    /// Whether the controller starts copiers.
    pub enabled: bool,
    /// Name or path of the CUDA driver's library, which copiers load.
    pub library: String,
}

/// Section `[log]`: level and format of the controller's log.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LogSection {
    /// Filter of log messages, in the syntax of the crate `tracing`: error, warn, info, debug, or
    /// one level per module.
    pub level: String,
    /// Format of the log: text, json or journald.
    pub format: LogFormat,
}

/// Format of the controller's log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Plain text lines for people.
    Text,
    /// One JSON object per line.
    Json,
    /// Entries of systemd's journal, with a field for each value.
    Journald,
}

impl Default for TimingSection {
    fn default() -> TimingSection {
        TimingSection { sample_interval: 500, close_deadline: 1_000, lock_timeout: 5_000 }
    }
}

impl MemorySection {
    /// Returns the configured memory reserve of the node in bytes, or `None` if it is not
    /// configured.
    #[must_use]
    pub fn node_reserve_bytes(&self) -> Option<u64> {
        self.node_reserve_mib.map(|mib| mib << 20)
    }

    /// Returns the maximum size of the host pool in bytes, for a node with `total_bytes` of memory.
    #[must_use]
    pub fn host_pool_bytes(&self, total_bytes: u64) -> u64 {
        total_bytes / 100 * self.host_pool_percent
    }

    /// Returns the folder for disk files. `None`: content of offloaded containers stays in host memory.
    #[must_use]
    pub fn disk(&self) -> Option<DiskFolder> {
        let path = self.disk_folder.clone();
        let max_bytes = self.disk_max_mib << 20;
        (!path.as_os_str().is_empty()).then_some(DiskFolder { path, max_bytes })
    }

    pub(super) fn check(&self) -> Result<(), ConfigError> {
        self.check_disk()?;
        if self.host_pool_percent > 90 {
            return Err(ConfigError::Bad(
                "memory.host_pool_percent: out of range; accepted: 0 to 90".into(),
            ));
        }
        let name = &self.host_pool_cgroup;
        let is_allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if name.is_empty() || name.starts_with('.') || !name.chars().all(is_allowed) {
            return Err(ConfigError::Bad(
                "memory.host_pool_cgroup: invalid name; accepted: letters, digits, '-', '_' and \
                 '.', but no '.' at the start"
                    .into(),
            ));
        }
        Ok(())
    }

    fn check_disk(&self) -> Result<(), ConfigError> {
        let is_off = self.disk_folder.as_os_str().is_empty();
        if !is_off && !self.disk_folder.is_absolute() {
            return Err(ConfigError::Bad(
                "memory.disk_folder: not an absolute path; accepted: an absolute path, or \"\" for \
                 no disk"
                    .into(),
            ));
        }
        if !(1..=MAX_DISK_MIB).contains(&self.disk_max_mib) {
            return Err(ConfigError::Bad(
                "memory.disk_max_mib: out of range; accepted: 1 to 1073741824 (1 PiB)".into(),
            ));
        }
        Ok(())
    }
}

impl Default for MemorySection {
    fn default() -> MemorySection {
        MemorySection {
            driver_overhead_mib: 1024,
            node_reserve_mib: None,
            host_pool_percent: 50,
            host_pool_cgroup: "affinode-host-pool".into(),
            disk_folder: PathBuf::new(),
            disk_max_mib: 102_400,
        }
    }
}

impl Default for NvmlSection {
    fn default() -> NvmlSection {
        NvmlSection { library: "libnvidia-ml.so.1".into() }
    }
}

impl Default for CopierSection {
    fn default() -> CopierSection {
        CopierSection { enabled: true, library: "libcuda.so.1".into() }
    }
}

impl Default for LogSection {
    fn default() -> LogSection {
        LogSection { level: "info".into(), format: LogFormat::Text }
    }
}
