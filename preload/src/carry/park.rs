//! Out and home, by the agent, with the gate closed and no work on the GPU.
//!
//! ```text
//! park:   room in the pool ──> copy all ──> all copied? ──> unmap, release each
//!                                │ anything fails: nothing was unmapped
//! unpark: make, map, begin to copy each ──> all copied? ──> done
//!            │ no VRAM                         │ anything fails: all is unmapped and released
//!            └─────────────────────────────────┴─> again; the content is in the pool
//! ```

use core::ffi::c_void;
use core::sync::atomic::Ordering;

use affinode_cuda_sys::result;

use super::backing::{back, unback};
use super::contexts::in_context;
use super::driver::call;
use super::pool::{CHUNK_BYTES, Pool};
use super::table::{Allocation, Place};
use super::{driver, is_in_use, locked, with_pool};
use crate::process;

/// Most contexts whose memory is copied. A process with more cannot be parked: the controller
/// has the driver take it.
const MOST_CONTEXTS: usize = 16;

/// Whether content is in the pool.
pub fn is_parked() -> bool {
    is_in_use() && locked(|table| table.all().iter().any(|a| a.place != Place::Device))
}

/// Moves everything that can be carried to host memory.
///
/// # Errors
/// The driver's code. Everything is on the device as it was.
pub fn park() -> Result<(), u32> {
    if !is_in_use() {
        return Ok(());
    }
    relax_captures();
    with_pool(|pool| {
        let (bytes, context) = assign();
        if bytes == 0 {
            return Ok(());
        }
        if !pool.begin(bytes, context) {
            return Err(result::OUT_OF_MEMORY);
        }
        let mut copies = Copies::new();
        let copied = as_result(each(Allocation::leaves, |a| copy(pool, &mut copies, a, true)));
        // In any case: nothing may still be copying when the pool or the memory goes.
        let finished = copies.finish();
        pool.end();
        copied.and(finished)?;
        give_back();
        Ok(())
    })
}

/// The agent may do what would break another thread's capture of a stream.
fn relax_captures() {
    const RELAXED: u32 = 2;
    let mut mode = RELAXED;
    driver::exchange_capture_mode(&mut mode);
}

/// Gives each allocation that leaves its place in the pool: bytes of all, and a context.
fn assign() -> (usize, usize) {
    locked(|table| {
        let (mut end, mut context) = (0, 0);
        for allocation in table.all().iter_mut().filter(|a| a.leaves()) {
            allocation.offset = end;
            end += allocation.bytes;
            context = allocation.context;
        }
        (end as usize, context)
    })
}

/// The first allocation from an address on that `which` picks. Looked up one by one, so that
/// no lock is held during a call into the driver.
fn next(from: u64, which: impl Fn(&Allocation) -> bool) -> Option<Allocation> {
    locked(|table| table.all().iter().find(|a| a.address >= from && which(a)).copied())
}

fn each(which: impl Fn(&Allocation) -> bool, mut body: impl FnMut(&Allocation) -> u32) -> u32 {
    let mut from = 0;
    while let Some(allocation) = next(from, &which) {
        match body(&allocation) {
            result::SUCCESS => from = allocation.address + 1,
            code => return code,
        }
    }
    result::SUCCESS
}

fn note(address: u64, handle: u64, place: Place) {
    locked(|table| {
        if let Some(allocation) = table.at(address) {
            (allocation.handle, allocation.place) = (handle, place);
        }
    });
}

/// Begins to copy an allocation that is on the device out, or one that is mapped in.
fn copy(pool: &mut Pool, copies: &mut Copies, allocation: &Allocation, out: bool) -> u32 {
    let mut done = 0;
    while done < allocation.bytes {
        let offset = (allocation.offset + done) as usize;
        let left = (allocation.bytes - done) as usize;
        // A copy that crosses into another registration is refused.
        let bytes = left.min(CHUNK_BYTES - offset % CHUNK_BYTES);
        let device = allocation.address + done;
        let code = copies.on_stream(allocation.context, |stream| {
            if out {
                call!(copy_out(pool.ready(offset), device, bytes, stream))
            } else {
                call!(copy_in(device, pool.held(offset).cast_const(), bytes, stream))
            }
        });
        if code != result::SUCCESS {
            return code;
        }
        done += bytes as u64;
    }
    result::SUCCESS
}

fn as_result(code: u32) -> Result<(), u32> {
    if code == result::SUCCESS { Ok(()) } else { Err(code) }
}

/// All is copied: gives the physical memory back. What cannot be unmapped stays.
fn give_back() {
    each(Allocation::leaves, |allocation| {
        let bytes = allocation.bytes as usize;
        if call!(mem_unmap(allocation.address, bytes)) == result::SUCCESS {
            call!(mem_release(allocation.handle));
            note(allocation.address, 0, Place::Pool);
        }
        result::SUCCESS
    });
    tell();
}

/// Writes to the page what is parked.
fn tell() {
    let bytes = locked(|table| {
        table.all().iter().filter(|a| a.place != Place::Device).map(|a| a.bytes).sum()
    });
    if let Some(page) = process::page() {
        page.parked_bytes.store(bytes, Ordering::Relaxed);
    }
}

/// Brings everything back to the same addresses.
///
/// # Errors
/// The driver's code, most often for lack of VRAM. Nothing is lost: it can be tried again.
pub fn unpark() -> Result<(), u32> {
    if !is_parked() {
        return Ok(());
    }
    relax_captures();
    with_pool(|pool| {
        let mut copies = Copies::new();
        let begun = as_result(each(|a| a.place == Place::Pool, |a| fill(pool, &mut copies, a)));
        // In any case: nothing may still be copied when the memory goes again.
        let finished = copies.finish();
        let copied = begun.and(finished);
        each(
            |a| a.place == Place::Mapped,
            |a| {
                if copied.is_ok() {
                    note(a.address, a.handle, Place::Device);
                } else {
                    unback(a.address, a.bytes as usize, a.handle);
                    note(a.address, 0, Place::Pool);
                }
                result::SUCCESS
            },
        );
        tell();
        copied
    })
}

/// Before a checkpoint, which would take the longer for every byte of host memory that the
/// driver has hold of, as would the restore. The return takes hold of it beside its copies.
pub fn let_go_of_parked() {
    if is_parked() {
        with_pool(Pool::unregister_all);
    }
}

/// Puts new memory behind an allocation's addresses, and begins to fill it: the copies of
/// one run while the next is mapped.
fn fill(pool: &mut Pool, copies: &mut Copies, a: &Allocation) -> u32 {
    match back(a.address, a.bytes as usize, a.device) {
        Ok(handle) => {
            note(a.address, handle, Place::Mapped);
            copy(pool, copies, a, false)
        }
        Err(code) => code,
    }
}

/// Gives a part of the unused pool back to the system, beside the running application.
/// False: there is no more to give.
pub fn tidy() -> bool {
    is_in_use() && !is_parked() && with_pool(Pool::shrink)
}

/// Copies in progress: a stream per context, made for this.
struct Copies {
    streams: [(usize, *mut c_void); MOST_CONTEXTS],
    many: usize,
}

impl Copies {
    fn new() -> Copies {
        Copies { streams: [(0, core::ptr::null_mut()); MOST_CONTEXTS], many: 0 }
    }

    fn on_stream(&mut self, context: usize, body: impl FnOnce(*mut c_void) -> u32) -> u32 {
        in_context(context, || {
            const NON_BLOCKING: u32 = 1;
            let known = self.streams.iter().take(self.many).find(|known| known.0 == context);
            if let Some((_, stream)) = known {
                return body(*stream);
            }
            let mut stream = core::ptr::null_mut();
            let Some(free) = self.streams.get_mut(self.many) else {
                return result::NOT_SUPPORTED;
            };
            match call!(stream_create(&raw mut stream, NON_BLOCKING)) {
                result::SUCCESS => {}
                code => return code,
            }
            *free = (context, stream);
            self.many += 1;
            body(stream)
        })
    }

    /// Waits for all of them.
    fn finish(self) -> Result<(), u32> {
        let mut ended = Ok(());
        for (context, stream) in self.streams.into_iter().take(self.many) {
            let code = in_context(context, || {
                let code = call!(stream_synchronize(stream));
                call!(stream_destroy(stream));
                code
            });
            ended = ended.and(as_result(code));
        }
        ended
    }
}
