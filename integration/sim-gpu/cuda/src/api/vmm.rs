//! Driver functions for virtual memory management: address ranges, physical memory, mappings, and
//! exported descriptors. The handle of an allocation is the number that the daemon has given to it.

use std::os::fd::{BorrowedFd, IntoRawFd};

use affinode_sim_protocol::{ObjectId, Reply, Request};

use crate::abi::{
    ACCESS_READ_WRITE, ALLOCATION_PINNED, AccessDesc, AllocationProp, CUdevice, CUdeviceptr,
    HANDLE_POSIX_FD, HostAddress, INVALID_DEVICE, INVALID_VALUE, In, LOCATION_DEVICE, Location,
    NOT_SUPPORTED, Out, Outcome, UNKNOWN,
};
use crate::api::cuda_api;
use crate::api::stream::is_relaxed;
use crate::driver::Driver;
use crate::memory::{GRANULARITY, Source};

cuda_api! {
    Instant 10020 fn cuMemGetAllocationGranularity(bytes: Out<usize>, prop: In<AllocationProp>, _option: u32) |d, _z| {
        gpu_of(d, prop)?;
        bytes.set(GRANULARITY)
    }
    Work 10020 fn cuMemAddressReserve(address: Out<CUdeviceptr>, bytes: usize, align: usize, _hint: CUdeviceptr, flags: u64) |d, _z| {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        address.set(d.memory().reserve(bytes, align)?)
    }
    Work 10020 fn cuMemAddressFree(address: CUdeviceptr, bytes: usize) |d, _z| { d.memory().unreserve(address, bytes) }
    Work 10020 fn cuMemCreate(handle: Out<ObjectId>, bytes: usize, prop: In<AllocationProp>, flags: u64) |d, _z| {
        let gpu = gpu_of(d, prop)?;
        if flags != 0 || bytes == 0 || !bytes.is_multiple_of(GRANULARITY) {
            return Err(INVALID_VALUE);
        }
        d.streams.spoils_global(is_relaxed())?;
        let granted = d.obtain(gpu, bytes as u64)?;
        let mut memory = d.memory();
        memory.add(&granted, Source::Own)?;
        memory.made_as(granted.object, prop.get().ok_or(INVALID_VALUE)?);
        handle.set(granted.object)
    }
    Work 10020 fn cuMemRelease(handle: ObjectId) |d, _z| {
        let last = d.memory().drop_handle(handle)?;
        if last { d.link.tell(&Request::Free { object: handle }) } else { Ok(()) }
    }
    Work 11000 fn cuMemRetainAllocationHandle(handle: Out<ObjectId>, address: HostAddress) |d, _z| {
        let mut memory = d.memory();
        let object = memory.describe(address as CUdeviceptr).ok_or(INVALID_VALUE)?.object;
        memory.retain(object)?;
        handle.set(object)
    }
    Instant 10020 fn cuMemGetAllocationPropertiesFromHandle(prop: Out<AllocationProp>, handle: ObjectId) |d, _z| {
        prop.set(d.memory().property(handle)?)
    }
    Work 10020 fn cuMemMap(address: CUdeviceptr, bytes: usize, offset: usize, handle: ObjectId, flags: u64) |d, _z| {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        d.memory().map(address, bytes, offset, handle)
    }
    Work 10020 fn cuMemUnmap(address: CUdeviceptr, bytes: usize) |d, _z| {
        // `cuMemUnmap` does not wait for work that uses the memory. As with the real driver, the
        // caller must wait for that work.
        d.streams.spoils_global(is_relaxed())?;
        let freed = d.memory().unmap(address, bytes)?;
        freed.into_iter().try_for_each(|object| d.link.tell(&Request::Free { object }))
    }
    Work 10020 fn cuMemSetAccess(address: CUdeviceptr, bytes: usize, descriptions: In<AccessDesc>, count: usize) |d, _z| {
        // Access rights of single devices are not simulated, so only the last description is used.
        let last = count.checked_sub(1).and_then(|last| descriptions.at(last)).ok_or(INVALID_VALUE)?;
        if last.location.kind != LOCATION_DEVICE {
            return Err(INVALID_VALUE);
        }
        d.gpu(last.location.id)?;
        d.memory().set_access(address, bytes, last.flags)
    }
    Instant 10020 fn cuMemGetAccess(flags: Out<u64>, location: In<Location>, address: CUdeviceptr) |d, _z| {
        let location = location.get().ok_or(INVALID_VALUE)?;
        let (gpu, access) = d.memory().access(address)?;
        let own = d.gpu(location.id)? == gpu;
        flags.set(if own { u64::from(access & ACCESS_READ_WRITE) } else { 0 })
    }
    Work 10020 fn cuMemExportToShareableHandle(shareable: Out<i32>, handle: ObjectId, kind: u32, _flags: u64) |d, _z| {
        if kind != HANDLE_POSIX_FD {
            return Err(NOT_SUPPORTED);
        }
        // As on a real driver, imported memory cannot be exported again.
        if !d.memory().owns(handle) {
            return Err(INVALID_VALUE);
        }
        match d.link.ask(&Request::Export { object: handle }, None)? {
            (Reply::Done, Some(fd)) => shareable.set(fd.into_raw_fd()),
            _ => Err(UNKNOWN),
        }
    }
    Work 10020 fn cuMemImportFromShareableHandle(handle: Out<ObjectId>, shareable: HostAddress, kind: u32) |d, _z| {
        if kind != HANDLE_POSIX_FD {
            return Err(NOT_SUPPORTED);
        }
        let fd = i32::try_from(shareable).map_err(|_| INVALID_VALUE)?;
        if fd < 0 {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the application's descriptor stays open during this call. If the number is not a
        // descriptor, sendmsg fails.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let granted = d.link.obtain(&Request::Import, Some(fd))?;
        let mut memory = d.memory();
        memory.add(&granted, Source::Shared)?;
        memory.made_as(granted.object, exported_from(d.ordinal(granted.gpu)));
        handle.set(granted.object)
    }
}

/// Returns the properties of memory that was imported from a descriptor.
fn exported_from(device: CUdevice) -> AllocationProp {
    AllocationProp {
        kind: ALLOCATION_PINNED,
        requested_handle_types: HANDLE_POSIX_FD,
        location: Location { kind: LOCATION_DEVICE, id: device },
        win32_meta_data: 0,
        flags: [0; 8],
    }
}

fn gpu_of(driver: &Driver, prop: In<AllocationProp>) -> Outcome<usize> {
    let prop = prop.get().ok_or(INVALID_VALUE)?;
    if prop.kind != ALLOCATION_PINNED || prop.location.kind != LOCATION_DEVICE {
        return Err(INVALID_VALUE);
    }
    if prop.requested_handle_types & !HANDLE_POSIX_FD != 0 {
        return Err(NOT_SUPPORTED);
    }
    driver.gpu(prop.location.id).map_err(|_| INVALID_DEVICE)
}
