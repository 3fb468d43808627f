//! VRAM pressure: finds the GPUs on which a container waits for VRAM that other containers hold.
//!
//! ```text
//! no pressure ──a restore or an allocation waits for 1 s──> pressure ──none waits──> no pressure
//! ```
//!
//! Programs that can free memory themselves read the pressure in their container. Operators see it
//! in the events.

use std::collections::BTreeSet;

use affinode_proto::{event::EventKind, reason::Reason};

use super::{Key, Millis, event::NodeEvent, needs, node_state::NodeState};

/// Time for which a container or an allocation must wait for VRAM to count as pressure.
const WAITED_MS: Millis = 1_000;

/// Updates the set of GPUs with pressure (a container waits for their VRAM), and publishes an event
/// for each change.
pub(super) fn look_at_pressure(node: &mut NodeState) {
    let waiting = node
        .admission
        .queue
        .in_order(node.clock.now)
        .into_iter()
        .filter(|key| has_waited(node, key));
    let needs = waiting.flat_map(|key| {
        needs::needs_with(node, &key, node.alloc_wait_of(&key).map(|(id, want)| (id, want.ticket)))
    });
    let pressed: BTreeSet<String> = needs.map(|need| need.uuid).collect();
    let before = std::mem::replace(&mut node.gpus.under_pressure, pressed);
    let changed: Vec<String> =
        before.symmetric_difference(&node.gpus.under_pressure).cloned().collect();
    for uuid in changed {
        let text = match node.gpus.under_pressure.contains(&uuid) {
            true => format!("a container waits for VRAM on {uuid}"),
            false => format!("no container waits for VRAM on {uuid}"),
        };
        let event = NodeEvent::new(EventKind::Pressure, text).because(Reason::WaitingForVram);
        node.output.effects.push(super::Effect::Publish(Box::new(event)));
    }
}

fn has_waited(node: &NodeState, key: &Key) -> bool {
    let since = match node.alloc_wait_of(key) {
        Some((_, want)) => Some(want.since),
        None => node.registry.containers.get(key).map(|c| c.shown.since),
    };
    since.is_some_and(|since| node.clock.now.saturating_sub(since) >= WAITED_MS)
}
