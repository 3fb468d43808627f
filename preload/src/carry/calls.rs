//! What stands in for the driver's functions. Each has its function's signature, is called
//! while the call is counted, and passes on whatever is not about carried memory.

use core::ffi::c_void;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use affinode_cuda_sys::{
    ACCESS_READ_WRITE, ALLOCATION_PINNED, LOCATION_DEVICE, MemAccessDesc, MemAllocationProp,
    device_attribute, pointer_attribute, result,
};
use affinode_proto::wire::Notes;

use super::table::{Allocation, Place};
use super::{CARRY, DEVICES, count, driver, locked, with_pool};
use crate::process;

/// Smaller allocations are left to the driver, which puts several into one such piece.
const LEAST_BYTES: usize = 2 << 20;
/// Physical memory comes in multiples of this. A device where it does not is left alone.
const GRANULE_BYTES: usize = 2 << 20;

/// The functions, old names beside new ones where both mean the same.
pub const NAMES: [&[u8]; 17] = [
    b"cuMemAlloc_v2",
    b"cuMemAllocPitch_v2",
    b"cuMemFree_v2",
    b"cuMemGetAddressRange_v2",
    b"cuPointerGetAttribute",
    b"cuPointerGetAttributes",
    b"cuPointerSetAttribute",
    b"cuMemRetainAllocationHandle",
    b"cuMemGetHandleForAddressRange",
    b"cuIpcGetMemHandle",
    b"cuCtxDestroy_v2",
    b"cuCtxDestroy",
    b"cuDevicePrimaryCtxReset_v2",
    b"cuDevicePrimaryCtxReset",
    b"cuDevicePrimaryCtxRelease_v2",
    b"cuDevicePrimaryCtxRelease",
    b"cuCtxEnablePeerAccess",
];

/// What stands in for the function of this place in [`NAMES`].
pub fn stand_in(index: usize) -> usize {
    match index {
        0 => mem_alloc as *const () as usize,
        1 => mem_alloc_pitch as *const () as usize,
        2 => mem_free as *const () as usize,
        3 => mem_get_address_range as *const () as usize,
        4 => pointer_get_attribute as *const () as usize,
        5 => pointer_get_attributes as *const () as usize,
        6 => pointer_set_attribute as *const () as usize,
        7 => mem_retain_handle as *const () as usize,
        8 => mem_get_handle_for_range as *const () as usize,
        9 => ipc_get_mem_handle as *const () as usize,
        10 | 11 => ctx_destroy as *const () as usize,
        12 | 13 => primary_reset as *const () as usize,
        14 | 15 => primary_release as *const () as usize,
        _ => ctx_enable_peer_access as *const () as usize,
    }
}

/// Calls a function of the driver, which is there: [`driver::is_complete`] was asked before
/// anything stood in for one.
macro_rules! call {
    ($name:ident($($argument:expr),*)) => {
        match driver::$name() {
            // SAFETY: the arguments are the application's own, or point to locals of their types.
            Some(function) => unsafe { function($($argument),*) },
            None => result::NOT_INITIALIZED,
        }
    };
}
pub(super) use call;

unsafe extern "C" fn mem_alloc(address: *mut u64, bytes: usize) -> u32 {
    if !address.is_null()
        && let Some(carried) = allocate(bytes)
    {
        // SAFETY: the application's own place for it.
        unsafe { address.write(carried) };
        return result::SUCCESS;
    }
    call!(mem_alloc(address, bytes))
}

unsafe extern "C" fn mem_alloc_pitch(
    address: *mut u64,
    pitch: *mut usize,
    width: usize,
    height: usize,
    element: u32,
) -> u32 {
    if !address.is_null()
        && !pitch.is_null()
        && width.saturating_mul(height) >= LEAST_BYTES
        && let Some(row_bytes) = pitch_of(width, element)
        && let Some(carried) = row_bytes.checked_mul(height).and_then(allocate)
    {
        // SAFETY: the application's own places for them.
        unsafe {
            address.write(carried);
            pitch.write(row_bytes);
        }
        return result::SUCCESS;
    }
    call!(mem_alloc_pitch(address, pitch, width, height, element))
}

/// What the driver makes of a width: asked with one row.
fn pitch_of(width: usize, element: u32) -> Option<usize> {
    let (mut row, mut pitch) = (0, 0);
    if call!(mem_alloc_pitch(&raw mut row, &raw mut pitch, width, 1, element)) != result::SUCCESS {
        return None;
    }
    let freed = call!(mem_free(row));
    (freed == result::SUCCESS && pitch >= width).then_some(pitch)
}

/// Memory that can be carried. `None`: the driver is to decide.
fn allocate(asked_bytes: usize) -> Option<u64> {
    if asked_bytes < LEAST_BYTES || CARRY.wanted.load(Ordering::Acquire) == 0 {
        return None;
    }
    let context = current_context().filter(|context| *context != 0)?;
    let mut device = -1;
    if call!(ctx_get_device(&raw mut device)) != result::SUCCESS {
        return None;
    }
    let bytes = asked_bytes.checked_next_multiple_of(GRANULE_BYTES)?;
    let mut address = 0;
    if !is_able(device)
        || call!(mem_address_reserve(&raw mut address, bytes, 0, 0, 0)) != result::SUCCESS
    {
        return None;
    }
    if let Ok(handle) = back(address, bytes, device) {
        let allocation = Allocation {
            address,
            asked_bytes: asked_bytes as u64,
            bytes: bytes as u64,
            handle,
            context,
            device,
            ..Allocation::default()
        };
        if locked(|table| table.insert(allocation)) {
            count(bytes as i64);
            return Some(address);
        }
        unback(address, bytes, handle);
    }
    call!(mem_address_free(address, bytes));
    None
}

fn current_context() -> Option<usize> {
    let mut context = 0;
    (call!(ctx_get_current(&raw mut context)) == result::SUCCESS).then_some(context)
}

/// What is known of each device: whether memory on it can be carried, and may say that
/// others on the bus reach it.
static ABLE: [AtomicU32; DEVICES] = [const { AtomicU32::new(UNKNOWN) }; DEVICES];
const UNKNOWN: u32 = 0;
const NOT_ABLE: u32 = 1;
const ABLE_PLAIN: u32 = 2;
const ABLE_RDMA: u32 = 3;

fn ability(device: i32) -> u32 {
    let Some(known) = usize::try_from(device).ok().and_then(|device| ABLE.get(device)) else {
        return NOT_ABLE;
    };
    match known.load(Ordering::Relaxed) {
        UNKNOWN => {}
        answer => return answer,
    }
    let has = |attribute| {
        let mut value = 0;
        let code = call!(device_get_attribute(&raw mut value, attribute, device));
        code == result::SUCCESS && value == 1
    };
    let mut granule = 0;
    let property = property(device, false);
    let asked = call!(mem_get_granularity(&raw mut granule, &raw const property, 0));
    let fits = asked == result::SUCCESS && granule > 0 && GRANULE_BYTES.is_multiple_of(granule);
    let answer = if !fits || !has(device_attribute::VIRTUAL_MEMORY_MANAGEMENT) {
        NOT_ABLE
    } else if has(device_attribute::RDMA_WITH_VIRTUAL_MEMORY) {
        ABLE_RDMA
    } else {
        ABLE_PLAIN
    };
    known.store(answer, Ordering::Relaxed);
    answer
}

fn is_able(device: i32) -> bool {
    ability(device) != NOT_ABLE
}

fn property(device: i32, rdma: bool) -> MemAllocationProp {
    MemAllocationProp {
        kind: ALLOCATION_PINNED,
        location_type: LOCATION_DEVICE,
        location_id: device,
        gpu_direct_rdma: u8::from(rdma),
        ..MemAllocationProp::default()
    }
}

/// Puts physical memory behind reserved addresses.
pub(super) fn back(address: u64, bytes: usize, device: i32) -> Result<u64, u32> {
    let property = property(device, ability(device) == ABLE_RDMA);
    let mut handle = 0;
    match call!(mem_create(&raw mut handle, bytes, &raw const property, 0)) {
        result::SUCCESS => {}
        code => return Err(code),
    }
    let mapped = call!(mem_map(address, bytes, 0, handle, 0));
    if mapped != result::SUCCESS {
        call!(mem_release(handle));
        return Err(mapped);
    }
    match give_access(address, bytes, device) {
        result::SUCCESS => Ok(handle),
        code => {
            unback(address, bytes, handle);
            Err(code)
        }
    }
}

/// Undoes [`back`].
pub(super) fn unback(address: u64, bytes: usize, handle: u64) {
    call!(mem_unmap(address, bytes));
    call!(mem_release(handle));
}

/// Gives the device itself access, and those that the application has made its peers.
fn give_access(address: u64, bytes: usize, device: i32) -> u32 {
    let access = |id| MemAccessDesc {
        location_type: LOCATION_DEVICE,
        location_id: id,
        flags: ACCESS_READ_WRITE,
    };
    let own = access(device);
    match call!(mem_set_access(address, bytes, &raw const own, 1)) {
        result::SUCCESS => {}
        code => return code,
    }
    let peers = usize::try_from(device).ok().and_then(|device| CARRY.peers.get(device));
    let peers = peers.map_or(0, |peers| peers.load(Ordering::Acquire));
    for id in (0..DEVICES as i32).filter(|id| peers & 1 << id != 0) {
        let peer = access(id);
        match call!(mem_set_access(address, bytes, &raw const peer, 1)) {
            result::SUCCESS => {}
            code => return code,
        }
    }
    result::SUCCESS
}

unsafe extern "C" fn mem_free(address: u64) -> u32 {
    let Some(found) = locked(|table| table.at(address).copied()) else {
        return call!(mem_free(address));
    };
    match wait_for_work(found.context) {
        result::SUCCESS => {}
        code => return code,
    }
    match locked(|table| table.remove_at(address)) {
        Some(allocation) => {
            release(&allocation);
            result::SUCCESS
        }
        // Another thread has freed it meanwhile.
        None => result::INVALID_VALUE,
    }
}

/// Waits as `cuMemFree` does, and is refused where it is (while a stream is being captured,
/// after an error): by freeing something small of the same context.
fn wait_for_work(context: usize) -> u32 {
    const SMALL_BYTES: usize = 256;
    in_context(context, || {
        let mut small = 0;
        match call!(mem_alloc(&raw mut small, SMALL_BYTES)) {
            // The first stays: with it the driver keeps the piece that it makes such out of.
            result::SUCCESS if keeps_first(context) => {
                let mut second = 0;
                match call!(mem_alloc(&raw mut second, SMALL_BYTES)) {
                    result::SUCCESS => call!(mem_free(second)),
                    _ => call!(ctx_synchronize()),
                }
            }
            result::SUCCESS => call!(mem_free(small)),
            result::OUT_OF_MEMORY => call!(ctx_synchronize()),
            code => code,
        }
    })
}

/// Whether a context has nothing small that stays yet, and its name is noted now.
fn keeps_first(context: usize) -> bool {
    let known = |place: &AtomicUsize| place.load(Ordering::Relaxed) == context;
    let take = |place: &AtomicUsize| {
        place.compare_exchange(0, context, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    };
    !CARRY.anchored.iter().any(known) && CARRY.anchored.iter().any(take)
}

/// Runs `body` with a context that lives, and leaves the application's as it was.
pub(super) fn in_context(context: usize, body: impl FnOnce() -> u32) -> u32 {
    if current_context() == Some(context) {
        return body();
    }
    match call!(ctx_push_current(context)) {
        result::SUCCESS => {}
        code => return code,
    }
    let code = body();
    let mut popped = 0;
    call!(ctx_pop_current(&raw mut popped));
    code
}

/// Gives back what was taken for an allocation that is in the table no more.
fn release(allocation: &Allocation) {
    let bytes = allocation.bytes as usize;
    if allocation.place != Place::Pool {
        unback(allocation.address, bytes, allocation.handle);
    }
    call!(mem_address_free(allocation.address, bytes));
    if allocation.stays == 0 {
        count(-(allocation.bytes as i64));
    }
}

unsafe extern "C" fn mem_get_address_range(base: *mut u64, bytes: *mut usize, address: u64) -> u32 {
    let Some(found) = locked(|table| table.around(address).copied()) else {
        return call!(mem_get_address_range(base, bytes, address));
    };
    // SAFETY: the application's own places, null where it does not want to know.
    unsafe {
        if let Some(base) = base.as_mut() {
            *base = found.address;
        }
        if let Some(bytes) = bytes.as_mut() {
            *bytes = found.asked_bytes as usize;
        }
    }
    result::SUCCESS
}

/// Corrects what the driver says of mapped memory to what it says of its own allocations.
///
/// # Safety
/// The driver must have written the attribute's value to `data` with success.
unsafe fn correct(data: *mut c_void, attribute: u32, allocation: &Allocation) {
    let value = match attribute {
        pointer_attribute::CONTEXT => allocation.context as u64,
        pointer_attribute::RANGE_SIZE => allocation.asked_bytes,
        _ => return,
    };
    // SAFETY: both attributes are as large as a pointer.
    unsafe { data.cast::<u64>().write(value) };
}

unsafe extern "C" fn pointer_get_attribute(data: *mut c_void, attribute: u32, at: u64) -> u32 {
    let code = call!(pointer_get_attribute(data, attribute, at));
    if code == result::SUCCESS
        && let Some(found) = locked(|table| table.around(at).copied())
    {
        // SAFETY: just written by the driver.
        unsafe { correct(data, attribute, &found) };
    }
    code
}

unsafe extern "C" fn pointer_get_attributes(
    many: u32,
    attributes: *const u32,
    data: *const *mut c_void,
    at: u64,
) -> u32 {
    let code = call!(pointer_get_attributes(many, attributes, data, at));
    if code == result::SUCCESS
        && let Some(found) = locked(|table| table.around(at).copied())
    {
        for index in 0..many as usize {
            // SAFETY: the driver has read `many` of both and written each value.
            unsafe { correct(data.add(index).read(), attributes.add(index).read(), &found) };
        }
    }
    code
}

/// An allocation whose physical memory others than its mapping refer to now.
fn stays(address: u64) {
    let found = locked(|table| {
        let found = table.around(address)?;
        (core::mem::replace(&mut found.stays, 1) == 0).then_some(found.bytes)
    });
    if let Some(bytes) = found {
        count(-(bytes as i64));
    }
}

unsafe extern "C" fn pointer_set_attribute(value: *const c_void, attribute: u32, at: u64) -> u32 {
    let code = call!(pointer_set_attribute(value, attribute, at));
    if code == result::SUCCESS {
        stays(at);
    }
    code
}

unsafe extern "C" fn mem_retain_handle(handle: *mut u64, address: u64) -> u32 {
    let code = call!(mem_retain_handle(handle, address));
    if code == result::SUCCESS {
        stays(address);
    }
    code
}

unsafe extern "C" fn mem_get_handle_for_range(
    handle: *mut c_void,
    address: u64,
    bytes: usize,
    kind: u32,
    flags: u64,
) -> u32 {
    let code = call!(mem_get_handle_for_range(handle, address, bytes, kind, flags));
    if code == result::SUCCESS {
        stays(address);
    }
    code
}

unsafe extern "C" fn ipc_get_mem_handle(handle: *mut c_void, address: u64) -> u32 {
    let code = call!(ipc_get_mem_handle(handle, address));
    if code != result::SUCCESS
        && locked(|table| table.around(address).is_some())
        && let Some(page) = process::page()
    {
        page.notes.fetch_or(Notes::IPC_REFUSED.0, Ordering::Relaxed);
    }
    code
}

/// The end of a context, which ends its allocations.
fn ends(context: usize, end: impl FnOnce() -> u32, has_ended: impl FnOnce() -> bool) -> u32 {
    let mut ended = false;
    let code = with_pool(|pool| {
        let code = end();
        ended = code == result::SUCCESS && has_ended();
        if ended {
            pool.context_ends(context);
            for place in &CARRY.anchored {
                let _ = place.compare_exchange(context, 0, Ordering::Relaxed, Ordering::Relaxed);
            }
        }
        code
    });
    while ended && let Some(one) = locked(|table| table.remove(|a| a.context == context)) {
        release(&one);
    }
    code
}

unsafe extern "C" fn ctx_destroy(context: usize) -> u32 {
    ends(context, || call!(ctx_destroy(context)), || true)
}

fn is_primary_active(device: i32) -> bool {
    let (mut flags, mut active) = (0, 0);
    let code = call!(primary_get_state(device, &raw mut flags, &raw mut active));
    code == result::SUCCESS && active != 0
}

/// The device's primary context, if it has one now.
fn primary_context(device: i32) -> Option<usize> {
    let mut context = 0;
    if !is_primary_active(device)
        || call!(primary_retain(&raw mut context, device)) != result::SUCCESS
    {
        return None;
    }
    call!(primary_release(device));
    Some(context)
}

unsafe extern "C" fn primary_reset(device: i32) -> u32 {
    match primary_context(device) {
        Some(context) => ends(context, || call!(primary_reset(device)), || true),
        None => call!(primary_reset(device)),
    }
}

unsafe extern "C" fn primary_release(device: i32) -> u32 {
    let end = || call!(primary_release(device));
    match primary_context(device) {
        Some(context) => ends(context, end, || !is_primary_active(device)),
        None => end(),
    }
}

unsafe extern "C" fn ctx_enable_peer_access(peer: usize, flags: u32) -> u32 {
    let code = call!(ctx_enable_peer_access(peer, flags));
    let (mut own, mut other) = (-1, -1);
    if code == result::SUCCESS
        && call!(ctx_get_device(&raw mut own)) == result::SUCCESS
        && in_context(peer, || call!(ctx_get_device(&raw mut other))) == result::SUCCESS
        && let Ok(bit) = u32::try_from(own)
        && let Some(peers) = usize::try_from(other).ok().and_then(|other| CARRY.peers.get(other))
    {
        peers.fetch_or(1_u64.checked_shl(bit).unwrap_or(0), Ordering::AcqRel);
        // What the peer has already; later allocations find the bit.
        let mut next = 0;
        while let Some(found) = locked(|table| {
            table.all().iter().find(|a| a.address >= next && a.device == other).copied()
        }) {
            next = found.address + 1;
            give_access(found.address, found.bytes as usize, other);
        }
    }
    code
}
