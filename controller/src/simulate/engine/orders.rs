//! Executes the node's effects. Orders take the time of the calibration; readings of GPUs take
//! none.

use affinode_core::{Effect, GpuSample, Input, Millis, Survey};
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
use crate::simulate::{SimulationError, memory::OffloadLevel, summary::CallDelay};

/// Maximum time between an offload and the following restore that counts as thrash.
const THRASH_MS: Millis = 60_000;

impl SimulatedNode<'_> {
    pub(super) fn gpu(&self, gpu: usize, process: Option<usize>) -> GpuSample {
        let held = |n: &usize| (pid(*n), self.processes[*n].memory.held_bytes());
        let is_seen = |(_, bytes): &(u32, u64)| *bytes > 0;
        GpuSample {
            uuid: self.uuids[gpu].clone(),
            total_bytes: self.machine.vram_bytes,
            used_bytes: self.used_bytes[gpu],
            processes: process.iter().map(held).filter(is_seen).collect(),
            ..GpuSample::default()
        }
    }

    /// An unrequested reading of the GPU as an input.
    pub(super) fn reading(&self, n: usize) -> Input {
        Input::Proven(
            self.processes[n].key.clone(),
            u64::MAX,
            Ok(vec![self.gpu(self.processes[n].gpu, None)]),
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
                    gpus: Ok(vec![self.gpu(self.processes[n].gpu, Some(n))]),
                    host: Ok(Vec::new()),
                };
                self.inputs.push_back(Input::Surveyed(asked, survey));
            }
            Effect::Prove(asked, proof) => {
                let n = number(asked.as_str());
                let gpus = Ok(vec![self.gpu(self.processes[n].gpu, None)]);
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
        if self.processes[n].has_exited {
            return Ok(());
        }
        let takes_ms = self.processes[n].memory.order_ms(action, &self.costs);
        match action {
            // From now on calls wait at the gate.
            Action::Close { .. } if self.processes[n].busy_until.is_none() => {
                self.processes[n].phase = Phase::Closed;
            }
            Action::Restore => self.restore_begins(n)?,
            // These orders have no effect: simulated processes do not allocate, and stay on their
            // GPUs.
            Action::RestoreOnGpu { .. }
            | Action::HoldAllocations { .. }
            | Action::ReleaseAllocations => return Ok(()),
            _ => {}
        }
        self.processes[n].order = order;
        self.at(self.now + takes_ms, SimulationEvent::Done(n as u32, action));
        Ok(())
    }

    /// Takes VRAM at the begin of a restore, because the driver allocates before it copies.
    fn restore_begins(&mut self, n: usize) -> Result<(), SimulationError> {
        let (now, p) = (self.now, &mut self.processes[n]);
        let bytes = p.memory.gone_bytes();
        if self.used_bytes[p.gpu] + bytes > self.machine.vram_bytes {
            return Err(SimulationError::Overcommitted);
        }
        p.count_freed(now);
        p.restored_from = p.memory.level;
        p.phase_after_restore = p.memory.execute_order(Action::Restore);
        self.used_bytes[p.gpu] += bytes;
        self.resident_bytes += bytes;
        self.offloaded_bytes -= std::mem::take(&mut p.host_bytes);
        self.figures.restores += 1;
        if p.restored_from == OffloadLevel::Copied {
            self.figures.restores_copied += 1;
        }
        if p.went.is_some_and(|went| now - went < THRASH_MS) {
            self.figures.thrash += 1;
        }
        Ok(())
    }

    /// Frees VRAM at the end of a copy out or checkpoint.
    fn vram_is_freed(&mut self, n: usize, action: Action) {
        let now = self.now;
        let p = &mut self.processes[n];
        p.count_freed(now);
        let (level, before) = (p.memory.level, p.memory.gone_bytes());
        p.phase = p.memory.execute_order(action);
        if level == OffloadLevel::Resident {
            p.went = Some(now);
        }
        let freed_bytes = p.memory.gone_bytes() - before;
        p.host_bytes += freed_bytes;
        self.used_bytes[p.gpu] -= freed_bytes;
        self.resident_bytes -= freed_bytes;
        self.offloaded_bytes += freed_bytes;
        self.figures.host_peak_bytes = self.figures.host_peak_bytes.max(self.offloaded_bytes);
    }

    pub(super) fn done(&mut self, n: usize, action: Action) -> Result<(), SimulationError> {
        let p = &mut self.processes[n];
        if p.has_exited {
            return Ok(());
        }
        let mut outcome = Outcome::Done;
        match action {
            Action::Close { .. } if p.phase == Phase::Open => outcome = Outcome::Busy,
            Action::Close { .. } | Action::Unlock => p.phase = Phase::Closed,
            Action::Lock { .. } => p.phase = Phase::Locked,
            Action::Restore => p.phase = p.phase_after_restore,
            Action::Open => p.phase = Phase::Open,
            Action::CopyOut { .. } | Action::Checkpoint { .. } => self.vram_is_freed(n, action),
            _ => {}
        }
        let p = &self.processes[n];
        let swap = p.memory.swap();
        let report = AgentMessage::Report {
            order: p.order,
            outcome,
            phase: p.phase,
            cuda_error: 0,
            elapsed_us: 0,
            swappable_bytes: swap.swappable_bytes,
            copied_out_bytes: swap.copied_out_bytes,
            unchanged_bytes: 0,
            zero_bytes: 0,
            local_memory_bytes: 0,
        };
        let report = Input::Message(id(n), report);
        if action != Action::Open {
            return self.tell(report);
        }
        let page = self.calls_continue(n);
        self.tell(report)?;
        page.map_or(Ok(()), |page| self.tell(page))
    }

    /// Releases the waiting calls of a process after its gate has opened. Returns the counters if
    /// calls were waiting.
    fn calls_continue(&mut self, n: usize) -> Option<Input> {
        let now = u32::try_from(self.now).unwrap_or(u32::MAX);
        let p = &mut self.processes[n];
        let from = std::mem::take(&mut p.restored_from);
        if p.waiting.is_empty() {
            return None;
        }
        p.lived.delayed += p.waiting.len() as u64;
        let delays = p.waiting.iter().map(|since| now.saturating_sub(*since));
        self.delays.extend(delays.map(|ms| CallDelay { ms, from }));
        let page = self.use_begins(n);
        self.processes[n].waiting.clear();
        Some(page)
    }
}
