//! Offloads containers that are idle.

use affinode_proto::{reason::Reason, state::State};

use super::{Key, Node, container::Offload, eligibility::is_unsafe};

impl Node {
    /// Updates whether the container is idle, and begins an offload if the policy says so.
    pub(super) fn evaluate(&mut self, key: &Key) {
        let Some(c) = self.containers.get(key) else {
            return;
        };
        if !c.goal.is_resident() || !matches!(c.shown.state, State::Active | State::Idle) {
            return;
        }
        self.update_oversubscription();
        let Some(c) = self.containers.get(key) else { return };
        let verdict = self.check_offload(key, false);
        let idle = self.now.saturating_sub(c.usage.last_use) >= c.idle_after_ms()
            && !matches!(verdict, Err((Reason::CallInProgress | Reason::GpuBusy, _)));
        match verdict {
            Ok(()) => {
                self.set_state(key, State::Idle, Reason::IdleTimeout, "", 0, 0);
                self.begin_offload(key, Reason::IdleTimeout, Offload::begins(self.now));
            }
            Err((reason, detail)) => {
                let state = if idle { State::Idle } else { State::Active };
                self.set_state(key, state, reason, &detail, 0, 0);
                if is_unsafe(reason) {
                    self.refuse_offload(key, reason, &detail);
                }
            }
        }
    }
}
