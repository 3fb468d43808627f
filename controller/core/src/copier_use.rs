//! Decides when processes use the copiers of their GPUs, and keeps copiers from taking VRAM while
//! VRAM is being proven free. The copiers themselves are in `copiers.rs`.

use affinode_proto::wire::{Capabilities, ProcessFlags, copier::CopierReport};

use super::{
    DeviceBytes, Effect, Node, ProcessId, copiers::CopierId, grant::Stage, plan::OffloadMethod,
    process::Process,
};

impl Node {
    /// Attaches a process to the copier of its GPU if the process will be copied out and then
    /// checkpointed.
    pub(super) fn attach_for_offload(&mut self, id: ProcessId) {
        if let Some((uuid, most_bytes)) = self.offloads_through_copier(id)
            && !self.copiers.was_attached_ahead(id, &uuid)
        {
            self.attach(id, &uuid, most_bytes, false);
        }
    }

    pub(super) fn attach(
        &mut self,
        id: ProcessId,
        uuid: &str,
        most_bytes: u64,
        ahead: bool,
    ) -> bool {
        if !self.may_have_copier(uuid) {
            return false;
        }
        let domain = self.domain_of(id);
        let process = (id, uuid);
        self.copiers.attach(self.now, process, most_bytes, domain, ahead, &mut self.effects)
    }

    /// Whether a process may use a copier on a GPU now. A new copier takes VRAM, so no copier is
    /// started while a container waits or VRAM is being proven free.
    fn may_have_copier(&self, uuid: &str) -> bool {
        self.settings.copiers && (self.is_settled() || self.copiers.has_ready(uuid))
    }

    /// Orders the copier to copy the memory of a process that is being restored back into VRAM.
    pub(super) fn fill_memory(&mut self, id: ProcessId) {
        let most_bytes = self.offloaded_bytes_of(id);
        self.copiers.fill(self.now, id, most_bytes, &mut self.effects);
    }

    pub(super) fn copier_reported(&mut self, id: CopierId, report: CopierReport) {
        self.copiers.report(id, report);
    }

    pub(super) fn copier_ended(&mut self, id: CopierId) {
        self.copiers.ended(self.now, id, &mut self.effects);
    }

    pub(super) fn copier_exited(&mut self, id: CopierId) {
        self.copiers.exited(self.now, id, &mut self.effects);
    }

    /// Ends copiers that hold VRAM for which a container waits, and copiers without processes.
    pub(super) fn keep_copiers(&mut self) {
        let mut copiers = std::mem::take(&mut self.copiers);
        let leaves = |process| self.is_leaving(process);
        let mut effects = Vec::new();
        copiers.make_room(self.now, &self.gpus_under_pressure, leaves, &mut effects);
        copiers.tick(self.now, &mut effects);
        if self.grants.is_empty() {
            copiers.hold(false, &mut effects);
        }
        self.effects.append(&mut effects);
        self.copiers = copiers;
    }

    /// Requests the NVML sample for each grant for which all processes have paused their
    /// allocations. No other function requests these samples. Requests none while a copier starts
    /// or ends, because the copier may take VRAM right after the sample.
    pub(super) fn prove_when_copiers_rest(&mut self) {
        let waits = |stage: &Stage| *stage == Stage::AwaitingCopiers;
        if !self.grants.values().any(|grant| waits(&grant.stage)) {
            return;
        }
        // Registrations are paused first, so that no registration begins while the grants wait for
        // a starting copier.
        self.copiers.hold(true, &mut self.effects);
        if self.copiers.is_moving(self.now) {
            return;
        }
        for (key, grant) in self.grants.iter_mut().filter(|(_, grant)| waits(&grant.stage)) {
            self.next_proof += 1;
            grant.stage = Stage::Proving(self.next_proof);
            self.effects.push(Effect::Prove(key.clone(), self.next_proof));
        }
    }

    /// The GPU of a process whose memory a copier can copy out, and the number of its swappable
    /// bytes. `None` if the library cannot use a copier, if the offload uses another method, or if
    /// the process has memory on several GPUs. Also `None` if its counters report that no copier
    /// can restore it.
    pub(super) fn offloads_through_copier(&self, id: ProcessId) -> Option<(String, u64)> {
        let process = self.processes.get(&id).filter(|p| p.can(Capabilities::USES_COPIER))?;
        self.for_copier(process, process.offloaded_vram.as_deref()?)
    }

    /// Like `offloads_through_copier`. `held` is the VRAM that the process has now, or had before
    /// its offload.
    pub(super) fn for_copier(
        &self,
        process: &Process,
        held: &[DeviceBytes],
    ) -> Option<(String, u64)> {
        let both = self.moves(&process.key)(process) == OffloadMethod::CopyAndCheckpoint;
        let vain = process
            .counters
            .as_ref()
            .is_some_and(|page| page.notes.intersects(ProcessFlags::NO_COPIER));
        match held {
            [on] if both && !vain => {
                Some((on.uuid.clone(), on.bytes.min(process.swap.swappable_bytes)))
            }
            _ => None,
        }
    }
}
