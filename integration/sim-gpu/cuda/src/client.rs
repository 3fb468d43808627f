//! Connections of this process to the daemon. The process's main connection stays open as long as
//! the process exists. Each checkpoint call opens a connection of its own, because the call may
//! take long and does not need `cuInit`.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use affinode_sim_protocol::{
    GpuInfo, ObjectId, Operation, Packet, Reply, Request, SOCKET, SOCKET_ENV,
};

use crate::abi::{NO_DEVICE, NOT_INITIALIZED, Outcome, UNKNOWN};
use crate::driver::check_ending;

/// The main connection of this process to the daemon.
#[derive(Debug)]
pub struct Link {
    packet: Mutex<Packet>,
    fd: RawFd,
}

/// Device memory that the daemon has allocated for this process.
#[derive(Debug)]
pub struct Granted {
    pub object: ObjectId,
    pub gpu: usize,
    pub bytes: u64,
    pub memory: OwnedFd,
}

/// Opens a new connection to the daemon.
pub fn connect() -> std::io::Result<Packet> {
    let path = std::env::var_os(SOCKET_ENV).map_or_else(|| PathBuf::from(SOCKET), PathBuf::from);
    Packet::connect(&path)
}

impl Link {
    /// Registers this process as a CUDA process. Returns the connection, the GPUs of the node, and
    /// the page for the process's own statistics.
    pub fn attach() -> Outcome<(Self, Vec<GpuInfo>, OwnedFd)> {
        let packet = connect().map_err(|_| NO_DEVICE)?;
        let fd = packet.as_fd().as_raw_fd();
        match exchange(&packet, &Request::Attach, None)? {
            (Reply::Attached { gpus }, Some(page)) => {
                Ok((Self { packet: Mutex::new(packet), fd }, gpus, page))
            }
            _ => Err(NO_DEVICE),
        }
    }

    /// Descriptor of the connection. A forked child must close it.
    pub fn fd(&self) -> RawFd {
        self.fd
    }

    pub fn ask(
        &self,
        request: &Request,
        fd: Option<BorrowedFd<'_>>,
    ) -> Outcome<(Reply, Option<OwnedFd>)> {
        let packet = self.packet.lock().unwrap_or_else(PoisonError::into_inner);
        exchange(&packet, request, fd)
    }

    /// Sends a request and waits for its reply, which is only success or failure.
    pub fn tell(&self, request: &Request) -> Outcome {
        self.ask(request, None).map(drop)
    }

    /// Sends a request for device memory, and returns the memory that the daemon grants.
    pub fn obtain(&self, request: &Request, fd: Option<BorrowedFd<'_>>) -> Outcome<Granted> {
        match self.ask(request, fd)? {
            (Reply::Object { object, gpu, bytes }, Some(memory)) => {
                Ok(Granted { object, gpu, bytes, memory })
            }
            _ => Err(UNKNOWN),
        }
    }
}

pub fn checkpoint(pid: i32, operation: Operation) -> Outcome<Reply> {
    check_ending()?;
    let packet = connect().map_err(|_| NOT_INITIALIZED)?;
    Ok(exchange(&packet, &Request::Checkpoint { pid, operation }, None)?.0)
}

fn exchange(
    packet: &Packet,
    request: &Request,
    fd: Option<BorrowedFd<'_>>,
) -> Outcome<(Reply, Option<OwnedFd>)> {
    packet.send(request, fd).map_err(|_| UNKNOWN)?;
    match packet.receive::<Reply>() {
        Ok(Some((Reply::Error(code), _))) => Err(code),
        Ok(Some(answer)) => Ok(answer),
        _ => Err(UNKNOWN),
    }
}
