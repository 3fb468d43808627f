//! Lists the annotations of a container for the reference pages. The list is read from the error
//! messages of the annotation parser. These messages name each annotation, its values, and the
//! values that only an operator may choose.

use affinode_core::{
    explain,
    policy::{Policy, apply},
};
use serde::Serialize;

/// Prefix of every annotation.
const PREFIX: &str = "affinode.io/";

/// An annotation as the reference pages list it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AnnotationReference {
    /// Full name with its prefix.
    pub name: String,
    /// Accepted values, as text for the reference pages.
    pub accepted: String,
    /// The key of `[policy]` that the annotation changes. `None`: it changes no key.
    pub key: Option<String>,
    /// Limits that the operator's configuration sets to the values. Each text is a condition under
    /// which a value is accepted.
    pub limits: Vec<String>,
    /// Description of the annotation. Empty: the description of its key applies.
    pub text: String,
}

/// Limits that depend on the operator's own value, so that the parser's errors under the default
/// policy do not state them.
const LIMITS: [(&str, &str); 3] = [
    ("affinode.io/dedup", "`true` only if policy.dedup is true; `false` always"),
    (
        "affinode.io/disk-after",
        "at least policy.disk_after, or 0; only 0 if policy.disk_after is 0",
    ),
    (
        "affinode.io/vram-limit",
        "at most policy.vram_limit and the memory that the container's resource claims allocate; \
         any amount and 0 if neither sets a limit",
    ),
];

/// Descriptions of the annotations for which no configuration key has a suitable description.
const TEXTS: [(&str, &str); 3] = [
    ("affinode.io/offload", "The mode, which determines when the container may be offloaded."),
    (
        "affinode.io/latency-sensitive",
        "`true` sets mode `off`, even if `affinode.io/offload` sets another mode. Use it for containers whose callers cannot wait for a restore.",
    ),
    (
        "affinode.io/inject",
        "Whether Affinode's library is loaded into the container. Without the library a container is never offloaded. `auto` (default): if the container has a GPU. `true`: always; in Kubernetes the pod must also have the runtime class `affinode`, which this value does not add. `false`: never; in Kubernetes the pod then does not get the runtime class `affinode` automatically.",
    ),
];

/// Returns every annotation, in the order of the parser.
#[must_use]
pub fn annotations() -> Vec<AnnotationReference> {
    names().iter().map(|name| annotation(name)).collect()
}

fn annotation(name: &str) -> AnnotationReference {
    let accepted = refusal(name, "\u{1}").unwrap_or_default();
    let accepted = accepted.trim_start_matches("accepted: ").to_owned();
    let limits = match LIMITS.iter().find(|(limited, _)| *limited == name) {
        Some((_, limit)) => vec![(*limit).to_owned()],
        None => accepted.split(", ").filter_map(|value| permission(name, value)).collect(),
    };
    let key = explain::names()
        .find(|key| explain::annotations(key).iter().any(|annotation| annotation == name));
    let text = TEXTS.iter().find(|(named, _)| *named == name).map_or("", |(_, text)| text);
    AnnotationReference {
        name: name.to_owned(),
        accepted,
        key: key.map(str::to_owned),
        limits,
        text: text.to_owned(),
    }
}

/// Returns the value with the way in which an operator permits it, if the parser refuses the value
/// under the default policy for the lack of a permission.
fn permission(name: &str, value: &str) -> Option<String> {
    let limit = refusal(name, value)?.strip_prefix("accepted here: ")?.to_owned();
    let (_, permission) = limit.split_once("; ")?;
    Some(format!("`{value}`: {permission}"))
}

/// Returns the full names of all annotations, from the parser's error for an unknown name.
fn names() -> Vec<String> {
    let answer = refusal("unknown", "").unwrap_or_default();
    let names = answer.split_once("accepted: ").map_or("", |(_, names)| names);
    names.split(", ").map(|name| format!("{PREFIX}{name}")).collect()
}

/// Returns the reason why the parser refuses a value under the node's default policy. `None`: the
/// parser accepts the value.
fn refusal(name: &str, value: &str) -> Option<String> {
    apply(&mut Policy::default(), name, value).err().map(|invalid| invalid.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(name: &str) -> AnnotationReference {
        annotations().into_iter().find(|annotation| annotation.name == name).unwrap()
    }

    #[test]
    fn every_annotation_has_values_and_a_meaning() {
        let all = annotations();
        assert!(all.len() > 15, "{all:?}");
        for annotation in &all {
            assert!(!annotation.accepted.starts_with("no such"), "{annotation:?}");
            assert!(!annotation.accepted.is_empty(), "{annotation:?}");
            assert!(annotation.key.is_some() || !annotation.text.is_empty(), "{annotation:?}");
        }
        for (name, _) in TEXTS {
            assert!(!of(name).text.is_empty(), "{name} is no annotation");
        }
    }

    /// The list of annotations comes from the parser. It must contain each annotation that
    /// `affinode policy show` names.
    #[test]
    fn explained_annotations_are_listed() {
        let listed = names();
        for annotation in explain::names().flat_map(explain::annotations) {
            assert!(listed.contains(&annotation), "{annotation}");
        }
    }

    #[test]
    fn operator_limits_are_named() {
        assert_eq!(of("affinode.io/offload").limits, [] as [&str; 0]);
        let limits = of("affinode.io/restore").limits;
        assert!(limits.len() == 1 && limits[0].contains("policy.restore"), "{limits:?}");
        for (name, limit) in LIMITS {
            assert_eq!(of(name).limits, [limit], "{name}");
        }
    }

    /// The texts in [`LIMITS`] are not derived from the parser, so this test compares them with it.
    #[test]
    fn parser_applies_the_stated_limits() {
        let hour = 3_600_000;
        let policy = |disk_after_ms, vram_limit_bytes, dedup| Policy {
            disk_after_ms,
            vram_limit_bytes,
            dedup,
            ..Policy::default()
        };
        let limited = policy(hour, 20 << 30, true);
        let open = policy(0, 0, false);
        for (operators, name, value, is_accepted) in [
            (&limited, "dedup", "true", true),
            (&open, "dedup", "true", false),
            (&open, "dedup", "false", true),
            (&limited, "disk-after", "2h", true),
            (&limited, "disk-after", "59m", false),
            (&limited, "disk-after", "0", true),
            (&open, "disk-after", "2h", false),
            (&open, "disk-after", "0", true),
            (&limited, "vram-limit", "10Gi", true),
            (&limited, "vram-limit", "30Gi", false),
            (&limited, "vram-limit", "0", false),
            (&open, "vram-limit", "30Gi", true),
            (&open, "vram-limit", "0", true),
        ] {
            let applied = apply(&mut operators.clone(), &format!("{PREFIX}{name}"), value);
            assert_eq!(applied.is_ok(), is_accepted, "{name}: {value}");
        }
    }
}
