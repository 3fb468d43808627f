//! Converts observations of the node into spans. A span is a container's stay in one state. This
//! module does no I/O.
//!
//! ```text
//!  event from Active to Idle     observation     event from Idle to Closing
//!  ────────────┬────────────────────┬────────────────────┬──────────
//!   … Active   │ Idle: begins here  │ grows, adds VRAM   │ ends here; next
//! ```

use std::collections::{BTreeSet, HashMap};

use affinode_proto::{event::EventKind, state::State};

use super::StateSpan;
use crate::schema::{Container, Event, Gpu, Node};

/// Maximum length of a span in milliseconds. A longer stay in a state is divided into several
/// spans. The values of one span therefore never summarize more than this time.
pub const MAX_MS: i64 = 3_600_000;
/// Maximum time between two observations, in milliseconds, for which VRAM is counted. If two
/// observations are further apart, the use of VRAM between them is unknown and does not count.
const STALE_AFTER_MS: i64 = 60_000;
/// Minimum length of a recorded pause, in milliseconds. In a pause, the container is not in use.
/// Observations are too far apart to show shorter pauses.
const PAUSE_MS: i64 = 10_000;
/// Minimum time between two writes of ended spans, in milliseconds.
const ENDED_EVERY_MS: i64 = 2_000;
/// Time between two writes of growing spans (spans that have not ended), in milliseconds. If the
/// controller is killed, at most this much time is missing in the history.
const GROWING_EVERY_MS: i64 = 30_000;

#[derive(Debug)]
struct OpenSpan {
    span: StateSpan,
    looked_ms: i64,
    calls: u64,
    used_ms: i64,
    restores: u64,
    held_share: f64,
    offloaded_share: f64,
    requested_share: f64,
}

/// Stores the spans that are not on disk in their final form: one growing span for each container,
/// and the ended spans that are not written yet.
#[derive(Debug, Default)]
pub struct SpanRecorder {
    open: HashMap<String, OpenSpan>,
    ended: Vec<StateSpan>,
    taken_ms: i64,
    grown_ms: i64,
}

impl SpanRecorder {
    /// Ends the span of a container and begins the next span, when an event reports a change of
    /// state.
    pub fn event(&mut self, event: &Event) {
        if event.kind != EventKind::State.as_str() {
            return;
        }
        let Some(open) = self.open.get_mut(&event.key) else {
            return; // The next observation begins its first span.
        };
        open.grow(event.unix_ms);
        let ended = open.next(event.unix_ms, &event.to, &event.reason);
        if event.to == State::Active.as_str() && event.bytes > 0 {
            open.span.wake_ms = event.elapsed_ms;
        }
        self.ended.push(ended);
    }

    /// Extends the spans of all containers by the time since the last observation.
    pub fn observe(&mut self, node: &Node, now_ms: i64) {
        for container in &node.containers {
            let open = self
                .open
                .entry(container.key.clone())
                .or_insert_with(|| OpenSpan::new(container, now_ms));
            open.grow(now_ms);
            if open.span.state != container.state {
                // The event of this change was missed.
                let ended = open.next(now_ms, &container.state, &container.reason);
                self.ended.push(ended);
            }
            open.look(container, &node.gpus);
            if now_ms - open.span.from_ms >= MAX_MS {
                let (state, reason) = (open.span.state.clone(), open.span.reason.clone());
                let ended = open.next(now_ms, &state, &reason);
                self.ended.push(ended);
            }
        }
        let here: std::collections::HashSet<&str> =
            node.containers.iter().map(|c| c.key.as_str()).collect();
        let ended = &mut self.ended;
        self.open.retain(|key, open| {
            let stays = here.contains(key.as_str());
            if !stays {
                ended.push(open.span.clone());
            }
            stays
        });
    }

    /// Returns the spans to write now. Ended spans are due every 2 s, growing spans every 30 s.
    pub fn due(&mut self, now_ms: i64) -> Vec<StateSpan> {
        let grown = now_ms - self.grown_ms >= GROWING_EVERY_MS;
        let ended = !self.ended.is_empty() && now_ms - self.taken_ms >= ENDED_EVERY_MS;
        if !grown && !ended {
            return Vec::new();
        }
        self.taken_ms = now_ms;
        let mut due = std::mem::take(&mut self.ended);
        if grown {
            self.grown_ms = now_ms;
            due.extend(self.open.values().map(|open| open.span.clone()));
        }
        due
    }

    /// Returns all spans that the file may not contain yet in their current form: the spans that
    /// have ended since the last write, and all growing spans.
    pub fn all(&self) -> Vec<StateSpan> {
        self.ended.iter().chain(self.open.values().map(|open| &open.span)).cloned().collect()
    }
}

impl OpenSpan {
    fn new(c: &Container, now_ms: i64) -> OpenSpan {
        let pod = !c.pod.is_empty();
        let span = StateSpan {
            key: c.key.clone(),
            namespace: if pod { c.pod_namespace.clone() } else { c.namespace.clone() },
            pod: c.pod.clone(),
            container: if pod { c.container.clone() } else { c.id.clone() },
            claim: c.claim.clone(),
            state: c.state.clone(),
            reason: c.reason.clone(),
            // A controller that has just started did not observe the time before its start.
            from_ms: c.since_unix_ms.clamp(now_ms - STALE_AFTER_MS, now_ms),
            to_ms: now_ms,
            ..StateSpan::default()
        };
        OpenSpan {
            span,
            looked_ms: now_ms,
            calls: calls(c),
            used_ms: 0,
            restores: c.restores,
            held_share: 0.0,
            offloaded_share: 0.0,
            requested_share: 0.0,
        }
    }

    /// Extends the span to the time `now_ms`. The VRAM of the last observation is counted for the
    /// added time. If the added time exceeds `STALE_AFTER_MS`, no VRAM is counted for it.
    fn grow(&mut self, now_ms: i64) {
        let passed = now_ms - self.looked_ms;
        if passed <= 0 {
            return;
        }
        self.looked_ms = now_ms;
        self.span.to_ms = self.span.to_ms.max(now_ms);
        if passed <= STALE_AFTER_MS {
            #[allow(clippy::cast_precision_loss)] // At most a minute.
            let seconds = passed as f64 / 1000.0;
            self.span.held_gpu_seconds += self.held_share * seconds;
            self.span.offloaded_gpu_seconds += self.offloaded_share * seconds;
            self.span.requested_gpu_seconds += self.requested_share * seconds;
        }
    }

    fn look(&mut self, c: &Container, gpus: &[Gpu]) {
        let now = calls(c);
        // The count of calls is lower than at the last observation if a process has ended. The
        // container reports the count, so it can have any value.
        self.span.calls = self.span.calls.saturating_add(now.saturating_sub(self.calls));
        self.calls = now;
        if !c.processes.is_empty() {
            self.note_use(self.looked_ms - i64::try_from(c.idle_ms).unwrap_or(i64::MAX));
        }
        if c.restores > self.restores && c.state == "Active" {
            self.span.wake_ms = c.last_wake_ms;
        }
        self.restores = c.restores;
        self.span.reason.clone_from(&c.reason);
        (self.span.vram_bytes, self.span.offloaded_bytes) = (c.vram_bytes, c.offloaded_bytes);
        let share = |bytes: u64, uuid: &str| {
            let total = gpus.iter().find(|gpu| gpu.uuid == uuid).map_or(0, |g| g.vram_total_bytes);
            #[allow(clippy::cast_precision_loss)] // A share.
            let share = if total == 0 { 0.0 } else { bytes as f64 / total as f64 };
            share
        };
        self.held_share =
            c.processes.iter().flat_map(|p| &p.vram).map(|d| share(d.bytes, &d.uuid)).sum();
        self.offloaded_share =
            c.processes.iter().flat_map(|p| &p.offloaded).map(|d| share(d.bytes, &d.uuid)).sum();
        self.requested_share = requested_share(c, gpus);
    }

    /// Records that the container was in use at this time.
    fn note_use(&mut self, at_ms: i64) {
        let pause_ms = at_ms - self.used_ms;
        if pause_ms <= 0 {
            return;
        }
        self.used_ms = at_ms;
        // A span of one hour has at most this many uses.
        let room = self.span.uses.len() < (MAX_MS / PAUSE_MS) as usize;
        let offset = u32::try_from((at_ms - self.span.from_ms).max(0)).unwrap_or(u32::MAX);
        match self.span.uses.last_mut() {
            Some((_, end)) if pause_ms <= PAUSE_MS => *end = offset,
            _ if room => self.span.uses.push((offset, offset)),
            _ => {}
        }
    }

    /// Ends the span and begins the next span. Returns the ended span.
    fn next(&mut self, now_ms: i64, state: &str, reason: &str) -> StateSpan {
        let next = StateSpan {
            state: state.to_owned(),
            reason: reason.to_owned(),
            from_ms: now_ms,
            to_ms: now_ms,
            held_gpu_seconds: 0.0,
            offloaded_gpu_seconds: 0.0,
            requested_gpu_seconds: 0.0,
            calls: 0,
            wake_ms: 0,
            uses: Vec::new(),
            ..self.span.clone()
        };
        std::mem::replace(&mut self.span, next)
    }
}

/// VRAM that the container may use under its limit, as a share of a whole GPU. The limit applies to
/// each GPU on which the container has memory. A container without memory on any GPU has requested
/// its limit on one GPU, the node's first. 0: the container has no limit.
fn requested_share(c: &Container, gpus: &[Gpu]) -> f64 {
    let memory = c.processes.iter().flat_map(|p| p.vram.iter().chain(&p.offloaded));
    let used: BTreeSet<&str> = memory.filter(|d| d.bytes > 0).map(|d| d.uuid.as_str()).collect();
    let is_used = |gpu: &&Gpu| used.contains(gpu.uuid.as_str());
    let share = |gpu: &Gpu| {
        let bytes = c.vram_limit_bytes.min(gpu.vram_total_bytes);
        #[allow(clippy::cast_precision_loss)] // A share.
        let share = bytes as f64 / gpu.vram_total_bytes.max(1) as f64;
        share
    };
    match gpus.iter().any(|gpu| is_used(&gpu)) {
        true => gpus.iter().filter(is_used).map(share).sum(),
        false => gpus.first().map_or(0.0, share),
    }
}

fn calls(c: &Container) -> u64 {
    c.processes.iter().fold(0, |sum, process| sum.saturating_add(process.calls))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::{DeviceBytes, Process};

    const GIB: u64 = 1 << 30;

    fn node(state: &str, held: u64, offloaded: u64, calls: u64) -> Node {
        let on = |bytes| vec![DeviceBytes { uuid: "GPU-0".into(), bytes }];
        let process =
            Process { calls, vram: on(held), offloaded: on(offloaded), ..Process::default() };
        Node {
            gpus: vec![Gpu { uuid: "GPU-0".into(), vram_total_bytes: 8 * GIB, ..Gpu::default() }],
            containers: vec![Container {
                key: "k".into(),
                namespace: "ml".into(),
                id: "one".into(),
                state: state.into(),
                since_unix_ms: 1_000_000,
                processes: vec![process],
                ..Container::default()
            }],
            ..Node::default()
        }
    }

    fn event(to: &str, unix_ms: i64) -> Event {
        Event { kind: "state".into(), key: "k".into(), to: to.into(), unix_ms, ..Event::default() }
    }

    #[test]
    fn limit_counts_as_requested_in_each_state() {
        let mut tape = SpanRecorder::default();
        let limited = |state: &str, held, offloaded| {
            let mut node = node(state, held, offloaded, 0);
            node.containers[0].vram_limit_bytes = 2 * GIB;
            node.containers[0].claim = "ml/gpu".into();
            node
        };
        for (now_ms, state, held, offloaded) in [
            (1_000_000, "Unregistered", 0, 0),
            (1_004_000, "Active", GIB, 0),
            (1_008_000, "Offloaded", 0, GIB),
            (1_012_000, "Offloaded", 0, GIB),
        ] {
            tape.observe(&limited(state, held, offloaded), now_ms);
        }
        let spans = tape.all();
        let requested: f64 = spans.iter().map(|span| span.requested_gpu_seconds).sum();
        assert!((requested - 3.0).abs() < 1e-9, "a quarter of a GPU for 12 s: {spans:?}");
        assert!(spans.len() == 3 && spans.iter().all(|span| span.claim == "ml/gpu"), "{spans:?}");
    }

    #[test]
    fn request_counts_on_each_gpu_in_use() {
        let gpu = |uuid: &str, gib| Gpu {
            uuid: uuid.into(),
            vram_total_bytes: gib * GIB,
            ..Gpu::default()
        };
        let gpus = [gpu("GPU-0", 8), gpu("GPU-1", 4), gpu("GPU-2", 8)];
        let on = |uuid: &str, bytes| DeviceBytes { uuid: uuid.into(), bytes };
        let share = |limit_gib: u64, vram: Vec<DeviceBytes>| {
            let container = Container {
                vram_limit_bytes: limit_gib * GIB,
                processes: vec![Process { vram, ..Process::default() }],
                ..Container::default()
            };
            requested_share(&container, &gpus)
        };
        assert_eq!(share(2, Vec::new()), 0.25, "of one GPU, until it uses one");
        assert_eq!(share(2, vec![on("GPU-1", 1), on("GPU-2", 1)]), 0.75);
        assert_eq!(share(6, vec![on("GPU-1", 1)]), 1.0, "at most the whole GPU");
        assert_eq!(share(0, vec![on("GPU-1", 1)]), 0.0, "no limit");
    }

    #[test]
    fn shares_of_a_gpu_add_up_state_by_state() {
        let mut tape = SpanRecorder::default();
        tape.observe(&node("Active", 4 * GIB, 0, 10), 1_000_000);
        tape.observe(&node("Active", 4 * GIB, 0, 25), 1_010_000);
        tape.event(&event("Offloaded", 1_012_000));
        tape.observe(&node("Offloaded", 0, 4 * GIB, 25), 1_012_000);
        tape.observe(&node("Offloaded", 0, 4 * GIB, 25), 1_020_000);
        let spans = tape.all();
        assert_eq!(spans.len(), 2, "{spans:?}");
        assert_eq!(
            (spans[0].state.as_str(), spans[0].calls, spans[0].to_ms),
            ("Active", 15, 1_012_000)
        );
        assert!((spans[0].held_gpu_seconds - 6.0).abs() < 1e-9, "{spans:?}");
        assert_eq!((spans[1].from_ms, spans[1].to_ms), (1_012_000, 1_020_000));
        assert!((spans[1].offloaded_gpu_seconds - 4.0).abs() < 1e-9, "{spans:?}");
    }

    #[test]
    fn a_removed_container_ends_its_span() {
        let mut tape = SpanRecorder::default();
        tape.observe(&node("Active", GIB, 0, 0), 1_000_000);
        tape.observe(&node("Idle", GIB, 0, 0), 1_005_000);
        tape.observe(&Node::default(), 1_010_000);
        let states: Vec<String> = tape.all().into_iter().map(|span| span.state).collect();
        assert_eq!(states, ["Active", "Idle"]);
        assert_eq!(tape.due(1_010_000).len(), 2);
        assert!(tape.all().is_empty());
    }

    #[test]
    fn unobserved_time_is_not_counted() {
        let mut tape = SpanRecorder::default();
        tape.observe(&node("Active", 8 * GIB, 0, 0), 1_000_000);
        tape.observe(&node("Active", 8 * GIB, 0, 0), 1_000_000 + STALE_AFTER_MS + 1);
        assert!(tape.all()[0].held_gpu_seconds < 1e-9);
    }

    #[test]
    fn a_long_state_is_several_spans() {
        let mut tape = SpanRecorder::default();
        for minute in 0..=61 {
            tape.observe(&node("Offloaded", 0, GIB, 0), 1_000_000 + minute * 60_000);
        }
        assert_eq!(tape.all().len(), 2);
    }
}
