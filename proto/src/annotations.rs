//! Annotations of containers that several programs must interpret in the same way.

/// Annotation that decides when the container is offloaded.
pub const OFFLOAD: &str = "affinode.io/offload";
/// Annotation that disables offloads, for a container whose clients cannot wait for a restore.
pub const LATENCY_SENSITIVE: &str = "affinode.io/latency-sensitive";

/// Whether two annotations set the same setting. If they come from sources of different precedence,
/// the one with the lower precedence has no effect.
#[must_use]
pub fn set_the_same(one: &str, other: &str) -> bool {
    let sets_mode = |name: &str| name == OFFLOAD || name == LATENCY_SENSITIVE;
    one == other || (sets_mode(one) && sets_mode(other))
}
