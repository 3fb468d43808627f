//! One process that is away, or about to be.
//!
//! ```text
//! New ──Parked, Pieces──> Listing ──Away──> Registering ──all are──> Held
//!  │                        ^    ^                                    │ Fill and Restoring, whichever
//!  │ Prepared               │    │ all copied                         v is second
//!  v                        │    └── Taking <──Take── (Listing) ... Filling ──> Filled ──hangs up──> gone
//! Prepared ──Parked, Pieces─┘
//! ```
//!
//! The memory of one that is prepared is registered as soon as nobody is waited for, from then on.
//!
//! From everywhere: whoever says what does not fit, is too slow, or is refused by the driver is hung up
//! on, and brings itself home.

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

/// Left to the driver, beside what it is known to need, until it has restored the process: a
/// restore without room loses it.
const MARGIN_BYTES: u64 = 1 << 30;

/// Frames that are read from one process before others have their turn.
const FRAMES_AT_ONCE: usize = 64;
/// How long a fill may take beside its copies, and who is filled may take to hang up.
const FILL_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the next piece may take that is handed over.
const BETWEEN: Duration = Duration::from_secs(2);
/// The slowest bus that is waited for.
const BYTES_A_SECOND: u64 = 1 << 30;

/// Why a process is hung up on.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// It hung up.
    #[error("the process hung up")]
    HungUp,
    /// Its socket.
    #[error("its socket failed")]
    Io(#[source] io::Error),
    /// What it said.
    #[error("it sent no message")]
    Frame(#[from] FrameError),
    /// Not at this time.
    #[error("it sent a message that does not fit what it said before")]
    Order,
    /// Pieces or bytes beyond what the controller knows of it, or of another device.
    #[error("it says to have parked {bytes} bytes in {pieces} pieces, of at most {most_bytes}")]
    Claim {
        /// What it says.
        bytes: u64,
        /// What it says.
        pieces: u32,
        /// What it can have.
        most_bytes: u64,
    },
    /// Its file.
    #[error("its memory file is refused")]
    Region(#[from] RegionError),
    /// The driver.
    #[error("the driver refused")]
    Cuda(#[from] CudaError),
    /// What it has handed over.
    #[error("what it handed over cannot be copied out")]
    HandedOver(#[source] CudaError),
    /// It is to be filled and has not told everything, or not all is registered.
    #[error("it is not held yet")]
    NotHeld,
    /// It does not take what is there for it, or there is no room.
    #[error("it was not filled, or did not hang up then, in time")]
    Late,
}

impl SessionError {
    /// Whether the context may be of no use any more.
    pub fn is_fatal(&self) -> bool {
        match self {
            SessionError::Cuda(error) | SessionError::Region(RegionError::Cuda(error)) => {
                !error.is_passing()
            }
            _ => false,
        }
    }
}

/// What a step came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionStep {
    /// There is more to do at once.
    More,
    /// Something on the device has to end first.
    Soon,
    /// Something else has to happen in time.
    Later,
    /// Nothing to do before something is heard.
    Nothing,
}

#[derive(Debug)]
enum SessionState {
    /// Nothing was told yet.
    New,
    /// Its file is known, and it is home.
    Prepared,
    /// So many more pieces follow; or all are there, and it is not away yet.
    Listing(u32),
    /// It hands its pieces over, to be copied out.
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

/// A process. Fields are dropped in this order: copies before what they copy.
#[derive(Debug)]
pub struct ProcessSession {
    process: u64,
    most_bytes: u64,
    state: SessionState,
    copies: Option<CopyStream>,
    blocks: Vec<DeviceBlock>,
    /// Where in the region the next one begins.
    offset: usize,
    /// How many of them were handed over.
    shared: usize,
    region: Option<HostRegion>,
    /// The region was told of before anything was in it.
    prepared: bool,
    /// All of the region is registered.
    registered: bool,
    /// What the pieces come to.
    copied_out_bytes: u64,
    pieces: Vec<Piece>,
    rest_bytes: u64,
    sharing: ContentSharing<SharedSegment>,
    /// The controller has granted its room.
    granted: bool,
    restoring: bool,
    restored: bool,
    cuda: Rc<CudaDriver>,
    socket: OwnedFd,
}

impl ProcessSession {
    /// Nothing is known yet but who it is, what it can have parked and with whom it may share.
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
            granted: false,
            restoring: false,
            restored: false,
            cuda: Rc::clone(cuda),
            socket,
        }
    }

    /// The controller's number.
    pub fn process(&self) -> u64 {
        self.process
    }

    /// Where it is heard.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Whether somebody waits for this one.
    pub fn is_urgent(&self) -> bool {
        matches!(self.state, SessionState::Filling { .. } | SessionState::CopyingOut(_))
    }

    /// Whether it waits to come home.
    pub fn is_filling(&self) -> bool {
        matches!(self.state, SessionState::Filling { .. })
    }

    /// Whether its memory is being registered, which takes a little VRAM.
    pub fn is_registering(&self) -> bool {
        matches!(self.state, SessionState::Registering) || (self.prepared && !self.registered)
    }

    /// Takes in what it has said, or a part of it.
    ///
    /// # Errors
    /// [`SessionError`]: it is to be hung up on.
    pub fn hear(&mut self) -> Result<(), SessionError> {
        for _ in 0..FRAMES_AT_ONCE {
            let (frame, descriptor) = match socket::receive(&self.socket) {
                Ok(received) => received,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    return Err(SessionError::HungUp);
                }
                Err(error) => return Err(SessionError::Io(error)),
            };
            match (ToCopier::decode(&frame)?, descriptor, &mut self.state) {
                (ToCopier::Prefaulted { bytes, uuid }, Some(file), SessionState::New) => {
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
                    match (&self.region, file) {
                        (None, Some(file)) => {
                            self.region = Some(HostRegion::map(&self.cuda, file, bytes)?);
                        }
                        (Some(region), None) if bytes <= region.bytes() as u64 => {}
                        _ => return Err(SessionError::Order),
                    }
                    (self.rest_bytes, self.copied_out_bytes) = (rest_bytes, bytes);
                    self.state = SessionState::Listing(pieces);
                }
                (ToCopier::CopyOut, Some(shared), SessionState::Listing(0)) if self.registered => {
                    self.state = SessionState::CopyingOut(CopyOutBatch::begin(&self.cuda)?);
                    self.take(&shared)?;
                }
                (ToCopier::CopyOut, Some(shared), SessionState::CopyingOut(_)) => {
                    self.take(&shared)?
                }
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
                (ToCopier::Restoring, None, _) if !self.restoring => {
                    // Who comes home before its memory is ready need not wait to learn it.
                    if !matches!(self.state, SessionState::Registered) {
                        return Err(SessionError::NotHeld);
                    }
                    self.restoring = true;
                    self.sharing.close();
                    self.begin()?;
                }
                (ToCopier::Restored, None, _) if self.restoring && !self.restored => {
                    self.restored = true;
                }
                (ToCopier::Mapped { chunk, taken }, None, SessionState::Registered) => {
                    self.mapped(chunk as usize, taken)?;
                }
                _ => return Err(SessionError::Order),
            }
        }
        Ok(())
    }

    fn check(&self, bytes: u64, pieces: u32, uuid: [u8; 16]) -> Result<(), SessionError> {
        let most_bytes = self.most_bytes;
        let fits = bytes <= most_bytes
            && (1..=MAX_PIECES).contains(&(pieces as usize))
            && uuid == self.cuda.uuid();
        if fits { Ok(()) } else { Err(SessionError::Claim { bytes, pieces, most_bytes }) }
    }

    /// Begins to copy the next piece out. What it hands over may be anything: that the driver
    /// refuses it says nothing about the context.
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
        let sum: u64 = self.pieces.iter().map(|piece| piece.bytes).sum();
        if sum == self.copied_out_bytes { Ok(()) } else { Err(SessionError::Order) }
    }

    /// So much room is granted.
    ///
    /// # Errors
    /// [`SessionError`]: it is to be hung up on, and brings itself home.
    pub fn grant(&mut self, most_bytes: u64) -> Result<(), SessionError> {
        if self.copied_out_bytes > most_bytes {
            let (bytes, pieces) = (self.copied_out_bytes, self.pieces.len() as u32);
            return Err(SessionError::Claim { bytes, pieces, most_bytes });
        }
        self.granted = true;
        self.sharing.end();
        self.begin()
    }

    /// Begins to fill once the room is granted and the process restores: neither alone is enough,
    /// as the one may be late, and the other come from anybody.
    fn begin(&mut self) -> Result<(), SessionError> {
        if !(self.granted && self.restoring) {
            return Ok(());
        }
        if !matches!(self.state, SessionState::Registered) {
            return Err(SessionError::NotHeld);
        }
        self.copies = Some(CopyStream::begin(&self.cuda)?);
        self.state = SessionState::Filling { since: clock::now() };
        if self.tell(FromCopier::Begin, None)? { Ok(()) } else { Err(SessionError::Late) }
    }

    /// Does the next thing, and says what there is to report.
    ///
    /// # Errors
    /// [`SessionError`]: it is to be hung up on.
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
                    // It did not wait for this, and copies by itself.
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
        // The memory goes with the last hold of it: this one's is gone when the process hears.
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

    /// Begins to fill the block just made.
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

    /// Hands the next block over: one that is filled, so that nobody sees what was there before,
    /// and not before the process reads, because a handle on its way keeps the memory. False:
    /// there is none, or the process has to read first.
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

    /// What is left of it once it is gone, to be let go of piece by piece.
    pub fn into_region(self) -> Option<HostRegion> {
        self.region
    }

    /// False: it has to read first.
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
