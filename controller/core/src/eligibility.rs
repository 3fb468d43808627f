//! Decides whether a container may be offloaded now, and gives the reason if not. The decision
//! depends only on [`OffloadFacts`], which [`super::offload_check`] collects.

use affinode_proto::{reason::Reason, wire::Hazards};

use super::{Millis, container::Container, policy::Mode};

const HAZARDS: [(Hazards, Reason); 10] = [
    (Hazards::DAMAGED_MEMORY, Reason::DamagedMemory),
    (Hazards::DIRECT_ACCESS, Reason::DirectAccess),
    (Hazards::MANAGED_MEMORY, Reason::ManagedMemory),
    (Hazards::PEER_ACCESS, Reason::PeerAccess),
    (Hazards::SHARED_MEMORY, Reason::SharedMemory),
    (Hazards::MPS, Reason::Mps),
    (Hazards::NO_CHECKPOINT_API, Reason::DriverTooOld),
    (Hazards::VIDEO, Reason::Video),
    (Hazards::TOOLS, Reason::Tools),
    (Hazards::HIDDEN_WAY, Reason::HiddenWay),
];

/// Why a process with these hazards must not be offloaded. `None`: none of them prevents an
/// offload.
pub(super) fn hazard_reason(hazards: Hazards) -> Option<Reason> {
    HAZARDS.iter().find(|(bit, _)| hazards.intersects(*bit)).map(|(_, reason)| *reason)
}

/// Time without a CUDA call after which GPU work may be shown as the reason why a container stays
/// resident. Before, the recent calls are shown as the reason.
const QUIET_MS: Millis = 2_000;

/// Why a container is not offloaded: the reason, and a detail for people.
pub(super) type Refusal = (Reason, String);

/// Facts about one process on which the decision to offload its container depends.
#[derive(Clone, Debug, Default)]
pub(super) struct ProcessFacts<'a> {
    pub pid: u32,
    /// All hazards of the process.
    pub hazards: Hazards,
    /// Hazards that make this offload unsafe. If the offload only copies memory, hazards of a
    /// checkpoint are not included, because the context stays on the GPU.
    pub unsafe_hazards: Hazards,
    pub keeps_context: bool,
    /// Index of a GPU in MIG mode on which the process has memory. `None`: there is no such GPU.
    pub mig_gpu: Option<u32>,
    pub counter_error: Option<&'a str>,
    pub connected: bool,
    pub in_call: bool,
}

/// Facts that matter only for an offload because of idleness. They are not used if an operator or a
/// container that waits for VRAM requests the offload.
#[derive(Clone, Debug, Default)]
pub(super) struct IdleFacts {
    /// Size in bytes of an allocation of the container that waits for VRAM. `None`: no allocation
    /// waits.
    pub waiting_alloc_bytes: Option<u64>,
    /// Pid of a process whose kernels are running on the GPU, and their share of the GPU's time in
    /// percent.
    pub working: Option<(u32, u32)>,
    /// Whether the container has less VRAM than its policy's minimum.
    pub is_too_small: bool,
    /// Whether the policy's window for offloads is open.
    pub is_window_open: bool,
    /// Whether the policy's mode offloads the container as soon as it is idle.
    pub leaves_when_idle: bool,
}

/// All facts on which the decision to offload a container depends.
#[derive(Clone, Debug)]
pub(super) struct OffloadFacts<'a> {
    pub now: Millis,
    pub container: &'a Container,
    pub processes: Vec<ProcessFacts<'a>>,
    /// Whether a copy of memory to the host would free no VRAM.
    pub nothing_to_copy: bool,
    /// Whether the engine can also checkpoint CUDA contexts, which is the second level of an
    /// offload.
    pub has_second_level: bool,
    /// Whether the operators' choices permit an offload. `Err`: the reason why not.
    pub permitted: Result<(), Reason>,
    /// Why NVML, or a GPU of the container, could not be read. The VRAM in use is then unknown.
    /// `None`: the last reading succeeded.
    pub gpu_error: Option<&'a str>,
    /// Facts about idleness. `None`: an operator or a container that waits for VRAM requests the
    /// offload, so idleness does not matter.
    pub idle: Option<IdleFacts>,
}

impl OffloadFacts<'_> {
    /// Checks whether the container may be offloaded now. `Err`: the reason why not.
    pub fn check(&self) -> Result<(), Refusal> {
        if self.processes.is_empty() {
            return refuse(Reason::NotRegistered);
        }
        self.processes.iter().try_for_each(ProcessFacts::is_safe)?;
        if self.container.policy.mode == Mode::Off {
            return refuse(Reason::ModeOff);
        }
        self.frees_memory()?;
        self.permitted.or_else(refuse)?;
        if let Some(error) = self.gpu_error {
            return Err((Reason::VramUnknown, error.to_owned()));
        }
        if self.processes.iter().any(|process| process.in_call) {
            return refuse(Reason::CallInProgress);
        }
        match &self.idle {
            None => Ok(()),
            Some(idle) => {
                self.is_idle(idle)?;
                self.is_due(idle)
            }
        }
    }

    /// Checks whether the offload would free VRAM, by copies or by checkpoints of the CUDA
    /// contexts. `Err`: the reason why not.
    fn frees_memory(&self) -> Result<(), Refusal> {
        if !self.nothing_to_copy {
            return Ok(());
        }
        if self.processes.iter().all(|process| process.keeps_context) {
            // No memory can be copied. The reason to show is the hazard that prevents the
            // checkpoint of the contexts.
            let kept = self.processes.first();
            let reason = kept.and_then(|process| hazard_reason(process.hazards));
            let detail = kept.map_or(String::new(), ProcessFacts::name);
            return Err((reason.unwrap_or(Reason::NothingToCopy), detail));
        }
        if self.has_second_level { Ok(()) } else { refuse(Reason::NothingToCopy) }
    }

    /// Checks whether the container has been idle for its idle timeout. `Err`: the reason why it
    /// counts as in use.
    fn is_idle(&self, idle: &IdleFacts) -> Result<(), Refusal> {
        let c = self.container;
        if let Some(bytes) = idle.waiting_alloc_bytes {
            return Err((Reason::AllocationWaits, super::texts::size(bytes)));
        }
        if c.usage.busy_until().is_some_and(|until| self.now < until) {
            return refuse(Reason::HintedBusy);
        }
        // While the container makes calls, "recent calls" is the better reason to show than work on
        // the GPU.
        let quiet_ms = self.now.saturating_sub(c.usage.last_called);
        if let Some((pid, percent)) = idle.working
            && quiet_ms >= QUIET_MS.min(c.idle_after_ms())
        {
            return Err((Reason::GpuBusy, format!("process {pid}, {percent} %")));
        }
        if self.now < c.idle_at() {
            return refuse(Reason::RecentCalls);
        }
        Ok(())
    }

    /// Checks whether the policy offloads the idle container now. `Err`: the reason why the
    /// container stays resident.
    fn is_due(&self, idle: &IdleFacts) -> Result<(), Refusal> {
        let c = self.container;
        if idle.is_too_small {
            return refuse(Reason::TooSmall);
        }
        if self.nothing_to_copy {
            return refuse(Reason::NothingToCopy);
        }
        if let Some(prewake) = c.prewake.filter(|prewake| self.now < prewake.until) {
            return refuse(prewake.why);
        }
        if self.now < c.resident_until {
            return refuse(Reason::FreesHostMemory);
        }
        let resident_ms = c.figures.restored_at.map(|at| self.now.saturating_sub(at));
        if resident_ms.is_some_and(|ms| ms < c.policy.minimum_residency_ms) {
            return refuse(Reason::MinimumResidency);
        }
        if self.now < c.offload_failures.not_before() {
            return Err(c.shown.reason.clone());
        }
        match c.policy.mode {
            Mode::Manual => refuse(Reason::ModeManual),
            // A waiter that needs the container's VRAM evicts the container: see `eviction.rs`.
            Mode::Pressure => refuse(Reason::NoPressure),
            _ if !idle.is_window_open => refuse(Reason::OutsideWindow),
            Mode::Auto if !idle.leaves_when_idle => refuse(Reason::Oversubscribed),
            _ => Ok(()),
        }
    }
}

impl ProcessFacts<'_> {
    fn is_safe(&self) -> Result<(), Refusal> {
        if let Some(reason) = hazard_reason(self.unsafe_hazards) {
            return Err((reason, self.name()));
        }
        if let Some(gpu) = self.mig_gpu {
            return Err((Reason::Mig, format!("GPU {gpu}")));
        }
        if let Some(why) = self.counter_error {
            return Err((Reason::BadPeer, format!("process {}: {why}", self.pid)));
        }
        if !self.connected {
            return Err((Reason::AgentSilent, self.name()));
        }
        Ok(())
    }

    fn name(&self) -> String {
        format!("process {}", self.pid)
    }
}

fn refuse<T>(reason: Reason) -> Result<T, Refusal> {
    Err((reason, String::new()))
}

/// Whether the reason is a property of the process or its GPU that makes an offload unsafe. Such a
/// reason is permanent, so an event reports it.
pub(super) fn is_unsafe(reason: Reason) -> bool {
    reason == Reason::Mig || HAZARDS.iter().any(|(_, hazard)| *hazard == reason)
}
