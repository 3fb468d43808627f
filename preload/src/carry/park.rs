//! Out and home, by the agent, with the gate closed and no work on the GPU.
//!
//! ```text
//! park:   room in the pool ──> copy all that it does not hold already, and is not zero ──> all copied?
//!                                │                                          └──> unmap, release
//!                                │ anything fails: nothing was unmapped              each
//! unpark: make, map, begin to copy each ──> all copied? ──> done
//!            │ no VRAM                         │ anything fails: all is unmapped and released;
//!            │                                 │ what cannot be unmapped is filled next time
//!            └─────────────────────────────────┴─> again; the content is in the pool
//! ```

use core::ffi::c_void;
use core::sync::atomic::Ordering;

use affinode_cuda_sys::result;
use affinode_proto::wire::Notes;

use super::backing::{back, unback};
use super::contexts::in_context;
use super::digest::{self, Digests};
use super::driver::call;
use super::order::Order;
use super::pool::{Pool, Stored, Tidied};
use super::table::{Id, Piece, Place};
use super::{
    CARRY, ahead, check, driver, handed, is_in_use, pools, shortage, tables, vault, with_pool,
    with_pool_if_free,
};
use crate::process;

/// Most contexts whose memory is copied. A process with more cannot be parked: the controller
/// has the driver take it.
const MOST_CONTEXTS: usize = 16;

/// What [`park`] returns when others took the host memory that it was about to fill. No code of the
/// driver's.
pub const NO_HOST_MEMORY: u32 = 0xffff_0001;

/// Whether content is in the pool.
pub fn is_parked() -> bool {
    is_in_use() && tables(|tables| tables.next(Id::FIRST, |p| p.place != Place::Device).is_some())
}

/// Moves everything that can be carried to host memory. `keep`: the copy is to be kept after the
/// return, and what the last one holds unchanged is not copied again. `handed`: a checkpoint
/// follows, of a process that has so many bytes on the device, beside which a vault may copy.
/// `check`: the return looks whether everything has come home.
///
/// # Errors
/// The driver's code, or [`NO_HOST_MEMORY`]. Everything is on the device as it was.
pub fn park(keep: bool, check: bool, handed: Option<u64>) -> Result<(), u32> {
    if !is_in_use() {
        return Ok(());
    }
    if is_parked() {
        // The pool has content: it comes home first.
        return Err(result::NOT_SUPPORTED);
    }
    relax_captures();
    pools::clear();
    check::set(check);
    with_pool(|pool| {
        ahead::stop(pool);
        let Some((bytes, context)) = assign() else {
            return Err(result::OUT_OF_MEMORY);
        };
        CARRY.unchanged_bytes.store(0, Ordering::Relaxed);
        CARRY.zero_bytes.store(0, Ordering::Relaxed);
        if bytes == 0 {
            return Ok(());
        }
        if !pool.begin(bytes, context) {
            return Err(result::OUT_OF_MEMORY);
        }
        pool.set_keeps(keep);
        let mut found = digest::of(bytes, Piece::leaves);
        let zero_bytes = found.as_mut().map_or(0, |found| pool.leave_out(found));
        let handed = handed.filter(|_| {
            let all_new = zero_bytes == 0 && is_new(pool, found.as_ref(), bytes as u64);
            all_new && ahead::is_ready(bytes as u64)
        });
        if let Some(vram_bytes) = handed
            && handed::hand_over(pool, vram_bytes)?
        {
            // Where the vault does not copy it, the pool is not used again.
            pool.learn(found.unwrap_or(Digests::none()));
            tell_kept(0);
            tell();
            return Ok(());
        }
        if pool.is_tainted() && !pool.begin(bytes, context) {
            return Err(result::OUT_OF_MEMORY);
        }
        let mut out = Out { pool, copies: Copies::new(), found, unchanged_bytes: 0 };
        let copied = as_result(each(Piece::leaves, |_, piece| out.copy(piece)));
        let Out { pool, copies, found, unchanged_bytes } = out;
        // In any case: nothing may still be copying when the pool or the memory goes.
        let finished = copies.finish();
        pool.end();
        if copied == Err(NO_HOST_MEMORY) {
            pool.give_back_unused();
        }
        copied.and(finished)?;
        // Without digests nothing is known any more, beyond what was copied either.
        pool.learn(found.unwrap_or(Digests::none()));
        CARRY.unchanged_bytes.store(unchanged_bytes, Ordering::Relaxed);
        CARRY.zero_bytes.store(zero_bytes, Ordering::Relaxed);
        // What is in use is not kept.
        tell_kept(0);
        give_back();
        Ok(())
    })
}

/// Whether most of it is not in the pool yet.
fn is_new(pool: &Pool, found: Option<&Digests>, bytes: u64) -> bool {
    found.is_none_or(|found| pool.unchanged(found) < bytes / 2)
}

/// The agent may do what would break another thread's capture of a stream.
fn relax_captures() {
    const RELAXED: u32 = 2;
    let mut mode = RELAXED;
    driver::exchange_capture_mode(&mut mode);
}

/// Gives each piece that leaves its place in the pool: bytes of all, and a context. `None`: there
/// is no memory to tell their order.
pub(super) fn assign() -> Option<(usize, usize)> {
    tables(|tables| {
        let mut from = Id::FIRST;
        while let Some((id, piece)) = tables.next(from, |_| true) {
            from = id.next();
            piece.has_left = piece.leaves();
        }
        let mut order = Order::within(tables, |piece| piece.has_left)?;
        let (mut place, mut end, mut context) = (0, 0, 0);
        while let Some(piece) = order.id(place).and_then(|id| tables.piece(id)) {
            piece.offset = end;
            end += piece.bytes;
            context = piece.context;
            place += 1;
        }
        Some((end as usize, context))
    })
}

/// Each piece that `which` picks. Looked up one by one, so that no lock is held during a
/// call into the driver.
pub(super) fn each(which: impl Fn(&Piece) -> bool, mut body: impl FnMut(Id, &Piece) -> u32) -> u32 {
    let mut from = Id::FIRST;
    let next = |from| tables(|tables| tables.next(from, &which).map(|(id, piece)| (id, *piece)));
    while let Some((id, piece)) = next(from) {
        match body(id, &piece) {
            result::SUCCESS => from = id.next(),
            code => return code,
        }
    }
    result::SUCCESS
}

pub(super) fn note(id: Id, handle: u64, place: Place) {
    tables(|tables| {
        if let Some(piece) = tables.piece(id) {
            (piece.handle, piece.place) = (handle, place);
        }
    });
}

/// Whether anything on the device is of a vault's making.
pub fn holds_imported() -> bool {
    let on_device = |piece: &Piece| matches!(piece.place, Place::Device | Place::Mapped);
    let is_imported = |piece: &Piece| piece.imported && on_device(piece);
    is_in_use()
        && (CARRY.strayed.load(Ordering::Acquire) == 1
            || tables(|tables| {
                tables.next(Id::FIRST, is_imported).is_some() || tables.cache.holds_imported()
            }))
}

/// Copies out in progress.
struct Out<'a> {
    pool: &'a mut Pool,
    copies: Copies,
    found: Option<Digests>,
    unchanged_bytes: u64,
}

impl Out<'_> {
    /// Begins to copy what the pool does not hold of a piece.
    fn copy(&mut self, piece: &Piece) -> u32 {
        let mut done = 0;
        while done < piece.bytes {
            let offset = (piece.offset + done) as usize;
            let left = (piece.bytes - done) as usize;
            let (stored, bytes) = self.pool.stored(offset, left, self.found.as_ref());
            match stored {
                Stored::Nowhere => {}
                Stored::Already => self.unchanged_bytes += bytes as u64,
                Stored::Anew => {
                    self.pool.forget(offset, bytes);
                    let device = piece.address + done;
                    let Some(host) = self.pool.ready(offset) else { return NO_HOST_MEMORY };
                    let code = self.copies.on_stream(piece.context, |stream| {
                        call!(copy_out(host, device, bytes, stream))
                    });
                    if code != result::SUCCESS {
                        return code;
                    }
                }
            }
            done += bytes as u64;
        }
        result::SUCCESS
    }
}

/// Begins to copy a piece that is mapped in.
pub(super) fn copy_in(pool: &mut Pool, copies: &mut Copies, piece: &Piece) -> u32 {
    let mut done = 0;
    while done < piece.bytes {
        let offset = (piece.offset + done) as usize;
        let left = (piece.bytes - done) as usize;
        // A copy that crosses into another registration is refused: not beyond the chunk.
        let (is_zero, bytes) = pool.left_out(offset, left);
        let device = piece.address + done;
        let code = copies.on_stream(piece.context, |stream| match is_zero {
            true => call!(clear(device, 0, bytes, stream)),
            false => call!(copy_in(device, pool.held(offset).cast_const(), bytes, stream)),
        });
        if code != result::SUCCESS {
            return code;
        }
        done += bytes as u64;
    }
    result::SUCCESS
}

pub(super) fn as_result(code: u32) -> Result<(), u32> {
    if code == result::SUCCESS { Ok(()) } else { Err(code) }
}

/// All is copied: gives the physical memory back. What cannot be unmapped stays.
fn give_back() {
    each(Piece::leaves, |id, piece| {
        if unback(piece) {
            note(id, 0, Place::Pool);
        }
        result::SUCCESS
    });
    tell();
}

/// Writes to the page what is parked, and whether a vault has made any of the rest.
pub(super) fn tell() {
    let in_pool = |piece: &Piece| matches!(piece.place, Place::Pool | Place::Mapped);
    let bytes = tables(|tables| tables.bytes(in_pool));
    let imported = holds_imported();
    if let Some(page) = process::page() {
        page.parked_bytes.store(bytes, Ordering::Relaxed);
        page.note(Notes::IMPORTED, imported);
        page.note(Notes::HANDED, handed::bytes() > 0);
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
    handed::bring_back()?;
    let returned = if vault::take() {
        tell();
        Ok(())
    } else {
        copy_home()
    };
    tell_kept(with_pool(|pool| pool.kept_bytes()));
    returned?;
    check::look();
    Ok(())
}

fn copy_home() -> Result<(), u32> {
    with_pool(|pool| {
        let mut copies = Copies::new();
        let is_away = |piece: &Piece| piece.place != Place::Device;
        let begun = as_result(each(is_away, |id, piece| fill(pool, &mut copies, id, piece)));
        // In any case: nothing may still be copied when the memory goes again.
        let finished = copies.finish();
        let copied = begun.and(finished);
        each(
            |piece| piece.place == Place::Mapped,
            |id, piece| {
                if copied.is_ok() {
                    note(id, piece.handle, Place::Device);
                } else if unback(piece) {
                    note(id, 0, Place::Pool);
                }
                result::SUCCESS
            },
        );
        tell();
        copied
    })
}

/// Whether the driver answers every call in the context of what is parked with this code. Nothing
/// runs on the GPU, so it answers at once.
pub fn is_broken(code: u32) -> bool {
    if !is_parked() {
        return false;
    }
    let context = tables(|tables| {
        tables.next(Id::FIRST, |piece| piece.place != Place::Device).map(|(_, piece)| piece.context)
    });
    context.is_some_and(|context| in_context(context, || call!(ctx_synchronize())) == code)
}

/// Before a checkpoint, which would take the longer for every byte of host memory that the
/// driver has hold of, as would the restore. The return takes hold of it beside its copies, or
/// a vault does before.
pub fn let_go_of_parked(vram_bytes: u64) {
    if is_parked() {
        with_pool(|pool| {
            pool.unregister_all();
            if handed::bytes() == 0 {
                vault::offer(pool, vram_bytes);
            }
        });
    }
}

/// Puts new memory behind a piece's addresses, and begins to fill it: the copies of one run
/// while the next is mapped.
fn fill(pool: &mut Pool, copies: &mut Copies, id: Id, piece: &Piece) -> u32 {
    if piece.place == Place::Mapped {
        return copy_in(pool, copies, piece);
    }
    match back(piece) {
        Ok(handle) => {
            note(id, handle, Place::Mapped);
            tables(|tables| tables.piece(id).map(|piece| piece.imported = false));
            copy_in(pool, copies, piece)
        }
        Err(code) => code,
    }
}

/// Gives a part of the unused pool back to the system, beside the running application, unless it
/// is kept and there is host memory enough.
pub fn tidy() -> Tidied {
    if !is_in_use() || is_parked() {
        return Tidied::All;
    }
    let tidy = |pool: &mut Pool| (pool.tidy(ahead::is_on(), shortage::is_near), pool.kept_bytes());
    let Some((tidied, kept_bytes)) = with_pool_if_free(tidy) else {
        // Looked at again, as what is kept is.
        return Tidied::Kept;
    };
    tell_kept(kept_bytes);
    tidied
}

pub(super) fn tell_kept(bytes: u64) {
    if let Some(page) = process::page() {
        page.kept_bytes.store(bytes, Ordering::Relaxed);
    }
}

/// Copies in progress: a stream per context, made for this.
pub(super) struct Copies {
    streams: [(usize, *mut c_void); MOST_CONTEXTS],
    many: usize,
}

impl Copies {
    pub(super) fn new() -> Copies {
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
    pub(super) fn finish(self) -> Result<(), u32> {
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

#[cfg(test)]
#[path = "park_tests.rs"]
mod tests;
