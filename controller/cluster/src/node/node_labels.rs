//! What the cluster sees of this node: a label that pods of the runtime class are scheduled by,
//! and annotations for people.

use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
    core::PartialObjectMeta,
};
use serde_json::{Value, json};

/// The label of a node whose containerd serves the runtime: `true`.
pub const RUNTIME: &str = "affinode.io/runtime";
/// Which installation in the cluster looks after the node: `namespace/name`.
pub const AGENT: &str = "affinode.io/agent";
/// How the node stands, for people and for the uninstaller.
pub const STATE: &str = "affinode.io/state";
/// The uninstaller asks for the node back: first with [`may_go`], whether it may have it, then with
/// [`must_go`].
pub const RETIRE: &str = "affinode.io/retire";
/// VRAM in use by containers that could be moved out now, in bytes.
pub const RECLAIMABLE: &str = "affinode.io/reclaimable-vram-bytes";
/// VRAM that offloaded containers have given back, in bytes.
pub const RECLAIMED: &str = "affinode.io/reclaimed-vram-bytes";
/// The certificate that the node's agent shows: its SHA-256, 64 hex digits.
pub const CERTIFICATE: &str = "affinode.io/certificate-sha256";
/// All annotations of ours.
pub const ANNOTATIONS: [&str; 6] = [AGENT, STATE, RETIRE, RECLAIMABLE, RECLAIMED, CERTIFICATE];

/// The word of [`STATE`] when it may be taken off: no container of it runs.
pub const READY: &str = "ready to be taken off";
/// The word of [`STATE`] when nothing of Affinode is left on the node.
pub const RETIRED: &str = "retired";
/// How [`STATE`] begins when it cannot be taken off.
pub const NOT_RETIRED: &str = "cannot be taken off: ";

/// The word of [`RETIRE`] that asks agents of an installation whether it may be taken off.
#[must_use]
pub fn may_go(installation: &str) -> String {
    installation.to_owned()
}

/// The word of [`RETIRE`] that asks them to take it off.
#[must_use]
pub fn must_go(installation: &str) -> String {
    format!("{installation} now")
}

/// A node object.
#[derive(Clone)]
pub struct NodeLabels {
    api: Api<Node>,
    name: String,
}

impl NodeLabels {
    /// The object of that name.
    #[must_use]
    pub fn new(client: Client, name: &str) -> NodeLabels {
        NodeLabels { api: Api::all(client), name: name.to_owned() }
    }

    /// Its labels and annotations.
    ///
    /// # Errors
    /// The API server does not answer, or says no.
    pub async fn read(&self) -> kube::Result<PartialObjectMeta<Node>> {
        self.api.get_metadata(&self.name).await
    }

    /// Says that the runtime is served, or not.
    ///
    /// # Errors
    /// As [`NodeLabels::read`].
    pub async fn serve(&self, served: bool) -> kube::Result<()> {
        let value = if served { json!("true") } else { Value::Null };
        self.merge(json!({ "labels": { RUNTIME: value } })).await
    }

    /// Sets annotations, or takes them off.
    ///
    /// # Errors
    /// As [`NodeLabels::read`].
    pub async fn annotate(&self, values: &[(&str, Option<String>)]) -> kube::Result<()> {
        let values: serde_json::Map<String, Value> =
            values.iter().map(|(name, value)| ((*name).to_owned(), json!(value))).collect();
        self.merge(json!({ "annotations": values })).await
    }

    async fn merge(&self, metadata: Value) -> kube::Result<()> {
        let patch = Patch::Merge(json!({ "metadata": metadata }));
        self.api.patch_metadata(&self.name, &PatchParams::default(), &patch).await.map(|_| ())
    }
}
