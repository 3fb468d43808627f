//! Lists the effective settings of a container, each with the source of its value.
//!
//! ```text
//! default < node (file, drop-in, environment) < namespace rule < annotation < operator (pin, auto-offload)
//! ```

use std::collections::BTreeMap;

use affinode_proto::annotations::{CLAIMED_VRAM, LATENCY_SENSITIVE};

use super::{
    Key,
    node_state::NodeState,
    policy::{Policies, SETTINGS, Setting, apply, limit_to_claims},
};

/// The source of a setting's value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The built-in default of Affinode.
    Default,
    /// The node's configuration: name of the file or the environment variable.
    Node(String),
    /// The rule of the namespace with this name.
    Namespace(String),
    /// The container's annotation with this name.
    Annotation(String),
    /// An operator's choice, with the command that made it.
    Operator(String),
}

impl Origin {
    /// The word for the kind of source, and the name of the file, namespace, annotation or command.
    #[must_use]
    pub fn words(&self) -> (&'static str, &str) {
        match self {
            Origin::Default => ("default", ""),
            Origin::Node(file) => ("node", file),
            Origin::Namespace(name) => ("namespace", name),
            Origin::Annotation(text) => ("annotation", text),
            Origin::Operator(command) => ("operator", command),
        }
    }
}

/// A setting with its effective value and the source of that value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Value {
    /// Name of the setting in `[policy]`.
    pub name: &'static str,
    /// The value in the form that configuration files use.
    pub value: String,
    /// The source of the value.
    pub origin: Origin,
}

/// Names of all settings in section `[policy]` of the configuration.
pub fn names() -> impl Iterator<Item = &'static str> {
    SETTINGS.iter().map(|setting| setting.name)
}

/// Names of the annotations that change the setting `name`.
#[must_use]
pub fn annotations(name: &str) -> Vec<String> {
    let settings = SETTINGS.iter().filter(|setting| setting.name == name);
    settings.flat_map(|setting| setting.annotations).map(|name| (*name).to_owned()).collect()
}

impl Policies {
    /// Lists the node's settings, each with its value and source.
    #[must_use]
    pub fn explain_node(&self) -> Vec<Value> {
        let value = |setting: &Setting| {
            let origin = match self.origins.get(setting.name) {
                Some(file) => Origin::Node(file.clone()),
                None => Origin::Default,
            };
            Value { name: setting.name, value: (setting.shown)(&self.node), origin }
        };
        SETTINGS.iter().map(value).collect()
    }

    /// Lists the effective settings of a container, each with its source. The precedence is the
    /// same as in [`Policies::resolve`].
    #[must_use]
    pub fn explain(&self, namespace: &str, annotations: &BTreeMap<String, String>) -> Vec<Value> {
        let (policy, _) = self.resolve(namespace, annotations);
        let (rule, mut before) = (self.rule(namespace), self.before_annotations(namespace));
        limit_to_claims(&mut before, annotations);
        let mut values = self.explain_node();
        for (value, setting) in values.iter_mut().zip(SETTINGS) {
            value.value = (setting.shown)(&policy);
            if rule.is_some_and(setting.is_ruled) {
                value.origin = Origin::Namespace(namespace.to_owned());
            }
            let claimed = annotations.get(CLAIMED_VRAM).filter(|_| setting.name == "vram_limit");
            if let Some(bytes) = claimed.filter(|text| text.parse() == Ok(before.vram_limit_bytes))
            {
                value.origin = Origin::Annotation(format!("{CLAIMED_VRAM}={bytes}"));
            }
            for name in setting.annotations {
                let Some(text) = annotations.get(*name) else { continue };
                let opted_in = *name == LATENCY_SENSITIVE && text != "true";
                if !opted_in && apply(&mut before.clone(), name, text).is_ok() {
                    value.origin = Origin::Annotation(format!("{name}={text}"));
                }
            }
        }
        values
    }
}

/// Lists the effective settings of a container, including the choices of operators.
#[must_use]
pub(super) fn explain(node: &NodeState, key: &Key) -> Vec<Value> {
    let Some(container) = node.registry.containers.get(key) else { return Vec::new() };
    let spec = &container.spec;
    let mut values = node.settings.policies.explain(spec.rule_namespace(), &spec.annotations);
    let operator = |name, value: &str, command: &str| Value {
        name,
        value: value.into(),
        origin: Origin::Operator(command.into()),
    };
    if node.overrides.pinned.contains(key) {
        values.push(operator("pinned", "true", "affinode pin"));
    }
    if !node.overrides.auto_offload {
        values.push(operator("auto_offload", "off", "affinode auto-offload off"));
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{FileValue, Mode, NamespaceRule, OnOom, Policy};

    fn of(values: &[Value], name: &str) -> (String, Origin) {
        let value = values.iter().find(|value| value.name == name).unwrap();
        (value.value.clone(), value.origin.clone())
    }

    #[test]
    fn each_value_says_where_it_comes_from() {
        let policies = Policies {
            node: Policy { priority: 3, mode: Mode::Pressure, ..Policy::default() },
            origins: [("priority", "/a.toml"), ("mode", "/b.toml")]
                .map(|(name, file)| (name.to_owned(), file.to_owned()))
                .into(),
            rules: vec![NamespaceRule {
                name: "ml".into(),
                mode: Some(FileValue(Mode::Eager)),
                on_oom: Some(FileValue(OnOom::Wait)),
                dedup: Some(FileValue(true)),
                ..NamespaceRule::default()
            }],
        };
        let annotations: BTreeMap<String, String> = [
            ("affinode.io/offload", "manual"),
            ("affinode.io/idle-timeout", "soon"),
            ("affinode.io/latency-sensitive", "false"),
        ]
        .map(|(name, text)| (name.to_owned(), text.to_owned()))
        .into();
        let values = policies.explain("ml", &annotations);
        let annotation = Origin::Annotation("affinode.io/offload=manual".into());
        assert_eq!(of(&values, "mode"), ("manual".into(), annotation));
        assert_eq!(of(&values, "on_oom"), ("wait".into(), Origin::Namespace("ml".into())));
        assert_eq!(of(&values, "dedup"), ("true".into(), Origin::Namespace("ml".into())));
        assert_eq!(of(&values, "priority"), ("3".into(), Origin::Node("/a.toml".into())));
        // An invalid annotation has no effect.
        assert_eq!(of(&values, "idle_timeout"), ("5m".into(), Origin::Default));
        let values = policies.explain("other", &BTreeMap::new());
        assert_eq!(of(&values, "mode"), ("pressure".into(), Origin::Node("/b.toml".into())));
    }
}
