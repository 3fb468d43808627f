//! Limits the events of each container. A process can cause an event by each message, for example
//! by an allocation that is refused. Without a limit, such a process would fill the log, and
//! programs that read events would fall behind.

use std::collections::HashMap;

use affinode_proto::{api::control::Event, event::EventKind};

use crate::agents::RateLimit;

/// Rate limit of the changes of a container's state: size of a burst, then number per second. It is
/// higher than that of other events, because programs follow the state of containers by them.
const CHANGES: (u32, u32) = (500, 20);
/// Rate limit of the other events of a container. All 256 processes of a container may register at
/// the same time.
const OTHERS: (u32, u32) = (300, 5);
/// Number of containers above which limits without effect are forgotten.
const MANY: usize = 1_024;

/// The rate limits of the containers' events, by key.
#[derive(Debug, Default)]
pub(super) struct EventLimits {
    containers: HashMap<String, EventLimit>,
}

#[derive(Debug)]
struct EventLimit {
    changes: RateLimit,
    others: RateLimit,
    left_out: u64,
}

impl Default for EventLimit {
    fn default() -> EventLimit {
        EventLimit { changes: RateLimit::new(CHANGES), others: RateLimit::new(OTHERS), left_out: 0 }
    }
}

impl EventLimits {
    /// Decides whether an event is published. `None`: it exceeds the rate limit of its container.
    /// Otherwise returns the event to publish before it, which states how many were left out.
    pub(super) fn admit(&mut self, event: &Event) -> Option<Option<Event>> {
        if event.key.is_empty() {
            return Some(None);
        }
        if self.containers.len() >= MANY && !self.containers.contains_key(&event.key) {
            self.containers.retain(|_, limit| !limit.has_no_effect());
        }
        let limit = self.containers.entry(event.key.clone()).or_default();
        let is_change = event.kind == EventKind::State.as_str();
        let budget = if is_change { &limit.changes } else { &limit.others };
        if !budget.try_take() {
            limit.left_out += 1;
            return None;
        }
        let left_out = std::mem::take(&mut limit.left_out);
        Some((left_out > 0).then(|| omission(event, left_out)))
    }
}

impl EventLimit {
    fn has_no_effect(&self) -> bool {
        self.left_out == 0 && self.changes.is_full() && self.others.is_full()
    }
}

/// Returns the event that states how many events of a container were left out.
fn omission(event: &Event, left_out: u64) -> Event {
    Event {
        kind: EventKind::Process.to_string(),
        key: event.key.clone(),
        container: event.container.clone(),
        text: format!("left out {left_out} events, because the container caused too many"),
        ..Event::default()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn event(key: &str, kind: EventKind) -> Event {
        Event { key: key.into(), kind: kind.to_string(), ..Event::default() }
    }

    #[tokio::test(start_paused = true)]
    async fn events_above_the_rate_are_counted() {
        let mut limits = EventLimits::default();
        let loud = event("loud", EventKind::Allocation);
        let admitted = (0..10_000).filter_map(|_| limits.admit(&loud)).count();
        assert_eq!(admitted, 300);
        // The limit is that of one container and of one sort of events.
        assert_eq!(limits.admit(&event("quiet", EventKind::Allocation)), Some(None));
        assert_eq!(limits.admit(&event("", EventKind::Pressure)), Some(None));
        tokio::time::advance(Duration::from_secs(1)).await;
        let omission = limits.admit(&loud).unwrap().unwrap();
        assert!(omission.text.starts_with("left out 9700 events"), "{}", omission.text);
        assert_eq!(limits.admit(&loud), Some(None), "it is stated once");
        assert_eq!(limits.admit(&event("loud", EventKind::State)), Some(None));
    }

    #[tokio::test(start_paused = true)]
    async fn limits_of_quiet_containers_are_forgotten() {
        let mut limits = EventLimits::default();
        for container in 0..10 * MANY {
            limits.admit(&event(&container.to_string(), EventKind::State));
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        assert!(limits.containers.len() <= MANY);
    }
}
