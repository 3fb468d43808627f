//! The connection of one process, and how one request is carried out.

use std::{
    io,
    os::fd::OwnedFd,
    sync::{Condvar, Mutex, PoisonError},
    time::Duration,
};

use affinode_proto::wire::message::FrameError;
use rustix::thread::CpuSet;

use crate::{
    memory_file::{FILE_BYTES, MemoryFile, Populated},
    queue::{ClientId, Request},
};

/// Connection of one process.
#[derive(Debug)]
pub struct Client {
    /// Number of the connection.
    pub id: ClientId,
    /// Number of the process.
    pub process: u64,
    /// Number of the process's container.
    pub container: u64,
    /// Socket that is connected to the process.
    pub socket: OwnedFd,
    /// Memory file of the process.
    pub memory: MemoryFile,
    /// Notified when the number of the process's unanswered requests falls, so that its next
    /// request may be accepted.
    pub room: Condvar,
    /// How much of its content the process may store on disk.
    pub disk_allowance: DiskAllowance,
}

/// How much of its content a process may store on disk.
#[derive(Debug, Default)]
pub struct DiskAllowance {
    bytes: Mutex<u64>,
    changed: Condvar,
}

impl DiskAllowance {
    /// Sets the maximum size of the process's disk file in bytes.
    pub fn set(&self, bytes: u64) {
        *self.bytes.lock().unwrap_or_else(PoisonError::into_inner) = bytes;
        self.changed.notify_all();
    }

    /// Returns the maximum size of the process's disk file in bytes.
    pub fn bytes(&self) -> u64 {
        *self.bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the process may store anything, at most `patience`. The controller's permission
    /// and the request of the process come from different sockets, so the request can be first.
    pub fn is_given(&self, patience: Duration) -> bool {
        let bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(bytes, patience, |bytes| *bytes == 0);
        *waited.unwrap_or_else(PoisonError::into_inner).0 > 0
    }
}

/// Reason why a connection of a process has ended.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The socket failed, or a packet was not a frame.
    #[error("the socket failed, or a packet was not a frame")]
    Socket(#[from] io::Error),
    /// The process sent an invalid frame.
    #[error("the process sent an invalid frame")]
    Frame(#[from] FrameError),
}

impl Client {
    /// Allocates the pages that a request names, on the processor that it names. `elsewhere_bytes`:
    /// the part of the allowed amount that is in use in ended files of the container.
    pub fn populate(&self, request: Request, elsewhere_bytes: u64) -> Populated {
        let Request { offset, bytes, processor, .. } = request;
        if offset.checked_add(bytes).is_none_or(|end| end > FILE_BYTES) {
            return Populated::Refused;
        }
        run_on(processor);
        self.memory.populate(offset, bytes, elsewhere_bytes)
    }
}

impl ReadError {
    /// Whether the error means only that the process has closed its socket.
    pub fn is_hang_up(&self) -> bool {
        use io::ErrorKind::{BrokenPipe, ConnectionReset};
        let ReadError::Socket(error) = self else { return false };
        matches!(error.kind(), BrokenPipe | ConnectionReset)
    }
}

/// Moves this thread to a processor. The pages that it allocates are then near to that processor.
fn run_on(processor: u32) {
    let number = processor as usize;
    if number < CpuSet::MAX_CPU {
        let mut set = CpuSet::new();
        set.set(number);
        // An error means that the host pool may not use the processor. The pages are then
        // allocated elsewhere.
        let _ = rustix::thread::sched_setaffinity(None, &set);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_runs_on_the_processor_of_the_request() {
        let may_use = rustix::thread::sched_getaffinity(None).unwrap();
        for number in (0..CpuSet::MAX_CPU).filter(|number| may_use.is_set(*number)) {
            run_on(u32::try_from(number).unwrap());
            assert_eq!(rustix::thread::sched_getcpu(), number);
        }
        run_on(u32::MAX);
    }
}
