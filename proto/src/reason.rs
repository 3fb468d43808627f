//! Reasons: why a container is resident or offloaded, or why an order failed.
//!
//! Each reason has a stable word for machines (metric labels, JSON) and a sentence for operators,
//! which describes the cause and what to do.

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident = $word:literal, $sentence:literal;)*) => {
        /// Reason why a container is in its state, or why an order to its agents failed.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Reason { $($(#[$doc])* $name,)* }

        impl Reason {
            /// All reasons, in the order of declaration.
            pub const ALL: &'static [Reason] = &[$(Reason::$name,)*];

            /// Returns the reason's stable word, which JSON, events and metric labels use.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Reason::$name => $word,)* }
            }

            /// Returns one sentence for operators. It states the cause and, if there is one, the
            /// command or setting with which an operator can change the situation.
            #[must_use]
            pub const fn sentence(self) -> &'static str {
                match self { $(Reason::$name => $sentence,)* }
            }
        }
    };
}

reasons! {
    /// The container made a CUDA call less than the idle timeout ago.
    RecentCalls = "recent-calls", "the time since the last CUDA call is less than the idle timeout";
    /// A process of the container is in a CUDA call.
    CallInProgress = "call-in-progress", "a CUDA call is in progress";
    /// Work that the container launched earlier still runs on the GPU.
    GpuBusy = "gpu-busy", "NVML reports that the GPU still runs work that was launched earlier";
    /// CUDA calls in progress did not end before the deadline for closing the gates.
    Busy = "busy", "calls in progress did not end in time, so the offload is tried again later";
    /// A CUDA call arrived while the container's gates were closing for an offload, so the offload
    /// was cancelled.
    WokenMeanwhile = "woken-meanwhile", "a CUDA call arrived during the offload, so the offload was cancelled";
    /// The offload mode is `pressure`, and no other container needs the VRAM.
    NoPressure = "no-pressure", "the mode is pressure, and no container needs the VRAM";
    /// The offload mode is `auto`, and the containers of the GPU together need more VRAM than the
    /// GPU has.
    Oversubscribed = "oversubscribed", "the containers of the GPU together need more VRAM than the GPU has: an idle container stays resident until another container needs its VRAM";
    /// The current time is outside the configured offload window.
    OutsideWindow = "outside-window", "the time is outside the offload window: the container stays resident until another container needs its VRAM";
    /// The container holds less VRAM than the minimum for an offload (`policy.minimum_vram_mib`).
    TooSmall = "too-small", "the container holds less VRAM than policy.minimum_vram_mib";
    /// The library can copy no memory of the container, and no other container needs the VRAM of
    /// this container's CUDA context.
    NothingToCopy = "nothing-to-copy", "the container holds no memory that the library can copy, so its context stays until another container needs the VRAM";
    /// A hint (a program's or an operator's report) states that the container is busy.
    HintedBusy = "hinted-busy", "a hint reports the container as busy (its hint file or `affinode hint`)";
    /// A hint (a program's or an operator's report) states that the container is idle.
    HintedIdle = "hinted-idle", "a hint reports the container as idle (its hint file or `affinode hint`)";
    /// The offload mode is `manual`: only an operator offloads the container.
    ModeManual = "mode-manual", "the mode is manual: run `affinode offload` to offload the container";
    /// The offload mode is `off`: the container is never offloaded.
    ModeOff = "mode-off", "the mode is off: the container is never offloaded";
    /// An operator pinned the container.
    Pinned = "pinned", "an operator pinned the container: run `affinode unpin` to release it";
    /// An operator turned automatic offloads off on this node.
    AutoOff = "auto-offload-off", "auto-offload is off on this node: run `affinode auto-offload on` to turn it on";
    /// The container was restored less than the minimum residency ago.
    MinimumResidency = "minimum-residency", "the time since the last restore is less than the minimum residency";
    /// No CUDA process of the container has registered with the controller.
    NotRegistered = "not-registered", "no process of the container uses CUDA now";
    /// NVML reports no VRAM of the container.
    NoVram = "no-vram", "NVML reports no VRAM of the container, so there is nothing to offload";
    /// A CUDA process of the container is unmanaged: it has not registered with the controller.
    UnmanagedProcess = "unmanaged-process", "a CUDA process of the container did not register with the controller (static binary, musl image, AFFINODE_DISABLE, or more than 256 CUDA processes)";
    /// A process uses managed memory (`cuMemAllocManaged`), so the driver must not checkpoint it.
    /// The reason applies if an offload with the current engine needs a checkpoint, or if the
    /// process has no other memory that can be copied.
    ManagedMemory = "managed-memory", "the container uses managed memory (cuMemAllocManaged), which the driver cannot checkpoint; the engines auto, full and copy leave it on the GPU and can copy the other memory";
    /// A process enabled peer access between GPUs.
    PeerAccess = "peer-access", "the container uses peer access between GPUs, which does not survive a checkpoint";
    /// A process exported memory to another process or imported memory from one, by legacy IPC or a
    /// shareable handle, so the driver must not checkpoint it. The reason applies if an offload
    /// with the current engine needs a checkpoint, or if the process has no other memory that can
    /// be copied.
    SharedMemory = "shared-memory", "the container shares GPU memory with another process (IPC, exported or imported handles); the engines auto, full and copy leave that memory on the GPU and can copy the other memory";
    /// Another device or another API may access memory of a process, without a call that the
    /// library intercepts.
    DirectAccess = "direct-access", "another device or API can access the container's GPU memory without the CUDA driver (GPUDirect RDMA, GDRCopy, EGL, OpenGL)";
    /// A process is a client of MPS, NVIDIA's Multi-Process Service, so the driver cannot checkpoint
    /// its context. The reason applies if an offload with the current engine needs a checkpoint, or
    /// if the process has no memory that can be copied.
    Mps = "mps", "the container runs under MPS, whose clients the driver cannot checkpoint: the context stays on the GPU, but the engines auto, full and copy can copy the memory";
    /// A profiler, sanitizer or debugger is or was in a process, so the driver must not checkpoint
    /// its context. The reason applies if an offload with the current engine needs a checkpoint.
    Tools = "tools", "a profiler, sanitizer or debugger is or was loaded, or a library requested a table of driver functions that Affinode does not know: the context stays on the GPU, but the engines auto, full and copy can copy the memory";
    /// A process has loaded a video library, so the driver must not checkpoint its context. The
    /// reason applies if an offload with the current engine needs a checkpoint.
    Video = "video", "a process has a video library loaded (NVDEC, NVENC), so the context stays on the GPU; the engines auto, full and copy can copy the memory";
    /// A thread entered the driver on a path without a hook while the process was offloaded, so the
    /// driver must not checkpoint the process's context again. The reason applies if an offload
    /// with the current engine needs a checkpoint.
    HiddenWay = "hidden-way", "a thread called the driver without passing Affinode's hooks while the container was offloaded, so the context stays on the GPU from now on; the engines auto, full and copy can copy the memory";
    /// The memory of a process after a restore differs from the memory that was offloaded.
    DamagedMemory = "damaged-memory", "the content of the container's GPU memory changed between offload and restore, so its CUDA calls fail (CUDA_ERROR_ECC_UNCORRECTABLE): restart the container";
    /// A process runs on a GPU in MIG mode (divided into instances).
    Mig = "mig", "the container runs on a GPU in MIG mode, where NVML does not report the free VRAM of one instance";
    /// The driver or the container's libcuda has no checkpoint API.
    DriverTooOld = "driver-too-old", "the NVIDIA driver has no checkpoint API: driver 570 or newer is needed";
    /// The memory cgroup of the container has less free memory than an offload of its VRAM needs.
    CgroupMemory = "cgroup-memory", "the container's memory limit is too low for its VRAM: raise the limit by its VRAM plus 1 GiB for each CUDA process";
    /// The node has less free host memory than an offload of the container's VRAM needs.
    HostMemory = "host-memory", "the node has too little free host memory for the container's VRAM (memory.node_reserve_mib stays free)";
    /// The container's cgroup is frozen or one of its processes is stopped, so its agents cannot
    /// carry out an offload.
    Frozen = "frozen", "the container is paused or stopped";
    /// An allocation of the container found no free VRAM, and waits for it.
    AllocationWaits = "allocation-waits", "an allocation of the container waits for VRAM that other containers hold";
    /// VRAM was freed for an allocation that waited, so the allocation was made.
    RoomFound = "room-found", "VRAM was freed for the waiting allocation";
    /// An allocation waited for VRAM until its timeout, and failed.
    NoRoomInTime = "no-room-in-time", "not enough VRAM was freed in time for the waiting allocation";
    /// An allocation of the container failed at once, because the VRAM that it needs can never be
    /// freed.
    NoRoomEver = "no-room", "an allocation needs more VRAM than can be freed, so it fails at once";
    /// The restore waits, because the VRAM that it needs is not free.
    WaitingForVram = "waiting-for-vram", "the container waits for VRAM that other containers hold";
    /// NVML does not report the free VRAM of the GPU.
    VramUnknown = "vram-unknown", "NVML does not report the free VRAM, so the controller starts no offload and no restore";
    /// A process is running, but the connection of its agent has ended.
    AgentSilent = "agent-silent", "Affinode's library in the process does not reply";
    /// A call of the driver's checkpoint API returned an error.
    DriverError = "driver-error", "the driver returned an error, and the process stays as it was before the attempt";
    /// The driver reported that it cannot restore a process.
    DriverLost = "driver-lost", "the driver reports a failed restore";
    /// A process sent data that does not follow the protocol.
    BadPeer = "bad-peer", "the process sent malformed data and is no longer managed";
    /// An operator or a program requested the offload, the restore or another change.
    Requested = "requested", "an operator or a program requested this action";
    /// The container was idle for its idle timeout, so it was offloaded.
    IdleTimeout = "idle-timeout", "the container made no CUDA call for the idle timeout";
    /// Another container needed the VRAM of this container.
    Pressure = "pressure", "another container needed the VRAM of this container";
    /// A container with the restore policy `immediate` needed the VRAM, so the controller ended
    /// this container's processes.
    EndedForRoom = "ended-for-room", "another container with the restore policy immediate needed the VRAM, and no offload was possible, so the processes of this container were ended";
    /// The container holds a GPU, or waits for one, but makes no progress.
    NoProgress = "no-progress", "the container makes no progress for longer than no_progress_timeout";
    /// The container was restored early (prewoken), because its call history makes a CUDA call
    /// likely.
    Expected = "expected", "the container's earlier calls suggest that it makes a CUDA call soon";
    /// The container was restored early (prewoken), because a network connection to it arrived
    /// while it was offloaded.
    Connection = "connection", "a connection arrived on the container's network, so a call is expected soon (wake_on)";
    /// The container was restored without a call, because another container needed the host memory
    /// of its content.
    FreesHostMemory = "frees-host-memory", "the container was restored without a call to free host memory, which another container needed for its offload";
    /// A process of the container made a CUDA call.
    Called = "called", "a CUDA call arrived";
}

impl Reason {
    /// Whether host memory did not suffice for an offload: that of the node, of the host pool or of
    /// a memory cgroup.
    #[must_use]
    pub const fn is_host_shortage(self) -> bool {
        matches!(self, Reason::HostMemory | Reason::CgroupMemory)
    }

    /// Whether this reason keeps a container on its GPU until its program, its configuration or an
    /// operator's decision changes. The container's VRAM is then of no use to other containers.
    #[must_use]
    pub const fn is_lasting(self) -> bool {
        matches!(
            self,
            Reason::ModeManual
                | Reason::ModeOff
                | Reason::Pinned
                | Reason::AutoOff
                | Reason::UnmanagedProcess
                | Reason::ManagedMemory
                | Reason::PeerAccess
                | Reason::SharedMemory
                | Reason::DirectAccess
                | Reason::Mps
                | Reason::Tools
                | Reason::Video
                | Reason::HiddenWay
                | Reason::DamagedMemory
                | Reason::Mig
                | Reason::DriverTooOld
                | Reason::CgroupMemory
                | Reason::DriverLost
                | Reason::BadPeer
        )
    }
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
