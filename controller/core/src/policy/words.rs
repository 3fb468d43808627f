//! Settings whose value is one of a few words. Each value has the same word in configuration,
//! annotations and output.

use affinode_proto::wire::Engine;
use serde::{Deserialize, Deserializer, de::Error as _};

use super::{
    InvalidValue,
    format::{Format, word},
};

/// A value that is written as a word in a configuration file.
#[derive(Clone, Copy, Debug)]
pub struct Word<T>(T);

/// Generates enums with one word for each variant, and the functions that parse and show these
/// words. Configuration files may contain all words. Annotations may contain only the words of the
/// variants after `annotations`.
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
            /// Returns the word that stands for this value in configuration, annotations and
            /// output.
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
    /// The mode of a container, which determines when it may be offloaded.
    pub enum Mode {
        /// Like `eager` while none of the container's GPUs is oversubscribed, and for 5 minutes
        /// after any container on the node has started. Like `pressure` at all other times.
        Auto = "auto",
        /// Offload as soon as the container is idle, even if no other container needs its VRAM.
        Eager = "eager",
        /// Offload only if the container is idle and another container needs its VRAM.
        Pressure = "pressure",
        /// Offload only at the request of an operator or a program.
        Manual = "manual",
        /// Never offload, not even at the request of an operator.
        Off = "off",
    }
    annotations { Auto, Eager, Pressure, Manual, Off }

    /// Whether the keep-alive (the time without use after which a container is idle) is learned or
    /// fixed.
    pub enum KeepAlive {
        /// The keep-alive is learned from the container's pauses. The idle timeout is its maximum.
        Learned = "learned",
        /// The keep-alive is always the idle timeout.
        Fixed = "fixed",
    }
    annotations { Learned, Fixed }

    /// What happens to an allocation that finds no VRAM.
    pub enum OnOom {
        /// The allocation fails, as it would without Affinode.
        Fail = "fail",
        /// The allocation waits until other containers on the GPU are evicted or its timeout
        /// expires.
        Wait = "wait",
    }
    annotations { Fail, Wait }

    /// What happens to a container that holds a GPU and makes no progress.
    pub enum NoProgressAction {
        /// The container is shown with the evidence, and continues.
        Report = "report",
        /// The container is shown, and its processes that use CUDA are ended.
        End = "end",
    }
    annotations { Report, End }

    /// The events that restore a container.
    pub enum WakeOn {
        /// CUDA calls of the container.
        Call = "call",
        /// CUDA calls of the container, and new TCP connections in its network namespace. A
        /// connection restores the container only if enough VRAM is free without an eviction.
        Connection = "connection",
    }
    annotations { Call, Connection }

    /// How a container's restore obtains VRAM that other containers hold.
    pub enum Restore {
        /// The container waits until other containers on its GPU are no longer in use and can be
        /// evicted.
        Queue = "queue",
        /// The container is served before waiters of the same or lower priority. It may take VRAM
        /// from containers that are in use on its GPU. Such a container is offloaded if that is
        /// possible. If it is not, its processes are ended.
        Immediate = "immediate",
        /// `immediate` for containers whose annotation requests it, `queue` for all others. Only
        /// nodes and namespaces can have this value.
        ByAnnotation = "by-annotation",
    }
    annotations { Queue, Immediate }
}

format_of_words! {
    Engine { Auto = "auto", Copy = "copy", Full = "full", Checkpoint = "checkpoint", }
    annotations { Auto, Checkpoint, Copy, Full }
}
