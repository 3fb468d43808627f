//! The settings of a policy, one entry for each setting. A macro generates from these entries the
//! policy, the section `[policy]` of the configuration file, the rules of namespaces and the
//! annotations. `affinode policy show` explains the values from the same entries. The descriptions
//! on the reference page come from `config/config.toml`.

use affinode_proto::annotations::{LATENCY_SENSITIVE, OFFLOAD};
use affinode_proto::wire::Engine;
use serde::Deserialize;

use super::{
    InvalidValue, annotated_dedup, annotated_disk_after, annotated_restore, annotated_vram_limit,
    format::{Duration, DurationOrNever, FileValue, Format, Mebibytes, Priority, Quantity},
    words::{KeepAlive, Mode, NoProgressAction, OnOom, Restore, WakeOn},
};
use crate::{victims::VictimRule, window::Window};

/// What `affinode policy show` and the parser of annotations need to know about one setting.
pub(crate) struct Setting {
    /// Name of the setting in configuration files.
    pub name: &'static str,
    /// Annotations of a container that set the setting.
    pub annotations: &'static [&'static str],
    /// Returns the value of the setting as configuration files write it.
    pub shown: fn(&Policy) -> String,
    /// Whether the rule of a namespace contains a value for this setting.
    pub is_ruled: fn(&NamespaceRule) -> bool,
    /// Parses the value of an annotation and sets it in the policy.
    pub annotate: fn(&mut Policy, &str) -> Result<(), InvalidValue>,
}

/// Generates the types of a policy from entries of the form `field: format = default, key,
/// [annotations]`. A function after `if` refuses values that the operator does not let annotations
/// set.
macro_rules! settings {
    ($(
        $(#[$doc:meta])*
        $field:ident: $format:ty = $default:expr, $key:literal, [$($annotation:expr),*]
        $(if $permitted:path)?;
    )*) => {
        /// The effective policy of one container.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct Policy {
            $($(#[$doc])* pub $field: <$format as Format>::Value,)*
        }

        impl Default for Policy {
            fn default() -> Policy {
                Policy { $($field: $default,)* }
            }
        }

        /// Section `[policy]` of the configuration file: when and how containers are offloaded and
        /// restored.
        #[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct PolicySection {
            $($(#[$doc])* #[serde(rename = $key)] pub $field: FileValue<$format>,)*
            /// Rule that decides which containers are evicted first when a waiter needs VRAM.
            pub victims: VictimRule,
            /// Rules `[[policy.namespace]]`. Each applies to one namespace.
            pub namespace: Vec<NamespaceRule>,
        }

        impl Default for PolicySection {
            fn default() -> PolicySection {
                PolicySection {
                    $($field: FileValue($default),)*
                    victims: VictimRule::default(),
                    namespace: Vec::new(),
                }
            }
        }

        impl PolicySection {
            /// Returns the policy of the node that this section defines.
            #[must_use]
            pub fn policy(&self) -> Policy {
                Policy { $($field: self.$field.0.clone(),)* }
            }
        }

        /// A rule for one namespace. A field that is `None` leaves the node's value unchanged.
        #[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct NamespaceRule {
            /// Name of the namespace in Kubernetes, or in containerd outside Kubernetes.
            pub name: String,
            $($(#[$doc])* #[serde(rename = $key)] pub $field: Option<FileValue<$format>>,)*
        }

        impl NamespaceRule {
            /// Sets in `policy` the values that the rule contains.
            pub(super) fn apply(&self, policy: &mut Policy) {
                $(if let Some(value) = &self.$field {
                    policy.$field.clone_from(&value.0);
                })*
            }
        }

        pub(crate) const SETTINGS: &[Setting] = &[$(
            Setting {
                name: $key,
                annotations: &[$($annotation),*],
                shown: |policy| <$format as Format>::shown(&policy.$field),
                is_ruled: |rule| rule.$field.is_some(),
                annotate: |policy, text| {
                    let chosen = <$format as Format>::parse(text)?;
                    $($permitted(&policy.$field, &chosen)?;)?
                    policy.$field = chosen;
                    Ok(())
                },
            },
        )*];
    };
}

settings! {
    /// The mode, which determines when the container may be offloaded.
    mode: Mode = Mode::Auto, "mode", [OFFLOAD, LATENCY_SENSITIVE];
    /// Time without use after which the container is idle, in milliseconds. If the time is learned
    /// (setting `keep_alive`), this value is its maximum.
    idle_timeout_ms: Duration = 300_000, "idle_timeout", ["affinode.io/idle-timeout"];
    /// Minimum time for which the container stays resident after a restore, in milliseconds.
    minimum_residency_ms: Duration = 1_000, "minimum_residency", [];
    /// Priority of the container in the queue for VRAM, -1000 to 1000. The highest is served first.
    priority: Priority = 0, "priority", ["affinode.io/priority"];
    /// Whether the keep-alive (the time without use after which the container is idle) is learned
    /// or fixed.
    keep_alive: KeepAlive = KeepAlive::Learned, "keep_alive", ["affinode.io/keep-alive"];
    /// Cost of one wake, expressed as a time in milliseconds. One wake costs as much as holding the
    /// idle container's VRAM for this time.
    wake_cost_ms: Duration = 34_000, "wake_cost", [];
    /// Whether the container is restored shortly before a CUDA call that its history makes likely.
    prewake: bool = false, "prewake", ["affinode.io/prewake"];
    /// The events that restore the container: CUDA calls, or CUDA calls and TCP connections.
    wake_on: WakeOn = WakeOn::Call, "wake_on", ["affinode.io/wake-on"];
    /// How the container's restore obtains VRAM that other containers hold.
    restore: Restore = Restore::Queue, "restore", ["affinode.io/restore"] if annotated_restore;
    /// Whether an allocation that finds no VRAM fails or waits.
    on_oom: OnOom = OnOom::Fail, "on_oom", ["affinode.io/on-oom"];
    /// Maximum time for which an allocation waits for VRAM, in milliseconds.
    on_oom_timeout_ms: Duration = 120_000, "on_oom_timeout", ["affinode.io/on-oom-timeout"];
    /// Time without progress after which a container that holds a GPU is reported, in milliseconds.
    no_progress_timeout_ms: Duration = 3_600_000, "no_progress_timeout",
    ["affinode.io/no-progress-timeout"];
    /// What happens to a container that holds a GPU and makes no progress.
    on_no_progress: NoProgressAction = NoProgressAction::Report, "on_no_progress",
    ["affinode.io/on-no-progress"];
    /// The engine: the method by which the container's memory is moved off the GPU and back.
    engine: Engine = Engine::Auto, "engine", ["affinode.io/engine"];
    /// Whether the copy of the container's GPU memory stays in host memory after a restore. The
    /// next offload then does not copy unchanged content again.
    retain_host_copy: bool = false, "retain_host_copy", ["affinode.io/retain-host-copy"];
    /// Whether a restore verifies that copied memory is unchanged.
    checksum: bool = false, "checksum", ["affinode.io/checksum"];
    /// Whether offloaded memory of the container is stored only once if other containers of its
    /// namespace have the same content.
    dedup: bool = false, "dedup", ["affinode.io/dedup"] if annotated_dedup;
    /// Whether host memory for the next offload is prefaulted (touched and registered) while the
    /// container is idle. The offload is then faster.
    prefault: bool = false, "prefault", ["affinode.io/prefault"];
    /// Time for which the container is offloaded before its content moves from the host pool to disk,
    /// in milliseconds. 0: never.
    disk_after_ms: DurationOrNever = 3_600_000, "disk_after", ["affinode.io/disk-after"]
    if annotated_disk_after;
    /// Whether the container may be restored on another GPU if its own GPU is full.
    allow_gpu_migration: bool = false, "allow_gpu_migration", ["affinode.io/allow-gpu-migration"];
    /// A container that holds less VRAM than this, in bytes, is not offloaded.
    minimum_vram_bytes: Mebibytes = 0, "minimum_vram_mib", ["affinode.io/minimum-vram-mib"];
    /// Limit of the container's VRAM on each GPU, in bytes. 0: there is no limit.
    vram_limit_bytes: Quantity = 0, "vram_limit", ["affinode.io/vram-limit"]
    if annotated_vram_limit;
    /// Times of the week during which the container may be offloaded as soon as it is idle. At
    /// other times, it stays resident until a waiter needs its VRAM.
    offload_window: Window = Window::default(), "offload_window", ["affinode.io/offload-window"];
}
