//! Testbed: a copier on a simulated driver, with the controller's and the agents' ends of its
//! sockets. Everything runs on the thread of the test.
#![allow(clippy::unwrap_used, reason = "this is code of tests, also where a feature asks for it")]

mod play;

pub use play::play;

use std::{
    cell::RefCell,
    collections::BTreeSet,
    fs::File,
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::FileExt,
    },
    time::Duration,
};

use affinode_proto::wire::{
    copier::{CopierOrder, CopierReport, FromCopier, PIECES_A_FRAME, Piece, ToCopier},
    message::FRAME_BYTES,
};
use rustix::{
    fs::{MemfdFlags, SealFlags},
    net::{AddressFamily, SocketFlags, SocketType},
};

pub use crate::sys::fake;
use crate::{
    clock, dedup::DedupIndex, host_budget::HostBudget, serve::CopierError, serve::CopierServer,
    session::SessionStep, socket,
};

/// Size of a unit in bytes. The size of each piece is a whole number of units.
pub const UNIT: u64 = affinode_proto::wire::copier::UNIT_BYTES;
/// Device memory of a testbed's GPU, in bytes.
pub const VRAM_BYTES: u64 = 8 << 30;

const SEALED: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Creates a packet socket and returns both ends.
pub fn pair() -> (OwnedFd, OwnedFd) {
    let flags = SocketFlags::CLOEXEC;
    rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
}

/// Returns bytes that differ from page to page, so that a test notices a page at the wrong place.
pub fn pattern(bytes: u64, seed: u64) -> Vec<u8> {
    let mut content = vec![seed as u8; bytes as usize];
    for (n, page) in content.chunks_exact_mut(4096).enumerate() {
        page[..8].copy_from_slice(&(n as u64 ^ (seed << 40)).to_le_bytes());
    }
    content
}

/// Creates a memory file with this content and these seals.
pub fn memory_file(content: &[u8], seals: SealFlags) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = File::from(rustix::fs::memfd_create("affinode-testbed", flags).unwrap());
    file.write_all_at(content, 0).unwrap();
    let file = OwnedFd::from(file);
    rustix::fs::fcntl_add_seals(&file, seals).unwrap();
    file
}

/// Creates a memory file with the seals that a real agent sets.
pub fn content_file(content: &[u8]) -> OwnedFd {
    memory_file(content, SEALED)
}

/// Reads the first `bytes` of a file.
pub fn content_of(file: &OwnedFd, bytes: usize) -> Vec<u8> {
    let mut content = vec![0; bytes];
    File::from(file.try_clone().unwrap()).read_exact_at(&mut content, 0).unwrap();
    content
}

/// A copier under test, with the controller's end of its socket.
pub struct Testbed {
    copier: Option<CopierServer>,
    controller: Option<OwnedFd>,
    /// Reports from the copier that the test has not taken yet.
    pub reports: Vec<CopierReport>,
}

impl Testbed {
    /// Creates a testbed with a GPU that only the copier uses.
    pub fn new() -> Testbed {
        // Enough host memory for every test, independent of this machine.
        Testbed::within(|| HostBudget { total_bytes: 1 << 40, free_bytes: 1 << 40 })
    }

    /// Creates a testbed whose copier sees the host memory that `memory` returns.
    pub fn within(memory: fn() -> HostBudget) -> Testbed {
        clock::hold();
        fake::reset(VRAM_BYTES);
        let (ours, theirs) = pair();
        let copier = CopierServer::new(theirs, fake::open().unwrap(), DedupIndex::within(memory));
        Testbed { copier: Some(copier), controller: Some(ours), reports: Vec::new() }
    }

    /// Sends an order to the copier, as the controller does.
    pub fn order(&self, order: CopierOrder, descriptor: Option<&OwnedFd>) {
        if let Some(controller) = &self.controller {
            // An error is ignored: the copier may have ended.
            let _ = socket::send(controller, &order.encode(), descriptor);
        }
    }

    /// Sends arbitrary bytes to the copier in place of a controller's frame.
    pub fn order_bytes(&self, frame: &[u8; FRAME_BYTES]) {
        if let Some(controller) = &self.controller {
            socket::send(controller, frame, None).unwrap();
        }
    }

    /// Closes the controller's end of its socket.
    pub fn hang_up(&mut self) {
        self.controller = None;
    }

    /// Starts another copier, while the simulated driver keeps its current state.
    pub fn open_again(&mut self) {
        let (ours, theirs) = pair();
        self.copier = Some(CopierServer::new(theirs, fake::open().unwrap(), DedupIndex::new()));
        self.controller = Some(ours);
    }

    /// Attaches a process to the copier. Its socket has space for only a few messages.
    pub fn attach_with_a_short_queue(&self, process: u64, most_bytes: u64, domain: u64) -> Agent {
        let (ours, theirs) = pair();
        rustix::net::sockopt::set_socket_send_buffer_size(&theirs, 1).unwrap();
        self.order(CopierOrder::Attach { process, most_bytes, domain }, Some(&theirs));
        Agent { process, socket: Some(ours), inbox: Vec::new() }
    }

    /// Attaches a process to the copier. Returns the process's end of the socket.
    pub fn attach(&self, process: u64, most_bytes: u64, domain: u64) -> Agent {
        let (ours, theirs) = pair();
        self.order(CopierOrder::Attach { process, most_bytes, domain }, Some(&theirs));
        Agent { process, socket: Some(ours), inbox: Vec::new() }
    }

    /// Orders the copier to copy the memory of an offloaded process back into VRAM. `most_bytes` is
    /// the granted VRAM.
    pub fn fill(&self, process: u64, most_bytes: u64) {
        self.order(CopierOrder::Fill { process, most_bytes }, None);
    }

    /// Runs one turn of the copier's main loop. Returns `None` if the copier has ended, because the
    /// controller's end of the socket is closed.
    ///
    /// # Errors
    /// [`CopierError`]: the copier has failed.
    pub fn turn(&mut self) -> Result<Option<SessionStep>, CopierError> {
        let Some(copier) = &mut self.copier else { return Ok(None) };
        let step = copier.turn();
        if !matches!(step, Ok(Some(_))) {
            self.copier = None;
        }
        self.read_reports();
        step
    }

    /// Runs turns of the copier until no step can run immediately.
    ///
    /// # Errors
    /// The errors of [`Self::turn`].
    pub fn settle(&mut self) -> Result<Option<SessionStep>, CopierError> {
        let mut idle_turns = 0;
        loop {
            match self.turn()? {
                Some(SessionStep::More) => idle_turns = 0,
                step if idle_turns > 2 => return Ok(step),
                _ => idle_turns += 1,
            }
        }
    }

    fn read_reports(&mut self) {
        let Some(controller) = &self.controller else { return };
        while let Ok((frame, _)) = socket::receive(controller) {
            self.reports.push(CopierReport::decode(&frame).unwrap());
        }
    }

    /// Returns the copier's reports since the last call.
    pub fn take_reports(&mut self) -> Vec<CopierReport> {
        std::mem::take(&mut self.reports)
    }

    /// Returns whether the copier is still running.
    pub fn runs(&self) -> bool {
        self.copier.is_some()
    }

    /// Closes the controller's end of its socket, and runs the copier until it ends.
    pub fn end(&mut self) {
        self.controller = None;
        let _ = self.turn();
        self.copier = None;
    }

    /// Advances the copier's clock by this time.
    pub fn wait(&self, by: Duration) {
        clock::advance(by);
    }

    /// Asserts that no session, driver object or mapping remains.
    ///
    /// # Panics
    /// If a rule of the driver was broken, or something of a detached process remains.
    pub fn assert_nothing_is_left(&self) {
        fake::with(|fake| {
            assert_eq!(fake.faults(), &[] as &[String]);
            assert_eq!(fake.left(), fake::Left::default());
        });
        assert_eq!(mappings(), 0, "memory files are still mapped");
    }
}

impl Default for Testbed {
    fn default() -> Self {
        Testbed::new()
    }
}

/// Counts the mapped memory files of this thread's testbed. Other threads of the test program map
/// files of the same name, so inodes identify the files.
fn mappings() -> usize {
    FILES.with_borrow(|files| {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let inode = |line: &str| line.split_whitespace().nth(4).and_then(|n| n.parse().ok());
        maps.lines()
            .filter(|line| line.contains("/memfd:affinode-testbed"))
            .filter_map(inode)
            .filter(|inode: &u64| files.contains(inode))
            .count()
    })
}

thread_local! {
    static FILES: RefCell<BTreeSet<u64>> = const { RefCell::new(BTreeSet::new()) };
}

/// The agent's end of a socket to the copier.
pub struct Agent {
    /// Number that the controller has assigned to the process.
    pub process: u64,
    socket: Option<OwnedFd>,
    inbox: Vec<(FromCopier, Option<OwnedFd>)>,
}

impl Agent {
    /// Sends a message to the copier. Returns false if the copier has closed the socket.
    pub fn say(&self, message: ToCopier, descriptor: Option<&OwnedFd>) -> bool {
        self.say_bytes(&message.encode(), descriptor)
    }

    /// Sends arbitrary bytes to the copier in place of an agent's frame.
    pub fn say_bytes(&self, frame: &[u8; FRAME_BYTES], descriptor: Option<&OwnedFd>) -> bool {
        if let Some(file) = descriptor
            && let Ok(stat) = rustix::fs::fstat(file)
        {
            FILES.with_borrow_mut(|files| files.insert(stat.st_ino));
        }
        self.socket.as_ref().is_some_and(|socket| socket::send(socket, frame, descriptor).is_ok())
    }

    /// Sends a packet of any size to the copier.
    pub fn say_packet(&self, packet: &[u8]) {
        if let Some(socket) = &self.socket {
            let flags = rustix::net::SendFlags::DONTWAIT | rustix::net::SendFlags::NOSIGNAL;
            let _ = rustix::net::send(socket, packet, flags);
        }
    }

    /// Announces the copied-out pieces to the copier, and sends the memory file if one is given.
    /// `rest_bytes`: VRAM that the driver needs to restore the memory outside these pieces.
    pub fn copy_out(&self, pieces: &[Piece], rest_bytes: u64, file: Option<&OwnedFd>) {
        let bytes = pieces.iter().map(|piece| piece.bytes).sum();
        let many = u32::try_from(pieces.len()).unwrap();
        self.say(ToCopier::CopiedOut { bytes, rest_bytes, pieces: many, uuid: fake::UUID }, file);
        for some in pieces.chunks(PIECES_A_FRAME) {
            let mut words = [0; PIECES_A_FRAME];
            for (word, piece) in words.iter_mut().zip(some) {
                *word = piece.word().unwrap();
            }
            self.say(ToCopier::Chunks { many: some.len() as u32, words }, None);
        }
    }

    /// Announces the pieces and then the checkpoint to the copier, so that it registers the memory.
    pub fn leave(&self, pieces: &[Piece], rest_bytes: u64, file: &OwnedFd) {
        self.copy_out(pieces, rest_bytes, Some(file));
        self.say(ToCopier::Checkpointed, None);
    }

    /// Returns the messages from the copier since the last call, with their descriptors.
    pub fn received(&mut self) -> Vec<(FromCopier, Option<OwnedFd>)> {
        while let Some(Ok((frame, descriptor))) = self.socket.as_ref().map(socket::receive) {
            self.inbox.push((FromCopier::decode(&frame).unwrap(), descriptor));
        }
        std::mem::take(&mut self.inbox)
    }

    /// Returns the messages from the copier since the last call, without their descriptors.
    pub fn words(&mut self) -> Vec<FromCopier> {
        self.received().into_iter().map(|(message, _)| message).collect()
    }

    /// Returns whether the copier has closed the socket.
    pub fn is_hung_up(&mut self) -> bool {
        let Some(socket) = &self.socket else { return true };
        loop {
            match socket::receive(socket) {
                Ok((frame, descriptor)) => {
                    self.inbox.push((FromCopier::decode(&frame).unwrap(), descriptor));
                }
                Err(error) => return error.kind() != io::ErrorKind::WouldBlock,
            }
        }
    }

    /// Closes the agent's end of the socket, as the kernel does when a process exits.
    pub fn hang_up(&mut self) {
        self.socket = None;
    }
}

/// Returns pieces with these sizes, given in units.
pub fn pieces(units: &[u64]) -> Vec<Piece> {
    units.iter().map(|units| Piece { bytes: units * UNIT, rdma: false }).collect()
}

/// Returns the content of all blocks that an agent received, in order.
pub fn content_of_blocks(received: &[(FromCopier, Option<OwnedFd>)]) -> Vec<u8> {
    let mut content = Vec::new();
    for (message, block) in received {
        if matches!(message, FromCopier::Block { .. }) {
            content.extend_from_slice(&fake::content(block.as_ref().unwrap().as_fd()).unwrap());
        }
    }
    content
}

/// Returns content of consecutive pieces with these sizes. Each byte of a piece is the piece's
/// number of units.
pub fn full_of_units(units: &[u64]) -> Vec<u8> {
    let mut content = Vec::new();
    for many in units {
        content.resize(content.len() + (many * UNIT) as usize, *many as u8);
    }
    content
}
