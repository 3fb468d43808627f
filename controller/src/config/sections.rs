//! The smaller sections.

use serde::Deserialize;

use super::duration;
use crate::core::Millis;

/// Intervals and deadlines.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TimingSection {
    /// How often counters are read.
    #[serde(deserialize_with = "duration")]
    pub sample_interval: Millis,
    /// How long calls in progress are waited for when a gate closes.
    #[serde(deserialize_with = "duration")]
    pub close_deadline: Millis,
    /// How long the driver may wait for work on the GPU when it locks a process.
    #[serde(deserialize_with = "duration")]
    pub lock_timeout: Millis,
}

/// Host memory.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MemorySection {
    /// What the driver needs beside the VRAM of a process, in MiB (measured: 530 MiB).
    pub driver_overhead_mib: u64,
    /// What stays free on the node after an offload, in MiB; without it a sixteenth of the node's
    /// memory, at least 1 GiB.
    pub node_reserve_mib: Option<u64>,
}

/// Where NVML is.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NvmlSection {
    /// Library name or path.
    pub library: String,
}

/// Processes that fill the memory of who comes home.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CopierSection {
    /// Whether there are any.
    pub enabled: bool,
    /// The driver's library: name or path.
    pub library: String,
}

/// The log.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LogSection {
    /// A tracing filter: error, warn, info, debug, or per module.
    pub level: String,
    /// text, json or journald.
    pub format: LogFormat,
}

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
    /// The journal of systemd, with a field for each value.
    Journald,
}

impl Default for TimingSection {
    fn default() -> TimingSection {
        TimingSection { sample_interval: 500, close_deadline: 1_000, lock_timeout: 5_000 }
    }
}

impl MemorySection {
    /// What stays free on the node, in bytes, where the operator says so.
    #[must_use]
    pub fn node_reserve_bytes(&self) -> Option<u64> {
        self.node_reserve_mib.map(|mib| mib << 20)
    }
}

impl Default for MemorySection {
    fn default() -> MemorySection {
        MemorySection { driver_overhead_mib: 1024, node_reserve_mib: None }
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
