//! The costs of moves on a machine. The GPU bench writes them to a file; the defaults were measured
//! on an H200.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::SimulationError;
use crate::core::Millis;

/// Fixed time and speed of each kind of move.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Calibration {
    /// Fixed time of an offload, in milliseconds.
    pub offload_fixed_ms: u64,
    /// Speed of an offload.
    pub offload_bytes_per_second: f64,
    /// Fixed time of a restore, in milliseconds.
    pub restore_fixed_ms: u64,
    /// Speed of a restore.
    pub restore_bytes_per_second: f64,
    /// Fixed time of starting a program again, for the comparison with kill and reload.
    pub reload_fixed_ms: u64,
    /// Speed at which a program loads its weights again.
    pub reload_bytes_per_second: f64,
}

impl Default for Calibration {
    fn default() -> Calibration {
        Calibration {
            offload_fixed_ms: 400,
            offload_bytes_per_second: 1.9e9,
            restore_fixed_ms: 200,
            restore_bytes_per_second: 5.8e9,
            reload_fixed_ms: 15_000,
            reload_bytes_per_second: 2.0e9,
        }
    }
}

impl Calibration {
    /// Reads a file: TOML, or JSON if its name ends with `.json`.
    ///
    /// # Errors
    /// The file cannot be read or parsed.
    pub fn read(path: &Path) -> Result<Calibration, SimulationError> {
        let shown = path.display().to_string();
        let text = std::fs::read_to_string(path)
            .map_err(|source| SimulationError::Read { path: shown.clone(), source })?;
        let bad = |what: String| SimulationError::Calibration { path: shown.clone(), what };
        let read: Calibration = if path.extension().is_some_and(|ending| ending == "json") {
            serde_json::from_str(&text).map_err(|e| bad(e.to_string()))?
        } else {
            use figment::providers::{Format, Toml};
            figment::Figment::from(Toml::string(&text)).extract().map_err(|e| bad(e.to_string()))?
        };
        let speeds = [
            read.offload_bytes_per_second,
            read.restore_bytes_per_second,
            read.reload_bytes_per_second,
        ];
        if speeds.iter().any(|speed| !(speed.is_finite() && *speed >= 1e6)) {
            return Err(bad("speeds are in bytes per second, 1e6 and more".into()));
        }
        Ok(read)
    }

    /// Duration of an offload of this many bytes.
    #[must_use]
    pub fn offload_ms(&self, bytes: u64) -> Millis {
        self.offload_fixed_ms + (bytes as f64 / self.offload_bytes_per_second * 1000.0) as u64
    }

    /// Duration of a restore of this many bytes.
    #[must_use]
    pub fn restore_ms(&self, bytes: u64) -> Millis {
        self.restore_fixed_ms + (bytes as f64 / self.restore_bytes_per_second * 1000.0) as u64
    }

    /// The costs on the same machine if a process is ended and started again instead of moved.
    #[must_use]
    pub fn kill_and_reload(self) -> Calibration {
        Calibration {
            offload_fixed_ms: 100,
            offload_bytes_per_second: 1e15,
            restore_fixed_ms: self.reload_fixed_ms,
            restore_bytes_per_second: self.reload_bytes_per_second,
            ..self
        }
    }
}
