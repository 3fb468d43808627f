//! Handles requests of operators and programs, and sends the responses.

use affinode_proto::{reason::Reason, state::State};

use super::{
    ActionResult, CommandId, Effect, Key, Node,
    container::{Container, Offload},
    input::Request,
};

impl Node {
    pub(super) fn command(&mut self, command: CommandId, key: &Key, request: Request) {
        let Some(container) = self.containers.get_mut(key) else {
            let response =
                ActionResult { text: "no such container".into(), ..ActionResult::default() };
            self.effects.push(Effect::Answer(command, response));
            return;
        };
        container.commands.push((command, request));
        match (request, container.shown.state) {
            (Request::Offload, State::Offloaded) => self.answer(key, request, true, 0, 0),
            (Request::Offload, State::Active | State::Idle) => {
                match self.check_offload(key, true) {
                    Ok(()) => self.begin_offload(key, Reason::Requested, Offload::begins(self.now)),
                    Err((reason, detail)) => {
                        self.refuse_offload(key, reason, &detail);
                        if let Some(container) = self.containers.get_mut(key) {
                            container.shown.reason = (reason, detail);
                        }
                        self.answer(key, request, false, 0, 0);
                    }
                }
            }
            (Request::Restore, State::Active | State::Idle) => {
                self.answer(key, request, true, 0, 0)
            }
            (Request::Restore, State::Offloaded) => {
                container.goal.become_resident();
                container.cause = Reason::Requested;
                self.resume(key);
            }
            (Request::Restore, State::Closing | State::Offloading) => {
                container.goal.become_resident();
                container.cause = Reason::Requested;
                container.shown.reason = (Reason::Requested, String::new());
                self.answer(key, Request::Offload, false, 0, 0);
                self.resume(key);
            }
            // If the container has no processes or is lost, no move can answer the request: answer
            // it now. In all other states a move is in progress, and the end of that move answers
            // the request.
            (_, State::Unregistered | State::Lost) => self.answer(key, request, false, 0, 0),
            _ => {}
        }
    }

    /// Begins an offload that was requested while the container was being restored.
    pub(super) fn resume_offload_request(&mut self, key: &Key) {
        let asked = |c: &Container| c.commands.iter().any(|(_, r)| *r == Request::Offload);
        if !self.containers.get(key).is_some_and(asked) {
            return;
        }
        match self.check_offload(key, true) {
            Ok(()) => self.begin_offload(key, Reason::Requested, Offload::begins(self.now)),
            Err(reason) => {
                if let Some(container) = self.containers.get_mut(key) {
                    container.shown.reason = reason;
                }
                self.answer(key, Request::Offload, false, 0, 0);
            }
        }
    }

    /// Answers requests that no move will answer. The container stays resident, because it was
    /// called or one of its processes started after the request.
    pub(super) fn settle_requests(&mut self, key: &Key) {
        let Some(c) = self.containers.get_mut(key) else { return };
        let resident = c.goal.is_resident() && matches!(c.shown.state, State::Active | State::Idle);
        if resident && !c.commands.is_empty() {
            c.shown.reason = (Reason::WokenMeanwhile, String::new());
            self.answer(key, Request::Offload, false, 0, 0);
            self.answer(key, Request::Restore, true, 0, 0);
        }
    }
}
