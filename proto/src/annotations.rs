//! Annotations of containers that several programs must interpret in the same way.

/// Container annotation that sets the offload mode: when the container may be offloaded.
pub const OFFLOAD: &str = "affinode.io/offload";
/// Container annotation that disables offloads of the container, because its clients cannot wait
/// for a restore.
pub const LATENCY_SENSITIVE: &str = "affinode.io/latency-sensitive";
/// Memory of a GPU, in bytes, that the resource claims of a container were allocated: a decimal
/// number. The shim adds it to a container's annotations, from the files of its claims. The
/// container's VRAM limit is at most this amount. In the file of one device, the value is
/// `DEVICE=BYTES`. A pod cannot set this annotation.
pub const CLAIMED_VRAM: &str = "affinode.io/claimed-vram";

/// Returns whether two annotations control the same setting. If they come from sources of different
/// precedence, the annotation of the source with lower precedence has no effect.
#[must_use]
pub fn set_the_same(one: &str, other: &str) -> bool {
    let sets_mode = |name: &str| name == OFFLOAD || name == LATENCY_SENSITIVE;
    one == other || (sets_mode(one) && sets_mode(other))
}
