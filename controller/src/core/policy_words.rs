//! Settings with a few values, and the word for each value in configuration and annotations.

use affinode_proto::wire;
use serde::Deserialize;

/// When a container is offloaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// When it is idle and its GPUs are not oversubscribed, or a container has just started.
    /// Otherwise when a waiter needs its VRAM.
    Auto,
    /// As soon as it is idle.
    Eager,
    /// When it is idle and a waiter needs its VRAM.
    Pressure,
    /// When an operator or a program requests it.
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

    /// The word for it in configuration, annotations and output.
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

/// Source of the keep-alive, which is the time without use after which a container is idle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KeepAlive {
    /// Learned from the container's pauses. The idle timeout is the maximum.
    Learned,
    /// Fixed: it is the idle timeout.
    Fixed,
}

impl KeepAlive {
    pub(super) const WORDS: [(&'static str, KeepAlive); 2] =
        [("learned", KeepAlive::Learned), ("fixed", KeepAlive::Fixed)];

    /// The word for it in configuration, annotations and output.
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
    /// It fails, as it would without Affinode.
    Fail,
    /// It waits until neighbours are evicted or its timeout expires.
    Wait,
}

impl OnOom {
    pub(super) const WORDS: [(&'static str, OnOom); 2] =
        [("fail", OnOom::Fail), ("wait", OnOom::Wait)];

    /// The word for it in configuration, annotations and output.
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
    /// Also a connection to a socket of its network, if VRAM is free without an eviction.
    Connection,
}

impl WakeOn {
    pub(super) const WORDS: [(&'static str, WakeOn); 2] =
        [("call", WakeOn::Call), ("connection", WakeOn::Connection)];

    /// The word for it in configuration, annotations and output.
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
    /// It waits until neighbours that are not in use are evicted.
    Queue,
    /// The container is served before others of its priority and frees VRAM from neighbours in use.
    /// Those that can be moved are offloaded; processes of the others are ended.
    Immediate,
    /// Only for a node or namespace: `immediate` for containers whose annotation requests it,
    /// `queue` for all others.
    ByAnnotation,
}

impl Restore {
    pub(super) const WORDS: [(&'static str, Restore); 2] =
        [("queue", Restore::Queue), ("immediate", Restore::Immediate)];

    /// The word for it in configuration, annotations and output.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Restore::Queue => "queue",
            Restore::Immediate => "immediate",
            Restore::ByAnnotation => "by-annotation",
        }
    }
}

/// The way a container's memory leaves the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// The library copies large allocations. The driver's checkpoint takes the rest when a waiter
    /// needs it.
    Auto,
    /// The library copies large allocations at bus speed. The rest stays on the GPU.
    Copy,
    /// The library copies large allocations. The driver's checkpoint takes the rest at once.
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

    /// The word for it in configuration, annotations and output.
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
