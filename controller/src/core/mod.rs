//! The decisions of a node, without I/O: inputs with a time go in, effects come out.
//!
//! ```text
//!  shim, agents, NVML, people ──Input──> Node::handle ──Effect──> agents, journal, NVML, events
//! ```
//!
//! [`node::Node`] owns every container and process and is driven by one task, so
//! there is one writer and no lock. The same code runs live, in tests and in
//! simulation: time is a number that the caller passes.

pub mod container;
pub mod effect;
pub mod grant;
mod grants;
pub mod history;
pub mod idle;
pub mod input;
pub mod ledger;
mod moves;
pub mod node;
pub mod plan;
pub mod policy;
pub mod process;
pub mod processes;
pub mod queue;
mod readings;
mod reports;
mod requests;
mod room;
mod roster;
#[cfg(test)]
mod tests;
mod verdict;
pub mod victims;
pub mod view;
mod wants;
mod way_home;
mod way_out;
pub mod wishes;

pub use effect::{Effect, Record, RecordedProcess};
pub use input::{Answer, CommandId, GpuSample, Input, Request, Survey};
pub use node::{Node, Settings};

/// Milliseconds on a clock that never goes back; its zero has no meaning.
pub type Millis = u64;

/// A container's key: unique on the node, made by the shim.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key(std::sync::Arc<str>);

impl Key {
    /// Takes a key as a shim announced it.
    ///
    /// # Errors
    /// The text itself when it is not 32 lower-case hex digits: keys become file names.
    pub fn parse(text: &str) -> Result<Key, String> {
        let hex = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
        if text.len() == 32 && text.bytes().all(hex) {
            Ok(Key(text.into()))
        } else {
            Err(text.to_owned())
        }
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(&self.0)
    }
}

/// The controller's number for a CUDA process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ProcessId(pub u64);

/// VRAM on one device.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct DeviceBytes {
    /// The device's UUID as NVML has it.
    pub uuid: String,
    /// Bytes.
    pub bytes: u64,
}

/// Adds up needs per device.
#[must_use]
pub fn merge_needs<'a>(needs: impl IntoIterator<Item = &'a DeviceBytes>) -> Vec<DeviceBytes> {
    let mut sum: std::collections::BTreeMap<&str, u64> = std::collections::BTreeMap::new();
    for need in needs {
        let bytes = sum.entry(&need.uuid).or_default();
        *bytes = bytes.saturating_add(need.bytes);
    }
    sum.into_iter().map(|(uuid, bytes)| DeviceBytes { uuid: uuid.to_owned(), bytes }).collect()
}
