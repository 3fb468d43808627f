//! Tests with a scripted host pool at the other end of the socket.

use std::fs::File;
use std::io::IoSlice;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::MutexGuard;
use std::thread::JoinHandle;

use nix::sys::socket::{
    AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, recv, send, sendmsg, socketpair,
};

use super::super::fake_driver::{CONTEXT, Fake};
use super::super::prefault::StagingPlace;
use super::super::prefault::tests::{SHARED, forget_all};
use super::super::staging::StagingPool;
use super::*;

const CHUNKS: usize = 4;

/// A connection to a scripted host pool.
pub struct TestPool {
    file: File,
    server: Option<JoinHandle<usize>>,
    pub fake: Fake,
    _own: MutexGuard<'static, ()>,
}

impl TestPool {
    /// Connects this process to a scripted host pool, which allocates at most `chunks` chunks. If
    /// `swaps` is true, the host pool collects two requests and then replies to the later one
    /// first. The server thread returns the number of requests.
    pub fn connect(chunks: usize, swaps: bool) -> TestPool {
        let own = SHARED.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        forget_all();
        let fake = Fake::new();
        hang_up();
        let (file, socket, server) = start(chunks, swaps);
        fds::HOST_POOL.set(TrackedFd::note(socket.into_raw_fd()).unwrap());
        TestPool { file, server: Some(server), fake, _own: own }
    }

    /// Connects the process to another scripted host pool, which has another file. Returns the
    /// earlier file.
    pub fn reconnect(&mut self, chunks: usize) -> File {
        let (file, socket, server) = start(chunks, false);
        meet(None);
        fds::HOST_POOL.set(TrackedFd::note(socket.into_raw_fd()).unwrap());
        self.server.replace(server).unwrap().join().unwrap();
        std::mem::replace(&mut self.file, file)
    }

    pub fn allocated_bytes(&self) -> u64 {
        self.file.metadata().unwrap().blocks() * 512
    }

    /// Ends the connection, and returns the number of requests.
    pub fn requests(&mut self) -> usize {
        hang_up();
        self.server.take().unwrap().join().unwrap()
    }
}

const MAX_FILE_BYTES: usize = 1 << 40;

/// Starts a scripted host pool. Returns its file, the process's end of the connection, and its thread.
fn start(chunks: usize, swaps: bool) -> (File, OwnedFd, JoinHandle<usize>) {
    let file = sys::memory_file(c"test", MAX_FILE_BYTES).unwrap();
    // SAFETY: the descriptor was just created, and nothing else owns it.
    let file = unsafe { File::from_raw_fd(file) };
    let (ours, theirs) =
        socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).unwrap();
    let rights = [file.as_raw_fd()];
    let frame = FromHostPool::File.encode();
    let part = [IoSlice::new(&frame)];
    let rights = [ControlMessage::ScmRights(&rights)];
    sendmsg::<()>(theirs.as_raw_fd(), &part, &rights, MsgFlags::empty(), None).unwrap();
    let pages = file.try_clone().unwrap();
    let server = std::thread::spawn(move || serve(&theirs, &pages, chunks, swaps));
    (file, ours, server)
}

impl Drop for TestPool {
    fn drop(&mut self) {
        hang_up();
        forget_all();
    }
}

fn serve(socket: &OwnedFd, pages: &File, mut chunks: usize, swaps: bool) -> usize {
    let (mut requests, mut held) = (0, Vec::new());
    let mut frame = [0; FRAME_BYTES];
    while let Ok(FRAME_BYTES) = recv(socket.as_raw_fd(), &mut frame, MsgFlags::empty()) {
        let request = ToHostPool::decode(&frame).unwrap();
        let ToHostPool::Populate { offset, bytes, .. } = request else { panic!("{request:?}") };
        requests += 1;
        let done = chunks > 0;
        if done {
            chunks -= 1;
            nix::fcntl::fallocate(
                pages,
                nix::fcntl::FallocateFlags::empty(),
                offset.cast_signed(),
                bytes.cast_signed(),
            )
            .unwrap();
        }
        held.push(FromHostPool::Populated { offset, done }.encode());
        if !swaps || held.len() == 2 {
            for reply in held.drain(..).rev() {
                let _ = send(socket.as_raw_fd(), &reply, MsgFlags::MSG_NOSIGNAL);
            }
        }
    }
    requests
}

fn is_ready(pool: &mut StagingPool) -> bool {
    (0..CHUNKS).all(|chunk| pool.ready(chunk * CHUNK_BYTES).is_some())
}

#[test]
fn chunks_come_from_the_host_pool() {
    // With one processor there is one helper, so that a second request would not come.
    let swaps = sys::processors() > 1;
    let mut host = TestPool::connect(CHUNKS, swaps);
    let mut pool = StagingPool::none();
    assert!(pool.begin(CHUNKS * CHUNK_BYTES, CONTEXT, StagingPlace::HostPool));
    assert!(is_ready(&mut pool));
    pool.end();
    assert!(pool.file().is_none(), "memory of the host pool has no file for a copier");
    assert_eq!(host.allocated_bytes(), (CHUNKS * CHUNK_BYTES) as u64, "nothing beyond it");
    // What is written to the pool is in the file, which the process maps.
    let at = pool.ready(CHUNK_BYTES).unwrap().cast::<u8>();
    // SAFETY: the address is in a chunk of the pool whose pages exist.
    unsafe { at.write(7) };
    let mut byte = [0];
    host.file.read_exact_at(&mut byte, CHUNK_BYTES as u64).unwrap();
    assert_eq!(byte, [7]);
    // The pool keeps nothing when it is unused.
    pool.give_back_unused();
    assert_eq!((host.allocated_bytes(), pool.kept_bytes()), (0, 0));
    assert_eq!(host.requests(), CHUNKS);
}

/// A chunk without pages must not be used, because its pages would be charged to the container.
#[test]
fn refused_chunk_is_not_touched() {
    let mut host = TestPool::connect(CHUNKS - 1, false);
    let mut pool = StagingPool::none();
    assert!(pool.begin(CHUNKS * CHUNK_BYTES, CONTEXT, StagingPlace::HostPool));
    assert!(!is_ready(&mut pool));
    pool.end();
    assert!(host.allocated_bytes() < (CHUNKS * CHUNK_BYTES) as u64);
    pool.give_back_unused();
    assert_eq!(host.allocated_bytes(), 0);
    host.requests();
}

#[test]
fn ended_host_pool_gives_nothing() {
    let mut host = TestPool::connect(CHUNKS, false);
    let mut pool = StagingPool::none();
    assert!(pool.begin(CHUNK_BYTES, CONTEXT, StagingPlace::HostPool));
    let at = pool.ready(0).unwrap().cast::<u8>();
    pool.end();
    // The content of the mapped file outlives the connection.
    // SAFETY: the address is in a chunk of the pool whose pages exist.
    unsafe { at.write(9) };
    host.requests();
    assert!(!has_file());
    // SAFETY: as above.
    assert_eq!(unsafe { at.read() }, 9);
    assert!(!pool.begin(CHUNK_BYTES, CONTEXT, StagingPlace::HostPool));
    assert!(
        pool.begin(CHUNK_BYTES, CONTEXT, StagingPlace::Own),
        "the process can use its own memory"
    );
    pool.end();
    assert_eq!(host.allocated_bytes(), 0, "the memory of the host pool was not freed");
}

/// A socket that was shut down must stay open until the agent closes it. Otherwise the application
/// could open another file with the same number while helpers wait for a reply.
#[test]
fn failed_connection_is_closed_by_the_agent() {
    let host = TestPool::connect(0, false);
    assert!(file().is_some());
    let socket = fds::HOST_POOL.get().unwrap();
    sys::shut_down(socket);
    assert_eq!(populate(0, CHUNK_BYTES), None);
    assert_eq!((fds::HOST_POOL.get(), has_file()), (Some(socket), false));
    assert_eq!(file(), None);
    assert_eq!(fds::HOST_POOL.get(), None);
    drop(host);
}
