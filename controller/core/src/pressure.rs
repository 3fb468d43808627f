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

use super::{Key, Millis, Node, event::NodeEvent};

/// Waiting time after which a waiter counts as pressure.
const WAITED_MS: Millis = 1_000;

impl Node {
    /// UUIDs of the GPUs with pressure.
    #[must_use]
    pub fn pressed(&self) -> &BTreeSet<String> {
        &self.gpus_under_pressure
    }

    /// Updates the set of GPUs with pressure, and publishes an event for each change.
    pub(super) fn look_at_pressure(&mut self) {
        let waiting = self.queue.in_order(self.now).into_iter().filter(|key| self.has_waited(key));
        let needs = waiting.flat_map(|key| {
            self.needs_with(&key, self.alloc_wait_of(&key).map(|(id, want)| (id, want.ticket)))
        });
        let pressed: BTreeSet<String> = needs.map(|need| need.uuid).collect();
        let before = std::mem::replace(&mut self.gpus_under_pressure, pressed);
        let changed: Vec<String> =
            before.symmetric_difference(&self.gpus_under_pressure).cloned().collect();
        for uuid in changed {
            let text = match self.gpus_under_pressure.contains(&uuid) {
                true => format!("a container waits for VRAM on {uuid}"),
                false => format!("no container waits for VRAM on {uuid}"),
            };
            let event = NodeEvent::new(EventKind::Pressure, text).because(Reason::WaitingForVram);
            self.effects.push(super::Effect::Publish(Box::new(event)));
        }
    }

    fn has_waited(&self, key: &Key) -> bool {
        let since = match self.alloc_wait_of(key) {
            Some((_, want)) => Some(want.since),
            None => self.containers.get(key).map(|c| c.shown.since),
        };
        since.is_some_and(|since| self.now.saturating_sub(since) >= WAITED_MS)
    }
}
