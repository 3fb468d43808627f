//! Prefaults memory of the host pool for the next copy out while the process is resident. The host
//! pool allocates the pages, and the agent registers them with the driver. The copy out then does
//! neither, so that it is as fast as the bus.
//!
//! ```text
//! NOTHING ──PrefaultHostPool──> FILLING ──all pages are present and registered──> READY
//!    ^                             │                                               │
//!    │                             v                                               │
//!    └──no helper runs────────── ENDING <── FreeHostMemory, connection ended, memory is short
//!                                   a copy out uses the pages: NOTHING
//! ```
//!
//! A copy out does not wait until the prefault is complete, only for the chunks that are being
//! allocated. It uses the pages that are present, and requests the others.
//! In the state READY the pages stay registered. In the state NOTHING the agent frees them.

use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use affinode_proto::wire::ProcessFlags;

use super::copy::{assign, is_copied_out, relax_captures, update_kept_counter};
use super::prefault::{CHUNK_BYTES, PREFAULT, StagingPlace};
use super::staging::{StagingPool, TrimResult};
use super::{
    SWAP, host_pool, host_pressure, is_in_use, prefault_ahead, with_pool, with_pool_if_free,
};
use crate::process;

const NOTHING: u32 = 0;
const FILLING: u32 = 1;
const READY: u32 = 2;
const ENDING: u32 = 3;

/// State of the prefault, and the first chunk that is not registered yet. An all-zero value is the
/// state NOTHING. Only the agent uses it.
#[repr(C)]
pub struct HostPoolPrefault {
    state: AtomicU32,
    next_chunk: AtomicUsize,
}

impl HostPoolPrefault {
    pub const fn none() -> HostPoolPrefault {
        HostPoolPrefault { state: AtomicU32::new(NOTHING), next_chunk: AtomicUsize::new(0) }
    }

    fn is(&self, state: u32) -> bool {
        self.state.load(Ordering::Relaxed) == state
    }

    /// Sets the state, here and in the process's counters.
    fn set(&self, state: u32) {
        self.state.store(state, Ordering::Relaxed);
        if let Some(page) = process::page() {
            let is_on = matches!(state, FILLING | READY);
            page.note(ProcessFlags::PREFAULTED_HOST_POOL, is_on);
        }
    }
}

/// When the agent has to call [`go_on`] again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefaultStep {
    /// There is nothing to do.
    Over,
    /// Pages are being allocated.
    Soon,
    /// A chunk was registered, and the next one may be present.
    Now,
}

/// Starts the prefault. Does nothing if the process has another one, if a context is ending, or if
/// host memory would become short.
pub fn begin() {
    let job = &SWAP.host_pool_prefault;
    if !is_in_use() || is_copied_out() || prefault_ahead::is_on() {
        return;
    }
    if job.is(FILLING) || job.is(ENDING) {
        return;
    }
    // The host pool sends the file when the process is connected. No context could end while the lock
    // is held, so the wait comes before.
    if !host_pool::wait_for_file() {
        return;
    }
    relax_captures();
    let has_begun = with_pool_if_free(|pool| {
        let Some((bytes, context)) = assign().filter(|(bytes, _)| *bytes > 0) else {
            return false;
        };
        let missing_bytes = (bytes as u64).saturating_sub(pool.kept_host_pool_bytes());
        !host_pressure::would_be_near_in(StagingPlace::HostPool, missing_bytes)
            && pool.begin(bytes, context, StagingPlace::HostPool)
    });
    job.next_chunk.store(0, Ordering::Relaxed);
    job.set(if has_begun == Some(true) { FILLING } else { NOTHING });
}

/// Executes the next step of the prefault: registers one chunk.
pub fn go_on() -> PrefaultStep {
    let job = &SWAP.host_pool_prefault;
    if job.is(FILLING) {
        let register = |pool: &mut StagingPool| register_next(pool, &job.next_chunk);
        return match with_pool_if_free(register) {
            Some(Some(step)) => step,
            Some(None) => {
                PREFAULT.stop();
                job.set(ENDING);
                PrefaultStep::Now
            }
            None => PrefaultStep::Soon,
        };
    }
    if job.is(ENDING) {
        if PREFAULT.is_busy() {
            return PrefaultStep::Soon;
        }
        let ended = with_pool_if_free(|pool| {
            pool.end();
            pool.kept_bytes()
        });
        let Some(kept_bytes) = ended else { return PrefaultStep::Soon };
        update_kept_counter(kept_bytes);
        job.set(NOTHING);
    }
    PrefaultStep::Over
}

/// Registers the next chunk if its pages are present. `None`: the prefault cannot be completed.
fn register_next(pool: &mut StagingPool, next_chunk: &AtomicUsize) -> Option<PrefaultStep> {
    let chunk = next_chunk.load(Ordering::Relaxed);
    if chunk >= PREFAULT.chunks() {
        pool.end();
        SWAP.host_pool_prefault.set(READY);
        update_kept_counter(pool.kept_bytes());
        return Some(PrefaultStep::Over);
    }
    // The application may have used host memory that was free when the prefault began.
    if host_pressure::is_near_in(StagingPlace::HostPool) {
        return None;
    }
    // Helpers may make the chunk resident and end between the two readings.
    let was_busy = PREFAULT.is_busy();
    if PREFAULT.resident.has(chunk) {
        pool.held(chunk * CHUNK_BYTES);
        next_chunk.store(chunk + 1, Ordering::Relaxed);
        // The controller subtracts these pages from what an offload of this process needs.
        update_kept_counter(pool.kept_bytes());
        return Some(PrefaultStep::Now);
    }
    was_busy.then_some(PrefaultStep::Soon)
}

/// Whether the pages of the staging pool stay registered for the next copy out.
pub fn keeps_pages() -> bool {
    SWAP.host_pool_prefault.is(READY) && !host_pressure::is_near_in(StagingPlace::HostPool)
}

/// Ends the prefault. The agent frees the pages when no helper runs any more.
pub fn end() {
    let job = &SWAP.host_pool_prefault;
    if is_in_use() && job.is(FILLING) {
        PREFAULT.stop();
        job.set(ENDING);
    } else if is_in_use() && job.is(READY) {
        job.set(NOTHING);
    }
}

/// Whether memory of the host pool is prefaulted, or is being prefaulted.
pub fn is_on() -> bool {
    !SWAP.host_pool_prefault.is(NOTHING)
}

/// Waits until no helper of the prefault uses the connection to the host pool, which is shut down.
/// Frees the memory at a later step.
pub fn lose_connection() {
    if is_in_use() && is_on() {
        PREFAULT.end();
        SWAP.host_pool_prefault.set(NOTHING);
    }
}

/// Frees the memory of the prefault before a checkpoint that the library does not copy for. The
/// memory would not be used, and registered memory makes the checkpoint slower.
pub fn free() {
    if is_in_use() && is_on() {
        with_pool(|pool| {
            is_used_up(pool);
            while pool.free_next() == TrimResult::Part {}
        });
        update_kept_counter(0);
    }
}

/// Ends the prefault because the caller is about to use the staging pool.
pub fn is_used_up(pool: &mut StagingPool) {
    if !SWAP.host_pool_prefault.is(NOTHING) {
        pool.end();
        SWAP.host_pool_prefault.set(NOTHING);
    }
}

#[cfg(test)]
mod tests;
