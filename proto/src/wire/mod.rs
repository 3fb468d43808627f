//! The protocols between preload library, controller and copier.
//!
//! The library writes shared counters that the controller reads ([`counters`], with a [`call_ring`]
//! in them). Agent and controller exchange fixed-size frames ([`message`]). A third channel exists,
//! to a copier, during an offload and its restore ([`copier`]). Processes that share memory
//! exchange frames with each other ([`ipc`]).
//!
//! The container owns its end of both channels to the controller, so the controller trusts neither.
//! It reads the counters with `pread` (a truncated or replaced file is an error, not a signal), and
//! decodes every frame with checks.

mod action;
pub mod call_ring;
pub mod copier;
pub mod counters;
mod frame;
pub mod ipc;
pub mod message;

/// Version of the counters and of the agent's frames. A peer of another version is refused with a
/// reason, and its application runs unmanaged.
pub const WIRE_VERSION: u32 = 1;

/// Facts about a process that make a checkpoint unsafe, as a bit set. A bit, once set, stays set
/// for the life of the process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hazards(pub u32);

impl Hazards {
    /// A call of `cuMemAllocManaged` succeeded.
    pub const MANAGED_MEMORY: Hazards = Hazards(1);
    /// `cuCtxEnablePeerAccess` succeeded, or access to memory was given to another device.
    pub const PEER_ACCESS: Hazards = Hazards(1 << 1);
    /// Memory was exported to another process or imported from one, by legacy IPC or a shareable
    /// handle. A library without [`Capabilities::LEAVES_IN_PART`] reports [`Self::DIRECT_ACCESS`]
    /// with this bit.
    pub const SHARED_MEMORY: Hazards = Hazards(1 << 2);
    /// The process is connected to an MPS server.
    pub const MPS: Hazards = Hazards(1 << 3);
    /// libcuda has no checkpoint entry points.
    pub const NO_CHECKPOINT_API: Hazards = Hazards(1 << 4);
    /// Restored memory differed from what was offloaded: calls of the process return an error.
    pub const DAMAGED_MEMORY: Hazards = Hazards(1 << 5);
    /// A tool has obtained the driver's private tables (CUPTI, compute-sanitizer), was injected by
    /// the environment, or traces the process.
    pub const TOOLS: Hazards = Hazards(1 << 6);
    /// A video library (NVDEC, NVENC) is loaded, or has obtained the driver's private tables.
    pub const VIDEO: Hazards = Hazards(1 << 7);
    /// A thread blocked inside the driver while the process was offloaded, on a path that no hook
    /// sees.
    pub const HIDDEN_WAY: Hazards = Hazards(1 << 8);
    /// Another device on the bus or another API may access memory of the process, without a call
    /// that the library sees.
    pub const DIRECT_ACCESS: Hazards = Hazards(1 << 9);
    /// Hazards of single allocations. The library leaves these allocations on the GPU, and can
    /// copy all others.
    pub const KEEPS_MEMORY: Hazards = Hazards(Hazards::MANAGED_MEMORY.0 | Hazards::SHARED_MEMORY.0);
    /// Hazards with which the driver must not checkpoint the process. Its memory can be copied;
    /// the context stays on the GPU.
    pub const KEEPS_CONTEXT: Hazards = Hazards(
        Hazards::TOOLS.0 | Hazards::VIDEO.0 | Hazards::HIDDEN_WAY.0 | Hazards::KEEPS_MEMORY.0,
    );

    /// Whether any bit of `other` is set.
    #[must_use]
    pub const fn intersects(self, other: Hazards) -> bool {
        self.0 & other.0 != 0
    }

    /// Whether no bit is set.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The bits of this set that are not in `other`.
    #[must_use]
    pub const fn without(self, other: Hazards) -> Hazards {
        Hazards(self.0 & !other.0)
    }
}

/// Abilities of a library that earlier libraries of the same [`WIRE_VERSION`] do not have, as a bit
/// set. Unknown bits are ignored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities(pub u32);

impl Capabilities {
    /// The library records calls on request ([`call_ring`]).
    pub const RECORDS_CALLS: Capabilities = Capabilities(1);
    /// The library exports memory to a copier ([`copier`]) and imports it from there.
    pub const USES_COPIER: Capabilities = Capabilities(1 << 1);
    /// The library can retain its host copy after a restore, and detect unchanged memory.
    pub const RETAINS_HOST_COPY: Capabilities = Capabilities(1 << 2);
    /// The library can prefault host memory, and let a copier copy during its checkpoint.
    pub const PREFAULTS: Capabilities = Capabilities(1 << 3);
    /// The library can verify memory after a restore.
    pub const CHECKS: Capabilities = Capabilities(1 << 4);
    /// The library can share identical content with other processes, so that it is stored once,
    /// while it is offloaded ([`copier::FromCopier::Same`]).
    pub const DEDUPS: Capabilities = Capabilities(1 << 5);
    /// The library waits for the GPU's work by itself, so a copy out needs no lock of the driver.
    pub const AWAITS_WORK: Capabilities = Capabilities(1 << 6);
    /// The library can copy the memory of a process with [`Hazards::KEEPS_MEMORY`].
    pub const LEAVES_IN_PART: Capabilities = Capabilities(1 << 7);

    /// Whether any bit of `other` is set.
    #[must_use]
    pub const fn intersects(self, other: Capabilities) -> bool {
        self.0 & other.0 != 0
    }

    /// Whether every bit of `other` is set.
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
            /// The variant with this number, if there is one.
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
    pub enum Phase {
        /// Calls are passed to the driver.
        Open = 0,
        /// New calls wait; calls in progress may finish.
        Closing = 1,
        /// New calls wait; none is in progress.
        Closed = 2,
        /// The driver's lock call is running.
        Locking = 3,
        /// The driver holds the process locked.
        Locked = 4,
        /// The driver's checkpoint call is running.
        Checkpointing = 5,
        /// Checkpointed: the GPU memory is in host memory.
        Checkpointed = 6,
        /// The driver's restore call is running.
        Restoring = 7,
        /// The driver's unlock call is running.
        Unlocking = 8,
        /// The agent copies swappable memory to host memory.
        CopyingOut = 9,
        /// Swappable memory is in host memory and its addresses are reserved; the context is on
        /// the GPU.
        CopiedOut = 10,
        /// The agent copies the memory back to the GPU.
        CopyingIn = 11,
    }
}

impl Phase {
    /// Whether memory of the process is in host memory, so that its restore takes VRAM.
    #[must_use]
    pub const fn is_offloaded(self) -> bool {
        matches!(self, Phase::Checkpointed | Phase::CopiedOut)
    }
}

wire_enum! {
    /// Way in which the memory of a process leaves its GPU.
    pub enum Engine {
        /// The driver's checkpoint moves all memory; the library does not touch allocations.
        Checkpoint = 0,
        /// The agent copies big allocations; the context stays on the GPU.
        Copy = 1,
        /// The agent copies big allocations; the driver's checkpoint moves the rest.
        Full = 2,
    }
}

impl Engine {
    /// The engine for a word of the configuration; `None` for another word.
    #[must_use]
    pub fn parse(word: &[u8]) -> Option<Engine> {
        match word {
            b"checkpoint" => Some(Engine::Checkpoint),
            b"copy" => Some(Engine::Copy),
            b"full" | b"auto" => Some(Engine::Full),
            _ => None,
        }
    }
}

/// Facts that affect how the process can be offloaded and restored, as a bit set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessFlags(pub u32);

impl ProcessFlags {
    /// `cuIpcGetMemHandle` failed for swappable memory.
    pub const IPC_REFUSED: ProcessFlags = ProcessFlags(1);
    /// The process has memory imported from a copier: a checkpoint without a copy out is refused.
    /// Cleared when that memory is freed.
    pub const IMPORTED: ProcessFlags = ProcessFlags(1 << 1);
    /// At the process's last copy out, no copier could have restored its memory. Cleared when a
    /// copier can.
    pub const NO_COPIER: ProcessFlags = ProcessFlags(1 << 2);
    /// Memory exported to a copier is not copied: it is on the GPU, in every phase. Cleared when it
    /// is copied, or when the process has mapped it again.
    pub const EXPORTED_TO_COPIER: ProcessFlags = ProcessFlags(1 << 4);
    /// Library and driver can restore the process on another GPU.
    pub const MOVABLE: ProcessFlags = ProcessFlags(1 << 3);
    /// The driver shows the process one GPU, so it never has memory on several.
    pub const ONE_GPU: ProcessFlags = ProcessFlags(1 << 5);

    /// Whether any bit of `other` is set.
    #[must_use]
    pub const fn intersects(self, other: ProcessFlags) -> bool {
        self.0 & other.0 != 0
    }
}
