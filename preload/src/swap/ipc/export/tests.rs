//! Tests the requests to an exporter, a process that shares its memory. Any process in its network
//! namespace may send such requests.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::MutexGuard;
use std::sync::atomic::Ordering;

use super::super::super::allocations::{AllocationPiece, MemoryPlace};
use super::super::super::backing::{back, property_on};
use super::super::super::copy::copy_out;
use super::super::super::copy_in::copy_in;
use super::super::super::fake_driver::{CONTEXT, DEVICE, Fake};
use super::super::super::prefault::tests::{SHARED, forget_all, options};
use super::*;

const PIECE_BYTES: u64 = 4 << 20;
const ASKED_BYTES: u64 = PIECE_BYTES - 9;

/// A process with one piece of memory and a handle for that piece.
struct Exporter {
    fake: Fake,
    identity: ExportIdentity,
    address: u64,
    since: u64,
    _own: MutexGuard<'static, ()>,
}

impl Exporter {
    fn new() -> Exporter {
        let own = SHARED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let fake = Fake::new();
        SWAP.in_use.store(1, Ordering::Release);
        let allocation = Exporter::allocate();
        let piece = allocation.piece;
        let identity = ExportIdentity::random().unwrap();
        tables(|tables| tables.identity = identity);
        let name = identity.handle(&allocation).socket_name();
        // Without the kernel's filter: the test receives all datagrams that are sent.
        let socket = datagram::bind(&name, None, sys::gettid(), sys::SIGURG).unwrap();
        fds::SHARING.set(TrackedFd::note(socket.number()).unwrap());
        socket.take();
        let since = locked(|table| table.at(piece.address).unwrap().piece.since);
        Exporter { fake, identity, address: piece.address, since, _own: own }
    }

    /// Adds one piece of memory to the process.
    fn allocate() -> Allocation {
        let mut property = property_on(DEVICE);
        property.handle_types |= POSIX_DESCRIPTOR;
        let mut piece = AllocationPiece {
            bytes: PIECE_BYTES,
            property,
            context: CONTEXT,
            ..AllocationPiece::default()
        };
        let bytes = PIECE_BYTES as usize;
        let code = call!(mem_address_reserve(&raw mut piece.address, bytes, 0, 0, 0));
        assert_eq!(code, result::SUCCESS);
        piece.handle = back(&piece).unwrap();
        let allocation = Allocation { piece, asked_bytes: ASKED_BYTES, ..Allocation::default() };
        assert!(tables(|tables| tables.insert(allocation)));
        allocation
    }

    /// Adds memory that is not shared, and returns its address.
    fn add_piece(&self) -> u64 {
        Exporter::allocate().piece.address
    }

    fn good(&self) -> IpcRequest {
        IpcRequest { word: self.identity.word, address: self.address, since: self.since }
    }

    /// Sends a datagram to the exporter, with a socket for the reply or with another descriptor.
    /// Returns the reply, and whether the exporter closed the socket.
    fn ask(&self, bytes: &[u8], other: Option<BorrowedFd<'_>>) -> (Option<IpcReply>, bool) {
        let [own, theirs] = datagram::pair().unwrap();
        let handle = IpcHandle { socket: self.identity.socket, ..IpcHandle::default() };
        let way = datagram::connect(&handle.socket_name()).unwrap();
        let along = other.map_or(theirs.number(), |other| other.as_raw_fd());
        sys::send(way.number(), bytes, Some(along)).unwrap();
        drop(theirs);
        let before = self.fake.held();
        assert!(!answer(), "after one request, a further request is reported");
        assert!(self.is_quiet(), "a request is left");
        let mut frame = [0; FRAME_BYTES];
        let received = sys::receive(own.number(), &mut frame);
        let answered = match &received {
            Ok((FRAME_BYTES, Some(memory))) => {
                // SAFETY: the descriptor is open as long as `received` exists.
                let memory = unsafe { BorrowedFd::borrow_raw(memory.number()) };
                assert!(
                    self.fake.has_exported(memory),
                    "the descriptor does not refer to device memory"
                );
                Some(IpcReply::decode(&frame).unwrap())
            }
            _ => None,
        };
        drop(received);
        assert_eq!(self.fake.held().handles, before.handles, "a reference to the memory is left");
        assert_eq!(self.fake.held().descriptors, 0, "a descriptor of the memory is left");
        let closed = matches!(sys::receive(own.number(), &mut frame), Ok((0, None)));
        (answered, closed)
    }

    fn is_quiet(&self) -> bool {
        let socket = fds::SHARING.get().unwrap();
        datagram::peek(socket, &mut [0; 1]).is_err()
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        fds::SHARING.close();
        tables(|tables| tables.identity = ExportIdentity::none());
        forget_all();
    }
}

#[test]
fn request_with_the_word_gets_the_memory() {
    let exporter = Exporter::new();
    let (answer, closed) = exporter.ask(&exporter.good().encode(), None);
    let proof = exporter.identity.proof;
    assert_eq!(answer, Some(IpcReply { proof, bytes: PIECE_BYTES, asked_bytes: ASKED_BYTES }));
    assert!(closed, "the exporter did not close the socket");
}

#[test]
fn request_for_memory_that_is_freed_gets_none() {
    let exporter = Exporter::new();
    let good = exporter.good();
    for ask in [
        IpcRequest { since: exporter.since + 1, ..good },
        IpcRequest { address: exporter.address + 1, ..good },
        IpcRequest { address: exporter.address + PIECE_BYTES, ..good },
        IpcRequest { address: 0, ..good },
        IpcRequest { word: [0; 16], ..good },
    ] {
        assert_eq!(exporter.ask(&ask.encode(), None), (None, true), "{ask:?}");
    }
    tables(|tables| tables.identity = ExportIdentity::none());
    assert_eq!(
        exporter.ask(&good.encode(), None),
        (None, true),
        "an exporter without an identity must not reply"
    );
    assert_eq!(exporter.ask(&IpcRequest { word: [0; 16], ..good }.encode(), None), (None, true));
}

#[test]
fn request_with_another_descriptor_harms_nothing() {
    let exporter = Exporter::new();
    let folder = OwnedFd::from(std::fs::File::open("/").unwrap());
    let (pipe, _end) = std::io::pipe().unwrap();
    for other in [folder.as_fd(), pipe.as_fd()] {
        assert_eq!(exporter.ask(&exporter.good().encode(), Some(other)), (None, true));
    }
    assert!(
        exporter.ask(&exporter.good().encode(), None).0.is_some(),
        "the exporter still replies"
    );
}

/// The exporter must refuse a request that differs from a valid request in any byte that has a
/// meaning, or in its length. It must still reply to a valid request afterwards.
#[test]
fn request_that_differs_gets_nothing() {
    let exporter = Exporter::new();
    let good = exporter.good().encode();
    const COUNTED_BYTES: usize = 40;
    for at in 0..COUNTED_BYTES {
        for change in [1, 0x80, 0xff] {
            let mut sent = good;
            sent[at] ^= change;
            assert_eq!(exporter.ask(&sent, None), (None, true), "byte {at}");
        }
    }
    for length in (1..FRAME_BYTES).chain([FRAME_BYTES + 1, 4096]) {
        let mut sent = good.to_vec();
        sent.resize(length, 0);
        assert_eq!(exporter.ask(&sent, None), (None, true), "{length} bytes");
    }
    assert!(exporter.ask(&good, None).0.is_some(), "the exporter still replies");
}

/// Requests that never end must not prevent the agent from reading the controller's messages.
#[test]
fn flood_of_requests_is_answered_in_portions() {
    let exporter = Exporter::new();
    let handle = IpcHandle { socket: exporter.identity.socket, ..IpcHandle::default() };
    let way = datagram::connect(&handle.socket_name()).unwrap();
    let mut sent = 0;
    while sys::send(way.number(), &[7; FRAME_BYTES], None).is_ok() {
        sent += 1;
    }
    let mut portions = 0;
    while answer() {
        portions += 1;
    }
    assert_eq!(portions, sent / 16, "of {sent} requests");
    assert!(exporter.is_quiet());
}

/// An exporter that is copied out must still reply to requests for the memory of its handle. The
/// library marks the memory to stay on the device before the program gets the handle, so a copy out
/// does not remove it.
#[test]
fn copied_out_exporter_still_serves_its_handle() {
    let exporter = Exporter::new();
    let other = exporter.add_piece();
    [exporter.address, other].iter().for_each(|at| exporter.fake.write(*at, *at));
    let mut handle = [0; HANDLE_BYTES];
    // SAFETY: the address is that of a local variable.
    let code = unsafe { ipc_get_mem_handle(&raw mut handle, exporter.address) };
    let handle = IpcHandle::decode(&handle).unwrap();
    assert_eq!((code, handle.address), (result::SUCCESS, exporter.address));
    for _ in 0..2 {
        assert_eq!(copy_out(options(false, false), None), Ok(()));
        let place = |at| locked(|table| table.at(at).unwrap().piece.place);
        assert_eq!(place(exporter.address), MemoryPlace::Device);
        assert_eq!(place(other), MemoryPlace::Pool);
        assert_eq!(exporter.fake.read(exporter.address), Some(exporter.address));
        assert!(
            exporter.ask(&exporter.good().encode(), None).0.is_some(),
            "the exporter replies while it is copied out"
        );
        let unmarked = IpcRequest { address: other, since: handle.since + 1, ..exporter.good() };
        assert_eq!(
            exporter.ask(&unmarked.encode(), None),
            (None, true),
            "the allocation was never marked"
        );
        assert_eq!(copy_in(None), Ok(()));
        assert_eq!(exporter.fake.read(other), Some(other));
    }
}
