//! Observes the node for the dashboard, metrics and history, in a task separate from the actor.
//!
//! ```text
//!  events ──┐                        ┌──> changes for watchers ([`hub`])
//!           ├──> ViewObserver: list ─┼──> metrics ([`crate::metrics`])
//!  a clock ─┘                        └──> spans for the history ([`crate::history`])
//! ```
//!
//! The observer requests the list of GPUs and containers from the actor. Only the observer sends
//! changes to watchers, and records events and observations in the metrics and the history. It runs
//! on a thread of its own, so the actor never waits for watchers.

mod diff;
mod hub;

use std::{sync::Arc, time::Duration};

use crate::{
    clock,
    handle::{ControllerHandle, ShuttingDown},
    history::NodeHistory,
    metrics::Metrics,
    schema,
};

pub use diff::ViewChange;
pub use hub::{ViewHub, ViewMessage, ViewWatch};

/// Time between two observations of the node while there is a watcher.
const WATCHED: Duration = Duration::from_secs(1);
/// Time between two observations of the node while there is no watcher. This is often enough for
/// the history.
const UNWATCHED: Duration = Duration::from_secs(5);
/// Time over which events are collected and then sent together.
const GATHER: Duration = Duration::from_millis(30);

/// Task that observes the node for watchers, metrics and history.
#[derive(Debug)]
pub struct ViewObserver {
    door: ControllerHandle,
    hub: Arc<ViewHub>,
    metrics: Arc<Metrics>,
    history: Option<Arc<NodeHistory>>,
}

impl ViewObserver {
    /// Creates an observer. It reads the node through `door`, and passes what it reads to `hub`,
    /// `metrics` and `history`.
    #[must_use]
    pub fn new(
        door: ControllerHandle,
        hub: Arc<ViewHub>,
        metrics: Arc<Metrics>,
        history: Option<Arc<NodeHistory>>,
    ) -> ViewObserver {
        ViewObserver { door, hub, metrics, history }
    }

    /// Observes the node until the controller shuts down.
    pub async fn run(self) {
        let mut last = 0;
        // An error means that the controller is shutting down.
        while self.look(&mut last).await.is_ok() {}
        if let Some(history) = &self.history {
            history.close();
        }
    }

    async fn look(&self, last: &mut u64) -> Result<(), ShuttingDown> {
        let events = self.door.events();
        let pause = if self.hub.is_watched() { WATCHED } else { UNWATCHED };
        tokio::select! {
            _ = events.after(*last, pause) => {}
            // A new watcher gets the current state.
            () = self.hub.joined() => {}
        }
        if events.last() > *last {
            tokio::time::sleep(GATHER).await;
        }
        loop {
            let news = events.now(*last);
            let Some(newest) = news.last() else { break };
            *last = newest.sequence;
            for event in news {
                let event = schema::Event::from(event);
                self.metrics.event(&event);
                if let Some(history) = &self.history {
                    history.event(&event);
                }
                self.hub.tell(&event);
            }
        }
        let node = schema::Node::from(self.door.list().await?);
        let now_ms = clock::unix_ms();
        self.metrics.observe(&node, now_ms);
        if let Some(history) = &self.history {
            history.observe(&node, now_ms);
        }
        self.hub.show(node);
        Ok(())
    }
}
