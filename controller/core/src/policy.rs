//! The effective policy of a container. A value of a container's annotation replaces that of the
//! namespace rule, which replaces that of the node. An invalid annotation is ignored with a warning
//! that names the accepted values.

use std::collections::BTreeMap;

pub use super::policy_words::{Engine, KeepAlive, Mode, OnOom, Restore, WakeOn};
use super::{Millis, history::KeepAliveTarget, window::Window};

/// The effective policy of one container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// When the container is offloaded.
    pub mode: Mode,
    /// Time without use after which the container is idle, in milliseconds. If the keep-alive is
    /// learned, the maximum of that time.
    pub idle_timeout_ms: Millis,
    /// Time that the container stays resident after a restore, in milliseconds.
    pub minimum_residency_ms: Millis,
    /// Priority in the queue, -1000 to 1000. The highest is served first.
    pub priority: i32,
    /// Whether the container's keep-alive is learned or fixed.
    pub keep_alive: KeepAlive,
    /// Cost of one wake, as a time in milliseconds: holding the idle container's VRAM for this time
    /// costs as much as one wake.
    pub wake_cost_ms: Millis,
    /// Whether the container is prewoken before a call that its history makes likely.
    pub prewake: bool,
    /// The events that restore the container: calls, or calls and connections.
    pub wake_on: WakeOn,
    /// How the container's restore gets VRAM that other containers hold.
    pub restore: Restore,
    /// Whether an allocation that finds no VRAM fails or waits.
    pub on_oom: OnOom,
    /// Maximum time for which an allocation waits for VRAM, in milliseconds.
    pub on_oom_timeout_ms: Millis,
    /// The way in which the container's memory leaves the GPU.
    pub engine: Engine,
    /// Whether the container's host copy is retained after a restore.
    pub retain_host_copy: bool,
    /// Whether a restore verifies that copied memory is unchanged.
    pub checksum: bool,
    /// Whether offloaded memory of the container is stored once if other containers of its
    /// namespace have the same content.
    pub dedup: bool,
    /// Whether host memory is prefaulted while the container is idle.
    pub prefault: bool,
    /// Whether the container may be restored on another GPU if its own is full.
    pub allow_gpu_migration: bool,
    /// VRAM in bytes below which the container is not offloaded.
    pub minimum_vram_bytes: u64,
    /// Times of the week during which the container is offloaded when idle.
    pub offload_window: Window,
}

impl Policy {
    /// The objective of the learned keep-alive. `None`: the keep-alive is fixed.
    #[must_use]
    pub fn keep_alive_target(&self) -> Option<KeepAliveTarget> {
        (self.keep_alive == KeepAlive::Learned).then_some(KeepAliveTarget {
            wake_cost_ms: self.wake_cost_ms,
            at_most_ms: self.idle_timeout_ms,
        })
    }
}

impl Default for Policy {
    fn default() -> Policy {
        Policy {
            mode: Mode::Auto,
            idle_timeout_ms: 300_000,
            minimum_residency_ms: 10_000,
            priority: 0,
            keep_alive: KeepAlive::Learned,
            wake_cost_ms: 34_000,
            prewake: false,
            wake_on: WakeOn::Call,
            restore: Restore::Queue,
            on_oom: OnOom::Fail,
            on_oom_timeout_ms: 120_000,
            engine: Engine::Auto,
            retain_host_copy: false,
            checksum: false,
            dedup: false,
            prefault: false,
            allow_gpu_migration: false,
            minimum_vram_bytes: 0,
            offload_window: Window::default(),
        }
    }
}

/// The rule of a namespace. If a field is `None`, the node's value applies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rule {
    /// The Kubernetes namespace (or containerd's, outside Kubernetes).
    pub namespace: String,
    /// Replaces the mode, if set.
    pub mode: Option<Mode>,
    /// Replaces the idle timeout.
    pub idle_timeout_ms: Option<Millis>,
    /// Replaces the minimum residency.
    pub minimum_residency_ms: Option<Millis>,
    /// Replaces the priority, if set.
    pub priority: Option<i32>,
    /// Replaces `keep_alive`, if set.
    pub keep_alive: Option<KeepAlive>,
    /// Replaces the cost of a wake.
    pub wake_cost_ms: Option<Millis>,
    /// Replaces `prewake`, if set.
    pub prewake: Option<bool>,
    /// Replaces `wake_on`, if set.
    pub wake_on: Option<WakeOn>,
    /// Replaces `restore`, if set.
    pub restore: Option<Restore>,
    /// Replaces `on_oom`, if set.
    pub on_oom: Option<OnOom>,
    /// Replaces the maximum wait of an allocation.
    pub on_oom_timeout_ms: Option<Millis>,
    /// Replaces the engine, if set.
    pub engine: Option<Engine>,
    /// Replaces `retain_host_copy`, if set.
    pub retain_host_copy: Option<bool>,
    /// Replaces `checksum`, if set.
    pub checksum: Option<bool>,
    /// Replaces `dedup`, if set.
    pub dedup: Option<bool>,
    /// Replaces `prefault`, if set.
    pub prefault: Option<bool>,
    /// Replaces `allow_gpu_migration`, if set.
    pub allow_gpu_migration: Option<bool>,
    /// Replaces `minimum_vram_bytes`, if set.
    pub minimum_vram_bytes: Option<u64>,
    /// Replaces the offload window.
    pub offload_window: Option<Window>,
}

/// Values of the node, and rules of namespaces.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Policies {
    /// Policy of a container that has neither a rule nor annotations.
    pub node: Policy,
    /// Source of each of the node's values, by name: a file or a variable. A value without a source
    /// is the default.
    pub origins: BTreeMap<String, String>,
    /// Rules of namespaces. The first rule that names the container's namespace applies.
    pub rules: Vec<Rule>,
}

/// Maximum of `minimum_vram_mib`: a tebibyte.
pub const MAX_VRAM_MIB: u64 = 1 << 20;
/// Maximum idle timeout: a year.
const MAX_TIMEOUT_MS: Millis = 366 * 24 * 3600 * 1000;

impl Policies {
    /// The effective policy of a container, and one warning per invalid annotation.
    #[must_use]
    pub fn resolve(
        &self,
        namespace: &str,
        annotations: &BTreeMap<String, String>,
    ) -> (Policy, Vec<String>) {
        let mut policy = self.before_annotations(namespace);
        let mut warnings = Vec::new();
        // `latency-sensitive` is applied last, so that it replaces what other annotations set.
        let (last, first): (Vec<_>, Vec<_>) =
            annotations.iter().partition(|(name, _)| *name == LATENCY_SENSITIVE);
        for (name, value) in first.into_iter().chain(last) {
            if let Err(accepted) = apply(&mut policy, name, value) {
                let shown: String = value.chars().take(80).collect();
                warnings.push(format!("annotation {name}={shown:?} is ignored: {accepted}"));
            }
        }
        if policy.restore == Restore::ByAnnotation {
            policy.restore = Restore::Queue;
        }
        (policy, warnings)
    }

    /// The policy that results from node and namespace, without annotations.
    #[must_use]
    pub fn before_annotations(&self, namespace: &str) -> Policy {
        let mut policy = self.node.clone();
        if let Some(rule) = self.rule(namespace) {
            policy.mode = rule.mode.unwrap_or(policy.mode);
            policy.idle_timeout_ms = rule.idle_timeout_ms.unwrap_or(policy.idle_timeout_ms);
            policy.minimum_residency_ms =
                rule.minimum_residency_ms.unwrap_or(policy.minimum_residency_ms);
            policy.priority = rule.priority.unwrap_or(policy.priority);
            policy.keep_alive = rule.keep_alive.unwrap_or(policy.keep_alive);
            policy.wake_cost_ms = rule.wake_cost_ms.unwrap_or(policy.wake_cost_ms);
            policy.prewake = rule.prewake.unwrap_or(policy.prewake);
            policy.wake_on = rule.wake_on.unwrap_or(policy.wake_on);
            policy.restore = rule.restore.unwrap_or(policy.restore);
            policy.on_oom = rule.on_oom.unwrap_or(policy.on_oom);
            policy.on_oom_timeout_ms = rule.on_oom_timeout_ms.unwrap_or(policy.on_oom_timeout_ms);
            policy.engine = rule.engine.unwrap_or(policy.engine);
            policy.retain_host_copy = rule.retain_host_copy.unwrap_or(policy.retain_host_copy);
            policy.checksum = rule.checksum.unwrap_or(policy.checksum);
            policy.dedup = rule.dedup.unwrap_or(policy.dedup);
            policy.prefault = rule.prefault.unwrap_or(policy.prefault);
            policy.allow_gpu_migration =
                rule.allow_gpu_migration.unwrap_or(policy.allow_gpu_migration);
            policy.minimum_vram_bytes =
                rule.minimum_vram_bytes.unwrap_or(policy.minimum_vram_bytes);
            policy.offload_window = rule.offload_window.clone().unwrap_or(policy.offload_window);
        }
        policy
    }

    /// Whether the node or any namespace allows the restore policy `immediate`.
    #[must_use]
    pub fn may_be_immediate(&self) -> bool {
        let rules = self.rules.iter().filter_map(|rule| rule.restore);
        std::iter::once(self.node.restore).chain(rules).any(|restore| restore != Restore::Queue)
    }

    /// The rule for a namespace, if there is one.
    #[must_use]
    pub fn rule(&self, namespace: &str) -> Option<&Rule> {
        self.rules.iter().find(|rule| rule.namespace == namespace)
    }
}

/// Annotation that disables offloads, for a container whose clients cannot wait for a restore.
pub(super) const LATENCY_SENSITIVE: &str = "affinode.io/latency-sensitive";

/// Reason why a value of a policy is invalid: what would be accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidValue {
    /// The value is not one of the accepted words, which are listed here.
    #[error("accepted: {}", .0.join(", "))]
    Word(Vec<&'static str>),
    /// The value does not have the accepted form, which is described here.
    #[error("accepted: {0}")]
    Form(&'static str),
    /// The operator does not let containers choose this value.
    #[error("accepted here: {0}")]
    NotPermitted(&'static str),
    /// No annotation has this name.
    #[error(
        "no such annotation; accepted: offload, idle-timeout, priority, keep-alive, prewake, wake-on, latency-sensitive, engine, retain-host-copy, checksum, dedup, prefault, allow-gpu-migration, restore, on-oom, on-oom-timeout, minimum-vram-mib, offload-window, inject"
    )]
    Name,
}

/// Applies one annotation to a policy.
///
/// # Errors
/// [`InvalidValue`]: the annotation or its value is invalid. The policy is as before.
pub fn apply(policy: &mut Policy, name: &str, value: &str) -> Result<(), InvalidValue> {
    match name {
        "affinode.io/offload" => {
            policy.mode = word(value, &Mode::WORDS)?;
        }
        "affinode.io/idle-timeout" => policy.idle_timeout_ms = duration_ms(value)?,
        "affinode.io/priority" => {
            policy.priority = value
                .parse()
                .ok()
                .filter(|p| (-1000..=1000).contains(p))
                .ok_or(InvalidValue::Form("a whole number from -1000 to 1000"))?;
        }
        "affinode.io/keep-alive" => policy.keep_alive = word(value, &KeepAlive::WORDS)?,
        "affinode.io/prewake" => policy.prewake = word(value, &BOOLS)?,
        "affinode.io/wake-on" => policy.wake_on = word(value, &WakeOn::WORDS)?,
        LATENCY_SENSITIVE => {
            if word(value, &BOOLS)? {
                policy.mode = Mode::Off;
            }
        }
        "affinode.io/engine" => policy.engine = word(value, &Engine::WORDS)?,
        "affinode.io/retain-host-copy" => policy.retain_host_copy = word(value, &BOOLS)?,
        "affinode.io/checksum" => policy.checksum = word(value, &BOOLS)?,
        "affinode.io/dedup" => policy.dedup = dedup(policy.dedup, value)?,
        "affinode.io/prefault" => policy.prefault = word(value, &BOOLS)?,
        "affinode.io/allow-gpu-migration" => policy.allow_gpu_migration = word(value, &BOOLS)?,
        "affinode.io/restore" => policy.restore = restore(policy.restore, value)?,
        "affinode.io/on-oom" => policy.on_oom = word(value, &OnOom::WORDS)?,
        "affinode.io/on-oom-timeout" => policy.on_oom_timeout_ms = duration_ms(value)?,
        "affinode.io/minimum-vram-mib" => {
            let mib: Option<u64> = value.parse().ok().filter(|mib| *mib <= MAX_VRAM_MIB);
            let accepted = InvalidValue::Form("a number of MiB, up to 1048576");
            policy.minimum_vram_bytes = mib.ok_or(accepted)? << 20;
        }
        "affinode.io/offload-window" => policy.offload_window = value.parse()?,
        "affinode.io/inject" => word(value, &[("auto", ()), ("true", ()), ("false", ())])?,
        _ => return Err(InvalidValue::Name),
    }
    Ok(())
}

/// The restore policy that an annotation selects. `immediate` may end processes of other
/// containers, so it is accepted only if an operator allows annotations to select it.
fn restore(operators: Restore, value: &str) -> Result<Restore, InvalidValue> {
    match word(value, &Restore::WORDS)? {
        Restore::Immediate if operators == Restore::Queue => Err(InvalidValue::NotPermitted(
            "queue; an operator can allow immediate with policy.restore = \"by-annotation\"",
        )),
        chosen => Ok(chosen),
    }
}

/// Whether memory is deduplicated. Deduplication costs the node CPU time, so an annotation can only
/// disable it.
fn dedup(operators: bool, value: &str) -> Result<bool, InvalidValue> {
    match word(value, &BOOLS)? {
        true if !operators => {
            Err(InvalidValue::NotPermitted("false; an operator can allow true with policy.dedup"))
        }
        chosen => Ok(chosen),
    }
}

const BOOLS: [(&str, bool); 2] = [("true", true), ("false", false)];

fn word<T: Copy>(value: &str, words: &[(&'static str, T)]) -> Result<T, InvalidValue> {
    let meaning = words.iter().find(|(word, _)| *word == value).map(|(_, meaning)| *meaning);
    meaning.ok_or_else(|| InvalidValue::Word(words.iter().map(|(word, _)| *word).collect()))
}

/// Parses a duration such as `90s`, `5m` or `1h 30m`.
///
/// # Errors
/// [`InvalidValue`]: the duration is invalid.
pub fn duration_ms(value: &str) -> Result<Millis, InvalidValue> {
    let accepted = InvalidValue::Form("a duration from 1ms to 366days, such as 90s, 5m or 1h");
    humantime::parse_duration(value)
        .ok()
        .and_then(|duration| Millis::try_from(duration.as_millis()).ok())
        .filter(|ms| (1..=MAX_TIMEOUT_MS).contains(ms))
        .ok_or(accepted)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn annotations(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(k, v)| (format!("affinode.io/{k}"), (*v).to_owned())).collect()
    }

    #[test]
    fn annotation_before_rule_before_node() {
        let policies = Policies {
            node: Policy::default(),
            origins: BTreeMap::new(),
            rules: vec![Rule {
                namespace: "ml".into(),
                mode: Some(Mode::Pressure),
                priority: Some(5),
                ..Rule::default()
            }],
        };
        let (policy, warnings) =
            policies.resolve("ml", &annotations(&[("offload", "manual"), ("idle-timeout", "90s")]));
        assert_eq!(warnings, Vec::<String>::new());
        assert_eq!(
            (policy.mode, policy.idle_timeout_ms, policy.priority),
            (Mode::Manual, 90_000, 5)
        );
        assert_eq!(policies.resolve("other", &annotations(&[])).0, Policy::default());
    }

    #[test]
    fn prefault_annotation_is_read() {
        let prepare =
            |value| Policies::default().resolve("x", &annotations(&[("prefault", value)]));
        assert!(prepare("true").0.prefault && prepare("true").1.is_empty());
        let (policy, warnings) = prepare("often");
        assert!(!policy.prefault && warnings[0].contains("accepted: true, false"), "{warnings:?}");
    }

    #[test]
    fn dedup_is_set_by_node_rule_or_annotation() {
        let policies = Policies {
            rules: vec![Rule { namespace: "ml".into(), dedup: Some(true), ..Rule::default() }],
            ..Policies::default()
        };
        let dedup = |namespace, says: &[(&str, &str)]| {
            let (policy, warnings) = policies.resolve(namespace, &annotations(says));
            (policy.dedup, warnings.len())
        };
        assert_eq!(dedup("x", &[]), (false, 0));
        assert_eq!(dedup("x", &[("dedup", "true")]), (false, 1), "not for a container to say");
        assert_eq!(dedup("ml", &[]), (true, 0));
        assert_eq!(dedup("ml", &[("dedup", "true")]), (true, 0));
        assert_eq!(dedup("ml", &[("dedup", "false")]), (false, 0));
        assert_eq!(dedup("ml", &[("dedup", "1")]), (true, 1));
        let (_, warnings) = policies.resolve("x", &annotations(&[("colour", "red")]));
        assert!(warnings[0].contains("dedup"), "it is named among those accepted: {warnings:?}");
    }

    #[test]
    fn latency_sensitive_overrides_mode() {
        let both = annotations(&[("latency-sensitive", "true"), ("offload", "eager")]);
        assert_eq!(Policies::default().resolve("x", &both).0.mode, Mode::Off);
    }

    #[test]
    fn immediate_needs_operator_permission() {
        let resolve = |node, says| {
            let policies = Policies {
                node: Policy { restore: node, ..Policy::default() },
                ..Policies::default()
            };
            let (policy, warnings) = policies.resolve("x", &annotations(says));
            (policy.restore, warnings.len())
        };
        let immediate: &[(&str, &str)] = &[("restore", "immediate")];
        assert_eq!(resolve(Restore::Queue, immediate), (Restore::Queue, 1));
        assert_eq!(resolve(Restore::ByAnnotation, immediate), (Restore::Immediate, 0));
        assert_eq!(resolve(Restore::ByAnnotation, &[]), (Restore::Queue, 0));
        assert_eq!(resolve(Restore::Immediate, &[]), (Restore::Immediate, 0));
        assert_eq!(resolve(Restore::Immediate, &[("restore", "queue")]), (Restore::Queue, 0));
        assert_eq!(resolve(Restore::ByAnnotation, &[("restore", "by-annotation")]).1, 1);
    }

    #[test]
    fn invalid_annotation_is_named_and_ignored() {
        let bad = annotations(&[
            ("offload", "soon"),
            ("idle-timeout", "-1"),
            ("priority", "9999"),
            ("colour", "red"),
        ]);
        let (policy, warnings) = Policies::default().resolve("x", &bad);
        assert_eq!(policy, Policy::default());
        assert_eq!(warnings.len(), 4);
        assert!(
            warnings.iter().any(|w| w.contains("offload=\"soon\"")
                && w.contains("auto, eager, pressure, manual, off")),
            "{warnings:?}"
        );
    }
}
