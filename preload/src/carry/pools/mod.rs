//! Memory that is freed in the order of a stream (`cuMemFreeAsync`).
//!
//! ```text
//! allocated ── cuMemFreeAsync: an event in that stream ──> waits ──> ended ──> given back
//!    in the table of allocations                             in the cache
//! ```
//!
//! It is nobody's from the call on, and its physical memory goes once the event has happened: looked at
//! by the next call that allocates, frees or waits, when memory is short, and before it would be
//! moved. While a stream is being captured its calls are the driver's.

mod cache;
mod ends;
mod stream;

use core::ffi::c_void;

use affinode_cuda_sys::result;

use self::cache::Unused;
pub use self::cache::{Cache, Mark};
pub use self::ends::{clear, context_ends, make_room, settle};
use self::ends::{give_back_after, mark, unsettle};
use self::stream::Stream;
use super::driver::call;
use super::{count, locked, tables};
use crate::table;

pub unsafe extern "C" fn mem_free_async(address: u64, stream: *mut c_void) -> u32 {
    free(address, Stream(stream)).unwrap_or_else(|| call!(mem_free_async(address, stream)))
}

pub unsafe extern "C" fn mem_free_async_ptsz(address: u64, stream: *mut c_void) -> u32 {
    let freed = free(address, Stream::per_thread(stream));
    freed.unwrap_or_else(|| call!(mem_free_async_ptsz(address, stream)))
}

/// Frees what is carried once the work before in a stream has ended. `None`: it is the driver's.
fn free(address: u64, stream: Stream) -> Option<u32> {
    if stream.is_capturing() {
        return None;
    }
    // Nobody else frees it from here on.
    let mut allocation = locked(|table| table.remove_at(address))?;
    let marked = mark(stream, allocation.mark);
    let mark = marked.unwrap_or_default();
    if marked.is_none() {
        match call!(stream_synchronize(stream.0)) {
            result::SUCCESS => {}
            code => {
                allocation.mark = mark;
                tables(|tables| tables.insert(allocation));
                return Some(code);
            }
        }
    }
    let piece = allocation.piece;
    if !piece.stays {
        count(-(piece.bytes as i64));
    }
    table::see_waits();
    let stream = stream.id().unwrap_or(u64::MAX);
    let noted = tables(|tables| {
        let since = tables.now();
        let ended = marked.is_none();
        let unused = Unused { since, piece, stream, mark, ended };
        (!tables.cache.put(unused)).then_some(unused)
    });
    match noted {
        Some(unused) => give_back_after(&unused),
        None => unsettle(),
    }
    settle();
    Some(result::SUCCESS)
}

pub unsafe extern "C" fn stream_synchronize(stream: *mut c_void) -> u32 {
    waited(call!(stream_synchronize(stream)))
}

pub unsafe extern "C" fn stream_synchronize_ptsz(stream: *mut c_void) -> u32 {
    waited(call!(stream_synchronize(Stream::per_thread(stream).0)))
}

pub unsafe extern "C" fn event_synchronize(event: usize) -> u32 {
    waited(call!(event_synchronize(event)))
}

pub unsafe extern "C" fn ctx_synchronize() -> u32 {
    waited(call!(ctx_synchronize()))
}

pub unsafe extern "C" fn ctx_synchronize_v2(context: usize) -> u32 {
    waited(call!(ctx_synchronize_v2(context)))
}

fn waited(code: u32) -> u32 {
    if code == result::SUCCESS {
        settle();
    }
    code
}
