//! The steps of an offload: read host memory and GPUs (the survey), close the gates, lock, read
//! again, then copy out or checkpoint. If a step fails, the completed steps are undone.

use affinode_proto::{
    reason::Reason,
    state::State,
    wire::{
        Capabilities, Phase,
        message::{Action, CopyOptions},
    },
};

use super::{
    JournalStep, Key, Node, ProcessId,
    container::{Goal, Offload},
    eligibility::Refusal,
    host_promises::HostVerdict,
    input::{Request, Survey},
    plan::{self, OffloadMethod, OffloadPlan, OffloadStep, ProcessPosition},
    process::Process,
};

impl Node {
    /// Begins an offload with a survey of host memory and GPUs. No process is changed before the
    /// survey shows that the offload can succeed.
    pub(super) fn begin_offload(&mut self, key: &Key, why: Reason, offload: Offload) {
        let Some(container) = self.containers.get_mut(key) else {
            return;
        };
        container.goal = Goal::OffloadRequested(offload);
        let in_vain = container.prewake.take().map(|prewake| prewake.why);
        container.usage.prewake_missed = in_vain == Some(Reason::Expected);
        container.cause = why;
        container.shown.reason = (why, String::new());
        if let Some(by) = in_vain {
            self.publish_prewake(key, by, false);
        }
        // End the grant, because it is for an allocation only: once offloaded, the container needs
        // VRAM for its restore too.
        self.end_alloc_grant(key);
        self.queue.leave(key);
        // A container without memory to copy is offloaded only if an operator or a waiter requests
        // it. The offload then checkpoints its context.
        let is_void = self.has_second_level(key) && self.has_nothing_to_copy(key);
        let container = self.containers.get_mut(key);
        if let Some(offload) = container.and_then(|c| c.goal.offload_mut()) {
            offload.evict_context |= is_void;
        }
        self.survey(key);
    }

    pub(super) fn surveyed(&mut self, key: &Key, survey: Survey) {
        let Some(container) = self.containers.get_mut(key) else {
            return;
        };
        // If no survey is pending, the container's processes have ended since the survey was
        // requested.
        let Some(asked_at) = container.survey_asked.take() else { return };
        let cause = container.cause;
        let verdict = match survey.gpus {
            Ok(gpus) => {
                self.take_survey(key, &gpus);
                survey.host.and_then(|pools| self.check_vram(key).map(|()| pools))
            }
            Err(error) => Err((Reason::VramUnknown, error)),
        };
        // The offload was given up while host memory and GPUs were read.
        let Some(container) = self.containers.get(key).filter(|c| !c.goal.is_resident()) else {
            return self.resume(key);
        };
        let is_requested = container.goal.is_requested();
        let verdict = match verdict {
            Ok(pools) => self.promise_host_memory(key, pools, asked_at),
            Err((reason, detail)) => HostVerdict::Refused(reason, detail),
        };
        match verdict {
            HostVerdict::Refused(reason, detail) => self.fail_offload(key, reason, &detail),
            // The next tick repeats the survey. A call of `advance` here would repeat the survey at
            // once, in a loop.
            HostVerdict::Waits(reason, detail) => {
                if let Some(container) = self.containers.get_mut(key) {
                    container.shown.reason = (reason, detail);
                }
            }
            HostVerdict::Promised if is_requested => {
                if let Some(container) = self.containers.get_mut(key) {
                    container.goal.proceed();
                }
                // A process that started while the container was offloaded has paused its
                // allocations until its siblings are restored. Its gate closes next, and a gate
                // does not close during a pause.
                self.release_siblings(key);
                self.set_state(key, State::Closing, cause, "", 0, 0);
                self.resume(key);
            }
            HostVerdict::Promised => {
                if let OffloadPlan::Run(step, processes) =
                    plan::plan_offload(&self.positions(key), self.deadlines(key))
                {
                    for process in processes {
                        self.run_offload_step(key, process, step);
                    }
                }
                self.resume(key);
            }
        }
    }

    /// Whether NVML shows the VRAM of every process, and there is VRAM to offload. If it shows no
    /// VRAM of a process, the VRAM that its restore needs would be unknown.
    fn check_vram(&self, key: &Key) -> Result<(), Refusal> {
        let unseen = |p: &Process| {
            let claims = p.counters.as_ref().is_some_and(|page| page.allocated_bytes > 0);
            !p.phase.is_offloaded() && p.vram.is_empty() && claims
        };
        if let Some((_, p)) = self.processes.of(key).find(|(_, p)| unseen(p)) {
            let text = format!(
                "NVML reports no VRAM of process {}, but Affinode's library in the process counts allocations",
                p.identity.pid
            );
            return Err((Reason::NoVram, text));
        }
        // Before this reading of the GPUs, the GPU of the process may have been unknown.
        if let Some(gpu) = self.processes.of(key).find_map(|(_, p)| self.cut_gpu_of(p)) {
            return Err((Reason::Mig, format!("GPU {gpu}")));
        }
        let has_memory = |p: &Process| p.vram_bytes() > 0 || p.phase.is_offloaded();
        match self.processes.of(key).any(|(_, p)| has_memory(p)) {
            true => Ok(()),
            false => Err((Reason::NoVram, String::new())),
        }
    }

    /// Runs one step of the offload for a process, after the gate of every process is closed and
    /// host memory is promised. Before the step, records the VRAM that the restore will need.
    pub(super) fn run_offload_step(&mut self, key: &Key, id: ProcessId, step: OffloadStep) {
        self.set_state(key, State::Offloading, self.cause(key), "", 0, 0);
        let Some(process) = self.processes.get_mut(&id) else {
            return;
        };
        if process.phase != Phase::CopiedOut || process.offloaded_vram.is_none() {
            process.offloaded_vram = Some(process.vram.clone());
            // NVML may count the process's memory for a copier at this moment. The process has at
            // least as much VRAM as its agent can copy.
            if let Some([all]) = process.offloaded_vram.as_deref_mut() {
                let total = self.gpus.iter().find(|gpu| gpu.uuid == all.uuid);
                let swappable =
                    process.swap.swappable_bytes.min(total.map_or(0, |gpu| gpu.total_bytes));
                all.bytes = all.bytes.max(swappable);
            }
        }
        let vram_bytes =
            process.offloaded_vram.iter().flatten().map(|d| d.bytes).max().unwrap_or(0);
        self.host_ledger.begin_move(key);
        // The journal must be on disk before the order is sent: if the controller ends now, the
        // next one must know how much VRAM this process needs.
        self.journal(key, JournalStep::Checkpoint);
        if step == OffloadStep::CopyOut {
            self.attach_for_offload(id);
        }
        self.order(
            id,
            match step {
                OffloadStep::CopyOut => {
                    Action::CopyOut { vram_bytes, how: self.copy_options(key, id) }
                }
                OffloadStep::Checkpoint => Action::Checkpoint { vram_bytes },
            },
        );
    }

    /// The options of a copy out that the policy requests and the library supports.
    fn copy_options(&self, key: &Key, id: ProcessId) -> CopyOptions {
        let (Some(container), Some(process)) = (self.containers.get(key), self.processes.get(&id))
        else {
            return CopyOptions::default();
        };
        let copies_both = self.moves(key)(process) == OffloadMethod::CopyAndCheckpoint;
        CopyOptions {
            keep: container.policy.retain_host_copy && process.can(Capabilities::RETAINS_HOST_COPY),
            // A copier needs VRAM for its copy, so the copier may copy only while no grant exists.
            then_checkpoint: self.grants.is_empty()
                && process.prefault_ordered
                && copies_both
                && process.can(Capabilities::PREFAULTS),
            check: container.policy.checksum && process.can(Capabilities::CHECKS),
        }
    }

    pub(super) fn advance_offload(&mut self, key: &Key, positions: &[ProcessPosition]) {
        match plan::plan_offload(positions, self.deadlines(key)) {
            OffloadPlan::Wait => {}
            OffloadPlan::Send(orders) => {
                for (process, action) in orders {
                    self.order(process, action);
                }
            }
            OffloadPlan::Run(..) => self.survey(key),
            OffloadPlan::Done => self.finish_offload(key),
        }
    }

    pub(super) fn finish_offload(&mut self, key: &Key) {
        let now = self.now;
        let bytes = self.offloaded_bytes(key);
        let Some(container) = self.containers.get_mut(key) else {
            return;
        };
        if container.shown.state == State::Offloaded {
            return;
        }
        let offload = container.goal.offload_mut();
        let began = offload.and_then(|offload| {
            offload.forced = false;
            offload.began.take()
        });
        let elapsed = began.map_or(0, |began| now.saturating_sub(began));
        if began.is_some() {
            container.figures.offloaded(elapsed);
        }
        container.offload_failures.clear();
        container.connections.restart();
        let cause = container.cause;
        self.set_state(key, State::Offloaded, cause, "", bytes, elapsed);
        self.answer(key, Request::Offload, true, bytes, elapsed);
        let wanted = self.alloc_wait_of(key).map(|_| Reason::AllocationWaits);
        let Some(container) = self.containers.get_mut(key) else { return };
        let called = container.wake_began.map(|_| Reason::Called);
        let asked = container.commands.iter().find(|(_, request)| *request == Request::Restore);
        // The container was already waiting for its restore when its context was evicted. It
        // continues to wait.
        if let Some(cause) = wanted.or(called).or(asked.map(|_| Reason::Requested)) {
            container.goal.become_resident();
            container.cause = cause;
            self.resume(key);
        }
    }

    /// Gives up an offload because a process of the container exits. This does not count as a
    /// failure.
    pub(super) fn turn_back(&mut self, key: &Key) {
        let Some(container) = self.containers.get_mut(key).filter(|c| !c.goal.is_resident()) else {
            return;
        };
        container.goal.become_resident();
        container.cause = Reason::NotRegistered;
        container.shown.reason =
            (Reason::NotRegistered, "a process of the container is exiting".into());
        self.answer(key, Request::Offload, false, 0, 0);
    }

    /// Gives up an offload, counts the failure, and undoes the completed steps.
    ///
    /// If the memory is already copied out and only the checkpoint of the contexts failed, the
    /// container stays copied out. A restore would take VRAM from the waiter that needs the
    /// contexts' VRAM.
    pub(super) fn fail_offload(&mut self, key: &Key, reason: Reason, detail: &str) {
        let now = self.now;
        let is_out = self.processes.of(key).all(|(_, p)| p.phase.is_offloaded());
        let Some(container) = self.containers.get_mut(key) else {
            return;
        };
        let forced = container.goal.is_forced();
        if is_out && container.goal.evicts_context() && container.wake_began.is_none() {
            container.goal = Goal::Offloaded(Offload::default());
        } else {
            container.goal.become_resident();
        }
        container.cause = reason;
        container.shown.reason = (reason, detail.to_owned());
        container.offload_failures.has_stayed(now, reason, forced);
        container.offload_failures.count(now, container.policy.idle_timeout_ms);
        self.prefault_failed(key);
        self.publish_refusal(key, reason, detail);
        self.answer(key, Request::Offload, false, 0, 0);
        self.resume(key);
    }

    /// Evicts a container for a waiter.
    pub(super) fn evict(&mut self, victim: &Key, mut offload: Offload) {
        if self.may_evict_context(victim) {
            // The container is copied out already. The same offload continues and checkpoints its
            // context. It was counted and timed when the copy out ended.
            offload.began = None;
            offload.evict_context = true;
        }
        self.begin_offload(victim, Reason::Pressure, offload);
    }
}
