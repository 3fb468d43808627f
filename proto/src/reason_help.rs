//! Cause and remedy of each [`Reason`]: the text of the troubleshooting page.
//!
//! The `match` is exhaustive, so that a new reason compiles only with a cause and a remedy.

use crate::reason::Reason;

/// Cause and remedy of a reason, in addition to its sentence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReasonHelp {
    /// Explains which events or settings lead to the reason.
    pub cause: &'static str,
    /// Describes what an operator can do to remove the cause.
    pub remedy: &'static str,
}

const NO_ACTION: &str = "No action is needed.";

impl Reason {
    /// Returns the cause and the remedy of this reason, for operators.
    #[must_use]
    #[expect(clippy::too_many_lines, reason = "a table with one arm for each reason")]
    pub const fn help(self) -> ReasonHelp {
        let (cause, remedy) = match self {
            Reason::RecentCalls => (
                "A process of the container made a CUDA call, and the time after which the \
                 container counts as idle has not passed yet. With `keep_alive = \"learned\"` this \
                 time can be shorter than `policy.idle_timeout`. `affinode policy show` prints \
                 both settings.",
                "No action is needed. To offload the container earlier from now on, lower \
                 `policy.idle_timeout` or its annotation `affinode.io/idle-timeout`. To offload it \
                 at once, run `affinode offload NAME`.",
            ),
            Reason::CallInProgress => (
                "A process is inside a CUDA call. A call that blocks, such as a synchronisation, keeps the container in use until it returns.",
                "No action is needed. If the call never returns, find the process and its last call with `affinode ps -o json`.",
            ),
            Reason::GpuBusy => (
                "The container makes no CUDA calls at present, but the GPU still runs a kernel \
                 that one of its processes launched. The container is not idle until this work has \
                 ended.",
                "No action is needed. The container can be offloaded after the work has ended.",
            ),
            Reason::Busy => (
                "An offload first waits until all CUDA calls and kernels of the container have \
                 ended. Either the calls did not return within `timing.close_deadline`, or the \
                 kernels ran longer than `timing.lock_timeout`. The container stays resident.",
                "No action is needed, because the offload is tried again, each time after a longer \
                 pause. If this repeats for a container that should be idle, raise both values.",
            ),
            Reason::WokenMeanwhile => (
                "A process made a CUDA call while the offload was in progress. The container is resident again.",
                "No action is needed. If this happens often, raise `policy.idle_timeout`.",
            ),
            Reason::NoPressure => (
                "In mode `pressure` an idle container keeps its VRAM until another container needs \
                 it.",
                "No action is needed. To offload containers as soon as they are idle, set \
                 `policy.mode = \"eager\"`.",
            ),
            Reason::Oversubscribed => (
                "The mode is `auto`. On an oversubscribed GPU another container soon needs the \
                 VRAM of an idle container in any case. An earlier offload would save no VRAM and \
                 could cause an additional restore. So idle containers are offloaded only when \
                 another container waits.",
                "No action is needed. To offload idle containers at once nevertheless, set \
                 `policy.mode = \"eager\"`.",
            ),
            Reason::OutsideWindow => (
                "`policy.offload_window` lists the times of the week at which idle containers are \
                 offloaded although no other container waits. The present time is not in the list.",
                "No action is needed. To change the times, set `policy.offload_window` or the \
                 annotation `affinode.io/offload-window`. The times are in UTC.",
            ),
            Reason::TooSmall => (
                "`policy.minimum_vram_mib` sets how much VRAM a container must hold to be \
                 offloaded, because the offload of a smaller container frees too little. This \
                 container holds less.",
                "No action is needed. To offload this container as well, lower \
                 `policy.minimum_vram_mib` or its annotation `affinode.io/minimum-vram-mib`.",
            ),
            Reason::NothingToCopy => (
                "Affinode's library can copy none of the container's GPU memory, for example \
                 because the container holds only a CUDA context. A context is freed only by the \
                 driver's checkpoint. The engine `auto` checkpoints the context when another \
                 container needs the VRAM. The engine `copy` never does.",
                "No action is needed. To checkpoint the context as soon as the container is idle, \
                 use the engine `full`.",
            ),
            Reason::HintedBusy => (
                "A program of the container wrote `busy` into `/.affinode/run/hint`, or an \
                 operator ran `affinode hint NAME busy`. The container therefore stays on the GPU \
                 although it makes no CUDA calls.",
                "No action is needed while the container is in use. The hint expires after an \
                 hour. To end it earlier, run `affinode hint NAME idle`, or correct the program \
                 that writes the hint.",
            ),
            Reason::HintedIdle => (
                "A program of the container wrote `idle` into `/.affinode/run/hint`, or an \
                 operator ran `affinode hint NAME idle`. The container is then offloaded without \
                 waiting for its idle timeout.",
                "No action is needed. The hint ends at the container's next CUDA call.",
            ),
            Reason::ModeManual => (
                "The container's mode is `manual`. `affinode policy show` prints the source of this value.",
                "Run `affinode offload NAME`, or change the mode.",
            ),
            Reason::ModeOff => (
                "The container's mode is `off`, or it has the annotation \
                 `affinode.io/latency-sensitive: \"true\"`. `affinode policy show` prints the \
                 source of the mode.",
                "No action is needed if this is intended. Otherwise change the mode, or remove the \
                 annotation and create the container again.",
            ),
            Reason::Pinned => (
                "An operator ran `affinode pin` for this container. The pin also applies after a \
                 restart of the controller.",
                "To allow offloads again, run `affinode unpin NAME`.",
            ),
            Reason::AutoOff => (
                "An operator ran `affinode auto-offload off` on this node. The setting also \
                 applies after a restart of the controller.",
                "Run `affinode auto-offload on`. While it is off, `affinode offload NAME` still \
                 offloads a single container.",
            ),
            Reason::MinimumResidency => (
                "A container stays resident for `policy.minimum_residency` after each restore, so \
                 that it is not offloaded and restored in quick succession.",
                "No action is needed. To allow an earlier offload, lower \
                 `policy.minimum_residency`.",
            ),
            Reason::NotRegistered => (
                "No process of the container has initialised CUDA, or all processes that had \
                 initialised it have ended.",
                "No action is needed if the container does not use CUDA now. If it does use CUDA, \
                 its program has not loaded Affinode's library. Run `affinode doctor` to check the \
                 installation. Check also that the program is dynamically linked against glibc, \
                 and that `AFFINODE_DISABLE` is not set.",
            ),
            Reason::NoVram => (
                "The container has a CUDA process. Either this process holds no VRAM, or NVML does \
                 not list it, so that the controller cannot measure its VRAM.",
                "Run `nvidia-smi` on the node. If it lists no process of the container although \
                 the program holds VRAM, the container keeps its VRAM. In this case report the \
                 problem with the driver's version.",
            ),
            Reason::UnmanagedProcess => (
                "NVML lists a process of the container that is not connected to the controller. \
                 There are two possible causes. Affinode's library is not active in the process: \
                 the process is statically linked, runs in a musl image, has `AFFINODE_DISABLE` \
                 set, or was started without its parent's `LD_PRELOAD`. Or the container already \
                 has 256 registered CUDA processes, which is the maximum.",
                "`affinode ps` names the process. Use a dynamically linked program, a glibc image \
                 and at most 256 CUDA processes. Otherwise the container keeps its VRAM.",
            ),
            Reason::ManagedMemory => (
                "A process called `cuMemAllocManaged`, and the driver cannot checkpoint such a \
                 process. The container could therefore be offloaded only by copying its ordinary \
                 device memory. This is not possible here: the engine is `checkpoint`, an earlier \
                 copy failed, or the process holds no memory that the library can copy.",
                "Use the engine `auto`, `copy` or `full` if the program also holds ordinary device \
                 memory. These engines offload that memory and leave managed memory and the \
                 context on the GPU. Otherwise the container keeps its VRAM.",
            ),
            Reason::PeerAccess => (
                "A process enabled peer access, by which one GPU reads the memory of another. \
                 After a checkpoint the driver may fail to restore such a process.",
                "Run the program on one GPU, or disable peer-to-peer transfers (for NCCL: \
                 `NCCL_P2P_DISABLE=1`). Otherwise the container keeps its VRAM.",
            ),
            Reason::SharedMemory => (
                "A process exported GPU memory to another process or imported it from there, \
                 through CUDA IPC or a shareable handle. After a checkpoint this memory would no \
                 longer be shared. The container could therefore be offloaded only by copying its \
                 other memory. This is not possible here: the engine is `checkpoint`, an earlier \
                 copy failed, or the process holds no other memory that the library can copy.",
                "Use the engine `auto`, `copy` or `full` if the program also holds memory that is \
                 not shared. These engines offload that memory and leave shared memory and the \
                 context on the GPU. Otherwise turn the sharing off in the program, or accept that \
                 the container keeps its VRAM.",
            ),
            Reason::DirectAccess => (
                "A process has opened a device of GPUDirect RDMA, GDRCopy or GPUDirect Storage, or \
                 it shares memory between CUDA and a graphics API (EGL, OpenGL, VDPAU). Such \
                 accesses make no CUDA call, so Affinode could not hold them back while the memory \
                 is offloaded.",
                "Turn this use off in the program, or accept that the container keeps its VRAM.",
            ),
            Reason::Mps => (
                "A process of the container is a client of CUDA's Multi-Process Service (MPS). The \
                 driver refuses to checkpoint such a process. Only a checkpoint could offload this \
                 container, because its engine is `checkpoint`, an earlier copy failed, or it holds \
                 no memory that the library can copy.",
                "Use the engine `auto`, `copy` or `full`. These engines copy the memory, and leave \
                 the context on the GPU. Or run the container without MPS.",
            ),
            Reason::Tools => (
                "A process in which a tool such as a profiler is or was loaded can hang during the \
                 driver's checkpoint, or lose its state. Affinode therefore does not checkpoint \
                 such a process. Tools also request tables of driver functions that Affinode does \
                 not know, so a process in which a library requested such a table is not \
                 checkpointed either. For example, cuBLASLt of CUDA 13.0 requested such a table in \
                 a language model of transformers. Only a checkpoint could offload this container, \
                 because its engine is `checkpoint`, an earlier copy failed, or it holds no memory \
                 that the library can copy.",
                "Start the program without the tool, or use the engine `auto`, `copy` or `full`. \
                 These engines copy the memory and keep the context on the GPU.",
            ),
            Reason::Video => (
                "The threads of a video library can make driver calls at any time, so the process \
                 is not checkpointed. Only a checkpoint could offload this container, because its \
                 engine is `checkpoint`, an earlier copy failed, or it holds no memory that the \
                 library can copy.",
                "Use the engine `auto`, `copy` or `full`. These engines copy the memory and keep \
                 the context on the GPU.",
            ),
            Reason::HiddenWay => (
                "Affinode's library intercepts CUDA calls by hooks, so that they wait while the \
                 container is offloaded. A thread reached the driver without passing a hook while \
                 the process was checkpointed, and blocked there. The controller restored the \
                 process and does not checkpoint it again.",
                "Use the engine `auto`, `copy` or `full`, which can offload the memory without a \
                 checkpoint. Report the problem: name the library that made the call, and add the \
                 output of `affinode events`.",
            ),
            Reason::DamagedMemory => (
                "With `policy.checksum = true` the GPU computes checksums of the memory before an \
                 offload and after the restore. They differed, and still differed after the memory \
                 had been copied back a second time. The content of the container's GPU memory is \
                 therefore wrong.",
                "Restart the container. Check the GPU (`nvidia-smi -q -d ECC`, `dmesg | grep \
                 NVRM`) and the host memory. If this repeats, set the mode to `off` and report the \
                 problem.",
            ),
            Reason::Mig => (
                "The GPU is divided into MIG instances. NVML does not report the free VRAM of a \
                 single instance, so the controller cannot verify that the VRAM for a restore is \
                 free.",
                "Turn MIG off (`nvidia-smi -mig 0`) and share whole GPUs by time-slicing, or \
                 accept that the container keeps its VRAM.",
            ),
            Reason::DriverTooOld => (
                "The driver of the node is older than 570, or the container loads an older \
                 libcuda, for example from a CUDA compatibility package.",
                "Install driver 570 or newer on the node. Remove an older libcuda from the \
                 container's image.",
            ),
            Reason::CgroupMemory => (
                "An offload cannot use the host pool with the engine `checkpoint`, with `prefault` \
                 or `dedup`, or if the pool is full. The host memory of the offload is then \
                 charged to the container's memory cgroup. It needs the size of the VRAM plus \
                 `memory.driver_overhead_mib` (default 1 GiB) for each CUDA process. The \
                 container's memory limit leaves less than that free.",
                "Use the engine `auto`, enlarge the host pool (`memory.host_pool_percent`), or \
                 raise the memory limit of the container by its VRAM plus 1 GiB for each CUDA \
                 process.",
            ),
            Reason::HostMemory => (
                "An offload would leave less free host memory than `memory.node_reserve_mib`.",
                "Add host memory, end other programs, or lower `memory.node_reserve_mib`. \
                 `affinode doctor` prints how much VRAM fits into the free host memory.",
            ),
            Reason::Frozen => (
                "The container's cgroup is frozen (paused), or a signal such as SIGSTOP stopped \
                 one of its processes. A process that does not run cannot carry out an offload.",
                "Resume a paused container (`ctr task resume`, `docker unpause`). Continue a \
                 stopped process with `kill -CONT PID`. `affinode events` names the process.",
            ),
            Reason::AllocationWaits => (
                "With `on_oom = \"wait\"` an allocation that finds no free VRAM waits until idle \
                 containers have been offloaded. Without this setting the allocation would fail at \
                 once.",
                "No action is needed. The wait ends when enough VRAM is free, at the latest after \
                 `policy.on_oom_timeout`.",
            ),
            Reason::RoomFound => (
                "Idle containers were offloaded, or other programs freed VRAM. The allocation was then made.",
                NO_ACTION,
            ),
            Reason::NoRoomInTime => (
                "The other containers of the GPU did not free enough VRAM within \
                 `policy.on_oom_timeout`, for example because they are in use or pinned. The \
                 allocation failed with `CUDA_ERROR_OUT_OF_MEMORY`.",
                "Run `affinode ps` to see why the other containers keep their VRAM. If they are \
                 only in use for a while, raise `policy.on_oom_timeout`.",
            ),
            Reason::NoRoomEver => (
                "Usually the allocation and the VRAM that the container already holds are together \
                 larger than the GPU. In this case offloads of other containers cannot help. The \
                 allocation failed with `CUDA_ERROR_OUT_OF_MEMORY`. The event in `affinode events` \
                 states the exact reason.",
                "Let the program use less memory, or run it on a GPU with more VRAM.",
            ),
            Reason::WaitingForVram => (
                "A CUDA call of the container waits for its restore, and other containers hold the \
                 VRAM that the restore needs.",
                "No action is needed if the other containers are in use only for a short time. \
                 `affinode ps` lists the containers that hold the VRAM. To shorten the wait, raise \
                 the priority of this container, or offload or unpin another one. `policy.restore \
                 = \"immediate\"` also shortens the wait, but can end processes of other \
                 containers.",
            ),
            Reason::VramUnknown => (
                "A call of NVML failed. The controller starts offloads and restores only if it \
                 knows how much VRAM is free.",
                "Run `nvidia-smi` on the node. If it fails, look for driver errors with `dmesg | \
                 grep NVRM`.",
            ),
            Reason::AgentSilent => (
                "The agent is a thread of Affinode's library in each CUDA process. It carries out \
                 offloads and restores. It does not reply if the process was stopped by a signal, \
                 gets no CPU time, or is held by a debugger.",
                "Resume the process or give it CPU time. If it still does not reply, restart the \
                 container and report the problem with the output of `affinode events`.",
            ),
            Reason::DriverError => (
                "A function of the driver failed during an offload or a restore. The process \
                 continues, and its memory stays where it was before the attempt.",
                "No action is needed for a single event, because the offload or restore is tried \
                 again. If this repeats, report it with the error code that `affinode events -o \
                 wide` prints.",
            ),
            Reason::DriverLost => (
                "The driver failed to restore a process. The restore is tried again every 10 s, \
                 and CUDA calls of the process wait meanwhile. If the CUDA context is lost, as \
                 after an uncorrectable memory error, the calls return an error after at most \
                 three attempts.",
                "If the later attempts fail as well, restart the container. Keep the output of \
                 `dmesg | grep NVRM` and the controller's log for a report.",
            ),
            Reason::BadPeer => (
                "A process of the container sent data to the controller that Affinode's library \
                 would not send. The controller trusts no program of a container, so it no longer \
                 offloads this process.",
                "Check that the container runs the program that it should run. If it does, restart \
                 the container and report the problem with the controller's log.",
            ),
            Reason::NoProgress => (
                "The container began no CUDA call for `no_progress_timeout` (by default an hour), \
                 although a call is in progress or its work runs on the GPU, or its call waits for \
                 VRAM that no offload can free, for example because host memory is full. The warning in `affinode ps` states the evidence. \
                 Usual causes are a rank of a job whose peers are gone, and a kernel that never \
                 ends.",
                "Look at the program's log. If it cannot continue, restart the container. If its \
                 kernels run longer than `no_progress_timeout` without a call, set the annotation \
                 `affinode.io/no-progress-timeout` to a longer time.",
            ),
            Reason::Requested => (
                "An operator ran `affinode offload`, `affinode restore` or `affinode pin`, or a \
                 program made such a request through the HTTP API.",
                NO_ACTION,
            ),
            Reason::IdleTimeout => {
                ("The container was idle and its mode allows an offload.", NO_ACTION)
            }
            Reason::Pressure => (
                "Another container of the GPU waited for VRAM, and this container was idle.",
                "No action is needed. To keep a container on the GPU, pin it, or raise its \
                 priority above that of the waiters.",
            ),
            Reason::EndedForRoom => (
                "Another container, with `restore = \"immediate\"`, made a CUDA call and needed \
                 VRAM that this container held. The controller could not offload this container, \
                 so it ended the container's processes.",
                "Restart the container. To prevent this, set `policy.restore = \"queue\"` for the \
                 other container. Or give this container a higher priority, a pin, or mode `off`.",
            ),
            Reason::Expected => (
                "With `policy.prewake = true` the controller predicts calls from the container's \
                 earlier calls. It restores the container shortly before a likely call if enough \
                 VRAM is free.",
                NO_ACTION,
            ),
            Reason::Connection => (
                "With `policy.wake_on = \"connection\"` the controller restores a container when a \
                 new TCP connection arrives in its network namespace, if enough VRAM is free.",
                NO_ACTION,
            ),
            Reason::FreesHostMemory => (
                "A call of another container waited for VRAM. The containers that held this VRAM \
                 could not be offloaded, because host memory was full. The restore of this container \
                 freed host memory.",
                "If this happens often, give the node or the shared memory cgroup more memory \
                 (docs/operations.md#capacity).",
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
