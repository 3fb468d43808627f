//! The cause of each [`Reason`] and what to do about it: the text of the troubleshooting page.
//!
//! The match is exhaustive, so a new reason does not compile without them.

use crate::reason::Reason;

/// Cause and remedy of a reason, in addition to its sentence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReasonHelp {
    /// Events or settings that lead to this reason.
    pub cause: &'static str,
    /// Steps that an operator can take.
    pub remedy: &'static str,
}

const NO_ACTION: &str = "No action is needed.";

impl Reason {
    /// Cause and remedy of this reason, for operators.
    #[must_use]
    #[allow(clippy::too_many_lines, reason = "one arm for each reason")]
    pub const fn help(self) -> ReasonHelp {
        let (cause, remedy) = match self {
            Reason::RecentCalls => (
                "A process of the container made a CUDA call less than the idle timeout ago. With `keep_alive = \"learned\"` the timeout may be shorter than `policy.idle_timeout`; `affinode policy show` prints the values in force.",
                "No action is needed. To offload earlier, lower `policy.idle_timeout` or the annotation `affinode.io/idle-timeout`; to offload now, run `affinode offload`.",
            ),
            Reason::CallInProgress => (
                "A process is inside a CUDA call. A call that blocks, such as a synchronisation, keeps the container in use until it returns.",
                "No action is needed. If the call never returns, find the process and its last call with `affinode ps -o json`.",
            ),
            Reason::GpuBusy => (
                "NVML reports that the GPU still runs kernels of the container although no call was made since.",
                "No action is needed: the container is offloaded after the work has ended.",
            ),
            Reason::Busy => (
                "Calls in progress did not return within `timing.close_deadline`, or the driver did not lock the process within `timing.lock_timeout`.",
                "No action is needed: the offload is retried later, each time after a longer pause. If it repeats for a container that is idle, raise both values.",
            ),
            Reason::WokenMeanwhile => (
                "A CUDA call arrived while the container was being offloaded. The offload was undone.",
                "No action is needed. If it is frequent, raise `policy.idle_timeout`.",
            ),
            Reason::NoPressure => (
                "The mode is `pressure`: an idle container keeps its VRAM until another container needs it.",
                "No action is needed. To offload every idle container, set `policy.mode = \"eager\"`.",
            ),
            Reason::Oversubscribed => (
                "The mode is `auto`, and the containers of this GPU together need more VRAM than it has. An early offload would only be followed by an early restore, so idle containers are offloaded when another container waits.",
                "No action is needed. To offload every idle container nevertheless, set `policy.mode = \"eager\"`.",
            ),
            Reason::OutsideWindow => (
                "The time is outside the times of the week in which idle containers are offloaded without being asked for.",
                "No action is needed. To change the times, see `offload_window` in the configuration or the annotation of the same name.",
            ),
            Reason::TooSmall => (
                "The container holds less VRAM than `policy.minimum_vram_mib`.",
                "No action is needed. To offload it as well, lower `policy.minimum_vram_mib` or its annotation.",
            ),
            Reason::HintedBusy => (
                "The container's own hint (`/.affinode/run/hint`) or `affinode hint NAME busy` reported it as in use.",
                "Report it as idle with `affinode hint NAME idle`, or correct the program that writes the hint.",
            ),
            Reason::HintedIdle => (
                "The container's own hint (`/.affinode/run/hint`) or `affinode hint NAME idle` reported it as idle.",
                NO_ACTION,
            ),
            Reason::ModeManual => (
                "The mode in force for the container is `manual`. `affinode policy show` prints where the value comes from.",
                "Run `affinode offload NAME`, or change the mode.",
            ),
            Reason::ModeOff => (
                "The mode in force for the container is `off`, or it has the annotation `affinode.io/latency-sensitive: \"true\"`.",
                "Change the mode or the annotation if the container is to be offloaded.",
            ),
            Reason::Pinned => (
                "An operator ran `affinode pin` for this container. A pin outlives the controller.",
                "Run `affinode unpin NAME`.",
            ),
            Reason::AutoOff => (
                "An operator ran `affinode auto-offload off` on this node. The setting outlives the controller.",
                "Run `affinode auto-offload on`. `affinode offload NAME` works meanwhile.",
            ),
            Reason::MinimumResidency => (
                "The container was restored less than `policy.minimum_residency` ago.",
                "No action is needed. To offload earlier, lower `policy.minimum_residency`.",
            ),
            Reason::NotRegistered => (
                "No process of the container has initialised CUDA, or all that had have ended.",
                "No action is needed. If the program does use CUDA, its library is not loaded: check `affinode doctor`, that the program is dynamically linked against glibc, and that `AFFINODE_DISABLE` is not set.",
            ),
            Reason::NoVram => (
                "NVML reports no VRAM for the processes of the container.",
                "No action is needed. If the program does hold VRAM, check that NVML sees the processes of the host: `nvidia-smi` on the node must list them.",
            ),
            Reason::UnmanagedProcess => (
                "NVML lists a process of the container that did not register with the controller: a statically linked program, an image based on musl, a process with `AFFINODE_DISABLE`, or one that cleared `LD_PRELOAD` or its environment.",
                "The reason's text in `affinode ps` names the process. Run it dynamically linked against glibc, or accept that the container keeps its VRAM.",
            ),
            Reason::ManagedMemory => (
                "A process called `cuMemAllocManaged`. The driver's checkpoint refuses such a process.",
                "Use device memory instead of unified memory, or accept that the container keeps its VRAM.",
            ),
            Reason::PeerAccess => (
                "A process enabled peer access between GPUs, which a checkpoint does not restore.",
                "Run the program on one GPU or disable peer-to-peer transfers (for NCCL: `NCCL_P2P_DISABLE=1`), or accept that the container keeps its VRAM.",
            ),
            Reason::SharedMemory => (
                "GPU memory is reachable from another process or device: CUDA IPC, exported or imported handles, GPUDirect RDMA, GDRCopy or GPUDirect Storage.",
                "Turn the sharing off in the program, or accept that the container keeps its VRAM.",
            ),
            Reason::Mps => (
                "The process is a client of CUDA's Multi-Process Service.",
                "Run the container without MPS, or accept that it keeps its VRAM.",
            ),
            Reason::Tools => (
                "A profiler, sanitizer or debugger is, or was, loaded in the process, and no memory of it can be copied by the library. A checkpoint of such a process would hang or lose the tool.",
                "Start the program without the tool, or use the engine `auto`, `copy` or `full`, which copies the memory and keeps the context on the GPU.",
            ),
            Reason::Video => (
                "A library for NVDEC or NVENC is loaded in the process, and no memory of it can be copied by the library.",
                "Use the engine `auto`, `copy` or `full`, which copies the memory and keeps the context on the GPU.",
            ),
            Reason::HiddenWay => (
                "A thread called the driver by a path that no hook covers while the container was offloaded, and blocked there. From then on the context stays on the GPU.",
                "Use the engine `auto`, `copy` or `full`. Report the library that made the call, with the output of `affinode events`.",
            ),
            Reason::DamagedMemory => (
                "With `checksum = true`, the digest of the restored memory differed from the one taken before the offload, also after a second copy.",
                "Restart the container. Check the GPU (`nvidia-smi -q -d ECC`, `dmesg | grep NVRM`) and host memory; if it repeats, set the mode to `off` and report it.",
            ),
            Reason::Mig => (
                "The GPU is divided into MIG instances. NVML does not prove VRAM free for a single instance.",
                "Use whole GPUs (`nvidia-smi -mig 0`), which time-slicing can share, or accept that the container keeps its VRAM.",
            ),
            Reason::DriverTooOld => (
                "The NVIDIA driver or the container's libcuda has no checkpoint functions.",
                "Install driver 570 or newer on the node. In the container, do not use a libcuda of a compatibility package that is older.",
            ),
            Reason::CgroupMemory => (
                "Offloaded memory is charged to the container. Its memory limit leaves too little room for its VRAM.",
                "Raise the memory limit of the container by its VRAM plus 1 GiB.",
            ),
            Reason::HostMemory => (
                "An offload would leave less free host memory than `memory.node_reserve_mib`.",
                "Add host memory, end other programs, or lower `memory.node_reserve_mib`. `affinode doctor` prints how much VRAM fits.",
            ),
            Reason::Frozen => (
                "The container's cgroup is frozen: it was paused, or its processes were stopped by a signal.",
                "Resume the container (`ctr task resume`, `docker unpause`).",
            ),
            Reason::AllocationWaits => (
                "With `on_oom = \"wait\"`, an allocation found no free VRAM and waits until idle containers have been offloaded.",
                "No action is needed. The wait ends after `policy.on_oom_timeout`.",
            ),
            Reason::RoomFound => (
                "Idle containers were offloaded, or others freed memory, and the allocation was retried.",
                NO_ACTION,
            ),
            Reason::NoRoomInTime => (
                "No container on the GPU could be offloaded within `policy.on_oom_timeout`, so the allocation failed with `CUDA_ERROR_OUT_OF_MEMORY`.",
                "Raise `policy.on_oom_timeout`, or see in `affinode ps` why the other containers of the GPU keep their VRAM.",
            ),
            Reason::NoRoomEver => (
                "The allocation is larger than what the GPU could have free after every possible offload, so it failed at once with `CUDA_ERROR_OUT_OF_MEMORY`.",
                "Request less memory, or move pinned containers and those of higher priority to another GPU.",
            ),
            Reason::WaitingForVram => (
                "A CUDA call waits, and the VRAM for the restore is held by other containers.",
                "No action is needed while the others are in use for a short time. `affinode ps` lists who holds the VRAM; `policy.restore`, `policy.priority` and the mode of the others decide how soon it is freed.",
            ),
            Reason::VramUnknown => (
                "NVML did not report the free VRAM of the device, so neither an offload nor a restore is started.",
                "Run `nvidia-smi` on the node. If it fails, the driver needs attention (`dmesg | grep NVRM`).",
            ),
            Reason::AgentSilent => (
                "The library in the process does not answer although the process is alive: it is stopped, starved of CPU time, or being debugged.",
                "Resume the process or give it CPU time. If it stays silent, restart the container and report it with `affinode events`.",
            ),
            Reason::DriverError => (
                "A checkpoint function of the driver returned an error. The process keeps running with its memory where it was.",
                "No action is needed for a single event: the offload is retried. If it repeats, `affinode events -o wide` has the error code.",
            ),
            Reason::DriverLost => (
                "The driver failed to restore a checkpoint and names no way to repeat it. CUDA calls of the process fail.",
                "Restart the container. Keep `dmesg | grep NVRM` and the controller's log for a report.",
            ),
            Reason::BadPeer => (
                "A process of the container sent the controller data that violates the protocol. Programs of a container are not trusted, so its connection was closed.",
                "Check what the container runs. If it is an unmodified program, restart it and report it with the controller's log.",
            ),
            Reason::Requested => (
                "An operator or a program asked for it: `affinode offload`, `affinode restore`, `affinode pin`, or the HTTP API.",
                NO_ACTION,
            ),
            Reason::IdleTimeout => {
                ("No process of the container made a CUDA call for the idle timeout.", NO_ACTION)
            }
            Reason::Pressure => (
                "Another container of the GPU waited for VRAM, and this one was idle.",
                "No action is needed. To protect a container, raise its priority or pin it.",
            ),
            Reason::EndedForRoom => (
                "Another container with `restore = \"immediate\"` was called, needed this VRAM at once, and this container cannot be moved.",
                "Restart the container. To rule this out, use `policy.restore = \"queue\"`, or give the container a higher priority, a pin, or mode `off`.",
            ),
            Reason::Expected => (
                "With `prewake = true`, the container's history made a call likely, and the VRAM was free.",
                NO_ACTION,
            ),
            Reason::Connection => (
                "With `wake_on = \"connection\"`, a TCP connection arrived at the container's network.",
                NO_ACTION,
            ),
            Reason::Called => ("A process of the container made a CUDA call.", NO_ACTION),
        };
        ReasonHelp { cause, remedy }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_help_is_made_of_sentences() {
        for reason in Reason::ALL {
            let ReasonHelp { cause, remedy } = reason.help();
            for text in [cause, remedy] {
                assert!(text.ends_with('.') && text.len() > 15, "{reason}: {text:?}");
            }
        }
    }
}
