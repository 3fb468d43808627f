//! The door to the actor for those who serve people: questions and orders go in as
//! [`Command`]s, whatever the transport.

use std::sync::Arc;

use affinode_proto::api::control::{ActionResponse, Event, ListResponse};
use tokio::sync::{mpsc, oneshot};

use super::{command::Command, events::EventLog};
use crate::{
    call_trace::CallSource,
    core::{Key, Request},
};

/// The controller is ending: nobody answers any more.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the controller is ending; ask again")]
pub struct ShuttingDown;

/// Asks the actor and reads the events.
#[derive(Clone, Debug)]
pub struct ControllerHandle {
    calls: mpsc::Sender<Command>,
    events: Arc<EventLog>,
}

impl ControllerHandle {
    /// A door to the actor that takes `calls`.
    #[must_use]
    pub fn new(calls: mpsc::Sender<Command>, events: Arc<EventLog>) -> ControllerHandle {
        ControllerHandle { calls, events }
    }

    /// Everything about the node.
    ///
    /// # Errors
    /// [`ShuttingDown`].
    pub async fn list(&self) -> Result<ListResponse, ShuttingDown> {
        self.ask(Command::List).await
    }

    /// The connected processes of these containers, or all.
    ///
    /// # Errors
    /// [`ShuttingDown`].
    pub async fn sights(&self, keys: Option<Vec<Key>>) -> Result<Vec<CallSource>, ShuttingDown> {
        self.ask(|answer| Command::Sights(keys, answer)).await
    }

    /// Moves a container; answers when it is done or refused.
    ///
    /// # Errors
    /// [`ShuttingDown`].
    pub async fn act(
        &self,
        name: String,
        request: Request,
    ) -> Result<ActionResponse, ShuttingDown> {
        self.ask(|answer| Command::Act(name, request, answer)).await
    }

    /// Keeps a container on the GPU, or no longer.
    ///
    /// # Errors
    /// [`ShuttingDown`].
    pub async fn pin(
        &self,
        name: String,
        pinned: bool,
        who: String,
    ) -> Result<ActionResponse, ShuttingDown> {
        self.ask(|answer| Command::Pin(name, pinned, who, answer)).await
    }

    /// Turns offloads that nobody asked for on or off. Answers whether that is a change, or
    /// why it cannot be kept.
    ///
    /// # Errors
    /// [`ShuttingDown`].
    pub async fn auto_offload(
        &self,
        on: bool,
        who: String,
    ) -> Result<Result<bool, String>, ShuttingDown> {
        self.ask(|answer| Command::AutoOffload(on, who, answer)).await
    }

    /// The events.
    #[must_use]
    pub fn events(&self) -> &EventLog {
        &self.events
    }

    /// Notes who asked for what.
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
