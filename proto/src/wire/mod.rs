//! The protocols between preload library, controller and copier.
//!
//! The library writes shared counters that the controller reads ([`counters`]). They contain a
//! [`call_ring`]. Agent and controller exchange fixed-size frames ([`message`]). During an offload
//! and its restore, agent and copier exchange frames too ([`copier`]). For host memory of the node, an
//! agent exchanges frames with the [`host_pool`]. Two processes that share memory exchange frames
//! with each other ([`ipc`]).
//!
//! A container can write anything into its counters and its end of the socket, so the controller
//! trusts neither. It reads the counters with `pread`, which returns an error for a truncated or
//! replaced file and raises no signal. It checks every frame while it decodes it.

mod action;
pub mod call_ring;
pub mod copier;
pub mod counters;
mod frame;
pub mod host_pool;
pub mod ipc;
pub mod message;
pub mod vram_view;

/// Version of the protocol: the layout of the counters and the frames of the agent. The controller
/// refuses a library of another version with a reason, and the application then runs unmanaged.
pub const WIRE_VERSION: u32 = 1;

/// Bit set of facts about a process that make a checkpoint unsafe. A bit that is set stays set for
/// the life of the process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hazards(pub u32);

impl Hazards {
    /// The process allocated managed memory with `cuMemAllocManaged`.
    pub const MANAGED_MEMORY: Hazards = Hazards(1);
    /// The process called `cuCtxEnablePeerAccess` with success, or another device got access to its
    /// memory.
    pub const PEER_ACCESS: Hazards = Hazards(1 << 1);
    /// The process exported memory to another process or imported memory from one, by legacy IPC or
    /// a shareable handle. A library without [`Capabilities::LEAVES_IN_PART`] reports
    /// [`Self::DIRECT_ACCESS`] together with this bit.
    pub const SHARED_MEMORY: Hazards = Hazards(1 << 2);
    /// The process is a client or a server of MPS. The driver's checkpoint functions refuse it.
    pub const MPS: Hazards = Hazards(1 << 3);
    /// The process's libcuda has no checkpoint entry points.
    pub const NO_CHECKPOINT_API: Hazards = Hazards(1 << 4);
    /// The memory of the process after a restore differs from the memory that was offloaded. CUDA
    /// calls of the process return an error.
    pub const DAMAGED_MEMORY: Hazards = Hazards(1 << 5);
    /// A tool (profiler, sanitizer or debugger) traces the process, was injected by an environment
    /// variable, or has obtained the driver's private tables (CUPTI, compute-sanitizer).
    pub const TOOLS: Hazards = Hazards(1 << 6);
    /// The process has loaded a video library (NVDEC, NVENC), or such a library has obtained the
    /// driver's private tables.
    pub const VIDEO: Hazards = Hazards(1 << 7);
    /// A thread called the driver on a path without a hook, and blocked there while the process was
    /// offloaded.
    pub const HIDDEN_WAY: Hazards = Hazards(1 << 8);
    /// Another device on the bus or another API may access memory of the process, without a call
    /// that the library intercepts.
    pub const DIRECT_ACCESS: Hazards = Hazards(1 << 9);
    /// Hazards that concern single allocations. The library does not copy these allocations, and
    /// can copy all others.
    pub const KEEPS_MEMORY: Hazards = Hazards(Hazards::MANAGED_MEMORY.0 | Hazards::SHARED_MEMORY.0);
    /// Hazards with which the driver must not checkpoint the process. The library can copy the
    /// memory, but the CUDA context stays on the GPU.
    pub const KEEPS_CONTEXT: Hazards = Hazards(
        Hazards::TOOLS.0
            | Hazards::VIDEO.0
            | Hazards::HIDDEN_WAY.0
            | Hazards::MPS.0
            | Hazards::KEEPS_MEMORY.0,
    );

    /// The word for each hazard in output for users.
    const WORDS: [(Hazards, &str); 10] = [
        (Hazards::MANAGED_MEMORY, "managed-memory"),
        (Hazards::PEER_ACCESS, "peer-access"),
        (Hazards::SHARED_MEMORY, "shared-memory"),
        (Hazards::DIRECT_ACCESS, "direct-access"),
        (Hazards::MPS, "mps"),
        (Hazards::NO_CHECKPOINT_API, "driver-too-old"),
        (Hazards::DAMAGED_MEMORY, "damaged-memory"),
        (Hazards::TOOLS, "tools"),
        (Hazards::VIDEO, "video"),
        (Hazards::HIDDEN_WAY, "hidden-way"),
    ];

    /// Returns the words for the hazards that are set, in a fixed order.
    pub fn words(self) -> impl Iterator<Item = &'static str> {
        let set = Hazards::WORDS.into_iter().filter(move |(hazard, _)| self.intersects(*hazard));
        set.map(|(_, word)| word)
    }

    /// Returns whether both sets have a bit in common.
    #[must_use]
    pub const fn intersects(self, other: Hazards) -> bool {
        self.0 & other.0 != 0
    }

    /// Returns whether no hazard is set.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns the bits of this set that are not in `other`.
    #[must_use]
    pub const fn without(self, other: Hazards) -> Hazards {
        Hazards(self.0 & !other.0)
    }
}

/// Bit set of features of a library. Libraries of the same [`WIRE_VERSION`] can differ in their
/// features, because later libraries have more. Unknown bits are ignored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities(pub u32);

impl Capabilities {
    /// The library can record CUDA calls when the controller requests it ([`call_ring`]).
    pub const RECORDS_CALLS: Capabilities = Capabilities(1);
    /// The library can export memory to a copier ([`copier`]) and import memory from a copier.
    pub const USES_COPIER: Capabilities = Capabilities(1 << 1);
    /// The library can retain its host copy of GPU memory after a restore, and detect unchanged
    /// memory.
    pub const RETAINS_HOST_COPY: Capabilities = Capabilities(1 << 2);
    /// The library can prefault host memory, and let a copier copy memory during the checkpoint.
    pub const PREFAULTS: Capabilities = Capabilities(1 << 3);
    /// The library can verify by checksums that memory is unchanged after a restore.
    pub const CHECKS: Capabilities = Capabilities(1 << 4);
    /// The library can map a shared file in place of content that other processes have too. The
    /// content is then stored once while these processes are offloaded
    /// ([`copier::FromCopier::Same`]).
    pub const DEDUPS: Capabilities = Capabilities(1 << 5);
    /// The library waits for the GPU's work itself, so that a copy out does not need the driver's
    /// lock.
    pub const AWAITS_WORK: Capabilities = Capabilities(1 << 6);
    /// If a process has a hazard of [`Hazards::KEEPS_MEMORY`], the library can copy the allocations
    /// without the hazard, and leaves the other allocations on the GPU.
    pub const LEAVES_IN_PART: Capabilities = Capabilities(1 << 7);
    /// The library enforces a limit of the container's VRAM.
    pub const LIMITS_VRAM: Capabilities = Capabilities(1 << 8);
    /// The library can copy out to memory of the node's [`host_pool`].
    pub const USES_HOST_POOL: Capabilities = Capabilities(1 << 9);
    /// The library frees the host memory that it keeps when the controller requests it.
    pub const FREES_HOST_MEMORY: Capabilities = Capabilities(1 << 10);
    /// The library cancels a copy out when its offload is given up ([`counters::NOT_WANTED`]).
    pub const GIVES_UP_COPIES: Capabilities = Capabilities(1 << 11);
    /// During a copy out, the library can free VRAM piece by piece. During a copy in, it can wait
    /// for VRAM that another process frees.
    pub const RELEASES_EARLY: Capabilities = Capabilities(1 << 12);
    /// While the process is offloaded, the library can move its content from the [`host_pool`] to a
    /// disk file, and restore it from there.
    pub const STORES_ON_DISK: Capabilities = Capabilities(1 << 13);
    /// The library can copy the memory of a process with [`Hazards::MPS`].
    pub const COPIES_UNDER_MPS: Capabilities = Capabilities(1 << 14);
    /// The library can prefault memory of the [`host_pool`].
    pub const PREFAULTS_HOST_POOL: Capabilities = Capabilities(1 << 15);

    /// Returns whether both sets have a bit in common.
    #[must_use]
    pub const fn intersects(self, other: Capabilities) -> bool {
        self.0 & other.0 != 0
    }

    /// Returns whether every bit of `other` is set in this set.
    #[must_use]
    pub const fn contains(self, other: Capabilities) -> bool {
        self.0 & other.0 == other.0
    }
}

macro_rules! wire_enum {
    ($(#[$doc:meta])* $vis:vis enum $name:ident { $($(#[$vdoc:meta])* $variant:ident = $value:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u32)]
        $vis enum $name { $($(#[$vdoc])* $variant = $value,)* }

        impl $name {
            /// Returns the variant with this number, or `None` if there is none.
            #[must_use]
            pub const fn from_u32(value: u32) -> Option<$name> {
                match value { $($value => Some($name::$variant),)* _ => None }
            }
        }
    };
}
pub(crate) use wire_enum;

wire_enum! {
    /// Phase of a process, as its agent reports it.
    ///
    /// ```text
    /// Open <─> Closing ─> Closed <─> Locking ─> Locked <─> Checkpointing ─> Checkpointed
    ///                       ^          Unlocking ─┘│  ^        Restoring ────┘ │
    ///                       │                  CopyingOut  (nothing copied out)│
    ///                       │                      v                           │
    ///                       └── CopyingIn ───── CopiedOut <─> Checkpointing ─> Checkpointed
    ///                                             └──────── Restoring ─────────┘
    /// ```
    #[derive(Default)]
    pub enum Phase {
        /// The gate is open: CUDA calls are passed to the driver.
        #[default]
        Open = 0,
        /// The gate is closing: new CUDA calls wait, and calls in progress can end.
        Closing = 1,
        /// The gate is closed: new CUDA calls wait, and no call is in progress.
        Closed = 2,
        /// The driver's lock call is running.
        Locking = 3,
        /// The driver has locked the process.
        Locked = 4,
        /// The driver's checkpoint call is running.
        Checkpointing = 5,
        /// The driver has checkpointed the process: the GPU memory is in host memory.
        Checkpointed = 6,
        /// The driver's restore call is running.
        Restoring = 7,
        /// The driver's unlock call is running.
        Unlocking = 8,
        /// The agent is copying swappable memory to host memory.
        CopyingOut = 9,
        /// Swappable memory is in host memory and its addresses are reserved. The CUDA context is
        /// still on the GPU.
        CopiedOut = 10,
        /// The agent is copying the swappable memory back to the GPU.
        CopyingIn = 11,
    }
}

impl Phase {
    /// Returns whether memory of the process is in host memory, so that a restore needs VRAM.
    #[must_use]
    pub const fn is_offloaded(self) -> bool {
        matches!(self, Phase::Checkpointed | Phase::CopiedOut)
    }
}

/// Settings of a container that its processes need before a controller accepts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StartSettings {
    /// The engine, which decides how allocations are made.
    pub engine: Engine,
    /// Limit of the VRAM on each GPU, in bytes. 0: there is no limit.
    pub vram_limit_bytes: u64,
}

wire_enum! {
    /// Engine: the method by which a container's memory is moved out of VRAM.
    pub enum Engine {
        /// The driver's checkpoint moves all memory. The library does not copy allocations.
        Checkpoint = 0,
        /// The library copies allocations of 2 MiB and more at bus speed. The remaining memory
        /// stays on the GPU.
        Copy = 1,
        /// The library copies allocations of 2 MiB and more. Then the driver's checkpoint moves the
        /// remaining memory.
        Full = 2,
        /// The library copies allocations of 2 MiB and more. The driver's checkpoint moves the
        /// remaining memory only when a waiting container needs the VRAM. For the library, `Auto`
        /// is the same as `Full`, because the controller orders the checkpoint.
        Auto = 3,
    }
}

impl Engine {
    /// Returns the engine with this word in the configuration, or `None` if no engine has it.
    #[must_use]
    pub fn parse(word: &[u8]) -> Option<Engine> {
        [Engine::Auto, Engine::Copy, Engine::Full, Engine::Checkpoint]
            .into_iter()
            .find(|engine| engine.as_str().as_bytes() == word)
    }

    /// Returns the word for the engine in configuration, annotations and output.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Engine::Auto => "auto",
            Engine::Copy => "copy",
            Engine::Full => "full",
            Engine::Checkpoint => "checkpoint",
        }
    }
}

/// Bit set of facts that affect how the process can be offloaded and restored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessFlags(pub u32);

impl ProcessFlags {
    /// `cuIpcGetMemHandle` failed in the process, because the memory is swappable.
    pub const IPC_REFUSED: ProcessFlags = ProcessFlags(1);
    /// The process has memory imported from a copier, so a checkpoint without a copy out is
    /// refused. Cleared when that memory is freed.
    pub const IMPORTED: ProcessFlags = ProcessFlags(1 << 1);
    /// The last prefault or copy out has shown that no copier can restore the process's memory.
    /// Cleared when a later prefault or copy out shows that a copier can restore the memory.
    pub const NO_COPIER: ProcessFlags = ProcessFlags(1 << 2);
    /// The process exported memory to a copier that has not copied all of it yet. The memory not
    /// yet copied stays in VRAM in every phase. Cleared when all of it is copied or mapped in the
    /// process again.
    pub const EXPORTED_TO_COPIER: ProcessFlags = ProcessFlags(1 << 4);
    /// The library and the driver can restore the process on another GPU of the node.
    pub const MOVABLE: ProcessFlags = ProcessFlags(1 << 3);
    /// The driver shows only one GPU to the process, so its memory is never on several GPUs.
    pub const ONE_GPU: ProcessFlags = ProcessFlags(1 << 5);
    /// The host memory to which the process copies out is in the node's [`host_pool`]. Cleared when
    /// the library copies out to the process's own memory again.
    pub const HOST_POOL: ProcessFlags = ProcessFlags(1 << 6);
    /// The library ended its connection to the host pool, because a reply failed or came too late.
    /// Cleared when the library receives a new connection.
    pub const HOST_POOL_LOST: ProcessFlags = ProcessFlags(1 << 7);
    /// The library is moving content of the process to a disk file. Cleared when it has ended.
    pub const STORING_ON_DISK: ProcessFlags = ProcessFlags(1 << 8);
    /// The library could not move all content to the disk file. The rest is still in host memory.
    /// Cleared when the library begins again, and at a restore.
    pub const DISK_FAILED: ProcessFlags = ProcessFlags(1 << 9);
    /// The library prefaults memory of the [`host_pool`], or has prefaulted it. Cleared when a copy
    /// out has used it, and when it is freed.
    pub const PREFAULTED_HOST_POOL: ProcessFlags = ProcessFlags(1 << 10);

    /// Returns whether both sets have a bit in common.
    #[must_use]
    pub const fn intersects(self, other: ProcessFlags) -> bool {
        self.0 & other.0 != 0
    }
}
