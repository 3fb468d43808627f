//! Driver functions for contexts and peer access.

use crate::abi::{CUdevice, Handle, INVALID_DEVICE, INVALID_VALUE, Out, Outcome};
use crate::api::cuda_api;
use crate::contexts::{context_handle, pop, push, set, top};
use crate::driver::Driver;

/// The driver's constant `CU_LIMIT_STACK_SIZE`: the limit of local memory for each GPU thread, in
/// bytes.
const STACK_SIZE: u32 = 0;

cuda_api! {
    Work 7000 fn cuDevicePrimaryCtxRetain(context: Out<Handle>, device: CUdevice) |d, _z| {
        context.set(context_handle(d.retain_primary(device)?))
    }
    Work 11000 fn cuDevicePrimaryCtxRelease_v2(device: CUdevice) |d, _z| { d.release_primary(device, false) }
    Work 11000 fn cuDevicePrimaryCtxReset_v2(device: CUdevice) |d, _z| { d.release_primary(device, true) }
    Instant 11000 fn cuDevicePrimaryCtxSetFlags_v2(device: CUdevice, _flags: u32) |d, _z| { d.gpu(device).map(drop) }
    Instant 7000 fn cuDevicePrimaryCtxGetState(device: CUdevice, flags: Out<u32>, active: Out<i32>) |d, _z| {
        d.gpu(device)?;
        let (of, is) = d.contexts().primary_state(device);
        flags.set(of)?;
        active.set(i32::from(is))
    }
    Work 3020 fn cuCtxCreate_v2(context: Out<Handle>, flags: u32, device: CUdevice) |d, _z| {
        create(d, context, flags, device)
    }
    Work 11040 fn cuCtxCreate_v3(context: Out<Handle>, _affinity: usize, _count: i32, flags: u32, device: CUdevice) |d, _z| {
        create(d, context, flags, device)
    }
    Work 12050 fn cuCtxCreate_v4(context: Out<Handle>, _parameters: usize, flags: u32, device: CUdevice) |d, _z| {
        create(d, context, flags, device)
    }
    Work 4000 fn cuCtxDestroy_v2(context: Handle) |d, _z| {
        let context = d.contexts().find(context)?;
        d.destroy_context(context)
    }
    // The context has no other references, because `cuCtxAttach` is not simulated.
    Work 4000 fn cuCtxDetach(context: Handle) |d, _z| {
        let context = d.contexts().find(context)?;
        d.destroy_context(context)
    }
    Instant 4000 fn cuCtxSetCurrent(context: Handle) |d, _z| {
        let context = if context == 0 { None } else { Some(d.contexts().find(context)?) };
        set(context);
        Ok(())
    }
    Instant 4000 fn cuCtxGetCurrent(context: Out<Handle>) |_d, _z| { context.set(top().map_or(0, context_handle)) }
    Instant 4000 fn cuCtxPushCurrent_v2(context: Handle) |d, _z| {
        push(d.contexts().find(context)?);
        Ok(())
    }
    Instant 4000 fn cuCtxPopCurrent_v2(context: Out<Handle>) |_d, _z| {
        context.set_if_wanted(context_handle(pop()?));
        Ok(())
    }
    Instant 2000 fn cuCtxGetDevice(device: Out<CUdevice>) |d, _z| { device.set(d.current()?.device) }
    Instant 13000 fn cuCtxGetDevice_v2(device: Out<CUdevice>, context: Handle) |d, _z| {
        let contexts = d.contexts();
        device.set(contexts.get(contexts.find(context)?)?.0)
    }
    Instant 7000 fn cuCtxGetFlags(flags: Out<u32>) |d, _z| {
        let context = d.current()?.context;
        flags.set(d.contexts().get(context)?.1)
    }
    Instant 3020 fn cuCtxGetApiVersion(context: Handle, version: Out<u32>) |d, _z| {
        if context != 0 {
            d.contexts().find(context)?;
        }
        version.set(3020)
    }
    Instant 12000 fn cuCtxGetId(context: Handle, id: Out<u64>) |d, _z| {
        let context = if context == 0 { d.current()?.context } else { d.contexts().find(context)? };
        id.set(context)
    }
    Instant 5050 fn cuCtxGetStreamPriorityRange(least: Out<i32>, greatest: Out<i32>) |_d, _z| {
        least.set_if_wanted(0);
        greatest.set_if_wanted(-5);
        Ok(())
    }
    Work 3010 fn cuCtxSetLimit(limit: u32, value: usize) |d, _z| {
        match limit {
            STACK_SIZE => d.set_stack_limit(value as u64),
            _ => d.current().map(drop),
        }
    }
    Instant 3010 fn cuCtxGetLimit(value: Out<usize>, limit: u32) |d, _z| {
        let context = d.current()?.context;
        match limit {
            STACK_SIZE => value.set(d.contexts().stack_limit(context)? as usize),
            _ => value.set(1024),
        }
    }
    Sync 2000 fn cuCtxSynchronize() |d, _z| {
        d.streams.wait_idle(Some(d.current()?.context), None);
        d.streams.check()?;
        d.trim_pools()
    }
    Work 4000 fn cuCtxEnablePeerAccess(peer: Handle, flags: u32) |d, _z| {
        let from = d.current()?;
        let mut contexts = d.contexts();
        let to = contexts.find(peer)?;
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        if contexts.get(to)?.0 == from.device {
            return Err(INVALID_DEVICE);
        }
        contexts.enable_peer(from.context, to)
    }
    Work 4000 fn cuCtxDisablePeerAccess(peer: Handle) |d, _z| {
        let from = d.current()?.context;
        let mut contexts = d.contexts();
        let to = contexts.find(peer)?;
        contexts.disable_peer(from, to)
    }
}

fn create(driver: &Driver, context: Out<Handle>, flags: u32, device: CUdevice) -> Outcome {
    let id = driver.create_context(device, false, flags)?;
    push(id);
    context.set(context_handle(id))
}
