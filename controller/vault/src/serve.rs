//! The loop: hears the controller and the agents, and does a little of what there is to do. Who is
//! waited for comes first.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    rc::Rc,
    time::{Duration, Instant},
};

use affinode_proto::wire::{
    message::FrameError,
    vault::{VaultOrder, VaultReport},
};
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::{
    client::{Client, ClientError, Step},
    clock,
    dedup::Dedup,
    socket,
    sys::{Cuda, CudaError, Draft, Region, Segment},
};

/// No process has this number.
const NOBODY: u64 = 0;

/// How often the device is asked whether copies have ended.
const SOON_NS: i64 = 500_000;

/// By then 60 GiB that were released are wiped.
const WIPED_AFTER: Duration = Duration::from_millis(200);

/// Why a vault ended.
#[derive(Debug, thiserror::Error)]
pub enum VaultError {
    /// No context.
    #[error("no context on the GPU {uuid}")]
    Cuda {
        /// Which.
        uuid: String,
        /// Why.
        #[source]
        source: CudaError,
    },
    /// The controller's socket.
    #[error("the controller cannot be heard")]
    Io(#[from] io::Error),
    /// What came on it.
    #[error("the controller said something else than an order")]
    Frame(#[from] FrameError),
    /// The driver refused in a way that does not pass.
    #[error("the context is of no use any more")]
    Broken(#[source] Box<dyn std::error::Error>),
}

/// Serves until the controller hangs up. `uuid` is the GPU's, as NVML writes it.
///
/// # Errors
/// [`VaultError`]
pub fn run(controller: OwnedFd, library: &str, uuid: &str) -> Result<(), VaultError> {
    if hung_up(&controller)? {
        return Ok(());
    }
    let cuda = Cuda::open(library, uuid)
        .map_err(|source| VaultError::Cuda { uuid: uuid.to_owned(), source })?;
    socket::send(&controller, &VaultReport::Ready.encode(), None)?;
    tracing::info!(gpu = uuid, "vault is ready");
    let mut vault = Vault::new(controller, cuda, Dedup::new());
    let mut step = Step::Nothing;
    loop {
        vault.wait(step)?;
        match vault.turn()? {
            Some(next) => step = next,
            None => return Ok(()),
        }
    }
}

/// Whether the controller has ended before this process asked to end with it.
fn hung_up(controller: &OwnedFd) -> io::Result<bool> {
    let mut polled = [PollFd::new(controller, PollFlags::empty())];
    rustix::event::poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))?;
    Ok(polled[0].revents().contains(PollFlags::HUP))
}

pub(crate) struct Vault {
    controller: OwnedFd,
    cuda: Rc<Cuda>,
    clients: Vec<Client>,
    /// Of those that are gone, while nobody is waited for: the driver does one thing at a time.
    leaving: Vec<Region>,
    dedup: Dedup<Segment>,
    /// When the last of them had left, until what it released is taken note of.
    wiping: Option<Instant>,
    /// Nothing that takes VRAM may begin.
    held: bool,
}

impl Vault {
    /// Serves no process yet.
    pub(crate) fn new(controller: OwnedFd, cuda: Rc<Cuda>, dedup: Dedup<Segment>) -> Vault {
        Vault {
            controller,
            cuda,
            clients: Vec::new(),
            leaving: Vec::new(),
            dedup,
            wiping: None,
            held: false,
        }
    }

    /// Takes in what was said, and does a little of what there is to do. `None`: the controller
    /// has hung up.
    pub(crate) fn turn(&mut self) -> Result<Option<Step>, VaultError> {
        if !self.hear_controller()? {
            return Ok(None);
        }
        self.hear_clients()?;
        let step = self.work()?;
        self.tell_shared();
        Ok(Some(step))
    }

    fn wait(&self, step: Step) -> Result<(), VaultError> {
        let own = [self.controller.as_fd()];
        let sockets = own.into_iter().chain(self.clients.iter().map(Client::socket));
        let mut polled: Vec<PollFd<'_>> =
            sockets.map(|socket| PollFd::from_borrowed_fd(socket, PollFlags::IN)).collect();
        let at_most = match step {
            Step::More => Some(Timespec { tv_sec: 0, tv_nsec: 0 }),
            Step::Soon => Some(Timespec { tv_sec: 0, tv_nsec: SOON_NS }),
            Step::Later | Step::Nothing if self.wiping.is_some() && !self.held => {
                Some(Timespec { tv_sec: 0, tv_nsec: WIPED_AFTER.subsec_nanos().into() })
            }
            Step::Later => Some(Timespec { tv_sec: 1, tv_nsec: 0 }),
            Step::Nothing => None,
        };
        match rustix::event::poll(&mut polled, at_most.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(errno) => Err(io::Error::from(errno).into()),
        }
    }

    /// False: it has hung up.
    fn hear_controller(&mut self) -> Result<bool, VaultError> {
        loop {
            let (frame, descriptor) = match socket::receive(&self.controller) {
                Ok(received) => received,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(true),
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(false),
                Err(error) => return Err(error.into()),
            };
            match VaultOrder::decode(&frame)? {
                VaultOrder::Attach { process, most_bytes, domain } => {
                    // The controller knows already that the old one is over.
                    let old = |client: &Client| client.process() == process;
                    let old: Vec<Client> =
                        self.clients.extract_if(.., |client| old(client)).collect();
                    self.dedup.forget(process);
                    self.leaving.extend(old.into_iter().filter_map(Client::into_region));
                    if let Some(socket) = descriptor {
                        let cuda = &self.cuda;
                        self.clients.push(Client::new(cuda, socket, process, most_bytes, domain));
                    }
                }
                VaultOrder::Fill { process, most_bytes } => {
                    // What it has said already counts.
                    self.hear_clients()?;
                    self.each(|client| match client.process() == process {
                        true => client.grant(most_bytes),
                        false => Ok(()),
                    })?;
                }
                VaultOrder::Hold { on } => self.held = on,
            }
        }
    }

    fn hear_clients(&mut self) -> Result<(), VaultError> {
        self.each(Client::hear)
    }

    /// Does something with each; who makes it impossible is hung up on.
    fn each(
        &mut self,
        mut body: impl FnMut(&mut Client) -> Result<(), ClientError>,
    ) -> Result<(), VaultError> {
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

    fn end(&mut self, which: impl Fn(&Client) -> bool) {
        let ended: Vec<Client> = self.clients.extract_if(.., |client| which(client)).collect();
        let some = !ended.is_empty();
        for client in ended {
            let process = client.process();
            self.leaving.extend(client.into_region());
            self.dedup.forget(process);
            self.report(VaultReport::Left { process });
        }
        if some && self.leaving.is_empty() {
            self.report(VaultReport::LetGo);
        }
    }

    /// Tells how much is held once, where that has changed.
    fn tell_shared(&mut self) {
        let (stored_bytes, changed) = self.dedup.report();
        let of = |client: &mut Client| client.shared_bytes().map(|bytes| (client.process(), bytes));
        let told: Vec<(u64, u64)> = self.clients.iter_mut().filter_map(of).collect();
        for (process, bytes) in &told {
            let (process, bytes) = (*process, *bytes);
            self.report(VaultReport::Shared { process, bytes, stored_bytes });
        }
        if changed && told.is_empty() {
            self.report(VaultReport::Shared { process: NOBODY, bytes: 0, stored_bytes });
        }
    }

    /// A little for everybody who is waited for; else one thing for one of the others.
    fn work(&mut self) -> Result<Step, VaultError> {
        let urgent = self.clients.iter().any(Client::is_urgent);
        let held = self.held;
        let (mut most, mut over, mut reports) = (Step::Nothing, Vec::new(), Vec::new());
        for client in self.clients.iter_mut().filter(|client| client.is_urgent() == urgent) {
            if held && client.is_registering() {
                continue;
            }
            match client.step() {
                Ok((step, report)) => {
                    reports.extend(report);
                    most = match (most, step) {
                        (Step::More, _) | (_, Step::More) => Step::More,
                        (Step::Soon, _) | (_, Step::Soon) => Step::Soon,
                        (Step::Later, _) | (_, Step::Later) => Step::Later,
                        _ => Step::Nothing,
                    };
                    if !urgent && step == Step::More {
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
            if matches!(report, VaultReport::Held { .. }) {
                self.wiping = Some(clock::now());
            }
            self.report(report);
        }
        self.end(|client| over.contains(&client.process()));
        // Host memory that is kept from those who want it back waits for those alone who come home.
        let free = !self.clients.iter().any(Client::is_filling) && most != Step::More;
        if free && let Some(region) = self.leaving.last_mut() {
            let more = region.unregister_last();
            if !more.map_err(|error| VaultError::Broken(error.into()))? {
                self.leaving.pop();
                if self.leaving.is_empty() {
                    self.report(VaultReport::LetGo);
                }
            }
            return Ok(Step::More);
        }
        let busy = urgent || self.held || self.clients.iter().any(Client::is_registering);
        if !busy && matches!(most, Step::Nothing | Step::Later) {
            for client in &mut self.clients {
                if client.let_go_next().map_err(|error| VaultError::Broken(error.into()))? {
                    return Ok(Step::More);
                }
            }
            let finish = |draft: Draft| draft.finish(&self.cuda);
            let step = self.dedup.step(&mut self.clients, finish);
            let step = step.map_err(|error| VaultError::Broken(error.into()))?;
            if step != Step::Nothing {
                return Ok(step);
            }
            if self.wiping.take_if(|since| clock::since(*since) >= WIPED_AFTER).is_some() {
                self.cuda.take_note();
            }
        }
        // Those that were not urgent have their turn when nobody is any more.
        let over = urgent && matches!(most, Step::Nothing | Step::Later);
        Ok(if over { Step::More } else { most })
    }

    /// A controller that does not listen hangs up before long.
    fn report(&self, report: VaultReport) {
        let _ = socket::send(&self.controller, &report.encode(), None);
    }
}

/// An error of one process is no reason to end, unless the next would fare no better.
fn pass(error: ClientError) -> Result<(), VaultError> {
    if error.is_fatal() { Err(VaultError::Broken(error.into())) } else { Ok(()) }
}

fn note(process: u64, error: &ClientError) {
    if matches!(error, ClientError::HungUp) {
        return;
    }
    let error: &dyn std::error::Error = error;
    tracing::warn!(process, error, "a process is left to bring itself home");
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType};

    use super::*;

    const NO_LIBRARY: &str = "/nonexistent/libcuda.so.1";

    #[test]
    fn one_that_comes_too_late_ends_without_a_context() {
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
                .unwrap();
        let said = run(ours.try_clone().unwrap(), NO_LIBRARY, "GPU-1");
        assert!(matches!(said, Err(VaultError::Cuda { .. })), "who is waited for tries: {said:?}");
        drop(theirs);
        run(ours, NO_LIBRARY, "GPU-1").unwrap();
    }
}
