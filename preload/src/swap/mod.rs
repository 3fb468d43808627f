//! Swapping of device memory. If the controller has set an engine (the method of moving memory)
//! that copies, this library allocates the application's memory itself, and the agent copies it to
//! host memory and back.
//!
//! ```text
//! cuMemAlloc of 2 MiB and more ──> addresses reserved, physical memory created and mapped
//!   copy out: copied to the staging pool ──> unmapped, released; the addresses stay reserved
//!   copy in:  created, mapped, copied back
//!
//! cuMemCreate ──> the same, at the addresses where the application maps it
//! ```
//!
//! The application sees the same addresses and contents at all times. If the driver refuses a step
//! for an allocation, that allocation is left to the driver. At all times the process itself holds
//! the memory that contains the content. So the content is lost only if this process ends.
//!
//! | module | content |
//! | --- | --- |
//! | `wrappers`, `alloc_wrappers` | the table of wrappers; wrappers of the driver's functions for allocations |
//! | `stream_pools` | stream-ordered memory (`cuMemAllocAsync`) |
//! | `vmm`, `vmm_handles` | wrappers for physical memory that the application maps itself; its handles |
//! | `backing`, `contexts` | physical memory for addresses; contexts and their end |
//! | `addresses` | reserved addresses of freed allocations |
//! | `peer_devices` | whether other devices can reach the process's device memory |
//! | `pending_work` | the wait for the GPU's work before a copy |
//! | `local_memory` | the stacks of the GPU's threads, which a copy out frees |
//! | `allocations`, `chunked_map`, `mmap_vec` | the tables of swappable memory, and their containers |
//! | `layout` | the order of the content in the staging pool |
//! | `copy` | copy out and copy in |
//! | `staging`, `prefault` | the staging pool, which is the host memory for the copy; its pages |
//! | `disk`, `disk_store`, `disk_restore`, `disk_cipher` | content of an offloaded process in a disk file |
//! | `host_pool` | the connection to the node's host pool, which may give the staging pool's pages |
//! | `scrub` | the driver's stall after much device memory was freed |
//! | `numa` | the processors nearest to the GPU, which touch the staging pool's pages |
//! | `digest`, `host_pressure` | which content is unchanged; whether host memory is short |
//! | `zeros` | zero pages, which are not stored |
//! | `checksum` | whether the content after a restore is what was copied out |
//! | `copier_restore` | restore with the copier, which fills memory while the driver restores the context |
//! | `prefault_host_pool` | memory of the host pool that is registered before a copy out |
//! | `prefault_ahead`, `copier_offload` | host memory prepared before an offload; offload with the copier |
//! | `ipc` | legacy IPC, which the driver does not support for swappable memory |
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
mod copy_in;
mod digest;
mod disk;
mod disk_cipher;
mod disk_restore;
mod disk_store;
mod driver;
mod early_release;
#[cfg(test)]
pub mod fake_driver;
pub mod host_pool;
mod host_pressure;
mod ipc;
mod layout;
pub mod loader_lock;
pub mod local_memory;
mod mmap_vec;
mod numa;
mod peer_devices;
pub mod pending_work;
mod prefault;
mod prefault_ahead;
mod prefault_host_pool;
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
use affinode_proto::wire::{Engine, Hazards};

use self::allocations::{AllocationTables, Allocations};
pub use self::copier_offload::{bytes as exported_bytes, settle};
pub use self::copy::{
    GIVEN_UP, LOADER_HELD, NO_HOST_MEMORY, copy_out, holds_imported, is_broken, is_copied_out,
    release_copied_out, tidy,
};
pub use self::copy_in::copy_in;
use self::disk::DiskJob;
pub use self::disk::{begin as store_on_disk, cancel as stop_storing, go_on as go_on_storing};
pub use self::ipc::answer;
use self::local_memory::ReleasedLimits;
pub use self::peer_devices::is_reached;
use self::pending_work::ValueList;
use self::prefault_ahead::PrefaultJob;
pub use self::prefault_ahead::{
    end_preparation, go_on as go_on_preparing, is_told as is_prepared, prepare,
};
use self::prefault_host_pool::HostPoolPrefault;
pub use self::prefault_host_pool::{
    PrefaultStep, begin as prefault_host_pool, end as end_host_pool_prefault,
    go_on as go_on_prefaulting_host_pool,
};
pub use self::scrub::{ScrubState, absorb_scrub_stall};
use self::staging::StagingPool;
pub use self::staging::TrimResult;
pub use self::stream_pools::{make_room, unused_pool_bytes};
pub use self::vmm::translate;
use self::wrappers::FUNCTIONS;
use crate::{hazard, libc, libcuda, process, sys};

/// Granularity of physical memory, in bytes. On devices whose granularity does not divide this
/// size, no memory is swappable.
const GRANULE_BYTES: usize = 2 << 20;
/// Maximum number of devices of a process that this module supports.
const DEVICES: usize = 64;

/// State of the swap module. The kernel zeroes its pages in a forked child, because the child has
/// neither the parent's driver state nor its device memory.
#[repr(C, align(4096))]
struct SwapState {
    /// 1 as soon as the process may have swappable memory, which the library can copy to host
    /// memory. From then on the wrappers inspect the application's calls.
    in_use: AtomicU32,
    /// 1 while the library makes new allocations swappable.
    wanted: AtomicU32,
    /// 1 once the process has created a green context, a context with only a part of a device.
    green: AtomicU32,
    /// 1 once a reference that is in no table may keep memory of a copier (a process that fills the
    /// memory of other processes) allocated.
    strayed: AtomicU32,
    table_lock: FutexLock,
    tables: UnsafeCell<AllocationTables>,
    /// Lock that is held while memory of `cuMemCreate` changes in the driver and in the tables.
    vmm_lock: FutexLock,
    /// Lock for the setup of the socket on which other processes request memory of this process.
    reach_lock: FutexLock,
    /// Lock that is held while unused memory of stream pools is checked and freed.
    unused_lock: FutexLock,
    /// 1 while stream pools may have unused memory that must be checked and possibly freed.
    unsettled: AtomicU32,
    /// Lock that is held while a context ends, and while the agent uses a context of the
    /// application.
    contexts_lock: FutexLock,
    /// The staging pool, which is host memory for copied content. Only the agent uses it, except
    /// for [`StagingPool::context_ends`]. Each use holds the lock of contexts.
    pool: UnsafeCell<StagingPool>,
    /// For each device, the other devices that may access its memory, as a bit set.
    peers: [AtomicU64; DEVICES],
    /// Bytes that the last copy out did not copy, because the staging pool contained them already.
    unchanged_bytes: AtomicU64,
    /// Bytes that the last copy out did not store, because they are zero.
    zero_bytes: AtomicU64,
    /// 1 if the next restore verifies the checksums of the content.
    checks: AtomicU32,
    /// State and size of the prefault, which prepares host memory before an offload.
    ahead: PrefaultJob,
    /// State of the prefault of the host pool's memory.
    host_pool_prefault: HostPoolPrefault,
    /// Content that was moved from the staging pool to a disk file.
    disk: DiskJob,
    /// Contexts in which the library keeps one small allocation, so that the driver keeps its block
    /// for small allocations.
    anchored: [AtomicUsize; 16],
    /// For each device, the number of bytes to a multiple of which the driver pads rows of
    /// `cuMemAllocPitch`. 0: not known yet.
    row_alignments: [AtomicUsize; DEVICES],
    /// Contexts that the application has created, without primary contexts.
    contexts: ValueList,
    /// A context for each reference that the application has added to it by `cuCtxAttach`.
    attached: ValueList,
    /// Streams that are being captured into a graph now.
    captures: ValueList,
    /// Contexts whose local memory is released.
    limits: ReleasedLimits,
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
    host_pool_prefault: HostPoolPrefault::none(),
    disk: DiskJob::none(),
    anchored: [const { AtomicUsize::new(0) }; 16],
    row_alignments: [const { AtomicUsize::new(0) }; DEVICES],
    contexts: ValueList::new(),
    attached: ValueList::new(),
    captures: ValueList::new(),
    limits: ReleasedLimits::none(),
};

/// A lock on a futex: threads sleep while they wait for it. Its holder has signals blocked, so that
/// no signal handler waits for a lock that its own thread holds.
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

    /// Same as [`Self::hold`], but returns `None` at once if another thread holds the lock.
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

    /// Takes the lock if it is free.
    fn try_take(&self) -> bool {
        let (free, held) = (FutexLock::FREE, FutexLock::HELD);
        self.0.compare_exchange(free, held, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Whether a thread waits for the lock.
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

/// Runs `body` on the tables of device memory while their lock is held. `body` must not call the
/// driver.
fn tables<R>(body: impl FnOnce(&mut AllocationTables) -> R) -> R {
    // SAFETY: the lock excludes all other threads, and `body` cannot come here again.
    SWAP.table_lock.hold(|| body(unsafe { &mut *SWAP.tables.get() }))
}

/// Runs `body` on the table of allocations while its lock is held.
fn locked<R>(body: impl FnOnce(&mut Allocations) -> R) -> R {
    tables(|tables| body(&mut tables.allocations))
}

/// Runs `body` on the staging pool while the lock of contexts is held, so that no context ends
/// meanwhile.
fn with_pool<R>(body: impl FnOnce(&mut StagingPool) -> R) -> R {
    // SAFETY: the lock excludes all other threads, and `body` cannot come here again.
    SWAP.contexts_lock.hold(|| body(unsafe { &mut *SWAP.pool.get() }))
}

/// Same as [`with_pool`], but returns `None` at once if the lock of contexts is held, for example
/// because a context is ending. The end of a context waits for the context's work, and the agent
/// must continue to receive messages meanwhile.
fn with_pool_if_free<R>(body: impl FnOnce(&mut StagingPool) -> R) -> Option<R> {
    // SAFETY: the lock excludes all other threads, and `body` cannot come here again.
    SWAP.contexts_lock.hold_if_free(|| body(unsafe { &mut *SWAP.pool.get() }))
}

/// Sets the engine (the method of moving memory) that is named in a file of the shim or the
/// controller. It applies until a controller sends an engine.
pub fn set_engine_by_file(file: &CStr) {
    let mut buffer = [0; 16];
    if let Some(engine) = sys::read_file(file, &mut buffer).and_then(Engine::parse) {
        set_engine(engine);
    }
}

/// Sets the engine, which decides whether new allocations become swappable (copyable to host memory
/// by this library). Existing allocations stay as they are.
pub fn set_engine(engine: Engine) {
    // If a tool is in the process from its start, all memory is left to the driver, because the
    // tool examines that memory. MPS does not examine it.
    let at_start = Hazards(Hazards::KEEPS_MEMORY.0 | Hazards::MPS.0);
    let harmless = if is_in_use() { Hazards::KEEPS_CONTEXT } else { at_start };
    let wanted = engine != Engine::Checkpoint
        && !hazard::is_mps_program()
        && process::page().is_some_and(|page| page.hazards().without(harmless).is_empty())
        && find_all()
        && SWAP.green.load(Ordering::Acquire) == 0;
    SWAP.wanted.store(u32::from(wanted), Ordering::Release);
}

/// Looks up the driver's functions that swapping needs. False: a function is missing. Several
/// threads may call this at once.
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

/// Addresses of the driver's functions that have a wrapper, in the order of [`FUNCTIONS`].
static REAL: [AtomicUsize; FUNCTIONS.len()] = [const { AtomicUsize::new(0) }; FUNCTIONS.len()];

/// Whether the process may have swappable memory, which this library can copy to host memory, or
/// may have had it.
pub fn is_in_use() -> bool {
    SWAP.in_use.load(Ordering::Acquire) == 1
}

/// Returns the wrapper that is called instead of the driver's function at the address `real`, if
/// there is one. `number` is the number of the function's hook.
pub fn stand_in(number: u32, real: usize) -> Option<usize> {
    if !is_in_use() {
        pending_work::note_unseen(number);
        return ipc::opening(number, real);
    }
    if real == 0 {
        return None;
    }
    let Some(index) = REAL.iter().position(|known| known.load(Ordering::Relaxed) == real) else {
        pending_work::note_unseen(number);
        return None;
    };
    FUNCTIONS.get(index).copied().and_then(wrappers::stand_in)
}

/// Bytes that the last copy out did not store, because they are zero.
pub fn zero_bytes() -> u64 {
    SWAP.zero_bytes.load(Ordering::Relaxed)
}

/// Bytes of VRAM that the contexts need again for their local memory at the restore.
pub fn released_local_bytes() -> u64 {
    local_memory::released_bytes()
}

/// Bytes that the last copy out did not copy, because the staging pool contained them already.
pub fn unchanged_bytes() -> u64 {
    SWAP.unchanged_bytes.load(Ordering::Relaxed)
}

/// Adds `bytes`, which may be negative, to the process's counter of swappable bytes.
fn count(bytes: i64) {
    if let Some(page) = process::page() {
        page.swappable_bytes.fetch_add(bytes.cast_unsigned(), Ordering::Relaxed);
    }
}
