//! Main loop of the copier. It reads messages of the controller and the agents, and runs one step
//! of work at a time. Sessions of processes that wait for the copier come first.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    rc::Rc,
    time::{Duration, Instant},
};

use affinode_proto::wire::{
    copier::{CopierOrder, CopierReport},
    message::FrameError,
};
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::{
    clock,
    dedup::DedupIndex,
    session::{ProcessSession, SessionError, SessionStep},
    socket,
    sys::{CudaDriver, CudaError, HostRegion, SegmentDraft, SharedSegment},
};

/// Process number in reports that concern no process. No process has this number.
const NO_PROCESS: u64 = 0;

/// Interval at which the copier asks the device for completed copies, in nanoseconds.
const SOON_NS: i64 = 500_000;

/// Time after which freed memory counts as scrubbed (cleared) by the GPU. This time suffices for 60
/// GiB of freed memory.
const WIPED_AFTER: Duration = Duration::from_millis(200);

/// Reason why a copier process has ended.
#[derive(Debug, thiserror::Error)]
pub enum CopierError {
    /// The copier cannot create its CUDA context.
    #[error("cannot create a CUDA context on GPU {uuid}")]
    Cuda {
        /// UUID of the GPU.
        uuid: String,
        /// Error of the driver's call.
        #[source]
        source: CudaError,
    },
    /// The controller's socket has failed.
    #[error("the copier cannot use its socket to the controller")]
    Io(#[from] io::Error),
    /// The controller has sent an invalid frame.
    #[error("the controller sent an invalid frame")]
    Frame(#[from] FrameError),
    /// The driver has refused a call, and the CUDA context is unusable.
    #[error("the copier's CUDA context is unusable")]
    Broken(#[source] Box<dyn std::error::Error>),
}

/// Runs the copier until the controller closes its socket. `uuid` is the UUID of the GPU, in NVML's
/// notation.
///
/// # Errors
/// [`CopierError`]: see its variants.
pub fn run(controller: OwnedFd, library: &str, uuid: &str) -> Result<(), CopierError> {
    if hung_up(&controller)? {
        return Ok(());
    }
    let cuda = CudaDriver::open(library, uuid)
        .map_err(|source| CopierError::Cuda { uuid: uuid.to_owned(), source })?;
    socket::send(&controller, &CopierReport::Ready.encode(), None)?;
    tracing::info!("copier {uuid}: ready");
    let mut copier = CopierServer::new(controller, cuda, DedupIndex::new());
    let mut step = SessionStep::Nothing;
    loop {
        copier.wait(step)?;
        match copier.turn()? {
            Some(next) => step = next,
            None => return Ok(()),
        }
    }
}

/// Returns whether the controller has already closed its socket. The controller may have ended
/// before the copier requested a signal for that end. The kernel then sends no signal, so the
/// copier must check the socket.
fn hung_up(controller: &OwnedFd) -> io::Result<bool> {
    let mut polled = [PollFd::new(controller, PollFlags::empty())];
    rustix::event::poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))?;
    Ok(polled[0].revents().contains(PollFlags::HUP))
}

pub(crate) struct CopierServer {
    controller: OwnedFd,
    cuda: Rc<CudaDriver>,
    clients: Vec<ProcessSession>,
    /// Memory files of ended sessions, whose memory is still registered with the driver. They are
    /// unregistered only while no process waits, because the driver executes one call at a time.
    leaving: Vec<HostRegion>,
    dedup: DedupIndex<SharedSegment>,
    /// Time at which memory was last freed. The GPU then begins to scrub (clear) it. `None`: no
    /// memory was freed since the driver last noticed the end of scrubbing.
    wiping: Option<Instant>,
    /// Whether the controller has forbidden steps that allocate VRAM.
    held: bool,
}

impl CopierServer {
    /// Creates a copier that serves no process yet.
    pub(crate) fn new(
        controller: OwnedFd,
        cuda: Rc<CudaDriver>,
        dedup: DedupIndex<SharedSegment>,
    ) -> CopierServer {
        CopierServer {
            controller,
            cuda,
            clients: Vec::new(),
            leaving: Vec::new(),
            dedup,
            wiping: None,
            held: false,
        }
    }

    /// Reads messages, then runs one step of work. Returns `None` if the controller has closed its
    /// socket.
    pub(crate) fn turn(&mut self) -> Result<Option<SessionStep>, CopierError> {
        if !self.hear_controller()? {
            return Ok(None);
        }
        self.hear_clients()?;
        let step = self.work()?;
        self.tell_shared();
        Ok(Some(step))
    }

    fn wait(&self, step: SessionStep) -> Result<(), CopierError> {
        let own = [self.controller.as_fd()];
        let sockets = own.into_iter().chain(self.clients.iter().map(ProcessSession::socket));
        let mut polled: Vec<PollFd<'_>> =
            sockets.map(|socket| PollFd::from_borrowed_fd(socket, PollFlags::IN)).collect();
        let at_most = match step {
            SessionStep::More => Some(Timespec { tv_sec: 0, tv_nsec: 0 }),
            SessionStep::Soon => Some(Timespec { tv_sec: 0, tv_nsec: SOON_NS }),
            SessionStep::Later | SessionStep::Nothing if self.wiping.is_some() && !self.held => {
                Some(Timespec { tv_sec: 0, tv_nsec: WIPED_AFTER.subsec_nanos().into() })
            }
            SessionStep::Later => Some(Timespec { tv_sec: 1, tv_nsec: 0 }),
            SessionStep::Nothing => None,
        };
        match rustix::event::poll(&mut polled, at_most.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(errno) => Err(io::Error::from(errno).into()),
        }
    }

    /// Reads and executes the controller's orders. Returns false if the controller has closed its
    /// socket.
    fn hear_controller(&mut self) -> Result<bool, CopierError> {
        loop {
            let (frame, descriptor) = match socket::receive(&self.controller) {
                Ok(received) => received,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(true),
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(false),
                Err(error) => return Err(error.into()),
            };
            match CopierOrder::decode(&frame)? {
                CopierOrder::Attach { process, most_bytes, domain } => {
                    // The controller itself attaches the process again, so it needs no report that
                    // the process's old session has ended.
                    let old = |client: &ProcessSession| client.process() == process;
                    let old: Vec<ProcessSession> =
                        self.clients.extract_if(.., |client| old(client)).collect();
                    self.dedup.forget(process);
                    self.leaving.extend(old.into_iter().filter_map(ProcessSession::into_region));
                    if let Some(socket) = descriptor {
                        let cuda = &self.cuda;
                        self.clients
                            .push(ProcessSession::new(cuda, socket, process, most_bytes, domain));
                    }
                }
                CopierOrder::Fill { process, most_bytes } => {
                    // Read messages first: they may end the session.
                    self.hear_clients()?;
                    self.each(|client| match client.process() == process {
                        true => client.grant(most_bytes),
                        false => Ok(()),
                    })?;
                }
                CopierOrder::HoldVram { on } => self.held = on,
            }
        }
    }

    fn hear_clients(&mut self) -> Result<(), CopierError> {
        self.each(ProcessSession::receive)
    }

    /// Calls `body` for each session, and ends each session for which `body` returns an error.
    /// Returns an error if the CUDA context may be unusable.
    fn each(
        &mut self,
        mut body: impl FnMut(&mut ProcessSession) -> Result<(), SessionError>,
    ) -> Result<(), CopierError> {
        let mut over = Vec::new();
        for client in &mut self.clients {
            if let Err(error) = body(client) {
                note(client.process(), &error);
                over.push(client.process());
                pass(error)?;
            }
        }
        self.end(|client| over.contains(&client.process()));
        Ok(())
    }

    fn end(&mut self, which: impl Fn(&ProcessSession) -> bool) {
        let ended: Vec<ProcessSession> =
            self.clients.extract_if(.., |client| which(client)).collect();
        let some = !ended.is_empty();
        for client in ended {
            let process = client.process();
            self.leaving.extend(client.into_region());
            self.dedup.forget(process);
            self.report(CopierReport::Detached { process });
        }
        if some && self.leaving.is_empty() {
            self.report(CopierReport::Released);
        }
    }

    /// Reports the sizes of shared content to the controller, if they have changed.
    fn tell_shared(&mut self) {
        let (stored_bytes, changed) = self.dedup.report();
        let of = |client: &mut ProcessSession| {
            client.shared_bytes().map(|bytes| (client.process(), bytes))
        };
        let told: Vec<(u64, u64)> = self.clients.iter_mut().filter_map(of).collect();
        for (process, bytes) in &told {
            let (process, bytes) = (*process, *bytes);
            self.report(CopierReport::Shared { process, bytes, stored_bytes });
        }
        if changed && told.is_empty() {
            self.report(CopierReport::Shared { process: NO_PROCESS, bytes: 0, stored_bytes });
        }
    }

    /// Runs a step for each session whose process waits for the copier. If no process waits, runs
    /// one step of one other session.
    fn work(&mut self) -> Result<SessionStep, CopierError> {
        let urgent = self.clients.iter().any(ProcessSession::is_urgent);
        let most = self.step_sessions(urgent)?;
        // The host memory of ended sessions may be needed elsewhere, so its release waits only for
        // sessions that copy memory back into VRAM.
        let free =
            !self.clients.iter().any(ProcessSession::is_filling) && most != SessionStep::More;
        if free && self.release_next()? {
            return Ok(SessionStep::More);
        }
        // Deduplication, and the small allocation that makes the driver notice the end of
        // scrubbing, run only while no process waits.
        let busy = urgent || self.held || self.clients.iter().any(ProcessSession::is_registering);
        if !busy && matches!(most, SessionStep::Nothing | SessionStep::Later) {
            let step = self.tidy_memory()?;
            if step != SessionStep::Nothing {
                return Ok(step);
            }
        }
        // Other sessions get a step only after the urgent ones have nothing to do.
        let over = urgent && matches!(most, SessionStep::Nothing | SessionStep::Later);
        Ok(if over { SessionStep::More } else { most })
    }

    /// Runs a step for each urgent session, or one step of one session that is not urgent. Sends
    /// the reports of these steps, and ends the sessions whose step failed. Returns when the next
    /// step of these sessions can run.
    fn step_sessions(&mut self, urgent: bool) -> Result<SessionStep, CopierError> {
        let held = self.held;
        let (mut most, mut over, mut reports) = (SessionStep::Nothing, Vec::new(), Vec::new());
        for client in self.clients.iter_mut().filter(|client| client.is_urgent() == urgent) {
            // A registration takes VRAM. While the copier is held, the controller reads NVML to
            // check how much VRAM is free, so nothing may take VRAM.
            if held && client.is_registering() {
                continue;
            }
            match client.step() {
                Ok((step, report)) => {
                    reports.extend(report);
                    most = most.sooner(step);
                    // Read messages after each step: a session may have become urgent meanwhile.
                    if !urgent && step == SessionStep::More {
                        break;
                    }
                }
                Err(error) => {
                    note(client.process(), &error);
                    over.push(client.process());
                    pass(error)?;
                }
            }
        }
        for report in reports {
            if matches!(report, CopierReport::Registered { .. }) {
                self.wiping = Some(clock::now());
            }
            self.report(report);
        }
        self.end(|client| over.contains(&client.process()));
        Ok(most)
    }

    /// Unregisters the next part of the memory of ended sessions. Returns false if no such memory
    /// is left.
    fn release_next(&mut self) -> Result<bool, CopierError> {
        let Some(region) = self.leaving.last_mut() else { return Ok(false) };
        let more = region.unregister_last();
        if !more.map_err(|error| CopierError::Broken(error.into()))? {
            self.leaving.pop();
            if self.leaving.is_empty() {
                self.report(CopierReport::Released);
            }
        }
        Ok(true)
    }

    /// Runs one step of memory maintenance. The step belongs to the first of these tasks that has
    /// work: unregister memory whose content is stored in a segment, look for content that several
    /// processes have, make the driver notice the end of scrubbing.
    fn tidy_memory(&mut self) -> Result<SessionStep, CopierError> {
        for client in &mut self.clients {
            if client.let_go_next().map_err(|error| CopierError::Broken(error.into()))? {
                return Ok(SessionStep::More);
            }
        }
        let finish = |draft: SegmentDraft| draft.finish(&self.cuda);
        let step = self.dedup.step(&mut self.clients, finish);
        let step = step.map_err(|error| CopierError::Broken(error.into()))?;
        if step != SessionStep::Nothing {
            return Ok(step);
        }
        if self.wiping.take_if(|since| clock::since(*since) >= WIPED_AFTER).is_some() {
            self.cuda.take_note();
        }
        Ok(SessionStep::Nothing)
    }

    /// Sends a report to the controller. Errors are ignored, because a controller that does not
    /// read will close its socket soon.
    fn report(&self, report: CopierReport) {
        let _ = socket::send(&self.controller, &report.encode(), None);
    }
}

/// Decides whether the error of a session ends the whole copier. Returns [`CopierError::Broken`] if
/// the CUDA context may be unusable, otherwise `Ok`: the error then ends only its session.
fn pass(error: SessionError) -> Result<(), CopierError> {
    if error.is_fatal() { Err(CopierError::Broken(error.into())) } else { Ok(()) }
}

fn note(process: u64, error: &SessionError) {
    if matches!(error, SessionError::HungUp) {
        return;
    }
    let error: &dyn std::error::Error = error;
    tracing::warn!(
        error,
        "process {process}: connection closed; the process restores its memory without the copier"
    );
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType};

    use super::*;

    const NO_LIBRARY: &str = "/nonexistent/libcuda.so.1";

    #[test]
    fn late_copier_ends_without_a_context() {
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
                .unwrap();
        let said = run(ours.try_clone().unwrap(), NO_LIBRARY, "GPU-1");
        assert!(matches!(said, Err(CopierError::Cuda { .. })), "the controller waits: {said:?}");
        drop(theirs);
        run(ours, NO_LIBRARY, "GPU-1").unwrap();
    }
}
