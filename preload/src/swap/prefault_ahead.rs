//! Prefaults host memory for the next offload while the process is resident. The agent makes the
//! pages of the staging pool present, and a copier (a process that copies VRAM for others)
//! registers these pages with the driver. The copier can then copy out as soon as an offload is
//! ordered.
//!
//! ```text
//! NOTHING ──prepare──> FILLING_PAGES ──all pages are present──> TOLD ──the copier sends Ready──> READY
//! ^                     │                                        │                                │
//! └──── ended, out of memory, connection to the copier closed, pages were freed ──────────────────┘
//! ```
//!
//! No offload waits for the prefault. If an offload begins before READY, the process copies the
//! memory itself, and uses the pages that are present.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use affinode_proto::wire::ProcessFlags;

use super::allocations::MemoryPlace;
use super::copy::{assign, is_copied_out, update_kept_counter};
use super::prefault::{PREFAULT, StagingPlace};
use super::staging::StagingPool;
use super::{
    SWAP, copier_restore, host_pressure, is_in_use, prefault_host_pool, with_pool,
    with_pool_if_free,
};
use crate::{fds, process};

const NOTHING: u32 = 0;
const FILLING_PAGES: u32 = 1;
const TOLD: u32 = 2;
const READY: u32 = 3;

/// State and size of the prefault for the next offload. An all-zero value is the state NOTHING.
/// Only the agent uses it.
#[repr(C)]
pub struct PrefaultJob {
    state: AtomicU32,
    bytes: AtomicU64,
}

impl PrefaultJob {
    pub const fn none() -> PrefaultJob {
        PrefaultJob { state: AtomicU32::new(NOTHING), bytes: AtomicU64::new(0) }
    }

    fn is(&self, state: u32) -> bool {
        self.state.load(Ordering::Relaxed) == state
    }

    fn set(&self, state: u32) {
        self.state.store(state, Ordering::Relaxed);
    }
}

/// Starts or ends the prefault of host memory for the next offload. It can start only if the agent
/// has a copier's socket.
pub fn prepare(on: bool) {
    if !is_in_use() {
        return;
    }
    if !on {
        with_pool(StagingPool::end);
        copier_restore::hang_up();
    } else if SWAP.ahead.is(NOTHING) && begin().is_none() {
        copier_restore::hang_up();
    }
}

/// Ends the prefault of host memory in any of its states. Does nothing if there is no prefault.
pub fn end_preparation() {
    if is_on() {
        prepare(false);
    }
}

fn begin() -> Option<()> {
    fds::COPIER.get()?;
    if is_copied_out() || prefault_host_pool::is_on() {
        return None;
    }
    let bytes = with_pool(|pool| {
        let (bytes, context) = assign().filter(|(bytes, _)| *bytes > 0)?;
        let of_use = copier_restore::summary(MemoryPlace::Device).is_some();
        process::page()?.note(ProcessFlags::NO_COPIER, !of_use);
        of_use.then_some(())?;
        let missing = (bytes as u64).saturating_sub(pool.kept_own_bytes());
        (!host_pressure::would_be_near(missing) && pool.begin(bytes, context, StagingPlace::Own))
            .then_some(bytes)
    })?;
    SWAP.ahead.bytes.store(bytes as u64, Ordering::Relaxed);
    SWAP.ahead.set(FILLING_PAGES);
    Some(())
}

/// Executes the next step of the prefault. True: the caller must call this function again soon.
pub fn go_on() -> bool {
    if !SWAP.ahead.is(FILLING_PAGES) {
        return false;
    }
    if PREFAULT.is_busy() {
        // The application may have used host memory that was free when the prefault began.
        if host_pressure::is_near() {
            PREFAULT.stop();
        }
        return true;
    }
    let bytes = SWAP.ahead.bytes.load(Ordering::Relaxed);
    let tell = |pool: &mut StagingPool| {
        pool.end();
        let there = pool.is_resident(bytes as usize);
        (there && copier_restore::announce_prefault(pool, bytes).is_some(), pool.kept_bytes())
    };
    let Some((told, kept_bytes)) = with_pool_if_free(tell) else {
        return true;
    };
    if told {
        SWAP.ahead.set(TOLD);
    } else {
        copier_restore::hang_up();
    }
    update_kept_counter(kept_bytes);
    false
}

/// Whether memory is prefaulted for the next offload, or is being prefaulted.
pub fn is_on() -> bool {
    !SWAP.ahead.is(NOTHING)
}

/// Whether the agent has sent the file of the staging pool to the copier.
pub fn is_told() -> bool {
    SWAP.ahead.is(TOLD) || SWAP.ahead.is(READY)
}

/// Stops a prefault that is not complete yet, because the caller is about to use the staging pool.
pub fn stop(pool: &mut StagingPool) {
    if SWAP.ahead.is(FILLING_PAGES) {
        pool.end();
        SWAP.ahead.set(NOTHING);
    }
}

/// Whether the copier is ready to copy out, and the prefaulted memory suffices for this many bytes.
pub fn is_ready(bytes: u64) -> bool {
    if SWAP.ahead.is(TOLD) && copier_restore::has_said_ready() {
        SWAP.ahead.set(READY);
    }
    SWAP.ahead.is(READY) && bytes <= SWAP.ahead.bytes.load(Ordering::Relaxed)
}

/// Records that the prefault has ended, because the connection to the copier was closed.
pub fn is_over() {
    if is_in_use() {
        SWAP.ahead.set(NOTHING);
    }
}

/// Closes the connection to a copier that has the file of the staging pool. Must be called before
/// pages of the pool are freed, because the pages that the copier has registered then no longer
/// belong to the pool.
pub fn is_spoilt() {
    if is_told() {
        copier_restore::hang_up();
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Sets the state as if a prefault of this size had been announced to a copier.
    pub fn told(bytes: u64) {
        SWAP.ahead.bytes.store(bytes, Ordering::Relaxed);
        SWAP.ahead.set(TOLD);
    }

    /// Sets the state as if a prefault of this size were in progress.
    pub fn filling(bytes: u64) {
        SWAP.ahead.bytes.store(bytes, Ordering::Relaxed);
        SWAP.ahead.set(FILLING_PAGES);
    }

    /// Sets the state as if no prefault had been announced.
    pub fn told_nothing() {
        SWAP.ahead.set(NOTHING);
    }
}
