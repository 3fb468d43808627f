//! The slow path of a hooked call: whatever is not "registered, ordinary, gate open".
//!
//! ```text
//! caller                                    closer (agent thread)
//!   inflight += 1                             gate = Closed
//!   gate?  Open ──> call ──> inflight -= 1    barrier on all threads
//!          Closed ─> inflight -= 1            every inflight 0? ──> nobody is inside,
//!                    waiters += 1, poke                             nobody can come in
//!                    sleep, start again
//!          Damaged ─> answered: memory is not what it was, nothing reaches the driver
//! ```
//!
//! A poll (`cuStreamQuery`, `cuEventQuery`) asks whether work has finished. Once the driver
//! has locked the process, which waits for all work, or holds it away, it has: the poll is
//! answered so, and nobody is woken for it. An idle framework polls.
//!
//! A call from inside a call (a callback of the driver, a signal handler) is not held:
//! the outer one is counted, so the driver is not touched before both have ended.

use core::sync::atomic::Ordering;

use affinode_cuda_sys::{
    hook::{self, Class},
    result,
};
use affinode_proto::wire::page::Gate;

use crate::calls::{self, Call};
use crate::page::Page;
use crate::process::{self, PROCESS, Place};
use crate::table::Entry;
use crate::{carry, elf, hazard, libcuda, room, sys};

/// What the thunk keeps on the stack of a call on the slow path. It knows this layout.
#[repr(C, align(16))]
pub struct Frame {
    place: Place,
    entry: *const Entry,
    /// rax of the real function.
    result: u64,
    /// rdi, rsi, rdx, rcx, r8, r9.
    pub arguments: [u64; 6],
    vectors: [[u64; 2]; 8],
    rdx: u64,
    /// What the thunk is to call.
    target: usize,
    /// Until when the call may wait for room; 0 (the thunk's) while it has not.
    waits_until_us: u64,
    /// When the call began, if it is recorded; else 0.
    began_ns: u64,
}

const _: () = {
    use core::mem::offset_of;
    assert!(offset_of!(Frame, entry) == 16);
    assert!(offset_of!(Frame, result) == 24);
    assert!(offset_of!(Frame, arguments) == 32);
    assert!(offset_of!(Frame, vectors) == 80);
    assert!(offset_of!(Frame, rdx) == 208);
    assert!(offset_of!(Frame, target) == 216);
    assert!(offset_of!(Frame, waits_until_us) == 224);
    assert!(size_of::<Frame>().is_multiple_of(16));
};

/// What the thunk is to do.
#[repr(u32)]
pub enum Way {
    /// Jump to the target.
    Pass = 0,
    /// Call the target, then [`leave`].
    Counted = 1,
    /// Call nothing; the frame has the result.
    Answered = 2,
}

/// A call comes in.
///
/// # Safety
/// Called by the thunk alone, with its frame.
pub unsafe extern "C" fn enter(frame: &mut Frame) -> Way {
    // SAFETY: stubs pass entries, which are static.
    let entry = unsafe { &*frame.entry };
    let Some(real) = entry.resolve(libcuda::function) else {
        // Only exported names come here. Some programs bring functions of these names
        // that load libcuda when they are called; they would have been called without us.
        let Some(stand_in) =
            hook::name(entry.number()).map(str::as_bytes).and_then(elf::find_function)
        else {
            // There is no libcuda.
            frame.result = result::NOT_INITIALIZED.into();
            return Way::Answered;
        };
        frame.target = stand_in;
        return Way::Pass;
    };
    frame.target = real;
    // SAFETY: the calling thread's own block.
    if unsafe { (*process::thread()).is_agent } != 0 {
        return Way::Pass;
    }
    if entry.class() == Class::Pointer && !carry::is_in_use() {
        return Way::Pass;
    }
    loop {
        let Some((place, page)) = process::place() else {
            room::abandon(&PROCESS.desk, frame.waits_until_us);
            return Way::Pass;
        };
        frame.place = place;
        if page.is_damaged() {
            room::abandon(&PROCESS.desk, frame.waits_until_us);
            frame.result = result::ECC_UNCORRECTABLE.into();
            return Way::Answered;
        }
        if try_enter(place, page, entry) {
            frame.began_ns = place.slot().map_or(0, |slot| calls::begin(page, slot));
            // Known once the gate has let it through: a first allocation waits for what the
            // controller says.
            frame.target = carry::stand_in(entry.number(), real).unwrap_or_else(|| {
                if may_take_handles(entry) {
                    carry::translate(&mut frame.arguments);
                }
                real
            });
            return Way::Counted;
        }
        match place.slot() {
            Some(slot) if entry.class() == Class::Poll => {
                if page.is_finished() {
                    slot.polls.fetch_add(1, Ordering::Relaxed);
                    frame.result = result::SUCCESS.into();
                    return Way::Answered;
                }
                page.wait_a_moment();
            }
            _ => wait(place, page, entry),
        }
    }
}

/// The call has returned. True: it is to be made again.
///
/// # Safety
/// Called by the thunk alone, with the frame that [`enter`] filled.
pub unsafe extern "C" fn leave(frame: &mut Frame) -> u32 {
    // SAFETY: as in `enter`.
    let entry = unsafe { &*frame.entry };
    let class = entry.class();
    if frame.began_ns != 0
        && let Some((slot, page)) = frame.place.slot().zip(process::page())
    {
        let (result, arguments) = (frame.result as u32, &frame.arguments);
        let call = Call { hook: entry.number(), result, arguments, began_ns: frame.began_ns };
        calls::end(page, slot, &call);
    }
    // While the call still counts, so that no gate is closed before it is known.
    if frame.result as u32 == 0 && class.is_special() {
        // SAFETY: these are the arguments of a call of this class that succeeded.
        let hazards = unsafe { hazard::of_call(class, &frame.arguments) };
        if let Some(page) = process::page()
            && !hazards.is_empty()
            && page.add_hazards(hazards)
        {
            process::poke_agent();
        }
    }
    if frame.result as u32 == result::OUT_OF_MEMORY
        && room::may_be_repeated(entry)
        && carry::make_room()
    {
        uncount(frame.place, class);
        return 1;
    }
    let desk = &PROCESS.desk;
    // SAFETY: the arguments of a call of this function; they are as the caller gave them.
    let want = unsafe { room::wanted(desk, entry, frame.result, &frame.arguments) };
    let want = want.filter(|_| !is_inside_another(frame.place));
    uncount(frame.place, class);
    room::settle(desk, want, frame.result, &mut frame.waits_until_us).into()
}

/// Whether a function that nothing stands in for may take handles of physical memory: those
/// that bind it for several devices, and those that are not known.
fn may_take_handles(entry: &Entry) -> bool {
    entry.class() == Class::Peer || entry.number() == hook::UNLISTED
}

/// Whether the call that has just returned was made from inside another one, which is
/// still counted and must not wait for room.
fn is_inside_another(place: Place) -> bool {
    // SAFETY: the calling thread's own block.
    let depth = unsafe { (*process::thread()).depth };
    let own = |slot: &crate::page::Slot| slot.owner.load(Ordering::Relaxed) != 0;
    let others = |slot: &crate::page::Slot| own(slot) && slot.inflight.load(Ordering::Relaxed) > 1;
    depth > 1 || place.slot().is_none_or(others)
}

/// Counts the call, unless the gate holds it.
fn try_enter(place: Place, page: &Page, entry: &Entry) -> bool {
    let class = entry.class();
    let Some(slot) = place.slot() else {
        return false;
    };
    let own_before = slot.inflight.fetch_add(1, Ordering::SeqCst);
    if class.is_special() {
        slot.allocating.fetch_add(1, Ordering::SeqCst);
    }
    // The depth says "an outer call is counted", also to a signal handler that comes in
    // just here: so it grows after the count, and shrinks before it.
    let thread = process::thread();
    // SAFETY: the calling thread's own block; a handler leaves it as it found it.
    let outer = unsafe {
        let outer = (*thread).depth;
        (*thread).depth = outer.wrapping_add(1);
        outer
    };
    let owned = slot.owner.load(Ordering::Relaxed) != 0;
    let nested = outer > 0 || (owned && own_before > 0);
    if !nested && holds(page, class) {
        uncount(place, class);
        return false;
    }
    match class {
        Class::Poll | Class::Pointer => &slot.polls,
        _ => &slot.calls,
    }
    .fetch_add(1, Ordering::Relaxed);
    slot.last_hook.store(entry.number(), Ordering::Relaxed);
    true
}

fn uncount(place: Place, class: Class) {
    let Some(slot) = place.slot() else {
        // Forked meanwhile: the count is the parent's, the block starts anew.
        return;
    };
    let thread = process::thread();
    // SAFETY: the calling thread's own block.
    unsafe { (*thread).depth = (*thread).depth.saturating_sub(1) };
    if class.is_special() {
        slot.allocating.fetch_sub(1, Ordering::SeqCst);
    }
    slot.inflight.fetch_sub(1, Ordering::SeqCst);
}

/// Whether the gate holds calls of this class now.
fn holds(page: &Page, class: Class) -> bool {
    let gate = page.gate.load(Ordering::SeqCst);
    gate == Gate::Closed as u32 || (gate == Gate::AllocationsHeld as u32 && class.is_special())
}

/// Sleeps until the gate lets calls of this class through. Signals are handled as ever;
/// those that end the process, end it.
fn wait(place: Place, page: &Page, entry: &Entry) {
    // Only a guard: the agent wakes all when it opens the gate.
    const LOOK_AGAIN_MS: u64 = 1_000;
    let class = entry.class();
    PROCESS.waiting_hook.store(entry.number(), Ordering::Relaxed);
    page.waiters.fetch_add(1, Ordering::SeqCst);
    let began_us = sys::now_us();
    process::poke_agent();
    while holds(page, class) && place.slot().is_some() {
        let gate = page.gate.load(Ordering::SeqCst);
        if gate != Gate::Open as u32 {
            sys::futex_wait(&page.gate, gate, LOOK_AGAIN_MS);
        }
    }
    if place.slot().is_some() {
        let held_us = sys::now_us().saturating_sub(began_us);
        page.held_us.fetch_add(held_us, Ordering::Relaxed);
        page.waiters.fetch_sub(1, Ordering::SeqCst);
    }
}
