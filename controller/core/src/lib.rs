//! Decides when the containers of a node are moved between VRAM and host memory, without I/O. The
//! crate receives inputs, each with a time, and returns effects.
//!
//! ```text
//!  shim, agents, NVML, operators ──Input──> Node::handle ──Effect──> agents, journal, NVML, events
//! ```
//!
//! [`node::Node`] owns the state of every container and process. One task drives it, so there is
//! one writer and no lock. The same code runs on a real node, in tests and in simulation, because
//! the caller passes the time as a number.
//!
//! ```text
//!  node
//!  └> completions, serve_queue
//!     └> restore, eviction
//!        └> registration, requests, evaluate, immediate
//!           └> offload, migration, oom_wait
//!              └> grants
//!                 └> holds, prefault, connection_prewake
//!                    └> copier_use, offload_check, measurements, prewake, pressure, hints
//!                       └> driver_limit
//!                          └> vram_limit
//!                             └> needs, output, oversubscription
//!                                └> lookup, eligibility, host_promises
//!                                   └> the data (node_state), and files that call no other file
//! ```
//!
//! A file calls only files below it.

// A decision that fits on one screen can be read at once.
#![cfg_attr(not(test), deny(clippy::too_many_lines))]

mod completions;
mod connection_prewake;
pub mod container;
pub mod container_spec;
mod copier_backoff;
mod copier_use;
pub mod copiers;
pub mod copy_watch;
mod dedup_domain;
mod disk_step;
pub mod driver_limit;
mod early_release;
pub mod effect;
mod eligibility;
mod evaluate;
pub mod event;
mod eviction;
pub mod explain;
mod gpu_uuid;
pub mod grant;
mod grants;
#[cfg(any(test, feature = "harness"))]
pub mod harness;
pub mod hints;
pub mod history;
pub mod holds;
pub mod host_memory;
mod host_pool;
mod host_promises;
mod host_relief;
pub mod idle;
mod immediate;
pub mod input;
mod kept_memory;
pub mod ledger;
mod lookup;
mod measurements;
mod migration;
mod needs;
mod no_progress;
pub mod node;
mod node_state;
mod nvml_readings;
mod offload;
mod offload_check;
mod offload_level;
mod oom_wait;
mod order_report;
mod output;
pub mod overrides;
mod oversubscription;
mod passing;
pub mod plan;
pub mod policy;
mod prefault;
mod prefault_host_pool;
pub mod pressure;
mod prewake;
pub mod process;
pub mod processes;
pub mod queue;
mod registration;
mod requests;
mod restore;
mod serve_queue;
#[cfg(test)]
mod tests;
pub mod texts;
mod turns;
pub mod victims;
pub mod view;
mod vram_limit;
pub mod window;

pub use container_spec::ContainerSpec;
pub use dedup_domain::Domain;
pub use effect::{Change, Effect, JournalStep, Record, RecordedProcess};
pub use input::{ActionResult, CommandId, GpuSample, Input, Request, Survey};
pub use node::{Node, Settings};

/// Milliseconds on a monotonic clock with an arbitrary zero. Only differences have a meaning.
pub type Millis = u64;

/// A container's key: 32 lower-case hex digits, which the shim chose. It is unique on the node.
#[derive(Clone)]
pub struct Key {
    /// The digits as a number. Keys are compared at each input, and numbers are compared faster
    /// than text.
    number: u128,
    text: [u8; 32],
}

/// Error: the text is not a key. Keys become file names, so other texts are refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid key {0:?}: expected 32 lower-case hex digits")]
pub struct InvalidKey(String);

impl Key {
    /// Parses a key that a shim announced.
    ///
    /// # Errors
    /// [`InvalidKey`]: the text is not 32 lower-case hex digits.
    pub fn parse(text: &str) -> Result<Key, InvalidKey> {
        let hex = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
        match (text.as_bytes().try_into(), u128::from_str_radix(text, 16)) {
            (Ok(digits), Ok(number)) if text.bytes().all(hex) => Ok(Key { number, text: digits }),
            _ => Err(InvalidKey(text.to_owned())),
        }
    }

    /// The 32 hex digits, for file names and output.
    #[must_use]
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.text).unwrap_or_default()
    }

    /// The last 16 hex digits as a number, for messages that name the container.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number as u64
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Key) -> bool {
        self.number == other.number
    }
}

impl Eq for Key {}

impl PartialOrd for Key {
    fn partial_cmp(&self, other: &Key) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Key {
    fn cmp(&self, other: &Key) -> std::cmp::Ordering {
        self.number.cmp(&other.number)
    }
}

impl std::hash::Hash for Key {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.number.hash(state);
    }
}

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Key").field(&self.as_str()).finish()
    }
}

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.as_str())
    }
}

/// The number by which the controller identifies a CUDA process. A process that reconnects gets a
/// new number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ProcessId(pub u64);

/// An amount of VRAM on one GPU.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct DeviceBytes {
    /// The GPU's UUID as NVML reports it.
    pub uuid: String,
    /// Amount of VRAM, in bytes.
    pub bytes: u64,
}

/// Adds up the VRAM of each GPU. The result is ordered by UUID.
#[must_use]
pub fn merge_needs<'a>(needs: impl IntoIterator<Item = &'a DeviceBytes>) -> Vec<DeviceBytes> {
    let mut sums: Vec<DeviceBytes> = Vec::new();
    for need in needs {
        match sums.binary_search_by(|sum| sum.uuid.cmp(&need.uuid)) {
            Ok(at) => sums[at].bytes = sums[at].bytes.saturating_add(need.bytes),
            Err(at) => sums.insert(at, need.clone()),
        }
    }
    sums
}
