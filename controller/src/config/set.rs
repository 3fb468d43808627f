//! Stores the policy values of the node that `affinode policy set` changes. They are in a separate
//! configuration file in `conf.d`. The values therefore persist, and operators see them next to the
//! rest of the configuration.
//!
//! ```text
//! changes ──> new drop-in ──load the configuration with it──invalid──> nothing is written
//!                                              └──valid──> write to a new file, rename
//! ```

use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
};

use affinode_core::explain;

use super::{Config, ConfigError};

/// Name of the file in `conf.d` for the values of `affinode policy set`. It sorts late, so that it
/// overrides the files of packages and operators.
const FILE: &str = "90-affinode-policy-set.toml";
const HEADER: &str =
    "# Written by `affinode policy set`; `affinode policy unset` removes values.\n";

/// Reason why `affinode policy set` failed. Only with [`SetError::Stored`] was anything changed.
#[derive(Debug, thiserror::Error)]
pub enum SetError {
    /// No policy setting has this name.
    #[error("unknown policy setting {0:?}; accepted: {names}", names = explain::names().collect::<Vec<_>>().join(", "))]
    Name(String),
    /// The configuration would be invalid with the change.
    #[error("the policy was not changed, because the configuration would be invalid")]
    Config(#[from] ConfigError),
    /// The existing file of `affinode policy set` is not valid TOML.
    #[error("the policy was not changed, because {path} is not valid TOML")]
    Old {
        /// Path of the invalid file.
        path: PathBuf,
        /// Error of the TOML parser.
        #[source]
        source: Box<toml::de::Error>,
    },
    /// The change is stored, but the configuration could not be read after it.
    #[error("the policy is stored, but the configuration cannot be read: run `affinode reload`")]
    Stored(#[source] ConfigError),
    /// The file of `affinode policy set` cannot be read or written.
    #[error("the policy was not changed, because {path} cannot be read or written")]
    File {
        /// Path of the file of `affinode policy set`.
        path: PathBuf,
        /// Error of the system call.
        #[source]
        source: io::Error,
    },
}

/// Changes settings of `[policy]` for the configuration in `file`. Each change contains the name of
/// a setting and its new value, both written as in a configuration file. An empty value removes the
/// setting. The resulting configuration is checked before anything is written. Returns the resulting
/// configuration.
///
/// # Errors
/// [`SetError`]: the change is invalid, or cannot be stored or read.
pub fn set(file: &Path, changes: &[(String, String)]) -> Result<Config, SetError> {
    let folder = file.parent().unwrap_or(Path::new("/")).join("conf.d");
    let path = folder.join(FILE);
    let failed = |source| SetError::File { path: path.clone(), source };
    let old = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(e) if e.kind() == io::ErrorKind::NotFound => String::new(),
        Err(e) => return Err(failed(e)),
    };
    let mut table: toml::Table =
        old.parse().map_err(|e| SetError::Old { path: path.clone(), source: Box::new(e) })?;
    let policy = table.entry("policy").or_insert_with(|| toml::Table::new().into());
    let toml::Value::Table(policy) = policy else {
        return Err(
            ConfigError::Bad(format!("policy in {} is not a TOML table", path.display())).into()
        );
    };
    for (name, value) in changes {
        if !explain::names().any(|known| known == name) {
            return Err(SetError::Name(name.chars().take(80).collect()));
        }
        if value.is_empty() {
            policy.remove(name);
        } else {
            let is_valid = |value: &toml::Value| {
                let text = toml::Table::from_iter([(name.clone(), value.clone())]).to_string();
                Config::load_with(file, Some((&path, &format!("[policy]\n{text}")))).is_ok()
            };
            policy.insert(name.clone(), typed(value, is_valid));
        }
    }
    let text = format!("{HEADER}{table}");
    Config::load_with(file, Some((&path, &text)))?;
    fs::create_dir_all(&folder).map_err(failed)?;
    let fresh = folder.join(format!(".{FILE}.new"));
    let write = || {
        let mut file = fs::File::create(&fresh)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&fresh, &path)
    };
    write().map_err(failed)?;
    Config::load(file).map_err(SetError::Stored)
}

/// Converts a value from the command line to a TOML value. The value has no quotes, so its type is
/// inferred: a whole number, a boolean, or else a string. A number becomes a string if the setting
/// is valid only with a string.
fn typed(value: &str, is_valid: impl Fn(&toml::Value) -> bool) -> toml::Value {
    if let Ok(number) = value.parse::<i64>() {
        let (number, text) = (toml::Value::from(number), toml::Value::from(value));
        return if !is_valid(&number) && is_valid(&text) { text } else { number };
    }
    value.parse::<bool>().map_or_else(|_| value.into(), Into::into)
}

#[cfg(test)]
mod tests {
    use affinode_core::policy::Mode;

    use super::*;

    fn change(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect()
    }

    /// The limit of VRAM is a string in the configuration, also where it looks like a number.
    #[test]
    fn number_of_a_text_setting_is_accepted() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("config.toml");
        fs::write(&file, "[policy]\nvram_limit = \"20Gi\"\n").unwrap();
        set(&file, &change(&[("vram_limit", "0"), ("priority", "7")])).unwrap();
        let config = Config::load(&file).unwrap();
        let node = config.policy.policy();
        assert_eq!((node.vram_limit_bytes, node.priority), (0, 7));
        assert!(set(&file, &change(&[("vram_limit", "7")])).is_err());
    }

    #[test]
    fn a_set_value_wins_until_it_is_unset() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("config.toml");
        fs::write(&file, "[policy]\nmode = \"off\"\npriority = 3\n").unwrap();
        let changes = change(&[("mode", "manual"), ("priority", "7"), ("prewake", "true")]);
        let config = set(&file, &changes).unwrap();
        let policy = config.policy.policy();
        assert_eq!((policy.mode, policy.priority), (Mode::Manual, 7));
        assert!(policy.prewake && config.origins["mode"].ends_with(FILE));
        set(&file, &change(&[("mode", "")])).unwrap();
        let config = Config::load(&file).unwrap();
        let policy = config.policy.policy();
        assert_eq!((policy.mode, policy.priority), (Mode::Off, 7));
    }

    #[test]
    fn a_bad_value_or_name_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("config.toml");
        set(&file, &change(&[("idle_timeout", "90s")])).unwrap();
        let before = fs::read_to_string(folder.path().join("conf.d").join(FILE)).unwrap();
        for (name, value, named) in [
            ("idle_timeout", "soon", "soon"),
            ("mode", "often", "often"),
            ("colour", "red", "colour"),
            ("namespace", "x", "namespace"),
        ] {
            let error = set(&file, &change(&[("priority", "1"), (name, value)])).unwrap_err();
            assert!(crate::error_chain::chain(&error).contains(named), "{error:?}");
            let now = fs::read_to_string(folder.path().join("conf.d").join(FILE)).unwrap();
            assert_eq!(before, now);
        }
        assert_eq!(Config::load(&file).unwrap().policy.idle_timeout_ms.0, 90_000);
    }
}
