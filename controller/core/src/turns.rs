//! Decides how long a container keeps its VRAM while another container waits for it. The times
//! depend on the delay that the eviction causes to the container's next call: the time of its
//! restore.

use std::ops::RangeInclusive;

use super::{Key, Millis, container::Container, node_state::NodeState, offload_level};

/// A neighbour (another container on the same GPU) may be evicted when it has been unused for this
/// many times the delay that the eviction causes to its next call: the time of its restore. If the
/// VRAM is free again by then, the call waits at most half as long as the pause before it.
const UNUSED_DELAYS: u64 = 2;
/// Minimum and maximum time without use after which a neighbour may be evicted. A shorter minimum
/// would evict programs that compute on the processor between two calls.
const UNUSED_MS: RangeInclusive<Millis> = 1_000..=10_000;
/// A neighbour in use may be evicted for a container with the restore policy `immediate` when it
/// has been resident for this many times the delay that the eviction causes, or for 10 s.
const TURN_DELAYS: u64 = 10;
const TURN_MS: Millis = 10_000;

/// Time without use after which a neighbour may be evicted, in milliseconds. `delay_ms`: delay that
/// the eviction causes to its next call. `idle_after_ms`: time after which it is idle.
fn unused_ms(delay_ms: Millis, idle_after_ms: Millis) -> Millis {
    let paid_ms = delay_ms.saturating_mul(UNUSED_DELAYS);
    paid_ms.clamp(*UNUSED_MS.start(), *UNUSED_MS.end()).min(idle_after_ms)
}

/// Time for which a neighbour in use stays resident before it is evicted for a container with the
/// restore policy `immediate`, in milliseconds.
fn turn_ms(delay_ms: Millis, minimum_residency_ms: Millis) -> Millis {
    delay_ms.saturating_mul(TURN_DELAYS).min(TURN_MS).max(minimum_residency_ms)
}

/// Whether a neighbour has been unused for long enough to be evicted for a waiter.
pub(super) fn is_unused(node: &NodeState, key: &Key, container: &Container) -> bool {
    is_unused_for_part(node, key, container, 1)
}

/// Whether a neighbour has been unused for half of the time after which it may be evicted.
pub(super) fn is_half_unused(node: &NodeState, key: &Key, container: &Container) -> bool {
    is_unused_for_part(node, key, container, 2)
}

fn is_unused_for_part(node: &NodeState, key: &Key, container: &Container, part: u64) -> bool {
    let delay_ms = offload_level::expected_delay_ms(node, key, false);
    let unused_ms = unused_ms(delay_ms, container.idle_after_ms());
    node.clock.now.saturating_sub(container.usage.last_use) >= unused_ms / part
}

/// Whether a neighbour in use has been resident long enough to be evicted for a container with the
/// restore policy `immediate`.
pub(super) fn had_its_turn(node: &NodeState, key: &Key, container: &Container) -> bool {
    let delay_ms = offload_level::expected_delay_ms(node, key, false);
    let turn_ms = turn_ms(delay_ms, container.policy.minimum_residency_ms);
    container.figures.restored_at.is_none_or(|t| node.clock.now.saturating_sub(t) >= turn_ms)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Five minutes, the default idle timeout.
    const IDLE_AFTER_MS: Millis = 300_000;

    #[test]
    fn neighbour_stays_longer_if_its_restore_is_slow() {
        let copied_24_gib = unused_ms(600, IDLE_AFTER_MS);
        let checkpointed_24_gib = unused_ms(3_700, IDLE_AFTER_MS);
        assert_eq!((copied_24_gib, checkpointed_24_gib), (1_200, 7_400));
        assert_eq!(unused_ms(20, IDLE_AFTER_MS), 1_000, "the shortest time");
        assert_eq!(unused_ms(60_000, IDLE_AFTER_MS), 10_000, "the longest time");
        assert_eq!(unused_ms(3_700, 200), 200, "its own idle timeout is shorter");
    }

    #[test]
    fn turn_in_use_is_long_against_its_cost() {
        assert_eq!((turn_ms(600, 1_000), turn_ms(3_700, 1_000)), (6_000, 10_000));
        assert_eq!(turn_ms(600, 20_000), 20_000, "a longer residency was configured");
    }
}
