//! Hooks the calls into NVIDIA's management library (NVML) in a process that uses CUDA. While the
//! driver holds the process locked or checkpointed, every function of NVML blocks (measured, driver
//! 580). NVML itself never causes a restore, so such a call could block forever. Therefore a gate
//! keeps calls out of NVML during this time. `docs/nvml.md` lists how each function is handled.
//!
//! ```text
//! application ──dlsym, linked name──> stub ──> thunk ──enter──> NVML ──leave──>
//!                                                        │ gate closed
//!                                                        ├── result from the cache or a reading
//!                                                        └── waits, and wakes the process
//! agent ──set_phase──> gate     ──drain──> no call is inside NVML when the driver locks
//! controller ──Reading──> readings
//! ```
//!
//! The gate of NVML calls is separate from the gate of CUDA calls. The reason is the engine `copy`:
//! it keeps the context, so NVML works while CUDA calls wait.
//!
//! One word counts all calls that are inside NVML. The process's counters of CUDA calls are not
//! used, because a program may call NVML before they exist. One word is enough, because calls of
//! NVML are rare and slow.

mod answers;
mod cache;
mod functions;
mod readings;
mod thunk;
mod waits;

use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use affinode_cuda_sys::nvml::{Class, INIT_WITH_FLAGS, UUID};
use affinode_proto::wire::Phase;

pub use self::functions::{function, hooked, owns};
pub use self::readings::store as store_reading;
use self::thunk::NvmlFrame;
use self::waits::EventWaits;
use crate::process::{self, PROCESS};
use crate::{libc, sys};

/// `nvmlReturn_t` values that this module uses.
pub mod code {
    /// The call has succeeded.
    pub const SUCCESS: u32 = 0;
    /// NVML is not initialised.
    pub const UNINITIALIZED: u32 = 1;
    /// An argument is not valid for the function.
    pub const INVALID_ARGUMENT: u32 = 2;
    /// The device does not support the request.
    pub const NOT_SUPPORTED: u32 = 3;
    /// The caller has no permission for the request.
    pub const NO_PERMISSION: u32 = 4;
    /// The requested device does not exist.
    pub const NOT_FOUND: u32 = 6;
    /// A buffer is too small.
    pub const INSUFFICIENT_SIZE: u32 = 7;
    /// A wait has ended without an event.
    pub const TIMEOUT: u32 = 10;
    /// The library has no such function.
    pub const FUNCTION_NOT_FOUND: u32 = 13;
    /// The version of a structure is not known.
    pub const ARGUMENT_VERSION_MISMATCH: u32 = 25;
    /// An error without a code of its own.
    pub const UNKNOWN: u32 = 999;
}

/// State of a process's calls into NVML. A forked child starts with all zero, like all of
/// [`PROCESS`].
pub struct NvmlCallCount {
    /// The gate, which is also a futex. It is 1 while calls must not reach NVML.
    gate: AtomicU32,
    /// Number of calls in progress inside NVML, except the waits for events that `waits` counts.
    inside: AtomicU32,
    waits: EventWaits,
    /// True if a caller needs a figure that the agent must request from the controller.
    asked: AtomicBool,
}

impl NvmlCallCount {
    pub const fn new() -> NvmlCallCount {
        NvmlCallCount {
            gate: AtomicU32::new(OPEN),
            inside: AtomicU32::new(0),
            waits: EventWaits::new(),
            asked: AtomicBool::new(false),
        }
    }
}

const OPEN: u32 = 0;
const CLOSED: u32 = 1;

/// Number of the application's `nvmlInit` calls minus its `nvmlShutdown` calls. Only calls into the
/// copy of NVML that is kept loaded count. A forked child inherits this number and NVML's own
/// count, so both still agree there.
static USERS: AtomicU32 = AtomicU32::new(0);
/// Number of `nvmlInit` calls minus number of `nvmlShutdown` calls that have reached the copy of
/// NVML that is kept loaded. [`USERS`] also counts the calls that this library has answered itself.
static REFERENCES: AtomicU32 = AtomicU32::new(0);
/// Same as [`REFERENCES`], but the sum for all other copies of NVML.
static OTHER_REFERENCES: AtomicU32 = AtomicU32::new(0);
/// Whether one of the counted `nvmlInit` calls has attached NVML to the devices.
static ATTACHED: AtomicBool = AtomicBool::new(false);
/// Registration number of the process that closed the gate, or 0 while the gate is open. A child
/// that is forked while the gate is closed inherits the parent's number. The child thereby detects
/// that NVML's locks, which it has also inherited, are never released in it.
static CLOSED_BY: AtomicU32 = AtomicU32::new(0);

/// What the thunk does next with a call, after [`enter`] has returned.
#[repr(u32)]
pub enum NvmlAction {
    /// The thunk jumps to the function.
    Pass = 0,
    /// The thunk calls the function, and then [`leave`].
    Counted = 1,
    /// The thunk returns the result in the frame to the caller, without calling the function.
    Answered = 2,
}

/// Entry of every call into NVML. Counts the call, holds it at the gate, or returns a result
/// itself.
///
/// # Safety
/// Only the thunk may call this function, with its own frame, which has the call's arguments.
unsafe extern "C" fn enter(frame: &mut NvmlFrame) -> NvmlAction {
    let Some(real) = functions::real(frame.place) else {
        // The program is linked to a name that the NVML library does not have.
        return frame.answer(code::FUNCTION_NOT_FOUND);
    };
    frame.target = real;
    let class = functions::class(frame.place);
    // SAFETY: the calling thread's own block.
    let is_agent = unsafe { (*process::thread()).is_agent } != 0;
    if class == Class::Pass
        || is_agent
        || process::is_disabled()
        || functions::is_inside(frame.caller)
        || !process::children_start_anew()
    {
        return NvmlAction::Pass;
    }
    if is_copy_locked() {
        return frame.answer(code::UNKNOWN);
    }
    if let Some(result) = counted_init(frame, class) {
        return frame.answer(result);
    }
    loop {
        count(class);
        if is_open() {
            if class == Class::Wait && !frame.slice_wait() {
                uncount(class);
                return frame.answer(code::TIMEOUT);
            }
            return NvmlAction::Counted;
        }
        uncount(class);
        let Some(page) = process::page() else { return NvmlAction::Pass };
        if class == Class::Wait {
            if !wait_for_event(frame) {
                return frame.answer(code::TIMEOUT);
            }
            continue;
        }
        let is_checkpointed = page.phase.load(Ordering::SeqCst) == Phase::Checkpointed as u32;
        // SAFETY: the thunk passes the arguments of this function.
        if let Some(result) = unsafe { answers::answer(frame.place, class, frame, is_checkpointed) }
        {
            if result == code::SUCCESS {
                // SAFETY: the result was written as the function writes it. The agent may be busy
                // with the move, so it is not asked.
                unsafe { answers::limit(class, frame, false) };
            }
            return frame.answer(result);
        }
        wait();
    }
}

/// Exit of a call into NVML, after the function has returned. Returns 1 if the thunk must repeat
/// the call, else 0.
///
/// # Safety
/// Only the thunk may call this function, with the frame that [`enter`] filled.
unsafe extern "C" fn leave(frame: &mut NvmlFrame) -> u32 {
    let class = functions::class(frame.place);
    let result = frame.result as u32;
    let mut again = 0;
    match class {
        Class::Init if result == code::SUCCESS => {
            libc::with_errno_kept(functions::hold_loaded);
            if functions::is_held(frame.place) {
                USERS.fetch_add(1, Ordering::SeqCst);
                REFERENCES.fetch_add(1, Ordering::SeqCst);
                ATTACHED.fetch_or(attaches(frame), Ordering::SeqCst);
            } else {
                OTHER_REFERENCES.fetch_add(1, Ordering::SeqCst);
            }
        }
        Class::Shutdown if result == code::SUCCESS => {
            let less = |count: u32| count.checked_sub(1);
            if functions::is_held(frame.place) {
                let _ = USERS.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
                let _ = REFERENCES.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
            } else {
                let _ = OTHER_REFERENCES.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
            }
        }
        Class::Wait => again = u32::from(result == code::TIMEOUT && frame.left_us() > 0),
        _ => {
            // SAFETY: the arguments of a call that has just returned.
            unsafe {
                answers::remember(frame.place, class, frame);
                if matches!(class, Class::Handle | Class::HandleByText) && result == 0 {
                    learn_uuid(frame);
                }
            }
        }
    }
    uncount(class);
    if result == code::SUCCESS {
        // The controller is asked only now, because the driver must not wait for its reply.
        // SAFETY: the arguments of a call that has just returned with success.
        unsafe { answers::limit(class, frame, true) };
    }
    again
}

/// Stores the UUID of the device whose handle a call has just returned. The controller's figures
/// identify devices by UUID.
///
/// # Safety
/// `frame` must be of a call that has written a handle.
unsafe fn learn_uuid(frame: &NvmlFrame) {
    type GetUuid = unsafe extern "C" fn(u64, *mut u8, u32) -> u32;
    let [_, handle_at, ..] = frame.arguments;
    // SAFETY: NVML has written a handle there with success.
    let handle = unsafe { (handle_at as *const u64).read_unaligned() };
    if let Some(get) = functions::real(UUID as u64) {
        let mut text = [0; cache::BYTES];
        // SAFETY: the signature of nvmlDeviceGetUUID; the buffer has the length that is passed.
        let result = unsafe {
            let get: GetUuid = core::mem::transmute(get);
            get(handle, text.as_mut_ptr(), text.len() as u32)
        };
        if result == code::SUCCESS {
            cache::store(answers::uuid_key(handle), result, &text);
        }
    }
}

/// Whether NVML's locks are held forever in this process. This is so in a child that was forked
/// while NVML was initialised and its locks were held.
fn is_copy_locked() -> bool {
    let closed_by = CLOSED_BY.load(Ordering::SeqCst);
    if closed_by == 0 || closed_by == process::registration() {
        return false;
    }
    if !is_initialised() {
        // NVML was not initialised at the fork, so the child may initialise it.
        let order = Ordering::SeqCst;
        let _ = CLOSED_BY.compare_exchange(closed_by, 0, order, order);
        return false;
    }
    true
}

/// Whether any copy of NVML is initialised.
fn is_initialised() -> bool {
    [&REFERENCES, &OTHER_REFERENCES].iter().any(|count| count.load(Ordering::SeqCst) > 0)
}

/// Whether this call initialises NVML and attaches it to the devices.
fn attaches(frame: &NvmlFrame) -> bool {
    const NO_ATTACH: u64 = 2;
    let [flags, ..] = frame.arguments;
    functions::index(frame.place) != Some(INIT_WITH_FLAGS) || flags & NO_ATTACH == 0
}

/// Answers an `nvmlInit` or `nvmlShutdown` call in a process that uses CUDA: changes only the count
/// of users. NVML itself stays initialised there, because it could not be initialised again while
/// the process is checkpointed. Also answers any other call if the application has shut NVML down.
/// Returns `None` if the call must reach NVML.
fn counted_init(frame: &NvmlFrame, class: Class) -> Option<u32> {
    if REFERENCES.load(Ordering::SeqCst) == 0 || !functions::is_held(frame.place) {
        return None;
    }
    let stays = process::page().is_some();
    match class {
        Class::Init if stays && (ATTACHED.load(Ordering::SeqCst) || !attaches(frame)) => {
            USERS.fetch_add(1, Ordering::SeqCst);
            Some(code::SUCCESS)
        }
        Class::Init => None,
        _ if USERS.load(Ordering::SeqCst) == 0 => Some(code::UNINITIALIZED),
        Class::Shutdown if stays => {
            let less = |count: u32| count.checked_sub(1);
            let took = USERS.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
            Some(if took.is_ok() { code::SUCCESS } else { code::UNINITIALIZED })
        }
        _ => None,
    }
}

fn is_open() -> bool {
    PROCESS.nvml.gate.load(Ordering::SeqCst) == OPEN
}

fn count(class: Class) {
    if class != Class::Wait || !PROCESS.nvml.waits.count(sys::gettid()) {
        PROCESS.nvml.inside.fetch_add(1, Ordering::SeqCst);
    }
}

fn uncount(class: Class) {
    if class == Class::Wait && PROCESS.nvml.waits.uncount(sys::gettid()) {
        return;
    }
    // In a child that was forked during a call, the count has started at 0, so it must not go below
    // 0.
    let less = |count: u32| count.checked_sub(1);
    let _ = PROCESS.nvml.inside.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
}

/// Waits until the gate opens, but not beyond the timeout of the application's own call. Returns
/// false if that timeout has passed.
fn wait_for_event(frame: &mut NvmlFrame) -> bool {
    const LOOK_AGAIN_MS: u64 = 1_000;
    frame.begin_wait();
    let left_ms = frame.left_us().div_ceil(1_000);
    if left_ms > 0 {
        sys::futex_wait(&PROCESS.nvml.gate, CLOSED, left_ms.min(LOOK_AGAIN_MS));
    }
    left_ms > 0
}

/// Blocks a caller until calls may reach NVML. Requests a restore at once if the process is
/// checkpointed. In other phases of a move it requests a restore only after 2 s, because the move
/// usually ends sooner.
fn wait() {
    const QUIET_US: u64 = 2_000_000;
    const LOOK_AGAIN_MS: u64 = 20;
    let Some((place, page)) = process::place() else { return };
    let began_us = sys::now_us();
    let mut wakes = false;
    while let Some(slot) = place.slot().filter(|_| !is_open()) {
        let now_us = sys::now_us();
        let is_checkpointed = page.phase.load(Ordering::SeqCst) == Phase::Checkpointed as u32;
        if wakes {
            if page.renew_wait(slot, now_us) {
                process::poke_agent();
            }
        } else if is_checkpointed || now_us.saturating_sub(began_us) >= QUIET_US {
            wakes = true;
            PROCESS.waiting_hook.store(affinode_cuda_sys::hook::UNLISTED, Ordering::Relaxed);
            page.begin_wait(slot, now_us);
            process::poke_agent();
        }
        sys::futex_wait(&PROCESS.nvml.gate, CLOSED, LOOK_AGAIN_MS);
    }
    if let Some(slot) = place.slot().filter(|_| wakes) {
        let now_us = sys::now_us();
        page.held_us.fetch_add(now_us.saturating_sub(began_us), Ordering::Relaxed);
        page.end_wait(slot, now_us);
    }
}

/// Opens or closes the gate as this phase of a move requires. The gate is closed from before the
/// driver locks the process until after the driver unlocks the process.
pub fn set_phase(phase: Phase) {
    let blocks = matches!(
        phase,
        Phase::Locking
            | Phase::Locked
            | Phase::Checkpointing
            | Phase::Checkpointed
            | Phase::Restoring
            | Phase::Unlocking
    );
    // If the parent closed the gate before the fork, the child's copy of NVML stays locked, so the
    // parent's number is kept.
    let own = process::registration();
    if [0, own].contains(&CLOSED_BY.load(Ordering::SeqCst)) {
        CLOSED_BY.store(if blocks { own } else { 0 }, Ordering::SeqCst);
    }
    PROCESS.nvml.gate.store(if blocks { CLOSED } else { OPEN }, Ordering::SeqCst);
    if !blocks {
        sys::futex_wake_all(&PROCESS.nvml.gate);
    }
}

/// Waits until no call is inside NVML. The gate must be closed. Returns false if a call is still
/// inside NVML after the timeout.
pub fn drain(timeout_ms: u32) -> bool {
    const MAX_SLEEP_US: u64 = 2_000;
    let end_us = sys::now_us() + u64::from(timeout_ms) * 1_000;
    let mut sleep_us = 20;
    while PROCESS.nvml.inside.load(Ordering::SeqCst) > 0 || PROCESS.nvml.waits.has_any() {
        if sys::now_us() >= end_us {
            return false;
        }
        sys::sleep_us(sleep_us);
        sleep_us = (2 * sleep_us).min(MAX_SLEEP_US);
    }
    true
}

/// Whether a caller has requested figures since the last call of this function.
pub fn take_asked() -> bool {
    PROCESS.nvml.asked.load(Ordering::Relaxed) && PROCESS.nvml.asked.swap(false, Ordering::SeqCst)
}

/// Makes the agent request new figures from the controller.
fn ask() {
    PROCESS.nvml.asked.store(true, Ordering::SeqCst);
    process::poke_agent();
}

#[cfg(test)]
mod tests;
