//! Formats the error about an invalid key or value: the key, its file, the value, and the accepted
//! values.

use figment::{Error, Metadata, Source, error::Kind};

/// Formats an error of the configuration, such as `policy.mode in /etc/affinode/config.toml:
/// "often"; accepted: auto, eager, …`.
pub(super) fn tell(error: Error) -> String {
    let all: Vec<String> = error.into_iter().map(|error| one(&error)).collect();
    all.join("; ")
}

fn one(error: &Error) -> String {
    let at = [Some(error.path.join(".")), error.metadata.as_ref().and_then(place)];
    let at: Vec<String> = at.into_iter().flatten().filter(|part| !part.is_empty()).collect();
    let what = what(&error.kind);
    if at.is_empty() { what } else { format!("{}: {what}", at.join(" in ")) }
}

fn place(metadata: &Metadata) -> Option<String> {
    match &metadata.source {
        Some(Source::File(path)) => Some(path.display().to_string()),
        _ if metadata.name.contains("nvironment") => Some("the environment".into()),
        _ => None,
    }
}

fn what(kind: &Kind) -> String {
    match kind {
        Kind::UnknownField(_, accepted) => {
            format!("unknown key; accepted: {}", accepted.join(", "))
        }
        Kind::UnknownVariant(found, accepted) => {
            format!("{found:?}; accepted: {}", accepted.join(", "))
        }
        kind => kind.to_string().trim_end().to_owned(),
    }
}
