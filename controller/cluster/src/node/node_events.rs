//! Publishes Kubernetes events about the node object, which `kubectl describe node` shows.

use affinode_installer::doctor::sharing::{SharingFinding, SharingKind};
use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Client,
    runtime::events::{Event, EventType, Recorder, Reporter},
};

use crate::error_chain;

/// Maximum length of an event's note, in bytes. The API server's limit is 1024 bytes.
const MAX_NOTE_BYTES: usize = 1000;

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
            note: Some(shortened(why)),
            action: "Configure".into(),
            secondary: None,
        };
        self.publish(&event).await;
    }

    /// Publishes an event: a way in which the GPUs of the node are shared, or a problem of it, was
    /// found.
    pub async fn gpu_sharing(&self, kind: SharingKind, finding: &SharingFinding) {
        let is_problem = !finding.advice.is_empty();
        let advice = if is_problem { format!(". {}", finding.advice) } else { String::new() };
        let note = format!("{}{advice}. See {}", finding.found, kind.page());
        let event = Event {
            type_: if is_problem { EventType::Warning } else { EventType::Normal },
            reason: sharing_reason(kind).into(),
            note: Some(shortened(&note)),
            action: "ShareGPUs".into(),
            secondary: None,
        };
        self.publish(&event).await;
    }

    async fn publish(&self, event: &Event) {
        if let Err(error) = self.recorder.publish(event, &self.node).await {
            tracing::warn!(
                "node event: the event cannot be published: {}",
                error_chain::chain(&error)
            );
        }
    }
}

/// Returns the reason of the event for a kind of GPU sharing. Each kind has a reason of its own,
/// because events with equal reasons are counted as one.
const fn sharing_reason(kind: SharingKind) -> &'static str {
    match kind {
        SharingKind::TimeSlicing => "AffinodeGPUTimeSlicing",
        SharingKind::Seats => "AffinodeGPUSeats",
        SharingKind::Kai => "AffinodeGPUSharingKAI",
        SharingKind::NvidiaDra => "AffinodeGPUSharingDRA",
        SharingKind::Hami => "AffinodeGPUSharingHAMi",
        SharingKind::Mig => "AffinodeGPUInMIGMode",
        SharingKind::Unshared => "AffinodeGPUNotShared",
        SharingKind::OfferedTwice => "AffinodeGPUOfferedTwice",
        SharingKind::Unknown => "AffinodeGPUSharingUnknown",
    }
}

fn shortened(text: &str) -> String {
    text[..text.floor_char_boundary(MAX_NOTE_BYTES)].to_owned()
}
