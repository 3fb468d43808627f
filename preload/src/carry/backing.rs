//! Physical memory behind reserved addresses, and who may reach it.

use core::sync::atomic::{AtomicU32, Ordering};

use affinode_cuda_sys::{
    ACCESS_READ_WRITE, ALLOCATION_PINNED, LOCATION_DEVICE, MemAccessDesc, MemAllocationProp,
    device_attribute, result,
};

use super::{CARRY, DEVICES, GRANULE_BYTES, driver::call};

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
pub(super) fn give_access(address: u64, bytes: usize, device: i32) -> u32 {
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
