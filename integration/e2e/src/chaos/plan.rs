//! The plan of one round of a crash campaign. The plan depends only on the seed and the number of
//! the round, so a round can be repeated.

use std::fmt;

use fastrand::Rng;

/// Number of CUDA processes of each container of the campaign.
pub const WORKLOADS: [usize; 4] = [1, 1, 2, 3];
/// Indexes of the twins, two containers of one process each. Their memory has equal contents, which
/// dedup can store once.
pub const TWINS: [usize; 2] = [0, 1];

/// Container states during which a fault can be caused, spelled as in events.
const STEPS: [&str; 7] =
    ["Active", "Idle", "Closing", "Offloading", "Offloaded", "Queued", "Restoring"];

/// A process of a container in the campaign. Actions on a whole container ignore the field
/// `process`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Target {
    /// Index of the container in [`WORKLOADS`].
    pub container: usize,
    /// Index of the process in its container.
    pub process: usize,
}

/// An action that starts a scene: a CUDA call, a command of a user, or a new process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stimulus {
    /// The process makes CUDA calls.
    Call(Target, &'static str),
    /// A user runs `affinode offload` for the container with this index.
    Offload(usize),
    /// A user runs `affinode restore` for the container with this index.
    Restore(usize),
    /// An additional CUDA process is started with exec in the container with this index.
    Exec(usize),
}

/// The kinds of faults that the campaign injects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// SIGKILL of the controller.
    KillController,
    /// SIGSTOP of the controller, and SIGCONT after a while.
    StopController,
    /// SIGKILL of the copier.
    KillCopier,
    /// SIGSTOP of the copier, and SIGCONT after a while.
    StopCopier,
    /// SIGKILL of the copier and of the controller, at the same time.
    KillCopierAndController,
    /// SIGKILL of containerd, which is then started again.
    KillContainerd,
    /// SIGTERM of containerd, which is then started again.
    EndContainerd,
    /// SIGKILL of the container's stock shim.
    KillStockShim,
    /// SIGKILL of the container's Affinode shim.
    KillShim,
    /// SIGKILL of a running runc.
    KillRunc,
    /// The connection between agent and controller is shut down.
    CutAgent,
    /// SIGKILL of a CUDA process.
    KillProcess,
    /// SIGTERM of a CUDA process.
    EndProcess,
    /// SIGSTOP of a CUDA process, and SIGCONT after a while.
    StopProcess,
    /// The container's cgroup is frozen for a while, without containerd's knowledge.
    Freeze,
    /// The container is paused with `ctr tasks pause` for a while.
    Pause,
    /// SIGTERM to the container's first process, which then ends.
    EndContainer,
    /// The container is deleted with `ctr tasks delete --force`.
    DeleteContainer,
}

impl Fault {
    /// All faults, each with its relative probability.
    pub const ALL: [(Fault, u32); 18] = [
        (Fault::KillController, 16),
        (Fault::StopController, 6),
        (Fault::KillCopier, 8),
        (Fault::StopCopier, 4),
        (Fault::KillCopierAndController, 4),
        (Fault::KillContainerd, 4),
        (Fault::EndContainerd, 2),
        (Fault::KillStockShim, 3),
        (Fault::KillShim, 3),
        (Fault::KillRunc, 3),
        (Fault::CutAgent, 12),
        (Fault::KillProcess, 4),
        (Fault::EndProcess, 3),
        (Fault::StopProcess, 8),
        (Fault::Freeze, 6),
        (Fault::Pause, 4),
        (Fault::EndContainer, 2),
        (Fault::DeleteContainer, 3),
    ];

    /// Returns the name of the fault in reports.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Fault::KillController => "kill controller",
            Fault::StopController => "stop controller",
            Fault::KillCopier => "kill copier",
            Fault::StopCopier => "stop copier",
            Fault::KillCopierAndController => "kill copier and controller",
            Fault::KillContainerd => "kill containerd",
            Fault::EndContainerd => "end containerd",
            Fault::KillStockShim => "kill stock shim",
            Fault::KillShim => "kill shim",
            Fault::KillRunc => "kill runc",
            Fault::CutAgent => "cut agent's socket",
            Fault::KillProcess => "kill process",
            Fault::EndProcess => "SIGTERM process",
            Fault::StopProcess => "stop process",
            Fault::Freeze => "freeze cgroup",
            Fault::Pause => "pause container",
            Fault::EndContainer => "SIGTERM container",
            Fault::DeleteContainer => "delete container",
        }
    }
}

/// A planned fault. It occurs a short time after a watched container enters a given state. If the
/// container does not enter this state within a time limit, the fault occurs then.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Strike {
    /// The fault to inject.
    pub fault: Fault,
    /// The container or process that the fault hits.
    pub on: Target,
    /// Index of the container that is watched, and the state that triggers the fault.
    pub at: (usize, &'static str),
    /// Delay of the fault after the state is seen, in microseconds.
    pub after_us: u64,
    /// Time in milliseconds after which a fault such as a stopped process is undone.
    pub lasts_ms: u64,
}

/// A part of a round: stimuli (CUDA calls and commands) that start at the same time, and a fault
/// that occurs while they are carried out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scene {
    /// The CUDA calls and commands that start the scene.
    pub stimuli: Vec<Stimulus>,
    /// The fault, and the container state at which it occurs.
    pub strike: Strike,
}

/// The plan of a round, as a sequence of scenes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Whether the round waits at its start until the twins share contents. The wait has a time
    /// limit.
    pub together: bool,
    /// Scenes in their order. Each scene starts without waiting until the containers are at rest.
    pub scenes: Vec<Scene>,
}

impl Plan {
    /// Returns the plan of a round, drawn at random from the seed and the round's number.
    #[must_use]
    pub fn draw(seed: u64, round: u64) -> Plan {
        let mut random = Rng::with_seed(seed ^ round.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let count = [1, 1, 2, 2, 3][random.usize(..5)];
        let scenes = (0..count).map(|_| scene(&mut random)).collect();
        Plan { together: random.u32(..3) == 0, scenes }
    }
}

fn scene(random: &mut Rng) -> Scene {
    let on = target(random);
    let step = STEPS[random.usize(..STEPS.len())];
    let mut stimuli = Vec::new();
    if step == "Closing" && random.bool() {
        // The driver's lock waits for the running kernel, so the offload takes longer and a fault
        // can hit it.
        stimuli.push(Stimulus::Call(on, "spin 60"));
    }
    stimuli.push(Stimulus::Call(on, call(random)));
    for (container, processes) in WORKLOADS.into_iter().enumerate() {
        if container != on.container && random.u32(..10) < 5 {
            let process = random.usize(..processes);
            stimuli.push(Stimulus::Call(Target { container, process }, call(random)));
        }
    }
    if random.u32(..10) < 2 {
        stimuli.push(Stimulus::Offload(random.usize(..WORKLOADS.len())));
    }
    if random.u32(..10) < 1 {
        stimuli.push(Stimulus::Restore(random.usize(..WORKLOADS.len())));
    }
    let fault = fault(random);
    if fault == Fault::KillRunc || random.u32(..20) == 0 {
        stimuli.push(Stimulus::Exec(on.container));
    }
    random.shuffle(&mut stimuli);
    // In 8 of 10 draws, the watched container is the container that the fault hits. Otherwise any
    // container is drawn.
    let watched = if random.u32(..10) < 8 { on.container } else { random.usize(..WORKLOADS.len()) };
    let strike = Strike {
        fault,
        on,
        at: (watched, step),
        after_us: if random.bool() { 0 } else { random.u64(..40_000) },
        lasts_ms: [20, 60, 150, 400][random.usize(..4)],
    };
    Scene { stimuli, strike }
}

fn target(random: &mut Rng) -> Target {
    let container = random.usize(..WORKLOADS.len());
    Target { container, process: random.usize(..WORKLOADS[container]) }
}

fn call(random: &mut Rng) -> &'static str {
    ["touch", "touch", "sync", "verify", "alloc 8", "fork", "eventquery"][random.usize(..7)]
}

fn fault(random: &mut Rng) -> Fault {
    let sum: u32 = Fault::ALL.iter().map(|(_, weight)| weight).sum();
    let mut left = random.u32(..sum);
    for (fault, weight) in Fault::ALL {
        if left < weight {
            return fault;
        }
        left -= weight;
    }
    Fault::KillController
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "container {} process {}", self.container, self.process)
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.together {
            writeln!(f, "  the twins hold it once")?;
        }
        for (number, Scene { stimuli, strike }) in (1..).zip(&self.scenes) {
            writeln!(f, "  scene {number}")?;
            for stimulus in stimuli {
                match stimulus {
                    Stimulus::Call(target, what) => writeln!(f, "    {target}: {what}")?,
                    Stimulus::Offload(container) => writeln!(f, "    offload {container}")?,
                    Stimulus::Restore(container) => writeln!(f, "    restore {container}")?,
                    Stimulus::Exec(container) => writeln!(f, "    exec into {container}")?,
                }
            }
            let Strike { fault, on, at: (watched, step), after_us, lasts_ms } = strike;
            writeln!(
                f,
                "    {} ({on}, {lasts_ms} ms) {after_us} us after container {watched} is {step}",
                fault.as_str()
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_round_is_drawn_again_from_its_numbers() {
        assert_eq!(Plan::draw(7, 3), Plan::draw(7, 3));
        assert_ne!(Plan::draw(7, 3), Plan::draw(7, 4));
        assert_ne!(Plan::draw(7, 3), Plan::draw(8, 3));
    }

    #[test]
    fn long_campaign_covers_every_fault_and_step() {
        let drawn: BTreeSet<(Fault, &str)> = (0..5_000)
            .flat_map(|round| Plan::draw(1, round).scenes)
            .map(|scene| (scene.strike.fault, scene.strike.at.1))
            .collect();
        assert_eq!(drawn.len(), Fault::ALL.len() * STEPS.len());
    }
}
