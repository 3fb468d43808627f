//! Handles the CUDA calls that an offloaded process makes while it exits.
//!
//! Exit handlers and destructors release the program's memory and handles on the GPU. The end of
//! the process frees all of them in any case. So a release needs neither the GPU nor VRAM:
//!
//! ```text
//! call at a closed gate, all work has ended, `exit` is on the stack
//!   the driver has ended ──────────────> the agent opens the gate, the driver returns DEINITIALIZED
//!   a release of a handle ─────────────> SUCCESS; recorded
//!   a wait for work ───────────────────> SUCCESS
//!   anything else ─────────────────────> restores the process; recorded releases are made first
//! ```
//!
//! The thread whose releases were recorded makes them in the driver, in the same order, before its
//! next call reaches the driver. After the release of a context, the table above no longer applies.
//! Every further call restores the process, because it is not known what the driver would return
//! for handles in that context.

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use affinode_cuda_sys::hook::{self, Class};
use affinode_cuda_sys::result;

use crate::hook_table::HookEntry;
use crate::{elf, libc, libcuda, process, swap, sys};

/// Maximum number of releases that can be recorded. If a program makes more of them during its
/// exit, its process is restored.
const MAX_NOTED: usize = 4096;
/// Number of bytes of the stack that are searched for a return address into `exit`.
const MAX_STACK_BYTES: usize = 256 << 10;

/// Functions whose only effect is to release the resources of a handle. Functions that unregister
/// host memory are not listed, because the program may unmap the memory afterwards. The names are
/// one string, because a table of references would cost every process a relocation per name.
const RELEASES: &[u8] = b"cuArrayDestroy cuEventDestroy cuGraphExecDestroy cuLibraryUnload \
    cuMemAddressFree cuMemFree cuMemFreeHost cuMemRelease cuMemUnmap cuMipmappedArrayDestroy \
    cuModuleUnload cuStreamDestroy cuSurfObjectDestroy cuTexObjectDestroy";
/// Functions that release a context and everything in it, as one string.
const CONTEXT_RELEASES: &[u8] = b"cuCtxDestroy cuDevicePrimaryCtxRelease";

fn names(list: &[u8]) -> impl Iterator<Item = &[u8]> {
    list.split(|byte| *byte == b' ').filter(|name| !name.is_empty())
}

/// 1 once a thread that called CUDA at the closed gate was found to be inside `exit`.
static BEGUN: AtomicU32 = AtomicU32::new(0);

/// Whether a thread that called CUDA at the closed gate was ever found to be inside `exit`.
pub fn has_begun() -> bool {
    BEGUN.load(Ordering::Relaxed) != 0
}

/// Begin and end address of the code of `exit`, for each loaded object that defines it. Unused
/// entries are 0.
static CODE: [[AtomicUsize; 2]; 4] = [const { [const { AtomicUsize::new(0) }; 2] }; 4];
static CODE_IS_KNOWN: AtomicU32 = AtomicU32::new(0);

/// Finds the code of `exit` and stores its addresses, once. It is called at the first CUDA call,
/// when it is safe to walk the loader's list of objects: see [`libcuda`].
pub fn find_code() {
    if CODE_IS_KNOWN.load(Ordering::Acquire) != 0 {
        return;
    }
    let mut places = CODE.iter();
    elf::each_object(|object| {
        let Some((begin, bytes)) = object.function_extent(b"exit") else { return false };
        let Some([from, to]) = places.next() else { return true };
        from.store(begin, Ordering::Relaxed);
        // `exit` never returns, so the call in its code may be its last instruction.
        to.store(begin.saturating_add(bytes + 1), Ordering::Relaxed);
        false
    });
    CODE_IS_KNOWN.store(1, Ordering::Release);
}

fn is_in_code(word: usize) -> bool {
    CODE.iter().any(|[from, to]| {
        let from = from.load(Ordering::Relaxed);
        // A return address into `exit` is never the address at which `exit` begins.
        from != 0 && word > from && word < to.load(Ordering::Relaxed)
    })
}

/// Whether the calling thread is inside `exit`. This is so if its stack, from the address `stack`
/// on, contains a return address into `exit`. `exit` never returns, so the address cannot be from
/// an earlier call.
pub fn is_running(stack: usize) -> bool {
    const CHUNK_BYTES: usize = 2048;
    let mut words = [0_usize; CHUNK_BYTES / size_of::<usize>()];
    let end = stack.saturating_add(MAX_STACK_BYTES);
    let mut at = stack & !(size_of::<usize>() - 1);
    while at < end {
        // A read must not cross the end of a page, so that the last page of the stack is read
        // completely.
        let bytes = CHUNK_BYTES - at % CHUNK_BYTES;
        let Some(words) = words.get_mut(..bytes / size_of::<usize>()) else { return false };
        if !sys::read_own_memory(at, words) {
            return false;
        }
        if words.iter().any(|word| is_in_code(*word)) {
            BEGUN.store(1, Ordering::Relaxed);
            return true;
        }
        at += bytes;
    }
    false
}

/// A recorded release of a handle. Its call returned SUCCESS to the program without reaching the
/// driver.
#[derive(Clone, Copy)]
struct PendingRelease {
    number: u32,
    real: usize,
    arguments: [u64; 2],
}

/// All recorded releases. They are all calls of one thread.
struct RecordedRelease {
    releases: [PendingRelease; MAX_NOTED],
    count: usize,
    /// Number of recorded releases that the library has already made in the driver after the
    /// restore.
    made: usize,
    context_is_gone: bool,
}

struct ReleaseCell(UnsafeCell<RecordedRelease>);

// SAFETY: the record is reached only through `with_record`. That function admits one thread at a
// time, and none of its signal handlers.
unsafe impl Sync for ReleaseCell {}

const NO_RELEASE: PendingRelease = PendingRelease { number: 0, real: 0, arguments: [0; 2] };
static RECORDED: ReleaseCell = ReleaseCell(UnsafeCell::new(RecordedRelease {
    releases: [NO_RELEASE; MAX_NOTED],
    count: 0,
    made: 0,
    context_is_gone: false,
}));
/// The thread whose releases are recorded, or 0 if there is none. The upper half is the thread's
/// id, the lower half the registration number of its process. Only one thread's releases are
/// recorded, although two threads may be inside `exit` at once (glibc before 2.41). The
/// registration number is needed because a child may be forked from inside `exit`.
static OWNER: AtomicU64 = AtomicU64::new(0);

fn own_mark() -> u64 {
    u64::from(sys::gettid()) << 32 | u64::from(process::registration())
}

/// Makes the calling thread the owner of the recorded releases, unless another thread of this
/// process is the owner. Returns whether the calling thread is the owner afterwards.
fn becomes_owner() -> bool {
    let own = own_mark();
    let owner = OWNER.load(Ordering::SeqCst);
    let is_free = owner == 0 || owner as u32 != own as u32;
    // Block signals, so that a handler of this thread never finds a record that is not initialised.
    let mask = sys::set_signal_mask(!libc::internal_signals());
    let is_new = is_free
        && OWNER.compare_exchange(owner, own, Ordering::SeqCst, Ordering::SeqCst).is_ok()
        && with_record(RecordedRelease::begin).is_some();
    sys::set_signal_mask(mask);
    is_new || owner == own
}

/// Runs `body` on the recorded releases, if they belong to the calling thread. Returns `None`
/// otherwise. `body` must not call the driver.
fn with_record<R>(body: impl FnOnce(&mut RecordedRelease) -> R) -> Option<R> {
    if OWNER.load(Ordering::SeqCst) != own_mark() {
        return None;
    }
    // Block signals, because a signal handler of this thread may make calls, too.
    let mask = sys::set_signal_mask(!libc::internal_signals());
    // SAFETY: no other thread and no signal handler of this thread gets here, and `body` cannot get
    // here again.
    let result = body(unsafe { &mut *RECORDED.0.get() });
    sys::set_signal_mask(mask);
    Some(result)
}

impl RecordedRelease {
    fn begin(&mut self) {
        (self.count, self.made, self.context_is_gone) = (0, 0, false);
    }

    /// Records a release. Returns false if only the driver can determine its result, for example
    /// because the handle was already released.
    fn add(&mut self, release: PendingRelease, kind: ReleaseKind) -> bool {
        let known = self.releases.iter().take(self.count);
        let is_repeated = known
            .into_iter()
            .any(|before| before.number == release.number && before.arguments == release.arguments);
        let [handle, _] = release.arguments;
        let is_null = handle == 0 && kind == ReleaseKind::Release;
        let Some(place) = self.releases.get_mut(self.count).filter(|_| !is_repeated && !is_null)
        else {
            return false;
        };
        *place = release;
        self.count += 1;
        self.context_is_gone = kind == ReleaseKind::ContextRelease;
        true
    }

    /// Returns the next recorded release that the driver has not received yet, and marks it as
    /// made. The caller must make the release.
    fn take(&mut self) -> Option<PendingRelease> {
        let next = self.releases.get(..self.count)?.get(self.made).copied()?;
        self.made += 1;
        Some(next)
    }
}

/// Kind of a CUDA call that a program makes while it exits. The kind determines whether the library
/// answers the call itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReleaseKind {
    /// A call whose only effect is the release of a handle.
    Release,
    /// A call that releases a context and everything in it.
    ContextRelease,
    /// A call that waits for GPU work. Inside `exit` all work has ended, so the library returns
    /// SUCCESS.
    Wait,
    /// A call that needs the GPU or the driver.
    Other,
}

fn kind(number: u32, class: Class) -> ReleaseKind {
    let Some(name) = hook::name(number) else { return ReleaseKind::Other };
    let base = hook::base(name.as_bytes());
    if names(RELEASES).any(|name| name == base) {
        ReleaseKind::Release
    } else if names(CONTEXT_RELEASES).any(|name| name == base) {
        ReleaseKind::ContextRelease
    } else if class == Class::Sync {
        ReleaseKind::Wait
    } else {
        ReleaseKind::Other
    }
}

/// Whether the driver in this process still works. During `exit` it stops, and then returns
/// DEINITIALIZED.
fn driver_is_up() -> bool {
    libcuda::checkpoint_state().is_some_and(|(code, _)| code == result::SUCCESS)
}

/// Whether the library answers a call inside `exit` with SUCCESS, without calling the driver. If
/// such a call is a release, this function also records it. May be called only after all work on
/// the GPU has ended, and by a thread that [runs](is_running) `exit`.
pub fn is_answered(entry: &HookEntry, real: usize, arguments: &[u64; 6]) -> bool {
    let kind = kind(entry.number(), entry.class());
    let [handle, second, ..] = *arguments;
    // If the driver has ended, the call must reach it, because it then returns DEINITIALIZED.
    if kind == ReleaseKind::Other || !becomes_owner() || !driver_is_up() {
        return false;
    }
    let release = PendingRelease { number: entry.number(), real, arguments: [handle, second] };
    let is_answered = with_record(|record| {
        !record.context_is_gone && (kind == ReleaseKind::Wait || record.add(release, kind))
    });
    if is_answered == Some(true) && kind != ReleaseKind::Wait {
        process::leave_fast_path();
    }
    is_answered == Some(true)
}

/// Calls the driver for each recorded release of the calling thread. The thread must already be
/// counted as inside the driver.
pub fn catch_up() {
    if OWNER.load(Ordering::Relaxed) == 0 {
        return;
    }
    // Take the releases one by one. A signal handler that calls the driver in between then
    // continues with the next release.
    while let Some(release) = with_record(RecordedRelease::take).flatten() {
        let target = swap::stand_in(release.number, release.real).unwrap_or(release.real);
        let [first, second] = release.arguments;
        // SAFETY: the driver's function of this number, or its wrapper, with the
        // arguments that the program called it with; none of `RELEASES` has more than two.
        unsafe {
            let call: unsafe extern "C" fn(u64, u64) -> u32 = core::mem::transmute(target);
            let _ = call(first, second);
        }
    }
    if with_record(RecordedRelease::begin).is_some() {
        OWNER.store(0, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn empty() -> Box<RecordedRelease> {
        Box::new(RecordedRelease {
            releases: [NO_RELEASE; MAX_NOTED],
            count: 0,
            made: 0,
            context_is_gone: false,
        })
    }

    #[test]
    fn release_is_made_once_and_in_order() {
        let mut record = empty();
        let release = |n: u64| PendingRelease { number: 3, real: n as usize, arguments: [n, 0] };
        for n in 1..=3 {
            assert!(record.add(release(n), ReleaseKind::Release));
        }
        assert!(!record.add(release(2), ReleaseKind::Release), "the release is repeated");
        assert!(!record.add(release(0), ReleaseKind::Release), "the handle of the release is null");
        let made: Vec<_> = core::iter::from_fn(|| record.take()).map(|one| one.real).collect();
        assert_eq!(made, [1, 2, 3]);
        assert!(record.take().is_none() && !record.context_is_gone);
        record.begin();
        assert!(record.take().is_none());
        assert!(record.add(release(0), ReleaseKind::ContextRelease) && record.context_is_gone);
        record.begin();
        assert!((1..=MAX_NOTED as u64).all(|n| record.add(release(n), ReleaseKind::Release)));
        assert!(!record.add(release(9_999), ReleaseKind::Release), "the record is full");
    }

    #[test]
    fn exit_is_found_on_the_stack_alone() {
        find_code();
        let [from, to] = &CODE[0];
        let (from, to) = (from.load(Ordering::Relaxed), to.load(Ordering::Relaxed));
        assert!(from != 0 && to > from, "libc defines exit");
        let stack = [0_usize, from, 0];
        let at = stack.as_ptr() as usize;
        assert!(!is_in_code(stack[1]), "a pointer to exit is not a return address");
        assert!(is_in_code(from + 1) && is_in_code(to - 1) && !is_in_code(to));
        assert!(!is_running(at), "a test is not inside exit");
        let stack = [0_usize, from + 5, 0];
        assert!(is_running(stack.as_ptr() as usize));
        assert!(!is_running(usize::MAX - 4096), "no memory");
    }

    #[test]
    fn kinds_are_told_by_name_in_every_version() {
        let of = |name: &str| {
            let (number, class) = hook::classify(name.as_bytes());
            kind(number, class)
        };
        for name in ["cuMemFree", "cuMemFree_v2", "cuStreamDestroy_v2", "cuModuleUnload"] {
            assert_eq!(of(name), ReleaseKind::Release, "{name}");
        }
        for name in ["cuCtxDestroy_v2", "cuDevicePrimaryCtxRelease", "cuDevicePrimaryCtxRelease_v2"]
        {
            assert_eq!(of(name), ReleaseKind::ContextRelease, "{name}");
        }
        assert_eq!(of("cuCtxSynchronize"), ReleaseKind::Wait);
        for name in ["cuMemcpyDtoH_v2", "cuMemAlloc_v2", "cuMemHostUnregister", "cuUnknownFree"] {
            assert_eq!(of(name), ReleaseKind::Other, "{name}");
        }
    }

    #[test]
    fn every_release_is_a_hooked_function() {
        for name in names(RELEASES).chain(names(CONTEXT_RELEASES)) {
            assert!(hook::find(name).is_some(), "{}", String::from_utf8_lossy(name));
        }
    }
}
