//! Kubernetes events for a pod. This module decides which of the controller's events are published,
//! with which text, and at which rate. It does no I/O, and the caller passes the time.

use std::collections::HashMap;

use affinode_proto::{api::control::Event, event::EventKind, state::State};

/// Maximum number of events of a pod in a burst. Afterwards the pod may get one event per
/// [`REFILL_MS`].
const BURST: u32 = 8;
/// Time after which a pod may get one more event, in milliseconds.
const REFILL_MS: i64 = 60_000;
/// Maximum number of pods that the rate limiter stores. It is about ten times the number of pods of
/// a kubelet.
const PODS: usize = 1024;
/// Maximum length of an event's note, in characters. The API server accepts 1 KiB.
const NOTE_CHARS: usize = 900;

/// A Kubernetes event to publish.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodEvent {
    /// Whether the event is of type Warning.
    pub warning: bool,
    /// Reason of the event, in CamelCase.
    pub reason: &'static str,
    /// Action that was taken or attempted.
    pub action: &'static str,
    /// Text of the event. It begins with the name of the container.
    pub note: String,
}

/// Converts an event of the controller to a Kubernetes event. `None`: the event is not published.
#[must_use]
pub fn pod_event(event: &Event) -> Option<PodEvent> {
    let is = |word: &str, state: State| word == state.as_str();
    let (warning, reason, action, note) = match EventKind::parse(&event.kind)? {
        EventKind::State
            if is(&event.to, State::Offloaded) && is(&event.from, State::Offloading) =>
        {
            let note = format!("offloaded {} of GPU memory in {}", size(event.bytes), time(event));
            (false, "GPUOffloaded", "Offload", note)
        }
        EventKind::State if is(&event.from, State::Restoring) && !is(&event.to, State::Lost) => {
            let note = format!("restored its GPU memory in {}", time(event));
            (false, "GPURestored", "Restore", note)
        }
        EventKind::State if is(&event.to, State::Queued) => {
            (false, "GPUWaiting", "Restore", format!("has a CUDA call that waits: {}", event.text))
        }
        EventKind::State if is(&event.to, State::Lost) => {
            (true, "GPULost", "Restore", format!("has lost its GPU state: {}", event.text))
        }
        EventKind::Refused => (true, "GPUOffloadRefused", "Offload", event.text.clone()),
        EventKind::Annotation => (true, "GPUAnnotationIgnored", "Configure", event.text.clone()),
        EventKind::NoProgress => (true, "GPUNoProgress", "Watch", event.text.clone()),
        EventKind::Ended => (true, "GPUProcessEnded", "MakeRoom", event.text.clone()),
        _ => return None,
    };
    let container = event.container.rsplit('/').next().unwrap_or_default();
    let note: String = format!("{container} {note}").chars().take(NOTE_CHARS).collect();
    Some(PodEvent { warning, reason, action, note })
}

fn time(event: &Event) -> String {
    format!("{:.1} s", event.elapsed_ms as f64 / 1000.0)
}

/// Formats a number of bytes for display.
pub fn size(bytes: u64) -> String {
    match bytes as f64 / f64::from(1 << 20) {
        mib if mib < 1024.0 => format!("{mib:.0} MiB"),
        mib => format!("{:.1} GiB", mib / 1024.0),
    }
}

/// Limits the rate of events of each pod. A program that alternates between calls and idle times
/// must not fill the cluster's store.
#[derive(Debug, Default)]
pub struct EventRateLimiter(HashMap<String, (u32, i64)>);

impl EventRateLimiter {
    /// Takes one event from the pod's allowance. Returns false if the allowance is used up.
    pub fn take(&mut self, pod_uid: &str, now_ms: i64) -> bool {
        if self.0.len() >= PODS && !self.0.contains_key(pod_uid) {
            // A pod whose allowance is full again needs no entry.
            self.0.retain(|_, (left, since)| refilled(*left, *since, now_ms) < BURST);
            if self.0.len() >= PODS {
                return false;
            }
        }
        let (left, since) = self.0.entry(pod_uid.to_owned()).or_insert((BURST, now_ms));
        let refilled = refilled(*left, *since, now_ms);
        if refilled != *left {
            (*left, *since) = (refilled, now_ms);
        }
        let may = *left > 0;
        if *left == BURST {
            *since = now_ms;
        }
        *left = left.saturating_sub(1);
        may
    }
}

fn refilled(left: u32, since_ms: i64, now_ms: i64) -> u32 {
    let more = now_ms.saturating_sub(since_ms).max(0) / REFILL_MS;
    left.saturating_add(u32::try_from(more).unwrap_or(BURST)).min(BURST)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(from: &str, to: &str) -> Event {
        Event {
            kind: "state".into(),
            container: "ml/notebook-7/jupyter".into(),
            from: from.into(),
            to: to.into(),
            text: "the VRAM for its restore is not free yet".into(),
            bytes: 3 << 29,
            elapsed_ms: 1234,
            ..Event::default()
        }
    }

    #[test]
    fn only_moves_waits_and_refusals_are_published() {
        let note =
            |event: &Event| pod_event(event).map(|pod_event| (pod_event.reason, pod_event.note));
        assert_eq!(
            note(&state("Offloading", "Offloaded")),
            Some(("GPUOffloaded", "jupyter offloaded 1.5 GiB of GPU memory in 1.2 s".into()))
        );
        assert_eq!(
            note(&state("Restoring", "Active")),
            Some(("GPURestored", "jupyter restored its GPU memory in 1.2 s".into()))
        );
        let (reason, text) = note(&state("Offloaded", "Queued")).unwrap();
        assert!(reason == "GPUWaiting" && text.contains("not free yet"), "{text}");
        assert!(pod_event(&state("Restoring", "Lost")).unwrap().warning);
        for (from, to) in [("Active", "Idle"), ("Idle", "Closing"), ("Queued", "Restoring")] {
            assert_eq!(pod_event(&state(from, to)), None, "{from} {to}");
        }
        let refused = Event { kind: "refused".into(), text: "why".into(), ..Event::default() };
        assert!(pod_event(&refused).unwrap().warning);
        let long = Event { text: "é".repeat(5000), ..refused };
        assert!(pod_event(&long).unwrap().note.len() < 2048);
        assert_eq!(pod_event(&Event { kind: "process".into(), ..Event::default() }), None);
    }

    #[test]
    fn a_busy_pod_has_a_burst_and_then_one_a_minute() {
        let mut allowance = EventRateLimiter::default();
        let mut taken = |now| allowance.take("a", now);
        assert_eq!((0..20).filter(|at| taken(*at)).count(), BURST as usize);
        assert!(!taken(REFILL_MS - 1));
        assert!(taken(REFILL_MS + 1));
        assert!(!taken(REFILL_MS + 2));
        assert!(allowance.take("b", 20));
    }

    #[test]
    fn remembered_pods_are_bounded() {
        let mut allowance = EventRateLimiter::default();
        for pod in 0..PODS * 2 {
            assert_eq!(allowance.take(&pod.to_string(), 0), pod < PODS);
        }
        assert!(allowance.take("later", REFILL_MS));
        assert!(allowance.0.len() <= PODS);
    }
}
