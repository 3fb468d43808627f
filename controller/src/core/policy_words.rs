//! The words of configuration and annotations that choose between a few things.

use affinode_proto::wire;
use serde::Deserialize;

/// When a container is offloaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// As soon as it is idle where there is room for everybody, or for one who has just come;
    /// else when somebody needs its VRAM.
    Auto,
    /// As soon as it is idle.
    Eager,
    /// When it is idle and somebody needs its VRAM.
    Pressure,
    /// When a person or program asks.
    Manual,
    /// Never.
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

/// How the time without use that makes a container idle is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KeepAlive {
    /// From its pauses so far: the idle timeout is the most.
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

/// What becomes of an allocation that finds no memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnOom {
    /// It fails, as it would without us.
    Fail,
    /// It waits until neighbours have made room, or its time is over.
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

/// What brings a container back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WakeOn {
    /// A CUDA call.
    Call,
    /// A connection that comes in at a socket of its network already, where there is room to
    /// spare.
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

/// How a container comes home when its room is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Restore {
    /// It waits until neighbours that are not in use have made room.
    Queue,
    /// It goes before others of its priority, and takes its room from neighbours that are in
    /// use: those that can be moved are moved, of the others processes are ended.
    Immediate,
    /// Of the node or a namespace: `queue`, and whose annotation says so `immediate`.
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

/// How memory leaves the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// Through the driver's checkpoint, all of it.
    Checkpoint,
    /// Big allocations are copied at the speed of the bus; the context stays on the device.
    Copy,
    /// Big allocations are copied, the driver's checkpoint takes the rest.
    Full,
    /// The best that is known to be sound: fast. What cannot be copied goes with the rest.
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

    /// What the library is told.
    #[must_use]
    pub fn wire(self) -> wire::Engine {
        match self {
            Engine::Checkpoint => wire::Engine::Checkpoint,
            Engine::Copy => wire::Engine::Copy,
            Engine::Full | Engine::Auto => wire::Engine::Full,
        }
    }
}
