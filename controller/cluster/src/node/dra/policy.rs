//! The opaque configuration of claims and device classes: Affinode's policy for the containers that
//! use the claim.

use std::collections::BTreeMap;

use affinode_core::policy::{InvalidValue, Policy, apply};
use serde::Deserialize;
use serde_json::Value;

/// `apiVersion` of a configuration.
pub const API_VERSION: &str = "affinode.io/v1alpha1";
/// `kind` of a configuration.
pub const KIND: &str = "ContainerPolicy";
/// Prefix of every annotation.
const PREFIX: &str = "affinode.io/";
/// The annotation that determines whether a container is managed. A claim cannot set it, because
/// every container that uses the claim has a GPU and is managed.
const INJECT: &str = "affinode.io/inject";
/// Maximum number of settings in one configuration. There are about 20 settings.
const MAX_SETTINGS: usize = 32;
/// Maximum length of a setting in bytes, name and value together. It is the shim's limit for
/// annotations.
const MAX_SETTING_BYTES: usize = 512;

/// Annotations as name and value, in the form in which a pod has them.
pub type Annotations = BTreeMap<String, String>;

/// Reason why an opaque configuration of a claim or device class is invalid.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// The configuration is not an object of the expected form.
    #[error(
        "the opaque configuration has an invalid form; expected apiVersion {API_VERSION}, kind \
         {KIND} and policy"
    )]
    Form(#[source] serde_json::Error),
    /// The configuration has an unsupported `apiVersion` or `kind`.
    #[error(
        "apiVersion and kind of the opaque configuration are {0:?}; expected {API_VERSION} and \
         {KIND}"
    )]
    Kind([String; 2]),
    /// The configuration has more settings than the maximum.
    #[error("the opaque configuration has {0} settings; accepted: at most {MAX_SETTINGS}")]
    Many(usize),
    /// A setting is too long.
    #[error("policy.{name} has more than {MAX_SETTING_BYTES} bytes; shorten it")]
    Long {
        /// The beginning of the setting's name.
        name: String,
    },
    /// A value is an object, a list or null.
    #[error("policy.{name} has an invalid type; accepted: a string, a number, true or false")]
    Type {
        /// Name of the setting.
        name: String,
    },
    /// The parser of annotations refuses the setting.
    #[error("policy.{name} is invalid")]
    Value {
        /// Name of the setting.
        name: String,
        /// Reason, with the accepted names or values.
        #[source]
        source: InvalidValue,
    },
    /// The setting is `inject`, which a claim cannot set.
    #[error("policy.inject is not accepted in a claim; use the annotation {INJECT} of the pod")]
    Inject,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct ContainerPolicy {
    api_version: String,
    kind: String,
    #[serde(default)]
    policy: BTreeMap<String, Value>,
}

/// Parses the parameters of an opaque configuration into annotations. A setting has the name of an
/// annotation without the prefix `affinode.io/`, and accepts the same values.
///
/// # Errors
/// [`PolicyError`]: the configuration is invalid. No setting of it applies.
pub fn parse(parameters: &Value) -> Result<Annotations, PolicyError> {
    let found = ContainerPolicy::deserialize(parameters).map_err(PolicyError::Form)?;
    if found.api_version != API_VERSION || found.kind != KIND {
        let shown = |text: &String| text.chars().take(80).collect();
        return Err(PolicyError::Kind([shown(&found.api_version), shown(&found.kind)]));
    }
    if found.policy.len() > MAX_SETTINGS {
        return Err(PolicyError::Many(found.policy.len()));
    }
    found.policy.into_iter().map(|(name, value)| setting(name, &value)).collect()
}

fn setting(name: String, value: &Value) -> Result<(String, String), PolicyError> {
    let text = match value {
        Value::String(text) => text.clone(),
        Value::Number(number) => number.to_string(),
        Value::Bool(flag) => flag.to_string(),
        Value::Null | Value::Array(_) | Value::Object(_) => {
            return Err(PolicyError::Type { name: name.chars().take(80).collect() });
        }
    };
    let annotation = format!("{PREFIX}{name}");
    if annotation.len() + text.len() > MAX_SETTING_BYTES {
        return Err(PolicyError::Long { name: name.chars().take(80).collect() });
    }
    if annotation == INJECT {
        return Err(PolicyError::Inject);
    }
    match apply(&mut Policy::default(), &annotation, &text) {
        // Whether a container may choose a permitted value, is decided by the node's controller,
        // which knows the operator's configuration.
        Ok(()) | Err(InvalidValue::NotPermitted(_)) => Ok((annotation, text)),
        Err(source) => Err(PolicyError::Value { name, source }),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::error_chain;

    fn of(policy: &Value) -> Value {
        json!({"apiVersion": API_VERSION, "kind": KIND, "policy": policy})
    }

    #[test]
    fn settings_become_annotations() {
        let parsed = parse(&of(&json!({
            "offload": "eager", "idle-timeout": "90s", "priority": -5, "prewake": true,
        })));
        let expected = [
            ("affinode.io/idle-timeout", "90s"),
            ("affinode.io/offload", "eager"),
            ("affinode.io/prewake", "true"),
            ("affinode.io/priority", "-5"),
        ];
        let expected = expected.map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(parsed.unwrap(), Annotations::from(expected));
    }

    #[test]
    fn controller_decides_what_operators_permit() {
        let parsed = parse(&of(&json!({"restore": "immediate"}))).unwrap();
        assert_eq!(parsed["affinode.io/restore"], "immediate");
    }

    #[test]
    fn invalid_configurations_say_what_is_accepted() {
        let many: serde_json::Map<String, Value> =
            (0..40).map(|number| (format!("s{number}"), json!("x"))).collect();
        for (parameters, said) in [
            (json!(null), "kind ContainerPolicy and policy"),
            (json!({"apiVersion": API_VERSION, "kind": KIND, "mode": "eager"}), "and policy"),
            (json!({"apiVersion": "x/v1", "kind": KIND}), "expected affinode.io/v1alpha1"),
            (of(&json!({"offload": "sometimes"})), "accepted: auto, eager"),
            (of(&json!({"mode": "eager"})), "accepted: offload"),
            (of(&json!({"priority": ["1"]})), "a string, a number"),
            (of(&json!({"inject": "false"})), "not accepted in a claim"),
            // Only the agent itself writes these two into the file of a claim.
            (of(&json!({"claimed-vram": "gpu-a=99999999999"})), "no such annotation"),
            (of(&json!({"claim": "other/claim"})), "no such annotation"),
            (of(&json!({"../priority": "1"})), "no such annotation"),
            (of(&json!({"offload": "x".repeat(600)})), "more than 512 bytes"),
            (of(&Value::Object(many)), "40 settings"),
        ] {
            let error = error_chain::chain(&parse(&parameters).unwrap_err());
            assert!(error.contains(said), "{parameters}: {error}");
        }
    }
}
