//! The way out and the way home of a container, step by step.
//!
//! ```text
//! Home ──idle, policy──> Leaving ──survey says go──> Out: close, lock, survey, journal, checkpoint
//!   ^                       │ in use or no room        │ busy, error, wake
//!   └───────────────────────┴──────────────────────────┘ unlock, open; what is away is queued for its return
//! ```
//!
//! Whether it goes is decided in `verdict.rs`; the two ways are in `way_out.rs` and
//! `way_home.rs`, the ends of orders in `reports.rs`.

use affinode_proto::{reason::Reason, state::State};

use super::{Effect, Key, Node, Record, RecordedProcess, container::Goal, plan::Position};

impl Node {
    pub(super) fn journal(&mut self, key: &Key, step: &str) {
        let processes = self
            .processes
            .of(key)
            .filter_map(|(_, p)| {
                let (pid, start_ticks) = (p.identity.pid, p.identity.start_ticks);
                p.away.clone().map(|away| RecordedProcess { pid, start_ticks, away })
            })
            .collect();
        self.effects
            .push(Effect::Journal(key.clone(), Some(Record { step: step.to_owned(), processes })));
    }

    pub(super) fn cause(&self, key: &Key) -> Reason {
        self.containers.get(key).map_or(Reason::Requested, |c| c.cause)
    }

    pub(super) fn positions(&self, key: &Key) -> Vec<Position> {
        let out = self.containers.get(key).is_some_and(|c| c.goal == Goal::Out);
        self.processes
            .of(key)
            .map(|(id, p)| Position {
                process: id,
                phase: p.phase,
                occupied: !p.connected || p.pending.is_some() || (out && p.holds > 0),
            })
            .collect()
    }

    /// Does the next thing for a container, if there is one.
    pub(super) fn advance(&mut self, key: &Key) {
        let Some(container) = self.containers.get(key) else {
            return;
        };
        if container.state == State::Unregistered {
            return;
        }
        let positions = self.positions(key);
        if positions.is_empty() {
            return;
        }
        match container.goal {
            Goal::Leaving => {}
            Goal::Out => self.advance_out(key, &positions),
            Goal::Home => self.advance_home(key, &positions),
        }
    }
}
