//! Notice of pressure: on which GPUs somebody waits for VRAM that others hold.
//!
//! ```text
//! calm ──a return or an allocation waits for a second──> pressed ──nobody waits──> calm
//! ```
//!
//! Programs that could give memory back by themselves read it in their container; people see
//! it in the events.

use std::collections::BTreeSet;

use affinode_proto::{api::control::Event, reason::Reason};

use super::{Key, Millis, Node};

/// Who waits for less is served as usual.
const WAITED_MS: Millis = 1_000;

impl Node {
    /// The GPUs on which somebody waits for VRAM.
    #[must_use]
    pub fn pressed(&self) -> &BTreeSet<String> {
        &self.gpus_under_pressure
    }

    /// Looks who waits, and tells what has changed.
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
                true => format!("somebody waits for VRAM on {uuid}"),
                false => format!("nobody waits for VRAM on {uuid} any more"),
            };
            let reason = Reason::WaitingForVram.to_string();
            let event = Event { kind: "pressure".into(), reason, text, ..Event::default() };
            self.effects.push(super::Effect::Publish(Box::new(event)));
        }
    }

    fn has_waited(&self, key: &Key) -> bool {
        let since = match self.alloc_wait_of(key) {
            Some((_, want)) => Some(want.since),
            None => self.containers.get(key).map(|c| c.state_since),
        };
        since.is_some_and(|since| self.now.saturating_sub(since) >= WAITED_MS)
    }
}
