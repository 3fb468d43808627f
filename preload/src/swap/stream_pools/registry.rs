//! Wrappers of the driver's functions for memory pools, and the search for pools whose allocations
//! are swappable.

use core::ffi::c_void;
use core::sync::atomic::Ordering;

use affinode_cuda_sys::{
    ALLOCATION_PINNED, LOCATION_DEVICE, MemAccessDesc, MemPoolProps, pool_attribute, result,
};

use super::super::alloc_wrappers::stays;
use super::super::allocations::AllocationTables;
use super::super::driver::{self, call};
use super::super::{SWAP, locked, tables};
use super::cache::{SizeClass, StreamPool};
use super::completion::{settle, trim_to, unsettle};

/// Runs `body` with the number that this library has given to a memory pool. `None`: the pool is
/// not swappable, or its memory is not on the device `device`.
pub fn with_swappable<R>(
    handle: usize,
    device: i32,
    body: impl Fn(&mut AllocationTables, u64) -> R,
) -> Option<R> {
    let find = || {
        tables(|tables| {
            let pool = tables.cache.pool(handle)?;
            let is_swappable = !pool.left && pool.device == device;
            Some(is_swappable.then(|| body(tables, pool.number)))
        })
    };
    match find() {
        Some(found) => found,
        None if is_default(handle, device) && learn(handle, device) => find().flatten(),
        None => None,
    }
}

fn is_default(handle: usize, device: i32) -> bool {
    let mut default = 0;
    let code = call!(device_get_default_pool(&raw mut default, device));
    code == result::SUCCESS && default == handle
}

fn learn(handle: usize, device: i32) -> bool {
    driver::has_pools()
        && tables(|tables| {
            let number = tables.now();
            tables.cache.learn_pool(StreamPool { handle, number, device, ..StreamPool::default() })
        })
}

fn known(handle: usize) -> Option<StreamPool> {
    tables(|tables| tables.cache.pool(handle))
}

pub unsafe extern "C" fn pool_create(handle: *mut usize, props: *const MemPoolProps) -> u32 {
    let code = call!(pool_create(handle, props));
    if code != result::SUCCESS {
        return code;
    }
    // SAFETY: the driver has read `props` and written `handle`, with success.
    let (props, made) = unsafe { (props.read(), handle.read()) };
    let is_plain = props.kind == ALLOCATION_PINNED
        && props.handle_types == 0
        && props.location_type == LOCATION_DEVICE
        && (props.most_bytes, props.usage) == (0, 0)
        && props.reserved == [0; 54];
    if is_plain && SWAP.wanted.load(Ordering::Acquire) == 1 {
        tables(|tables| tables.cache.remove_pool(made));
        learn(made, props.location_id);
    }
    code
}

/// Wrapper of `cuMemPoolDestroy`. Memory of the pool that is in use stays until it is freed.
pub unsafe extern "C" fn pool_destroy(handle: usize) -> u32 {
    // Hold this lock, because the thread that frees unused memory queries the driver about each
    // pool.
    let (known, code) = SWAP.unused_lock.hold(|| {
        // Forget the pool before the call: once the pool is destroyed, another thread may get a new
        // pool with the same handle.
        let known = tables(|tables| tables.cache.remove_pool(handle));
        (known, call!(pool_destroy(handle)))
    });
    match known {
        Some(pool) if code != result::SUCCESS => {
            tables(|tables| tables.cache.add_pool(pool));
        }
        Some(_) => {
            unsettle();
            settle(false);
        }
        None => {}
    }
    code
}

pub unsafe extern "C" fn pool_get_attribute(
    handle: usize,
    attribute: u32,
    value: *mut c_void,
) -> u32 {
    let code = call!(pool_get_attribute(handle, attribute, value));
    let ours = |pool: &StreamPool| match attribute {
        pool_attribute::RESERVED => pool.reserved.bytes,
        // The sum of both highest values is an upper bound of the highest sum.
        pool_attribute::RESERVED_HIGH => pool.reserved.high,
        pool_attribute::USED => pool.used.bytes,
        pool_attribute::USED_HIGH => pool.used.high,
        _ => 0,
    };
    if code == result::SUCCESS
        && let Some(more) = known(handle).as_ref().map(ours).filter(|more| *more > 0)
    {
        // SAFETY: the driver has written a u64 there.
        unsafe { *value.cast::<u64>() += more };
    }
    code
}

/// Returns the bytes of a pool that are not in use, both the driver's and this library's. If `pool`
/// is `None`, the current pool of the current device is meant. 0: the driver does not report the
/// bytes.
pub fn unused_pool_bytes(pool: Option<usize>) -> u64 {
    let (mut device, mut current) = (-1, 0);
    let pool = pool.or_else(|| {
        let known = call!(ctx_get_device(&raw mut device)) == result::SUCCESS
            && call!(device_get_pool(&raw mut current, device)) == result::SUCCESS;
        known.then_some(current)
    });
    let Some(pool) = pool else { return 0 };
    let bytes_of = |attribute| {
        let mut bytes = 0_u64;
        // SAFETY: the pool is the driver's or the application's own, and each of these attributes
        // is a u64.
        let code = unsafe { pool_get_attribute(pool, attribute, (&raw mut bytes).cast()) };
        if code == result::SUCCESS { bytes } else { 0 }
    };
    bytes_of(pool_attribute::RESERVED).saturating_sub(bytes_of(pool_attribute::USED))
}

pub unsafe extern "C" fn pool_set_attribute(
    handle: usize,
    attribute: u32,
    value: *mut c_void,
) -> u32 {
    let code = call!(pool_set_attribute(handle, attribute, value));
    let level: fn(&mut StreamPool) -> &mut SizeClass = match attribute {
        pool_attribute::RESERVED_HIGH => |pool| &mut pool.reserved,
        pool_attribute::USED_HIGH => |pool| &mut pool.used,
        _ => {
            // The pool may now have more memory than its threshold allows.
            unsettle();
            return code;
        }
    };
    if code == result::SUCCESS {
        tables(|tables| tables.cache.forget_highs(handle, level));
    }
    code
}

pub unsafe extern "C" fn pool_trim_to(handle: usize, keep_bytes: usize) -> u32 {
    let code = call!(pool_trim_to(handle, keep_bytes));
    if code == result::SUCCESS
        && let Some(pool) = known(handle)
    {
        trim_to(&pool, keep_bytes as u64);
    }
    code
}

/// Wrapper of `cuMemPoolSetAccess`. Also gives the other devices access to the pool's existing
/// allocations, which this library then never moves to host memory. From then on the driver makes
/// new allocations of the pool.
pub unsafe extern "C" fn pool_set_access(
    handle: usize,
    access: *const MemAccessDesc,
    many: usize,
) -> u32 {
    let code = call!(pool_set_access(handle, access, many));
    if code != result::SUCCESS {
        return code;
    }
    let number = tables(|tables| {
        let number = tables.now();
        tables.cache.leave(handle, number)
    });
    let Some(number) = number else {
        // From here on, this library cannot distinguish the pool from other pools.
        SWAP.wanted.store(0, Ordering::Release);
        return code;
    };
    let mut next = 0;
    while let Some(piece) = locked(|table| {
        let of_it = table.from(next).find(|allocation| allocation.pool == number);
        of_it.map(|allocation| allocation.piece)
    }) {
        next = piece.address + 1;
        stays(piece.address);
        let given = call!(mem_set_access(piece.address, piece.bytes as usize, access, many));
        // If another thread has freed the memory meanwhile, the memory needs no access.
        if given != result::SUCCESS && locked(|table| table.at(piece.address).is_some()) {
            return given;
        }
    }
    code
}
