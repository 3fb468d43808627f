//! Executes the node's effects: orders, which take the time of the calibration, and readings of
//! GPUs.

use affinode_proto::{
    event::EventKind,
    state::State,
    wire::{
        Phase,
        message::{Action, AgentMessage, ControllerMessage, Outcome},
    },
};

use super::{
    PolicyDecision, STEP_MS, SimulatedNode, SimulationEvent,
    names::{id, number, pid},
};
use crate::{
    core::{Effect, GpuSample, Input, Millis, Survey},
    simulate::SimulationError,
};

/// Maximum time between offload and restore that counts as thrash.
const THRASH_MS: Millis = 60_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OrderStep {
    Close,
    Lock,
    Checkpoint,
    Restore,
    Unlock,
    Open,
}

impl SimulatedNode<'_> {
    pub(super) fn gpu(&self, gpu: usize, process: Option<usize>) -> GpuSample {
        let held = |n: &usize| (pid(*n), self.processes[*n].load.vram_bytes);
        GpuSample {
            uuid: self.uuids[gpu].clone(),
            total_bytes: self.machine.vram_bytes,
            used_bytes: self.used_bytes[gpu],
            processes: process.iter().filter(|n| self.processes[**n].on_device).map(held).collect(),
            ..GpuSample::default()
        }
    }

    /// An unrequested reading of the GPU as an input.
    pub(super) fn reading(&self, n: usize) -> Input {
        Input::Proven(
            self.processes[n].key.clone(),
            u64::MAX,
            Ok(vec![self.gpu(n % self.machine.gpus, None)]),
        )
    }

    pub(super) fn simulate_effect(&mut self, effect: Effect) -> Result<(), SimulationError> {
        match effect {
            Effect::Send(process, ControllerMessage::Order { order, action, .. }) => {
                return self.order(process.0 as usize, order, action);
            }
            Effect::Survey { key: asked, .. } => {
                let n = number(asked.as_str());
                let survey = Survey {
                    gpus: Ok(vec![self.gpu(n % self.machine.gpus, Some(n))]),
                    host: Ok(Vec::new()),
                };
                self.inputs.push_back(Input::Surveyed(asked, survey));
            }
            Effect::Prove(asked, proof) => {
                let n = number(asked.as_str());
                let gpus = Ok(vec![self.gpu(n % self.machine.gpus, None)]);
                self.inputs.push_back(Input::Proven(asked, proof, gpus));
            }
            Effect::Publish(event) => {
                self.figures.refused += u64::from(event.kind == EventKind::Refused);
            }
            Effect::Changed(change) => {
                if let Some(decisions) = &mut self.decisions {
                    decisions.extend(PolicyDecision::of(self.now, &change));
                }
                if matches!(change.to, State::Offloaded | State::Active) {
                    let n = number(change.key.as_str());
                    let reading = self.reading(n);
                    self.inputs.push_back(reading);
                    self.plan_due(n, STEP_MS);
                }
            }
            _ => {}
        }
        Ok(())
    }

    pub(super) fn order(
        &mut self,
        n: usize,
        order: u64,
        action: Action,
    ) -> Result<(), SimulationError> {
        let bytes = self.processes[n].load.vram_bytes;
        let (step, takes) = match action {
            Action::Close { .. } => {
                // From now on calls wait at the gate.
                if self.processes[n].busy_until.is_none() {
                    self.processes[n].phase = Phase::Closed;
                }
                (OrderStep::Close, STEP_MS)
            }
            Action::Lock { .. } => (OrderStep::Lock, STEP_MS),
            Action::Checkpoint { .. } => (OrderStep::Checkpoint, self.costs.offload_ms(bytes)),
            Action::Restore => {
                let used_bytes = &mut self.used_bytes[n % self.machine.gpus];
                if *used_bytes + bytes > self.machine.vram_bytes {
                    return Err(SimulationError::Overcommitted);
                }
                *used_bytes += bytes;
                self.resident_bytes += bytes;
                self.returns(n);
                (OrderStep::Restore, self.costs.restore_ms(bytes))
            }
            Action::Unlock => (OrderStep::Unlock, STEP_MS),
            Action::Open => (OrderStep::Open, STEP_MS),
            // Simulated processes copy nothing, and stay on their GPUs.
            Action::CopyOut { .. }
            | Action::RestoreOnGpu { .. }
            | Action::HoldAllocations { .. }
            | Action::ReleaseAllocations => {
                return Ok(());
            }
        };
        self.processes[n].order = order;
        self.at(self.now + takes, SimulationEvent::Done(n as u32, step));
        Ok(())
    }

    pub(super) fn returns(&mut self, n: usize) {
        let (now, p) = (self.now, &mut self.processes[n]);
        p.on_device = true;
        self.figures.restores += 1;
        if let Some(since) = p.offloaded_since.take() {
            let (from, to) = (since.max(p.first()), now.min(p.last()));
            p.freed_ms += to.saturating_sub(from);
            self.offloaded_bytes -= p.load.vram_bytes;
        }
        if p.went.is_some_and(|went| now - went < THRASH_MS) {
            self.figures.thrash += 1;
        }
    }

    pub(super) fn done(&mut self, n: usize, step: OrderStep) -> Result<(), SimulationError> {
        let (now, p) = (self.now, &mut self.processes[n]);
        let mut outcome = Outcome::Done;
        match step {
            OrderStep::Close if p.phase == Phase::Open => outcome = Outcome::Busy,
            OrderStep::Close | OrderStep::Unlock => p.phase = Phase::Closed,
            OrderStep::Lock | OrderStep::Restore => p.phase = Phase::Locked,
            OrderStep::Checkpoint => {
                p.phase = Phase::Checkpointed;
                p.on_device = false;
                (p.offloaded_since, p.went) = (Some(now), Some(now));
                self.used_bytes[n % self.machine.gpus] -= p.load.vram_bytes;
                self.resident_bytes -= p.load.vram_bytes;
                self.offloaded_bytes += p.load.vram_bytes;
                self.figures.host_peak_bytes =
                    self.figures.host_peak_bytes.max(self.offloaded_bytes);
            }
            OrderStep::Open => p.phase = Phase::Open,
        }
        let (order, phase) = (p.order, p.phase);
        let (swappable_bytes, copied_out_bytes) = (0, 0);
        let report = AgentMessage::Report {
            order,
            outcome,
            phase,
            cuda_error: 0,
            elapsed_us: 0,
            swappable_bytes,
            copied_out_bytes,
            unchanged_bytes: 0,
            zero_bytes: 0,
        };
        let report = Input::Message(id(n), report);
        if step != OrderStep::Open || self.processes[n].waiting.is_empty() {
            return self.tell(report);
        }
        let p = &mut self.processes[n];
        p.lived.delayed += p.waiting.len() as u64;
        let now = u32::try_from(now).unwrap_or(u32::MAX);
        self.delays_ms.extend(p.waiting.iter().map(|since| now.saturating_sub(*since)));
        let page = self.use_begins(n);
        self.processes[n].waiting.clear();
        self.tell(report)?;
        self.tell(page)
    }
}
