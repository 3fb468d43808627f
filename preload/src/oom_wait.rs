//! Makes an allocation that failed for lack of VRAM wait until VRAM is free, if the controller has
//! configured this. The call is then repeated.
//!
//! ```text
//! caller, outside the driver                               agent
//!   call returned OUT_OF_MEMORY, is uncounted
//!   becomes the owner, ASKED, wakes the agent ─────────> AllocWait
//!   sleeps                              <── GO_AHEAD ─── AllocGrant
//!   through the gate and called again
//!     succeeded ──> FREE, wakes the agent ─────────────> AllocWaitDone
//!     failed ──> ASKED again
//!   GIVE_UP or timeout ──> FREE, wakes the agent ──────> AllocWaitDone; the error is returned
//! ```
//!
//! A waiting allocation does not count as a call inside the driver, so its process may be offloaded
//! like any other. The agent reports only one allocation of a process at a time. A second
//! allocation that fails meanwhile waits until the state is FREE.

use core::ffi::c_void;
use core::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use affinode_cuda_sys::hook::{self, Class};
use affinode_cuda_sys::{
    CtxGetDeviceFn, DeviceGetUuidFn, LOCATION_DEVICE, MemAllocationProp, result,
};

use crate::hook_table::HookEntry;
use crate::libcuda::CachedFunction;
use crate::{libcuda, process, sys};

const FREE: u32 = 0;
const ASKED: u32 = 1;
const GO_AHEAD: u32 = 2;
const GIVE_UP: u32 = 3;

/// State of the one allocation of the process that waits for VRAM, if there is one. A forked child
/// starts with all zero.
pub struct OomWaiter {
    /// Maximum time that an allocation waits, set by the controller. 0 if allocations must not
    /// wait.
    wait_ms: AtomicU32,
    /// Id of the thread whose allocation waits. 0 if none waits.
    owner: AtomicU32,
    /// Address of the waiting call's frame on the owner's stack. 0: unknown, or none waits.
    frame: AtomicUsize,
    state: AtomicU32,
    attempts: AtomicU32,
    ticket: AtomicU64,
    bytes: AtomicU64,
    uuid: [AtomicU64; 2],
    /// Ticket (sequence number) of the last allocation that succeeded after a wait.
    served: AtomicU64,
}

/// What an allocation needs: an amount of VRAM on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllocRequest {
    /// Size in bytes. 0 if only the driver knows it.
    pub bytes: u64,
    /// UUID of the device on which it is allocated.
    pub uuid: [u8; 16],
}

/// The waiting allocation, as the agent reports it to the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PendingAlloc {
    pub ticket: u64,
    pub want: AllocRequest,
    pub attempts: u32,
    /// True while the allocation waits for the controller's message AllocGrant.
    pub asked: bool,
}

impl OomWaiter {
    pub const fn new() -> OomWaiter {
        OomWaiter {
            wait_ms: AtomicU32::new(0),
            owner: AtomicU32::new(0),
            frame: AtomicUsize::new(0),
            state: AtomicU32::new(FREE),
            attempts: AtomicU32::new(0),
            ticket: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            uuid: [const { AtomicU64::new(0) }; 2],
            served: AtomicU64::new(0),
        }
    }

    /// Sets the maximum time that allocations wait from now on. 0 also ends the wait in progress.
    pub fn set_wait_ms(&self, wait_ms: u32) {
        self.wait_ms.store(wait_ms, Ordering::Relaxed);
        if wait_ms == 0 {
            self.change(GIVE_UP);
        }
    }

    /// Returns the waiting allocation. Called by the agent.
    pub fn case(&self) -> Option<PendingAlloc> {
        let state = self.state.load(Ordering::Acquire);
        let [low, high] = self.uuid.each_ref().map(|half| half.load(Ordering::Relaxed));
        let uuid = (u128::from(high) << 64 | u128::from(low)).to_le_bytes();
        (state != FREE).then(|| PendingAlloc {
            ticket: self.ticket.load(Ordering::Relaxed),
            want: AllocRequest { bytes: self.bytes.load(Ordering::Relaxed), uuid },
            attempts: self.attempts.load(Ordering::Relaxed),
            asked: state == ASKED,
        })
    }

    /// Whether the allocation with this ticket succeeded after its wait.
    pub fn was_served(&self, ticket: u64) -> bool {
        self.served.load(Ordering::Relaxed) == ticket
    }

    /// Stores the controller's decision about the waiting allocation, and wakes its thread.
    pub fn answer(&self, ticket: u64, granted: bool) {
        if self.ticket.load(Ordering::Relaxed) == ticket {
            self.change(if granted { GO_AHEAD } else { GIVE_UP });
        }
    }

    /// Changes the state, but only if an allocation is waiting for a grant.
    fn change(&self, to: u32) {
        let changed = self.state.compare_exchange(ASKED, to, Ordering::AcqRel, Ordering::Relaxed);
        if changed.is_ok() {
            sys::futex_wake_all(&self.state);
        }
    }

    /// Makes the calling thread the owner: the thread whose allocation is reported to the
    /// controller. If another thread is the owner, first waits until that thread's wait has ended,
    /// but not beyond the time `until_us`. Returns false if that time has passed, or if the call is
    /// nested in the owner's waiting call. `frame` is the address of the call's frame on the stack.
    fn take(&self, tid: u32, frame: usize, until_us: u64) -> bool {
        let is_taken = self.take_ownership(tid, frame, until_us);
        if is_taken {
            self.frame.store(frame, Ordering::Relaxed);
        }
        is_taken
    }

    fn take_ownership(&self, tid: u32, frame: usize, until_us: u64) -> bool {
        loop {
            let owner =
                match self.owner.compare_exchange(0, tid, Ordering::AcqRel, Ordering::Acquire) {
                    Ok(_) => return true,
                    Err(owner) => owner,
                };
            if owner == tid {
                // This thread is the owner already in two cases. In the first, a signal handler has
                // interrupted its waiting allocation and allocates too. The handler's frames are
                // below the waiting call on the stack. In the second, the thread has left the
                // waiting call by `siglongjmp`. The wait of that call has then ended.
                let owners = self.frame.load(Ordering::Relaxed);
                return owners != 0 && frame >= owners;
            }
            let left_us = until_us.saturating_sub(sys::now_us());
            if left_us == 0 {
                return false;
            }
            // A thread that ended during its wait is still registered as the owner.
            let gone = !sys::thread_lives(owner);
            if gone
                && self
                    .owner
                    .compare_exchange(owner, tid, Ordering::AcqRel, Ordering::Relaxed)
                    .is_ok()
            {
                return true;
            }
            sys::futex_wait(&self.owner, owner, (left_us / 1_000 + 1).min(LOOK_AGAIN_MS));
        }
    }

    fn ask(&self, want: AllocRequest, attempts: u32) {
        if attempts == 0 {
            self.ticket.fetch_add(1, Ordering::Relaxed);
        }
        let uuid = u128::from_le_bytes(want.uuid);
        self.uuid[0].store(uuid as u64, Ordering::Relaxed);
        self.uuid[1].store((uuid >> 64) as u64, Ordering::Relaxed);
        self.bytes.store(want.bytes, Ordering::Relaxed);
        self.attempts.store(attempts, Ordering::Relaxed);
        self.state.store(ASKED, Ordering::Release);
        process::poke_agent();
    }

    /// Sleeps until the controller grants or refuses the VRAM, or until the timeout. Returns true
    /// if it was granted, so that the call must be repeated.
    fn wait(&self, tid: u32, until_us: u64) -> bool {
        while self.owner.load(Ordering::Relaxed) == tid
            && self.state.load(Ordering::Acquire) == ASKED
        {
            let left_us = until_us.saturating_sub(sys::now_us());
            if left_us == 0 {
                return false;
            }
            sys::futex_wait(&self.state, ASKED, (left_us / 1_000 + 1).min(LOOK_AGAIN_MS));
        }
        self.owner.load(Ordering::Relaxed) == tid && self.state.load(Ordering::Acquire) == GO_AHEAD
    }

    fn leave(&self, tid: u32, served: bool) {
        if self.owner.load(Ordering::Relaxed) != tid {
            return; // The process was forked meanwhile, and the waiter is the parent's.
        }
        if served {
            self.served.store(self.ticket.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        self.state.store(FREE, Ordering::Release);
        self.frame.store(0, Ordering::Relaxed);
        self.owner.store(0, Ordering::Release);
        sys::futex_wake_all(&self.owner);
        process::poke_agent();
    }
}

/// Maximum sleep of a waiting thread before it checks the state again. If a wake-up were lost, this
/// would limit the delay.
const LOOK_AGAIN_MS: u64 = 1_000;

/// Whether a call of this function may be repeated after it failed for lack of memory. This is
/// allowed only if the failed call has had no effect. A failed launch of a graph is not repeated:
/// it is undocumented whether a part of the graph's work has begun.
pub fn may_be_repeated(entry: &HookEntry) -> bool {
    let name = hook::name(entry.number()).map_or(&[][..], str::as_bytes);
    entry.class() == Class::Alloc && hook::base(name) != b"cuGraphLaunch"
}

/// For a call that has just failed for lack of VRAM: returns the VRAM that the call needs. Returns
/// `None` if the call must not wait. The call must still be counted as in progress, because this
/// function queries the driver for the device.
///
/// # Safety
/// `arguments` must be those of a call of `entry`'s function.
pub unsafe fn wanted(
    waiter: &OomWaiter,
    entry: &HookEntry,
    code: u64,
    arguments: &[u64; 6],
) -> Option<AllocRequest> {
    if code as u32 != result::OUT_OF_MEMORY || waiter.wait_ms.load(Ordering::Relaxed) == 0 {
        return None;
    }
    // SAFETY: the caller guarantees the arguments.
    unsafe { request(entry, arguments) }
}

/// Returns the VRAM that an allocating call needs, with the size 0 if only the driver knows it.
/// `None`: the call allocates no device memory, or the device or the function's arguments are not
/// known. The call must be counted as in progress, because this function queries the driver for the
/// device.
///
/// # Safety
/// `arguments` must be those of a call of `entry`'s function.
pub unsafe fn request(entry: &HookEntry, arguments: &[u64; 6]) -> Option<AllocRequest> {
    if entry.class() != Class::Alloc {
        return None;
    }
    let [_, second, third, fourth, fifth, _] = *arguments;
    let name = hook::name(entry.number())?.as_bytes();
    let (bytes, device) = match hook::base(name) {
        b"cuMemAlloc" | b"cuMemAllocAsync" | b"cuMemAllocFromPoolAsync" => (second, None),
        b"cuMemAllocPitch" => (pitched(third).saturating_mul(fourth), None),
        b"cuMemCreate" => {
            // SAFETY: (handle, size, prop, flags); the driver reads this prop in the same call.
            let place = unsafe { (third as *const MemAllocationProp).as_ref() }?;
            if place.location_type != LOCATION_DEVICE {
                return None; // Host memory.
            }
            (second, Some(place.location_id))
        }
        b"cuDevicePrimaryCtxRetain" => (0, Some(second as i32)),
        b"cuCtxCreate" => {
            // The name does not show the version: `cuGetProcAddress` returns a later function for
            // the name without a version.
            static V3: CachedFunction = CachedFunction::new(b"cuCtxCreate_v3");
            static V4: CachedFunction = CachedFunction::new(b"cuCtxCreate_v4");
            let is = |function: &CachedFunction| function.address() == Some(entry.real());
            let device = match () {
                () if is(&V4) => fourth,
                () if is(&V3) => fifth,
                () => third,
            };
            (0, Some(device as i32))
        }
        b"cuArrayCreate"
        | b"cuArray3DCreate"
        | b"cuMipmappedArrayCreate"
        | b"cuModuleLoad"
        | b"cuModuleLoadData"
        | b"cuModuleLoadDataEx"
        | b"cuModuleLoadFatBinary" => (0, None),
        _ => return None,
    };
    let uuid = uuid_of(device.or_else(current_device)?)?;
    Some(AllocRequest { bytes, uuid })
}

/// Makes a call that failed for lack of VRAM (`want` is `Some`) wait for VRAM. Returns true if the
/// call must be repeated. If a repeated call no longer fails for lack of VRAM, ends its wait and
/// returns false.
///
/// Must be called after the call has returned and is no longer counted. `until_us` is the time at
/// which the wait ends. The caller sets it to 0 before the first attempt. This function then stores
/// the time, and the caller passes the same value after each repetition. The value must be on the
/// caller's stack, because its address shows whether a call is nested.
pub fn settle(
    waiter: &OomWaiter,
    want: Option<AllocRequest>,
    code: u64,
    until_us: &mut u64,
) -> bool {
    let first = *until_us == 0;
    let Some(want) = want else {
        if !first {
            waiter.leave(sys::gettid(), code as u32 == result::SUCCESS);
        }
        return false;
    };
    let (tid, frame) = (sys::gettid(), core::ptr::from_ref(until_us) as usize);
    let mut attempts = 0;
    if first {
        let wait_us = u64::from(waiter.wait_ms.load(Ordering::Relaxed)) * 1_000;
        *until_us = sys::now_us() + wait_us;
        if !waiter.take(tid, frame, *until_us) {
            return false;
        }
    } else {
        attempts = waiter.attempts.load(Ordering::Relaxed).saturating_add(1);
    }
    waiter.ask(want, attempts);
    let again = waiter.wait(tid, *until_us);
    if !again {
        waiter.leave(tid, false);
    }
    again
}

/// Ends the wait of a call that will not reach [`settle`] again. Such a call either bypasses the
/// gate, because the process is no longer managed, or returns an error to the application.
pub fn abandon(waiter: &OomWaiter, until_us: u64) {
    if until_us != 0 {
        waiter.leave(sys::gettid(), false);
    }
}

/// Returns a request of unknown size (0 bytes) if the function may allocate device memory of a size
/// that is not known before the call. The launch of a graph is not included, because programs
/// launch graphs far more often than they allocate.
pub fn takes_unknown_size(entry: &HookEntry) -> Option<AllocRequest> {
    let takes = entry.class() == Class::Alloc && may_be_repeated(entry);
    takes.then_some(AllocRequest { bytes: 0, uuid: [0; 16] })
}

/// Returns the memory pool of an allocation: `Some(None)` for the device's current pool. `None`: the
/// function does not allocate from a pool.
pub fn pool_of(entry: &HookEntry, arguments: &[u64; 6]) -> Option<Option<usize>> {
    let [_, _, pool, ..] = *arguments;
    match hook::base(hook::name(entry.number())?.as_bytes()) {
        b"cuMemAllocAsync" => Some(None),
        b"cuMemAllocFromPoolAsync" => Some(Some(pool as usize)),
        _ => None,
    }
}

/// Number of bytes that the driver uses for a row of this width: it aligns rows to 512 bytes.
fn pitched(width: u64) -> u64 {
    const ALIGNMENT: u64 = 512;
    width.checked_next_multiple_of(ALIGNMENT).unwrap_or(width)
}

/// The UUID of the calling thread's device.
pub fn current_uuid() -> Option<[u8; 16]> {
    uuid_of(current_device()?)
}

fn current_device() -> Option<i32> {
    static GET: CachedFunction = CachedFunction::new(b"cuCtxGetDevice");
    let get = GET.address()?;
    let mut device = -1;
    // SAFETY: the signature of cuCtxGetDevice, with room for one ordinal.
    let code = unsafe {
        let get: CtxGetDeviceFn = core::mem::transmute(get);
        get(&raw mut device)
    };
    (code == result::SUCCESS).then_some(device)
}

fn uuid_of(device: i32) -> Option<[u8; 16]> {
    // `cuDeviceGetUuid_v2` distinguishes a part of a device (MIG) from the whole device.
    static GET: CachedFunction = CachedFunction::new(b"cuDeviceGetUuid_v2");
    let get = GET.address().or_else(|| libcuda::function(b"cuDeviceGetUuid"))?;
    let mut uuid = [0_u8; 16];
    // SAFETY: the signature of cuDeviceGetUuid in both versions, with room for a UUID.
    let code = unsafe {
        let get: DeviceGetUuidFn = core::mem::transmute(get);
        get((&raw mut uuid).cast::<c_void>(), device)
    };
    (code == result::SUCCESS).then_some(uuid)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WANT: AllocRequest = AllocRequest { bytes: 7, uuid: [9; 16] };
    const OOM: u64 = result::OUT_OF_MEMORY as u64;

    fn waiter(wait_ms: u32) -> OomWaiter {
        let waiter = OomWaiter::new();
        waiter.set_wait_ms(wait_ms);
        waiter
    }

    /// Waits until an allocation waits for a grant, and returns it as the agent would see it.
    fn asked(waiter: &OomWaiter) -> PendingAlloc {
        loop {
            match waiter.case() {
                Some(case) if case.asked => return case,
                _ => std::thread::yield_now(),
            }
        }
    }

    #[test]
    fn granted_allocation_repeats_and_frees_waiter() {
        let waiter = waiter(60_000);
        std::thread::scope(|scope| {
            let caller = scope.spawn(|| {
                let mut until_us = 0;
                let again = settle(&waiter, Some(WANT), OOM, &mut until_us);
                let failed_again = settle(&waiter, Some(WANT), OOM, &mut until_us);
                (again, failed_again, settle(&waiter, None, 0, &mut until_us))
            });
            let first = asked(&waiter);
            assert_eq!((first.want, first.attempts), (WANT, 0));
            waiter.answer(first.ticket + 1, false); // Another allocation's ticket.
            waiter.answer(first.ticket, true);
            while waiter.case().is_none_or(|case| case.attempts == 0) {}
            let second = asked(&waiter);
            assert_eq!((second.ticket, second.attempts), (first.ticket, 1));
            waiter.answer(second.ticket, true);
            assert_eq!(caller.join().unwrap(), (true, true, false));
            assert_eq!(waiter.case(), None);
            assert!(waiter.was_served(first.ticket));
        });
    }

    #[test]
    fn refused_or_late_allocation_frees_waiter() {
        let refused = waiter(60_000);
        std::thread::scope(|scope| {
            let caller = scope.spawn(|| settle(&refused, Some(WANT), OOM, &mut 0));
            let case = asked(&refused);
            refused.answer(case.ticket, false);
            assert!(!caller.join().unwrap());
            assert_eq!((refused.case(), refused.was_served(case.ticket)), (None, false));
        });
        let late = waiter(1);
        assert!(!settle(&late, Some(WANT), OOM, &mut 0));
        assert_eq!(late.case(), None);
    }

    #[test]
    fn call_that_may_have_begun_is_not_repeated() {
        for (name, class, may) in [
            (&b"cuMemAlloc_v2"[..], Class::Alloc, true),
            (b"cuArrayCreate_v2", Class::Alloc, true),
            (b"cuGraphLaunch_ptsz", Class::Alloc, false),
            (b"cuLaunchKernel", Class::Work, false),
        ] {
            let (number, listed) = hook::find(name).unwrap();
            assert_eq!(listed, class);
            assert_eq!(may_be_repeated(&HookEntry::exported(number, class)), may);
        }
    }

    #[test]
    fn nested_allocation_fails_at_once() {
        let waiter = waiter(60_000);
        let mut frames = [0; 2];
        let [nested, outer] = &mut frames;
        assert!(waiter.take(sys::gettid(), core::ptr::from_ref(outer) as usize, u64::MAX));
        assert!(!settle(&waiter, Some(WANT), OOM, nested));
    }

    /// A thread that has left a waiting call by `siglongjmp` can wait for its next allocation.
    #[test]
    fn wait_after_abandoned_wait_has_new_ticket() {
        let waiter = waiter(60_000);
        std::thread::scope(|scope| {
            let caller = scope.spawn(|| {
                let mut frames = [0; 2];
                let [left, next] = &mut frames;
                assert!(waiter.take(sys::gettid(), core::ptr::from_ref(left) as usize, u64::MAX));
                waiter.ask(WANT, 0);
                let again = settle(&waiter, Some(WANT), OOM, next);
                (again, settle(&waiter, None, 0, next))
            });
            let is_second = |case: PendingAlloc| case.asked && case.ticket == 2;
            while !waiter.case().is_some_and(is_second) && !caller.is_finished() {
                std::thread::yield_now();
            }
            waiter.answer(2, true);
            assert_eq!(caller.join().unwrap(), (true, false));
            assert!(waiter.case().is_none() && waiter.was_served(2));
        });
    }

    #[test]
    fn waiter_of_dead_thread_is_taken_over() {
        let waiter = waiter(60_000);
        let dead = std::thread::spawn(sys::gettid).join().unwrap();
        while sys::thread_lives(dead) {
            std::thread::yield_now();
        }
        assert!(waiter.take(dead, 0, u64::MAX));
        assert!(waiter.take(sys::gettid(), 0, u64::MAX));
    }

    #[test]
    fn the_end_of_management_ends_the_wait() {
        let waiter = waiter(60_000);
        std::thread::scope(|scope| {
            let caller = scope.spawn(|| settle(&waiter, Some(WANT), OOM, &mut 0));
            asked(&waiter);
            waiter.set_wait_ms(0);
            assert!(!caller.join().unwrap());
        });
    }
}
