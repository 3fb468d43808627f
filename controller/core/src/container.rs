//! State of one container that Affinode manages. [`affinode_proto::state`] draws its states.

use affinode_proto::{reason::Reason, state::State};

use super::{
    CommandId, ContainerSpec, Millis,
    connection_prewake::ConnectionOutcomes,
    hints::Hint,
    history::{History, PAUSE_MS, Pauses},
    holds::HoldRecord,
    input::Request,
    policy::{KeepAlive, Policy},
    wake_latency::Wakes,
};

/// An offload counts as too early if a call wakes the container within this time after it.
const EARLY_MS: Millis = 30_000;
/// Number of forced offloads in a row, each given up because calls did not end, after which the
/// container counts as immovable.
const PUSHES: u32 = 3;
/// Number of early wakes in a row up to which the keep-alive stays unchanged, because these wakes
/// may be chance.
const THRASH: u32 = 2;
/// Maximum number of times that a learned keep-alive is doubled.
const MAX_EARLY: u32 = 5;

/// Whether the controller works towards a resident or an offloaded container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Goal {
    /// The container is to be resident: the gate of every process, at which CUDA calls wait during
    /// a move, is open.
    Resident,
    /// An offload was requested. The controller waits for the survey (readings of host memory and
    /// GPUs) and has not changed any process yet.
    OffloadRequested,
    /// The container is to be offloaded: every process is checkpointed or copied out.
    Offloaded,
}

/// Why a process was not restored although the VRAM was granted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IncompleteRestore {
    /// The process received the order to restore too late.
    Late,
    /// The copy in found no VRAM. Contains the text of the driver's error.
    NoVram(String),
}

/// The state of one container. Only [`super::Node`] changes it.
#[derive(Clone, Debug)]
pub struct Container {
    /// The container's names, annotations and paths, as its shim announced them.
    pub spec: ContainerSpec,
    /// The policy that results from the annotations, the namespace rule and the node's settings.
    pub policy: Policy,
    /// One warning for each invalid annotation of the container.
    pub warnings: Vec<String>,
    /// The state shown to users.
    pub state: State,
    /// When `state` changed last.
    pub state_since: Millis,
    /// When the shim announced the container.
    pub announced_at: Millis,
    /// Whether the controller works towards a resident or an offloaded container.
    pub goal: Goal,
    /// Whether the offload also checkpoints the CUDA context, because another container needs the
    /// context's VRAM.
    pub evict_context: bool,
    /// Why one process was not restored although its VRAM was granted. The value is kept while
    /// restores of the container's other processes run.
    pub incomplete_restore: Option<IncompleteRestore>,
    /// Whether the offload is forced, which means that a CUDA call does not cancel it.
    pub forced: bool,
    /// Number of forced offloads in a row that were given up because calls did not end.
    pub failed_forced_offloads: u32,
    /// When the container last proved immovable: several forced offloads in a row failed because
    /// calls did not end, or an offload failed for another reason, such as a hazard.
    pub forced_offload_failed_at: Option<Millis>,
    /// Cause of the offload or restore in progress.
    pub cause: Reason,
    /// The reason shown to users, and its detail: why the container was offloaded, why it stays
    /// resident, or what it waits for.
    pub reason: (Reason, String),
    /// Reason in the last event that reported why the container is not offloaded. It prevents a
    /// repeated event.
    pub refused: Option<Reason>,
    /// Last use: a call, work on the GPU, a hint or a waiting allocation.
    pub last_use: Millis,
    /// Last use by a CUDA call.
    pub last_called: Millis,
    /// When the container was last restored; `None` if it never was.
    pub restored_at: Option<Millis>,
    /// Earliest time of the next offload. It is set when an offload fails.
    pub offload_not_before: Millis,
    /// Earliest time at which the container enters the queue again, after failed restores.
    pub restore_not_before: Millis,
    /// Number of grants of VRAM in a row that were of no use: the container was neither restored
    /// nor made its allocation, although other processes paused their allocations for it.
    pub failed_restores: u32,
    /// Until this time, the controller waits only briefly for the container's processes to pause
    /// their allocations, because some of them ignored such an order.
    pub short_hold_until: Millis,
    /// Number of periods so far in which the controller waits only briefly (`short_hold_until`).
    /// Each period is longer than the period before.
    pub ignored_hold_periods: u32,
    /// Counts of the orders to pause allocations that the container's processes refused or carried
    /// out since the last period of brief waits began.
    pub hold_record: HoldRecord,
    /// When the controller last searched for containers to evict for this container.
    pub eviction_searched_at: Option<Millis>,
    /// Number of failed offloads in a row. A completed offload sets it to 0.
    pub failures: u32,
    /// When the pending survey of host memory and GPUs was requested. `None`: no survey is pending.
    pub survey_asked: Option<Millis>,
    /// When the offload in progress began.
    pub offload_began: Option<Millis>,
    /// When VRAM was granted for the restore in progress.
    pub restore_began: Option<Millis>,
    /// When the first call began to wait for the restore in progress. `None`: no call waits.
    pub wake_began: Option<Millis>,
    /// Requests of operators that the controller has not answered yet.
    pub commands: Vec<(CommandId, Request)>,
    /// Lengths of the container's earlier uses and pauses, from which its next use is predicted.
    pub history: History,
    /// When the use in progress, or the last one, began.
    pub use_began: Millis,
    /// After a prewake: the container stays resident until this time. `None`: it was not prewoken.
    pub prewake_hold_until: Option<Millis>,
    /// Source of the last prewake: the container's history or a connection.
    pub prewake_reason: Reason,
    /// Number of connections accepted on the container's network, at the last reading while the
    /// container was offloaded. `None`: not read since the offload.
    pub connections: Option<u64>,
    /// Number of connections that arrived while the container was offloaded, and number of those
    /// connections that were followed by a call.
    pub connection_outcomes: ConnectionOutcomes,
    /// Whether the last prewake was not followed by a call.
    pub prewake_missed: bool,
    /// The last hint, and when it was given.
    pub hint: Option<(Hint, Millis)>,
    /// Number of early wakes in a row: calls within 30 s after an offload for the idle timeout.
    pub early_wakes: u32,
    /// Time of the next use. Set only in simulations.
    pub next_use: Option<Millis>,
    /// Number of completed offloads.
    pub offloads: u64,
    /// Number of completed restores.
    pub restores: u64,
    /// Duration of the last offload, in milliseconds.
    pub last_offload_ms: Millis,
    /// Duration of the last wake, from the first waiting call to its release, in milliseconds.
    pub last_wake_ms: Millis,
    /// Durations of the last wakes.
    pub wakes: Wakes,
    /// Duration of the last restore after VRAM was granted, in milliseconds.
    pub last_restore_ms: Millis,
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
            state: State::Unregistered,
            state_since: now,
            announced_at: now,
            goal: Goal::Resident,
            evict_context: false,
            incomplete_restore: None,
            forced: false,
            failed_forced_offloads: 0,
            forced_offload_failed_at: None,
            cause: Reason::NotRegistered,
            reason: (Reason::NotRegistered, String::new()),
            refused: None,
            last_use: now,
            last_called: now,
            restored_at: None,
            offload_not_before: 0,
            restore_not_before: 0,
            failed_restores: 0,
            eviction_searched_at: None,
            short_hold_until: 0,
            ignored_hold_periods: 0,
            hold_record: HoldRecord::default(),
            failures: 0,
            survey_asked: None,
            offload_began: None,
            restore_began: None,
            wake_began: None,
            commands: Vec::new(),
            history: History::default(),
            use_began: now,
            prewake_hold_until: None,
            prewake_reason: Reason::Expected,
            connections: None,
            connection_outcomes: ConnectionOutcomes::default(),
            prewake_missed: false,
            hint: None,
            early_wakes: 0,
            next_use: None,
            offloads: 0,
            restores: 0,
            last_offload_ms: 0,
            last_wake_ms: 0,
            wakes: Wakes::default(),
            last_restore_ms: 0,
        }
    }

    /// Time without use after which the container is idle, in milliseconds. With `keep_alive =
    /// "learned"` the time is learned once the history has enough pauses. After an idle hint it is
    /// 0.
    #[must_use]
    pub fn idle_after_ms(&self) -> Millis {
        if self.hinted_idle() {
            return 0;
        }
        let most = self.policy.idle_timeout_ms;
        if self.policy.keep_alive == KeepAlive::Fixed {
            return most;
        }
        let learned = self.history.keep_alive_ms().unwrap_or(most);
        (learned << self.early_wakes.saturating_sub(THRASH).min(MAX_EARLY)).min(most)
    }

    /// Records a call that wakes the container, and whether the call came early after the offload.
    /// After several early wakes in a row, each further early wake doubles the keep-alive.
    pub fn left_early(&mut self, now: Millis) {
        if self.state == State::Offloaded && self.cause == Reason::IdleTimeout {
            let early = now.saturating_sub(self.state_since) < EARLY_MS;
            self.early_wakes = if early { self.early_wakes.saturating_add(1) } else { 0 };
        }
    }

    /// Records a failed offload, and whether it shows that the container is immovable. If the
    /// reason is that calls did not end, only several forced offloads in a row show this. If the
    /// reason is that VRAM was unknown, the failure does not show it.
    pub fn has_stayed(&mut self, now: Millis, why: Reason) {
        let forced = std::mem::take(&mut self.forced);
        let immovable = match why {
            Reason::Busy | Reason::Called => {
                self.failed_forced_offloads += u32::from(forced);
                self.failed_forced_offloads >= PUSHES
            }
            Reason::VramUnknown => false,
            _ => true,
        };
        if immovable {
            (self.failed_forced_offloads, self.forced_offload_failed_at) = (0, Some(now));
        }
    }

    /// Records a grant that was of no use: it led to neither a restore nor an allocation, although
    /// other processes paused their allocations for it. The time until the container enters the
    /// queue again doubles with each such grant, up to a minute.
    pub fn has_wasted_a_turn(&mut self, now: Millis) {
        const FIRST_PAUSE_MS: Millis = 250;
        if self.failed_restores > 0 {
            self.restore_not_before = now + (FIRST_PAUSE_MS << self.failed_restores.min(8));
        }
        self.failed_restores = self.failed_restores.saturating_add(1);
    }

    /// Ends a pause in the container's use, and learns from the pause if it was long enough.
    /// Returns the length of the pause in milliseconds.
    pub fn pause_ends(&mut self, now: Millis, node: &mut Pauses) -> Millis {
        let pause_ms = now.saturating_sub(self.last_use);
        if pause_ms >= PAUSE_MS {
            let use_ms = self.last_use.saturating_sub(self.use_began);
            self.history.observe(use_ms, pause_ms, node, self.policy.keep_alive_target());
            self.use_began = now;
        }
        pause_ms
    }

    /// Name shown to users, see [`ContainerSpec::display_name`].
    #[must_use]
    pub fn display_name(&self) -> String {
        self.spec.display_name()
    }
}
