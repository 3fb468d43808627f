//! Words of configuration and annotations that choose between a few values.

use affinode_proto::wire;
use serde::Deserialize;

/// When a container is offloaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// When it is idle, if its GPUs are not oversubscribed or a container has just started;
    /// otherwise when a waiter needs its VRAM.
    Auto,
    /// As soon as it is idle.
    Eager,
    /// When it is idle and a waiter needs its VRAM.
    Pressure,
    /// When an operator or a program requests it.
    Manual,
    /// Never, and not by request either.
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

/// How the keep-alive is found: the time without use that makes a container idle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KeepAlive {
    /// From its pauses so far; the idle timeout is the maximum.
    Learned,
    /// It is the idle timeout.
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

/// What an allocation does that finds no VRAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnOom {
    /// It fails, as it would without Affinode.
    Fail,
    /// It waits until neighbours are evicted, or its timeout is over.
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

/// How a container is restored when its VRAM is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Restore {
    /// It waits until neighbours that are not in use are evicted.
    Queue,
    /// It is served before others of its priority and frees VRAM from neighbours in use: movable
    /// ones are offloaded, processes of the others are ended.
    Immediate,
    /// Of a node or namespace: `queue`, and `immediate` for containers whose annotation says so.
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

/// How a container's memory leaves the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// The driver's checkpoint takes everything.
    Checkpoint,
    /// The library copies big allocations at bus speed; the context stays on the GPU.
    Copy,
    /// The library copies big allocations; the driver's checkpoint takes the rest.
    Full,
    /// Like `full`, but the context stays on the GPU where its measured cost says so.
    Auto,
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

    /// The engine that the library is told.
    #[must_use]
    pub fn wire(self) -> wire::Engine {
        match self {
            Engine::Checkpoint => wire::Engine::Checkpoint,
            Engine::Copy => wire::Engine::Copy,
            Engine::Full | Engine::Auto => wire::Engine::Full,
        }
    }
}
