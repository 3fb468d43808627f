//! The gate, at which CUDA calls wait while the process is offloaded, and the slow path of a hooked
//! call. The fast path handles only ordinary calls of a registered thread while the gate is open.
//!
//! ```text
//! caller                                    closer (agent thread)
//!   inflight += 1                             sealed = 0, gate = Closed
//!   gate?  Open ──> call ──> inflight -= 1    barrier on all threads
//!          Closed ─> inflight -= 1            every inflight 0?
//!                    wait, signal the agent   sealed = 1
//!                    start again              every inflight 0? ──> no call is inside,
//!          Closed, nested, not sealed            │                  none can come in
//!                ──> call ──> inflight -= 1      └ no: sealed = 0, wait
//!          Damaged ─> error: the content of memory is lost, nothing reaches the driver
//! ```
//!
//! A poll (`cuStreamQuery`, `cuEventQuery`) queries whether work has ended. When the driver locks
//! the process, it waits for all work. From the lock until the process is resident again, no work
//! can run, so a poll returns SUCCESS without a call into the driver. A poll does not request a
//! restore, because a framework polls even when it is idle. If the process shares events with other
//! processes, a poll of an event waits like any other call, because another process may have
//! recorded the event.
//!
//! # Calls inside calls
//!
//! A call is nested if it is made while another call of its thread is counted. Callbacks of the
//! driver make such calls, and so do signal handlers that interrupt a call. The outer call may be
//! unable to end before the nested call. So a nested call passes a closed gate until the gate is
//! sealed.
//!
//! The seal is needed because a counted outer call has not always passed the gate. A call is
//! counted first and reads the gate afterwards. A signal can arrive between these two steps, when
//! the closer has already seen every count at zero. The signal handler's nested call must then not
//! pass. A nested call therefore also checks the seal:
//!
//! - The nested call adds its own count before it reads `sealed`. The closer writes `sealed` before
//!   it reads the counts for the last time. All four accesses are sequentially consistent (the slow
//!   path counts by locked instructions), so at least one side sees the other. Either the nested
//!   call reads that the gate is sealed, and waits. Or the closer reads the nested call's count,
//!   and breaks the seal.
//! - If the outer call has passed the gate, the closer sees its count after the barrier at the
//!   latest. The count stays until the outer call ends, and the gate is not sealed before that. So
//!   the nested call passes, and the closer waits for both calls without a deadlock.
//! - If the outer call was counted but has not read the gate yet, it has not passed. It reads the
//!   gate after the signal handler, and waits there if the gate is closed.
//!
//! While allocations are paused, nested allocations are held in the same way. The closer then reads
//! only the counts of allocating calls. A nested allocation passes until the agent reports that
//! allocations are paused. From then on it waits, even if its outer call is not an allocation. The
//! fast path needs no seal, because it passes only an open gate.

use core::sync::atomic::Ordering;

use affinode_cuda_sys::{
    hook::{self, Class, Function},
    result,
};
use affinode_proto::wire::{Hazards, counters::Gate};

use crate::call_recorder::{self, CallTimer};
use crate::counters::CounterPage;
use crate::hook_table::{self, HookEntry};
use crate::oom_wait::AllocRequest;
use crate::process::{self, PROCESS, SlotLocation};
use crate::vram_limit::{Admission, LimitAttempts};
use crate::{constants, elf, exit, hazard, libcuda, oom_wait, swap, sys, tools};

/// Stack frame of one call on the slow path. The thunk (the assembly code of each hook) depends on
/// this layout.
#[repr(C, align(16))]
pub struct HookFrame {
    place: SlotLocation,
    entry: *const HookEntry,
    /// Register rax, as the real function returned it.
    result: u64,
    /// The call's register arguments: rdi, rsi, rdx, rcx, r8, r9.
    pub arguments: [u64; 6],
    vectors: [[u64; 2]; 8],
    rdx: u64,
    /// Address of the function that the thunk calls or jumps to.
    target: usize,
    /// Time at which the call's wait for free VRAM ends. 0, the initial value, means that the call
    /// has not waited yet.
    waits_until_us: u64,
    /// Start time of the call if it is recorded, else 0.
    began_ns: u64,
    /// The allocation to which the container's VRAM limit applies. `None`: the limit does not apply
    /// to this call.
    limited: Option<AllocRequest>,
    /// Bytes that this call has added to the pending bytes of the container's VRAM limit.
    pending_bytes: u64,
}

const _: () = {
    use core::mem::offset_of;
    assert!(offset_of!(HookFrame, entry) == 16);
    assert!(offset_of!(HookFrame, result) == 24);
    assert!(offset_of!(HookFrame, arguments) == 32);
    assert!(offset_of!(HookFrame, vectors) == 80);
    assert!(offset_of!(HookFrame, rdx) == 208);
    assert!(offset_of!(HookFrame, target) == 216);
    assert!(offset_of!(HookFrame, waits_until_us) == 224);
    assert!(size_of::<HookFrame>().is_multiple_of(16));
};

/// What the thunk does next with a call, after [`enter`] has returned.
#[repr(u32)]
pub enum ThunkAction {
    /// The thunk jumps to the target function, and does not call [`leave`].
    Pass = 0,
    /// The thunk calls the target function, and then [`leave`].
    Counted = 1,
    /// The thunk returns the result in the frame to the caller, without calling the function.
    Answered = 2,
}

/// Entry of a call on the slow path. Counts the call, holds it at the gate, or returns a result
/// itself.
///
/// # Safety
/// Only the thunk may call this function, with its own frame.
pub unsafe extern "C" fn enter(frame: &mut HookFrame) -> ThunkAction {
    // SAFETY: stubs pass entries, which are static.
    let entry = unsafe { &*frame.entry };
    let Some(real) = entry.resolve(libcuda::function) else {
        // This is a call of an exported name. Some programs define functions of such names
        // themselves, which load libcuda when they are called. Without this library the program
        // would have called its own function, so find and call that one.
        let Some(stand_in) =
            hook::name(entry.number()).map(str::as_bytes).and_then(elf::find_function)
        else {
            // The process has not loaded libcuda.
            frame.result = result::NOT_INITIALIZED.into();
            return ThunkAction::Answered;
        };
        frame.target = stand_in;
        return ThunkAction::Pass;
    };
    frame.target = real;
    // SAFETY: the calling thread's own block.
    if unsafe { (*process::thread()).is_agent } != 0 {
        return ThunkAction::Pass;
    }
    if entry.class() == Class::Pointer && !swap::is_in_use() {
        return ThunkAction::Pass;
    }
    frame.limited = None;
    frame.pending_bytes = 0;
    let mut attempts = LimitAttempts::default();
    let mut tool = Hazards(0);
    if entry.class() == Class::Table {
        let [_, id, ..] = frame.arguments;
        // SAFETY: the argument of a cuGetExportTable, which the driver is about to read.
        tool = tools::of_request(unsafe { tools::table(id as *const tools::TableId) });
        if tool.is_empty() {
            return ThunkAction::Pass;
        }
    }
    loop {
        let Some((place, page)) = process::place() else {
            oom_wait::abandon(&PROCESS.oom_wait, frame.waits_until_us);
            return ThunkAction::Pass;
        };
        frame.place = place;
        // Add the hazard before the call is counted or waits. If the gate lets the call pass, the
        // agent sees the hazard once every count is zero. If the gate holds the call, the call
        // waits until the process is resident.
        if !tool.is_empty() && page.add_hazards(tool) {
            hook_table::see_waits();
            process::poke_agent();
        }
        let nested = match try_enter(place, page, entry) {
            EnterResult::Through => {
                match admit(frame, entry, page, &mut attempts) {
                    Admission::Admitted(bytes) => frame.pending_bytes = bytes,
                    Admission::Exceeded if !swap::make_room() => {
                        uncount(place, entry.class());
                        PROCESS.vram_limit.end_attempts(&mut attempts);
                        oom_wait::abandon(&PROCESS.oom_wait, frame.waits_until_us);
                        frame.result = result::OUT_OF_MEMORY.into();
                        return ThunkAction::Answered;
                    }
                    Admission::Ask | Admission::Exceeded => {
                        uncount(place, entry.class());
                        let want =
                            frame.limited.unwrap_or(AllocRequest { bytes: 0, uuid: [0; 16] });
                        PROCESS.vram_limit.ask(&want, &mut attempts);
                        continue;
                    }
                }
                exit::catch_up();
                frame.began_ns = place.slot().map_or(0, |slot| call_recorder::begin(page, slot));
                // Choose the wrapper only now: a first allocation waits at the gate for the
                // controller's Welcome, which contains the engine.
                frame.target = swap::stand_in(entry.number(), real).unwrap_or_else(|| {
                    if may_take_handles(entry) {
                        swap::translate(&mut frame.arguments);
                    }
                    real
                });
                return ThunkAction::Counted;
            }
            EnterResult::Damaged => {
                oom_wait::abandon(&PROCESS.oom_wait, frame.waits_until_us);
                frame.result = result::ECC_UNCORRECTABLE.into();
                return ThunkAction::Answered;
            }
            EnterResult::Forked => continue,
            EnterResult::Held { nested } => nested,
        };
        match place.slot() {
            Some(slot) if is_known(entry, frame) => {
                slot.polls.fetch_add(1, Ordering::Relaxed);
                frame.result = result::SUCCESS.into();
                return ThunkAction::Answered;
            }
            Some(slot) if is_poll(page, entry.class()) && !may_concern_others(entry) => {
                if page.is_finished() {
                    slot.polls.fetch_add(1, Ordering::Relaxed);
                    frame.result = result::SUCCESS.into();
                    return ThunkAction::Answered;
                }
                page.wait_a_moment();
            }
            // Answer only calls that are not nested, because the outer call of a nested call may
            // still need the driver. Answer only after the driver's lock, because before it work
            // may still run. An event of another process may wait for that process's work.
            Some(slot)
                if !nested
                    && page.is_finished()
                    && !may_concern_others(entry)
                    && exit::is_running(core::ptr::from_ref(frame) as usize)
                    && exit::is_answered(entry, real, &frame.arguments) =>
            {
                slot.polls.fetch_add(1, Ordering::Relaxed);
                frame.result = result::SUCCESS.into();
                return ThunkAction::Answered;
            }
            _ => wait(place, page, entry, nested),
        }
    }
}

/// Exit of a call on the slow path, after the function has returned. Returns 1 if the thunk must
/// repeat the call, else 0.
///
/// # Safety
/// Only the thunk may call this function, with the frame that [`enter`] filled.
pub unsafe extern "C" fn leave(frame: &mut HookFrame) -> u32 {
    // SAFETY: stubs pass entries, which are static.
    let entry = unsafe { &*frame.entry };
    let class = entry.class();
    if frame.began_ns != 0
        && let Some((slot, page)) = frame.place.slot().zip(process::page())
    {
        let (result, arguments) = (frame.result as u32, &frame.arguments);
        let call = CallTimer { hook: entry.number(), result, arguments, began_ns: frame.began_ns };
        call_recorder::end(page, slot, &call);
    }
    end_limit(frame, class);
    if frame.result as u32 == result::SUCCESS && class == Class::Constant {
        // SAFETY: these are the arguments of a call of this function that succeeded.
        unsafe { constants::remember(entry, &frame.arguments) };
    }
    if frame.result as u32 == result::SUCCESS && shares_event(entry) {
        PROCESS.shares_events.store(1, Ordering::Release);
    }
    // Add the hazards while the call is still counted, so that no gate closes before they are
    // known.
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
        && oom_wait::may_be_repeated(entry)
        && swap::make_room()
    {
        uncount(frame.place, class);
        return 1;
    }
    let oom_wait = &PROCESS.oom_wait;
    // SAFETY: the arguments of a call of this function; they are as the caller gave them.
    let want = unsafe { oom_wait::wanted(oom_wait, entry, frame.result, &frame.arguments) };
    let want = want.filter(|_| !is_inside_another(frame.place));
    uncount(frame.place, class);
    oom_wait::settle(oom_wait, want, frame.result, &mut frame.waits_until_us).into()
}

/// Decides whether the container's VRAM limit admits a call that is counted as in progress. A call
/// may have to request an allowance (an amount of VRAM that the process may still allocate) from
/// the controller. For this request it must leave the gate. A nested call must not leave the gate,
/// so it is always admitted.
fn admit(
    frame: &mut HookFrame,
    entry: &HookEntry,
    page: &CounterPage,
    attempts: &mut LimitAttempts,
) -> Admission {
    let (limit, class) = (&PROCESS.vram_limit, entry.class());
    let is_limited = limit.bytes().is_some() && matches!(class, Class::Alloc | Class::MemoryInfo);
    if !is_limited || is_inside_another(frame.place) {
        return Admission::Admitted(0);
    }
    if class == Class::MemoryInfo {
        let uuid = oom_wait::current_uuid();
        frame.limited = uuid.map(|uuid| AllocRequest { bytes: 0, uuid });
        return match frame.limited {
            Some(_) if attempts.is_first() => Admission::Ask,
            _ => Admission::Admitted(0),
        };
    }
    // SAFETY: these are the arguments of a call of this function.
    let want = unsafe { oom_wait::request(entry, &frame.arguments) };
    frame.limited = want.or_else(|| oom_wait::takes_unknown_size(entry));
    let Some(want) = want else { return Admission::Admitted(0) };
    let admission = limit.admit(page, &want, attempts);
    // The driver may allocate from memory that the pool already holds, which NVML counts.
    let pool =
        (admission == Admission::Exceeded).then(|| oom_wait::pool_of(entry, &frame.arguments));
    if pool.flatten().is_some_and(|pool| swap::unused_pool_bytes(pool) >= want.bytes) {
        limit.end_attempts(attempts);
        return Admission::Admitted(0);
    }
    admission
}

/// Applies the container's VRAM limit after a call has returned. An allocation of known size:
/// subtracts its bytes from the pending bytes. A successful allocation of unknown size: drops the
/// process's allowances, so that the next allocation requests a new one from the controller.
/// `cuMemGetInfo`: reduces its results to the limit.
fn end_limit(frame: &mut HookFrame, class: Class) {
    let limit = &PROCESS.vram_limit;
    // In a child that was forked during the call, the counters are the child's own.
    let page = process::page().filter(|_| frame.place.slot().is_some());
    let Some((want, page)) = frame.limited.zip(page) else { return };
    let succeeded = frame.result as u32 == result::SUCCESS;
    if class == Class::MemoryInfo {
        if succeeded && let Some((limit_bytes, free_bytes)) = limit.view(&want.uuid) {
            let [free, total, ..] = frame.arguments.map(|at| at as *mut usize);
            // SAFETY: the driver has just written both results.
            unsafe {
                if let Some(free) = free.as_mut() {
                    *free = (*free).min(free_bytes.min(limit_bytes) as usize);
                }
                if let Some(total) = total.as_mut() {
                    *total = (*total).min(limit_bytes as usize);
                }
            }
        }
    } else if want.bytes == 0 {
        if succeeded {
            limit.drop_allowances();
        }
    } else if frame.pending_bytes > 0 {
        limit.end(page, &want.uuid, frame.pending_bytes, !succeeded);
        frame.pending_bytes = 0;
    }
}

/// Whether the results of this call are constant and cached. If so, writes them to the caller's
/// addresses, so that the call need not reach the driver.
fn is_known(entry: &HookEntry, frame: &HookFrame) -> bool {
    // SAFETY: these are the arguments of a call of this function.
    entry.class() == Class::Constant && unsafe { constants::answer(entry, &frame.arguments) }
}

/// Whether a function without a wrapper in this library may take handles of physical memory. This
/// is so for functions that bind memory for several devices, and for functions that are not in the
/// library's list.
fn may_take_handles(entry: &HookEntry) -> bool {
    entry.class() == Class::Peer || entry.number() == hook::UNLISTED
}

/// Whether the call that has just returned was made inside another call. Such a call must not wait
/// for free VRAM. Its outer call stays counted during the wait, so the process could not be
/// offloaded.
fn is_inside_another(place: SlotLocation) -> bool {
    // SAFETY: the calling thread's own block.
    let depth = unsafe { (*process::thread()).depth };
    let own = |slot: &crate::counters::ThreadSlot| slot.owner.tid() != 0;
    let others =
        |slot: &crate::counters::ThreadSlot| own(slot) && slot.inflight.load(Ordering::Relaxed) > 1;
    depth > 1 || place.slot().is_none_or(others)
}

/// Result of [`try_enter`]: whether a call may proceed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EnterResult {
    /// The call is counted and may proceed.
    Through,
    /// The call must wait at the gate, and is not counted as running. `nested` is true if it was
    /// made inside another call.
    Held { nested: bool },
    /// No call may reach the driver, because the content of memory is lost. The call is not
    /// counted.
    Damaged,
    /// The process is a forked child, so the slot in which the call would be counted belongs to its
    /// parent.
    Forked,
}

/// Counts the call, unless the gate holds it.
fn try_enter(place: SlotLocation, page: &CounterPage, entry: &HookEntry) -> EnterResult {
    let class = entry.class();
    let Some(slot) = place.slot() else {
        return EnterResult::Forked;
    };
    let own_before = slot.inflight.fetch_add(1, Ordering::SeqCst);
    if class.is_special() {
        slot.allocating.fetch_add(1, Ordering::SeqCst);
    }
    // A depth above 0 means that an outer call is counted. This must also hold for a signal handler
    // that interrupts this function. So the depth is incremented after the count, and decremented
    // before it.
    let thread = process::thread();
    // SAFETY: the calling thread's own block; a handler leaves it as it found it.
    let outer = unsafe {
        let outer = (*thread).depth;
        (*thread).depth = outer.wrapping_add(1);
        outer
    };
    let owned = slot.owner.tid() != 0;
    let nested = outer > 0 || (owned && own_before > 0);
    let held = match look(page, class) {
        GateCheck::Passes => None,
        // The count was added before this read of the seal: see the module header.
        GateCheck::Holds if nested && !page.is_sealed() => None,
        GateCheck::Holds => Some(EnterResult::Held { nested }),
        GateCheck::Damaged => Some(EnterResult::Damaged),
    };
    if let Some(held) = held {
        uncount(place, class);
        return held;
    }
    match class {
        Class::Pointer | Class::Constant => &slot.polls,
        class if is_poll(page, class) => &slot.polls,
        _ => &slot.calls,
    }
    .fetch_add(1, Ordering::Relaxed);
    slot.last_hook.store(entry.number(), Ordering::Relaxed);
    EnterResult::Through
}

/// Whether a call of this class only queries whether work has ended. If a profiler is in the
/// process, this includes calls that wait for work: after a profile, a thread of CUPTI calls
/// `cuCtxSynchronize` several times a second (H200, driver 580.159), although the program is idle.
fn is_poll(page: &CounterPage, class: Class) -> bool {
    class == Class::Poll || (class == Class::Sync && page.hazards().intersects(Hazards::TOOLS))
}

/// Whether a successful call of this function shares an event with another process.
fn shares_event(entry: &HookEntry) -> bool {
    const SHARES: [Function; 2] = [Function::cuIpcGetEventHandle, Function::cuIpcOpenEventHandle];
    SHARES.iter().any(|function| *function as u32 + 1 == entry.number())
}

/// Whether a call may concern work of another process: it is about an event, and the process shares
/// events. Then the call must reach the driver, although all work of this process has ended.
fn may_concern_others(entry: &HookEntry) -> bool {
    const OF_EVENTS: [Function; 2] = [Function::cuEventQuery, Function::cuEventSynchronize];
    PROCESS.shares_events.load(Ordering::Acquire) == 1
        && OF_EVENTS.iter().any(|function| *function as u32 + 1 == entry.number())
}

fn uncount(place: SlotLocation, class: Class) {
    let Some(slot) = place.slot() else {
        // The process was forked in the meantime: the count belongs to the parent, and the thread's
        // block was reset.
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

/// What the gate's current state means for calls of one class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateCheck {
    Passes,
    Holds,
    Damaged,
}

/// Reads the gate once, and returns what its state means for a call of this class.
pub fn look(page: &CounterPage, class: Class) -> GateCheck {
    const CLOSED: u32 = Gate::Closed as u32;
    const ALLOCATIONS_HELD: u32 = Gate::AllocationsHeld as u32;
    const DAMAGED: u32 = Gate::Damaged as u32;
    match page.gate.load(Ordering::SeqCst) {
        CLOSED => GateCheck::Holds,
        ALLOCATIONS_HELD if class.is_special() => GateCheck::Holds,
        DAMAGED => GateCheck::Damaged,
        _ => GateCheck::Passes,
    }
}

/// Whether the gate currently holds a call of this class. If it does not, a waiting call stops its
/// wait, but is not admitted yet: it counts itself and reads the gate again.
fn holds(page: &CounterPage, class: Class, nested: bool) -> bool {
    look(page, class) == GateCheck::Holds && (!nested || page.is_sealed())
}

/// Blocks a caller until the gate passes calls of this class. Signal handlers run as usual, and a
/// signal can still end the process.
fn wait(place: SlotLocation, page: &CounterPage, entry: &HookEntry, nested: bool) {
    // The agent wakes all waiters when it opens the gate. The sleep still has a time limit, for two
    // reasons: as a safeguard, and to renew the wait before it is no longer counted.
    const LOOK_AGAIN_MS: u64 = 1_000;
    let Some(slot) = place.slot() else {
        return;
    };
    let class = entry.class();
    PROCESS.waiting_hook.store(entry.number(), Ordering::Relaxed);
    let began_us = sys::now_us();
    page.begin_wait(slot, began_us);
    process::poke_agent();
    while holds(page, class, nested) && place.slot().is_some() {
        let gate = page.gate.load(Ordering::SeqCst);
        if gate != Gate::Open as u32 {
            sys::futex_wait(&page.gate, gate, LOOK_AGAIN_MS);
        }
        // The wait was no longer counted: the process was stopped for a long time, or a nested wait
        // has ended it.
        if place.slot().is_some() && page.renew_wait(slot, sys::now_us()) {
            process::poke_agent();
        }
    }
    if place.slot().is_some() {
        let now_us = sys::now_us();
        page.held_us.fetch_add(now_us.saturating_sub(began_us), Ordering::Relaxed);
        page.end_wait(slot, now_us);
    }
}
