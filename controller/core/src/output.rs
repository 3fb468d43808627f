//! Everything that the node sends and records: orders to agents, events, states that users see,
//! answers to requests, and journal records.

use affinode_proto::{
    event::EventKind,
    reason::Reason,
    state::State,
    wire::message::{Action, ControllerMessage},
};

use super::{
    Change, Effect, JournalStep, Key, Millis, ProcessId, Record, RecordedProcess,
    event::NodeEvent,
    input::{ActionResult, CommandId, Request},
    node_state::NodeState,
    process::{PendingOrder, VramRelease},
    texts::text_of,
};

impl NodeState {
    /// Marks a container so that its next orders are decided before the handling of the present
    /// input ends. Functions that change a container call this function.
    pub(super) fn resume(&mut self, key: &Key) {
        if !self.output.resumed.contains(key) {
            self.output.resumed.push_back(key.clone());
        }
    }

    /// Sends an order to an agent and returns its number.
    pub(super) fn order(&mut self, process: ProcessId, action: Action) -> u64 {
        self.output.last_order += 1;
        let order = self.output.last_order;
        let decided_ms = self.clock.now;
        let message = ControllerMessage::Order { order, action, decided_ms };
        self.output.effects.push(Effect::Send(process, message));
        // A process has at most one order that belongs to a move. Orders to pause or resume its
        // allocations may be in progress at the same time.
        if !matches!(action, Action::HoldAllocations { .. } | Action::ReleaseAllocations)
            && let Some(process) = self.registry.processes.get_mut(&process)
        {
            let since = self.clock.now;
            let release = VramRelease::NotReported;
            process.pending = Some(PendingOrder { order, action, since, release });
        }
        order
    }

    /// Publishes an event about a container.
    pub(super) fn publish(&mut self, key: &Key, event: NodeEvent) {
        let container = self.display_name(key);
        let event = NodeEvent { key: Some(key.clone()), container, ..event };
        self.output.effects.push(Effect::Publish(Box::new(event)));
    }

    /// Publishes the event of a refused offload.
    pub(super) fn publish_refusal(&mut self, key: &Key, reason: Reason, detail: &str) {
        let event = NodeEvent::new(EventKind::Refused, text_of(reason, detail));
        self.publish(key, event.because(reason));
    }

    /// Publishes an event that says why the container stays resident. Publishes nothing if the
    /// reason is the same as in the last such event.
    pub(super) fn refuse_offload(&mut self, key: &Key, reason: Reason, detail: &str) {
        let Some(container) = self.registry.containers.get_mut(key) else {
            return;
        };
        if container.shown.refused.replace(reason) != Some(reason) {
            self.publish_refusal(key, reason, detail);
        }
    }

    /// Publishes an event about a prewake (a restore before an expected CUDA call). `used`: whether
    /// a call followed.
    pub(super) fn publish_prewake(&mut self, key: &Key, by: Reason, used: bool) {
        let text = match used {
            true => "the container was restored before an expected call, which arrived",
            false => "the container was restored before an expected call, which did not arrive",
        };
        let kind = if used { EventKind::Prewake } else { EventKind::PrewakeInVain };
        self.publish(key, NodeEvent::new(kind, text).because(by));
    }

    /// Sets the state that users see, with its reason. If the state does not change, only the
    /// reason is replaced.
    pub(super) fn set_state(
        &mut self,
        key: &Key,
        to: State,
        reason: Reason,
        detail: &str,
        bytes: u64,
        elapsed_ms: Millis,
    ) {
        let now = self.clock.now;
        let Some(container) = self.registry.containers.get_mut(key) else {
            return;
        };
        container.shown.reason = (reason, detail.to_owned());
        let from = container.shown.state;
        if from == to {
            return;
        }
        container.shown.state = to;
        container.shown.since = now;
        self.driver_limits.changed.insert(key.clone());
        self.output.effects.push(Effect::Changed(Change {
            key: key.clone(),
            container: container.display_name(),
            from,
            to,
            reason,
            detail: detail.to_owned(),
            bytes,
            elapsed_ms,
        }));
    }

    /// Answers the container's pending requests of the kind `which`.
    pub(super) fn answer(
        &mut self,
        key: &Key,
        which: Request,
        done: bool,
        bytes: u64,
        elapsed_ms: Millis,
    ) {
        let Some(container) = self.registry.containers.get_mut(key) else {
            return;
        };
        let (asked, others) =
            std::mem::take(&mut container.commands).into_iter().partition(|(_, r)| *r == which);
        container.commands = others;
        let asked: Vec<(CommandId, Request)> = asked;
        if asked.is_empty() {
            return;
        }
        let (reason, detail) = container.shown.reason.clone();
        let response = ActionResult {
            done,
            state: Some(container.shown.state),
            reason: Some(reason),
            text: text_of(reason, &detail),
            bytes,
            elapsed_ms,
        };
        self.output.effects.extend(
            asked.into_iter().map(|(command, _)| Effect::Answer(command, response.clone())),
        );
    }

    /// Writes a journal record with each process of the container that is offloaded or about to be.
    /// A process that an earlier controller offloaded, and that has not registered yet, stays in
    /// the record: the next controller must know how much VRAM that process needs.
    pub(super) fn journal(&mut self, key: &Key, step: JournalStep) {
        let known = self.registry.processes.of(key).filter_map(|(_, p)| {
            let (pid, start_ticks) = (p.identity.pid, p.identity.start_ticks);
            let to = p.memory.target_gpu().filter(|_| step == JournalStep::Restore);
            p.memory.offloaded_vram().map(|offloaded| RecordedProcess {
                pid,
                start_ticks,
                offloaded: offloaded.to_vec(),
                to: to.map(str::to_owned),
            })
        });
        let processes = known.chain(self.recalled_of(key)).collect();
        let step = if self.is_restoring_unseen(key) { JournalStep::Restore } else { step };
        self.output.effects.push(Effect::Journal(key.clone(), Some(Record { step, processes })));
    }

    /// Removes the container's journal record after a restore or the exit of its last process.
    /// Processes of an earlier controller's journal that have not registered stay in the record.
    pub(super) fn clear_journal(&mut self, key: &Key) {
        if self.recalled_of(key).next().is_some() {
            self.journal(key, JournalStep::Checkpoint);
        } else {
            self.output.effects.push(Effect::Journal(key.clone(), None));
        }
    }
}
