//! Creates physical device memory, maps it at reserved addresses, and sets its access rights.

use core::sync::atomic::{AtomicU32, Ordering};

use affinode_cuda_sys::{
    ACCESS_READ_WRITE, ALLOCATION_PINNED, LOCATION_DEVICE, MemAccessDesc, MemAllocationProp,
    POSIX_DESCRIPTOR, device_attribute, result,
};

use super::{
    DEVICES, GRANULE_BYTES, SWAP, allocations::AllocationPiece, driver::call, peer_devices,
};

/// Abilities of each device, as a bit set of the constants below. 0: the driver was not queried
/// yet.
static ABILITIES: [AtomicU32; DEVICES] = [const { AtomicU32::new(0) }; DEVICES];
/// Bit of [`ABILITIES`]: the device was queried.
const KNOWN: u32 = 1;
/// Bit of [`ABILITIES`]: this library can copy memory of the device to host memory.
const ABLE: u32 = 1 << 1;
/// Bit of [`ABILITIES`]: memory can be created so that other devices on the bus can access it.
const RDMA: u32 = 1 << 2;
/// Bit of [`ABILITIES`]: memory of the device can be exported.
const SHARES: u32 = 1 << 3;

fn ability(device: i32) -> u32 {
    let Some(known) = usize::try_from(device).ok().and_then(|device| ABILITIES.get(device)) else {
        return KNOWN;
    };
    match known.load(Ordering::Relaxed) {
        0 => {}
        answer => return answer,
    }
    let has = |attribute| {
        let mut value = 0;
        let code = call!(device_get_attribute(&raw mut value, attribute, device));
        code == result::SUCCESS && value == 1
    };
    let mut granule = 0;
    let property = property(device, 0);
    let asked = call!(mem_get_granularity(&raw mut granule, &raw const property, 0));
    let fits = asked == result::SUCCESS && granule > 0 && GRANULE_BYTES.is_multiple_of(granule);
    let mut answer = KNOWN;
    if fits && has(device_attribute::VIRTUAL_MEMORY_MANAGEMENT) {
        answer |= ABLE;
        if has(device_attribute::POSIX_DESCRIPTORS) {
            answer |= SHARES;
        }
        if has(device_attribute::RDMA_WITH_VIRTUAL_MEMORY) && peer_devices::has_others() {
            answer |= RDMA;
        }
    }
    known.store(answer, Ordering::Relaxed);
    answer
}

pub(super) fn is_able(device: i32) -> bool {
    ability(device) & ABLE != 0
}

fn property(device: i32, abilities: u32) -> MemAllocationProp {
    MemAllocationProp {
        kind: ALLOCATION_PINNED,
        handle_types: if abilities & SHARES != 0 { POSIX_DESCRIPTOR } else { 0 },
        location_type: LOCATION_DEVICE,
        location_id: device,
        gpu_direct_rdma: u8::from(abilities & RDMA != 0),
        ..MemAllocationProp::default()
    }
}

/// Returns the properties with which memory for an allocation on a device is created.
pub(super) fn property_on(device: i32) -> MemAllocationProp {
    property(device, ability(device))
}

/// Creates physical memory for a piece, maps it, and returns its handle.
pub(super) fn back(piece: &AllocationPiece) -> Result<u64, u32> {
    let mut handle = 0;
    match call!(mem_create(&raw mut handle, piece.bytes as usize, &raw const piece.property, 0)) {
        result::SUCCESS => {}
        code => return Err(code),
    }
    map(piece, handle).map(|()| handle)
}

/// Maps existing physical memory at a piece's addresses and sets its access rights. If a step
/// fails, releases the memory and returns the driver's code.
pub(super) fn map(piece: &AllocationPiece, handle: u64) -> Result<(), u32> {
    let bytes = piece.bytes as usize;
    let try_once = || call!(mem_map(piece.address, bytes, 0, handle, 0));
    let mapped = match try_once() {
        result::SUCCESS => result::SUCCESS,
        // An earlier failure may have left a mapping at these addresses that could not be unmapped
        // then.
        _ if call!(mem_unmap(piece.address, bytes)) == result::SUCCESS => try_once(),
        code => code,
    };
    if mapped != result::SUCCESS {
        if call!(mem_release(handle)) != result::SUCCESS && piece.imported {
            strays();
        }
        return Err(mapped);
    }
    match give_access(piece) {
        result::SUCCESS => Ok(()),
        code => {
            if !unback(&AllocationPiece { handle, ..*piece }) {
                // The memory is freed when its mapping ends. That mapping is in no table.
                call!(mem_release(handle));
            }
            Err(code)
        }
    }
}

/// Unmaps and releases the physical memory of a piece, as the reverse of [`back`]. Returns false if
/// the memory is still mapped.
pub(super) fn unback(piece: &AllocationPiece) -> bool {
    let unmapped = call!(mem_unmap(piece.address, piece.bytes as usize)) == result::SUCCESS;
    let released = unmapped && call!(mem_release(piece.handle)) == result::SUCCESS;
    if piece.imported && !released {
        strays();
    }
    unmapped
}

/// Records that memory imported from a copier (a process that fills the memory of other processes)
/// may still be allocated, because of references that are in no table of this library.
pub(super) fn strays() {
    SWAP.strayed.store(1, Ordering::Release);
}

/// Lets a piece's own device, and the peer devices that the application has enabled, read and write
/// the piece. Returns the driver's code.
pub(super) fn give_access(piece: &AllocationPiece) -> u32 {
    match give(piece, piece.property.location_id) {
        result::SUCCESS => {}
        code => return code,
    }
    for id in peers_of(piece) {
        match give(piece, id) {
            result::SUCCESS => {}
            code => return code,
        }
    }
    result::SUCCESS
}

/// Gives access as [`give_access`] does, but to memory that another process has shared. This
/// process may open such memory on a device other than the one that contains it. Peers of the
/// opening device get access if the driver allows it.
pub(super) fn give_access_to_opened(piece: &AllocationPiece) -> u32 {
    let code = give(piece, piece.property.location_id);
    if code == result::SUCCESS {
        for id in peers_of(piece) {
            give(piece, id);
        }
    }
    code
}

fn give(piece: &AllocationPiece, device: i32) -> u32 {
    let access = MemAccessDesc {
        location_type: LOCATION_DEVICE,
        location_id: device,
        flags: ACCESS_READ_WRITE,
    };
    call!(mem_set_access(piece.address, piece.bytes as usize, &raw const access, 1))
}

/// The devices that the application has enabled as peers of a piece's device.
fn peers_of(piece: &AllocationPiece) -> impl Iterator<Item = i32> {
    let device = usize::try_from(piece.property.location_id).ok();
    let peers = device.and_then(|device| SWAP.peers.get(device));
    let peers = peers.map_or(0, |peers| peers.load(Ordering::Acquire));
    (0..DEVICES as i32).filter(move |id| peers & 1 << id != 0)
}
