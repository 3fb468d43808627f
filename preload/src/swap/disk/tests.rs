//! Tests with a scripted host pool, a real disk file, and a fake driver.

use std::fs::File;
use std::io::IoSlice;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use aes_gcm::{AeadInPlace, Aes256Gcm};
use affinode_cuda_sys::result;
use affinode_proto::wire::host_pool::{FromHostPool, ToHostPool};
use affinode_proto::wire::message::{CopyOptions, FRAME_BYTES};
use nix::sys::socket::{
    AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, recv, send, sendmsg, socketpair,
};

use super::super::allocations::{Allocation, AllocationPiece};
use super::super::backing::{back, property_on};
use super::super::copy::{DISK_UNREADABLE, copy_out, is_copied_out};
use super::super::copy_in::{copy_in, copy_in_unverified};
use super::super::digest::SLOT_BYTES;
use super::super::fake_driver::{CONTEXT, DEVICE, Fake};
use super::super::prefault::tests::{SHARED, forget_all};
use super::super::{addresses, checksum, locked, tables, with_pool};
use super::*;

/// Sizes of allocations in slots of 2 MiB. They cross the borders of pieces on disk.
const SMALL: &[usize] = &[1, 4, 3, 2];
/// The same, in two chunks.
const LARGE: &[usize] = &[1, 40, 3, 24, 2];

/// How the scripted host pool behaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Mood {
    #[default]
    Good,
    /// It writes something other than the content.
    Lies,
    /// It replies to no further request to store.
    Silent,
    /// It replies late to the request for the disk file.
    SlowDisk,
    /// It has no room on the disk after this number of pieces.
    Full(usize),
    /// It has no disk.
    NoDisk,
}

/// Requests of the process that the scripted host pool has counted, and what it does.
#[derive(Default)]
struct Script {
    mood: Mood,
    asked: usize,
    closed: usize,
    /// Replies that [`Mood::Silent`] or [`Mood::SlowDisk`] has kept back.
    late: Vec<[u8; FRAME_BYTES]>,
    disk: Option<File>,
}

type Shared = Arc<(Mutex<Script>, Condvar)>;

struct World {
    fake: Fake,
    memory: File,
    script: Shared,
    socket: Arc<OwnedFd>,
    server: Option<JoinHandle<()>>,
    chunks: usize,
    _own: MutexGuard<'static, ()>,
}

fn script(shared: &Shared) -> MutexGuard<'_, Script> {
    shared.0.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Content of a slot of the device: each has its own, and every seventh is zero.
fn content(slot: usize) -> u64 {
    if slot % 7 == 3 { 0 } else { 1_000 + slot as u64 }
}

impl World {
    fn new(mood: Mood) -> World {
        World::of(SMALL, mood)
    }

    fn of(sizes: &[usize], mood: Mood) -> World {
        let own = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        forget_all();
        let fake = Fake::new();
        SWAP.in_use.store(1, Ordering::Release);
        let mut slot = 0;
        for &slots in sizes {
            let bytes = (slots * SLOT_BYTES) as u64;
            let property = property_on(DEVICE);
            let mut piece =
                AllocationPiece { bytes, property, context: CONTEXT, ..AllocationPiece::default() };
            piece.address = addresses::reserve(bytes as usize).unwrap();
            piece.handle = back(&piece).unwrap();
            piece.since = slot as u64;
            for n in 0..slots {
                fake.write(piece.address + (n * SLOT_BYTES) as u64, content(slot));
                slot += 1;
            }
            let one = Allocation { piece, asked_bytes: bytes, ..Allocation::default() };
            assert!(tables(|tables| tables.insert(one)));
        }
        // SAFETY: the descriptor was just created, and nothing else owns it.
        let memory = unsafe { File::from_raw_fd(sys::memory_file(c"test", 1 << 40).unwrap()) };
        let script = Shared::default();
        script.0.lock().unwrap().mood = mood;
        let (socket, server) = serve(&memory, &script);
        World {
            fake,
            memory,
            script,
            socket,
            server: Some(server),
            chunks: (slot * SLOT_BYTES).div_ceil(CHUNK_BYTES),
            _own: own,
        }
    }

    fn offload(&self) {
        let how = CopyOptions { host_pool: true, ..CopyOptions::default() };
        assert_eq!(copy_out(how, None), Ok(()));
        assert!(is_copied_out() && self.memory_bytes() > 0);
    }

    /// Stores the content, and plays the agent's part until the thread has ended.
    fn store(&self) {
        begin();
        self.until(|| SWAP.disk.state.load(Ordering::Acquire) == IDLE);
    }

    /// Plays the agent's part until something is true.
    fn until(&self, done: impl Fn() -> bool) {
        while !done() {
            go_on(true);
            std::thread::yield_now();
        }
    }

    fn stored(&self) -> usize {
        (0..self.chunks).filter(|chunk| has(*chunk)).count()
    }

    fn memory_bytes(&self) -> u64 {
        self.memory.metadata().unwrap().blocks() * 512
    }

    /// Whether all content is on the device.
    fn is_resident(&self) -> bool {
        let mut pieces: Vec<AllocationPiece> =
            locked(|all| all.iter().map(|one| one.piece).collect());
        pieces.sort_by_key(|piece| piece.since);
        let slots = pieces
            .iter()
            .flat_map(|piece| (piece.address..piece.address + piece.bytes).step_by(SLOT_BYTES));
        slots.enumerate().all(|(slot, address)| self.fake.read(address) == Some(content(slot)))
            && !is_copied_out()
            && self.fake.held().streams == 0
    }

    fn script(&self) -> MutexGuard<'_, Script> {
        script(&self.script)
    }

    /// Ends the host pool.
    fn end_pool(&mut self) {
        let _ =
            nix::sys::socket::shutdown(self.socket.as_raw_fd(), nix::sys::socket::Shutdown::Both);
        if let Some(server) = self.server.take() {
            server.join().unwrap();
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        cancel();
        self.until(|| SWAP.disk.state.load(Ordering::Acquire) == IDLE);
        with_pool(finish);
        tidy();
        self.end_pool();
        host_pool::meet(None);
        forget_all();
    }
}

fn serve(memory: &File, shared: &Shared) -> (Arc<OwnedFd>, JoinHandle<()>) {
    let (ours, theirs) =
        socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).unwrap();
    reply(&theirs, FromHostPool::File, Some(memory));
    host_pool::meet(sys::duplicate(ours.into_raw_fd()));
    let (memory, shared, theirs) =
        (memory.try_clone().unwrap(), Arc::clone(shared), Arc::new(theirs));
    let socket = Arc::clone(&theirs);
    let server = std::thread::spawn(move || {
        let mut frame = [0; FRAME_BYTES];
        while let Ok(FRAME_BYTES) = recv(theirs.as_raw_fd(), &mut frame, MsgFlags::empty()) {
            answer(&theirs, &memory, &shared, ToHostPool::decode(&frame).unwrap());
        }
    });
    (socket, server)
}

fn reply(socket: &OwnedFd, message: FromHostPool, file: Option<&File>) {
    let frame = message.encode();
    let rights = file.map(|file| [file.as_raw_fd()]);
    let rights = rights.as_ref().map(|rights| ControlMessage::ScmRights(rights));
    let _ = sendmsg::<()>(
        socket.as_raw_fd(),
        &[IoSlice::new(&frame)],
        rights.as_slice(),
        MsgFlags::MSG_NOSIGNAL,
        None,
    );
}

fn answer(socket: &OwnedFd, memory: &File, shared: &Shared, request: ToHostPool) {
    match request {
        ToHostPool::Populate { offset, bytes, .. } => {
            let flags = nix::fcntl::FallocateFlags::empty();
            nix::fcntl::fallocate(memory, flags, offset.cast_signed(), bytes.cast_signed())
                .unwrap();
            reply(socket, FromHostPool::Populated { offset, done: true }, None);
        }
        ToHostPool::OpenDisk => {
            let mut script = script(shared);
            let done = script.mood != Mood::NoDisk;
            script.disk = done.then(|| tempfile::tempfile_in("/var/tmp").unwrap());
            let path = script.disk.as_ref().map(|f| format!("/proc/self/fd/{}", f.as_raw_fd()));
            let readable = path.map(|path| File::open(path).unwrap());
            let message = FromHostPool::DiskFile { done };
            match script.mood {
                Mood::SlowDisk => script.late.push(message.encode()),
                _ => reply(socket, message, readable.as_ref()),
            }
        }
        ToHostPool::Store { offset, bytes, key } => {
            let mut piece = vec![0; bytes as usize];
            memory.read_exact_at(&mut piece, offset).unwrap();
            let mut script = script(shared);
            if script.mood == Mood::Lies {
                piece[4_096] ^= 1;
            }
            let cipher = <Aes256Gcm as aes_gcm::KeyInit>::new(&key.into());
            let nonce = disk_nonce(offset);
            let tag = cipher.encrypt_in_place_detached(&nonce.into(), b"", &mut piece).unwrap();
            script.disk.as_ref().unwrap().write_all_at(&piece, offset).unwrap();
            script.asked += 1;
            let done = !matches!(script.mood, Mood::Full(most) if script.asked > most);
            let message = FromHostPool::Stored { offset, done, tag: tag.into() };
            match script.mood {
                Mood::Silent => script.late.push(message.encode()),
                _ => reply(socket, message, None),
            }
            shared.1.notify_all();
        }
        ToHostPool::CloseDisk => {
            let mut script = script(shared);
            script.closed += 1;
            script.disk = None;
            shared.1.notify_all();
        }
    }
}

#[test]
fn stored_content_is_restored_and_memory_free() {
    let world = World::of(LARGE, Mood::Good);
    for round in 1..=2 {
        world.offload();
        world.store();
        assert_eq!((world.stored(), world.memory_bytes()), (world.chunks, 0));
        assert_eq!((copy_in(None), world.is_resident()), (Ok(()), true));
        assert_eq!((world.stored(), is_used()), (0, false));
        let waited = world.script.1.wait_while(world.script(), |script| script.closed < round);
        assert_eq!(waited.unwrap().closed, round);
    }
}

#[test]
fn content_that_reads_back_otherwise_stays() {
    let world = World::new(Mood::Lies);
    world.offload();
    let before = world.memory_bytes();
    world.store();
    assert_eq!((world.stored(), world.memory_bytes()), (0, before));
    assert_eq!((copy_in(None), world.is_resident()), (Ok(()), true));
}

#[test]
fn full_disk_keeps_the_rest_in_memory() {
    let world = World::of(LARGE, Mood::Full(9));
    world.offload();
    let before = world.memory_bytes();
    world.store();
    assert_eq!(world.stored(), 1, "the last chunk, which is small, and not the next");
    assert!((1..before).contains(&world.memory_bytes()));
    // With space again, the rest follows.
    world.script().mood = Mood::Good;
    world.store();
    assert_eq!((world.stored(), world.memory_bytes()), (world.chunks, 0));
    assert_eq!((copy_in(None), world.is_resident()), (Ok(()), true));
}

#[test]
fn process_without_a_disk_keeps_its_memory() {
    let world = World::new(Mood::NoDisk);
    world.offload();
    world.store();
    assert!(!is_used() && world.memory_bytes() > 0);
    assert_eq!((copy_in(None), world.is_resident()), (Ok(()), true));
}

#[test]
fn restore_needs_no_host_pool() {
    let mut world = World::new(Mood::Good);
    world.offload();
    world.store();
    world.end_pool();
    assert_eq!((world.stored(), world.memory_bytes()), (world.chunks, 0));
    assert_eq!((copy_in(None), world.is_resident()), (Ok(()), true));
}

/// The application may close descriptors that it does not know.
#[test]
fn restore_needs_no_descriptor() {
    let world = World::new(Mood::Good);
    world.offload();
    world.store();
    sys::close(fds::DISK.get().unwrap());
    assert_eq!((copy_in(None), world.is_resident()), (Ok(()), true));
}

#[test]
fn restore_does_not_wait_for_the_disk() {
    let world = World::new(Mood::Silent);
    world.offload();
    begin();
    world.until(|| world.script().asked > 0);
    assert!(!host_pool::has_all_replies());
    assert_eq!((copy_in(None), world.is_resident()), (Ok(()), true));
    // Late replies do not disturb the next offload.
    for late in std::mem::take(&mut world.script().late) {
        send(world.socket.as_raw_fd(), &late, MsgFlags::MSG_NOSIGNAL).unwrap();
    }
    world.script().mood = Mood::Good;
    world.until(|| SWAP.disk.state.load(Ordering::Acquire) == IDLE);
    world.offload();
    world.store();
    assert_eq!(world.stored(), 1);
    assert_eq!((copy_in(None), world.is_resident()), (Ok(()), true));
}

#[test]
fn damaged_file_is_noticed_and_can_be_read_again() {
    let world = World::new(Mood::Good);
    world.offload();
    world.store();
    let disk = world.script().disk.as_ref().unwrap().try_clone().unwrap();
    let mut byte = [0];
    disk.read_exact_at(&mut byte, 9 << 20).unwrap();
    disk.write_all_at(&[byte[0] ^ 4], 9 << 20).unwrap();
    assert_eq!(copy_in(None), Err(result::ECC_UNCORRECTABLE));
    assert!(is_copied_out() && world.fake.held().mappings == 0);
    disk.write_all_at(&byte, 9 << 20).unwrap();
    // A disk that cannot be read is no damage. Here the end of the file is missing.
    let (end, mut last) = (disk.metadata().unwrap().len() - 4096, [0; 4096]);
    disk.read_exact_at(&mut last, end).unwrap();
    disk.set_len(end).unwrap();
    assert_eq!(copy_in(None), Err(DISK_UNREADABLE));
    disk.write_all_at(&last, end).unwrap();
    assert_eq!((copy_in(None), world.is_resident()), (Ok(()), true));
}

/// A step of the driver that fails during the restore loses nothing.
#[test]
fn failed_restore_from_disk_is_repeated() {
    let world = World::new(Mood::Good);
    for (function, after) in
        [("cuMemCreate", 3), ("cuMemcpyHtoDAsync_v2", 5), ("cuStreamSynchronize", 2)]
    {
        world.offload();
        world.store();
        world.fake.fail(function, after);
        assert!(copy_in(None).is_err(), "{function}");
        assert!(is_copied_out() && world.stored() == 1);
        assert_eq!((copy_in(None), world.is_resident()), (Ok(()), true), "{function}");
    }
}

/// The host pool may still read memory for requests that it has not answered. A second storing must
/// not free this memory before.
#[test]
fn second_storing_waits_for_replies_to_the_first() {
    let world = World::new(Mood::Silent);
    world.offload();
    begin();
    world.until(|| world.script().asked == 4);
    cancel();
    world.until(|| SWAP.disk.state.load(Ordering::Acquire) == IDLE);
    world.script().mood = Mood::Good;
    begin();
    // The second storing has begun, and asks for nothing.
    let end_us = sys::now_us() + 200_000;
    world.until(|| sys::now_us() > end_us);
    assert_eq!((world.script().asked, world.stored()), (4, 0));
    for late in std::mem::take(&mut world.script().late) {
        send(world.socket.as_raw_fd(), &late, MsgFlags::MSG_NOSIGNAL).unwrap();
    }
    world.until(|| SWAP.disk.state.load(Ordering::Acquire) == IDLE);
    assert_eq!((world.stored(), world.memory_bytes()), (1, 0));
    assert_eq!((copy_in(None), world.is_resident()), (Ok(()), true));
}

/// A storing is cancelled before the host pool has sent the disk file. The next storing must not
/// take the late reply for its own.
#[test]
fn late_disk_file_fails_no_later_storing() {
    let world = World::new(Mood::SlowDisk);
    world.offload();
    begin();
    world.until(|| !world.script().late.is_empty());
    cancel();
    world.until(|| SWAP.disk.state.load(Ordering::Acquire) == IDLE);
    world.script().mood = Mood::Good;
    for late in std::mem::take(&mut world.script().late) {
        send(world.socket.as_raw_fd(), &late, MsgFlags::MSG_NOSIGNAL).unwrap();
    }
    world.store();
    assert_eq!((world.stored(), world.memory_bytes()), (1, 0));
    assert_eq!((copy_in(None), world.is_resident()), (Ok(()), true));
}

/// An allocation is partly on disk. A copy to the device went wrong, so the checksum repairs it. The
/// repair must not copy from the pool's pages of the part on disk: they are free and read as zero.
#[test]
fn checksum_repairs_beside_content_on_disk() {
    let world = World::of(&[70], Mood::Full(9));
    let how = CopyOptions { host_pool: true, check: true, ..CopyOptions::default() };
    assert_eq!(copy_out(how, None), Ok(()));
    world.store();
    assert_eq!((has(0), has(1)), (false, true));
    world.fake.spoil_slot(5);
    assert_eq!((copy_in(None), world.is_resident()), (Ok(()), true));
    assert!(!is_used());
    // Content on disk is verified too. It is not repaired, and the process counts as damaged.
    world.script().mood = Mood::Good;
    assert_eq!(copy_out(how, None), Ok(()));
    world.store();
    assert_eq!(world.stored(), world.chunks);
    world.fake.spoil_slot(5);
    assert_eq!(copy_in_unverified(None), Ok(()));
    assert!(checksum::is_damaged() && !world.is_resident());
    checksum::set(false);
}

/// Pages behind the content, from an earlier and larger copy, are freed by the copy out and not stored.
#[test]
fn pages_behind_the_content_are_not_stored() {
    let world = World::of(LARGE, Mood::Good);
    world.offload();
    assert_eq!((copy_in(None), world.is_resident()), (Ok(()), true));
    // Only a small part of the memory leaves now.
    locked(|all| {
        let large = all.iter_mut().filter(|one| one.piece.bytes > 8 << 20);
        large.for_each(|one| one.piece.stays = true);
    });
    world.offload();
    assert_eq!(world.memory_bytes(), CHUNK_BYTES as u64, "the copy out has freed the others");
    world.store();
    assert_eq!((world.memory_bytes(), has(0), has(1)), (0, true, false));
    assert_eq!((copy_in(None), world.is_resident()), (Ok(()), true));
}

#[test]
fn own_memory_is_not_stored() {
    let world = World::new(Mood::Good);
    assert_eq!(copy_out(CopyOptions::default(), None), Ok(()));
    world.store();
    assert!(!is_used());
    assert_eq!((copy_in(None), world.is_resident()), (Ok(()), true));
}
