//! Determines how much each GPU is used, as one of three classes. The scheduler prefers GPUs by
//! their class.

use std::{collections::BTreeMap, time::Duration};

use affinode_proto::{
    api::control::{Container, Gpu, ListResponse},
    state::State,
};

/// Time for which all readings of a GPU must show a higher class, or all of them a lower class,
/// before its class changes. Each change is a write to the API server, which the scheduler reads.
const SETTLE_TIME: Duration = Duration::from_secs(30);

/// How much a GPU is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum GpuLoad {
    /// Nothing uses the GPU.
    #[default]
    Idle,
    /// A container or another program uses the GPU, and no container waits for its VRAM.
    Shared,
    /// A container waits for VRAM of the GPU.
    Busy,
}

impl GpuLoad {
    /// Returns the word for the class, which is the value of the device's attribute.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            GpuLoad::Idle => "idle",
            GpuLoad::Shared => "shared",
            GpuLoad::Busy => "busy",
        }
    }

    /// Returns the class of a GPU in one reading of the node's controller.
    fn of(gpu: &Gpu, containers: &[Container]) -> GpuLoad {
        let state = |container: &Container| State::parse(&container.state);
        let mut here = containers.iter().filter(|container| has_memory_of(container, &gpu.uuid));
        if here.clone().any(|container| state(container) == Some(State::Queued)) {
            return GpuLoad::Busy;
        }
        let works = |c: &Container| matches!(state(c), Some(State::Active | State::Restoring));
        let is_used = gpu.utilization_minute_percent > 0 || here.any(works);
        if is_used { GpuLoad::Shared } else { GpuLoad::Idle }
    }
}

/// Returns whether a container has memory of the GPU, in VRAM or offloaded.
fn has_memory_of(container: &Container, uuid: &str) -> bool {
    let mut parts = container.processes.iter().flat_map(|p| p.vram.iter().chain(&p.offloaded));
    parts.any(|part| part.uuid == uuid && part.bytes > 0)
}

/// The class of one GPU over time.
#[derive(Clone, Copy, Debug)]
struct LoadState {
    load: GpuLoad,
    /// Since when all readings are above `load` (true) or below it (false). `None`: the last
    /// reading agrees with it.
    contradicted: Option<(bool, Duration)>,
}

/// The classes of a node's GPUs, from the readings of the node's controller.
#[derive(Debug, Default)]
pub struct GpuLoads(BTreeMap<String, LoadState>);

impl GpuLoads {
    /// Records a reading at the time `now` on a monotonic clock, and returns the present classes by
    /// UUID. The first reading of a GPU sets its class. A GPU that the reading does not contain has
    /// no class.
    pub fn update(&mut self, now: Duration, list: &ListResponse) -> BTreeMap<String, GpuLoad> {
        self.0.retain(|uuid, _| list.gpus.iter().any(|gpu| gpu.uuid == *uuid));
        for gpu in &list.gpus {
            let read = GpuLoad::of(gpu, &list.containers);
            let first = LoadState { load: read, contradicted: None };
            let state = self.0.entry(gpu.uuid.clone()).or_insert(first);
            if read == state.load {
                state.contradicted = None;
                continue;
            }
            let is_above = read > state.load;
            let since = match state.contradicted {
                Some((direction, since)) if direction == is_above => since,
                _ => now,
            };
            state.contradicted = Some((is_above, since));
            if now.saturating_sub(since) >= SETTLE_TIME {
                *state = first;
            }
        }
        self.0.iter().map(|(uuid, state)| (uuid.clone(), state.load)).collect()
    }
}

#[cfg(test)]
mod tests {
    use affinode_proto::api::control::{DeviceBytes, Process};

    use super::*;

    const GPU: &str = "GPU-0";

    /// Returns a reading of two GPUs, with a container in this state on the first of them.
    fn reading(state: State, is_offloaded: bool, busy_percent: u32) -> ListResponse {
        let gpu = |uuid: &str, utilization_minute_percent| Gpu {
            uuid: uuid.into(),
            utilization_minute_percent,
            ..Gpu::default()
        };
        let memory = vec![DeviceBytes { uuid: GPU.into(), bytes: 1, ..DeviceBytes::default() }];
        let process = match is_offloaded {
            true => Process { offloaded: memory, ..Process::default() },
            false => Process { vram: memory, ..Process::default() },
        };
        ListResponse {
            gpus: vec![gpu(GPU, busy_percent), gpu("GPU-1", 0)],
            containers: vec![Container {
                state: state.as_str().into(),
                processes: vec![process],
                ..Container::default()
            }],
            ..ListResponse::default()
        }
    }

    /// Feeds readings, each with its time in seconds, and returns the class of the GPU after each.
    fn classes(readings: &[(u64, State)]) -> Vec<&'static str> {
        let mut loads = GpuLoads::default();
        let after = |(seconds, state): &(u64, State)| {
            let now = Duration::from_secs(*seconds);
            loads.update(now, &reading(*state, *state == State::Queued, 0))[GPU].as_str()
        };
        readings.iter().map(after).collect()
    }

    #[test]
    fn class_follows_the_containers_of_the_gpu() {
        for (state, is_offloaded, busy_percent, expected) in [
            (State::Active, false, 0, "shared"),
            (State::Restoring, true, 0, "shared"),
            (State::Idle, false, 0, "idle"),
            (State::Idle, false, 1, "shared"),
            (State::Offloaded, true, 0, "idle"),
            (State::Queued, true, 0, "busy"),
        ] {
            let list = reading(state, is_offloaded, busy_percent);
            let loads = GpuLoads::default().update(Duration::ZERO, &list);
            assert_eq!(loads[GPU].as_str(), expected, "{state}");
            assert_eq!(loads["GPU-1"], GpuLoad::Idle, "the container has no memory of it");
        }
    }

    #[test]
    fn class_changes_only_after_some_time() {
        use State::{Active, Idle, Queued};
        let up = [(0, Idle), (10, Active), (39, Queued), (40, Queued)];
        assert_eq!(classes(&up), ["idle", "idle", "idle", "busy"]);
        let down = [(0, Queued), (10, Active), (20, Queued), (30, Idle), (59, Idle), (60, Active)];
        assert_eq!(classes(&down), ["busy", "busy", "busy", "busy", "busy", "shared"]);
        let back_and_forth = [(0, Active), (20, Idle), (40, Queued), (60, Idle), (80, Queued)];
        assert_eq!(classes(&back_and_forth), ["shared"; 5]);
    }

    #[test]
    fn gpu_without_a_reading_has_no_class() {
        let mut loads = GpuLoads::default();
        loads.update(Duration::ZERO, &reading(State::Active, false, 0));
        assert!(loads.update(Duration::ZERO, &ListResponse::default()).is_empty());
    }
}
