//! The costs of offloads and restores on a machine. The defaults were measured on an H200
//! (`docs/figures.md`). To measure another machine, run the part `calibration` of the GPU kit
//! (`cargo xtask gpu-kit`). It writes a file for each engine. The file replaces that engine's
//! defaults.
//!
//! With every engine, an offload costs the sum of its steps. The cost of a step is computed from
//! the measured costs of the engines (`copy.offload` is an offload with the engine `copy`):
//!
//! ```text
//! copy out                              copy.offload
//! checkpoint of a copied-out process    full.offload - copy.offload
//! checkpoint of all memory              checkpoint.offload
//! restore, context on the GPU           copy.restore
//! restore, copied and checkpointed      full.restore, at least copy.restore
//! restore, checkpointed                 checkpoint.restore
//! ```

use std::path::Path;

use affinode_core::{Millis, policy::Engine};
use serde::{Deserialize, Serialize};

use super::SimulationError;

/// Fixed time and speed of the offloads and restores of one engine.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct EngineCosts {
    /// Time that an offload of any size takes in addition to the transfer, in milliseconds.
    pub offload_fixed_ms: u64,
    /// Speed of an offload, in bytes per second.
    pub offload_bytes_per_second: f64,
    /// Time that a restore of any size takes in addition to the transfer, in milliseconds.
    pub restore_fixed_ms: u64,
    /// Speed of a restore, in bytes per second.
    pub restore_bytes_per_second: f64,
}

impl EngineCosts {
    /// Duration of an offload of this many bytes, in milliseconds.
    #[must_use]
    pub fn offload_ms(&self, bytes: u64) -> Millis {
        self.offload_fixed_ms + (bytes as f64 / self.offload_bytes_per_second * 1000.0) as u64
    }

    /// Duration of a restore of this many bytes, in milliseconds.
    #[must_use]
    pub fn restore_ms(&self, bytes: u64) -> Millis {
        self.restore_fixed_ms + (bytes as f64 / self.restore_bytes_per_second * 1000.0) as u64
    }
}

/// The costs of offloads and restores with each engine, and the cost of starting a program again.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Calibration {
    /// Costs of the engine `checkpoint`: the driver's checkpoint of all memory.
    pub checkpoint: EngineCosts,
    /// Costs of the engine `copy`: the library copies the memory, and the CUDA context stays on the
    /// GPU.
    pub copy: EngineCosts,
    /// Costs of the engine `full`: the library copies the memory, and then the driver checkpoints
    /// the CUDA context.
    pub full: EngineCosts,
    /// VRAM that stays on the GPU after a copy out, in bytes. It is the CUDA context of a process
    /// without its local memory (the stacks of the GPU's threads).
    pub context_bytes: u64,
    /// Time that the start of a program takes in addition to loading its weights, in milliseconds.
    /// Used for the policy that ends processes and starts them again.
    pub reload_fixed_ms: u64,
    /// Speed at which a program loads its weights again, in bytes per second.
    pub reload_bytes_per_second: f64,
    /// Speed at which content moves from the host pool to disk, in bytes per second.
    pub disk_write_bytes_per_second: f64,
    /// Speed at which a restore reads content from disk, in bytes per second.
    pub disk_read_bytes_per_second: f64,
}

impl Default for Calibration {
    /// Returns costs measured on an H200 (driver 580.159). Each cost is a straight line through the
    /// medians of two measured sizes: 1 GiB, and a torch program of 24.2 GiB. The speeds of the disk
    /// were measured with 8 GiB on the virtual disk of that machine. The time of program starts is
    /// an assumption.
    fn default() -> Calibration {
        Calibration {
            checkpoint: EngineCosts {
                offload_fixed_ms: 430,
                offload_bytes_per_second: 2.65e9,
                restore_fixed_ms: 320,
                restore_bytes_per_second: 7.73e9,
            },
            copy: EngineCosts {
                offload_fixed_ms: 4,
                offload_bytes_per_second: 5.45e10,
                restore_fixed_ms: 2,
                restore_bytes_per_second: 5.53e10,
            },
            full: EngineCosts {
                offload_fixed_ms: 336,
                offload_bytes_per_second: 2.81e10,
                restore_fixed_ms: 210,
                restore_bytes_per_second: 8.65e10,
            },
            // A value between the two measured contexts: 267 MiB of a plain process, 405 MiB of
            // torch.
            context_bytes: 336 << 20,
            reload_fixed_ms: 15_000,
            reload_bytes_per_second: 2.0e9,
            disk_write_bytes_per_second: 3.56e8,
            disk_read_bytes_per_second: 1.07e9,
        }
    }
}

/// An engine for which a calibration can be measured.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum CalibratedEngine {
    Checkpoint,
    Copy,
    Full,
}

/// The content of a calibration file. A missing value keeps its default.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct CalibrationFile {
    engine: Option<CalibratedEngine>,
    offload_fixed_ms: Option<u64>,
    offload_bytes_per_second: Option<f64>,
    restore_fixed_ms: Option<u64>,
    restore_bytes_per_second: Option<f64>,
    context_bytes: Option<u64>,
    reload_fixed_ms: Option<u64>,
    reload_bytes_per_second: Option<f64>,
    disk_write_bytes_per_second: Option<f64>,
    disk_read_bytes_per_second: Option<f64>,
}

impl CalibrationFile {
    fn read(path: &Path, shown: &str) -> Result<CalibrationFile, SimulationError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| SimulationError::Read { path: shown.to_owned(), source })?;
        let bad = |what: String| SimulationError::Calibration { path: shown.to_owned(), what };
        if path.extension().is_some_and(|ending| ending == "json") {
            return serde_json::from_str(&text).map_err(|e| bad(e.to_string()));
        }
        use figment::providers::{Format, Toml};
        figment::Figment::from(Toml::string(&text)).extract().map_err(|e| bad(e.to_string()))
    }

    /// Replaces those values in `costs` that the file contains.
    fn apply(&self, costs: &mut EngineCosts) {
        fn set<T>(value: Option<T>, place: &mut T) {
            if let Some(value) = value {
                *place = value;
            }
        }
        set(self.offload_fixed_ms, &mut costs.offload_fixed_ms);
        set(self.offload_bytes_per_second, &mut costs.offload_bytes_per_second);
        set(self.restore_fixed_ms, &mut costs.restore_fixed_ms);
        set(self.restore_bytes_per_second, &mut costs.restore_bytes_per_second);
    }

    /// Whether the file contains a value that belongs to one engine.
    fn has_engine_costs(&self) -> bool {
        self.offload_fixed_ms.or(self.restore_fixed_ms).is_some()
            || self.offload_bytes_per_second.or(self.restore_bytes_per_second).is_some()
    }
}

impl Calibration {
    /// Reads a calibration file, and returns these costs with the values of the file in place of
    /// the old ones. The file is TOML, or JSON if its name ends with `.json`.
    ///
    /// # Errors
    /// The file cannot be read or parsed, or it has costs of an engine but does not name the
    /// engine.
    pub fn read(mut self, path: &Path) -> Result<Calibration, SimulationError> {
        let shown = path.display().to_string();
        let file = CalibrationFile::read(path, &shown)?;
        let bad = |what: &str| {
            Err(SimulationError::Calibration { path: shown.clone(), what: what.into() })
        };
        match file.engine {
            Some(CalibratedEngine::Checkpoint) => file.apply(&mut self.checkpoint),
            Some(CalibratedEngine::Copy) => file.apply(&mut self.copy),
            Some(CalibratedEngine::Full) => file.apply(&mut self.full),
            None if file.has_engine_costs() => {
                return bad(
                    "the measured engine is missing: add engine = \"checkpoint\", \"copy\" or \
                     \"full\"",
                );
            }
            None => {}
        }
        self.context_bytes = file.context_bytes.unwrap_or(self.context_bytes);
        self.reload_fixed_ms = file.reload_fixed_ms.unwrap_or(self.reload_fixed_ms);
        self.reload_bytes_per_second =
            file.reload_bytes_per_second.unwrap_or(self.reload_bytes_per_second);
        self.disk_write_bytes_per_second =
            file.disk_write_bytes_per_second.unwrap_or(self.disk_write_bytes_per_second);
        self.disk_read_bytes_per_second =
            file.disk_read_bytes_per_second.unwrap_or(self.disk_read_bytes_per_second);
        let engines = [self.checkpoint, self.copy, self.full];
        let speeds = engines
            .iter()
            .flat_map(|costs| [costs.offload_bytes_per_second, costs.restore_bytes_per_second]);
        let valid = |speed: f64| speed.is_finite() && speed >= 1e6;
        let others = [
            self.reload_bytes_per_second,
            self.disk_write_bytes_per_second,
            self.disk_read_bytes_per_second,
        ];
        if !speeds.chain(others).all(valid) {
            return bad("a speed is invalid; accepted: 1e6 bytes per second or more");
        }
        Ok(self)
    }

    /// Duration of the driver's checkpoint of a process whose memory is already copied out, in
    /// milliseconds. `bytes` is the size of the copied memory. The staging buffer of the process
    /// stays registered, which makes the checkpoint slower.
    #[must_use]
    pub fn context_checkpoint_ms(&self, bytes: u64) -> Millis {
        self.full.offload_ms(bytes).saturating_sub(self.copy.offload_ms(bytes))
    }

    /// Duration of the restore of a CUDA context and of `bytes` copied bytes, in milliseconds. The
    /// context and the bytes are restored at the same time, so this is at least the duration of the
    /// copy.
    #[must_use]
    pub fn full_restore_ms(&self, bytes: u64) -> Millis {
        self.full.restore_ms(bytes).max(self.copy.restore_ms(bytes))
    }

    /// Time to move content from the host pool to disk, in milliseconds.
    #[must_use]
    pub fn disk_write_ms(&self, bytes: u64) -> Millis {
        (bytes as f64 / self.disk_write_bytes_per_second * 1000.0) as u64
    }

    /// Time by which a restore takes longer because content is on disk, in milliseconds.
    #[must_use]
    pub fn disk_read_ms(&self, bytes: u64) -> Millis {
        (bytes as f64 / self.disk_read_bytes_per_second * 1000.0) as u64
    }

    /// Duration of an offload of an idle container with this engine plus the duration of the
    /// restore, in milliseconds. The context is not checkpointed with the engines `copy` and
    /// `auto`, because no other container needs its VRAM.
    #[must_use]
    pub fn cycle_ms(&self, engine: Engine, bytes: u64) -> Millis {
        match engine {
            Engine::Checkpoint => {
                self.checkpoint.offload_ms(bytes) + self.checkpoint.restore_ms(bytes)
            }
            Engine::Full => self.full.offload_ms(bytes) + self.full_restore_ms(bytes),
            Engine::Copy | Engine::Auto => {
                self.copy.offload_ms(bytes) + self.copy.restore_ms(bytes)
            }
        }
    }

    /// Returns costs for a policy that ends processes and starts them again on the same machine.
    /// The costs of the end of a process replace those of the driver's checkpoint. The costs of a
    /// program start replace those of the restore.
    #[must_use]
    pub fn kill_and_reload(self) -> Calibration {
        let checkpoint = EngineCosts {
            offload_fixed_ms: 100,
            offload_bytes_per_second: 1e15,
            restore_fixed_ms: self.reload_fixed_ms,
            restore_bytes_per_second: self.reload_bytes_per_second,
        };
        Calibration { checkpoint, ..self }
    }
}

#[cfg(test)]
mod tests;
