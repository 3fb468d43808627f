//! Streams.

use std::ffi::c_void;

use crate::abi::{
    Handle, HostAddress, HostFunction, INVALID_VALUE, Kind, NOT_READY, Out, Outcome,
    StreamCallback, handle, number,
};
use crate::api::cuda_api;
use crate::contexts::context_handle;
use crate::driver::Driver;
use crate::streams::StreamKind;

const NON_BLOCKING: u32 = 1;

cuda_api! {
    Work 2000 fn cuStreamCreate(stream: Out<Handle>, flags: u32) |d, _z| { create(d, stream, flags) }
    Work 5050 fn cuStreamCreateWithPriority(stream: Out<Handle>, flags: u32, _priority: i32) |d, _z| { create(d, stream, flags) }
    Work 4000 fn cuStreamDestroy_v2(stream: Handle) |d, _z| { d.streams.destroy(number(Kind::Stream, stream)?) }
    Sync 2000 fn [cuStreamSynchronize cuStreamSynchronize_ptsz] (stream: Handle) |d, zero| {
        let stream = d.stream(stream, zero)?;
        d.streams.wait(d.streams.last(stream)?)
    }
    Sync 2000 fn [cuStreamQuery cuStreamQuery_ptsz] (stream: Handle) |d, zero| {
        let stream = d.stream(stream, zero)?;
        if d.streams.is_done(d.streams.last(stream)?) { d.streams.check() } else { Err(NOT_READY) }
    }
    Work 3020 fn [cuStreamWaitEvent cuStreamWaitEvent_ptsz] (stream: Handle, event: Handle, _flags: u32) |d, zero| {
        d.streams.wait_event(d.stream(stream, zero)?, number(Kind::Event, event)?)
    }
    Instant 5050 fn [cuStreamGetFlags cuStreamGetFlags_ptsz] (stream: Handle, flags: Out<u32>) |d, zero| {
        let (_, kind) = d.streams.get(d.stream(stream, zero)?)?;
        flags.set(if kind == StreamKind::NonBlocking { NON_BLOCKING } else { 0 })
    }
    Instant 5050 fn [cuStreamGetPriority cuStreamGetPriority_ptsz] (stream: Handle, priority: Out<i32>) |d, zero| {
        d.stream(stream, zero)?;
        priority.set(0)
    }
    Instant 9020 fn [cuStreamGetCtx cuStreamGetCtx_ptsz] (stream: Handle, context: Out<Handle>) |d, zero| {
        let (id, _) = d.streams.get(d.stream(stream, zero)?)?;
        context.set(context_handle(id))
    }
    Instant 12000 fn [cuStreamGetId cuStreamGetId_ptsz] (stream: Handle, id: Out<u64>) |d, zero| {
        id.set(d.stream(stream, zero)?)
    }
    Instant 10000 fn [cuStreamIsCapturing cuStreamIsCapturing_ptsz] (stream: Handle, capturing: Out<i32>) |d, zero| {
        d.stream(stream, zero)?;
        capturing.set(0)
    }
    Work 10000 fn [cuLaunchHostFunc cuLaunchHostFunc_ptsz] (stream: Handle, function: HostFunction, data: HostAddress) |d, zero| {
        let function = function.ok_or(INVALID_VALUE)?;
        let work = move || {
            // SAFETY: the application promises that the function may be called once with this argument.
            unsafe { function(data as *mut c_void) };
            Ok(())
        };
        d.streams.submit(d.stream(stream, zero)?, Box::new(work)).map(drop)
    }
    Work 5000 fn [cuStreamAddCallback cuStreamAddCallback_ptsz] (stream: Handle, callback: StreamCallback, data: HostAddress, _flags: u32) |d, zero| {
        let callback = callback.ok_or(INVALID_VALUE)?;
        let work = move || {
            // SAFETY: the application promises that the callback may be called once with this argument.
            unsafe { callback(stream, 0, data as *mut c_void) };
            Ok(())
        };
        d.streams.submit(d.stream(stream, zero)?, Box::new(work)).map(drop)
    }
}

fn create(driver: &Driver, stream: Out<Handle>, flags: u32) -> Outcome {
    let kind = match flags {
        0 => StreamKind::Blocking,
        NON_BLOCKING => StreamKind::NonBlocking,
        _ => return Err(INVALID_VALUE),
    };
    let id = driver.streams.create(driver.current()?.context, kind);
    stream.set(handle(Kind::Stream, id))
}
