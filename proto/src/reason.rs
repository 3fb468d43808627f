//! Reasons: why a container is resident or offloaded, or why an order failed.
//!
//! A reason is a stable word for machines (metric labels, JSON) and a sentence for operators, which
//! describes the cause and what to do.

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident = $word:literal, $sentence:literal;)*) => {
        /// Reason why a container is in its state, or why an order failed.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Reason { $($(#[$doc])* $name,)* }

        impl Reason {
            /// All reasons, in the order of declaration.
            pub const ALL: &'static [Reason] = &[$(Reason::$name,)*];

            /// The stable word, as in JSON, events and metric labels.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Reason::$name => $word,)* }
            }

            /// One sentence for operators: the cause, and the command or setting that changes it,
            /// if there is one.
            #[must_use]
            pub const fn sentence(self) -> &'static str {
                match self { $(Reason::$name => $sentence,)* }
            }
        }
    };
}

reasons! {
    /// A CUDA call was made less than the idle timeout ago.
    RecentCalls = "recent-calls", "the last CUDA call was less than the idle timeout ago";
    /// A CUDA call is in progress.
    CallInProgress = "call-in-progress", "a CUDA call is in progress";
    /// Work that was launched earlier still runs on the GPU.
    GpuBusy = "gpu-busy", "NVML reports that the GPU still runs work that was launched earlier";
    /// Calls in progress did not end before the deadline of the close.
    Busy = "busy", "calls in progress did not end in time, so the offload is tried again later";
    /// A CUDA call arrived during the offload, while the gates of the container closed.
    WokenMeanwhile = "woken-meanwhile", "a CUDA call arrived during the offload, so the offload was cancelled";
    /// The mode is `pressure`, and no container needs the VRAM.
    NoPressure = "no-pressure", "the mode is pressure, and no container needs the VRAM";
    /// The mode is `auto`, and the containers of the GPU need more VRAM than it has.
    Oversubscribed = "oversubscribed", "the containers of the GPU together need more VRAM than the GPU has: an idle container stays resident until another container needs its VRAM";
    /// The time is outside the offload window.
    OutsideWindow = "outside-window", "the time is outside the offload window: the container stays resident until another container needs its VRAM";
    /// The container holds too little VRAM for an offload.
    TooSmall = "too-small", "the container holds less VRAM than policy.minimum_vram_mib";
    /// A copy out would free no VRAM, and no container needs the VRAM of the context.
    NothingToCopy = "nothing-to-copy", "the container holds no memory that the library can copy, so its context stays until another container needs the VRAM";
    /// A hint says that the container is busy.
    HintedBusy = "hinted-busy", "a hint reports the container as busy (its hint file or `affinode hint`)";
    /// A hint says that the container is idle.
    HintedIdle = "hinted-idle", "a hint reports the container as idle (its hint file or `affinode hint`)";
    /// The mode is manual.
    ModeManual = "mode-manual", "the mode is manual: run `affinode offload` to offload the container";
    /// The mode is off.
    ModeOff = "mode-off", "the mode is off: the container is never offloaded";
    /// An operator pinned the container.
    Pinned = "pinned", "an operator pinned the container: run `affinode unpin` to release it";
    /// An operator turned automatic offloads off on this node.
    AutoOff = "auto-offload-off", "auto-offload is off on this node: run `affinode auto-offload on` to turn it on";
    /// The container was restored less than the minimum residency ago.
    MinimumResidency = "minimum-residency", "the container was restored less than the minimum residency ago";
    /// No CUDA process has registered.
    NotRegistered = "not-registered", "no process of the container uses CUDA now";
    /// NVML reports no VRAM of the container.
    NoVram = "no-vram", "NVML reports no VRAM of the container, so there is nothing to offload";
    /// At least one CUDA process of the container is unmanaged.
    UnmanagedProcess = "unmanaged-process", "a CUDA process of the container did not register (static binary, musl image, AFFINODE_DISABLE, or more than 256 CUDA processes)";
    /// A process uses managed memory (`cuMemAllocManaged`), so it must not be checkpointed. With the
    /// current engine the offload needs a checkpoint, or no other memory can be copied.
    ManagedMemory = "managed-memory", "the container uses managed memory (cuMemAllocManaged), which the driver cannot checkpoint; the engines auto, full and copy leave it on the GPU and can copy the other memory";
    /// Peer access was enabled.
    PeerAccess = "peer-access", "the container uses peer access between GPUs, which does not survive a checkpoint";
    /// Memory was exported to another process or imported from one, by legacy IPC or a shareable
    /// handle, so the process must not be checkpointed. With the current engine the offload needs a
    /// checkpoint, or no other memory can be copied.
    SharedMemory = "shared-memory", "the container shares GPU memory with another process (IPC, exported or imported handles); the engines auto, full and copy leave that memory on the GPU and can copy the other memory";
    /// Another device or another API may access memory without a call that the library sees.
    DirectAccess = "direct-access", "another device or API can access the container's GPU memory without the CUDA driver (GPUDirect RDMA, GDRCopy, EGL, OpenGL)";
    /// A process is a client of MPS.
    Mps = "mps", "the container runs under MPS, which the driver cannot checkpoint";
    /// A profiler, sanitizer or debugger is or was in a process, so its context must not be
    /// checkpointed. With the current engine the offload needs a checkpoint.
    Tools = "tools", "a profiler, sanitizer or debugger is or was in a process, or a library requested a table of driver functions that Affinode does not know, so the context stays on the GPU; the engines auto, full and copy can copy the memory";
    /// A video library is in a process, so its context must not be checkpointed. With the current
    /// engine the offload needs a checkpoint.
    Video = "video", "a process has a video library loaded (NVDEC, NVENC), so the context stays on the GPU; the engines auto, full and copy can copy the memory";
    /// A thread entered the driver on a path without a hook while the process was offloaded, so its
    /// context must not be checkpointed again. With the current engine the offload needs a
    /// checkpoint.
    HiddenWay = "hidden-way", "a thread called the driver past Affinode's hooks while the container was offloaded, so the context stays on the GPU from now on; the engines auto, full and copy can copy the memory";
    /// The process's memory after a restore differs from what was offloaded.
    DamagedMemory = "damaged-memory", "the container's memory differs after a restore, so its CUDA calls fail (CUDA_ERROR_ECC_UNCORRECTABLE): restart the container";
    /// The process runs on a GPU in MIG mode.
    Mig = "mig", "the container runs on a GPU in MIG mode, where NVML does not report the free VRAM of one instance";
    /// The driver or libcuda has no checkpoint API.
    DriverTooOld = "driver-too-old", "the NVIDIA driver has no checkpoint API: 570 or newer is needed";
    /// The memory cgroup of the container has less free memory than the VRAM needs.
    CgroupMemory = "cgroup-memory", "the container's memory limit is too low for its VRAM: raise the limit by its VRAM plus 1 GiB for each CUDA process";
    /// The node has less free host memory than the VRAM needs.
    HostMemory = "host-memory", "the node has too little free host memory for the container's VRAM (memory.node_reserve_mib stays free)";
    /// The container's cgroup is frozen: the container is paused or stopped.
    Frozen = "frozen", "the container is paused or stopped";
    /// An allocation found no VRAM and waits until VRAM is free.
    AllocationWaits = "allocation-waits", "an allocation of the container waits for VRAM that other containers hold";
    /// VRAM was freed for a waiting allocation.
    RoomFound = "room-found", "VRAM was freed for the waiting allocation";
    /// An allocation waited for VRAM until its timeout.
    NoRoomInTime = "no-room-in-time", "not enough VRAM was freed in time for the waiting allocation";
    /// An allocation failed at once, because the VRAM that it needs can never be freed.
    NoRoomEver = "no-room", "an allocation needs more VRAM than can be freed, so it fails at once";
    /// The VRAM that the restore needs is not free.
    WaitingForVram = "waiting-for-vram", "the container waits for VRAM that other containers hold";
    /// NVML does not report the free VRAM.
    VramUnknown = "vram-unknown", "NVML does not report the free VRAM, so the controller starts no offload and no restore";
    /// The process is running, but its agent's connection has ended.
    AgentSilent = "agent-silent", "Affinode's library in the process does not reply";
    /// A call of the driver's checkpoint API returned an error.
    DriverError = "driver-error", "the driver returned an error; the process was left as it was";
    /// The driver reported that it cannot restore the process.
    DriverLost = "driver-lost", "the driver reports a failed restore";
    /// The process sent data that does not follow the protocol.
    BadPeer = "bad-peer", "the process sent malformed data and is no longer managed";
    /// An operator or a program requested the offload, the restore or another change.
    Requested = "requested", "an operator or a program requested this action";
    /// The container was idle for its idle timeout.
    IdleTimeout = "idle-timeout", "the container made no CUDA call for the idle timeout";
    /// Another container needed the VRAM.
    Pressure = "pressure", "another container needed the VRAM of this container";
    /// A container with the restore policy `immediate` needed the VRAM.
    EndedForRoom = "ended-for-room", "another container with the restore policy immediate needed the VRAM, and no offload was possible, so the processes of this container were ended";
    /// The container was prewoken, because its history makes a call likely.
    Expected = "expected", "a call is likely soon, judged by the container's earlier calls";
    /// The container was prewoken, because a connection arrived while it was offloaded.
    Connection = "connection", "a connection arrived on the container's network, so a call is expected soon (wake_on)";
    /// A CUDA call was made.
    Called = "called", "a CUDA call arrived";
}

impl core::fmt::Display for Reason {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.pad(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_unique_and_label_safe() {
        for (i, reason) in Reason::ALL.iter().enumerate() {
            let word = reason.as_str();
            assert!(word.bytes().all(|b| b.is_ascii_lowercase() || b == b'-'), "{word}");
            assert!(
                Reason::ALL[i + 1..].iter().all(|other| other.as_str() != word),
                "{word} twice"
            );
        }
    }
}
