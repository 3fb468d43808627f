//! The condition and the label that show where the GPU memory of a pod is. This module decides when
//! they are written. It does no I/O, and the caller passes the time.
//!
//! ```text
//!  containers ──settled──> [`PodGpuStatus`] ──differs from shown──> allowed? ──> [`ConditionChange::Show`]
//!              transient: unchanged             [`EventRateLimiter`]
//!  containers gone for a while ──────────────────────────────────────────────> [`ConditionChange::Clear`]
//! ```

use std::collections::BTreeMap;

use affinode_proto::{
    api::control::{Container, ListResponse},
    state::State,
};

use super::pod_events::{EventRateLimiter, size};

/// Type of the pod condition that states whether the GPU memory of the pod is on the GPU.
pub const CONDITION: &str = "affinode.io/GpuResident";
/// Name of the pod label that contains the name of the state, for `kubectl get pods -L`.
pub const LABEL: &str = "affinode.io/gpu-state";
/// Time for which a transient state must last before it is shown.
const SETTLED_MS: i64 = 5_000;
/// Time for which all containers of a pod must be missing before the pod's condition is removed.
/// The time is long, because a controller that started recently does not know all containers yet.
const GONE_MS: i64 = 30_000;
/// Maximum number of writes that one call of [`PodStatusWriter::due`] returns.
const MAX_CONCURRENT_WRITES: usize = 8;
/// Maximum length of a condition's message, in characters.
const MESSAGE_CHARS: usize = 512;

/// Identity of a pod's object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodName {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub name: String,
    /// Uid of the object. It differs between successive pods with the same name.
    pub uid: String,
}

/// The GPU status that is shown for a pod. If several of its containers have a GPU, it is the
/// status of the container whose state has the highest rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodGpuStatus {
    /// State of the container whose state has the highest rank.
    pub state: State,
    /// Reason for the state, in CamelCase as Kubernetes conditions have it, such as `IdleTimeout`.
    pub reason: String,
    /// The states and reasons of all containers, as text.
    pub message: String,
    /// Time at which the memory last moved to or from the GPU, in milliseconds since 1970.
    pub since_ms: i64,
}

impl PodGpuStatus {
    /// Returns whether the GPU memory is on the GPU.
    #[must_use]
    pub fn is_resident(&self) -> bool {
        !matches!(self.state, State::Offloaded | State::Queued | State::Restoring | State::Lost)
    }

    fn is_news(&self, shown: &PodGpuStatus) -> bool {
        (self.state, &self.reason) != (shown.state, &shown.reason)
    }
}

/// One write to a pod's status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConditionChange {
    /// Set the condition and the label of the pod.
    Show(PodName, PodGpuStatus),
    /// Remove the condition and the label, because all containers of the pod are gone.
    Clear(PodName),
}

/// Determines which conditions must be written to pods, and records which were written.
#[derive(Debug, Default)]
pub struct PodStatusWriter {
    shown: BTreeMap<PodName, ShownCondition>,
    allowance: EventRateLimiter,
}

#[derive(Debug)]
struct ShownCondition {
    standing: PodGpuStatus,
    /// Time of the latest list of containers in which the pod had a container, in milliseconds
    /// since 1970.
    seen_ms: i64,
}

impl PodStatusWriter {
    /// Returns the writes that are due, given the present list of containers.
    pub fn due(&mut self, list: &ListResponse, now_ms: i64) -> Vec<ConditionChange> {
        let mut pods = pods(list);
        let mut due = Vec::new();
        for (name, shown) in &mut self.shown {
            if pods.contains_key(name) {
                shown.seen_ms = now_ms;
            } else if now_ms - shown.seen_ms >= GONE_MS
                && due.len() < MAX_CONCURRENT_WRITES
                && self.allowance.take(&name.uid, now_ms)
            {
                due.push(ConditionChange::Clear(name.clone()));
            }
        }
        pods.retain(|_, containers| containers.iter().all(|c| is_settled(c, now_ms)));
        for (name, containers) in pods {
            let Some(mut standing) = standing(&containers) else { continue };
            if let Some(ShownCondition { standing: shown, .. }) = self.shown.get(&name) {
                if !standing.is_news(shown) {
                    continue;
                }
                if standing.is_resident() == shown.is_resident() {
                    standing.since_ms = shown.since_ms;
                }
            }
            if due.len() < MAX_CONCURRENT_WRITES && self.allowance.take(&name.uid, now_ms) {
                due.push(ConditionChange::Show(name, standing));
            }
        }
        due
    }

    /// Records a change that was written, or that cannot be written because the pod no longer
    /// exists.
    pub fn done(&mut self, change: ConditionChange, now_ms: i64) {
        match change {
            ConditionChange::Show(name, standing) => {
                self.shown.insert(name, ShownCondition { standing, seen_ms: now_ms });
            }
            ConditionChange::Clear(name) => {
                self.shown.remove(&name);
            }
        }
    }
}

/// Groups the containers that have a GPU by pod. Pods without a valid namespace, name and uid are
/// left out.
fn pods(list: &ListResponse) -> BTreeMap<PodName, Vec<&Container>> {
    let plain = |text: &str| {
        let fine = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'.';
        (1..=253).contains(&text.len()) && text.bytes().all(fine)
    };
    let mut pods: BTreeMap<PodName, Vec<&Container>> = BTreeMap::new();
    for container in &list.containers {
        let Some(a) = container.announcement.as_ref() else { continue };
        if [&a.pod_namespace, &a.pod, &a.pod_uid].into_iter().all(|text| plain(text)) {
            let name = PodName {
                namespace: a.pod_namespace.clone(),
                name: a.pod.clone(),
                uid: a.pod_uid.clone(),
            };
            pods.entry(name).or_default().push(container);
        }
    }
    pods
}

fn is_settled(container: &Container, now_ms: i64) -> bool {
    match State::parse(&container.state) {
        Some(State::Active | State::Idle | State::Offloaded | State::Lost) => true,
        Some(State::Unregistered) => true,
        _ => now_ms - container.since_unix_ms >= SETTLED_MS,
    }
}

/// Returns the GPU status of the pod that has these containers. `None`: none of the containers has
/// called CUDA yet.
fn standing(containers: &[&Container]) -> Option<PodGpuStatus> {
    let known = containers.iter().filter_map(|c| Some((rank(State::parse(&c.state)?)?, *c)));
    let (_, first) = known.clone().max_by_key(|(rank, c)| (*rank, -c.since_unix_ms))?;
    let told: Vec<String> = known.map(|(_, container)| told(container)).collect();
    let reason = match camel(&first.reason) {
        none if none.is_empty() => first.state.clone(),
        reason => reason,
    };
    Some(PodGpuStatus {
        state: State::parse(&first.state)?,
        reason,
        message: told.join("; ").chars().take(MESSAGE_CHARS).collect(),
        since_ms: first.since_unix_ms,
    })
}

/// Returns the rank of a state. The state with the highest rank determines the pod's status.
/// `None`: a container in this state has not called CUDA yet.
fn rank(state: State) -> Option<u8> {
    Some(match state {
        State::Unregistered => return None,
        State::Offloaded => 0,
        State::Idle => 1,
        State::Closing | State::Offloading => 2,
        State::Active => 3,
        State::Restoring => 4,
        State::Queued => 5,
        State::Lost => 6,
    })
}

fn told(container: &Container) -> String {
    let name = container.announcement.as_ref().map_or("", |a| a.container.as_str());
    let held = match (container.vram_bytes, container.offloaded_bytes) {
        (0, 0) => String::new(),
        (vram, 0) => format!(", {} on the GPU", size(vram)),
        (_, offloaded) => format!(", {} in host memory", size(offloaded)),
    };
    format!("{name} is {}{held}: {}", container.state, container.reason_text)
}

/// Converts a word such as `idle-timeout` to CamelCase, `IdleTimeout`, as conditions require.
fn camel(word: &str) -> String {
    let parts = word.split(|c: char| !c.is_ascii_alphanumeric()).filter(|part| !part.is_empty());
    parts
        .flat_map(|part| {
            let (first, rest) = part.split_at(1);
            first.to_ascii_uppercase().chars().chain(rest.chars()).collect::<Vec<_>>()
        })
        .take(64)
        .collect()
}

#[cfg(test)]
mod tests;
