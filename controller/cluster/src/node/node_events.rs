//! Publishes Kubernetes events about the node object, which `kubectl describe node` shows.

use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Client,
    runtime::events::{Event, EventType, Recorder, Reporter},
};

use crate::error_chain;

/// Maximum length of an event's note, in characters. The API server's limit is 1024 bytes.
const MAX_NOTE_CHARS: usize = 250;

/// Publishes events of one node object.
pub struct NodeEvents {
    recorder: Recorder,
    node: ObjectReference,
}

impl NodeEvents {
    /// Returns a publisher of events for the node of this name. `pod` is the name of the agent's
    /// pod.
    #[must_use]
    pub fn new(client: Client, node: &str, pod: &str) -> NodeEvents {
        let reporter =
            Reporter { controller: "affinode.io/node".into(), instance: Some(pod.to_owned()) };
        let node = ObjectReference {
            api_version: Some("v1".into()),
            kind: Some("Node".into()),
            name: Some(node.to_owned()),
            // The kubelet writes the node's name as uid, and `kubectl describe node` searches for
            // events with this uid.
            uid: Some(node.to_owned()),
            ..ObjectReference::default()
        };
        NodeEvents { recorder: Recorder::new(client, reporter), node }
    }

    /// Publishes an event: the cluster's configuration is invalid, and the node keeps the earlier
    /// configuration.
    pub async fn config_refused(&self, why: &str) {
        let event = Event {
            type_: EventType::Warning,
            reason: "AffinodeConfigurationRefused".into(),
            note: Some(why.chars().take(MAX_NOTE_CHARS).collect()),
            action: "Configure".into(),
            secondary: None,
        };
        if let Err(error) = self.recorder.publish(&event, &self.node).await {
            tracing::warn!(
                "node event: the event cannot be published: {}",
                error_chain::chain(&error)
            );
        }
    }
}
