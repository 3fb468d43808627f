//! The name of the resource that pods request.

use std::{fmt, str::FromStr};

/// Maximum length of each of the two parts of a name, before and after the slash, in characters.
/// Kubernetes sets this limit for the part after the slash. Affinode also applies it to the part
/// before the slash.
const MAX_PART: usize = 63;

/// Name of an extended resource, such as `affinode.io/gpu`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResourceName(String);

/// Error for a text that is not the name of an extended resource.
#[derive(Debug, thiserror::Error)]
#[error(
    "{0:?} is not the name of an extended resource; accepted: a domain other than kubernetes.io, a \
     slash and a name, such as affinode.io/gpu"
)]
pub struct ResourceNameError(String);

impl FromStr for ResourceName {
    type Err = ResourceNameError;

    fn from_str(text: &str) -> Result<Self, ResourceNameError> {
        match text.split_once('/') {
            Some((domain, name)) if is_domain(domain) && is_name(name) => {
                Ok(ResourceName(text.to_owned()))
            }
            _ => Err(ResourceNameError(text.to_owned())),
        }
    }
}

impl fmt::Display for ResourceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn is_domain(text: &str) -> bool {
    let lower = !text.bytes().any(|byte| byte.is_ascii_uppercase() || byte == b'_');
    let native = text == "kubernetes.io" || text.ends_with(".kubernetes.io");
    is_name(text) && lower && !native && !text.starts_with("requests.")
}

fn is_name(text: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    let ends = [text.bytes().next(), text.bytes().last()];
    text.len() <= MAX_PART
        && text.bytes().all(inner)
        && ends.iter().all(|end| end.is_some_and(|byte| byte.is_ascii_alphanumeric()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_extended_resources_are_accepted() {
        for name in ["affinode.io/gpu", "nvidia.com/gpu.shared", "a/B_1"] {
            assert_eq!(name.parse::<ResourceName>().unwrap().to_string(), name);
        }
        for name in [
            "",
            "gpu",
            "/gpu",
            "affinode.io/",
            "kubernetes.io/gpu",
            "a.kubernetes.io/gpu",
            "A.io/gpu",
            "a.io/g/u",
            "a.io/-gpu",
            "a io/gpu",
            "requests.a.io/gpu",
        ] {
            assert!(name.parse::<ResourceName>().is_err(), "{name:?}");
        }
    }
}
