//! Processes of containers, at the other end of sockets.
//!
//! ```text
//! listener (one per container) ──accept──> connection: Hello, papers ──Joined──> the task that decides
//!                                            reader ──Message, Detached──>        │
//!                                            writer <──── bounded channel ────────┘
//!                                            pidfd ──Exited──>
//!                                            porter <── frames, descriptors ──> copier
//! ```
//!
//! All of a container's but the pidfd is on a thread of its own ([`crate::ward`]).
//!
//! Everything that comes in is untrusted: who a process is says the kernel
//! (`SO_PEERCRED`, pidfd), the page is read with `pread`, frames have one size,
//! messages and connections of a container a bounded rate, connections a bounded number,
//! the Hello a deadline.

mod connection;
mod copier_relay;
mod hint_pipe;
mod listener;
mod peer;
mod rate_limit;
#[cfg(test)]
mod tests;

use std::{
    fs::File,
    os::{fd::OwnedFd, unix::fs::FileExt},
    sync::Arc,
};

use affinode_proto::wire::{
    Capabilities,
    counters::{CounterError, CounterSnapshot, PAGE_BYTES, header},
    message::{Action, AgentMessage, ControllerMessage},
};
use tokio::{runtime::Handle, sync::mpsc, task::AbortHandle};

use crate::{
    copier,
    core::{Key, ProcessId, input::Identity},
};

pub use listener::AgentListener;
pub(crate) use rate_limit::RefusalLog;

/// Messages to an agent that may wait; one that does not read is cut off.
const OUTBOX: usize = 64;

/// What connections tell.
#[derive(Debug)]
pub enum AgentMail {
    /// A process with good papers.
    Joined {
        /// The container whose socket it came through.
        key: Key,
        /// Number of the connection.
        id: ProcessId,
        /// Who it is.
        identity: Identity,
        /// Its Hello.
        hello: AgentMessage,
        /// How to reach it.
        agent: AgentHandle,
    },
    /// A message, Hello excepted.
    Message(ProcessId, AgentMessage),
    /// The connection ended.
    Detached(ProcessId),
    /// The process ended.
    Exited(ProcessId),
    /// A peer was turned away.
    Refused {
        /// The container.
        key: Key,
        /// Why, for people.
        why: String,
    },
}

/// A message, and a descriptor that goes along.
#[derive(Debug)]
pub struct OutgoingFrame {
    message: ControllerMessage,
    descriptor: Option<OwnedFd>,
}

impl From<ControllerMessage> for OutgoingFrame {
    fn from(message: ControllerMessage) -> OutgoingFrame {
        OutgoingFrame { message, descriptor: None }
    }
}

/// A connected process.
#[derive(Debug)]
pub struct AgentHandle {
    outbox: Option<mpsc::Sender<OutgoingFrame>>,
    page: Arc<File>,
    abilities: Capabilities,
    /// What its `CLOCK_MONOTONIC` shows more than ours.
    clock_ahead_ms: i64,
    /// Ends with the process, not with the connection.
    watch: AbortHandle,
    /// The container's thread.
    ward: Handle,
}

/// Why a page was not read.
#[derive(Debug, thiserror::Error)]
pub enum CounterReadError {
    /// The file.
    #[error("the page cannot be read")]
    Io(#[from] std::io::Error),
    /// Its content.
    #[error("the page is not understood")]
    Content(#[from] CounterError),
}

impl AgentHandle {
    /// Queues a message. `false`: the agent does not read; the connection is over.
    pub fn send(&mut self, mut message: ControllerMessage) -> bool {
        if let ControllerMessage::Order { order, action, decided_ms } = &mut message {
            tracing::debug!(order, ?action, "ordered");
            // 0 would be no time at all.
            *decided_ms = decided_ms.saturating_add_signed(self.clock_ahead_ms).max(1);
            if let Action::CopyOut { how, .. } = action {
                how.keep &= self.abilities.intersects(Capabilities::RETAINS_HOST_COPY);
                how.then_checkpoint &= self.abilities.intersects(Capabilities::PREFAULTS);
                how.check &= self.abilities.intersects(Capabilities::CHECKS);
            }
        }
        self.queue(message.into())
    }

    /// Whether its library knows what to do with a way to a copier.
    #[must_use]
    pub fn uses_copier(&self) -> bool {
        self.abilities.intersects(Capabilities::USES_COPIER)
    }

    /// Whether its library can make host memory ready before it leaves.
    #[must_use]
    pub fn prepares(&self) -> bool {
        self.abilities.intersects(Capabilities::PREFAULTS)
    }

    /// Whether its library can hold once, with others, what they have in common.
    #[must_use]
    pub fn dedups(&self) -> bool {
        self.abilities.intersects(Capabilities::DEDUPS)
    }

    /// Queues a way to a copier, past a porter: the copier is everybody's.
    pub fn send_copier(&mut self, copier: OwnedFd) -> bool {
        let Some((ours, theirs)) = copier::pair() else { return false };
        let message = ControllerMessage::Copier;
        let sent = self.queue(OutgoingFrame { message, descriptor: Some(theirs) });
        if sent {
            self.ward.spawn(copier_relay::carry(ours, copier));
        }
        sent
    }

    /// Tells it to stop the copy out of its present generation, by a word in its counters: it reads no
    /// messages while it copies.
    ///
    /// # Errors
    /// The container has made its file one that cannot be written.
    pub fn turn_back(&self) -> std::io::Result<()> {
        let mut generation = [0; 8];
        self.page.read_exact_at(&mut generation, header::GENERATION as u64)?;
        self.page.write_all_at(&generation, header::TURN_BACK as u64)
    }

    fn queue(&mut self, outgoing: OutgoingFrame) -> bool {
        let sent = self.outbox.as_ref().is_some_and(|outbox| outbox.try_send(outgoing).is_ok());
        if !sent {
            self.outbox = None;
        }
        sent
    }

    /// Its page, and the way to it if its library can record calls: for those who watch,
    /// without keeping the connection open.
    #[must_use]
    pub fn sight(&self) -> (Arc<File>, Option<mpsc::WeakSender<OutgoingFrame>>) {
        let records = self.abilities.intersects(Capabilities::RECORDS_CALLS);
        let outbox = self.outbox.as_ref().filter(|_| records).map(mpsc::Sender::downgrade);
        (Arc::clone(&self.page), outbox)
    }

    /// Reads the page once.
    ///
    /// # Errors
    /// [`PageReadError`]: the container shrank or overwrote it.
    pub fn read_page(
        &self,
        buffer: &mut [u8; PAGE_BYTES],
    ) -> Result<CounterSnapshot, CounterReadError> {
        self.page.read_exact_at(buffer, 0)?;
        Ok(CounterSnapshot::decode(buffer)?)
    }
}

impl Drop for AgentHandle {
    fn drop(&mut self) {
        self.watch.abort();
    }
}
