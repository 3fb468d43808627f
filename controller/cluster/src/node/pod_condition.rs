//! How a pod stands with its GPU, as its object in the cluster says it: a condition and a label,
//! and when they are written. Pure: times come in.
//!
//! ```text
//!  containers ──settled──> [`Standing`] ──another than is shown──> may it? ──> [`Change::Show`]
//!              passing: as it was            [`Allowance`]
//!  containers gone for a while ──────────────────────────────────────────────> [`Change::Clear`]
//! ```

use std::collections::BTreeMap;

use affinode_proto::{
    api::control::{Container, ListResponse},
    state::State,
};

use super::pod_events::{EventRateLimiter, size};

/// The condition: whether the GPU memory of the pod is on the GPU.
pub const CONDITION: &str = "affinode.io/GpuResident";
/// The label: the state's word, for `kubectl get pods -L`.
pub const LABEL: &str = "affinode.io/gpu-state";
/// A state that others follow at once is shown when it has lasted so long.
const SETTLED_MS: i64 = 5_000;
/// A controller that has just begun does not know all yet.
const GONE_MS: i64 = 30_000;
/// Writes at a time.
const MAX_CONCURRENT_WRITES: usize = 8;
/// Characters of a condition's message.
const MESSAGE_CHARS: usize = 512;

/// A pod's object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodName {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// And of those that have that name one after the other, which.
    pub uid: String,
}

/// What is shown of a pod. Of several containers with a GPU, that counts which is in use most.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodGpuStatus {
    /// The container's state.
    pub state: State,
    /// Why, as conditions have it: `IdleTimeout`.
    pub reason: String,
    /// The same of all containers, for people.
    pub message: String,
    /// Since when the state is that, in Unix time.
    pub since_ms: i64,
}

impl PodGpuStatus {
    /// Whether its memory is on the GPU.
    #[must_use]
    pub fn is_resident(&self) -> bool {
        !matches!(self.state, State::Offloaded | State::Queued | State::Restoring | State::Lost)
    }

    fn is_news(&self, shown: &PodGpuStatus) -> bool {
        (self.state, &self.reason) != (shown.state, &shown.reason)
    }
}

/// One write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConditionChange {
    /// The pod stands so.
    Show(PodName, PodGpuStatus),
    /// None of its containers is there any more.
    Clear(PodName),
}

/// What the cluster has been told.
#[derive(Debug, Default)]
pub struct PodStatusWriter {
    shown: BTreeMap<PodName, ShownCondition>,
    allowance: EventRateLimiter,
}

#[derive(Debug)]
struct ShownCondition {
    standing: PodGpuStatus,
    /// It was seen last.
    seen_ms: i64,
}

impl PodStatusWriter {
    /// What is to be written now.
    pub fn due(&mut self, list: &ListResponse, now_ms: i64) -> Vec<ConditionChange> {
        let mut pods = pods(list);
        let mut due = Vec::new();
        for (name, shown) in &mut self.shown {
            if pods.contains_key(name) {
                shown.seen_ms = now_ms;
            } else if now_ms - shown.seen_ms >= GONE_MS && due.len() < MAX_CONCURRENT_WRITES {
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

    /// A change was written, or will never be: the pod is gone.
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

/// Those whose containers have a GPU, and whose names are names.
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

/// None where no container has called CUDA yet.
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

/// The higher, the more in use.
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
        (_, away) => format!(", {} in host memory", size(away)),
    };
    format!("{name} is {}{held}: {}", container.state, container.reason_text)
}

/// `idle-timeout` as conditions say it: `IdleTimeout`.
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
