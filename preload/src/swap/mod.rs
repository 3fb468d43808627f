//! Device memory that the agent can carry to host memory by itself, where the controller
//! asked for an engine that does so.
//!
//! ```text
//! cuMemAlloc of 2 MiB and more ──> addresses reserved, physical memory made and mapped
//!     park:   copied to the pool ──> unmapped, released; the addresses stay reserved
//!     unpark: made, mapped, copied back
//!
//! cuMemCreate ──> the same, at the addresses where the application maps it
//! ```
//!
//! The application sees the same addresses and contents all along. Whatever the driver does
//! not let us do is left to the driver: the allocation is then one of its own. The content
//! never leaves the process, so nobody's death but its own can lose it.
//!
//! | module | what |
//! | --- | --- |
//! | `stand_ins`, `calls` | what stands in for the driver's functions; those about allocations |
//! | `pools` | memory in the order of streams |
//! | `vmm`, `blocks` | the same for physical memory that the application maps by itself |
//! | `backing`, `contexts` | physical memory for addresses; contexts and their end |
//! | `addresses` | of what was freed |
//! | `bus` | whether others could be let at such memory |
//! | `table`, `sorted`, `list`, `order` | what is carried, by key; by age |
//! | `copy`, `pool`, `filling` | out and home; the host memory for it, and its pages |
//! | `released` | device memory that was given back |
//! | `near` | processors near the GPU, from whose memory it is taken |
//! | `digest`, `shortage` | what of it has not changed by the next time; whether it can be kept |
//! | `zeros` | what of it need not be stored at all |
//! | `check` | whether it has come home as it left |
//! | `copier` | home through a process that fills the memory while the driver restores the rest |
//! | `ahead`, `handed` | host memory that is ready before; out through that process |
//! | `ipc` | legacy IPC, which the driver does not have for such memory |
//! | `driver` | the driver's functions |

mod addresses;
mod alloc_wrappers;
mod allocations;
mod backing;
mod checksum;
mod chunked_map;
mod contexts;
mod copier_offload;
pub mod copier_restore;
mod copy;
mod digest;
mod driver;
#[cfg(test)]
pub mod fake_driver;
mod host_pressure;
mod ipc;
mod layout;
pub mod loader_lock;
mod mmap_vec;
mod numa;
mod peer_devices;
mod prefault;
mod prefault_ahead;
mod scrub;
mod staging;
mod stream_pools;
mod vmm;
mod vmm_handles;
mod wrappers;
mod zeros;

use core::cell::UnsafeCell;
use core::ffi::CStr;
use core::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use affinode_cuda_sys::hook;
use affinode_proto::wire::Engine;

use self::allocations::{AllocationTables, Allocations};
pub use self::copier_offload::{bytes as handed_bytes, settle};
pub use self::copy::{
    LOADER_HELD, NO_HOST_MEMORY, copy_in, copy_out, holds_imported, is_broken, is_copied_out,
    release_copied_out, tidy,
};
pub use self::ipc::answer;
pub use self::peer_devices::is_reached;
use self::prefault_ahead::PrefaultJob;
pub use self::prefault_ahead::{
    end_preparation, go_on as go_on_preparing, is_told as is_prepared, prepare,
};
pub use self::scrub::{ScrubState, absorb_scrub_stall};
use self::staging::StagingPool;
pub use self::staging::TrimResult;
pub use self::stream_pools::make_room;
pub use self::vmm::translate;
use self::wrappers::FUNCTIONS;
use crate::{libc, libcuda, process, sys};

/// Physical memory comes in multiples of this. A device where it does not is left alone.
const GRANULE_BYTES: usize = 2 << 20;
/// Most devices of a process that are told apart.
const DEVICES: usize = 64;

/// All of it in pages that a forked child finds zeroed: the child has no driver, and none of
/// the memory is its own.
#[repr(C, align(4096))]
struct SwapState {
    /// 1 once memory may be carried: calls are looked at.
    in_use: AtomicU32,
    /// 1 while new allocations are to be carried.
    wanted: AtomicU32,
    /// 1 once a context was made of a part of a device.
    green: AtomicU32,
    /// 1 once memory of a copier's making may be held by something that is not in the tables.
    strayed: AtomicU32,
    table_lock: FutexLock,
    tables: UnsafeCell<AllocationTables>,
    /// Held while the application's own blocks change, in the driver and here.
    vmm_lock: FutexLock,
    /// Held while it is made sure that others reach this process.
    reach_lock: FutexLock,
    /// Held while it is looked at what memory nobody uses any more, and while that goes.
    unused_lock: FutexLock,
    /// 1 while there may be such that was not looked at.
    unsettled: AtomicU32,
    /// Held while a context ends, and while the agent uses one beside the application.
    contexts_lock: FutexLock,
    /// The agent's alone, but for what [`Pool::context_ends`] changes under the lock of contexts.
    pool: UnsafeCell<StagingPool>,
    /// Devices that may reach the memory of each device, beside itself, as a bit set.
    peers: [AtomicU64; DEVICES],
    /// What the last move out did not have to copy.
    unchanged_bytes: AtomicU64,
    /// What it left out, because it is all zero.
    zero_bytes: AtomicU64,
    /// 1: a return looks whether everything is as it was.
    checks: AtomicU32,
    /// How far host memory is prepared, and how much.
    ahead: PrefaultJob,
    /// Contexts in which something small stays allocated.
    anchored: [AtomicUsize; 16],
}

// SAFETY: the cells are reached through `tables` and `with_pool` alone.
unsafe impl Sync for SwapState {}

static SWAP: SwapState = SwapState {
    in_use: AtomicU32::new(0),
    wanted: AtomicU32::new(0),
    green: AtomicU32::new(0),
    strayed: AtomicU32::new(0),
    table_lock: FutexLock::new(),
    tables: UnsafeCell::new(AllocationTables::empty()),
    vmm_lock: FutexLock::new(),
    reach_lock: FutexLock::new(),
    unused_lock: FutexLock::new(),
    unsettled: AtomicU32::new(0),
    contexts_lock: FutexLock::new(),
    pool: UnsafeCell::new(StagingPool::none()),
    peers: [const { AtomicU64::new(0) }; DEVICES],
    unchanged_bytes: AtomicU64::new(0),
    zero_bytes: AtomicU64::new(0),
    checks: AtomicU32::new(0),
    ahead: PrefaultJob::none(),
    anchored: [const { AtomicUsize::new(0) }; 16],
};

/// A lock that sleeps. Whoever holds it has signals blocked, so no handler waits for what it
/// has interrupted.
struct FutexLock(AtomicU32);

impl FutexLock {
    const FREE: u32 = 0;
    const HELD: u32 = 1;
    const AWAITED: u32 = 2;

    const fn new() -> FutexLock {
        FutexLock(AtomicU32::new(FutexLock::FREE))
    }

    fn hold<R>(&self, body: impl FnOnce() -> R) -> R {
        let mask = sys::set_signal_mask(!libc::internal_signals());
        if !self.try_take() {
            while self.0.swap(FutexLock::AWAITED, Ordering::Acquire) != FutexLock::FREE {
                sys::futex_wait(&self.0, FutexLock::AWAITED, 100);
            }
        }
        let result = body();
        self.let_go();
        sys::set_signal_mask(mask);
        result
    }

    /// The same, unless somebody holds it.
    fn hold_if_free<R>(&self, body: impl FnOnce() -> R) -> Option<R> {
        let mask = sys::set_signal_mask(!libc::internal_signals());
        let result = self.try_take().then(|| {
            let result = body();
            self.let_go();
            result
        });
        sys::set_signal_mask(mask);
        result
    }

    /// Takes it where it is free.
    fn try_take(&self) -> bool {
        let (free, held) = (FutexLock::FREE, FutexLock::HELD);
        self.0.compare_exchange(free, held, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Whether somebody waits for it.
    #[cfg(test)]
    fn is_awaited(&self) -> bool {
        self.0.load(Ordering::Relaxed) == FutexLock::AWAITED
    }

    fn let_go(&self) {
        if self.0.swap(FutexLock::FREE, Ordering::Release) == FutexLock::AWAITED {
            sys::futex_wake_all(&self.0);
        }
    }
}

/// Runs `body` on the tables. No call into the driver belongs inside.
fn tables<R>(body: impl FnOnce(&mut AllocationTables) -> R) -> R {
    // SAFETY: nobody else has them while the lock is held, and `body` cannot come here again.
    SWAP.table_lock.hold(|| body(unsafe { &mut *SWAP.tables.get() }))
}

/// Runs `body` on the allocations.
fn locked<R>(body: impl FnOnce(&mut Allocations) -> R) -> R {
    tables(|tables| body(&mut tables.allocations))
}

/// Runs `body` on the pool, with no context ending meanwhile.
fn with_pool<R>(body: impl FnOnce(&mut StagingPool) -> R) -> R {
    // SAFETY: as above.
    SWAP.contexts_lock.hold(|| body(unsafe { &mut *SWAP.pool.get() }))
}

/// The same, unless a context ends just now: that may take as long as the work in it, and the agent
/// has others to listen to.
fn with_pool_if_free<R>(body: impl FnOnce(&mut StagingPool) -> R) -> Option<R> {
    // SAFETY: as above.
    SWAP.contexts_lock.hold_if_free(|| body(unsafe { &mut *SWAP.pool.get() }))
}

/// What shim or controller have left, for as long as no controller has said anything.
pub fn set_engine_by_file(file: &CStr) {
    let mut buffer = [0; 16];
    if let Some(engine) = sys::read_file(file, &mut buffer).and_then(Engine::parse) {
        set_engine(engine);
    }
}

/// The controller says how memory shall leave the device. What is allocated already stays
/// what it is.
pub fn set_engine(engine: Engine) {
    let wanted = engine != Engine::Checkpoint
        && process::page().is_some_and(|page| page.hazards().is_empty())
        && find_all()
        && SWAP.green.load(Ordering::Acquire) == 0;
    SWAP.wanted.store(u32::from(wanted), Ordering::Release);
}

/// Finds all that is needed; false when something is missing. May be called by several threads at
/// once.
fn find_all() -> bool {
    if SWAP.in_use.load(Ordering::Acquire) == 1 {
        return true;
    }
    // SAFETY: whole pages of zero-initialised data, hence anonymous memory.
    let wiped = unsafe { sys::wipe_on_fork((&raw const SWAP).cast(), size_of::<SwapState>()) };
    if wiped.is_err() || !driver::is_complete() {
        return false;
    }
    for (function, real) in FUNCTIONS.iter().zip(&REAL) {
        let found = hook::name(*function as u32 + 1).map(str::as_bytes).and_then(libcuda::function);
        real.store(found.unwrap_or(0), Ordering::Relaxed);
    }
    SWAP.in_use.store(1, Ordering::Release);
    true
}

/// The driver's functions that something stands in for, in the order of [`FUNCTIONS`].
static REAL: [AtomicUsize; FUNCTIONS.len()] = [const { AtomicUsize::new(0) }; FUNCTIONS.len()];

/// Whether memory is carried in this process, or was.
pub fn is_in_use() -> bool {
    SWAP.in_use.load(Ordering::Acquire) == 1
}

/// What is to be called in place of a driver's function, if anything is. `number`: the hook's.
pub fn stand_in(number: u32, real: usize) -> Option<usize> {
    if !is_in_use() {
        return ipc::opening(number, real);
    }
    if real == 0 {
        return None;
    }
    let index = REAL.iter().position(|known| known.load(Ordering::Relaxed) == real)?;
    FUNCTIONS.get(index).copied().and_then(wrappers::stand_in)
}

/// What the last move out did not store, because it is all zero, in bytes.
pub fn zero_bytes() -> u64 {
    SWAP.zero_bytes.load(Ordering::Relaxed)
}

/// What the last move out did not have to copy, in bytes.
pub fn unchanged_bytes() -> u64 {
    SWAP.unchanged_bytes.load(Ordering::Relaxed)
}

/// Changes the bytes that the page says are carried.
fn count(bytes: i64) {
    if let Some(page) = process::page() {
        page.swappable_bytes.fetch_add(bytes.cast_unsigned(), Ordering::Relaxed);
    }
}
