//! The handle to the actor (the task that drives the controller). The APIs and the parts that
//! observe the node send their commands through it.
//!
//! ```text
//!  API, observer, call trace ──ControllerHandle──Command──> actor
//!           ^                                                │
//!           └────── EventLog <──────────── Event ────────────┘
//! ```
//!
//! These parts need only the handle. They do not depend on the actor's module, [`crate::daemon`],
//! which starts them.

mod command;
mod events;

use std::sync::Arc;

use affinode_core::{Key, Request};
use affinode_proto::api::control::{ActionResponse, Event, ListResponse};
use tokio::sync::{mpsc, oneshot};

pub use command::{CallSource, Command, CommandError};
pub use events::EventLog;

/// Error: the controller is shutting down and does not respond to commands any longer.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the controller is shutting down; try again")]
pub struct ShuttingDown;

/// Sends commands to the actor, and gives access to the events.
#[derive(Clone, Debug)]
pub struct ControllerHandle {
    calls: mpsc::Sender<Command>,
    events: Arc<EventLog>,
}

impl ControllerHandle {
    /// Creates a handle to the actor. `calls` sends commands to it.
    #[must_use]
    pub fn new(calls: mpsc::Sender<Command>, events: Arc<EventLog>) -> ControllerHandle {
        ControllerHandle { calls, events }
    }

    /// Returns when the actor has responded, which shows that it handles commands.
    ///
    /// # Errors
    /// [`ShuttingDown`]: the controller is shutting down.
    pub async fn ping(&self) -> Result<(), ShuttingDown> {
        self.ask(Command::Ping).await
    }

    /// Returns the state of the node with all GPUs and containers.
    ///
    /// # Errors
    /// [`ShuttingDown`]: the controller is shutting down.
    pub async fn list(&self) -> Result<ListResponse, ShuttingDown> {
        self.ask(Command::List).await
    }

    /// Returns those processes of these containers that are connected to the controller. If `keys`
    /// is `None`, the processes of all containers are returned.
    ///
    /// # Errors
    /// [`ShuttingDown`]: the controller is shutting down.
    pub async fn sights(&self, keys: Option<Vec<Key>>) -> Result<Vec<CallSource>, ShuttingDown> {
        self.ask(|answer| Command::Sights(keys, answer)).await
    }

    /// Offloads or restores a container. Returns when the move is complete or refused.
    ///
    /// # Errors
    /// [`ShuttingDown`]: the controller is shutting down.
    pub async fn act(
        &self,
        name: String,
        request: Request,
    ) -> Result<ActionResponse, ShuttingDown> {
        self.ask(|answer| Command::Act(name, request, answer)).await
    }

    /// Pins a container to the GPU, or unpins it.
    ///
    /// # Errors
    /// [`ShuttingDown`]: the controller is shutting down.
    pub async fn pin(
        &self,
        name: String,
        pinned: bool,
        who: String,
    ) -> Result<ActionResponse, ShuttingDown> {
        self.ask(|answer| Command::Pin(name, pinned, who, answer)).await
    }

    /// Turns automatic offloads of the node on or off. Returns whether the setting has changed, or
    /// the reason why it cannot be stored.
    ///
    /// # Errors
    /// [`ShuttingDown`]: the controller is shutting down.
    pub async fn auto_offload(
        &self,
        on: bool,
        who: String,
    ) -> Result<Result<bool, CommandError>, ShuttingDown> {
        self.ask(|answer| Command::AutoOffload(on, who, answer)).await
    }

    /// Returns the log of events, from which readers get events.
    #[must_use]
    pub fn events(&self) -> &EventLog {
        &self.events
    }

    /// Records a user's request in the log file and in the event log.
    pub fn audit(&self, event: Event) {
        tracing::info!(key = event.key, kind = event.kind, "{}", event.text);
        self.events.add(event, crate::clock::unix_ms());
    }

    async fn ask<T>(
        &self,
        call: impl FnOnce(oneshot::Sender<T>) -> Command,
    ) -> Result<T, ShuttingDown> {
        let (answer, answered) = oneshot::channel();
        self.calls.send(call(answer)).await.map_err(|_| ShuttingDown)?;
        answered.await.map_err(|_| ShuttingDown)
    }
}
