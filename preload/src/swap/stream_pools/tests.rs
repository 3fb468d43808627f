use core::time::Duration;
use std::sync::MutexGuard;
use std::thread::{self, JoinHandle};

use affinode_cuda_sys::{
    ACCESS_READ_WRITE, ALLOCATION_PINNED, LOCATION_DEVICE, MemAccessDesc, MemPoolProps,
};

use super::super::FutexLock;
use super::super::fake_driver::{CONTEXT, DEFAULT_POOL, DEVICE, Fake};
use super::super::prefault::tests::SHARED;
use super::*;

const BYTES: usize = 4 << 20;
/// Time after which a test assumes that an event will not occur.
const LONG: Duration = Duration::from_secs(5);

/// A fake device. All of its memory is swappable while this value exists.
struct SwapDevice {
    fake: Fake,
    _own: MutexGuard<'static, ()>,
}

impl SwapDevice {
    fn new() -> SwapDevice {
        let own = SHARED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        SWAP.wanted.store(1, Ordering::Release);
        SwapDevice { fake: Fake::new(), _own: own }
    }

    fn allocate(&self) -> u64 {
        let mut address = 0;
        // SAFETY: the address points to a local variable of the test.
        let code = unsafe { mem_alloc_async(&raw mut address, BYTES, stream()) };
        assert_eq!(code, result::SUCCESS);
        address
    }

    fn pool(&self) -> usize {
        let props = MemPoolProps {
            kind: ALLOCATION_PINNED,
            handle_types: 0,
            location_type: LOCATION_DEVICE,
            location_id: DEVICE,
            windows: 0,
            most_bytes: 0,
            usage: 0,
            reserved: [0; 54],
        };
        let mut pool = 0;
        // SAFETY: places of the test's.
        let code = unsafe { pool_create(&raw mut pool, &raw const props) };
        assert_eq!(code, result::SUCCESS);
        pool
    }
}

impl Drop for SwapDevice {
    fn drop(&mut self) {
        clear();
        while let Some(left) = locked(|table| table.remove(|_| true)) {
            unmake(&left.piece);
        }
        SWAP.wanted.store(0, Ordering::Release);
        tables(|tables| tables.cache.remove_pool(DEFAULT_POOL));
    }
}

fn stream() -> *mut c_void {
    core::ptr::without_provenance_mut(0x50)
}

/// Waits until `thread` is waiting for `lock`, which the calling thread holds, or until `thread`
/// has ended.
fn until_it_waits<R>(thread: &JoinHandle<R>, lock: &FutexLock) {
    while !lock.is_awaited() && !thread.is_finished() {
        thread::yield_now();
    }
}

#[test]
fn memory_of_the_devices_pool_is_carried() {
    let swappable = SwapDevice::new();
    let address = swappable.allocate();
    assert_eq!((swappable.fake.held().mappings, swappable.fake.pooled()), (1, 0));
    // SAFETY: all arguments are numbers.
    assert_eq!(unsafe { mem_free_async(address, stream()) }, result::SUCCESS);
    assert_eq!(swappable.allocate(), address, "the same stream reuses the memory");
    // SAFETY: all arguments are numbers.
    assert_eq!(unsafe { mem_free_async(address, stream()) }, result::SUCCESS);
    settle(true);
    assert_eq!(swappable.fake.held().mappings, 0);
}

/// If the application gives another device access to a pool before it allocates from the pool, the
/// driver must make the pool's allocations. Programs for several devices set the access first.
#[test]
fn pool_with_peer_access_is_the_drivers() {
    let swappable = SwapDevice::new();
    let other = MemAccessDesc {
        location_type: LOCATION_DEVICE,
        location_id: DEVICE + 1,
        flags: ACCESS_READ_WRITE,
    };
    // SAFETY: the address points to a local variable of the test.
    let code = unsafe { pool_set_access(DEFAULT_POOL, &raw const other, 1) };
    assert_eq!(code, result::SUCCESS);
    swappable.allocate();
    assert_eq!((swappable.fake.held().mappings, swappable.fake.pooled()), (0, 1));
}

/// No pool may be destroyed while another thread frees unused memory. That thread queries the
/// driver about each pool, also about pools that other threads use.
#[test]
fn no_pool_ends_while_pools_are_looked_at() {
    let swappable = SwapDevice::new();
    let pool = swappable.pool();
    let ends = SWAP.unused_lock.hold(|| {
        // SAFETY: all arguments are numbers.
        let ends = thread::spawn(move || unsafe { pool_destroy(pool) });
        until_it_waits(&ends, &SWAP.unused_lock);
        (ends, swappable.fake.pools())
    });
    assert_eq!((ends.0.join().unwrap(), ends.1), (result::SUCCESS, 1));
    assert_eq!(swappable.fake.pools(), 0);
}

/// A thread that has waited for work must not be blocked while another thread ends a context. The
/// end of a context waits for the context's work, and this work may need an action of the first
/// thread.
#[test]
fn wait_for_work_ignores_an_ending_context() {
    let _carried = SwapDevice::new();
    let (tell, told) = std::sync::mpsc::channel();
    let told = SWAP.unused_lock.hold(|| {
        unsettle();
        thread::spawn(move || {
            settle(true);
            let _ = tell.send(());
        });
        told.recv_timeout(LONG)
    });
    assert!(told.is_ok());
    assert_eq!(SWAP.unsettled.load(Ordering::Relaxed), 1, "the next call frees the pieces");
}

/// A thread that ends a context waits for the lock of contexts. Memory that another thread
/// allocates in this context meanwhile must be freed together with the context.
#[test]
fn context_end_frees_its_earlier_memory() {
    let swappable = SwapDevice::new();
    let ends = SWAP.contexts_lock.hold(|| {
        // SAFETY: all arguments are numbers.
        let ends = thread::spawn(|| unsafe { super::super::contexts::ctx_destroy(CONTEXT) });
        until_it_waits(&ends, &SWAP.contexts_lock);
        let mut address = 0;
        // SAFETY: the address points to a local variable of the test.
        let code = unsafe { super::super::alloc_wrappers::mem_alloc(&raw mut address, BYTES) };
        (ends, code)
    });
    assert_eq!((ends.0.join().unwrap(), ends.1), (result::SUCCESS, result::SUCCESS));
    assert_eq!(swappable.fake.held().mappings, 0);
    assert_eq!(swappable.fake.held().ranges, 0, "no address range is left either");
    assert!(tables(|tables| tables.allocations.is_empty()));
}

/// To find the primary context, a thread takes a reference to it for a short time. Another thread
/// must not release its own reference in this time, because the reference of the first thread would
/// then be the last one.
#[test]
fn primary_context_is_not_held_during_release() {
    use super::super::contexts::primary_release;
    let swappable = SwapDevice::new();
    swappable.fake.retain_primary(2);
    let mut address = 0;
    // SAFETY: the address points to a local variable of the test.
    let code = unsafe { super::super::alloc_wrappers::mem_alloc(&raw mut address, BYTES) };
    assert_eq!(code, result::SUCCESS);
    swappable.fake.fail("cuDevicePrimaryCtxRetain", 0);
    let other = SWAP.contexts_lock.hold(|| {
        // SAFETY: all arguments are numbers.
        let other = thread::spawn(|| unsafe { primary_release(DEVICE) });
        until_it_waits(&other, &SWAP.contexts_lock);
        assert!(
            swappable.fake.is_still_to_fail(),
            "the driver was called before the lock was free"
        );
        other
    });
    assert_eq!(other.join().unwrap(), result::SUCCESS);
    assert_eq!(swappable.fake.held().mappings, 1, "another reference to the context is left");
    // SAFETY: all arguments are numbers.
    assert_eq!(unsafe { primary_release(DEVICE) }, result::SUCCESS);
    assert_eq!(swappable.fake.held().mappings, 0);
    // SAFETY: all arguments are numbers.
    assert_ne!(unsafe { primary_release(DEVICE) }, result::SUCCESS);
}

/// An allocation has a mark in another context, and that other context ends while a thread frees
/// the allocation. The free must not make a driver call in the context that has ended.
#[test]
fn free_ignores_mark_of_ending_context() {
    const OTHER: usize = CONTEXT + 1;
    let swappable = SwapDevice::new();
    let address = swappable.allocate();
    let mark = CompletionMark { event: 5, context: OTHER };
    locked(|table| table.at(address).unwrap().mark = mark);
    let frees = SWAP.unused_lock.hold(|| {
        // SAFETY: all arguments are numbers.
        let frees = thread::spawn(move || unsafe { mem_free_async(address, stream()) });
        until_it_waits(&frees, &SWAP.unused_lock);
        let now = tables(AllocationTables::now);
        context_ends(OTHER, now);
        frees
    });
    assert_eq!(frees.join().unwrap(), result::SUCCESS);
    assert_eq!(swappable.fake.pushed(), []);
}

/// Memory that was freed in a stream of a green context waits for work in that context. After the
/// end of the green context, no call may be made in it. The fake driver ends the test otherwise.
#[test]
fn ended_green_context_is_not_used_again() {
    const GREEN: usize = CONTEXT + 2;
    let green_stream = core::ptr::without_provenance_mut(0x51);
    let swappable = SwapDevice::new();
    swappable.fake.put_stream(0x51, GREEN);
    let [first, second] = [swappable.allocate(), swappable.allocate()];
    // SAFETY: all arguments are numbers.
    let freed = unsafe { mem_free_async(first, green_stream) };
    assert_eq!((freed, swappable.fake.events()), (result::SUCCESS, 1));
    // An allocation in use has the mark of its memory if this memory was freed in a stream before.
    let mut event = 0;
    assert_eq!(call!(event_create(&raw mut event, 0)), result::SUCCESS);
    let mark = CompletionMark { event, context: GREEN };
    locked(|table| table.at(second).unwrap().mark = mark);
    // SAFETY: the argument is a number.
    assert_eq!(unsafe { super::super::contexts::green_ctx_destroy(GREEN) }, result::SUCCESS);
    assert_eq!(swappable.fake.events(), 0);
    settle(true);
    // SAFETY: all arguments are numbers.
    assert_eq!(unsafe { mem_free_async(second, stream()) }, result::SUCCESS);
    settle(true);
    assert_eq!(swappable.fake.held().mappings, 0);
}

/// A failed free must leave all fields of the table entry unchanged, including its creation time
/// and its mark.
#[test]
fn failed_free_changes_nothing() {
    let swappable = SwapDevice::new();
    let address = swappable.allocate();
    let before = locked(|table| table.at(address).copied());
    for function in ["cuEventCreate", "cuStreamSynchronize"] {
        swappable.fake.fail(function, 0);
    }
    // SAFETY: all arguments are numbers.
    assert_ne!(unsafe { mem_free_async(address, stream()) }, result::SUCCESS);
    assert_eq!(locked(|table| table.at(address).copied()), before);
}
