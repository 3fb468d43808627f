//! The label of a node whose GPUs nothing has used for a time that the operator sets.

use std::time::Duration;

use affinode_proto::api::control::ListResponse;
use k8s_openapi::jiff::Timestamp;
use tokio::time::Instant;

use super::{idle_gpus::IdleGpus, node_labels::NodeLabels};
use crate::error_chain;

/// Writes the label of idle GPUs on the node object.
pub struct IdleLabel {
    node_labels: NodeLabels,
    gpus: IdleGpus,
    /// Time without use after which the node gets the label. `None`: it never gets the label.
    after: Option<Duration>,
    started: Instant,
    /// Whether the node has the label. `None`: this is unknown, because an earlier agent may have
    /// set it.
    is_set: Option<bool>,
}

impl IdleLabel {
    /// Creates the label of this node. `after`: the time without use after which the node gets it.
    #[must_use]
    pub fn new(node_labels: NodeLabels, after: Option<Duration>) -> IdleLabel {
        let gpus = IdleGpus::default();
        IdleLabel { node_labels, gpus, after, started: Instant::now(), is_set: None }
    }

    /// Sets or removes the label after a reading of the controller. `None`: the node has no
    /// controller. If the API server cannot be reached, the next call tries again.
    pub async fn update(&mut self, reading: Option<&ListResponse>) {
        let idle = self.gpus.update(self.started.elapsed(), reading);
        let idle = idle.filter(|time| self.after.is_some_and(|after| *time >= after));
        if self.is_set == Some(idle.is_some()) {
            return;
        }
        let since = idle.and_then(|time| Timestamp::now().checked_sub(time).ok());
        let since = since.map(|since| format!("{since:.0}"));
        match self.node_labels.idle_since(since.as_deref()).await {
            Ok(()) => {
                let was_set = self.is_set.replace(since.is_some());
                match since {
                    Some(since) => tracing::info!("node: nothing uses its GPUs since {since}"),
                    None if was_set == Some(true) => tracing::info!("node: its GPUs are in use"),
                    None => {}
                }
            }
            Err(error) => tracing::warn!(
                "node object: cannot write the label of idle GPUs: {}",
                error_chain::chain(&error)
            ),
        }
    }
}
