//! The copier's session with one process that is offloaded or about to be offloaded.
//!
//! ```text
//! New ──CopiedOut, Chunks──> Listing ──Checkpointed──> Registering ─all done──> Registered
//!  │                         ^    ^                        Fill and Restoring, in any order │
//!  │ Prefaulted              │    │ all copied                                              v
//!  v                         │    └── CopyingOut <──CopyOut── (Listing)      Filled <── Filling
//! Prepared ─CopiedOut, Chunks┘                                                │
//!                                                                             └─ closed ──> end
//! ```
//!
//! Fill is an order of the controller. The other words on arrows that begin with a capital letter
//! are messages of the process. The memory of a Prepared process is registered as soon as no other
//! process waits.
//!
//! In each state, the copier closes the connection if a message is not allowed, if the process is
//! too slow, or if the driver fails. The process then restores itself.

mod sharing;

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    rc::Rc,
    time::{Duration, Instant},
};

use affinode_proto::wire::{
    copier::{CopierReport, FromCopier, MAX_PIECES, Piece, ToCopier},
    message::FrameError,
};

use self::sharing::ContentSharing;
use crate::{
    clock,
    copy_out::CopyOutBatch,
    socket,
    sys::{
        CopyDirection, CopyStream, CudaDriver, CudaError, DeviceBlock, HostRegion, RegionError,
        SharedSegment,
    },
};

/// VRAM in bytes that the copier leaves free during a fill until the driver has restored the
/// process. This is in addition to the VRAM that the driver is known to need. A restore without
/// enough VRAM loses the process.
const MARGIN_BYTES: u64 = 1 << 30;

/// Maximum number of messages that the copier reads from one process before it serves other
/// processes.
const FRAMES_AT_ONCE: usize = 64;
/// Time limit of a fill (the copy back into VRAM) and of a copy out. The time that the copies take
/// at [`BYTES_A_SECOND`] is added to it. After a fill, it is also the time limit for the process to
/// close its socket.
const FILL_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit for the arrival of the next exported piece, counted from the arrival of the previous
/// piece.
const BETWEEN: Duration = Duration::from_secs(2);
/// Assumed minimum bandwidth of copies, in bytes per second. The time limits of copies are computed
/// from it.
const BYTES_A_SECOND: u64 = 1 << 30;

/// Reason why the copier closes the connection to a process.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// The process has closed its socket.
    #[error("the process closed its socket")]
    HungUp,
    /// Receiving from the process or sending to it has failed.
    #[error("the copier cannot receive messages from the process, or send messages to it")]
    Io(#[source] io::Error),
    /// The process has sent an invalid frame.
    #[error("the process sent an invalid frame")]
    Frame(#[from] FrameError),
    /// The process has sent a message that is not allowed in the session's current state.
    #[error("the process sent a message that is not allowed at this point of the session")]
    Order,
    /// The process has announced too many pieces, more bytes than the controller allows, or another
    /// GPU than the copier's.
    #[error(
        "the process announced {bytes} bytes in {pieces} pieces; accepted: at most {most_bytes} \
         bytes in at most {MAX_PIECES} pieces, on the copier's GPU"
    )]
    Claim {
        /// Number of bytes that the process announced.
        bytes: u64,
        /// Number of pieces that the process announced.
        pieces: u32,
        /// Maximum number of bytes that the controller allows the process.
        most_bytes: u64,
    },
    /// The process's memory file does not meet the requirements for mapping and registering it.
    #[error("cannot use the memory file of the process")]
    Region(#[from] RegionError),
    /// The driver has refused a call.
    #[error("a call of the CUDA driver failed")]
    Cuda(#[from] CudaError),
    /// The driver cannot import or copy a piece that the process has exported.
    #[error("cannot copy out the memory that the process exported")]
    HandedOver(#[source] CudaError),
    /// The process needs its restore now, but the driver has not registered all of its memory yet.
    #[error("the restore came before the copier had registered the memory of the process")]
    NotHeld,
    /// A time limit has expired: the copies were slow, VRAM for the process was missing, or the
    /// process did not send or read its messages.
    #[error(
        "the time limit passed, because the copy was slow, VRAM was missing, or the process did \
         not send or read its messages"
    )]
    Late,
}

impl SessionError {
    /// Returns whether the CUDA context may be unusable after this error.
    pub fn is_fatal(&self) -> bool {
        match self {
            SessionError::Cuda(error) | SessionError::Region(RegionError::Cuda(error)) => {
                !error.is_passing()
            }
            _ => false,
        }
    }
}

/// Tells the main loop when the next step of a session can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionStep {
    /// The next step can run at once.
    More,
    /// The next step can run after the GPU has completed a copy.
    Soon,
    /// The next step can run after the process has replied or closed its socket. The process has a
    /// time limit for this.
    Later,
    /// The next step can run only after a message has arrived.
    Nothing,
}

impl SessionStep {
    /// Returns whichever of the two steps can run earlier.
    pub fn sooner(self, other: SessionStep) -> SessionStep {
        match (self, other) {
            (SessionStep::More, _) | (_, SessionStep::More) => SessionStep::More,
            (SessionStep::Soon, _) | (_, SessionStep::Soon) => SessionStep::Soon,
            (SessionStep::Later, _) | (_, SessionStep::Later) => SessionStep::Later,
            _ => SessionStep::Nothing,
        }
    }
}

#[derive(Debug)]
enum SessionState {
    /// The process is attached, but has announced nothing yet.
    New,
    /// The process has sent its memory file (prefaulted), and is still resident on the GPU.
    Prepared,
    /// The process is sending the list of its pieces. Contains the number of pieces that are not
    /// listed yet. 0: all pieces are listed, but the process is not checkpointed yet.
    Listing(u32),
    /// The process is exporting its pieces, and the GPU copies them out.
    CopyingOut(CopyOutBatch),
    Registering,
    Registered,
    Filling {
        since: Instant,
    },
    Filled {
        at: Instant,
    },
}

/// The copier's session with one process. Fields are dropped in the order of their declaration, so
/// that copies end before the memory that they use is freed.
#[derive(Debug)]
pub struct ProcessSession {
    process: u64,
    most_bytes: u64,
    state: SessionState,
    copies: Option<CopyStream>,
    blocks: Vec<DeviceBlock>,
    /// Offset in the memory file at which the next copy into VRAM begins, in bytes.
    offset: usize,
    /// Number of filled blocks that the copier has exported to the process so far.
    shared: usize,
    region: Option<HostRegion>,
    /// Whether the process was prefaulted: it sent its memory file before the file had content.
    prepared: bool,
    /// Whether the driver has registered the whole region.
    registered: bool,
    /// Total size of all pieces, in bytes.
    copied_out_bytes: u64,
    pieces: Vec<Piece>,
    rest_bytes: u64,
    sharing: ContentSharing<SharedSegment>,
    /// VRAM in bytes that the controller has granted for the fill. The grant may arrive before the
    /// process announces its pieces.
    granted_bytes: Option<u64>,
    restoring: bool,
    restored: bool,
    cuda: Rc<CudaDriver>,
    socket: OwnedFd,
}

impl ProcessSession {
    /// Creates a session that has received no messages yet. `most_bytes` limits what the process
    /// may copy out, and `domain` is its dedup domain.
    pub fn new(
        cuda: &Rc<CudaDriver>,
        socket: OwnedFd,
        process: u64,
        most_bytes: u64,
        domain: u64,
    ) -> ProcessSession {
        ProcessSession {
            process,
            most_bytes,
            state: SessionState::New,
            copies: None,
            blocks: Vec::new(),
            offset: 0,
            shared: 0,
            region: None,
            prepared: false,
            registered: false,
            copied_out_bytes: 0,
            pieces: Vec::new(),
            rest_bytes: 0,
            sharing: ContentSharing::of(domain),
            granted_bytes: None,
            restoring: false,
            restored: false,
            cuda: Rc::clone(cuda),
            socket,
        }
    }

    /// Returns the number that the controller has assigned to the process.
    pub fn process(&self) -> u64 {
        self.process
    }

    /// Returns the copier's end of the socket to the process.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Returns whether the process waits for the copier's copies, in its restore or in its
    /// checkpoint.
    pub fn is_urgent(&self) -> bool {
        matches!(self.state, SessionState::Filling { .. } | SessionState::CopyingOut(_))
    }

    /// Returns whether the process waits for its memory to be copied back into VRAM.
    pub fn is_filling(&self) -> bool {
        matches!(self.state, SessionState::Filling { .. })
    }

    /// Returns whether the driver is registering the memory of the process, for which it allocates
    /// a little VRAM.
    pub fn is_registering(&self) -> bool {
        matches!(self.state, SessionState::Registering) || (self.prepared && !self.registered)
    }

    /// Reads and handles messages of the process, at most [`FRAMES_AT_ONCE`].
    ///
    /// # Errors
    /// [`SessionError`]: the connection must be closed.
    pub fn receive(&mut self) -> Result<(), SessionError> {
        for _ in 0..FRAMES_AT_ONCE {
            let (frame, descriptor) = match socket::receive(&self.socket) {
                Ok(received) => received,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    return Err(SessionError::HungUp);
                }
                Err(error) => return Err(SessionError::Io(error)),
            };
            self.handle(ToCopier::decode(&frame)?, descriptor)?;
        }
        Ok(())
    }

    /// Handles a message of the process, if the message is allowed in the session's current state.
    fn handle(
        &mut self,
        message: ToCopier,
        descriptor: Option<OwnedFd>,
    ) -> Result<(), SessionError> {
        match (message, descriptor, &self.state) {
            (ToCopier::Prefaulted { bytes, uuid }, Some(file), SessionState::New) => {
                // The number of pieces is announced later. 1 passes the check.
                self.check(bytes, 1, uuid)?;
                self.region = Some(HostRegion::map(&self.cuda, file, bytes)?);
                self.prepared = true;
                self.state = SessionState::Prepared;
            }
            (
                ToCopier::CopiedOut { bytes, rest_bytes, pieces, uuid },
                file,
                SessionState::New | SessionState::Prepared,
            ) => {
                self.check(bytes, pieces, uuid)?;
                self.have_region(file, bytes)?;
                (self.rest_bytes, self.copied_out_bytes) = (rest_bytes, bytes);
                self.state = SessionState::Listing(pieces);
            }
            (ToCopier::CopyOut, Some(shared), SessionState::Listing(0)) if self.registered => {
                self.state = SessionState::CopyingOut(CopyOutBatch::begin(&self.cuda)?);
                self.take(&shared)?;
            }
            (ToCopier::CopyOut, Some(shared), SessionState::CopyingOut(_)) => self.take(&shared)?,
            (ToCopier::Chunks { many, words }, None, SessionState::Listing(missing)) => {
                let missing = missing.checked_sub(many).ok_or(SessionError::Order)?;
                if many == 0 {
                    return Err(SessionError::Order);
                }
                for word in words.iter().take(many as usize) {
                    self.pieces.push(Piece::from_word(*word).ok_or(SessionError::Order)?);
                }
                self.listed(missing)?;
            }
            (ToCopier::Checkpointed, None, SessionState::Listing(0)) => {
                self.state = SessionState::Registering
            }
            (ToCopier::Restoring, None, _) if !self.restoring => self.restore()?,
            (ToCopier::Restored, None, _) if self.restoring && !self.restored => {
                self.restored = true;
            }
            (ToCopier::Mapped { chunk, taken }, None, SessionState::Registered) => {
                self.mapped(chunk as usize, taken)?;
            }
            _ => return Err(SessionError::Order),
        }
        Ok(())
    }

    /// Maps the memory file that the process sends with its message CopiedOut. A prefaulted process
    /// sent its file earlier and must send none now. The file that it sent must be mapped with at
    /// least `bytes` bytes.
    fn have_region(&mut self, file: Option<OwnedFd>, bytes: u64) -> Result<(), SessionError> {
        match (&self.region, file) {
            (None, Some(file)) => {
                self.region = Some(HostRegion::map(&self.cuda, file, bytes)?);
                Ok(())
            }
            (Some(region), None) if bytes <= region.bytes() as u64 => Ok(()),
            _ => Err(SessionError::Order),
        }
    }

    /// Records that the process waits to be restored, and starts the fill if VRAM for it is
    /// granted.
    fn restore(&mut self) -> Result<(), SessionError> {
        // If the memory is not registered yet, the process must not wait for the registration: the
        // error ends the session, and the process restores itself.
        if !matches!(self.state, SessionState::Registered) {
            return Err(SessionError::NotHeld);
        }
        self.restoring = true;
        // The process sends no more replies about shared chunks.
        self.sharing.close();
        self.begin()
    }

    fn check(&self, bytes: u64, pieces: u32, uuid: [u8; 16]) -> Result<(), SessionError> {
        let most_bytes = self.most_bytes;
        let fits = bytes <= most_bytes
            && (1..=MAX_PIECES).contains(&(pieces as usize))
            && uuid == self.cuda.uuid();
        if fits { Ok(()) } else { Err(SessionError::Claim { bytes, pieces, most_bytes }) }
    }

    /// Starts to copy out the next piece, from the descriptor with which the process exported it.
    /// The process chooses the descriptor, so the driver may refuse it. The context stays usable
    /// then.
    fn take(&mut self, shared: &OwnedFd) -> Result<(), SessionError> {
        let (SessionState::CopyingOut(taking), Some(region)) = (&mut self.state, &self.region)
        else {
            return Err(SessionError::Order);
        };
        let piece = self.pieces.get(taking.many()).ok_or(SessionError::Order)?;
        taking.take(&self.cuda, region, shared, piece.bytes).map_err(SessionError::HandedOver)
    }

    fn listed(&mut self, missing: u32) -> Result<(), SessionError> {
        self.state = SessionState::Listing(missing);
        if missing > 0 {
            return Ok(());
        }
        // The announced sum was checked against the controller's limit. The sum of the pieces must
        // be the same.
        let sum: u64 = self.pieces.iter().map(|piece| piece.bytes).sum();
        if sum == self.copied_out_bytes { Ok(()) } else { Err(SessionError::Order) }
    }

    /// Records that the controller has granted VRAM for the fill, and starts the fill if the
    /// process waits for it.
    ///
    /// # Errors
    /// [`SessionError`]: the connection must be closed, and the process restores itself.
    pub fn grant(&mut self, most_bytes: u64) -> Result<(), SessionError> {
        self.within_grant(most_bytes)?;
        self.granted_bytes = Some(most_bytes);
        // The process gets no new offers of shared content. A reply to an earlier offer may still
        // arrive before Restoring.
        self.sharing.end();
        self.begin()
    }

    /// Returns an error if the pieces are together larger than the VRAM that the controller has
    /// granted.
    fn within_grant(&self, most_bytes: u64) -> Result<(), SessionError> {
        if self.copied_out_bytes <= most_bytes {
            return Ok(());
        }
        let (bytes, pieces) = (self.copied_out_bytes, self.pieces.len() as u32);
        Err(SessionError::Claim { bytes, pieces, most_bytes })
    }

    /// Starts the fill once the controller has granted the VRAM and the process has sent Restoring.
    /// Restoring alone does not suffice, because any process can send it. The size of the pieces is
    /// checked again here, because the grant may arrive before the process announces its pieces.
    fn begin(&mut self) -> Result<(), SessionError> {
        let (Some(granted_bytes), true) = (self.granted_bytes, self.restoring) else {
            return Ok(());
        };
        self.within_grant(granted_bytes)?;
        if !matches!(self.state, SessionState::Registered) {
            return Err(SessionError::NotHeld);
        }
        self.copies = Some(CopyStream::begin(&self.cuda)?);
        self.state = SessionState::Filling { since: clock::now() };
        if self.tell(FromCopier::Begin, None)? { Ok(()) } else { Err(SessionError::Late) }
    }

    /// Runs the next step of the session. Returns when the following step can run, and a report for
    /// the controller if there is one.
    ///
    /// # Errors
    /// [`SessionError`]: the connection must be closed.
    pub fn step(&mut self) -> Result<(SessionStep, Option<CopierReport>), SessionError> {
        match (&self.state, &mut self.region) {
            (SessionState::CopyingOut(_), _) => self.take_next(),
            (SessionState::Prepared | SessionState::Listing(_), Some(region))
                if self.prepared && !self.registered =>
            {
                if region.register_next()? {
                    return Ok((SessionStep::More, None));
                }
                self.registered = true;
                if !matches!(self.state, SessionState::Prepared) {
                    // The process has announced its pieces before the registration ended: it copies
                    // its memory out itself.
                    return Ok((SessionStep::Nothing, None));
                }
                let (process, bytes) = (self.process, region.bytes() as u64);
                self.tell(FromCopier::Ready, None)?;
                Ok((SessionStep::Nothing, Some(CopierReport::Prefaulted { process, bytes })))
            }
            (SessionState::Registering, Some(region)) => {
                if region.register_next()? {
                    return Ok((SessionStep::More, None));
                }
                self.registered = true;
                let (process, bytes) = (self.process, self.copied_out_bytes);
                self.state = SessionState::Registered;
                self.sharing.open();
                Ok((SessionStep::Nothing, Some(CopierReport::Registered { process, bytes })))
            }
            (SessionState::Filling { since }, Some(region)) => {
                let since = *since;
                let copying = Duration::from_secs(region.bytes() as u64 / BYTES_A_SECOND);
                if clock::since(since) > FILL_TIMEOUT + copying {
                    return Err(SessionError::Late);
                }
                self.fill_next(since)
            }
            (SessionState::Filled { at }, _) if clock::since(*at) > FILL_TIMEOUT => {
                Err(SessionError::Late)
            }
            (SessionState::Filled { .. }, _) => Ok((SessionStep::Later, None)),
            _ => Ok((SessionStep::Nothing, None)),
        }
    }

    fn take_next(&mut self) -> Result<(SessionStep, Option<CopierReport>), SessionError> {
        let SessionState::CopyingOut(taking) = &self.state else {
            return Err(SessionError::Order);
        };
        let elapsed = clock::since(taking.since());
        if elapsed > FILL_TIMEOUT + Duration::from_secs(self.copied_out_bytes / BYTES_A_SECOND) {
            return Err(SessionError::Late);
        }
        let all = taking.many() == self.pieces.len();
        if !all && clock::since(taking.last()) > BETWEEN {
            return Err(SessionError::Late);
        }
        if !(all && taking.is_over().map_err(SessionError::HandedOver)?) {
            return Ok((SessionStep::Soon, None));
        }
        // Drops the blocks before the message is sent. Device memory is freed with its last
        // reference, and after Copied the process expects that closing its own descriptors frees
        // the memory.
        self.state = SessionState::Listing(0);
        if !self.tell(FromCopier::Copied, None)? {
            return Err(SessionError::Late);
        }
        let (process, bytes) = (self.process, self.copied_out_bytes);
        let elapsed_us = u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX);
        Ok((SessionStep::More, Some(CopierReport::Copied { process, bytes, elapsed_us })))
    }

    fn fill_next(
        &mut self,
        since: Instant,
    ) -> Result<(SessionStep, Option<CopierReport>), SessionError> {
        let told = self.share_next()?;
        let index = self.blocks.len();
        if let Some(piece) = self.pieces.get(index).copied() {
            let kept = if self.restored { 0 } else { self.rest_bytes.saturating_add(MARGIN_BYTES) };
            // The driver restores the process at the same time, and a restore without VRAM loses
            // the process. Until Restored, the VRAM that the driver needs therefore stays free.
            let has_room = self.cuda.free_bytes()? >= piece.bytes.saturating_add(kept);
            if !has_room && !self.restored {
                return Ok((SessionStep::Soon, None));
            }
            self.blocks.push(DeviceBlock::make(&self.cuda, piece.bytes, piece.rdma)?);
            self.copy(index)?;
            return Ok((SessionStep::More, None));
        }
        if self.shared < self.pieces.len() {
            return Ok((if told { SessionStep::More } else { SessionStep::Soon }, None));
        }
        if !self.tell(FromCopier::Filled, None)? {
            return Ok((SessionStep::Soon, None));
        }
        self.state = SessionState::Filled { at: clock::now() };
        let bytes = self.pieces.iter().map(|piece| piece.bytes).sum();
        let elapsed_us = u64::try_from(clock::since(since).as_micros()).unwrap_or(u64::MAX);
        let report = CopierReport::Filled { process: self.process, bytes, elapsed_us };
        Ok((SessionStep::Later, Some(report)))
    }

    /// Starts to copy the content of a piece into the block that was created last.
    fn copy(&mut self, index: usize) -> Result<(), SessionError> {
        let (Some(region), Some(copies)) = (&self.region, &mut self.copies) else {
            return Err(SessionError::NotHeld);
        };
        let (Some(block), Some(piece)) = (self.blocks.get(index), self.pieces.get(index)) else {
            return Err(SessionError::NotHeld);
        };
        let bytes = piece.bytes as usize;
        region.copy(CopyDirection::In, self.offset, block, bytes, copies)?;
        self.offset += bytes;
        Ok(())
    }

    /// Exports the next block of device memory to the process. The block must be filled first:
    /// otherwise the process would see the earlier content of this memory. The process must also
    /// have sent Restored. Before Restored it does not read its socket, and a descriptor in the
    /// socket would keep the memory allocated. Returns false if no block is ready, or if the
    /// process must read its messages first.
    fn share_next(&mut self) -> Result<bool, SessionError> {
        let Some(block) = self.blocks.get(self.shared).filter(|_| self.restored) else {
            return Ok(false);
        };
        if !block.is_copied()? {
            return Ok(false);
        }
        let handle = block.share()?;
        let index = u32::try_from(self.shared).map_err(|_| SessionError::Order)?;
        let told = self.tell(FromCopier::Block { index }, Some(&handle))?;
        self.shared += usize::from(told);
        Ok(told)
    }

    /// Ends the session and returns its region, which the caller unregisters later, chunk by chunk.
    pub fn into_region(self) -> Option<HostRegion> {
        self.region
    }

    /// Sends a message to the process. Returns false if the socket is full, so that the process
    /// must read first.
    fn tell(
        &self,
        message: FromCopier,
        descriptor: Option<&OwnedFd>,
    ) -> Result<bool, SessionError> {
        match socket::send(&self.socket, &message.encode(), descriptor) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(SessionError::Io(error)),
        }
    }
}
