//! What an operator chose: which pods get the runtime class.

use std::str::FromStr;

use clap::Args;

/// Label of pods and namespaces, and annotation of pods.
pub const INJECT: &str = "affinode.io/inject";
/// Value of the label that keeps pods as they are.
pub const IGNORE: &str = "ignore";

/// Which pods get which runtime class.
#[derive(Args, Clone, Debug)]
pub struct NamespaceRules {
    /// The runtime class that GPU pods get.
    #[arg(long, value_name = "NAME", default_value = "affinode", env = "AFFINODE_RUNTIME_CLASS")]
    pub runtime_class: String,
    /// A resource whose request makes a GPU pod; a star at its end stands for anything.
    #[arg(
        long = "resource",
        value_name = "NAME",
        value_delimiter = ',',
        default_values = ["nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-*"],
        env = "AFFINODE_RESOURCES"
    )]
    pub resources: Vec<NamePattern>,
    /// A device class whose claim makes a GPU pod; a star at its end stands for anything.
    #[arg(
        long = "device-class",
        value_name = "NAME",
        value_delimiter = ',',
        default_values = ["gpu.nvidia.com", "mig.nvidia.com"],
        env = "AFFINODE_DEVICE_CLASSES"
    )]
    pub device_classes: Vec<NamePattern>,
    /// An annotation that makes a GPU pod: how schedulers are told that hand out parts of a GPU
    /// without a resource (KAI).
    #[arg(
        long = "annotation",
        value_name = "NAME",
        value_delimiter = ',',
        default_values = ["gpu-fraction", "gpu-memory"],
        env = "AFFINODE_ANNOTATIONS"
    )]
    pub annotations: Vec<NamePattern>,
    /// A namespace whose pods stay as they are; a star at its end stands for anything.
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
    /// A runtime class that pods chose themselves and that is replaced nevertheless. `nvidia`,
    /// where the handler affinode was made from the handler nvidia.
    #[arg(
        long = "replace-class",
        value_name = "NAME",
        value_delimiter = ',',
        env = "AFFINODE_REPLACED_CLASSES"
    )]
    pub replaced_classes: Vec<String>,
}

/// A name, or the beginning of names: `nvidia.com/mig-*`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamePattern {
    text: String,
    open: bool,
}

/// What is no pattern.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is no name; a star may stand at its end, after a beginning")]
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
    /// Whether a name is meant.
    #[must_use]
    pub fn matches(&self, name: &str) -> bool {
        if self.open { name.starts_with(&self.text) } else { name == self.text }
    }
}

/// Whether one of them means the name.
#[must_use]
pub fn any(patterns: &[NamePattern], name: &str) -> bool {
    patterns.iter().any(|pattern| pattern.matches(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_stands_at_the_end_alone_and_never_for_everything() {
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
