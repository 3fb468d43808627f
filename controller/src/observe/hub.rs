//! Distributes messages about the node to watchers, such as open dashboards. Each watcher has a
//! backlog of limited size. A watcher that falls behind continues with the current state.

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicU64, Ordering},
};

use tokio::sync::{Notify, broadcast};

use super::ViewChange;
use crate::schema;

/// Maximum number of messages that wait for one watcher.
const BACKLOG: usize = 256;

/// A message to the watchers of the node.
#[derive(Clone, Debug)]
pub enum ViewMessage {
    /// An event of the controller, with its sequence number and its JSON.
    Event(u64, Arc<str>),
    /// A change of the node, as the JSON of a [`super::diff::ViewChange`].
    Change(Arc<str>),
}

/// Stores the latest state of the node, and sends messages to its watchers.
#[derive(Debug)]
pub struct ViewHub {
    latest: Mutex<Arc<schema::Node>>,
    messages: broadcast::Sender<ViewMessage>,
    joined: Notify,
    /// Number of messages that slow watchers missed so far.
    missed: AtomicU64,
}

/// Subscription of one watcher to the node's changes.
#[derive(Debug)]
pub struct ViewWatch {
    /// State of the node at the start of the subscription.
    pub present: Arc<schema::Node>,
    /// All messages since the start of the subscription.
    pub messages: broadcast::Receiver<ViewMessage>,
}

impl Default for ViewHub {
    fn default() -> ViewHub {
        ViewHub {
            latest: Mutex::default(),
            messages: broadcast::channel(BACKLOG).0,
            joined: Notify::new(),
            missed: AtomicU64::new(0),
        }
    }
}

impl ViewHub {
    /// Adds a watcher, which gets the current state and all later messages.
    #[must_use]
    pub fn watch(&self) -> ViewWatch {
        let latest = self.lock();
        self.wake();
        ViewWatch { present: Arc::clone(&latest), messages: self.messages.subscribe() }
    }

    /// Returns the number of current watchers.
    #[must_use]
    pub fn watchers(&self) -> usize {
        self.messages.receiver_count()
    }

    /// Returns the number of messages that slow watchers missed so far.
    #[must_use]
    pub fn missed(&self) -> u64 {
        self.missed.load(Ordering::Relaxed)
    }

    /// Adds to the count of messages that watchers missed.
    pub fn add_missed(&self, count: u64) {
        self.missed.fetch_add(count, Ordering::Relaxed);
    }

    /// Makes the observer read the state of the node now.
    pub fn wake(&self) {
        self.joined.notify_one();
    }

    pub(super) fn is_watched(&self) -> bool {
        self.watchers() > 0
    }

    /// Waits until the next watcher is added.
    pub(super) async fn joined(&self) {
        self.joined.notified().await;
    }

    pub(super) fn tell(&self, event: &schema::Event) {
        if self.is_watched()
            && let Ok(json) = serde_json::to_string(event)
        {
            let _ = self.messages.send(ViewMessage::Event(event.sequence, json.into()));
        }
    }

    pub(super) fn show(&self, node: schema::Node) {
        let mut latest = self.lock();
        if self.is_watched()
            && let Some(change) = ViewChange::between(&latest, &node)
            && let Ok(json) = serde_json::to_string(&change)
        {
            // The change is sent under the lock, so a new watcher receives either this change or
            // the state after it.
            let _ = self.messages.send(ViewMessage::Change(json.into()));
        }
        *latest = Arc::new(node);
    }

    fn lock(&self) -> MutexGuard<'_, Arc<schema::Node>> {
        self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watcher_sees_the_present_then_what_changes() {
        let hub = ViewHub::default();
        let node = |name: &str| schema::Node { node: name.into(), ..schema::Node::default() };
        hub.show(node("before"));
        let mut watch = hub.watch();
        assert_eq!(watch.present.node, "before");
        hub.show(node("before"));
        assert!(watch.messages.try_recv().is_err(), "nothing changed");
        hub.show(node("after"));
        assert!(
            matches!(watch.messages.try_recv().unwrap(), ViewMessage::Change(json) if json.contains("after"))
        );
        drop(watch);
        assert!(!hub.is_watched());
    }
}
