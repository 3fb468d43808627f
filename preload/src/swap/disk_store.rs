//! The thread that moves content of an offloaded process to a disk file, see `disk`.

use core::ffi::c_void;

use affinode_proto::wire::host_pool::{DiskTag, FromHostPool, ToHostPool};

use super::disk::{self, DiskJob, DiskTables, HandedChunk, PIECE_BYTES, STORING_BUFFER};
use super::disk_restore::read_file;
use super::prefault::{CHUNK_BYTES, PREFAULT, StagingPlace, chunk_bytes};
use super::{SWAP, host_pool, host_pressure};
use crate::fds::{self, TrackedFd};
use crate::sys::{self, Descriptor, datagram};

const PIECES_PER_CHUNK: usize = CHUNK_BYTES / PIECE_BYTES;
/// Time limit for each reply of the host pool, in milliseconds. A disk that is slower is not used.
const REPLY_WITHIN_MS: u64 = 20_000;
/// Interval, in milliseconds, at which the thread checks whether the job was cancelled.
const LOOK_MS: u64 = 20;
/// Number of pieces that the host pool may write at the same time for this process.
const AT_ONCE: usize = 4;

/// Body of the thread.
pub unsafe extern "C" fn main(_: *mut c_void) -> *mut c_void {
    sys::set_thread_name(c"affinode-disk");
    let job = &SWAP.disk;
    let is_done = open(job).is_some_and(|file| {
        loop {
            match job.next_chunk() {
                Some(HandedChunk::All) => break true,
                Some(HandedChunk::Chunk(chunk)) if is_stored(job, file.number(), chunk) => {}
                _ => break false,
            }
        }
    });
    job.end(!is_done);
    core::ptr::null_mut()
}

/// Prepares all that a restore from the disk needs, so that it cannot fail for lack of memory.
/// Returns a descriptor of the disk file for this thread: a thread that was cancelled may wait for
/// the disk while the agent closes its own. `None`: content cannot be stored.
fn open(job: &DiskJob) -> Option<Descriptor> {
    // Late replies to an earlier storing, which has failed or was cancelled. Until all have come, the
    // host pool may read pages that are free by now.
    while !host_pool::has_all_replies() {
        reply(job)?;
    }
    if disk::is_used() {
        // The rest of the content follows to the same file. The buffers exist.
        return fds::DISK.get().and_then(sys::duplicate);
    }
    job.release();
    let needed_bytes = ((STORING_BUFFER + 1) * PIECE_BYTES) as u64;
    if host_pressure::is_critical(needed_bytes, StagingPlace::Own) || !job.has_buffers() {
        return None;
    }
    let mut key = [0; 32];
    datagram::random(&mut key).ok()?;
    if job.if_storing(|| host_pool::ask(&ToHostPool::OpenDisk)) != Some(true) {
        return None;
    }
    let (FromHostPool::DiskFile { done: true }, Some(file)) = reply(job)? else { return None };
    let own = sys::duplicate(file.number())?;
    let pool_bytes = job.pool_bytes();
    let tag_bytes = disk::tag_bytes(pool_bytes);
    let tags = sys::map_private(tag_bytes).ok()?;
    let opened = job.if_storing(|| {
        let owned = TrackedFd::note(file.number())?;
        let mapped = sys::map_to_read(file.number(), pool_bytes)?;
        file.take();
        fds::DISK.set(owned);
        job.set_file(DiskTables { key, tags: tags as usize, mapped });
        Some(())
    });
    if opened.flatten().is_none() {
        // SAFETY: just mapped, and not used elsewhere.
        unsafe { sys::unmap_private(tags, tag_bytes) };
        return None;
    }
    Some(own)
}

/// Waits for the host pool's reply to one request, and for the descriptor that it may have. `None`:
/// it did not come in time, or the job was cancelled.
fn reply(job: &DiskJob) -> Option<(FromHostPool, Option<Descriptor>)> {
    let end_us = sys::now_us() + REPLY_WITHIN_MS * 1_000;
    while sys::now_us() < end_us {
        match job.if_storing(host_pool::receive)? {
            Ok(Some(message)) => return Some(message),
            Ok(None) => host_pool::wait(LOOK_MS),
            Err(()) => return None,
        }
    }
    None
}

/// Moves one chunk to the disk file. False: it stays in memory, because a step has failed or the job
/// was cancelled.
fn is_stored(job: &DiskJob, file: i32, chunk: usize) -> bool {
    let pool_bytes = job.pool_bytes();
    let mut tags = [None; PIECES_PER_CHUNK];
    let mut unasked = disk::pieces(pool_bytes, chunk);
    let mut pending = 0;
    loop {
        while pending < AT_ONCE
            && let Some((offset, bytes)) = unasked.next()
        {
            let (offset, bytes) = (offset as u64, bytes as u64);
            let request = ToHostPool::Store { offset, bytes, key: job.key() };
            if job.if_storing(|| host_pool::ask(&request)) != Some(true) {
                return false;
            }
            pending += 1;
        }
        if pending == 0 {
            return is_committed(job, chunk, &tags);
        }
        let Some((FromHostPool::Stored { offset, done: true, tag }, _)) = reply(job) else {
            return false;
        };
        let within = (offset as usize).wrapping_sub(chunk * CHUNK_BYTES);
        let Some(place) = tags.get_mut(within / PIECE_BYTES) else { return false };
        let left = chunk_bytes(pool_bytes, chunk).saturating_sub(within);
        if !is_readable(job, (file, &tag), offset as usize, left.min(PIECE_BYTES)) {
            return false;
        }
        *place = Some(tag);
        pending -= 1;
    }
}

/// Reads a piece back from the disk, and compares it with the memory.
fn is_readable(job: &DiskJob, (file, tag): (i32, &DiskTag), offset: usize, bytes: usize) -> bool {
    let buffer = job.buffer(STORING_BUFFER);
    let compare = || {
        // SAFETY: both ranges have this many bytes. The memory is in a chunk of the staging pool,
        // which stays mapped while the job is not cancelled. Only this thread uses the buffer.
        let (read, memory) = unsafe {
            (
                core::slice::from_raw_parts(buffer as *const u64, bytes / 8),
                core::slice::from_raw_parts(job.memory(offset) as *const u64, bytes / 8),
            )
        };
        sys::are_same(read, memory)
    };
    read_file(file, buffer, bytes, offset)
        && job.decrypt(tag, offset, bytes, buffer)
        && job.if_storing(compare) == Some(true)
}

/// Frees the memory of a chunk whose pieces are all on the disk. From then on the content is only in
/// the disk file. False: a piece is missing, or the job was cancelled.
fn is_committed(job: &DiskJob, chunk: usize, tags: &[Option<DiskTag>; PIECES_PER_CHUNK]) -> bool {
    let pool_bytes = job.pool_bytes();
    if !disk::pieces(pool_bytes, chunk).zip(tags).all(|(_, tag)| tag.is_some()) {
        return false;
    }
    let commit = || {
        for ((offset, _), tag) in disk::pieces(pool_bytes, chunk).zip(tags) {
            job.set_tag(offset, tag.unwrap_or_default());
        }
        PREFAULT.resident.set(chunk, false);
        job.set_stored(chunk);
        let at = job.memory(chunk * CHUNK_BYTES) as *mut u8;
        // SAFETY: the chunk belongs to the staging pool, and its content is on the disk.
        unsafe { sys::discard(at, chunk_bytes(pool_bytes, chunk), true) };
    };
    job.if_storing(commit).is_some()
}
