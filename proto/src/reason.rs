//! Why a container is where it is, or why an order was not carried out.
//!
//! A reason is a stable word (for machines: metrics labels, JSON) and a sentence
//! that says what to do (for people).

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident = $word:literal, $sentence:literal;)*) => {
        /// Why a container was not offloaded, not restored, or not managed.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Reason { $($(#[$doc])* $name,)* }

        impl Reason {
            /// Every reason.
            pub const ALL: &'static [Reason] = &[$(Reason::$name,)*];

            /// The stable word, as JSON, events and metric labels have it.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Reason::$name => $word,)* }
            }

            /// One sentence for people: what is the case, and what to do where
            /// something can be done.
            #[must_use]
            pub const fn sentence(self) -> &'static str {
                match self { $(Reason::$name => $sentence,)* }
            }
        }
    };
}

reasons! {
    /// A CUDA call was made less than the idle timeout ago.
    RecentCalls = "recent-calls", "called CUDA less than the idle timeout ago";
    /// A CUDA call is in progress.
    CallInProgress = "call-in-progress", "a CUDA call is in progress";
    /// Work that was launched earlier still runs on the GPU.
    GpuBusy = "gpu-busy", "work that it launched earlier still runs on the GPU, by NVML";
    /// Calls did not drain before the deadline of the close.
    Busy = "busy", "calls in progress did not end in time; it is tried again later";
    /// A caller came in while the container was being closed.
    WokenMeanwhile = "woken-meanwhile", "was called while it was being offloaded, and came back at once";
    /// Nothing asked for an offload: mode pressure.
    NoPressure = "no-pressure", "mode is pressure and nobody needs the VRAM";
    /// Nothing asked for an offload: mode auto, and more is wanted than fits.
    Crowded = "oversubscribed", "its GPU is wanted by more than fits on it: it stays until somebody needs the room";
    /// Outside its window.
    OutsideWindow = "outside-window", "it is outside its window: it stays until somebody needs the room";
    /// Not worth a move.
    TooSmall = "too-small", "holds less VRAM than is worth a move (minimum_vram_mib)";
    /// It was said that it is busy.
    HintedBusy = "hinted-busy", "was said to be busy, by its own file or by `affinode hint`";
    /// It was said that it is idle.
    HintedIdle = "hinted-idle", "was said to be idle, by its own file or by `affinode hint`";
    /// Mode manual.
    ModeManual = "mode-manual", "mode is manual: `affinode offload` moves it";
    /// Mode off.
    ModeOff = "mode-off", "mode is off: the container is left alone";
    /// An operator pinned it.
    Pinned = "pinned", "an operator pinned it: `affinode unpin` lets it go";
    /// An operator turned it off on the node.
    AutoOff = "auto-offload-off", "auto-offload is off on this node: `affinode auto-offload on` turns it on";
    /// Restored too recently.
    MinimumResidency = "minimum-residency", "came back less than the minimum residency ago";
    /// No CUDA process has registered.
    NotRegistered = "not-registered", "no process of the container uses CUDA now";
    /// NVML shows no VRAM of the container.
    NoVram = "no-vram", "holds no VRAM that NVML can see, so there is nothing to give back";
    /// Some CUDA process of the container is not under management.
    UnmanagedProcess = "unmanaged-process", "a CUDA process of the container did not register (static binary, musl image, or AFFINODE_DISABLE)";
    /// cuMemAllocManaged was used.
    ManagedMemory = "managed-memory", "uses managed memory (cuMemAllocManaged), which the driver cannot checkpoint";
    /// Peer access was enabled.
    PeerAccess = "peer-access", "uses peer access between GPUs, which does not survive a checkpoint";
    /// Memory was handed out to another process or taken from one, by legacy IPC or a shareable handle;
    /// or another device may reach it by itself.
    SharedMemory = "shared-memory", "shares GPU memory with another process or device (IPC, exported or imported handles, GPUDirect)";
    /// Runs under MPS.
    Mps = "mps", "runs under MPS, which the driver cannot checkpoint";
    /// A tool of the driver's is in the process, and nothing else of it can be copied.
    Tools = "tools", "a profiler, sanitizer or debugger is or was in the process: its context stays on the GPU, because the driver's checkpoint would hang or lose it; the engines auto, full and copy copy its memory";
    /// A video library is in the process, and nothing else of it can be copied.
    Video = "video", "has a library for video loaded (NVDEC, NVENC): its context stays on the GPU; the engines auto, full and copy copy its memory";
    /// One of its threads reached the driver past the hooks while it was away, and nothing else of it
    /// can be copied.
    HiddenWay = "hidden-way", "a thread of it blocked inside the driver while it was away, on a way that no hook sees: its context stays on the GPU from now on; the engines auto, full and copy copy its memory";
    /// Its memory did not come back as it had left.
    DamagedMemory = "damaged-memory", "its memory did not come back as it had left, so its CUDA calls fail (CUDA_ERROR_ECC_UNCORRECTABLE): start it anew";
    /// On a GPU that is cut into MIG instances.
    Mig = "mig", "runs on a GPU that is cut into MIG instances, whose memory cannot be proven free one by one";
    /// Driver or libcuda has no checkpoint API.
    DriverTooOld = "driver-too-old", "the NVIDIA driver has no checkpoint API: 570 or newer is needed";
    /// The memory cgroup has no room for the VRAM.
    CgroupMemory = "cgroup-memory", "the container's memory limit has no room for its VRAM: raise the limit by the VRAM plus 1 GiB";
    /// The node has no free host RAM for it.
    HostMemory = "host-memory", "the node has too little free host memory for its VRAM (memory.node_reserve_mib is kept)";
    /// A cgroup freezer holds the container.
    Frozen = "frozen", "the container is paused or stopped";
    /// An allocation found no memory and waits for room.
    AllocationWaits = "allocation-waits", "an allocation of it waits for VRAM that others hold";
    /// Room was made for an allocation that waited.
    RoomFound = "room-found", "room was found for its allocation";
    /// An allocation waited for room in vain.
    NoRoomInTime = "no-room-in-time", "no room was found for its allocation in time";
    /// An allocation failed without waiting: there will be no room for it.
    NoRoomEver = "no-room", "there will be no room for its allocation";
    /// VRAM for the return is not free.
    WaitingForVram = "waiting-for-vram", "waits for VRAM that others hold";
    /// The host's view of VRAM could not be read.
    VramUnknown = "vram-unknown", "free VRAM cannot be read (NVML), so a return cannot be proven safe";
    /// The agent's connection is gone while its process lives.
    AgentSilent = "agent-silent", "the agent in the process does not answer";
    /// The driver refused or failed.
    DriverError = "driver-error", "the driver returned an error; the process was left as it was";
    /// The driver said that the state cannot come back.
    DriverLost = "driver-lost", "the driver reports a failed restore";
    /// The peer sent something that is not the protocol.
    BadPeer = "bad-peer", "the process sent malformed data and is no longer managed";
    /// Asked for by a person or a program.
    Requested = "requested", "asked for";
    /// Idle for the timeout.
    IdleTimeout = "idle-timeout", "made no CUDA call for the idle timeout";
    /// Someone else needed the room.
    Pressure = "pressure", "its VRAM was needed by another container";
    /// Its room was needed by one that does not wait (restore: immediate).
    EndedForRoom = "ended-for-room", "its VRAM was needed at once and it cannot be moved (restore policy immediate)";
    /// Its history makes a call likely.
    Expected = "expected", "a call is expected soon, by its history";
    /// A connection came in while it was out.
    Connection = "connection", "a connection came in at its network, so a call is expected soon (wake_on)";
    /// A CUDA call was made.
    Called = "called", "a CUDA call came in";
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
