//! Affinode's label and annotations of the node object. The scheduler selects nodes for pods of the
//! runtime class by the label.

use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
    core::PartialObjectMeta,
};
use serde_json::{Value, json};

/// Label of a node whose containerd serves the runtime. The value is `true`.
pub const RUNTIME: &str = "affinode.io/runtime";
/// Label by which an operator excludes a node, with the value `true`. Affinode is then not
/// installed on the node, or is removed from it.
pub const EXCLUDE: &str = "affinode.io/exclude";
/// Label by which an operator leaves the GPUs of a node to another program, with the value `false`.
/// Affinode's device plugin and DRA driver then do not offer them. The runtime is still served.
pub const OFFER_GPUS: &str = "affinode.io/offer-gpus";
/// Annotation with the installation that manages the node, as `namespace/name`.
pub const AGENT: &str = "affinode.io/agent";
/// Annotation with the state of the node, for operators and for the uninstaller.
pub const STATE: &str = "affinode.io/state";
/// Annotation with the uninstaller's request. First the uninstaller sets the value that [`may_go`]
/// returns, to ask whether Affinode can be removed. Then it sets the value that [`must_go`]
/// returns, to request the removal.
pub const RETIRE: &str = "affinode.io/retire";
/// Annotation with the time until which the uninstaller's request applies, in the format of RFC
/// 3339. Without this annotation, the request applies until it is withdrawn.
pub const RETIRE_UNTIL: &str = "affinode.io/retire-until";
/// Annotation with the VRAM of idle containers that could be offloaded now, in bytes.
pub const RECLAIMABLE: &str = "affinode.io/reclaimable-vram-bytes";
/// Annotation with the VRAM that offloaded containers have freed, in bytes.
pub const RECLAIMED: &str = "affinode.io/reclaimed-vram-bytes";
/// Label of a node on which nothing has used a GPU for a time that the operator sets. The value is
/// `true`.
pub const GPUS_IDLE: &str = "affinode.io/gpus-idle";
/// Annotation with the time since when nothing has used a GPU of a node with the label
/// [`GPUS_IDLE`], in the format of RFC 3339.
pub const GPUS_IDLE_SINCE: &str = "affinode.io/gpus-idle-since";
/// Label with the program that offers the GPUs of the node to Kubernetes: `nvidia-plugin`,
/// `nvidia-dra`, `affinode-plugin` or `affinode-dra`, or `several` if there is more than one.
pub const GPUS_OFFERED_BY: &str = "affinode.io/gpus-offered-by";
/// Annotation with the kinds of GPU sharing that were found on the node, separated by commas.
pub const GPU_SHARING: &str = "affinode.io/gpu-sharing";
/// Annotation with the SHA-256 of the agent's certificate, as 64 hex digits.
pub const CERTIFICATE: &str = "affinode.io/certificate-sha256";
/// All annotations that the agent sets, except [`GPUS_IDLE_SINCE`] and [`GPU_SHARING`], which belong
/// to labels.
pub const ANNOTATIONS: [&str; 7] =
    [AGENT, STATE, RETIRE, RETIRE_UNTIL, RECLAIMABLE, RECLAIMED, CERTIFICATE];

/// Value of [`STATE`] when Affinode can be removed, because no container of the runtime runs.
pub const READY: &str = "ready to be removed";
/// Value of [`STATE`] after Affinode was removed from the node.
pub const RETIRED: &str = "retired";
/// Value of [`STATE`] when Affinode is not installed on the node, because of [`EXCLUDE`].
pub const EXCLUDED: &str = "excluded: Affinode is not on this node";
/// Prefix of the value of [`STATE`] when Affinode cannot be removed. The reason follows.
pub const NOT_RETIRED: &str = "cannot be removed: ";

/// Returns the value of [`RETIRE`] that asks whether the installation can be removed.
#[must_use]
pub fn may_go(installation: &str) -> String {
    installation.to_owned()
}

/// Returns the value of [`RETIRE`] that requests the removal.
#[must_use]
pub fn must_go(installation: &str) -> String {
    format!("{installation} now")
}

/// Client for one node object.
#[derive(Clone)]
pub struct NodeLabels {
    api: Api<Node>,
    name: String,
}

impl NodeLabels {
    /// Returns a client for the node object of this name.
    #[must_use]
    pub fn new(client: Client, name: &str) -> NodeLabels {
        NodeLabels { api: Api::all(client), name: name.to_owned() }
    }

    /// Reads the labels and annotations of the node object.
    ///
    /// # Errors
    /// If the API server does not reply, or returns an error.
    pub async fn read(&self) -> kube::Result<PartialObjectMeta<Node>> {
        self.api.get_metadata(&self.name).await
    }

    /// Sets or removes the label [`RUNTIME`], which marks a node whose containerd serves the
    /// runtime.
    ///
    /// # Errors
    /// If the API server does not reply, or returns an error.
    pub async fn serve(&self, served: bool) -> kube::Result<()> {
        let value = if served { json!("true") } else { Value::Null };
        self.merge(json!({ "labels": { RUNTIME: value } })).await
    }

    /// Sets the label [`GPUS_IDLE`] and its annotation with this time, or removes both.
    ///
    /// # Errors
    /// If the API server does not reply, or returns an error.
    pub async fn idle_since(&self, since: Option<&str>) -> kube::Result<()> {
        let label = since.map(|_| "true");
        let labels = json!({ GPUS_IDLE: label });
        self.merge(json!({ "labels": labels, "annotations": { GPUS_IDLE_SINCE: since } })).await
    }

    /// Sets the label [`GPUS_OFFERED_BY`] and the annotation [`GPU_SHARING`]. `None` removes one.
    ///
    /// # Errors
    /// If the API server does not reply, or returns an error.
    pub async fn gpu_sharing(
        &self,
        offered_by: Option<&str>,
        kinds: Option<&str>,
    ) -> kube::Result<()> {
        let labels = json!({ GPUS_OFFERED_BY: offered_by });
        self.merge(json!({ "labels": labels, "annotations": { GPU_SHARING: kinds } })).await
    }

    /// Sets annotations of the node object. `None` removes an annotation.
    ///
    /// # Errors
    /// If the API server does not reply, or returns an error.
    pub async fn annotate(&self, values: &[(&str, Option<String>)]) -> kube::Result<()> {
        let values: serde_json::Map<String, Value> =
            values.iter().map(|(name, value)| ((*name).to_owned(), json!(value))).collect();
        self.merge(json!({ "annotations": values })).await
    }

    /// Removes the uninstaller's request from the node object, as it was read. If the object has
    /// changed since, the request stays, because it may be a newer one.
    ///
    /// # Errors
    /// If the API server does not reply, or returns an error other than a conflict.
    pub async fn clear_request(&self, read: &PartialObjectMeta<Node>) -> kube::Result<()> {
        let none = json!({ RETIRE: null, RETIRE_UNTIL: null });
        let version = &read.metadata.resource_version;
        match self.merge(json!({ "resourceVersion": version, "annotations": none })).await {
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
            done => done,
        }
    }

    /// Removes all labels and annotations that agents set.
    ///
    /// # Errors
    /// If the API server does not reply, or returns an error.
    pub async fn clear(&self) -> kube::Result<()> {
        let labels = json!({ RUNTIME: null, GPUS_IDLE: null, GPUS_OFFERED_BY: null });
        let names = ANNOTATIONS.into_iter().chain([GPUS_IDLE_SINCE, GPU_SHARING]);
        let annotations: serde_json::Map<String, Value> =
            names.map(|name| (name.to_owned(), Value::Null)).collect();
        self.merge(json!({ "labels": labels, "annotations": annotations })).await
    }

    async fn merge(&self, metadata: Value) -> kube::Result<()> {
        let patch = Patch::Merge(json!({ "metadata": metadata }));
        self.api.patch_metadata(&self.name, &PatchParams::default(), &patch).await.map(|_| ())
    }
}
