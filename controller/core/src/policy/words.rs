//! Settings with a few values, and the word for each value in configuration and annotations.

use affinode_proto::wire;
use serde::Deserialize;

/// When a container is offloaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// When the container is idle, if its GPUs are not oversubscribed or it has just started.
    /// Otherwise when it is idle and a waiter needs its VRAM.
    Auto,
    /// As soon as the container is idle.
    Eager,
    /// When the container is idle and a waiter needs its VRAM.
    Pressure,
    /// When an operator or a program requests the offload.
    Manual,
    /// Never, not even by request.
    Off,
}

impl Mode {
    pub(super) const WORDS: [(&'static str, Mode); 5] = [
        ("auto", Mode::Auto),
        ("eager", Mode::Eager),
        ("pressure", Mode::Pressure),
        ("manual", Mode::Manual),
        ("off", Mode::Off),
    ];

    /// The word for the mode in configuration, annotations and output.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Mode::Auto => "auto",
            Mode::Eager => "eager",
            Mode::Pressure => "pressure",
            Mode::Manual => "manual",
            Mode::Off => "off",
        }
    }
}

/// Whether the keep-alive, the time without use after which a container is idle, is learned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KeepAlive {
    /// Learned from the container's pauses. The idle timeout is the maximum.
    Learned,
    /// Fixed: the keep-alive is the idle timeout.
    Fixed,
}

impl KeepAlive {
    pub(super) const WORDS: [(&'static str, KeepAlive); 2] =
        [("learned", KeepAlive::Learned), ("fixed", KeepAlive::Fixed)];

    /// The word for the keep-alive in configuration, annotations and output.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            KeepAlive::Learned => "learned",
            KeepAlive::Fixed => "fixed",
        }
    }
}

/// Behaviour of an allocation that finds no VRAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnOom {
    /// The allocation fails, as it would without Affinode.
    Fail,
    /// The allocation waits until neighbours are evicted or its timeout expires.
    Wait,
}

impl OnOom {
    pub(super) const WORDS: [(&'static str, OnOom); 2] =
        [("fail", OnOom::Fail), ("wait", OnOom::Wait)];

    /// The word for the behaviour in configuration, annotations and output.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            OnOom::Fail => "fail",
            OnOom::Wait => "wait",
        }
    }
}

/// The event that restores a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WakeOn {
    /// A CUDA call of the container.
    Call,
    /// A call, or a connection to a socket of the container's network if the VRAM is free without
    /// an eviction.
    Connection,
}

impl WakeOn {
    pub(super) const WORDS: [(&'static str, WakeOn); 2] =
        [("call", WakeOn::Call), ("connection", WakeOn::Connection)];

    /// The word for the event in configuration, annotations and output.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            WakeOn::Call => "call",
            WakeOn::Connection => "connection",
        }
    }
}

/// How a restore gets VRAM that other containers hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Restore {
    /// The container waits until neighbours that are not in use are evicted.
    Queue,
    /// The container is served before others of its priority, and takes VRAM of neighbours in use.
    /// Neighbours that can be moved are offloaded. Processes of neighbours that cannot be moved are
    /// ended.
    Immediate,
    /// For nodes and namespaces only: `immediate` for containers whose annotation requests it,
    /// `queue` for all others.
    ByAnnotation,
}

impl Restore {
    pub(super) const WORDS: [(&'static str, Restore); 2] =
        [("queue", Restore::Queue), ("immediate", Restore::Immediate)];

    /// The word for the restore policy in configuration, annotations and output.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Restore::Queue => "queue",
            Restore::Immediate => "immediate",
            Restore::ByAnnotation => "by-annotation",
        }
    }
}

/// The way in which a container's memory leaves the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// The library copies large allocations. The driver's checkpoint takes the remaining memory
    /// when a waiter needs it.
    Auto,
    /// The library copies large allocations at bus speed. The remaining memory stays on the GPU.
    Copy,
    /// The library copies large allocations. Then the driver's checkpoint takes the remaining
    /// memory.
    Full,
    /// The driver's checkpoint takes everything.
    Checkpoint,
}

impl Engine {
    pub(super) const WORDS: [(&'static str, Engine); 4] = [
        ("auto", Engine::Auto),
        ("checkpoint", Engine::Checkpoint),
        ("copy", Engine::Copy),
        ("full", Engine::Full),
    ];

    /// The word for the engine in configuration, annotations and output.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Engine::Checkpoint => "checkpoint",
            Engine::Copy => "copy",
            Engine::Full => "full",
            Engine::Auto => "auto",
        }
    }

    /// The engine in messages to the library.
    #[must_use]
    pub fn wire(self) -> wire::Engine {
        match self {
            Engine::Checkpoint => wire::Engine::Checkpoint,
            Engine::Copy => wire::Engine::Copy,
            Engine::Full | Engine::Auto => wire::Engine::Full,
        }
    }
}
