//! Wrappers of the driver's functions for allocations and addresses.

use core::ffi::c_void;
use core::sync::atomic::Ordering;

use affinode_cuda_sys::{MemAllocationProp, pointer_attribute, result};

use super::allocations::{Allocation, AllocationPiece, MemoryPlace};
use super::backing::{back, give_access, is_able, property_on, strays, unback};
use super::contexts::{current_context, in_context, wait_for_work};
use super::driver::call;
use super::{GRANULE_BYTES, SWAP, addresses, count, ipc, locked, stream_pools, tables, vmm};
use crate::fds::TrackedFd;

/// Minimum size of an allocation that this library can copy to host memory itself. Smaller
/// allocations are left to the driver, which puts several of them into one block of this size.
pub(super) const MIN_BYTES: usize = 2 << 20;
pub unsafe extern "C" fn mem_alloc(address: *mut u64, bytes: usize) -> u32 {
    if !address.is_null()
        && let Some(swappable) = allocate(bytes)
    {
        // SAFETY: the application's own place for the address.
        unsafe { address.write(swappable) };
        return result::SUCCESS;
    }
    call!(mem_alloc(address, bytes))
}

pub unsafe extern "C" fn mem_alloc_pitch(
    address: *mut u64,
    pitch: *mut usize,
    width: usize,
    height: usize,
    element: u32,
) -> u32 {
    if !address.is_null()
        && !pitch.is_null()
        && width.saturating_mul(height) >= MIN_BYTES
        && let Some(row_bytes) = pitch_of(width, element)
        && let Some(swappable) = row_bytes.checked_mul(height).and_then(allocate)
    {
        // SAFETY: the application's own places for the results.
        unsafe {
            address.write(swappable);
            pitch.write(row_bytes);
        }
        return result::SUCCESS;
    }
    call!(mem_alloc_pitch(address, pitch, width, height, element))
}

/// Returns the pitch (distance between two rows, in bytes) that the driver uses for rows of this
/// width: the next multiple of the device's row alignment. `None`: only the driver can answer.
fn pitch_of(width: usize, element: u32) -> Option<usize> {
    /// Sizes of an element, in bytes, that the driver accepts.
    const ELEMENT_BYTES: [u32; 3] = [4, 8, 16];
    const MAX_PITCH_BYTES: usize = i32::MAX as usize;
    if !ELEMENT_BYTES.contains(&element) || SWAP.wanted.load(Ordering::Acquire) == 0 {
        return None;
    }
    let pitch = width.checked_next_multiple_of(row_alignment()?)?;
    (pitch <= MAX_PITCH_BYTES).then_some(pitch)
}

/// Returns the multiple to which the driver pads rows on the current device, in bytes. The function
/// gets it once for each device, from a row of one byte. It keeps this row: a free would wait for
/// all work of the context, but `cuMemAllocPitch` never waits for work. The work may be a kernel
/// that ends only after a later action of the program.
fn row_alignment() -> Option<usize> {
    let mut device = -1;
    if call!(ctx_get_device(&raw mut device)) != result::SUCCESS {
        return None;
    }
    let known = SWAP.row_alignments.get(usize::try_from(device).ok()?)?;
    match known.load(Ordering::Relaxed) {
        0 => {
            let (mut row, mut pitch) = (0, 0);
            let code = call!(mem_alloc_pitch(&raw mut row, &raw mut pitch, 1, 1, 4));
            if code != result::SUCCESS || !pitch.is_power_of_two() {
                return None;
            }
            known.store(pitch, Ordering::Relaxed);
            Some(pitch)
        }
        alignment => Some(alignment),
    }
}

/// Allocates memory that this library can copy to host memory itself, and returns its address.
/// `None`: the caller must use the driver's own allocation.
fn allocate(asked_bytes: usize) -> Option<u64> {
    if asked_bytes < MIN_BYTES || SWAP.wanted.load(Ordering::Acquire) == 0 {
        return None;
    }
    let context = current_context().filter(|context| *context != 0)?;
    let mut device = -1;
    if call!(ctx_get_device(&raw mut device)) != result::SUCCESS {
        return None;
    }
    if !is_able(device) {
        return None;
    }
    stream_pools::settle(false);
    let piece = make(asked_bytes, property_on(device), context)?;
    let asked_bytes = asked_bytes as u64;
    let allocation = Allocation { piece, asked_bytes, ..Allocation::default() };
    if tables(|tables| tables.insert(allocation)) {
        count(piece.bytes as i64);
        return Some(piece.address);
    }
    unmake(&piece);
    None
}

/// Reserves an address range, creates physical memory and maps it at that range. `None`: a step
/// failed.
pub(super) fn make(
    asked_bytes: usize,
    property: MemAllocationProp,
    context: usize,
) -> Option<AllocationPiece> {
    let bytes = asked_bytes.checked_next_multiple_of(GRANULE_BYTES)?;
    let address = addresses::reserve(bytes)?;
    let piece = AllocationPiece {
        address,
        bytes: bytes as u64,
        property,
        context,
        ..AllocationPiece::default()
    };
    if let Ok(handle) = back_with_room(&piece) {
        return Some(AllocationPiece { handle, ..piece });
    }
    // The addresses are not reused, because it is unknown whether anything is mapped there.
    call!(mem_address_free(address, bytes));
    None
}

/// Unmaps and frees the physical memory and the address range that [`make`] has created.
pub(super) fn unmake(piece: &AllocationPiece) {
    unback(piece);
    call!(mem_address_free(piece.address, piece.bytes as usize));
}

/// Creates and maps physical memory for a piece, as [`back`] does. If device memory is short, frees
/// unused memory of the application's memory pools and tries again.
fn back_with_room(piece: &AllocationPiece) -> Result<u64, u32> {
    loop {
        match back(piece) {
            Err(result::OUT_OF_MEMORY) if stream_pools::make_room() => {}
            backed => return backed,
        }
    }
}

pub unsafe extern "C" fn mem_free(address: u64) -> u32 {
    let Some(found) = locked(|table| table.at(address).copied()) else {
        if tables(|tables| tables.opened.around(address).is_some()) {
            return result::INVALID_VALUE;
        }
        return call!(mem_free(address));
    };
    match wait_for_work(found.piece.context) {
        result::SUCCESS => {}
        code => return code,
    }
    match locked(|table| table.remove_at(address)) {
        Some(allocation) => {
            if allocation.pool == 0 {
                release(&allocation.piece);
            } else {
                stream_pools::free_at_once(&allocation);
            }
            stream_pools::settle(true);
            result::SUCCESS
        }
        // Another thread has freed the allocation meanwhile.
        None => result::INVALID_VALUE,
    }
}

/// Frees the memory and the addresses of an allocation that was removed from its table.
pub(super) fn release(piece: &AllocationPiece) {
    if piece.may_stray() {
        strays();
    }
    let unmapped = match piece.place {
        MemoryPlace::Pool => true,
        MemoryPlace::Handed => {
            piece.shared.into_iter().for_each(TrackedFd::close);
            true
        }
        MemoryPlace::Device | MemoryPlace::Mapped => unback(piece),
    };
    if unmapped {
        addresses::free(piece.address, piece.bytes);
    } else {
        call!(mem_address_free(piece.address, piece.bytes as usize));
    }
    if !piece.stays {
        count(-(piece.bytes as i64));
    }
}

/// Returns the allocation that contains an address. It is an allocation of this process, or memory
/// of another process that this process has opened.
fn known_at(address: u64) -> Option<Allocation> {
    tables(|tables| {
        let swappable = tables.allocations.around(address).copied();
        swappable.or_else(|| tables.opened.around(address).map(|opened| opened.allocation))
    })
}

pub unsafe extern "C" fn mem_get_address_range(
    base: *mut u64,
    bytes: *mut usize,
    address: u64,
) -> u32 {
    let Some(found) = known_at(address) else {
        return call!(mem_get_address_range(base, bytes, address));
    };
    // SAFETY: the application's own places; null where it needs no result.
    unsafe {
        if let Some(base) = base.as_mut() {
            *base = found.piece.address;
        }
        if let Some(bytes) = bytes.as_mut() {
            *bytes = found.asked_bytes as usize;
        }
    }
    result::SUCCESS
}

/// Corrects a pointer attribute that the driver returned for memory which this library has mapped.
/// The attribute gets the value that it would have if the driver itself had allocated the memory.
///
/// # Safety
/// The driver must have written the attribute's value to `data` with success.
unsafe fn correct(data: *mut c_void, attribute: u32, allocation: &Allocation) {
    let pooled = allocation.pool != 0;
    let first_byte = |value| {
        // SAFETY: the value is one byte, or only its first byte is significant.
        unsafe { data.cast::<u8>().write(value) };
    };
    let value = match attribute {
        pointer_attribute::CONTEXT if pooled => 0,
        pointer_attribute::CONTEXT => allocation.piece.context as u64,
        pointer_attribute::RANGE_SIZE => allocation.asked_bytes,
        pointer_attribute::POOL if pooled => stream_pools::handle_of(allocation) as u64,
        pointer_attribute::LEGACY_IPC if ipc::is_shareable(allocation) => return first_byte(1),
        pointer_attribute::HANDLE_TYPES if pooled => return first_byte(0),
        _ => return,
    };
    // SAFETY: each of these values is as large as a pointer.
    unsafe { data.cast::<u64>().write(value) };
}

pub unsafe extern "C" fn pointer_get_attribute(data: *mut c_void, attribute: u32, at: u64) -> u32 {
    let code = call!(pointer_get_attribute(data, attribute, at));
    if code == result::SUCCESS
        && let Some(found) = known_at(at)
    {
        // SAFETY: the driver has just written this value.
        unsafe { correct(data, attribute, &found) };
    }
    code
}

pub unsafe extern "C" fn pointer_get_attributes(
    many: u32,
    attributes: *const u32,
    data: *const *mut c_void,
    at: u64,
) -> u32 {
    let code = call!(pointer_get_attributes(many, attributes, data, at));
    if code == result::SUCCESS
        && let Some(found) = known_at(at)
    {
        for index in 0..many as usize {
            // SAFETY: the driver has read `many` entries of both arrays and written each value.
            unsafe { correct(data.add(index).read(), attributes.add(index).read(), &found) };
        }
    }
    code
}

/// Marks the allocation at an address, so that offloads leave it on the device. Must be called if
/// anything besides the mapping refers to the physical memory, for example an exported handle.
pub(super) fn stays(address: u64) {
    let found = locked(|table| {
        let piece = &mut table.around(address)?.piece;
        (!core::mem::replace(&mut piece.stays, true)).then_some(piece.bytes)
    });
    if let Some(bytes) = found {
        count(-(bytes as i64));
    }
}

pub unsafe extern "C" fn pointer_set_attribute(
    value: *const c_void,
    attribute: u32,
    at: u64,
) -> u32 {
    let code = call!(pointer_set_attribute(value, attribute, at));
    // Do this whatever the result was, because the application wants other devices on the bus to
    // reach the memory.
    stays(at);
    vmm::blocks(|blocks| blocks.stay_in(at, 1));
    code
}

pub unsafe extern "C" fn mem_get_handle_for_range(
    handle: *mut c_void,
    address: u64,
    bytes: usize,
    kind: u32,
    flags: u64,
) -> u32 {
    let code = call!(mem_get_handle_for_range(handle, address, bytes, kind, flags));
    if code == result::SUCCESS {
        stays(address);
        vmm::blocks(|blocks| blocks.stay_in(address, bytes as u64));
    }
    code
}

/// Wrapper of `cuCtxFromGreenCtx`. If the call succeeds, the library makes no further allocation
/// swappable (copyable to host memory by the library itself). The reason is that an allocation may
/// outlive the green context in which it is made.
pub unsafe extern "C" fn ctx_from_green(context: *mut usize, green: usize) -> u32 {
    let code = call!(ctx_from_green(context, green));
    if code == result::SUCCESS {
        SWAP.green.store(1, Ordering::Release);
        SWAP.wanted.store(0, Ordering::Release);
    }
    code
}

pub unsafe extern "C" fn ctx_enable_peer_access(peer: usize, flags: u32) -> u32 {
    let code = call!(ctx_enable_peer_access(peer, flags));
    let (mut own, mut other) = (-1, -1);
    if code == result::SUCCESS
        && call!(ctx_get_device(&raw mut own)) == result::SUCCESS
        && in_context(peer, || call!(ctx_get_device(&raw mut other))) == result::SUCCESS
        && let Ok(bit) = u32::try_from(own)
        && let Some(peers) = usize::try_from(other).ok().and_then(|other| SWAP.peers.get(other))
    {
        peers.fetch_or(1_u64.checked_shl(bit).unwrap_or(0), Ordering::AcqRel);
        // Give the peer access to existing allocations. Later allocations read the bit that was set
        // above.
        let mut next = 0;
        while let Some(found) = locked(|table| {
            let of_other = |a: &&Allocation| a.piece.property.location_id == other;
            table.from(next).find(of_other).map(|a| a.piece)
        }) {
            next = found.address + 1;
            give_access(&found);
        }
    }
    code
}

#[cfg(test)]
mod tests {
    use super::super::pending_work::tests::Process;
    use super::super::prefault::tests::forget_all;
    use super::*;

    fn mem_alloc_pitched(width: usize, height: usize, element: u32) -> Result<(u64, usize), u32> {
        let (mut address, mut pitch) = (0, 0);
        // SAFETY: the addresses are those of local variables.
        match unsafe { mem_alloc_pitch(&raw mut address, &raw mut pitch, width, height, element) } {
            result::SUCCESS => Ok((address, pitch)),
            code => Err(code),
        }
    }

    /// The program's own call waits for no work, so this library must not wait either. A free in
    /// the driver would wait, and it would invalidate a capture.
    #[test]
    fn pitched_memory_is_made_without_a_free() {
        let process = Process::new();
        SWAP.in_use.store(1, Ordering::Release);
        SWAP.wanted.store(1, Ordering::Release);
        for (width, expected) in [(1000, 1024), (1024, 1024), (1025, 1536)] {
            let (address, pitch) = mem_alloc_pitched(width, 4096, 4).unwrap();
            assert_eq!(pitch, expected);
            assert!(known_at(address).is_some(), "the memory is swappable");
        }
        let (small, pitch) = mem_alloc_pitched(1000, 4, 4).unwrap();
        assert_eq!((pitch, known_at(small).is_none()), (1024, true));
        assert_eq!(process.fake.frees(), 0, "no call waits for work");
        assert_eq!(mem_alloc_pitched(1000, 4096, 3), Err(result::INVALID_VALUE));
        SWAP.wanted.store(0, Ordering::Release);
        SWAP.row_alignments.iter().for_each(|known| known.store(0, Ordering::Relaxed));
        forget_all();
    }
}
