//! Measures the time that the hook adds to each CUDA call in this process. The agent calls a
//! function that does nothing, with and without a stub, and computes the difference. These calls
//! are counted on a separate page, so they do not count as activity.
//!
//! The measurement takes about 20 µs, once, on the agent's thread. No call of the application reads
//! a clock for the measurement. The result is the time in a tight loop, which is the minimum that
//! the hook adds.

use core::hint::black_box;
use core::sync::atomic::Ordering;

use affinode_cuda_sys::hook::{self, Class};
use affinode_proto::wire::counters::{MAX_CALL_COST_PS, PAGE_BYTES};

use crate::counters::CounterPage;
use crate::{hook_table, libc, process, sys, thunk};

/// Number of rounds of the measurement. The fastest round is the result, because interruptions only
/// make a round slower.
const ROUNDS: u32 = 16;
const CALLS: u64 = 256;
type Nothing = extern "C" fn();

extern "C" fn nothing() {
    black_box(());
}

/// Measures the overhead and writes it to the counters, in picoseconds and at least 1. If libc has no
/// clock, the counter stays 0, which means not measured.
pub fn measure(page: &CounterPage) {
    if !process::is_fenced() {
        // Without the barrier, calls take the slow path, which this function does not measure.
        return;
    }
    let real = nothing as Nothing as usize;
    let number = hook::find(b"cuCtxSynchronize").map_or(0, |(number, _)| number);
    let Some(index) = hook_table::index_of(real, number, Class::Work) else {
        return;
    };
    let hooked = thunk::stub(index);
    // SAFETY: the stub takes what the function behind it takes: nothing.
    let hooked: Nothing = unsafe { core::mem::transmute(hooked) };
    let cost = sys::with_scratch(PAGE_BYTES, |at| {
        // SAFETY: zeroed memory of this size and alignment, used by nothing else while this
        // runs; zero is a value of every field, and stands for an open gate.
        let scratch = unsafe { &*at.cast::<CounterPage>() };
        process::with_slot(scratch, || difference_ps(hooked))
    });
    if let Some(Some(cost)) = cost {
        page.call_cost_ps.store(cost, Ordering::Relaxed);
    }
}

fn difference_ps(hooked: Nothing) -> Option<u32> {
    let round = |function: Nothing| {
        let began = libc::monotonic_ns()?;
        for _ in 0..CALLS {
            black_box(function)();
        }
        Some(libc::monotonic_ns()?.saturating_sub(began))
    };
    let (mut with, mut without) = (u64::MAX, u64::MAX);
    for _ in 0..ROUNDS {
        with = with.min(round(hooked)?);
        without = without.min(round(nothing)?);
    }
    let cost = with.saturating_sub(without).saturating_mul(1_000) / CALLS;
    u32::try_from(cost.clamp(1, MAX_CALL_COST_PS.into())).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_through_nothing_costs_nothing_more() {
        // Both measurements call the function without a stub, so the difference is noise. The test
        // checks that it contains no clock jump.
        let cost = difference_ps(nothing).unwrap();
        assert!((1..=MAX_CALL_COST_PS).contains(&cost), "{cost}");
    }
}
