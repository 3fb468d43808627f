//! Physical memory behind reserved addresses, and who may reach it.

use core::sync::atomic::{AtomicU32, Ordering};

use affinode_cuda_sys::{
    ACCESS_READ_WRITE, ALLOCATION_PINNED, LOCATION_DEVICE, MemAccessDesc, MemAllocationProp,
    device_attribute, result,
};

use super::{CARRY, DEVICES, GRANULE_BYTES, driver::call, table::Piece};

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

pub(super) fn is_able(device: i32) -> bool {
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

/// What memory on a device is made as, for an allocation.
pub(super) fn property_on(device: i32) -> MemAllocationProp {
    property(device, ability(device) == ABLE_RDMA)
}

/// Puts physical memory behind a piece's addresses: its handle.
pub(super) fn back(piece: &Piece) -> Result<u64, u32> {
    let mut handle = 0;
    match call!(mem_create(&raw mut handle, piece.bytes as usize, &raw const piece.property, 0)) {
        result::SUCCESS => {}
        code => return Err(code),
    }
    map(piece, handle).map(|()| handle)
}

/// Puts physical memory that is there behind a piece's addresses; releases it where that fails.
pub(super) fn map(piece: &Piece, handle: u64) -> Result<(), u32> {
    let mapped = call!(mem_map(piece.address, piece.bytes as usize, 0, handle, 0));
    if mapped != result::SUCCESS {
        if call!(mem_release(handle)) != result::SUCCESS && piece.imported {
            strays();
        }
        return Err(mapped);
    }
    match give_access(piece) {
        result::SUCCESS => Ok(()),
        code => {
            unback(&Piece { handle, ..*piece });
            Err(code)
        }
    }
}

/// Undoes [`back`]. False: it is mapped still.
pub(super) fn unback(piece: &Piece) -> bool {
    let unmapped = call!(mem_unmap(piece.address, piece.bytes as usize)) == result::SUCCESS;
    let released = unmapped && call!(mem_release(piece.handle)) == result::SUCCESS;
    if piece.imported && !released {
        strays();
    }
    unmapped
}

/// Memory of a vault's making may be held from now on by something that nothing here knows of.
pub(super) fn strays() {
    CARRY.strayed.store(1, Ordering::Release);
}

/// Gives the device itself access, and those that the application has made its peers.
pub(super) fn give_access(piece: &Piece) -> u32 {
    let device = piece.property.location_id;
    let give = |id| {
        let access = MemAccessDesc {
            location_type: LOCATION_DEVICE,
            location_id: id,
            flags: ACCESS_READ_WRITE,
        };
        call!(mem_set_access(piece.address, piece.bytes as usize, &raw const access, 1))
    };
    match give(device) {
        result::SUCCESS => {}
        code => return code,
    }
    let peers = usize::try_from(device).ok().and_then(|device| CARRY.peers.get(device));
    let peers = peers.map_or(0, |peers| peers.load(Ordering::Acquire));
    for id in (0..DEVICES as i32).filter(|id| peers & 1 << id != 0) {
        match give(id) {
            result::SUCCESS => {}
            code => return code,
        }
    }
    result::SUCCESS
}
