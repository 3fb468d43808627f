//! What the preload library and the controller say to each other.
//!
//! Two channels: a page of counters that the library writes and the controller
//! reads ([`counters`], with a ring of calls in it, [`call_ring`]), and a stream of fixed-size frames ([`message`]).
//! A third, to a copier, comes and goes ([`copier`]). And processes that share memory talk to each
//! other ([`ipc`]).
//! The container owns its end of both, so the controller believes neither:
//! it reads the page with `pread` (a truncated or swapped file is an error, not a
//! signal), and decodes every frame with checks.

mod action;
pub mod call_ring;
pub mod copier;
pub mod counters;
mod frame;
pub mod ipc;
pub mod message;

/// The version of both channels. A peer of another version is refused with a
/// reason, and its application runs on unmanaged.
pub const WIRE_VERSION: u32 = 1;

/// What a process has done that makes a checkpoint unsafe, as a bit set.
/// A bit, once set, stays set for the life of the process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hazards(pub u32);

impl Hazards {
    /// `cuMemAllocManaged` succeeded.
    pub const MANAGED_MEMORY: Hazards = Hazards(1);
    /// `cuCtxEnablePeerAccess` succeeded, or access to memory was given to another device.
    pub const PEER_ACCESS: Hazards = Hazards(1 << 1);
    /// Memory was handed out to another process or taken from one: by legacy IPC, or by a shareable
    /// handle. Or another device of the bus may reach it by itself.
    pub const SHARED_MEMORY: Hazards = Hazards(1 << 2);
    /// The process talks to an MPS server.
    pub const MPS: Hazards = Hazards(1 << 3);
    /// libcuda has no checkpoint entry points.
    pub const NO_CHECKPOINT_API: Hazards = Hazards(1 << 4);
    /// Its memory did not come back as it had left: its calls are answered with an error.
    pub const DAMAGED_MEMORY: Hazards = Hazards(1 << 5);
    /// A tool has been let at the driver's private tables (CUPTI, compute-sanitizer), was injected by
    /// the environment, or traces the process.
    pub const TOOLS: Hazards = Hazards(1 << 6);
    /// A library for video (NVDEC, NVENC) is loaded, or has been let at the driver's private tables.
    pub const VIDEO: Hazards = Hazards(1 << 7);
    /// A thread has blocked inside the driver while the process was away, on a way that no hook sees.
    pub const HIDDEN_WAY: Hazards = Hazards(1 << 8);
    /// Those with which the driver must not checkpoint the process. Its memory can be copied; the
    /// context stays on the device.
    pub const KEEPS_CONTEXT: Hazards =
        Hazards(Hazards::TOOLS.0 | Hazards::VIDEO.0 | Hazards::HIDDEN_WAY.0);

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

/// What a library can do that earlier ones of the same [`WIRE_VERSION`] cannot, as a bit
/// set. Bits that are not known mean nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities(pub u32);

impl Capabilities {
    /// It records calls on request ([`call_ring`]).
    pub const RECORDS_CALLS: Capabilities = Capabilities(1);
    /// It hands parked memory to a copier ([`copier`]), and takes it from there.
    pub const USES_COPIER: Capabilities = Capabilities(1 << 1);
    /// It can keep its copy after a return, and tell what has not changed since.
    pub const RETAINS_HOST_COPY: Capabilities = Capabilities(1 << 2);
    /// It has host memory made ready before it leaves, and lets a copier copy beside its checkpoint.
    pub const PREFAULTS: Capabilities = Capabilities(1 << 3);
    /// It looks whether its memory has come home as it left.
    pub const CHECKS: Capabilities = Capabilities(1 << 4);
    /// Holds what it has in common with others once, with them, while it is away
    /// ([`copier::FromCopier::Same`]).
    pub const DEDUPS: Capabilities = Capabilities(1 << 5);

    /// Whether any bit of `other` is set.
    #[must_use]
    pub const fn intersects(self, other: Capabilities) -> bool {
        self.0 & other.0 != 0
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
    /// How far a process is from running freely, as its agent knows it.
    ///
    /// ```text
    /// Open <─> Closing ─> Closed <─> Locking ─> Locked <─> Checkpointing ─> Away
    ///                       ^          Unlocking ─┘│  ^        Restoring ────┘ │
    ///                       │                   Parking      (nothing parked)  │
    ///                       │                      v                           │
    ///                       └── Unparking ────── Parked <─> Checkpointing ─> Away
    ///                                             └──────── Restoring ─────────┘
    /// ```
    pub enum Phase {
        /// Calls go through.
        Open = 0,
        /// New calls wait; calls in progress are being waited for.
        Closing = 1,
        /// New calls wait; none is in progress.
        Closed = 2,
        /// The driver's lock call is running.
        Locking = 3,
        /// The driver holds the process locked.
        Locked = 4,
        /// The driver's checkpoint call is running.
        Checkpointing = 5,
        /// The GPU state is in host memory.
        Checkpointed = 6,
        /// The driver's restore call is running.
        Restoring = 7,
        /// The driver's unlock call is running.
        Unlocking = 8,
        /// The agent copies device memory to host memory.
        CopyingOut = 9,
        /// Device memory is in host memory, its addresses are kept; the context is on the device.
        CopiedOut = 10,
        /// The agent copies the memory back.
        CopyingIn = 11,
    }
}

impl Phase {
    /// Whether memory of the process is off the device, so that its return takes VRAM.
    #[must_use]
    pub const fn is_offloaded(self) -> bool {
        matches!(self, Phase::Checkpointed | Phase::CopiedOut)
    }
}

wire_enum! {
    /// How the memory of a process leaves its device.
    pub enum Engine {
        /// All of it through the driver's checkpoint. Allocations are left alone.
        Checkpoint = 0,
        /// Big allocations are copied by the agent; the context stays.
        Copy = 1,
        /// Big allocations are copied by the agent, the driver's checkpoint takes the rest.
        Full = 2,
    }
}

impl Engine {
    /// The engine that a word of configuration means, if it is one.
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

/// What is to be known of how the process can be moved, as a bit set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessFlags(pub u32);

impl ProcessFlags {
    /// `cuIpcGetMemHandle` was asked about memory that the agent carries, and failed.
    pub const IPC_REFUSED: ProcessFlags = ProcessFlags(1);
    /// It has memory of a copier's making: a checkpoint without a copy before is refused. Goes
    /// when that memory goes.
    pub const IMPORTED: ProcessFlags = ProcessFlags(1 << 1);
    /// When it was copied out last, no copier could have brought it home: what it has is not of
    /// that kind. Goes when that has changed.
    pub const NO_COPIER: ProcessFlags = ProcessFlags(1 << 2);
    /// What it has handed to a copier is not copied: it is on the device, whatever its phase. Goes
    /// when it is copied, or taken back.
    pub const EXPORTED_TO_COPIER: ProcessFlags = ProcessFlags(1 << 4);
    /// Its library and its driver can bring it back on another GPU.
    pub const MOVABLE: ProcessFlags = ProcessFlags(1 << 3);
    /// The driver shows it one GPU: it never has memory on several.
    pub const ONE_GPU: ProcessFlags = ProcessFlags(1 << 5);

    /// Whether any bit of `other` is set.
    #[must_use]
    pub const fn intersects(self, other: ProcessFlags) -> bool {
        self.0 & other.0 != 0
    }
}
