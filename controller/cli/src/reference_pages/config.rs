//! Lists the keys of the configuration for the reference pages. The list is read from the error
//! messages of the deserialiser, which contain the accepted keys, types and values. Therefore no
//! separate list is needed. `config/config.toml` contains the description and the default of each
//! key.

use std::collections::BTreeMap;

use affinode_controller::config::Config;
use affinode_core::explain;
use figment::{
    Figment,
    error::Kind,
    providers::{Format, Toml},
};
use serde::Serialize;

/// Sample configuration file. It is the only place that describes the keys.
const SAMPLE: &str = include_str!("../../../../config/config.toml");
/// Name of a key that no section has. It provokes error messages.
const UNKNOWN: &str = "unknown_key";
/// Name of the array of tables in the configuration that contains the rules for namespaces. Each
/// table overrides values of `[policy]` for one namespace.
const RULES: &str = "policy.namespace";

/// A configuration key as the reference pages list it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct KeyReference {
    /// Section of the key, such as `policy` or `http.kubernetes`.
    pub section: String,
    /// Name of the key within its section.
    pub name: String,
    /// Type of the value, as a word such as `boolean`.
    #[serde(rename = "type")]
    pub kind: String,
    /// Accepted values or range. Empty: every value of the type.
    pub accepted: String,
    /// Default value, as TOML. `None`: the key is not set by default.
    pub default: Option<String>,
    /// Environment variable that sets the key.
    pub environment: String,
    /// Whether `affinode reload` applies a change of the key.
    pub reload: bool,
    /// Whether `[[policy.namespace]]` accepts the key.
    pub namespace: bool,
    /// Annotations of a container that change the key.
    pub annotations: Vec<String>,
    /// Description, from `config/config.toml`.
    pub text: String,
}

/// A key in the sample configuration file.
#[derive(Clone, Debug, PartialEq, Eq)]
struct SampleKey {
    section: String,
    name: String,
    /// Value in the sample file. `None`: the line is a comment, so the key is not set by default.
    value: Option<String>,
    text: String,
}

/// Returns every key that the code accepts, in the order of the code.
#[must_use]
pub fn keys() -> Vec<KeyReference> {
    let sample: BTreeMap<(String, String), SampleKey> = sample_keys(SAMPLE)
        .into_iter()
        .map(|key| ((key.section.clone(), key.name.clone()), key))
        .collect();
    let in_rules: Vec<String> = fields(&format!("[[{RULES}]]\nname = \"x\"\n")).unwrap_or_default();
    code_keys()
        .into_iter()
        .map(|(section, name)| {
            let described = sample.get(&(section.clone(), name.clone()));
            let (kind, accepted) = value_of(&section, &name);
            let setting = (section == "policy").then_some(name.as_str());
            KeyReference {
                kind: kind.into(),
                accepted,
                default: described.and_then(|key| key.value.clone()),
                environment: environment(&section, &name),
                reload: is_reloaded(&section, &name, kind),
                namespace: section == "policy" && in_rules.contains(&name),
                annotations: setting.map(explain::annotations).unwrap_or_default(),
                text: described.map(|key| key.text.clone()).unwrap_or_default(),
                section,
                name,
            }
        })
        .collect()
}

fn environment(section: &str, name: &str) -> String {
    format!("AFFINODE_{}__{name}", section.replace('.', "__")).to_uppercase()
}

/// Returns the section and name of each key that the deserialiser accepts. The keys of the
/// namespace rules are left out, because they are the keys of `[policy]`.
fn code_keys() -> Vec<(String, String)> {
    let mut keys = Vec::new();
    for section in fields("").unwrap_or_default() {
        collect(&section, &mut keys);
    }
    keys
}

fn collect(section: &str, keys: &mut Vec<(String, String)>) {
    for name in fields(&format!("[{section}]\n")).unwrap_or_default() {
        let inner = format!("{section}.{name}");
        if inner == RULES {
            continue;
        }
        if fields(&format!("[{inner}]\n")).is_some() {
            collect(&inner, keys);
        } else {
            keys.push((section.to_owned(), name));
        }
    }
}

/// Returns the keys that are accepted below a header. `None`: the header is not a section.
fn fields(header: &str) -> Option<Vec<String>> {
    match deserialize(&format!("{header}{UNKNOWN} = 1\n")).err()? {
        Kind::UnknownField(_, accepted) => {
            Some(accepted.iter().map(|name| (*name).to_owned()).collect())
        }
        _ => None,
    }
}

/// Deserialises a configuration text. Values that depend on each other are not checked.
fn deserialize(text: &str) -> Result<Config, Kind> {
    Figment::from(Toml::string(text)).extract().map_err(|error| error.kind)
}

/// Returns the accepted values that the configuration parser names in its error about this text.
/// `None`: the parser accepts the text, or the error names no values.
fn accepted_by(text: &str) -> Option<String> {
    let error = Config::from_toml(text).err()?.to_string();
    Some(error.split_once("accepted: ")?.1.trim_end().to_owned())
}

fn line(section: &str, name: &str, value: &str) -> String {
    format!("[{section}]\n{name} = {value}\n")
}

/// End of the accepted values of a duration that may be 0.
const NEVER: &str = "or 0 for never";

/// Returns the type and the accepted values of a key. The function sets the key to a table that no
/// type accepts, and reads the expected type from the error.
fn value_of(section: &str, name: &str) -> (&'static str, String) {
    let accepted = |values: &[&str]| {
        values.iter().find_map(|v| accepted_by(&line(section, name, v))).unwrap_or_default()
    };
    if let Err(Kind::UnknownVariant(_, words)) =
        deserialize(&line(section, name, &format!("{UNKNOWN:?}")))
    {
        return ("word", words.join(", "));
    }
    match deserialize(&line(section, name, &format!("{{ {UNKNOWN} = 1 }}"))) {
        Err(Kind::InvalidType(_, expected)) => match expected.as_str() {
            "a boolean" => ("boolean", "true, false".into()),
            "a sequence" => ("list of strings", String::new()),
            "f64" => ("number", accepted(&["-1.0"])),
            number if number.starts_with(['i', 'u']) => {
                ("integer", accepted(&["9223372036854775807", "2147483647", "0"]))
            }
            _ => {
                let all = accepted(&["\"\\u0001\"", &format!("{:?}", "x".repeat(300))]);
                match all.strip_prefix("a duration from ").and_then(|range| range.split_once(", "))
                {
                    // This is the range that holds for all durations. The next error shows a
                    // narrower range of this key, if it has one.
                    Some((range, rest)) => match accepted(&["\"366days\"", "\"1ms\""]).as_str() {
                        "" if rest.ends_with(NEVER) => ("duration", format!("{range}, {NEVER}")),
                        "" => ("duration", range.to_owned()),
                        narrower => ("duration", narrower.to_owned()),
                    },
                    None => ("string", all),
                }
            }
        },
        _ => ("value", String::new()),
    }
}

/// Returns whether a running controller applies a changed value of the key. The function reloads a
/// configuration with a changed value to find out.
fn is_reloaded(section: &str, name: &str, kind: &str) -> bool {
    let words = value_of(section, name).1;
    let mut values: Vec<String> = match kind {
        "boolean" => ["true", "false"].map(str::to_owned).to_vec(),
        "integer" => vec!["7".into()],
        "number" => vec!["7.5".into()],
        "duration" => vec!["\"7m\"".into()],
        "list of strings" => vec!["[\"x\"]".into()],
        // Some strings have a form of their own: times of the week, and amounts of memory.
        _ => ["x", "mon 00:00-01:00", "7Gi"].map(|text| format!("{text:?}")).to_vec(),
    };
    if kind == "word" {
        values.extend(words.split(", ").map(|word| format!("{word:?}")));
    }
    let other = |value: &String| {
        let read = deserialize(&line(section, name, value)).ok()?;
        (read != Config::default()).then_some(read)
    };
    values.iter().find_map(other).is_some_and(|read| Config::default().take(read).changed)
}

/// Returns the keys of a sample file, each with the comment directly above it.
fn sample_keys(text: &str) -> Vec<SampleKey> {
    let mut keys = Vec::new();
    let (mut section, mut comment) = (String::new(), Vec::new());
    // The lines after a commented header are an example of a table.
    let mut in_example = false;
    for line in text.lines() {
        let commented = line.strip_prefix('#').map(str::trim);
        in_example = commented.is_some_and(|words| in_example || words.starts_with("[["));
        let key = |name: &str, value: Option<&str>, comment: &mut Vec<&str>| SampleKey {
            section: section.clone(),
            name: name.to_owned(),
            value: value.map(str::to_owned),
            text: std::mem::take(comment).join(" "),
        };
        match (commented, assignment(commented.unwrap_or(line))) {
            (Some(_), _) if in_example => {}
            (Some(words), None) => comment.push(words),
            // A key that is not set stands in the file as a comment.
            (Some(_), Some((name, _))) => keys.push(key(name, None, &mut comment)),
            (None, Some((name, value))) => keys.push(key(name, Some(value), &mut comment)),
            (None, None) => {
                comment.clear();
                if let Some(header) = line.strip_prefix('[').and_then(|l| l.strip_suffix(']')) {
                    section = header.to_owned();
                }
            }
        }
    }
    keys
}

/// Parses a line `name = value`, and returns name and value.
fn assignment(line: &str) -> Option<(&str, &str)> {
    let (name, value) = line.split_once(" = ")?;
    let is_name = |c: char| c.is_ascii_lowercase() || c == '_' || c.is_ascii_digit();
    (!name.is_empty() && name.chars().all(is_name)).then_some((name, value))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn key(section: &str, name: &str) -> KeyReference {
        keys().into_iter().find(|key| key.section == section && key.name == name).unwrap()
    }

    #[test]
    fn code_and_sample_file_have_the_same_keys() {
        let in_code: BTreeSet<_> = code_keys().into_iter().collect();
        let in_file: BTreeSet<_> =
            sample_keys(SAMPLE).into_iter().map(|key| (key.section, key.name)).collect();
        assert!(in_code.len() > 40, "{in_code:?}");
        let missing: Vec<_> = in_code.difference(&in_file).collect();
        assert!(missing.is_empty(), "config/config.toml lacks {missing:?}");
        let unknown: Vec<_> = in_file.difference(&in_code).collect();
        assert!(unknown.is_empty(), "the code lacks {unknown:?} of config/config.toml");
    }

    #[test]
    fn every_key_has_a_sentence_of_its_own() {
        let without: Vec<String> = keys()
            .into_iter()
            .filter(|key| !key.text.ends_with('.'))
            .map(|key| format!("{}.{}: {:?}", key.section, key.name, key.text))
            .collect();
        assert!(without.is_empty(), "config/config.toml: {without:#?}");
    }

    #[test]
    fn namespaces_accept_all_keys_but_victims() {
        for key in keys().iter().filter(|key| key.section == "policy") {
            assert_eq!(key.namespace, key.name != "victims", "{}", key.name);
        }
    }

    #[test]
    fn types_and_ranges_are_those_of_the_code() {
        let said = |section, name| {
            let key = key(section, name);
            (key.kind, key.accepted)
        };
        let is = |kind: &str, accepted: &str| (kind.to_owned(), accepted.to_owned());
        assert_eq!(said("policy", "mode"), is("word", "auto, eager, pressure, manual, off"));
        assert_eq!(said("policy", "prewake"), is("boolean", "true, false"));
        assert_eq!(
            said("policy", "minimum_vram_mib"),
            is("integer", "a number of MiB, up to 1048576")
        );
        assert_eq!(said("policy", "idle_timeout"), is("duration", "1ms to 366days"));
        assert_eq!(said("policy", "disk_after"), is("duration", "1ms to 366days, or 0 for never"));
        assert_eq!(said("timing", "sample_interval"), is("duration", "10ms to 60s"));
        assert_eq!(said("timing", "lock_timeout"), is("duration", "1ms to 10m"));
        assert_eq!(said("report", "price_per_gpu_hour"), is("number", "0.0 or more"));
        assert_eq!(said("http", "listen"), is("string", "auto, off, address:port, unix:/path"));
        assert_eq!(said("http", "hosts").0, "list of strings");
        assert_eq!(said("http.kubernetes", "ca_file").0, "string");
        assert_eq!(said("memory", "node_reserve_mib").0, "integer");
    }

    #[test]
    fn reload_is_what_the_controller_does() {
        for (section, name, reload) in [
            ("policy", "mode", true),
            ("policy", "priority", true),
            ("policy", "vram_limit", true),
            ("policy", "offload_window", true),
            ("timing", "close_deadline", true),
            ("jobs", "users", true),
            ("jobs", "enabled", false),
            ("control", "view_group", false),
            ("http", "listen", false),
            ("http.kubernetes", "audiences", false),
            ("memory", "node_reserve_mib", false),
        ] {
            assert_eq!(key(section, name).reload, reload, "{section}.{name}");
        }
    }

    /// Each key of `[policy]` needs a valid value in [`is_reloaded`], or the page states the
    /// opposite of what the controller does.
    #[test]
    fn every_policy_key_is_reloaded() {
        for key in keys().iter().filter(|key| key.section == "policy") {
            assert!(key.reload, "{}", key.name);
        }
    }

    #[test]
    fn environment_and_annotations_are_named() {
        let mode = key("policy", "mode");
        assert_eq!(mode.environment, "AFFINODE_POLICY__MODE");
        assert!(mode.annotations.contains(&"affinode.io/offload".to_owned()));
        assert_eq!(
            key("http.kubernetes", "ca_file").environment,
            "AFFINODE_HTTP__KUBERNETES__CA_FILE"
        );
    }

    #[test]
    fn sample_examples_are_no_keys() {
        let text = "[a]\n# One.\n# Two.\nx = 1\ny = 2\n\n# Three.\n# z = 4\n# An example:\n# [[a.b]]\n# q = 1\n";
        let found: Vec<_> =
            sample_keys(text).into_iter().map(|key| (key.name, key.value, key.text)).collect();
        let key = |name: &str, value: Option<&str>, text: &str| {
            (name.to_owned(), value.map(str::to_owned), text.to_owned())
        };
        let expected =
            [key("x", Some("1"), "One. Two."), key("y", Some("2"), ""), key("z", None, "Three.")];
        assert_eq!(found, expected);
    }
}
