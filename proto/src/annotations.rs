//! Annotations of containers that several programs must interpret in the same way.

/// Container annotation that sets the offload mode: when the container may be offloaded.
pub const OFFLOAD: &str = "affinode.io/offload";
/// Container annotation that disables offloads of the container, because its clients cannot wait
/// for a restore.
pub const LATENCY_SENSITIVE: &str = "affinode.io/latency-sensitive";

/// Returns whether two annotations control the same setting. If they come from sources of different
/// precedence, the annotation of the source with lower precedence has no effect.
#[must_use]
pub fn set_the_same(one: &str, other: &str) -> bool {
    let sets_mode = |name: &str| name == OFFLOAD || name == LATENCY_SENSITIVE;
    one == other || (sets_mode(one) && sets_mode(other))
}
