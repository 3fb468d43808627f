//! Determines the effective policy of a container. A value of a container's annotation replaces the
//! value of the namespace rule. A value of the namespace rule replaces the value of the node. An
//! invalid annotation is ignored with a warning that names the accepted values.

use std::collections::BTreeMap;

mod format;
mod settings;
mod words;

use self::format::Format;
pub(crate) use self::settings::{SETTINGS, Setting};
pub use self::{
    format::{FileValue, duration_ms},
    settings::{NamespaceRule, Policy, PolicySection},
    words::{KeepAlive, Mode, NoProgressAction, OnOom, Restore, WakeOn},
};
use super::{Millis, history::KeepAliveTarget};
use affinode_proto::annotations::{CLAIM, CLAIMED_VRAM, LATENCY_SENSITIVE};
pub use affinode_proto::wire::Engine;

impl Policy {
    /// The objective for learning the container's keep-alive (the time without use after which it
    /// is idle). `None`: the policy has a fixed keep-alive.
    #[must_use]
    pub fn keep_alive_target(&self) -> Option<KeepAliveTarget> {
        (self.keep_alive == KeepAlive::Learned).then_some(KeepAliveTarget {
            wake_cost_ms: self.wake_cost_ms,
            at_most_ms: self.idle_timeout_ms,
        })
    }
}

/// The policy values of the node, and the rules that replace some of these values for individual
/// namespaces.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Policies {
    /// Policy of a container for which no namespace rule and no annotation sets a value.
    pub node: Policy,
    /// Source of each value of the node: the file or environment variable that sets it. Key: name
    /// of the setting. A setting without an entry has its default.
    pub origins: BTreeMap<String, String>,
    /// Rules of namespaces. The first rule for a container's namespace applies.
    pub rules: Vec<NamespaceRule>,
}

impl Policies {
    /// Determines the effective policy of a container. Also returns one warning per invalid
    /// annotation.
    #[must_use]
    pub fn resolve(
        &self,
        namespace: &str,
        annotations: &BTreeMap<String, String>,
    ) -> (Policy, Vec<String>) {
        let mut policy = self.before_annotations(namespace);
        limit_to_claims(&mut policy, annotations);
        let mut warnings = Vec::new();
        // `latency-sensitive` is applied last, so that it replaces what other annotations set.
        let (last, first): (Vec<_>, Vec<_>) =
            annotations.iter().partition(|(name, _)| *name == LATENCY_SENSITIVE);
        let of_claims = |name: &str| name == CLAIMED_VRAM || name == CLAIM;
        let first = first.into_iter().filter(|(name, _)| !of_claims(name));
        for (name, value) in first.chain(last) {
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

    /// Determines the policy from the values of node and namespace, without annotations.
    #[must_use]
    pub fn before_annotations(&self, namespace: &str) -> Policy {
        let mut policy = self.node.clone();
        if let Some(rule) = self.rule(namespace) {
            rule.apply(&mut policy);
        }
        policy
    }

    /// Whether the node or any namespace allows the restore policy `immediate`.
    #[must_use]
    pub fn may_be_immediate(&self) -> bool {
        let rules = self.rules.iter().filter_map(|rule| rule.restore.as_ref()).map(|value| value.0);
        std::iter::once(self.node.restore).chain(rules).any(|restore| restore != Restore::Queue)
    }

    /// Finds the rule for a namespace. `None`: no rule names it.
    #[must_use]
    pub fn rule(&self, namespace: &str) -> Option<&NamespaceRule> {
        self.rules.iter().find(|rule| rule.name == namespace)
    }
}

/// Limits the VRAM of a container to the memory that its resource claims were allocated. The
/// container's own annotation can then only lower the limit.
pub(crate) fn limit_to_claims(policy: &mut Policy, annotations: &BTreeMap<String, String>) {
    let claimed = annotations.get(CLAIMED_VRAM).and_then(|bytes| bytes.parse::<u64>().ok());
    let operators = (policy.vram_limit_bytes != 0).then_some(policy.vram_limit_bytes);
    if let Some(limit) = claimed.into_iter().filter(|bytes| *bytes > 0).chain(operators).min() {
        policy.vram_limit_bytes = limit;
    }
}

/// Why the value of a setting is invalid. Each variant contains what would be accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidValue {
    /// The value is not one of the accepted words, which are listed here.
    #[error("accepted: {}", .0.join(", "))]
    Word(Vec<&'static str>),
    /// The value does not have the accepted form, which is described here.
    #[error("accepted: {0}")]
    Form(&'static str),
    /// The operator does not let containers choose this value. The text says what is accepted
    /// instead.
    #[error("accepted here: {0}")]
    NotPermitted(&'static str),
    /// No annotation has this name. The list contains the names of all annotations.
    #[error("no such annotation; accepted: {}", .0.join(", "))]
    Name(Vec<&'static str>),
}

/// Annotation that decides whether the library is loaded into the container.
const INJECT: &str = "affinode.io/inject";
/// Prefix of every annotation.
const PREFIX: &str = "affinode.io/";

/// Applies one annotation to a policy.
///
/// # Errors
/// [`InvalidValue`]: the annotation or its value is invalid. The policy is then unchanged.
pub fn apply(policy: &mut Policy, name: &str, value: &str) -> Result<(), InvalidValue> {
    match name {
        LATENCY_SENSITIVE => {
            if bool::parse(value)? {
                policy.mode = Mode::Off;
            }
            Ok(())
        }
        INJECT => format::word(value, &[("auto", ()), ("true", ()), ("false", ())]),
        _ => {
            let setting = SETTINGS.iter().find(|setting| setting.annotations.contains(&name));
            let setting = setting.ok_or_else(|| InvalidValue::Name(annotations()))?;
            (setting.annotate)(policy, value)
        }
    }
}

/// Names of all annotations, without their prefix.
fn annotations() -> Vec<&'static str> {
    let of_settings = SETTINGS.iter().flat_map(|setting| setting.annotations);
    let all = of_settings.copied().chain([INJECT]);
    all.map(|name| name.strip_prefix(PREFIX).unwrap_or(name)).collect()
}

/// Refuses an annotation with the restore policy `immediate` if the operator's value is `queue`.
/// With `immediate`, processes of other containers may be ended, so only the operator can permit
/// it.
fn annotated_restore(operators: &Restore, chosen: &Restore) -> Result<(), InvalidValue> {
    match (operators, chosen) {
        (Restore::Queue, Restore::Immediate) => Err(InvalidValue::NotPermitted(
            "queue; an operator can allow immediate with policy.restore = \"by-annotation\"",
        )),
        _ => Ok(()),
    }
}

/// Refuses an annotation that enables deduplication if the operator's value is `false`.
/// Deduplication costs CPU time of the node, so only the operator can permit it.
fn annotated_dedup(operators: &bool, chosen: &bool) -> Result<(), InvalidValue> {
    match (operators, chosen) {
        (false, true) => {
            Err(InvalidValue::NotPermitted("false; an operator can allow true with policy.dedup"))
        }
        _ => Ok(()),
    }
}

/// Refuses an annotation that would move the container's content to disk earlier than the operator
/// permits. Each move writes to the node's disk and wears it.
fn annotated_disk_after(operators: &Millis, chosen: &Millis) -> Result<(), InvalidValue> {
    match *chosen != 0 && (*operators == 0 || chosen < operators) {
        true => Err(InvalidValue::NotPermitted("0, or a duration of at least policy.disk_after")),
        false => Ok(()),
    }
}

/// Refuses an annotation that would raise or remove the operator's VRAM limit.
fn annotated_vram_limit(operators: &u64, chosen: &u64) -> Result<(), InvalidValue> {
    match *operators != 0 && (*chosen == 0 || chosen > operators) {
        true => Err(InvalidValue::NotPermitted(
            "an amount of at most policy.vram_limit, and at most the memory that the container's \
             resource claims allocate",
        )),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use affinode_proto::annotations::set_the_same;

    use super::*;

    #[test]
    fn claims_limit_the_vram() {
        let claimed = (20_u64 << 30).to_string();
        for (operators_gib, annotated, effective_gib, warns) in [
            (0, None, 20, 0),
            (0, Some("10Gi"), 10, 0),
            (0, Some("30Gi"), 20, 1),
            (0, Some("0"), 20, 1),
            (10, None, 10, 0),
            (30, None, 20, 0),
        ] {
            let node = Policy { vram_limit_bytes: operators_gib << 30, ..Policy::default() };
            let policies = Policies { node, ..Policies::default() };
            let mut set = BTreeMap::from([(CLAIMED_VRAM.to_owned(), claimed.clone())]);
            set.extend(
                annotated.map(|text| ("affinode.io/vram-limit".to_owned(), text.to_owned())),
            );
            let (policy, warnings) = policies.resolve("", &set);
            let got = (policy.vram_limit_bytes >> 30, warnings.len());
            assert_eq!(got, (effective_gib, warns), "{operators_gib} {annotated:?}");
        }
        for invalid in ["", "0", "-1", "20Gi"] {
            let set = BTreeMap::from([(CLAIMED_VRAM.to_owned(), invalid.to_owned())]);
            assert_eq!(Policies::default().resolve("", &set).0, Policy::default(), "{invalid}");
        }
    }

    #[test]
    fn vram_limit_has_a_unit() {
        for (text, shown) in [
            ("0", "0"),
            ("20Gi", "20Gi"),
            ("20480Mi", "20Gi"),
            ("1536Mi", "1536Mi"),
            ("1Ti", "1Ti"),
        ] {
            let bytes = format::Quantity::parse(text).unwrap();
            assert_eq!(format::Quantity::shown(&bytes), shown);
        }
        for text in ["", "20", "20GB", "0Gi", "2Ti", "-1Gi", "1.5Gi", "18014398509481984Gi"] {
            format::Quantity::parse(text).unwrap_err();
        }
    }

    #[test]
    fn annotation_only_lowers_the_vram_limit() {
        let gib = |n: u64| n << 30;
        for (operators, annotated, effective, is_refused) in [
            (0, "20Gi", gib(20), false),
            (gib(20), "10Gi", gib(10), false),
            (gib(20), "30Gi", gib(20), true),
            (gib(20), "0", gib(20), true),
        ] {
            let node = Policy { vram_limit_bytes: operators, ..Policy::default() };
            let policies = Policies { node, ..Policies::default() };
            let annotations = [("affinode.io/vram-limit".to_owned(), annotated.to_owned())].into();
            let (policy, warnings) = policies.resolve("", &annotations);
            assert_eq!(policy.vram_limit_bytes, effective, "{annotated}");
            assert_eq!(warnings.len(), usize::from(is_refused), "{warnings:?}");
        }
    }

    #[test]
    fn annotation_only_delays_the_disk_step() {
        const HOUR: Millis = 3_600_000;
        for (operators, annotated, effective, is_refused) in [
            (HOUR, "2h", 2 * HOUR, false),
            (HOUR, "0", 0, false),
            (HOUR, "59m", HOUR, true),
            (0, "2h", 0, true),
            (0, "0", 0, false),
            (HOUR, "soon", HOUR, true),
        ] {
            let node = Policy { disk_after_ms: operators, ..Policy::default() };
            let policies = Policies { node, ..Policies::default() };
            let (policy, warnings) =
                policies.resolve("", &annotations(&[("disk-after", annotated)]));
            assert_eq!(policy.disk_after_ms, effective, "{operators} {annotated}");
            assert_eq!(warnings.len(), usize::from(is_refused), "{warnings:?}");
        }
        assert_eq!(format::DurationOrNever::shown(&0), "0");
        assert_eq!(format::DurationOrNever::shown(&HOUR), "1h");
    }

    fn annotations(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(k, v)| (format!("affinode.io/{k}"), (*v).to_owned())).collect()
    }

    #[test]
    fn annotation_before_rule_before_node() {
        let policies = Policies {
            node: Policy::default(),
            origins: BTreeMap::new(),
            rules: vec![NamespaceRule {
                name: "ml".into(),
                mode: Some(FileValue(Mode::Pressure)),
                priority: Some(FileValue(5)),
                ..NamespaceRule::default()
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
    fn programs_agree_on_annotations_of_a_setting() {
        let all: Vec<_> = SETTINGS.iter().flat_map(|setting| setting.annotations).collect();
        for (one, other) in all.iter().flat_map(|one| all.iter().map(move |other| (**one, **other)))
        {
            let together = SETTINGS
                .iter()
                .any(|setting| [one, other].iter().all(|name| setting.annotations.contains(name)));
            assert_eq!(set_the_same(one, other), together, "{one} and {other}");
        }
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
            rules: vec![NamespaceRule {
                name: "ml".into(),
                dedup: Some(FileValue(true)),
                ..NamespaceRule::default()
            }],
            ..Policies::default()
        };
        let dedup = |namespace, says: &[(&str, &str)]| {
            let (policy, warnings) = policies.resolve(namespace, &annotations(says));
            (policy.dedup, warnings.len())
        };
        assert_eq!(dedup("x", &[]), (false, 0));
        assert_eq!(
            dedup("x", &[("dedup", "true")]),
            (false, 1),
            "an annotation cannot enable dedup"
        );
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
