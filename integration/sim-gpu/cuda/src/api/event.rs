//! Driver functions for events.

use crate::abi::{Handle, INVALID_HANDLE, Kind, NOT_READY, Out, Outcome, handle, number};
use crate::api::cuda_api;
use crate::api::stream::is_relaxed;
use crate::driver::Driver;

cuda_api! {
    Work 2000 fn cuEventCreate(event: Out<Handle>, _flags: u32) |d, _z| {
        d.current()?;
        event.set(handle(Kind::Event, d.streams.create_event()))
    }
    Work 4000 fn cuEventDestroy_v2(event: Handle) |d, _z| { d.streams.destroy_event(number(Kind::Event, event)?) }
    Work 2000 fn [cuEventRecord cuEventRecord_ptsz] (event: Handle, stream: Handle) |d, zero| {
        let stream = d.stream(stream, zero)?;
        d.streams.spoils_own(stream)?;
        d.streams.record(number(Kind::Event, event)?, stream)
    }
    Work 11010 fn [cuEventRecordWithFlags cuEventRecordWithFlags_ptsz] (event: Handle, stream: Handle, _flags: u32) |d, zero| {
        d.streams.record(number(Kind::Event, event)?, d.stream(stream, zero)?)
    }
    Work 12050 fn cuCtxRecordEvent(context: Handle, event: Handle) |d, _z| {
        let (context, legacy) = {
            let contexts = d.contexts();
            let context = contexts.find(context)?;
            (context, contexts.legacy_of(context)?)
        };
        d.streams.record_context(number(Kind::Event, event)?, context, legacy)
    }
    Sync 2000 fn cuEventQuery(event: Handle) |d, _z| {
        d.streams.spoils_global(is_relaxed())?;
        let (mark, _) = d.streams.event(number(Kind::Event, event)?)?;
        if mark.is_none_or(|mark| d.streams.is_done(mark)) { d.streams.check() } else { Err(NOT_READY) }
    }
    Sync 2000 fn cuEventSynchronize(event: Handle) |d, _z| {
        let (mark, _) = d.streams.event(number(Kind::Event, event)?)?;
        mark.map_or(Ok(()), |mark| d.streams.wait(mark))?;
        d.trim_pools()
    }
    Work 2000 fn cuEventElapsedTime(ms: Out<f32>, start: Handle, end: Handle) |d, _z| { elapsed(d, ms, start, end) }
    Work 12080 fn cuEventElapsedTime_v2(ms: Out<f32>, start: Handle, end: Handle) |d, _z| { elapsed(d, ms, start, end) }
}

fn elapsed(driver: &Driver, ms: Out<f32>, start: Handle, end: Handle) -> Outcome {
    let (from, from_ns) = driver.streams.event(number(Kind::Event, start)?)?;
    let (to, to_ns) = driver.streams.event(number(Kind::Event, end)?)?;
    if from.is_none() || to.is_none() {
        return Err(INVALID_HANDLE);
    }
    if from_ns == 0 || to_ns == 0 {
        return Err(NOT_READY);
    }
    ms.set((to_ns as f64 - from_ns as f64) as f32 / 1e6)
}
