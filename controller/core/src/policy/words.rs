//! Settings with a few values, and the word for each value in configuration, annotations and output.

use affinode_proto::wire::Engine;
use serde::{Deserialize, Deserializer, de::Error as _};

use super::{
    InvalidValue,
    format::{Format, word},
};

/// A value that a file has as a word.
#[derive(Clone, Copy, Debug)]
pub struct Word<T>(T);

/// Generates enums, with one word for each variant, and their format. Words after `annotations` may
/// be written in annotations; all words may be written in files.
macro_rules! words {
    ($(
        $(#[$doc:meta])*
        pub enum $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $word:literal,)* }
        annotations { $($annotated:ident),* }
    )*) => { $(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name { $($(#[$variant_doc])* $variant,)* }

        impl $name {
            /// The word for the value in configuration, annotations and output.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self { $($name::$variant => $word,)* }
            }
        }

        format_of_words! { $name { $($variant = $word,)* } annotations { $($annotated),* } }
    )* };
}

macro_rules! format_of_words {
    ($name:ident { $($variant:ident = $word:literal,)* } annotations { $($annotated:ident),* }) => {
        impl Format for $name {
            type Value = $name;
            type Written = Word<$name>;

            fn parse(text: &str) -> Result<$name, InvalidValue> {
                word(text, &[$(($name::$annotated.as_str(), $name::$annotated)),*])
            }

            fn accept(written: &Word<$name>) -> Result<$name, InvalidValue> {
                Ok(written.0)
            }

            fn shown(value: &$name) -> String {
                value.as_str().to_owned()
            }
        }

        impl<'de> Deserialize<'de> for Word<$name> {
            fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Word<$name>, D::Error> {
                match String::deserialize(from)?.as_str() {
                    $($word => Ok(Word($name::$variant)),)*
                    other => Err(D::Error::unknown_variant(other, &[$($word),*])),
                }
            }
        }
    };
}

words! {
    /// When a container is offloaded.
    pub enum Mode {
        /// When the container is idle, if its GPUs are not oversubscribed or it has just started.
        /// Otherwise when it is idle and a waiter needs its VRAM.
        Auto = "auto",
        /// As soon as the container is idle.
        Eager = "eager",
        /// When the container is idle and a waiter needs its VRAM.
        Pressure = "pressure",
        /// When an operator or a program requests the offload.
        Manual = "manual",
        /// Never, not even by request.
        Off = "off",
    }
    annotations { Auto, Eager, Pressure, Manual, Off }

    /// Whether the keep-alive, the time without use after which a container is idle, is learned.
    pub enum KeepAlive {
        /// Learned from the container's pauses. The idle timeout is the maximum.
        Learned = "learned",
        /// Fixed: the keep-alive is the idle timeout.
        Fixed = "fixed",
    }
    annotations { Learned, Fixed }

    /// Behaviour of an allocation that finds no VRAM.
    pub enum OnOom {
        /// The allocation fails, as it would without Affinode.
        Fail = "fail",
        /// The allocation waits until neighbours are evicted or its timeout expires.
        Wait = "wait",
    }
    annotations { Fail, Wait }

    /// The event that restores a container.
    pub enum WakeOn {
        /// A CUDA call of the container.
        Call = "call",
        /// A call, or a connection to a socket of the container's network if the VRAM is free without
        /// an eviction.
        Connection = "connection",
    }
    annotations { Call, Connection }

    /// How a restore gets VRAM that other containers hold.
    pub enum Restore {
        /// The container waits until neighbours that are not in use are evicted.
        Queue = "queue",
        /// The container is served before others of its priority, and takes VRAM of neighbours in use.
        /// Neighbours that can be moved are offloaded. Processes of neighbours that cannot be moved are
        /// ended.
        Immediate = "immediate",
        /// For nodes and namespaces only: `immediate` for containers whose annotation requests it,
        /// `queue` for all others.
        ByAnnotation = "by-annotation",
    }
    annotations { Queue, Immediate }
}

format_of_words! {
    Engine { Auto = "auto", Copy = "copy", Full = "full", Checkpoint = "checkpoint", }
    annotations { Auto, Checkpoint, Copy, Full }
}
