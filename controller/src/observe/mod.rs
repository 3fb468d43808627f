//! The task that watches the node for people, beside the task that decides.
//!
//! ```text
//!  events ──┐                        ┌──> changes for those who watch ([`hub`])
//!           ├──> Observer: list ─────┼──> figures ([`crate::metrics`])
//!  a clock ─┘                        └──> spans for the history ([`crate::history`])
//! ```
//!
//! It asks the actor for the list and is the only writer of all three, on a thread of
//! its own: however many people watch, the node's decisions do not wait for them.

mod diff;
mod hub;

use std::{sync::Arc, time::Duration};

use crate::{
    clock,
    daemon::{ControllerHandle, ShuttingDown},
    history::NodeHistory,
    metrics::Metrics,
    schema,
};

pub use diff::ViewChange;
pub use hub::{ViewHub, ViewMessage, ViewWatch};

/// Between two looks while somebody watches.
const WATCHED: Duration = Duration::from_secs(1);
/// Between two looks while nobody does: often enough for the history.
const UNWATCHED: Duration = Duration::from_secs(5);
/// Events that come together are shown together.
const GATHER: Duration = Duration::from_millis(30);

/// The watching task.
#[derive(Debug)]
pub struct ViewObserver {
    door: ControllerHandle,
    hub: Arc<ViewHub>,
    metrics: Arc<Metrics>,
    history: Option<Arc<NodeHistory>>,
}

impl ViewObserver {
    /// Watches what is behind the door, for these.
    #[must_use]
    pub fn new(
        door: ControllerHandle,
        hub: Arc<ViewHub>,
        metrics: Arc<Metrics>,
        history: Option<Arc<NodeHistory>>,
    ) -> ViewObserver {
        ViewObserver { door, hub, metrics, history }
    }

    /// Watches until the controller ends.
    pub async fn run(self) {
        let mut last = 0;
        // Err: the controller is ending, and so is this.
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
            // Somebody came: they want to see the present.
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
