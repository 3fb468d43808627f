//! Driver functions for stream-ordered memory and its pools.

use std::ffi::c_void;

use crate::abi::{
    ALLOCATION_PINNED, AccessDesc, CUdevice, CUdeviceptr, HANDLE_POSIX_FD, Handle, INVALID_VALUE,
    In, LOCATION_DEVICE, NOT_SUPPORTED, Out, Outcome, PoolProps, STREAM_CAPTURE_UNSUPPORTED,
};
use crate::api::allocation::free;
use crate::api::cuda_api;
use crate::driver::Driver;
use crate::memory::Origin;
use crate::streams::StreamId;

cuda_api! {
    Work 11020 fn [cuMemAllocAsync cuMemAllocAsync_ptsz] (address: Out<CUdeviceptr>, bytes: usize, stream: Handle) |d, zero| {
        let stream = d.stream(stream, zero)?;
        let (context, _) = d.streams.get(stream)?;
        let (device, _) = d.contexts().get(context)?;
        let pool = d.pools().current_of(device);
        allocate(d, address, bytes, pool, stream)
    }
    Work 11020 fn [cuMemAllocFromPoolAsync cuMemAllocFromPoolAsync_ptsz] (address: Out<CUdeviceptr>, bytes: usize, pool: Handle, stream: Handle) |d, zero| {
        let stream = d.stream(stream, zero)?;
        allocate(d, address, bytes, pool, stream)
    }
    Work 11020 fn [cuMemFreeAsync cuMemFreeAsync_ptsz] (address: CUdeviceptr, stream: Handle) |d, zero| {
        let stream = d.stream(stream, zero)?;
        if d.streams.is_capturing(stream) {
            return Err(INVALID_VALUE);
        }
        let origin = d.memory().free_later(address)?;
        if origin == Origin::Pool {
            d.pools().is_freed(address);
        }
        d.streams.submit(stream, Box::new(move || free(d, address))).map(drop)
    }
    Instant 11020 fn cuDeviceGetDefaultMemPool(pool: Out<Handle>, device: CUdevice) |d, _z| {
        d.gpu(device)?;
        pool.set(d.pools().default_of(device))
    }
    Instant 11020 fn cuDeviceGetMemPool(pool: Out<Handle>, device: CUdevice) |d, _z| {
        d.gpu(device)?;
        pool.set(d.pools().current_of(device))
    }
    Work 11020 fn cuDeviceSetMemPool(device: CUdevice, pool: Handle) |d, _z| {
        d.gpu(device)?;
        d.pools().set_current(device, pool)
    }
    Work 11020 fn cuMemPoolCreate(pool: Out<Handle>, props: In<PoolProps>) |d, _z| {
        let props = props.get().ok_or(INVALID_VALUE)?;
        if props.kind != ALLOCATION_PINNED || props.location.kind != LOCATION_DEVICE {
            return Err(INVALID_VALUE);
        }
        if props.handle_types & !HANDLE_POSIX_FD != 0 {
            return Err(NOT_SUPPORTED);
        }
        d.gpu(props.location.id)?;
        pool.set(d.pools().create(props.location.id))
    }
    Work 11020 fn cuMemPoolDestroy(pool: Handle) |d, _z| { d.destroy_pool(pool) }
    Work 11020 fn cuMemPoolTrimTo(pool: Handle, keep: usize) |d, _z| { d.trim_pool(pool, keep as u64) }
    Work 11020 fn cuMemPoolSetAccess(pool: Handle, access: In<AccessDesc>, count: usize) |d, _z| {
        // Access rights of single devices are not simulated. Only the arguments are checked.
        d.pools().get(pool)?;
        (0..count).try_for_each(|index| {
            let one = access.at(index).ok_or(INVALID_VALUE)?;
            d.gpu(one.location.id).map(drop)
        })
    }
    Work 11020 fn cuMemPoolGetAttribute(pool: Handle, attribute: u32, value: Out<c_void>) |d, _z| {
        let mut pools = d.pools();
        let pool = pools.get(pool)?;
        let long = value.cast::<u64>();
        match attribute {
            1..=3 => value.cast::<i32>().set(pool.reuse[attribute as usize - 1]),
            4 => long.set(pool.threshold),
            5 => long.set(pool.reserved.bytes),
            6 => long.set(pool.reserved.high),
            7 => long.set(pool.used.bytes),
            8 => long.set(pool.used.high),
            _ => Err(INVALID_VALUE),
        }
    }
    Work 11020 fn cuMemPoolSetAttribute(pool: Handle, attribute: u32, value: In<u64>) |d, _z| {
        let mut pools = d.pools();
        let pool = pools.get(pool)?;
        match attribute {
            1..=3 => {
                // The attribute is an int. The other bytes of the word do not belong to the
                // application.
                pool.reuse[attribute as usize - 1] = value.get().ok_or(INVALID_VALUE)? as i32;
                Ok(())
            }
            4 => {
                pool.threshold = value.get().ok_or(INVALID_VALUE)?;
                Ok(())
            }
            6 | 8 if value.get() == Some(0) => {
                let level = if attribute == 6 { &mut pool.reserved } else { &mut pool.used };
                level.high = level.bytes;
                Ok(())
            }
            _ => Err(INVALID_VALUE),
        }
    }
}

fn allocate(
    driver: &Driver,
    address: Out<CUdeviceptr>,
    bytes: usize,
    pool: Handle,
    stream: StreamId,
) -> Outcome {
    if driver.streams.is_capturing(stream) {
        // During a capture, the allocation would become a node of the graph. Graphs are not
        // simulated.
        return Err(STREAM_CAPTURE_UNSUPPORTED);
    }
    address.set(driver.pool_allocate(pool, bytes, driver.current()?)?)
}
