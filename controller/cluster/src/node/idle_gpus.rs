//! Determines since when nothing has used a GPU of the node. The pods of such a node can be moved to
//! other nodes, and the node can then be removed.

use std::{collections::BTreeSet, time::Duration};

use affinode_proto::{
    api::control::{Container, ListResponse},
    state::State,
};

/// The use of a node's GPUs over time, from the readings of the node's controller.
#[derive(Debug, Default)]
pub struct IdleGpus {
    /// The first of the readings in a row that show no use. `None`: the last reading shows a use.
    idle_since: Option<Duration>,
    /// Keys of the containers in the last reading.
    known: BTreeSet<String>,
}

impl IdleGpus {
    /// Records a reading at the time `now` on a monotonic clock. `None`: the node has no controller,
    /// so that nothing is known about the use of its GPUs. Returns for how long nothing has used a
    /// GPU. `None`: a GPU is in use, or this is not known.
    ///
    /// A container that has started since the last reading counts as a use, because it needs time
    /// until its first call.
    pub fn update(&mut self, now: Duration, reading: Option<&ListResponse>) -> Option<Duration> {
        let keys: BTreeSet<String> = reading.map_or_else(BTreeSet::new, |list| {
            list.containers.iter().map(|c| c.announcement.key.clone()).collect()
        });
        let has_new = !keys.is_subset(&self.known);
        self.known = keys;
        if has_new || !reading.is_some_and(is_unused) {
            self.idle_since = None;
            return None;
        }
        let since = *self.idle_since.get_or_insert(now);
        Some(now.saturating_sub(since))
    }
}

/// Returns whether a reading shows that nothing uses a GPU of the node: no container uses one or
/// waits for one, and NVML counts no work in the last minute. Programs without Affinode count by this
/// work alone. If no GPU can be read, the use is unknown.
fn is_unused(list: &ListResponse) -> bool {
    let rests = |c: &Container| match State::parse(&c.state) {
        Some(State::Active | State::Queued | State::Restoring) | None => false,
        Some(
            State::Unregistered
            | State::Idle
            | State::Lost
            | State::Closing
            | State::Offloading
            | State::Offloaded,
        ) => true,
    };
    !list.gpus.is_empty()
        && list.gpus.iter().all(|gpu| gpu.utilization_minute_percent == 0)
        && list.containers.iter().all(rests)
}

#[cfg(test)]
mod tests {
    use affinode_proto::api::control::{Announcement, Gpu};

    use super::*;

    fn container(key: &str, state: State) -> Container {
        Container {
            announcement: Some(Announcement { key: key.into(), ..Default::default() }).into(),
            state: state.as_str().into(),
            ..Container::default()
        }
    }

    fn list(busy_percent: u32, containers: &[(&str, State)]) -> ListResponse {
        ListResponse {
            gpus: vec![Gpu { utilization_minute_percent: busy_percent, ..Gpu::default() }],
            containers: containers.iter().map(|(key, state)| container(key, *state)).collect(),
            ..ListResponse::default()
        }
    }

    /// Feeds readings 10 s apart, and returns the seconds without use after each of them.
    fn idle_seconds(readings: &[Option<ListResponse>]) -> Vec<Option<u64>> {
        let mut idle = IdleGpus::default();
        let after = |(number, reading): (u64, &Option<ListResponse>)| {
            let now = Duration::from_secs(number * 10);
            idle.update(now, reading.as_ref()).map(|time| time.as_secs())
        };
        (0..).zip(readings).map(after).collect()
    }

    #[test]
    fn node_is_idle_while_no_container_works() {
        let at = |state| Some(list(0, &[("a", state), ("b", State::Offloaded)]));
        let used = [State::Active, State::Queued, State::Restoring];
        for state in State::ALL {
            let expected = (!used.contains(&state)).then_some(10);
            let readings = [at(State::Idle), at(State::Idle), at(state)];
            assert_eq!(idle_seconds(&readings)[2], expected, "{state}");
        }
        let readings = [at(State::Idle), at(State::Idle), at(State::Active), at(State::Idle)];
        assert_eq!(idle_seconds(&readings), [None, Some(0), None, Some(0)], "it begins again");
    }

    #[test]
    fn node_without_containers_can_be_idle() {
        assert_eq!(idle_seconds(&[Some(list(0, &[])), Some(list(0, &[]))]), [Some(0), Some(10)]);
    }

    #[test]
    fn new_container_counts_as_use() {
        let one = || Some(list(0, &[("a", State::Idle)]));
        let two = || Some(list(0, &[("a", State::Idle), ("b", State::Unregistered)]));
        let readings = [one(), one(), two(), two(), one()];
        assert_eq!(idle_seconds(&readings), [None, Some(0), None, Some(0), Some(10)]);
    }

    #[test]
    fn use_without_affinode_or_unknown_use_counts() {
        let idle = || Some(list(0, &[]));
        let blind = Some(ListResponse::default());
        for used in [Some(list(1, &[])), blind, None] {
            assert_eq!(idle_seconds(&[idle(), used, idle()]), [Some(0), None, Some(0)]);
        }
    }
}
