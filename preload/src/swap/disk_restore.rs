//! Copies content from the disk file to device memory. Content does not return to the staging pool
//! first, so the restore needs no host memory but its buffers, which `disk` has allocated.
//!
//! ```text
//! slot:  empty ──agent: next piece──> wanted ──reader: read, decrypt──> ready ──agent: copied──> empty
//!                                                └── unreadable, damaged
//! ```
//!
//! Each slot has a buffer for one piece and a thread that reads. The agent copies the pieces in
//! order.

use core::ffi::c_void;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use affinode_cuda_sys::result;

use super::SWAP;
use super::allocations::MemoryPlace;
use super::copy::{CopyStreams, DISK_UNREADABLE};
use super::disk::{self, PIECE_BYTES};
use super::driver::call;
use super::layout::AllocationLayout;
use super::prefault::CHUNK_BYTES;
use super::staging::StagingPool;
use crate::libc::{self, StackSize};
use crate::{fds, sys};

/// Number of pieces that are read from the disk at the same time.
pub const SLOTS: usize = 8;

/// Values of [`DiskSlot::state`].
const EMPTY: u32 = 0;
const WANTED: u32 = 1;
const READY: u32 = 2;
/// The disk has returned an error.
const UNREADABLE: u32 = 3;
/// The disk has returned something other than what was stored.
const DAMAGED: u32 = 4;
/// The reader must end.
const OVER: u32 = 5;

/// One buffer and the piece that is read to it. An all-zero value is an empty slot without a reader.
#[repr(C)]
pub struct DiskSlot {
    /// Futex with the state.
    state: AtomicU32,
    /// 1 while the slot's reader runs.
    reader: AtomicU32,
    offset: AtomicUsize,
    bytes: AtomicUsize,
}

impl DiskSlot {
    pub const fn none() -> DiskSlot {
        DiskSlot {
            state: AtomicU32::new(EMPTY),
            reader: AtomicU32::new(0),
            offset: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
        }
    }

    fn set(&self, state: u32) {
        self.state.store(state, Ordering::Release);
        sys::futex_wake_all(&self.state);
    }

    /// Waits while the slot has this state, and returns the next one.
    fn wait(&self, while_state: u32) -> u32 {
        const LOOK_MS: u64 = 100;
        loop {
            match self.state.load(Ordering::Acquire) {
                state if state != while_state => return state,
                state => sys::futex_wait(&self.state, state, LOOK_MS),
            }
        }
    }

    /// Starts to read a piece. Reads it at once if the slot has no reader.
    fn want(&self, number: usize, (offset, bytes): (usize, usize)) {
        self.offset.store(offset, Ordering::Relaxed);
        self.bytes.store(bytes, Ordering::Relaxed);
        self.set(WANTED);
        if self.reader.load(Ordering::Acquire) == 0 {
            self.read(number);
        }
    }

    fn read(&self, number: usize) {
        let (offset, bytes) =
            (self.offset.load(Ordering::Relaxed), self.bytes.load(Ordering::Relaxed));
        let buffer = SWAP.disk.buffer(number);
        self.set(match read(buffer, bytes, offset) {
            false => UNREADABLE,
            true if SWAP.disk.decrypt_stored(offset, bytes, buffer) => READY,
            true => DAMAGED,
        });
    }
}

/// Copies all content that is in the disk file to device memory that is mapped for it.
///
/// # Errors
/// Returns the driver's code, [`DISK_UNREADABLE`] if the disk returns an error, or
/// [`result::ECC_UNCORRECTABLE`] if it returns something other than what was stored. The content stays
/// on the disk, and the call can be repeated.
pub fn fill(pool: &StagingPool, copies: &mut CopyStreams) -> Result<(), u32> {
    let chunks = pool.bytes().div_ceil(CHUNK_BYTES);
    let mut pieces = (0..chunks)
        .filter(|chunk| disk::has(*chunk))
        .flat_map(|chunk| disk::pieces(pool.bytes(), chunk));
    let Some(mut layout) = AllocationLayout::by_offset(|piece| piece.place == MemoryPlace::Mapped)
    else {
        return Err(result::OUT_OF_MEMORY);
    };
    let slots = &SWAP.disk.slots;
    slots.iter().enumerate().for_each(|(number, slot)| start_reader(number, slot));
    let buffers = SWAP.disk.buffer(0) as *mut c_void;
    let registered = pool.register_buffers(buffers, SLOTS * PIECE_BYTES);
    let mut wanted = 0;
    for (number, slot) in slots.iter().enumerate() {
        let Some(piece) = pieces.next() else { break };
        slot.want(number, piece);
        wanted += 1;
    }
    let (mut copied, mut number, mut place) = (Ok(()), 0, 0);
    while wanted > 0 {
        let Some(slot) = slots.get(number) else { break };
        let state = slot.wait(WANTED);
        wanted -= 1;
        copied = copied.and_then(|()| match state {
            UNREADABLE => Err(DISK_UNREADABLE),
            DAMAGED => Err(result::ECC_UNCORRECTABLE),
            _ => copy_piece(pool, copies, &mut layout, &mut place, (slot, number)),
        });
        slot.set(EMPTY);
        if copied.is_ok()
            && let Some(piece) = pieces.next()
        {
            slot.want(number, piece);
            wanted += 1;
        }
        number = (number + 1) % SLOTS;
    }
    // After an error, copies from the buffers may still run.
    let copied = copied.and(copies.synchronize());
    if registered {
        pool.unregister_buffers(buffers);
    }
    slots.iter().for_each(end_reader);
    copied
}

/// Copies a piece that is in a buffer to the device memory of all allocations that it belongs to.
/// `place` is the position of the first of them in the layout, and is moved to that of the next
/// piece. Waits until the copies have ended.
fn copy_piece(
    pool: &StagingPool,
    copies: &mut CopyStreams,
    layout: &mut AllocationLayout,
    place: &mut usize,
    (slot, number): (&DiskSlot, usize),
) -> Result<(), u32> {
    let first = slot.offset.load(Ordering::Relaxed);
    let end = first + slot.bytes.load(Ordering::Relaxed);
    let buffer = SWAP.disk.buffer(number);
    while let Some((_, piece)) = layout.piece(*place) {
        let (start, stop) = (piece.offset as usize, (piece.offset + piece.bytes) as usize);
        let (mut from, to) = (start.max(first), stop.min(end));
        while from < to {
            let (is_zero, bytes) = pool.left_out(from, to - from);
            // Zero content is cleared on the device, and is not in the file.
            if !is_zero {
                let device = piece.address + (from - start) as u64;
                let host = (buffer + (from - first)) as *const c_void;
                let code = copies
                    .on_stream(piece.context, |stream| call!(copy_in(device, host, bytes, stream)));
                if code != result::SUCCESS {
                    return Err(code);
                }
            }
            from += bytes;
        }
        if stop > end {
            break;
        }
        *place += 1;
    }
    copies.synchronize()
}

fn start_reader(number: usize, slot: &DiskSlot) {
    // A reader of an earlier, failed restore may still wait for the disk.
    slot.wait_for_reader();
    slot.set(EMPTY);
    slot.reader.store(1, Ordering::Release);
    if !libc::start_thread(serve, number as *mut c_void, StackSize::Default) {
        slot.reader.store(0, Ordering::Release);
    }
}

impl DiskSlot {
    fn wait_for_reader(&self) {
        const LOOK_MS: u64 = 10;
        while self.reader.load(Ordering::Acquire) == 1 {
            sys::futex_wait(&self.reader, 1, LOOK_MS);
        }
    }
}

fn end_reader(slot: &DiskSlot) {
    slot.set(OVER);
    slot.wait_for_reader();
    slot.set(EMPTY);
}

/// Body of a reader.
unsafe extern "C" fn serve(number: *mut c_void) -> *mut c_void {
    sys::set_thread_name(c"affinode-disk");
    let number = number as usize;
    let Some(slot) = SWAP.disk.slots.get(number) else { return core::ptr::null_mut() };
    loop {
        match slot.state.load(Ordering::Acquire) {
            WANTED => slot.read(number),
            OVER => break,
            state => {
                slot.wait(state);
            }
        }
    }
    slot.reader.store(0, Ordering::Release);
    sys::futex_wake_all(&slot.reader);
    core::ptr::null_mut()
}

/// Reads a piece from the disk. If the application has closed the descriptor, reads it from the
/// mapping of the file.
fn read(buffer: usize, bytes: usize, offset: usize) -> bool {
    match fds::DISK.get() {
        Some(file) if read_file(file, buffer, bytes, offset) => true,
        _ => {
            let mapped = SWAP.disk.mapped();
            // SAFETY: the buffer has the size of a piece, and only this thread uses it now.
            mapped != 0
                && unsafe { sys::copy_own_memory(buffer as *mut u8, mapped + offset, bytes) }
        }
    }
}

/// Reads a piece from a file. False: the disk has returned an error.
pub fn read_file(file: i32, buffer: usize, bytes: usize, offset: usize) -> bool {
    let mut done = 0;
    while done < bytes {
        let (to, left) = ((buffer + done) as *mut u8, bytes - done);
        // SAFETY: the buffer has the size of a piece, and only this thread uses it now.
        match unsafe { sys::read_at(file, to, left, (offset + done) as u64) } {
            Ok(0) => return false,
            Ok(more) => done += more,
            Err(sys::EINTR) => {}
            Err(_) => return false,
        }
    }
    true
}
