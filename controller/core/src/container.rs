//! State of one container that Affinode manages. [`affinode_proto::state`] has a diagram of the
//! states.
//!
//! [`Goal`] contains the data of the offload or restore in progress. The other fields are grouped
//! by subject.

mod failures;
mod figures;
mod goal;
mod usage;

use affinode_proto::{reason::Reason, state::State};

pub use self::{
    failures::{OffloadFailures, RestoreFailures},
    figures::Figures,
    goal::{Goal, IncompleteRestore, Offload, Restore},
    usage::Usage,
};
use super::{
    CommandId, ContainerSpec, Millis,
    connection_prewake::Connections,
    history::Pauses,
    holds::ShortHolds,
    host_memory::{HostPoolPrefault, MemoryPool},
    input::Request,
    policy::Policy,
};

/// A prewake: a restore of a container before an expected CUDA call. It ends with the first call or
/// the next offload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prewake {
    /// Time until which the container stays resident if no CUDA call comes.
    pub until: Millis,
    /// Why a call is expected: the container's history, or a connection.
    pub why: Reason,
}

/// The state of one container. Only [`super::Node`] changes it.
#[derive(Clone, Debug)]
pub struct Container {
    /// The container's names, annotations and paths, as its shim announced them.
    pub spec: ContainerSpec,
    /// The container's effective policy. It results from the annotations, the namespace rule and
    /// the node's settings.
    pub policy: Policy,
    /// One warning for each invalid annotation of the container.
    pub warnings: Vec<String>,
    /// The state that users see, and its reason.
    pub shown: ShownState,
    /// Whether the controller works towards a resident or an offloaded container.
    pub goal: Goal,
    /// Cause of the offload or restore in progress.
    pub cause: Reason,
    /// When the pending survey (a reading of host memory and GPUs) was requested. `None`: no survey
    /// is pending. The offload may end before the result of its survey arrives.
    pub survey_asked: Option<Millis>,
    /// When the first CUDA call began to wait for the container's restore. `None`: no call waits.
    pub wake_began: Option<Millis>,
    /// Requests of operators that the controller has not answered yet.
    pub commands: Vec<(CommandId, Request)>,
    /// When the container was used, and when its next use is expected.
    pub usage: Usage,
    /// The last prewake (a restore before an expected CUDA call). `None`: there was none, or a call
    /// or an offload has followed it.
    pub prewake: Option<Prewake>,
    /// Time until which the container stays resident, because it is restored to free host memory
    /// for the offload of another container. 0: it is not.
    pub resident_until: Millis,
    /// The pools of host memory that the last refused offload lacked.
    pub short_of: Vec<MemoryPool>,
    /// The prefault of the host pool's memory for the next offload.
    pub host_pool_prefault: HostPoolPrefault,
    /// Connections that arrived while the container was offloaded.
    pub connections: Connections,
    /// Number of offloads in a row that failed, and when the next one may begin.
    pub offload_failures: OffloadFailures,
    /// Number of restores in a row that failed, and when the next one may begin.
    pub restore_failures: RestoreFailures,
    /// Periods in which the controller waits only briefly for reports on orders to pause
    /// allocations. Such a period begins when a process of the container did not follow such an
    /// order.
    pub short_holds: ShortHolds,
    /// Counts and durations of the container's offloads and restores.
    pub figures: Figures,
}

impl Container {
    /// Creates a container that was just announced. It has no processes.
    #[must_use]
    pub fn new(
        spec: ContainerSpec,
        policy: Policy,
        warnings: Vec<String>,
        now: Millis,
    ) -> Container {
        Container {
            spec,
            policy,
            warnings,
            shown: ShownState::new(now),
            goal: Goal::default(),
            cause: Reason::NotRegistered,
            survey_asked: None,
            wake_began: None,
            commands: Vec::new(),
            usage: Usage::new(now),
            prewake: None,
            resident_until: 0,
            short_of: Vec::new(),
            host_pool_prefault: HostPoolPrefault::default(),
            connections: Connections::default(),
            offload_failures: OffloadFailures::default(),
            restore_failures: RestoreFailures::default(),
            short_holds: ShortHolds::default(),
            figures: Figures::new(now),
        }
    }

    /// Time without use after which the container is idle, in milliseconds. See
    /// [`Usage::idle_after_ms`].
    #[must_use]
    pub fn idle_after_ms(&self) -> Millis {
        self.usage.idle_after_ms(&self.policy)
    }

    /// Time at which the container becomes idle if it is not used before.
    #[must_use]
    pub fn idle_at(&self) -> Millis {
        self.usage.last_use.saturating_add(self.idle_after_ms())
    }

    /// Whether a CUDA call may cancel the container's offload. A forced offload is not cancelled.
    #[must_use]
    pub fn gives_way_to_calls(&self) -> bool {
        self.goal.offload().is_some_and(|offload| !offload.forced)
    }

    /// Whether the container is offloaded and neither an offload nor a restore of it is in
    /// progress.
    #[must_use]
    pub fn rests_offloaded(&self) -> bool {
        self.shown.state == State::Offloaded && self.goal.is_offloaded()
    }

    /// Records that a CUDA call wakes an offloaded container. Has an effect only if the container
    /// was offloaded because it was idle for its idle timeout. The time since that offload shows
    /// whether the offload was too early.
    pub fn left_early(&mut self, now: Millis) {
        if self.shown.state == State::Offloaded && self.cause == Reason::IdleTimeout {
            self.usage.woken_after(now.saturating_sub(self.shown.since));
        }
    }

    /// Records that the container is used again after a pause. If the pause was a second or longer,
    /// the keep-alive (the time without use after which the container is idle) is learned from it.
    /// `node`: the pauses of all containers. Returns the length of the pause in milliseconds.
    pub fn pause_ends(&mut self, now: Millis, node: &mut Pauses) -> Millis {
        self.usage.pause_ends(now, node, self.policy.keep_alive_target())
    }

    /// Name shown to users, see [`ContainerSpec::display_name`].
    #[must_use]
    pub fn display_name(&self) -> String {
        self.spec.display_name()
    }
}

/// The container's state as users see it, with its reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShownState {
    /// The state of the container, from a fixed list.
    pub state: State,
    /// When the state changed last.
    pub since: Millis,
    /// The reason for the state, with a detail: why the container was offloaded, why it stays
    /// resident, or what it waits for.
    pub reason: (Reason, String),
    /// Reason in the last event that reported why the container is not offloaded. The controller
    /// publishes no second event in a row with the same reason.
    pub refused: Option<Reason>,
}

impl ShownState {
    /// The state of a container that was just announced.
    #[must_use]
    pub fn new(now: Millis) -> ShownState {
        ShownState {
            state: State::Unregistered,
            since: now,
            reason: (Reason::NotRegistered, String::new()),
            refused: None,
        }
    }
}
