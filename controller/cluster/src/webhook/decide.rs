//! Decides whether a pod gets the runtime class, without I/O.
//!
//! ```text
//!  pod ──> opted out? bound to a node? another class? ──yes──> Leave(reason)
//!            │ no
//!            ├── requests a GPU by resource, annotation ┐
//!            ├── has claims ──> Ask ──claims──> a GPU ──┤
//!            └── neither ──> Leave(NoGpu)               v
//!                        would the API server reject it with the class? ──yes──> Leave(reason)
//!                                                        │ no
//!                                                        v
//!                                                     Inject
//! ```
//!
//! The webhook never makes the creation of a pod fail. It does not set the class if the API server
//! would then reject the pod. The API server rejects the pod if the RuntimeClass does not exist, if
//! the node selectors of the class and of the pod contradict each other, or if the pod itself sets
//! an overhead. The patch does not contain the overhead, node selector and tolerations of the
//! class. After a change by a webhook, the API server runs its own admission again, which adds
//! them.
//!
//! Settings such as `hostPID`, `hostNetwork` and `privileged` do not exclude a pod. The shim
//! forwards settings that it does not know, and a process can be offloaded in any Linux namespace.
//! If such a setting prevents an offload, the node's controller reports that.

use std::collections::{BTreeMap, BTreeSet};

use json_patch::{AddOperation, Patch, PatchOperation, RemoveOperation, jsonptr::PointerBuf};
use k8s_openapi::{
    api::{
        core::v1::{Container, Pod, PodSpec},
        node::v1::RuntimeClass,
    },
    apimachinery::pkg::api::resource::Quantity,
};

use super::rules::{self, IGNORE, INJECT, NamespaceRules};

/// Annotation that marks a mirror pod, which a kubelet creates for a static pod.
const MIRROR: &str = "kubernetes.io/config.mirror";
/// Label of nodes with their operating system. A pod that does not set `spec.os` selects Windows
/// nodes by this label.
const OS: &str = "kubernetes.io/os";

/// Decision of the webhook about a pod.
#[derive(Clone, Debug, PartialEq)]
pub enum AdmissionDecision {
    /// Set the class on the pod.
    Inject {
        /// JSON patch of the pod.
        patch: Patch,
        /// What makes the pod a GPU pod: the name of a resource, an annotation or a device class.
        because: String,
    },
    /// Do not change the pod, for this reason.
    Leave(LeftAlone),
    /// Read these claims and decide again, because the decision depends on them.
    Ask(BTreeSet<ClaimName>),
}

/// Name of a claim, or of the template of a claim, in a pod's `resourceClaims`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ClaimName {
    /// A ResourceClaim of the pod's namespace.
    Claim(String),
    /// A ResourceClaimTemplate of the pod's namespace.
    Template(String),
}

impl std::fmt::Display for ClaimName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            ClaimName::Claim(name) => write!(f, "ResourceClaim {name}"),
            ClaimName::Template(name) => write!(f, "ResourceClaimTemplate {name}"),
        }
    }
}

/// Device classes of each claim that a pod names. `None`: the claim could not be read.
pub type Claims = BTreeMap<ClaimName, Option<Vec<String>>>;

/// Reason why the webhook does not change a pod.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LeftAlone {
    /// The review is not about the creation of a pod.
    #[error("the request does not create a pod")]
    NotACreation,
    /// The operator excluded the pod's namespace.
    #[error("the pod's namespace is excluded by --exclude-namespace")]
    Namespace,
    /// The pod opted out by label.
    #[error("the pod has the label {INJECT}={IGNORE}, which excludes it")]
    Label,
    /// The pod opted out by annotation.
    #[error("the pod has the annotation {INJECT}=false, which excludes it")]
    Annotation,
    /// The pod is a mirror pod. It represents a static pod, which the kubelet runs already.
    #[error("the pod is a mirror pod, and the kubelet already runs its static pod")]
    Mirror,
    /// The pod is a Windows pod, and there is no shim for Windows.
    #[error("the pod is for Windows nodes, for which Affinode has no shim")]
    Windows,
    /// The pod already names the runtime class.
    #[error("the pod already names the runtime class that the webhook sets")]
    Already,
    /// The pod names another runtime class.
    #[error("the pod names runtime class {0}, which the webhook does not replace")]
    OtherClass(String),
    /// The pod requests no GPU.
    #[error("the pod requests no GPU")]
    NoGpu,
    /// The claim could not be read, so it is unknown whether the pod claims a GPU.
    #[error("cannot read {0}, so it is unknown whether the pod claims a GPU")]
    Claim(ClaimName),
    /// The pod is already bound to a node, and it is unknown whether this node serves the runtime.
    #[error("the pod is already bound to a node, which might not serve the runtime")]
    Bound,
    /// The API server would reject the pod, because the class does not exist.
    #[error("there is no RuntimeClass {0}")]
    NoClass(String),
    /// The API server would reject the pod, because the node selectors of the pod and of the class
    /// conflict.
    #[error(
        "the pod's node selector {key}={pod} contradicts the runtime class, which requires \
         {key}={class}"
    )]
    Selector {
        /// Key of the label for which the two node selectors require different values.
        key: String,
        /// Value that the node selector of the pod requires.
        pod: String,
        /// Value that the node selector of the runtime class requires.
        class: String,
    },
    /// The API server would reject the pod, because the pod itself sets an overhead. Only the class
    /// may set it.
    #[error("the pod sets spec.overhead, which only the runtime class may set")]
    Overhead,
}

impl LeftAlone {
    /// Returns a stable word for this reason, for metrics and audit logs.
    #[must_use]
    pub fn word(&self) -> &'static str {
        match self {
            LeftAlone::NotACreation => "not-a-creation",
            LeftAlone::Namespace => "namespace-excluded",
            LeftAlone::Label | LeftAlone::Annotation => "opted-out",
            LeftAlone::Mirror => "mirror-pod",
            LeftAlone::Windows => "windows",
            LeftAlone::Already => "already",
            LeftAlone::OtherClass(_) => "other-class",
            LeftAlone::NoGpu => "no-gpu",
            LeftAlone::Claim(_) => "claim-unknown",
            LeftAlone::Bound => "bound-to-node",
            LeftAlone::NoClass(_) => "no-class",
            LeftAlone::Selector { .. } => "node-selector",
            LeftAlone::Overhead => "overhead",
        }
    }

    /// Returns whether the user that creates the pod gets a warning. This is the case if the pod
    /// may be a GPU pod and was not excluded, but the class cannot be set.
    #[must_use]
    pub fn warns(&self) -> bool {
        matches!(
            self,
            LeftAlone::Claim(_)
                | LeftAlone::Bound
                | LeftAlone::NoClass(_)
                | LeftAlone::Selector { .. }
                | LeftAlone::Overhead
        )
    }
}

/// Decides about a pod that is being created in this namespace, given the present RuntimeClass.
#[must_use]
pub fn decide(
    pod: &Pod,
    namespace: &str,
    rules: &NamespaceRules,
    class: Option<&RuntimeClass>,
    claims: &Claims,
) -> AdmissionDecision {
    match judge(pod, namespace, rules, class, claims) {
        Ok(decision) => decision,
        Err(left) => AdmissionDecision::Leave(left),
    }
}

fn judge(
    pod: &Pod,
    namespace: &str,
    rules: &NamespaceRules,
    class: Option<&RuntimeClass>,
    claims: &Claims,
) -> Result<AdmissionDecision, LeftAlone> {
    let Some(spec) = &pod.spec else { return Err(LeftAlone::NoGpu) };
    chosen(pod, spec, namespace, rules)?;
    let because = match gpu_resource(spec, rules).or_else(|| gpu_annotation(pod, rules)) {
        Some(resource) => resource,
        None => match gpu_claim(spec, rules, claims)? {
            ClaimKind::Gpu(class) => class,
            ClaimKind::Unknown(unread) => return Ok(AdmissionDecision::Ask(unread)),
        },
    };
    if bound(spec) {
        return Err(LeftAlone::Bound);
    }
    let class = class.ok_or_else(|| LeftAlone::NoClass(rules.runtime_class.clone()))?;
    fits(spec, class)?;
    Ok(AdmissionDecision::Inject { patch: patch(spec, &rules.runtime_class), because })
}

/// Checks that the pod may get the runtime class. `Err`: the reason why it may not, such as an
/// exclusion of its namespace, or another runtime class that the pod names.
fn chosen(
    pod: &Pod,
    spec: &PodSpec,
    namespace: &str,
    rules: &NamespaceRules,
) -> Result<(), LeftAlone> {
    let has = |map: &Option<BTreeMap<String, String>>, key: &str, value: &str| {
        map.as_ref().and_then(|map| map.get(key)).is_some_and(|held| held == value)
    };
    if rules::any(&rules.excluded_namespaces, namespace) {
        return Err(LeftAlone::Namespace);
    }
    if has(&pod.metadata.labels, INJECT, IGNORE) {
        return Err(LeftAlone::Label);
    }
    if has(&pod.metadata.annotations, INJECT, "false") {
        return Err(LeftAlone::Annotation);
    }
    if pod.metadata.annotations.as_ref().is_some_and(|map| map.contains_key(MIRROR)) {
        return Err(LeftAlone::Mirror);
    }
    let windows = spec.os.as_ref().is_some_and(|os| os.name == "windows");
    if windows || has(&spec.node_selector, OS, "windows") {
        return Err(LeftAlone::Windows);
    }
    match spec.runtime_class_name.as_deref() {
        Some(name) if name == rules.runtime_class => Err(LeftAlone::Already),
        Some(name) if !name.is_empty() && !rules.replaced_classes.iter().any(|r| r == name) => {
            Err(LeftAlone::OtherClass(name.to_owned()))
        }
        _ => Ok(()),
    }
}

/// Returns the containers of a pod that can request devices. Ephemeral containers are left out,
/// because they use the devices of their pod.
fn containers(spec: &PodSpec) -> impl Iterator<Item = &Container> {
    spec.init_containers.iter().flatten().chain(&spec.containers)
}

/// Returns the name of the resource by which the pod requests a GPU.
fn gpu_resource(spec: &PodSpec, rules: &NamespaceRules) -> Option<String> {
    containers(spec)
        .filter_map(|container| container.resources.as_ref())
        .flat_map(|resources| resources.limits.iter().chain(&resources.requests).flatten())
        .find(|(name, quantity)| rules::any(&rules.resources, name) && !is_zero(quantity))
        .map(|(name, _)| name.clone())
}

/// Returns the name of the annotation by which the pod requests a part of a GPU.
fn gpu_annotation(pod: &Pod, rules: &NamespaceRules) -> Option<String> {
    let mut names = pod.metadata.annotations.iter().flat_map(BTreeMap::keys);
    names.find(|name| rules::any(&rules.annotations, name)).cloned()
}

/// Returns whether all digits of a quantity are zero, as in `0`, `0.0` and `0k`.
fn is_zero(quantity: &Quantity) -> bool {
    let number = quantity.0.split(['e', 'E']).next().unwrap_or_default();
    !number.chars().any(|c| ('1'..='9').contains(&c))
}

enum ClaimKind {
    Gpu(String),
    Unknown(BTreeSet<ClaimName>),
}

/// Returns the device class by which the pod claims a GPU, or the claims that must be read to find
/// out. `Err`: the pod claims no GPU, or a claim cannot be read.
fn gpu_claim(
    spec: &PodSpec,
    rules: &NamespaceRules,
    claims: &Claims,
) -> Result<ClaimKind, LeftAlone> {
    let used: BTreeSet<&str> = containers(spec)
        .filter_map(|container| container.resources.as_ref())
        .flat_map(|resources| resources.claims.iter().flatten())
        .map(|claim| claim.name.as_str())
        .collect();
    let names: BTreeSet<ClaimName> = spec
        .resource_claims
        .iter()
        .flatten()
        .filter(|claim| used.contains(claim.name.as_str()))
        .filter_map(|claim| {
            match (&claim.resource_claim_name, &claim.resource_claim_template_name) {
                (Some(name), _) => Some(ClaimName::Claim(name.clone())),
                (None, Some(name)) => Some(ClaimName::Template(name.clone())),
                (None, None) => None,
            }
        })
        .collect();
    let classes = names.iter().filter_map(|name| claims.get(name)).flatten().flatten();
    if let Some(class) = classes.into_iter().find(|c| rules::any(&rules.device_classes, c)) {
        return Ok(ClaimKind::Gpu(class.clone()));
    }
    let unread: BTreeSet<ClaimName> =
        names.iter().filter(|name| !claims.contains_key(name)).cloned().collect();
    if !unread.is_empty() {
        return Ok(ClaimKind::Unknown(unread));
    }
    match names.into_iter().find(|name| claims.get(name) == Some(&None)) {
        Some(name) => Err(LeftAlone::Claim(name)),
        None => Err(LeftAlone::NoGpu),
    }
}

/// Returns whether the node of the pod is already chosen. The pod then names the node, or has a
/// node affinity for it, as the pods of a DaemonSet have.
fn bound(spec: &PodSpec) -> bool {
    let by_field = spec
        .affinity
        .as_ref()
        .and_then(|affinity| affinity.node_affinity.as_ref())
        .and_then(|node| node.required_during_scheduling_ignored_during_execution.as_ref())
        .is_some_and(|required| {
            let mut fields =
                required.node_selector_terms.iter().flat_map(|t| t.match_fields.iter().flatten());
            fields.any(|field| field.key == "metadata.name" && field.operator == "In")
        });
    by_field || spec.node_name.as_ref().is_some_and(|name| !name.is_empty())
}

/// Checks that the API server would accept the pod with the runtime class. `Err`: the reason why
/// the API server would reject it.
fn fits(spec: &PodSpec, class: &RuntimeClass) -> Result<(), LeftAlone> {
    let wanted = class.scheduling.as_ref().and_then(|s| s.node_selector.as_ref());
    for (key, value) in wanted.into_iter().flatten() {
        let own = spec.node_selector.as_ref().and_then(|selector| selector.get(key));
        if let Some(own) = own.filter(|own| *own != value) {
            let (key, pod, class) = (key.clone(), own.clone(), value.clone());
            return Err(LeftAlone::Selector { key, pod, class });
        }
    }
    // If the pod names a class that the webhook replaces, the API server may have added the
    // overhead of that class.
    if has_overhead(spec) && chosen_class(spec).is_none() {
        return Err(LeftAlone::Overhead);
    }
    Ok(())
}

fn has_overhead(spec: &PodSpec) -> bool {
    spec.overhead.as_ref().is_some_and(|overhead| !overhead.is_empty())
}

fn chosen_class(spec: &PodSpec) -> Option<&str> {
    spec.runtime_class_name.as_deref().filter(|name| !name.is_empty())
}

/// Returns the patch that sets the class. The patch also removes the overhead of the class that the
/// pod named before.
fn patch(spec: &PodSpec, class: &str) -> Patch {
    let at = |field: &str| PointerBuf::from_tokens(["spec", field]);
    let add = AddOperation { path: at("runtimeClassName"), value: class.into() };
    let mut operations = vec![PatchOperation::Add(add)];
    if has_overhead(spec) {
        operations.push(PatchOperation::Remove(RemoveOperation { path: at("overhead") }));
    }
    Patch(operations)
}

#[cfg(test)]
mod tests;
