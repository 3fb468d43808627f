//! The door to the actor for those who serve people: questions and orders go in as
//! [`Call`]s, whatever the transport.

use std::sync::Arc;

use affinode_proto::api::control::{ActionResponse, Event, ListResponse};
use tokio::sync::{mpsc, oneshot};

use super::{call::Call, events::EventLog};
use crate::{
    calls::Sight,
    core::{Key, Request},
};

/// The controller is ending: nobody answers any more.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the controller is ending; ask again")]
pub struct Ending;

/// Asks the actor and reads the events.
#[derive(Clone, Debug)]
pub struct Door {
    calls: mpsc::Sender<Call>,
    events: Arc<EventLog>,
}

impl Door {
    /// A door to the actor that takes `calls`.
    #[must_use]
    pub fn new(calls: mpsc::Sender<Call>, events: Arc<EventLog>) -> Door {
        Door { calls, events }
    }

    /// Everything about the node.
    ///
    /// # Errors
    /// [`Ending`].
    pub async fn list(&self) -> Result<ListResponse, Ending> {
        self.ask(Call::List).await
    }

    /// The connected processes of these containers, or all.
    ///
    /// # Errors
    /// [`Ending`].
    pub async fn sights(&self, keys: Option<Vec<Key>>) -> Result<Vec<Sight>, Ending> {
        self.ask(|answer| Call::Sights(keys, answer)).await
    }

    /// Moves a container; answers when it is done or refused.
    ///
    /// # Errors
    /// [`Ending`].
    pub async fn act(&self, name: String, request: Request) -> Result<ActionResponse, Ending> {
        self.ask(|answer| Call::Act(name, request, answer)).await
    }

    /// Keeps a container on the GPU, or no longer.
    ///
    /// # Errors
    /// [`Ending`].
    pub async fn pin(
        &self,
        name: String,
        pinned: bool,
        who: String,
    ) -> Result<ActionResponse, Ending> {
        self.ask(|answer| Call::Pin(name, pinned, who, answer)).await
    }

    /// Turns offloads that nobody asked for on or off. Answers whether that is a change, or
    /// why it cannot be kept.
    ///
    /// # Errors
    /// [`Ending`].
    pub async fn auto_offload(
        &self,
        on: bool,
        who: String,
    ) -> Result<Result<bool, String>, Ending> {
        self.ask(|answer| Call::AutoOffload(on, who, answer)).await
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

    async fn ask<T>(&self, call: impl FnOnce(oneshot::Sender<T>) -> Call) -> Result<T, Ending> {
        let (answer, answered) = oneshot::channel();
        self.calls.send(call(answer)).await.map_err(|_| Ending)?;
        answered.await.map_err(|_| Ending)
    }
}
