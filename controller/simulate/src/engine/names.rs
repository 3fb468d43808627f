//! Derives the names of a trace's containers, processes and GPUs from their numbers.

use affinode_core::{Key, ProcessId};

pub(crate) fn key(n: usize) -> Key {
    match Key::parse(&format!("{n:032x}")) {
        Ok(key) => key,
        Err(text) => unreachable!("a number in this format is always a valid key: {text}"),
    }
}

/// Returns the number of a process from a key that [`key`] made.
pub(crate) fn number(key: &str) -> usize {
    usize::from_str_radix(key, 16).unwrap_or(0)
}

pub(crate) fn uuid(gpu: usize) -> String {
    format!("GPU-{gpu}")
}

pub(crate) fn id(n: usize) -> ProcessId {
    ProcessId(n as u64)
}

pub(crate) fn pid(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX).saturating_add(1)
}
