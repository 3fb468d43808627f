//! Wrappers of the driver functions with which an application manages physical memory itself (VMM,
//! virtual memory management). The wrappers run one at a time, so that the driver's state and the
//! tables change together.

use core::ffi::c_void;
use core::sync::atomic::Ordering;

use affinode_cuda_sys::{
    ALLOCATION_PINNED, ArrayMapInfo, LOCATION_DEVICE, MemAccessDesc, MemAllocationProp, result,
};

use super::allocations::AllocationTables;
use super::backing::{is_able, strays};
use super::contexts::current_context;
use super::driver::call;
use super::vmm_handles::{Handle, HandleRelease, MappingPart, VmmHandleTable, is_name};
use super::{SWAP, count, is_in_use, tables};

/// Runs `body` on the table of blocks (memory that the application created with `cuMemCreate`), and
/// updates the counter of swappable bytes.
pub(super) fn blocks<R>(body: impl FnOnce(&mut VmmHandleTable) -> R) -> R {
    let (result, before, after) = tables(|tables| {
        let before = tables.blocks.swappable_bytes();
        let result = body(&mut tables.blocks);
        (result, before, tables.blocks.swappable_bytes())
    });
    count(after.wrapping_sub(before).cast_signed());
    result
}

fn one_at_a_time(body: impl FnOnce() -> u32) -> u32 {
    SWAP.vmm_lock.hold(body)
}

/// Runs `body` with the driver's handle that belongs to a handle of the application. The second
/// argument of `body` is true if the application's handle is a name (a number that this library has
/// given out in place of the driver's handle).
fn with_handle(given: u64, body: impl FnOnce(u64, bool) -> u32) -> u32 {
    match blocks(|blocks| blocks.handle(given)) {
        Handle::Drivers => body(given, false),
        Handle::Named(handle) => body(handle, true),
        Handle::Stale => result::INVALID_VALUE,
    }
}

/// Replaces names by the driver's handles in the arguments of a function without a wrapper. A name
/// is a handle that this library has given to the application. An argument that looks like a name
/// is treated as a name. The block of the name then stays on the device, because the function's
/// effect is unknown.
pub fn translate(arguments: &mut [u64; 6]) {
    if !is_in_use() {
        return;
    }
    for argument in arguments.iter_mut().filter(|argument| is_name(**argument)) {
        if let Handle::Named(handle) = blocks(|blocks| blocks.handle(*argument)) {
            blocks(|blocks| blocks.stay(*argument));
            *argument = handle;
        }
    }
}

pub(super) unsafe extern "C" fn mem_create(
    handle: *mut u64,
    bytes: usize,
    property: *const MemAllocationProp,
    flags: u64,
) -> u32 {
    one_at_a_time(|| {
        let code = call!(mem_create(handle, bytes, property, flags));
        if code != result::SUCCESS || flags != 0 || SWAP.wanted.load(Ordering::Acquire) == 0 {
            return code;
        }
        // SAFETY: the driver has read `property` and written `handle`, with success.
        let (property, made) = unsafe { (property.read(), handle.read()) };
        let plain = property.kind == ALLOCATION_PINNED
            && property.location_type == LOCATION_DEVICE
            && property.usage == 0
            && property.reserved == [0; 4];
        if plain
            && is_able(property.location_id)
            && let Some(name) = blocks(|blocks| blocks.insert(made, property, bytes as u64))
        {
            // SAFETY: the application's own place for the handle.
            unsafe { handle.write(name) };
        }
        code
    })
}

pub(super) unsafe extern "C" fn mem_release(given: u64) -> u32 {
    one_at_a_time(|| match blocks(|blocks| blocks.handle(given)) {
        Handle::Drivers => call!(mem_release(given)),
        Handle::Stale => result::INVALID_VALUE,
        Handle::Named(_) => let_go(blocks(|blocks| blocks.release(given))),
    })
}

fn let_go(released: HandleRelease) -> u32 {
    match released {
        HandleRelease::Lives => result::SUCCESS,
        HandleRelease::Last(handle) => call!(mem_release(handle)),
        HandleRelease::Strays(handle) => {
            strays();
            call!(mem_release(handle))
        }
    }
}

pub(super) unsafe extern "C" fn mem_map(
    address: u64,
    bytes: usize,
    offset: usize,
    given: u64,
    flags: u64,
) -> u32 {
    one_at_a_time(|| {
        with_handle(given, |handle, named| {
            let code = call!(mem_map(address, bytes, offset, handle, flags));
            if code == result::SUCCESS && named {
                blocks(|blocks| blocks.map(given, address, bytes as u64, offset as u64));
            }
            code
        })
    })
}

pub(super) unsafe extern "C" fn mem_unmap(address: u64, bytes: usize) -> u32 {
    one_at_a_time(|| {
        let code = call!(mem_unmap(address, bytes));
        while code == result::SUCCESS
            && let Some(released) = blocks(|blocks| blocks.unmap(address, bytes as u64))
        {
            let_go(released);
        }
        code
    })
}

pub(super) unsafe extern "C" fn mem_set_access(
    address: u64,
    bytes: usize,
    access: *const MemAccessDesc,
    many: usize,
) -> u32 {
    one_at_a_time(|| {
        let code = call!(mem_set_access(address, bytes, access, many));
        if code != result::SUCCESS {
            // The driver may have changed the access of a part of the range.
            blocks(|blocks| blocks.stay_in(address, bytes as u64));
        } else if !access.is_null() {
            let mut device = -1;
            call!(ctx_get_device(&raw mut device));
            let context = current_context().filter(|_| SWAP.green.load(Ordering::Acquire) == 0);
            let context = context.unwrap_or(0);
            let here = MappingPart { context, device, now: tables(AllocationTables::now) };
            // SAFETY: the driver has read this many entries with success.
            let access = unsafe { core::slice::from_raw_parts(access, many) };
            blocks(|blocks| blocks.set_access(address, bytes as u64, access, here));
        }
        code
    })
}

pub(super) unsafe extern "C" fn mem_retain_handle(handle: *mut u64, address: u64) -> u32 {
    one_at_a_time(|| {
        if !handle.is_null()
            && let Some(name) = blocks(|blocks| blocks.retain(address))
        {
            // SAFETY: the application's own place for the handle.
            unsafe { handle.write(name) };
            return result::SUCCESS;
        }
        let code = call!(mem_retain_handle(handle, address));
        if code == result::SUCCESS {
            super::alloc_wrappers::stays(address);
        }
        code
    })
}

/// Wrapper of `cuMemExportToShareableHandle`. Marks the block to stay on the device, because an
/// importer refers to its physical memory.
pub(super) unsafe extern "C" fn mem_export(
    shareable: *mut c_void,
    given: u64,
    kind: u32,
    flags: u64,
) -> u32 {
    one_at_a_time(|| {
        with_handle(given, |handle, named| {
            let code = call!(mem_export(shareable, handle, kind, flags));
            if code == result::SUCCESS && named {
                blocks(|blocks| blocks.stay(given));
            }
            code
        })
    })
}

pub(super) unsafe extern "C" fn mem_get_property(
    property: *mut MemAllocationProp,
    given: u64,
) -> u32 {
    one_at_a_time(|| {
        let made_as = blocks(|blocks| {
            let piece = blocks.at(given).filter(|block| block.piece.imported)?.piece;
            Some(piece.property)
        });
        with_handle(given, |handle, _| match made_as {
            // Return the recorded properties. The driver would return those with which the copier
            // has created the memory.
            Some(known) if !property.is_null() => {
                // SAFETY: the application's own place for the properties.
                unsafe { property.write(known) };
                result::SUCCESS
            }
            _ => call!(mem_get_property(property, handle)),
        })
    })
}

pub(super) unsafe extern "C" fn mem_map_array(
    list: *mut ArrayMapInfo,
    many: u32,
    stream: *mut c_void,
) -> u32 {
    let map = |one| call!(mem_map_array(one, 1, stream));
    // SAFETY: the application's own list.
    unsafe { each_array(list, many, map) }
}

pub(super) unsafe extern "C" fn mem_map_array_ptsz(
    list: *mut ArrayMapInfo,
    many: u32,
    stream: *mut c_void,
) -> u32 {
    let map = |one| call!(mem_map_array_ptsz(one, 1, stream));
    // SAFETY: the application's own list.
    unsafe { each_array(list, many, map) }
}

/// Maps memory to parts of sparse arrays. Calls `map` for one part at a time, with the driver's
/// handle in place of the application's handle.
///
/// # Safety
/// `list` must point to `many` entries, or be null.
unsafe fn each_array(
    list: *mut ArrayMapInfo,
    many: u32,
    mut map: impl FnMut(*mut ArrayMapInfo) -> u32,
) -> u32 {
    if list.is_null() || many == 0 {
        return map(list);
    }
    const MAP: u32 = 1;
    const ALLOCATION_HANDLE: u32 = 0;
    one_at_a_time(|| {
        for index in 0..many as usize {
            // SAFETY: the caller guarantees that the list has `many` entries.
            let mut one = unsafe { list.add(index).read() };
            let takes_memory = (one.operation, one.handle_type) == (MAP, ALLOCATION_HANDLE);
            let given = if takes_memory { one.handle } else { 0 };
            let code = with_handle(given, |handle, named| {
                if named {
                    blocks(|blocks| blocks.stay(given));
                    one.handle = handle;
                }
                map(&raw mut one)
            });
            if code != result::SUCCESS {
                return code;
            }
        }
        result::SUCCESS
    })
}
