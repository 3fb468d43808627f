//! One container under management, and its way through the states that
//! [`affinode_proto::state`] draws.

use affinode_proto::{api::control::Announcement, reason::Reason, state::State};

use super::{
    CommandId, Millis,
    connection_prewake::ConnectionOutcomes,
    context_retention::Costs,
    hints::Hint,
    history::{History, PAUSE_MS, Pauses},
    holds::HoldRecord,
    input::Request,
    policy::{KeepAlive, Policy},
    wake_latency::Wakes,
};

/// Whoever is called so soon after it left has left too early.
const EARLY_MS: Millis = 30_000;
/// Whoever was made to go so often and did not cannot be moved.
const PUSHES: u32 = 3;
/// So often in a row may be bad luck.
const THRASH: u32 = 2;
/// A learned keep-alive is doubled so often at most.
const MAX_EARLY: u32 = 5;

/// Where the container shall be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Goal {
    /// Running freely: every process open.
    Resident,
    /// About to leave: host memory and devices are being looked at; nothing was touched.
    OffloadRequested,
    /// Off the GPU: every process away.
    Offloaded,
}

/// What is known of a container. Changed by [`super::Node`] alone.
#[derive(Clone, Debug)]
pub struct Container {
    /// What the shim said.
    pub announcement: Announcement,
    /// Effective policy.
    pub policy: Policy,
    /// Annotations that were not understood.
    pub warnings: Vec<String>,
    /// The shown state.
    pub state: State,
    /// Since when.
    pub state_since: Millis,
    /// When it was announced.
    pub announced_at: Millis,
    /// Where it shall be.
    pub goal: Goal,
    /// What a copy leaves on the device goes as well: somebody needs the room.
    pub evict_context: bool,
    /// Of the engine `auto`: its context stays in the absence that has begun.
    pub retain_context: bool,
    /// What its absences have cost.
    pub costs: Costs,
    /// It goes although it is in use: calls do not turn it round.
    pub forced: bool,
    /// How often in a row it was made to go and its calls did not end.
    pub failed_forced_offloads: u32,
    /// When it was last made to go and stayed, or could not go for a reason of its own.
    pub forced_offload_failed_at: Option<Millis>,
    /// Why it goes out or comes home.
    pub cause: Reason,
    /// What is shown: why it went, why it stays, what it waits for. Word and detail.
    pub reason: (Reason, String),
    /// The refusal that was told last.
    pub refused: Option<Reason>,
    /// Last use.
    pub last_use: Millis,
    /// Last use by a call.
    pub last_called: Millis,
    /// When it last came home, if it ever left.
    pub restored_at: Option<Millis>,
    /// No offload before this time, after one that failed.
    pub offload_not_before: Millis,
    /// No attempt to return before this time, after some that came to nothing.
    pub restore_not_before: Millis,
    /// Returns and allocations in a row that others held theirs for and that came to nothing.
    pub failed_restores: u32,
    /// Until then its processes are waited for only briefly when allocations are to be held:
    /// some have let a hold lapse.
    pub short_hold_until: Millis,
    /// How often such a time has begun.
    pub ignored_hold_periods: u32,
    /// How its processes have held since the last such time began.
    pub hold_record: HoldRecord,
    /// When room was last looked for, for it.
    pub eviction_searched_at: Option<Millis>,
    /// Failed offloads in a row.
    pub failures: u32,
    /// When the survey that is on its way was asked for.
    pub survey_asked: Option<Millis>,
    /// Begin of the offload in progress.
    pub offload_began: Option<Millis>,
    /// When room was found for the return in progress.
    pub restore_began: Option<Millis>,
    /// First waiting call of the wake in progress.
    pub wake_began: Option<Millis>,
    /// Requests that wait for an answer.
    pub commands: Vec<(CommandId, Request)>,
    /// When it is used and when not.
    pub history: History,
    /// When the use in progress, or the last one, began.
    pub use_began: Millis,
    /// It is held until then: it came back ahead of a call that is expected.
    pub prewake_hold_until: Option<Millis>,
    /// Why a call is expected: by its history, or because of a connection.
    pub prewake_reason: Reason,
    /// Connections that came in at its network so far, while it is out.
    pub connections: Option<u64>,
    /// What became of connections that came in while it was out.
    pub connection_outcomes: ConnectionOutcomes,
    /// It came back ahead of a call that did not come.
    pub prewake_missed: bool,
    /// What was said of it last, and when.
    pub hint: Option<(Hint, Millis)>,
    /// How often in a row it was called soon after it had left by itself.
    pub early_wakes: u32,
    /// When its next use is expected, as a simulation knows it.
    pub next_use: Option<Millis>,
    /// Completed offloads.
    pub offloads: u64,
    /// Completed restores.
    pub restores: u64,
    /// Duration of the last offload.
    pub last_offload_ms: Millis,
    /// Duration of the last wake: first waiting call to release.
    pub last_wake_ms: Millis,
    /// The last wakes.
    pub wakes: Wakes,
    /// The part of the last one after room was found.
    pub last_restore_ms: Millis,
}

impl Container {
    /// A container that was just announced.
    #[must_use]
    pub fn new(
        announcement: Announcement,
        policy: Policy,
        warnings: Vec<String>,
        now: Millis,
    ) -> Container {
        Container {
            announcement,
            policy,
            warnings,
            state: State::Unregistered,
            state_since: now,
            announced_at: now,
            goal: Goal::Resident,
            evict_context: false,
            retain_context: false,
            costs: Costs::default(),
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

    /// How long without use makes it idle: learned, where that is wanted and enough is known.
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

    /// A call wakes it. When it was called soon after it left by itself, and that again and
    /// again, it is kept longer the next time, twice as long for each time more.
    pub fn left_early(&mut self, now: Millis) {
        if self.state == State::Offloaded && self.cause == Reason::IdleTimeout {
            let early = now.saturating_sub(self.state_since) < EARLY_MS;
            self.early_wakes = if early { self.early_wakes.saturating_add(1) } else { 0 };
        }
    }

    /// An offload came to nothing. Calls that did not end are no reason to give it up for
    /// immovable before it was made to go several times; what NVML does not tell is none at all.
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

    /// Others held their allocations for it, and it did not come home, or did not allocate. Its next
    /// turn comes later each time, up to a minute.
    pub fn has_wasted_a_turn(&mut self, now: Millis) {
        const FIRST_PAUSE_MS: Millis = 250;
        if self.failed_restores > 0 {
            self.restore_not_before = now + (FIRST_PAUSE_MS << self.failed_restores.min(8));
        }
        self.failed_restores = self.failed_restores.saturating_add(1);
    }

    /// Use begins again after a pause; what follows from it is learned.
    pub fn pause_ends(&mut self, now: Millis, node: &mut Pauses) -> Millis {
        let pause_ms = now.saturating_sub(self.last_use);
        if pause_ms >= PAUSE_MS {
            let use_ms = self.last_use.saturating_sub(self.use_began);
            self.history.observe(use_ms, pause_ms, node, self.policy.keep_alive_target());
            self.use_began = now;
        }
        pause_ms
    }

    /// Name for people.
    #[must_use]
    pub fn display_name(&self) -> String {
        display_name(&self.announcement)
    }

    /// Namespace for rules: Kubernetes', else containerd's.
    #[must_use]
    pub fn rule_namespace(announcement: &Announcement) -> &str {
        if announcement.pod_namespace.is_empty() {
            &announcement.namespace
        } else {
            &announcement.pod_namespace
        }
    }
}

/// Name for people: `namespace/pod/container`; outside Kubernetes `namespace/name`, or the
/// id, shortened as container tools do it, where there is no name.
#[must_use]
pub fn display_name(a: &Announcement) -> String {
    const SHORT: usize = 12;
    let generated = a.id.len() == 64 && a.id.bytes().all(|b| b.is_ascii_hexdigit());
    if !a.pod.is_empty() {
        [&a.pod_namespace, "/", &a.pod, "/", &a.container].concat()
    } else {
        let name = match (a.container.as_str(), generated) {
            ("", true) => &a.id[..SHORT],
            ("", false) => &a.id,
            (name, _) => name,
        };
        [&a.namespace, "/", name].concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_that_people_gave() {
        let outside = Announcement {
            namespace: "default".into(),
            id: "ab".repeat(32),
            ..Announcement::default()
        };
        assert_eq!(display_name(&outside), "default/abababababab");
        let named = Announcement { container: "trainer".into(), ..outside.clone() };
        assert_eq!(display_name(&named), "default/trainer");
        let pod = Announcement {
            pod_namespace: "ml".into(),
            pod: "p-0".into(),
            container: "c".into(),
            ..outside
        };
        assert_eq!(display_name(&pod), "ml/p-0/c");
    }
}
