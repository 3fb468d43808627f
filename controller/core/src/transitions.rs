//! Moves a container step by step between the goals of [`Goal`]: offload and restore.
//!
//! ```text
//! Resident ──idle, policy──> OffloadRequested ──survey: fits──> Offloaded: close, lock, survey, journal, copy out, checkpoint
//!   ^                       │ in use, no host memory   │ busy, error, wake
//!   └───────────────────────┴──────────────────────────┘ unlock, open; offloaded processes wait for a grant
//! ```
//!
//! A survey is a reading of host memory and GPUs. The CUDA context of an offloaded container may be
//! evicted later: `container/goal.rs` describes this.
//!
//! `eligibility.rs` decides whether a container is offloaded. The steps are in `offload.rs` and
//! `restore.rs`. Reports on orders are handled in `completions.rs`. A function that changes a
//! container does not call `advance`. It calls `resume` (`output.rs`), and the node then calls
//! `advance` for the container.

use affinode_proto::state::State;

use super::{Key, container::Goal, node_state::NodeState, offload, restore};

/// Sends the next orders for a container's offload or restore, if any are due.
pub(super) fn advance(node: &mut NodeState, key: &Key) {
    let Some(container) = node.registry.containers.get(key) else {
        return;
    };
    if container.shown.state == State::Unregistered {
        return;
    }
    restore::end_incomplete_restore(node, key);
    let positions = node.positions(key);
    if positions.is_empty() {
        return;
    }
    let Some(container) = node.registry.containers.get(key) else { return };
    match container.goal {
        Goal::OffloadRequested(_) => {}
        Goal::Offloaded(_) => offload::advance_offload(node, key, &positions),
        Goal::Resident(_) => restore::advance_restore(node, key, &positions),
    }
}
