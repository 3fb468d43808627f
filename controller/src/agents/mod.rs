//! Connections to the agents. An agent is the thread of Affinode's library in a process of a
//! container.
//!
//! ```text
//! AgentListener (one per container) ──accept──> connection: Hello, peer ──Joined──> the actor
//!                                                 read ──Message, Detached──>        │
//!                                                 write <──── bounded channel ───────┘
//!                                                 pidfd ──Exited──>
//!                                                 copier_relay <── frames, descriptors ──> copier
//! ```
//!
//! Each container has a thread for its I/O ([`crate::isolated_runtime`]). Only the wait for the
//! exit of its processes runs on the controller's main thread.
//!
//! The controller trusts nothing that an agent sends. It gets the identity of a process from the
//! kernel (`SO_PEERCRED`, pidfd). It reads the shared counters with `pread`, and all frames have
//! the same size. For each container, the rate of messages and the rate and number of connections
//! are limited. An agent must send its Hello (the first message) within a time limit.

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

use affinode_core::{Key, ProcessId, copy_watch::TurnBackCause, input::Identity};
use affinode_proto::wire::{
    Capabilities,
    counters::{CounterError, CounterSnapshot, NOT_WANTED, PAGE_BYTES, header},
    message::{AgentMessage, ControllerMessage},
};
use tokio::{runtime::Handle, sync::mpsc, task::AbortHandle};

use crate::copier;

pub use listener::AgentListener;
pub(crate) use rate_limit::{RateLimit, RefusalLog};

/// Maximum number of messages that wait to be sent to an agent. If there are more, the controller
/// closes the agent's connection.
const OUTBOX: usize = 64;

/// Messages from the connections of agents to the actor (the task that drives the controller).
#[derive(Debug)]
pub enum AgentMail {
    /// The kernel identified a process, and its agent sent a valid Hello.
    Joined {
        /// Key of the container whose socket the process used.
        key: Key,
        /// Number that identifies the connection.
        id: ProcessId,
        /// Identity of the process, as the kernel reports it.
        identity: Identity,
        /// The Hello message, with capabilities, phase and memory of the process.
        hello: AgentMessage,
        /// Handle of the connection to the process's agent.
        agent: AgentHandle,
    },
    /// An agent sent a message after its Hello.
    Message(ProcessId, AgentMessage),
    /// The connection to a process's agent ended.
    Detached(ProcessId),
    /// A process whose agent was connected has ended.
    Exited(ProcessId),
    /// The controller refused a connection.
    Refused {
        /// Key of the container whose socket the process used.
        key: Key,
        /// Reason for the refusal in plain text.
        why: String,
    },
}

/// A message to an agent, with the descriptor that is sent with it, if any.
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

/// Handle of a connected process: its counters and the connection to its agent.
#[derive(Debug)]
pub struct AgentHandle {
    outbox: Option<mpsc::Sender<OutgoingFrame>>,
    page: Arc<File>,
    abilities: Capabilities,
    /// Difference between the process's `CLOCK_MONOTONIC` and the controller's, in milliseconds.
    /// Positive if the process's clock is ahead.
    clock_ahead_ms: i64,
    /// Handle of the task that waits for the end of the process (not of the connection).
    watch: AbortHandle,
    /// Handle of the runtime that runs on the own thread of the process's container.
    ward: Handle,
}

/// Reason why the controller cannot read a process's counters.
#[derive(Debug, thiserror::Error)]
pub enum CounterReadError {
    /// The file of the counters cannot be read.
    #[error("cannot read the process's counters")]
    Io(#[from] std::io::Error),
    /// The content of the file is invalid.
    #[error("the process's counters are invalid")]
    Content(#[from] CounterError),
}

impl AgentHandle {
    /// Queues a message to the agent. Returns `false` if too many messages wait because the agent
    /// does not read them. The connection is then closed.
    pub fn send(&mut self, mut message: ControllerMessage) -> bool {
        if let ControllerMessage::Order { order, action, decided_ms } = &mut message {
            tracing::debug!(order, ?action, "order queued");
            // The time is at least 1, because 0 would mean that no time was sent.
            *decided_ms = decided_ms.saturating_add_signed(self.clock_ahead_ms).max(1);
            debug_assert!(
                self.abilities.contains(action.requires()),
                "the agent cannot execute {action:?}, only {:?}",
                self.abilities
            );
        }
        self.queue(message.into())
    }

    /// Sends the process a connection to its copier. The connection goes through a relay, because
    /// the process must not be able to block the copier, which also serves other processes.
    pub fn send_copier(&mut self, copier: OwnedFd) -> bool {
        let Ok((ours, theirs)) = copier::pair() else { return false };
        let message = ControllerMessage::Copier;
        let sent = self.queue(OutgoingFrame { message, descriptor: Some(theirs) });
        if sent {
            self.ward.spawn(copier_relay::carry(ours, copier));
        }
        sent
    }

    /// Sends the process a connection to the host pool.
    pub fn send_host_pool(&mut self, socket: OwnedFd) -> bool {
        let message = ControllerMessage::HostPool;
        self.queue(OutgoingFrame { message, descriptor: Some(socket) })
    }

    /// Cancels the process's copy out in progress for this cause. The controller writes the
    /// process's current generation into a word of the counters, because the process reads no
    /// messages while it copies.
    ///
    /// # Errors
    /// The counters cannot be read or written, because the container has changed the file or made
    /// it read-only.
    pub fn turn_back(&self, cause: TurnBackCause) -> std::io::Result<()> {
        // The container can change both words in the counters. A false value affects only that
        // container's own copy.
        let mut generation = [0; 8];
        self.page.read_exact_at(&mut generation, header::GENERATION as u64)?;
        let generation = u64::from_ne_bytes(generation);
        let word = match cause {
            TurnBackCause::HostMemory => generation,
            TurnBackCause::NotWanted => generation | NOT_WANTED,
        };
        self.page.write_all_at(&word.to_ne_bytes(), header::TURN_BACK as u64)
    }

    /// Recalls the VRAM allowances of the process. Returns the process's pending bytes: allocations
    /// that were allowed before the recall and that NVML may not count yet.
    ///
    /// # Errors
    /// The counters cannot be read or written: the container has changed the file or made it
    /// read-only.
    pub fn recall_vram(&self, epoch: u64) -> std::io::Result<u64> {
        self.page.write_all_at(&epoch.to_ne_bytes(), header::VRAM_EPOCH as u64)?;
        // The process adds its bytes, then reads the epoch. If this read came before the write, an
        // allocation could be missed by both sides.
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        let mut pending = [0; 8];
        self.page.read_exact_at(&mut pending, header::VRAM_PENDING as u64)?;
        Ok(u64::from_ne_bytes(pending))
    }

    fn queue(&mut self, outgoing: OutgoingFrame) -> bool {
        let sent = self.outbox.as_ref().is_some_and(|outbox| outbox.try_send(outgoing).is_ok());
        // A message was lost, so the agent must report its state again. Dropping the queue ends the
        // writer, and with it the connection.
        if !sent {
            self.outbox = None;
        }
        sent
    }

    /// Returns what the call trace needs: the counters, and the queue of messages to the agent. The
    /// queue is `None` if the library cannot record calls. The queue's handle is weak, so that the
    /// call trace does not keep the connection open.
    #[must_use]
    pub fn sight(&self) -> (Arc<File>, Option<mpsc::WeakSender<OutgoingFrame>>) {
        let records = self.abilities.intersects(Capabilities::RECORDS_CALLS);
        let outbox = self.outbox.as_ref().filter(|_| records).map(mpsc::Sender::downgrade);
        (Arc::clone(&self.page), outbox)
    }

    /// Reads and decodes the counters once.
    ///
    /// # Errors
    /// [`CounterReadError`]: the container overwrote the content of the file, or it cannot be read.
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
