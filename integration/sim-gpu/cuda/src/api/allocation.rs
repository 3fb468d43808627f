//! Driver functions for memory on the device and on the host.

use affinode_sim_protocol::Request;

use crate::abi::{CUdeviceptr, HostAddress, INVALID_VALUE, Out, Outcome, UNKNOWN};
use crate::api::cuda_api;
use crate::driver::Driver;
use crate::host::HostKind;
use crate::memory::{Origin, Source};
use crate::pages::PAGE_BYTES;

cuda_api! {
    Work 3020 fn cuMemAlloc_v2(address: Out<CUdeviceptr>, bytes: usize) |d, _z| { address.set(allocate(d, bytes)?) }
    Work 3020 fn cuMemAllocPitch_v2(address: Out<CUdeviceptr>, pitch: Out<usize>, width: usize, height: usize, _element: u32) |d, _z| {
        let row = width.checked_next_multiple_of(512).ok_or(INVALID_VALUE)?;
        address.set(allocate(d, row.checked_mul(height).ok_or(INVALID_VALUE)?)?)?;
        pitch.set(row)
    }
    Work 3020 fn cuMemFree_v2(address: CUdeviceptr) |d, _z| {
        if address == 0 {
            return Ok(());
        }
        // Queued work may still use the memory.
        d.streams.wait_idle(None, None);
        free(d, address)
    }
    Work 6000 fn cuMemAllocManaged(address: Out<CUdeviceptr>, bytes: usize, _flags: u32) |d, _z| {
        d.current()?;
        address.set(d.memory().host.add(None, bytes, HostKind::Managed)? as CUdeviceptr)
    }
    Work 3020 fn cuMemAllocHost_v2(address: Out<HostAddress>, bytes: usize) |d, _z| {
        d.current()?;
        address.set(d.memory().host.add(None, bytes, HostKind::Pinned)?)
    }
    Work 2020 fn cuMemHostAlloc(address: Out<HostAddress>, bytes: usize, _flags: u32) |d, _z| {
        d.current()?;
        address.set(d.memory().host.add(None, bytes, HostKind::Pinned)?)
    }
    Work 2000 fn cuMemFreeHost(address: HostAddress) |d, _z| {
        d.streams.wait_idle(None, None);
        d.memory().host.remove(address, &[HostKind::Pinned])
    }
    Work 6050 fn cuMemHostRegister_v2(address: HostAddress, bytes: usize, _flags: u32) |d, _z| {
        d.current()?;
        let address = Some(address).filter(|address| *address != 0).ok_or(INVALID_VALUE)?;
        d.memory().host.add(Some(address), bytes, HostKind::Registered).map(drop)
    }
    Work 4000 fn cuMemHostUnregister(address: HostAddress) |d, _z| {
        d.streams.wait_idle(None, None);
        d.memory().host.remove(address, &[HostKind::Registered])
    }
    Work 3020 fn cuMemHostGetDevicePointer_v2(device: Out<CUdeviceptr>, address: HostAddress, _flags: u32) |d, _z| {
        d.memory().host.describe(address).ok_or(INVALID_VALUE)?;
        device.set(address as CUdeviceptr)
    }
    Instant 3000 fn cuMemHostGetFlags(flags: Out<u32>, address: HostAddress) |d, _z| {
        d.memory().host.describe(address).ok_or(INVALID_VALUE)?;
        flags.set(0)
    }
    MemInfo 3020 fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) |d, _z| {
        let gpu = d.gpu(d.current()?.device)?;
        match d.link.ask(&Request::Memory { gpu }, None)? {
            (affinode_sim_protocol::Reply::Memory { free_bytes, total_bytes }, _) => {
                free.set(free_bytes as usize)?;
                total.set(total_bytes as usize)
            }
            _ => Err(UNKNOWN),
        }
    }
    Instant 3020 fn cuMemGetAddressRange_v2(base: Out<CUdeviceptr>, bytes: Out<usize>, address: CUdeviceptr) |d, _z| {
        let found = d.memory().describe(address).ok_or(crate::abi::NOT_FOUND)?;
        base.set_if_wanted(found.base);
        bytes.set_if_wanted(found.bytes as usize);
        Ok(())
    }
}

fn allocate(driver: &Driver, bytes: usize) -> Outcome<CUdeviceptr> {
    let current = driver.current()?;
    if bytes == 0 {
        return Err(INVALID_VALUE);
    }
    let size = bytes.checked_next_multiple_of(PAGE_BYTES).ok_or(crate::abi::OUT_OF_MEMORY)? as u64;
    let gpu = driver.gpu(current.device)?;
    let granted = driver.obtain(gpu, size)?;
    let mut memory = driver.memory();
    memory.add(&granted, Source::Own)?;
    memory.place(granted.object, bytes, current.context, Origin::Alloc)
}

/// Frees an allocation of device memory. The caller ensures that no queued work uses the
/// allocation.
pub fn free(driver: &Driver, address: CUdeviceptr) -> Outcome {
    let mut memory = driver.memory();
    if memory.host.remove(address as HostAddress, &[HostKind::Managed]).is_ok() {
        return Ok(());
    }
    if memory.describe(address).is_some_and(|found| found.origin == Origin::Pool) {
        drop(memory);
        return driver.pool_takes_back(address);
    }
    let freed = memory.remove(address, Origin::Alloc)?;
    drop(memory);
    freed.map_or(Ok(()), |object| driver.link.tell(&Request::Free { object }))
}
