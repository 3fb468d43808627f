//! The rules by which an operator chooses the pods that get the runtime class.

use std::str::FromStr;

use clap::Args;

/// Name of the label by which pods and namespaces opt out of the runtime class. Pods can also opt
/// out by the annotation of this name with the value `false`.
pub const INJECT: &str = "affinode.io/inject";
/// Value of the label [`INJECT`] with which a pod or namespace opts out.
pub const IGNORE: &str = "ignore";

/// The name of the runtime class, and the rules that decide which pods get it.
#[derive(Args, Clone, Debug)]
pub struct NamespaceRules {
    /// The runtime class that GPU pods get.
    #[arg(long, value_name = "NAME", default_value = "affinode", env = "AFFINODE_RUNTIME_CLASS")]
    pub runtime_class: String,
    /// Name of a resource. A pod that requests this resource is a GPU pod. A star at the end
    /// matches any suffix.
    #[arg(
        long = "resource",
        value_name = "NAME",
        value_delimiter = ',',
        default_values = ["nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-*"],
        env = "AFFINODE_RESOURCES"
    )]
    pub resources: Vec<NamePattern>,
    /// Name of a device class. A pod that claims a device of this class is a GPU pod. A star at the
    /// end matches any suffix.
    #[arg(
        long = "device-class",
        value_name = "NAME",
        value_delimiter = ',',
        default_values = ["gpu.nvidia.com", "mig.nvidia.com"],
        env = "AFFINODE_DEVICE_CLASSES"
    )]
    pub device_classes: Vec<NamePattern>,
    /// Name of an annotation. A pod with this annotation is a GPU pod. Use this option for
    /// schedulers, such as KAI, that assign parts of a GPU without a resource.
    #[arg(
        long = "annotation",
        value_name = "NAME",
        value_delimiter = ',',
        default_values = ["gpu-fraction", "gpu-memory"],
        env = "AFFINODE_ANNOTATIONS"
    )]
    pub annotations: Vec<NamePattern>,
    /// Name of a namespace whose pods the webhook does not change. A star at the end matches any
    /// suffix.
    #[arg(
        long = "exclude-namespace",
        value_name = "NAME",
        value_delimiter = ',',
        default_values = [
            "kube-system", "kube-public", "kube-node-lease", "gpu-operator",
            "kai-resource-reservation",
        ],
        env = "AFFINODE_EXCLUDED_NAMESPACES"
    )]
    pub excluded_namespaces: Vec<NamePattern>,
    /// Name of a runtime class. If a pod names this class, the webhook replaces it. Use this option
    /// for the class `nvidia` if the handler `affinode` was derived from the handler `nvidia`.
    #[arg(
        long = "replace-class",
        value_name = "NAME",
        value_delimiter = ',',
        env = "AFFINODE_REPLACED_CLASSES"
    )]
    pub replaced_classes: Vec<String>,
}

/// A name, or a prefix of names that ends with a star: `nvidia.com/mig-*`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamePattern {
    text: String,
    open: bool,
}

/// Error for a text that is not a valid pattern.
#[derive(Debug, thiserror::Error)]
#[error("invalid pattern {0:?}: \"*\" is only allowed as the last character, after a prefix")]
pub struct PatternError(String);

impl FromStr for NamePattern {
    type Err = PatternError;

    fn from_str(text: &str) -> Result<NamePattern, PatternError> {
        let (stem, open) = match text.strip_suffix('*') {
            Some(stem) => (stem, true),
            None => (text, false),
        };
        let fits = |c: char| c.is_ascii_alphanumeric() || "-._/".contains(c);
        if stem.is_empty() || !stem.chars().all(fits) {
            return Err(PatternError(text.to_owned()));
        }
        Ok(NamePattern { text: stem.to_owned(), open })
    }
}

impl NamePattern {
    /// Returns whether a name matches the pattern.
    #[must_use]
    pub fn matches(&self, name: &str) -> bool {
        if self.open { name.starts_with(&self.text) } else { name == self.text }
    }
}

/// Returns whether a name matches at least one of the patterns.
#[must_use]
pub fn any(patterns: &[NamePattern], name: &str) -> bool {
    patterns.iter().any(|pattern| pattern.matches(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn star_is_allowed_only_after_a_prefix() {
        let pattern: NamePattern = "nvidia.com/mig-*".parse().unwrap();
        assert!(pattern.matches("nvidia.com/mig-1g.10gb"));
        assert!(!pattern.matches("nvidia.com/gpu"));
        let name: NamePattern = "nvidia.com/gpu".parse().unwrap();
        assert!(name.matches("nvidia.com/gpu") && !name.matches("nvidia.com/gpu.shared"));
        for bad in ["", "*", "a*b", "a b", "nvidia.com/gpu**"] {
            assert!(bad.parse::<NamePattern>().is_err(), "{bad:?}");
        }
    }
}
