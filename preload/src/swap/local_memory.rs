//! Frees and restores the local memory of contexts: stacks and spilled registers of the GPU's
//! threads.
//!
//! ```text
//! multiprocessors x threads of each x stack limit: 264 MiB of an idle context (H200, 1 KiB)
//! copy out, at its end:   stack limit 0      ──> the driver releases all of it
//! copy in, before others: the former limit   ──> allocated again; no VRAM: tried again later
//! ```
//!
//! Local memory has no content while no kernel runs. The stack limit of a context determines the
//! size of its local memory: 4 KiB per thread, for example, take 1056 MiB. A kernel that needs more
//! than the limit raises the limit. Measured on an H200 with driver 580.159: the change of the
//! limit takes 0.2 to 1.1 ms. Graphs that were uploaded before a change run correctly after it. On
//! a full device the change fails with `OUT_OF_MEMORY`, and the limit stays as it was. The driver's
//! checkpoint of a context without local memory takes 0.24 s instead of 0.39 s.

use core::sync::atomic::{AtomicUsize, Ordering};

use affinode_cuda_sys::{device_attribute, result};
use affinode_proto::wire::Hazards;

use super::contexts::in_context;
use super::driver::call;
use super::pending_work::{self, SLOTS};
use super::{SWAP, driver};
use crate::process;

/// `CU_LIMIT_STACK_SIZE`, the number of the limit for the bytes of local memory of each thread.
const STACK_SIZE: u32 = 0;
/// Hazards of processes in which tools or other parts of the driver use the contexts, and of clients
/// of MPS. The library does not change the stack limits of such processes.
const LEFT_ALONE: Hazards = Hazards::KEEPS_CONTEXT.without(Hazards::KEEPS_MEMORY);

/// Slot for a context whose local memory is released. In a free slot the context is 0.
struct ReleasedLimit {
    context: AtomicUsize,
    /// Stack limit of the context before the release, in bytes for each GPU thread.
    limit: AtomicUsize,
    /// VRAM that the release has freed, in bytes.
    bytes: AtomicUsize,
}

/// List of the contexts whose local memory is released. Only the agent adds contexts, while it
/// holds the lock of contexts.
pub(super) struct ReleasedLimits([ReleasedLimit; 2 * SLOTS]);

impl ReleasedLimits {
    pub(super) const fn none() -> ReleasedLimits {
        ReleasedLimits([const { ReleasedLimit::none() }; 2 * SLOTS])
    }

    fn of(&self, context: usize) -> Option<&ReleasedLimit> {
        self.0.iter().find(|slot| slot.context.load(Ordering::Acquire) == context)
    }

    fn released(&self) -> impl Iterator<Item = &ReleasedLimit> {
        self.0.iter().filter(|slot| slot.context.load(Ordering::Acquire) != 0)
    }
}

impl ReleasedLimit {
    const fn none() -> ReleasedLimit {
        let [context, limit, bytes] = [const { AtomicUsize::new(0) }; 3];
        ReleasedLimit { context, limit, bytes }
    }

    fn fill(&self, context: usize, limit: usize, bytes: usize) {
        self.limit.store(limit, Ordering::Relaxed);
        self.bytes.store(bytes, Ordering::Relaxed);
        self.context.store(context, Ordering::Release);
    }

    fn clear(&self) {
        self.context.store(0, Ordering::Release);
    }
}

/// Whether the local memory of any context is released.
pub(super) fn is_released() -> bool {
    SWAP.limits.released().next().is_some()
}

/// Bytes of VRAM that the contexts need again for their local memory at the restore.
pub fn released_bytes() -> u64 {
    SWAP.limits.released().map(|slot| slot.bytes.load(Ordering::Relaxed) as u64).sum()
}

/// Removes a context that has ended from the list of released contexts.
pub(super) fn context_ends(context: usize) {
    if let Some(slot) = SWAP.limits.of(context) {
        slot.clear();
    }
}

/// Frees the local memory of all contexts, by reducing their stack limits to 0. During the call the
/// gate must be closed, no work may be on the GPU, and no context may end. If the driver refuses to
/// change the limit of a context, this context keeps its local memory.
pub(super) fn release() {
    let alone = process::page().is_some_and(|page| page.hazards().intersects(LEFT_ALONE));
    if alone || !pending_work::are_contexts_known() || driver::ctx_set_limit().is_none() {
        return;
    }
    for context in pending_work::contexts() {
        if SWAP.limits.of(context).is_none() {
            in_context(context, || release_current(context));
        }
    }
}

fn release_current(context: usize) -> u32 {
    let limit = current_limit();
    let Some(free) = SWAP.limits.of(0).filter(|_| limit > 0) else {
        return result::SUCCESS;
    };
    let code = call!(ctx_set_limit(STACK_SIZE, 0));
    // The driver may have rounded the limit up, or refused it.
    let left = current_limit();
    if left < limit {
        free.fill(context, limit, (limit - left).saturating_mul(threads_of_device()));
    }
    code
}

/// Stack limit of the current context, in bytes for each thread. 0: unknown.
fn current_limit() -> usize {
    let mut limit = 0;
    match call!(ctx_get_limit(&raw mut limit, STACK_SIZE)) {
        result::SUCCESS => limit,
        _ => 0,
    }
}

/// Number of threads that the current context's device runs at once.
fn threads_of_device() -> usize {
    let mut device = 0;
    if call!(ctx_get_device(&raw mut device)) != result::SUCCESS {
        return 0;
    }
    let attribute = |which| {
        let mut value = 0;
        let code = call!(device_get_attribute(&raw mut value, which, device));
        if code == result::SUCCESS { usize::try_from(value).unwrap_or(0) } else { 0 }
    };
    attribute(device_attribute::MULTIPROCESSOR_COUNT)
        .saturating_mul(attribute(device_attribute::MAX_THREADS_PER_MULTIPROCESSOR))
}

/// Allocates the released local memory of all contexts again. No context may end during the call.
///
/// # Errors
/// Returns the driver's code, which is `OUT_OF_MEMORY` if VRAM is short. The local memory of the
/// remaining contexts stays released, and the call can be repeated.
pub(super) fn restore() -> Result<(), u32> {
    for slot in SWAP.limits.released() {
        let context = slot.context.load(Ordering::Acquire);
        let limit = slot.limit.load(Ordering::Relaxed);
        match in_context(context, || call!(ctx_set_limit(STACK_SIZE, limit))) {
            // If the context has ended, there is nothing to restore.
            result::SUCCESS | result::INVALID_CONTEXT | result::CONTEXT_IS_DESTROYED => {
                slot.clear()
            }
            code => return Err(code),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
