//! Driver functions for streams.

use std::cell::Cell;
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
const GLOBAL: u32 = 0;
const RELAXED: u32 = 2;

thread_local! {
    static MODE: Cell<u32> = const { Cell::new(GLOBAL) };
}

/// Whether this thread has the capture mode `relaxed`. In this mode, the thread may make calls that
/// can block, even while a stream is captured.
pub fn is_relaxed() -> bool {
    MODE.get() == RELAXED
}

cuda_api! {
    Work 2000 fn cuStreamCreate(stream: Out<Handle>, flags: u32) |d, _z| { create(d, stream, flags) }
    Work 5050 fn cuStreamCreateWithPriority(stream: Out<Handle>, flags: u32, _priority: i32) |d, _z| { create(d, stream, flags) }
    Work 4000 fn cuStreamDestroy_v2(stream: Handle) |d, _z| { d.streams.destroy(number(Kind::Stream, stream)?) }
    Sync 2000 fn [cuStreamSynchronize cuStreamSynchronize_ptsz] (stream: Handle) |d, zero| {
        let stream = d.stream(stream, zero)?;
        d.streams.spoils_own(stream)?;
        d.streams.wait(d.streams.last(stream)?)?;
        d.trim_pools()
    }
    Sync 2000 fn [cuStreamQuery cuStreamQuery_ptsz] (stream: Handle) |d, zero| {
        let stream = d.stream(stream, zero)?;
        d.streams.spoils_own(stream)?;
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
        let stream = d.stream(stream, zero)?;
        capturing.set(i32::from(d.streams.is_capturing(stream)))
    }
    Work 10010 fn [cuStreamBeginCapture_v2 cuStreamBeginCapture_v2_ptsz] (stream: Handle, mode: u32) |d, zero| {
        d.streams.begin_capture(d.stream(stream, zero)?, mode == GLOBAL)
    }
    Work 10000 fn [cuStreamEndCapture cuStreamEndCapture_ptsz] (stream: Handle, graph: Out<Handle>) |d, zero| {
        let stream = d.stream(stream, zero)?;
        d.streams.end_capture(stream)?;
        graph.set(handle(Kind::Graph, stream))
    }
    Work 10010 fn cuThreadExchangeStreamCaptureMode(mode: Out<u32>) |_d, _z| {
        let given = mode.get().ok_or(INVALID_VALUE)?;
        mode.set(MODE.replace(given))
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
