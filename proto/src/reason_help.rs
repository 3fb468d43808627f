//! Cause and remedy of each [`Reason`]: the text of the troubleshooting page.
//!
//! The match is exhaustive: a new reason does not compile until its cause and remedy are added.

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
                "The container is in use. With `keep_alive = \"learned\"` the timeout may be shorter than `policy.idle_timeout`. `affinode policy show` prints the values that apply.",
                "No action is needed. To offload earlier, lower `policy.idle_timeout` or the annotation `affinode.io/idle-timeout`. To offload now, run `affinode offload`.",
            ),
            Reason::CallInProgress => (
                "A process is inside a CUDA call. A call that blocks, such as a synchronisation, keeps the container in use until it returns.",
                "No action is needed. If the call never returns, find the process and its last call with `affinode ps -o json`.",
            ),
            Reason::GpuBusy => (
                "A kernel of the container runs longer than the idle timeout.",
                "No action is needed: the container is offloaded after the work has ended.",
            ),
            Reason::Busy => (
                "Calls in progress did not return within `timing.close_deadline`, or the driver did not lock the process within `timing.lock_timeout`.",
                "No action is needed. The offload is tried again, each time after a longer pause. If this repeats for a container that is idle, raise both values.",
            ),
            Reason::WokenMeanwhile => (
                "A process made a CUDA call while the offload was in progress. The container is resident again.",
                "No action is needed. If this happens often, raise `policy.idle_timeout`.",
            ),
            Reason::NoPressure => (
                "With mode `pressure` an idle container keeps its VRAM until another container needs it.",
                "No action is needed. To offload every idle container, set `policy.mode = \"eager\"`.",
            ),
            Reason::Oversubscribed => (
                "The mode is `auto`. On an oversubscribed GPU an early offload is soon followed by a restore and saves no VRAM. Idle containers are therefore offloaded only when another container waits.",
                "No action is needed. To offload every idle container nevertheless, set `policy.mode = \"eager\"`.",
            ),
            Reason::OutsideWindow => (
                "`offload_window` limits the times of the week at which idle containers are offloaded. Now is not one of these times.",
                "No action is needed. To change the times, see `offload_window` in the configuration or the annotation of the same name.",
            ),
            Reason::TooSmall => (
                "The container holds less VRAM than `policy.minimum_vram_mib`.",
                "No action is needed. To offload it as well, lower `policy.minimum_vram_mib` or its annotation.",
            ),
            Reason::NothingToCopy => (
                "The library can copy none of the container's GPU memory, for example because it holds only a CUDA context. With the engine `auto` its context is checkpointed when another container needs the VRAM, with `copy` never.",
                "No action is needed. To checkpoint it as soon as it is idle, use the engine `full`.",
            ),
            Reason::HintedBusy => (
                "A program of the container wrote `busy` into `/.affinode/run/hint`, or an operator ran `affinode hint NAME busy`.",
                "No action is needed while the container is in use. The hint expires after an \
                 hour. To end it earlier, run `affinode hint NAME idle`, or correct the program \
                 that writes the hint.",
            ),
            Reason::HintedIdle => (
                "A program of the container wrote `idle` into `/.affinode/run/hint`, or an operator ran `affinode hint NAME idle`.",
                NO_ACTION,
            ),
            Reason::ModeManual => (
                "The container's mode is `manual`. `affinode policy show` prints the source of this value.",
                "Run `affinode offload NAME`, or change the mode.",
            ),
            Reason::ModeOff => (
                "The container's mode is `off`, or it has the annotation `affinode.io/latency-sensitive: \"true\"`.",
                "Change the mode or the annotation if the container is to be offloaded.",
            ),
            Reason::Pinned => (
                "An operator ran `affinode pin` for this container. A pin stays when the controller ends.",
                "Run `affinode unpin NAME`.",
            ),
            Reason::AutoOff => (
                "An operator ran `affinode auto-offload off` on this node. The setting stays when the controller ends.",
                "Run `affinode auto-offload on`. Until then `affinode offload NAME` offloads one container.",
            ),
            Reason::MinimumResidency => (
                "A container stays resident for `policy.minimum_residency` after each restore, so \
                 that it is not moved repeatedly.",
                "No action is needed. To offload earlier, lower `policy.minimum_residency`.",
            ),
            Reason::NotRegistered => (
                "No process of the container has initialised CUDA, or all processes that had initialised it have ended.",
                "No action is needed. If the program does use CUDA, Affinode's library is not loaded into it. Run `affinode doctor`. Check that the program is dynamically linked against glibc, and that `AFFINODE_DISABLE` is not set.",
            ),
            Reason::NoVram => (
                "The processes of the container hold no VRAM, or NVML does not list these processes.",
                "No action is needed. If the program does hold VRAM, run `nvidia-smi` on the node. It must list the container's processes.",
            ),
            Reason::UnmanagedProcess => (
                "NVML lists a process of the container that did not register with the controller. It is statically linked, runs in a musl image, has `AFFINODE_DISABLE` set, or was started without its parent's `LD_PRELOAD`.",
                "`affinode ps` names the process. Use a dynamically linked program and a glibc image, or accept that the container keeps its VRAM.",
            ),
            Reason::ManagedMemory => (
                "A process called `cuMemAllocManaged`. The driver's checkpoint refuses such a process. Either the current engine needs a checkpoint for the offload, or the process has no memory that can be copied.",
                "Use the engine `auto`, `copy` or `full` for programs that also hold ordinary \
                 device memory. These engines offload that memory and leave managed memory and the \
                 context on the GPU. Otherwise the container keeps its VRAM.",
            ),
            Reason::PeerAccess => (
                "A process enabled peer access between GPUs. After a checkpoint the driver may fail to restore such a process.",
                "Run the program on one GPU, or disable peer-to-peer transfers (for NCCL: `NCCL_P2P_DISABLE=1`). Otherwise the container keeps its VRAM.",
            ),
            Reason::SharedMemory => (
                "A process shares GPU memory with another process: it exported or imported the \
                 memory through CUDA IPC or a shareable handle. After a checkpoint the memory \
                 would no longer be shared. With the current engine the offload needs a \
                 checkpoint, or the process has no memory that can be copied and is not shared.",
                "Use the engine `auto`, `copy` or `full`: they leave shared memory and the context \
                 on the GPU and offload the other memory. Otherwise turn the sharing off in the \
                 program, or accept that the container keeps its VRAM.",
            ),
            Reason::DirectAccess => (
                "Another device or API can access GPU memory of the container without a CUDA call. \
                 Either a process has opened a device of GPUDirect RDMA, GDRCopy or GPUDirect \
                 Storage, or a graphics API (EGL, OpenGL, VDPAU) shares memory with CUDA.",
                "Turn the sharing off in the program, or accept that the container keeps its VRAM.",
            ),
            Reason::Mps => (
                "The process is a client of CUDA's Multi-Process Service.",
                "Run the container without MPS, or accept that it keeps its VRAM.",
            ),
            Reason::Tools => (
                "A tool such as a profiler is or was loaded in the process. With the current engine the offload needs the driver's checkpoint, which can hang or lose such a process.",
                "Start the program without the tool, or use the engine `auto`, `copy` or `full`. These engines copy the memory and keep the context on the GPU.",
            ),
            Reason::Video => (
                "The threads of a video library can make driver calls at any time, so the process \
                 is not checkpointed. With the current engine the offload needs a checkpoint.",
                "Use the engine `auto`, `copy` or `full`. These engines copy the memory and keep the context on the GPU.",
            ),
            Reason::HiddenWay => (
                "While the container was offloaded, a thread called the driver in a way that bypasses the library's hooks, and blocked there. The process was restored.",
                "Use the engine `auto`, `copy` or `full`. Report the library that made the call, with the output of `affinode events`.",
            ),
            Reason::DamagedMemory => (
                "`checksum = true` compares digests of the memory before an offload and after the \
                 restore. They differed, and still differed after a second copy.",
                "Restart the container. Check the GPU (`nvidia-smi -q -d ECC`, `dmesg | grep NVRM`) and host memory. If this repeats, set the mode to `off` and report it.",
            ),
            Reason::Mig => (
                "The GPU is divided into MIG instances. NVML does not report the free VRAM of a single instance.",
                "Turn MIG off (`nvidia-smi -mig 0`) and share whole GPUs by time-slicing, or accept that the container keeps its VRAM.",
            ),
            Reason::DriverTooOld => (
                "The NVIDIA driver or the container's libcuda has no checkpoint functions.",
                "Install driver 570 or newer on the node. Do not use an older libcuda in the container, for example from a compatibility package.",
            ),
            Reason::CgroupMemory => (
                "Offloaded memory is charged to the container. The memory that is left below the container's limit is less than its VRAM.",
                "Raise the memory limit of the container by its VRAM plus 1 GiB.",
            ),
            Reason::HostMemory => (
                "An offload would leave less free host memory than `memory.node_reserve_mib`.",
                "Add host memory, end other programs, or lower `memory.node_reserve_mib`. `affinode doctor` prints how much VRAM fits into the free host memory.",
            ),
            Reason::Frozen => (
                "The container's cgroup is frozen: it was paused, or its processes were stopped by a signal.",
                "Resume the container (`ctr task resume`, `docker unpause`).",
            ),
            Reason::AllocationWaits => (
                "With `on_oom = \"wait\"` an allocation that finds no free VRAM waits until idle containers have been offloaded.",
                "No action is needed. The wait ends after `policy.on_oom_timeout`.",
            ),
            Reason::RoomFound => (
                "Idle containers were offloaded, or other programs freed VRAM. The allocation was then made.",
                NO_ACTION,
            ),
            Reason::NoRoomInTime => (
                "Not enough VRAM was freed on the GPU within `policy.on_oom_timeout`. The allocation failed with `CUDA_ERROR_OUT_OF_MEMORY`.",
                "Raise `policy.on_oom_timeout`. `affinode ps` shows why the other containers of the GPU keep their VRAM.",
            ),
            Reason::NoRoomEver => (
                "The allocation is larger than the free VRAM of the GPU would be after every possible offload. It failed with `CUDA_ERROR_OUT_OF_MEMORY`.",
                "Request less memory, or move pinned containers and those of higher priority to another GPU.",
            ),
            Reason::WaitingForVram => (
                "A CUDA call of the container waits for its restore, and other containers hold the VRAM that the restore needs.",
                "No action is needed if the other containers are in use only for a short time. \
                 `affinode ps` lists which containers hold the VRAM. The waiting time depends on \
                 `policy.restore`, on `policy.priority`, and on the mode of the other containers.",
            ),
            Reason::VramUnknown => (
                "A call of NVML failed. Without the amount of free VRAM the controller starts no \
                 offload and no restore.",
                "Run `nvidia-smi` on the node. If it fails, look for driver errors with `dmesg | grep NVRM`.",
            ),
            Reason::AgentSilent => (
                "The library's thread in the process does not reply. The process was stopped by a \
                 signal, gets no CPU time, or is held by a debugger.",
                "Resume the process or give it CPU time. If it still does not reply, restart the \
                 container and report the problem with the output of `affinode events`.",
            ),
            Reason::DriverError => (
                "A function of the driver failed during a move. The process continues, and its memory is where it was.",
                "No action is needed for a single event, because the move is tried again. If this repeats, see the error code in `affinode events -o wide`.",
            ),
            Reason::DriverLost => (
                "The driver failed to restore a checkpoint. CUDA calls of the process wait, and the restore is tried again every 10 s. If the context is lost, the calls return an error after three attempts.",
                "If later attempts fail too, restart the container. Keep the output of `dmesg | grep NVRM` and the controller's log for a report.",
            ),
            Reason::BadPeer => (
                "A process of the container sent data that violates the protocol. The controller trusts no program of a container, so it closed the connection.",
                "Check what the container runs. If it is an unmodified program, restart it and report it with the controller's log.",
            ),
            Reason::Requested => (
                "The request came by `affinode offload`, `affinode restore`, `affinode pin`, or the HTTP API.",
                NO_ACTION,
            ),
            Reason::IdleTimeout => {
                ("The container was idle and its mode allows an offload.", NO_ACTION)
            }
            Reason::Pressure => (
                "Another container of the GPU waited for VRAM, and this one was idle.",
                "No action is needed. To protect a container, raise its priority or pin it.",
            ),
            Reason::EndedForRoom => (
                "Another container with `restore = \"immediate\"` made a CUDA call. It needed this VRAM, so the processes of this container were ended.",
                "Restart the container. To prevent this, use `policy.restore = \"queue\"`, or give the container a higher priority, a pin, or mode `off`.",
            ),
            Reason::Expected => (
                "`prewake = true` restores a container before a likely call if its VRAM is free.",
                NO_ACTION,
            ),
            Reason::Connection => (
                "`wake_on = \"connection\"` restores a container when a TCP connection arrives in its network namespace.",
                NO_ACTION,
            ),
            Reason::Called => (
                "The container was idle or offloaded, and one of its processes made a CUDA call.",
                NO_ACTION,
            ),
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
