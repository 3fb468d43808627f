//! Annotations of containers that several programs must interpret in the same way.

/// Container annotation that sets the offload mode: when the container may be offloaded.
pub const OFFLOAD: &str = "affinode.io/offload";
/// Container annotation that disables offloads of the container, because its clients cannot wait
/// for a restore.
pub const LATENCY_SENSITIVE: &str = "affinode.io/latency-sensitive";
/// Annotation with the amount of GPU memory, in bytes, that Kubernetes has allocated to the
/// container's ResourceClaims. The value is a decimal number. The container's VRAM limit is at most
/// this amount. The shim adds the annotation from the policy files of the claims. Each policy file
/// is for one device, and there the value has the form `DEVICE=BYTES`. A pod cannot set this
/// annotation.
pub const CLAIMED_VRAM: &str = "affinode.io/claimed-vram";

/// Annotation with the ResourceClaims of a container of Kubernetes, each as `namespace/name`, sorted
/// and separated by commas. The shim adds the annotation from the files of the claims, which only
/// root writes. A pod cannot set this annotation.
pub const CLAIM: &str = "affinode.io/claim";

/// Returns whether two annotations control the same setting. If they come from sources of different
/// precedence, the annotation of the source with lower precedence has no effect.
#[must_use]
pub fn set_the_same(one: &str, other: &str) -> bool {
    let sets_mode = |name: &str| name == OFFLOAD || name == LATENCY_SENSITIVE;
    one == other || (sets_mode(one) && sets_mode(other))
}
