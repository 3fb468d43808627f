//! Translates the runtime options from containerd into options that the stock shim accepts.
//! containerd sends them in another form, because it does not know this shim's runtime type.
//!
//! | containerd sends | the stock shim gets |
//! | --- | --- |
//! | `containerd.runc.v1.Options` | the same bytes |
//! | `runtimeoptions.v1.Options` with TOML | `containerd.runc.v1.Options` of the same settings |
//! | `runtimeoptions.v1.Options` without TOML (containerd 1.6) | the systemd cgroup driver, if the spec's cgroups path is systemd's |
//! | nothing (ctr, nerdctl) | the systemd cgroup driver, if the spec's cgroups path is systemd's; otherwise nothing |
//! | anything else | the same bytes |

use std::path::PathBuf;

use containerd_shim_protos::protobuf::{Message, well_known_types::any::Any};
use containerd_shim_protos::shim::oci::Options as RuncOptions;

use self::generated::Options as RuntimeOptions;

#[allow(missing_docs, nonstandard_style, clippy::all, clippy::unwrap_used, unused)]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/runtimeoptions.rs"));
}

/// Type URL of the options that the stock shim accepts.
pub const RUNC_OPTIONS: &str = "containerd.runc.v1.Options";
const RUNTIME_OPTIONS: &str = "runtimeoptions.v1.Options";

/// Reason why the options of the runtime handler cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OptionsError {
    /// The bytes of the options cannot be decoded as the options' type.
    #[error("cannot decode the runtime options of type {kind}")]
    Decode {
        /// Type URL of the options.
        kind: &'static str,
        /// Error of the protobuf decoder.
        source: protobuf::Error,
    },
    /// The options' TOML cannot be parsed.
    #[error("the runtime handler's options are not TOML")]
    NotToml(#[source] Box<toml::de::Error>),
    /// The file that ConfigPath names cannot be read.
    #[error("cannot read ConfigPath {path} of the runtime handler's options")]
    ConfigPath {
        /// Path that the handler names.
        path: PathBuf,
        /// Error of reading the file.
        source: std::io::Error,
    },
    /// A setting in the options has the wrong type.
    #[error(
        "option {name} of the runtime handler is {found}, expected {expected}; correct it in containerd's config.toml"
    )]
    WrongType {
        /// Name of the setting, as the operator wrote it.
        name: String,
        /// Type of the given value.
        found: &'static str,
        /// Type or range that is accepted.
        expected: &'static str,
    },
}

/// Returns options for the stock shim. Returns `None` if the stock shim accepts the given options.
/// `cgroups_path` is the spec's `linux.cgroupsPath`.
pub fn translate(
    given: Option<&Any>,
    cgroups_path: Option<&str>,
) -> Result<Option<Any>, OptionsError> {
    let systemd = cgroups_path.is_some_and(is_systemd);
    let Some(any) = given.filter(|any| !any.type_url.is_empty()) else {
        return if systemd {
            let mut options = RuncOptions::new();
            options.systemd_cgroup = true;
            pack(&options).map(Some)
        } else {
            Ok(None)
        };
    };
    if type_name(any) != RUNTIME_OPTIONS {
        return Ok(None);
    }
    let runtime = RuntimeOptions::parse_from_bytes(&any.value)
        .map_err(|source| OptionsError::Decode { kind: RUNTIME_OPTIONS, source })?;
    let text = if runtime.config_path.is_empty() {
        String::from_utf8_lossy(&runtime.config_body).into_owned()
    } else {
        std::fs::read_to_string(&runtime.config_path).map_err(|source| {
            OptionsError::ConfigPath { path: PathBuf::from(&runtime.config_path), source }
        })?
    };
    let mut options = RuncOptions::new();
    if text.trim().is_empty() {
        options.systemd_cgroup = systemd;
    } else {
        let table: toml::Table =
            text.parse().map_err(|error| OptionsError::NotToml(Box::new(error)))?;
        apply(&mut options, &table)?;
    }
    pack(&options).map(Some)
}

/// Returns the cgroup in which these options place the shim. Returns `None` if they name no cgroup.
#[must_use]
pub fn shim_cgroup(any: Option<&Any>) -> Option<String> {
    let any = any.filter(|any| type_name(any) == RUNC_OPTIONS)?;
    let options = RuncOptions::parse_from_bytes(&any.value).ok()?;
    Some(options.shim_cgroup).filter(|path| !path.is_empty())
}

/// Whether a path has the form that the systemd cgroup driver uses: `slice:prefix:name`.
#[must_use]
pub fn is_systemd(cgroups_path: &str) -> bool {
    let parts: Vec<&str> = cgroups_path.split(':').collect();
    matches!(parts[..], [slice, _, name] if !slice.contains('/') && !name.is_empty() && !name.contains('/'))
}

fn type_name(any: &Any) -> &str {
    any.type_url.rsplit('/').next().unwrap_or_default()
}

fn pack(options: &RuncOptions) -> Result<Any, OptionsError> {
    let mut any = Any::new();
    any.type_url = RUNC_OPTIONS.to_owned();
    any.value = options
        .write_to_bytes()
        .map_err(|source| OptionsError::Decode { kind: RUNC_OPTIONS, source })?;
    Ok(any)
}

/// Copies the settings of `table` to `options`. The names of settings are Go field names, without
/// regard to upper and lower case, as in containerd's TOML decoder. Settings that runc does not
/// have belong to another runtime and are ignored.
fn apply(options: &mut RuncOptions, table: &toml::Table) -> Result<(), OptionsError> {
    for (name, value) in table {
        match name.to_ascii_lowercase().as_str() {
            "nopivotroot" => options.no_pivot_root = boolean(name, value)?,
            "nonewkeyring" => options.no_new_keyring = boolean(name, value)?,
            "shimcgroup" => options.shim_cgroup = string(name, value)?,
            "iouid" => options.io_uid = number(name, value)?,
            "iogid" => options.io_gid = number(name, value)?,
            "binaryname" => options.binary_name = string(name, value)?,
            "root" => options.root = string(name, value)?,
            "systemdcgroup" => options.systemd_cgroup = boolean(name, value)?,
            "criuimagepath" => options.criu_image_path = string(name, value)?,
            "criuworkpath" => options.criu_work_path = string(name, value)?,
            _ => {}
        }
    }
    Ok(())
}

fn wrong(name: &str, value: &toml::Value, expected: &'static str) -> OptionsError {
    OptionsError::WrongType { name: name.to_owned(), found: value.type_str(), expected }
}

fn boolean(name: &str, value: &toml::Value) -> Result<bool, OptionsError> {
    value.as_bool().ok_or_else(|| wrong(name, value, "true or false"))
}

fn string(name: &str, value: &toml::Value) -> Result<String, OptionsError> {
    Ok(value.as_str().ok_or_else(|| wrong(name, value, "a string"))?.to_owned())
}

fn number(name: &str, value: &toml::Value) -> Result<u32, OptionsError> {
    value
        .as_integer()
        .and_then(|number| u32::try_from(number).ok())
        .ok_or_else(|| wrong(name, value, "an integer from 0 to 4294967295"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cri(body: &str) -> Any {
        let mut options = RuntimeOptions::new();
        options.config_body = body.as_bytes().to_vec();
        let mut any = Any::new();
        any.type_url = RUNTIME_OPTIONS.to_owned();
        any.value = options.write_to_bytes().unwrap();
        any
    }

    fn runc(any: &Any) -> RuncOptions {
        assert_eq!(any.type_url, RUNC_OPTIONS);
        RuncOptions::parse_from_bytes(&any.value).unwrap()
    }

    #[test]
    fn every_setting_of_a_handler_arrives() {
        let any = cri(r#"
            BinaryName = "/usr/bin/nvidia-container-runtime"
            CriuImagePath = "/i"
            CriuPath = ""
            CriuWorkPath = "/w"
            IoGid = 7
            IoUid = 4294967295
            NoNewKeyring = true
            NoPivotRoot = true
            Root = "/run/x"
            ShimCgroup = "/shims"
            SystemdCgroup = true
        "#);
        let got = translate(Some(&any), None).unwrap().unwrap();
        assert_eq!(shim_cgroup(Some(&got)).as_deref(), Some("/shims"));
        let got = runc(&got);
        assert_eq!(got.binary_name, "/usr/bin/nvidia-container-runtime");
        assert_eq!((got.io_uid, got.io_gid), (u32::MAX, 7));
        assert_eq!((got.criu_image_path.as_str(), got.criu_work_path.as_str()), ("/i", "/w"));
        assert!(got.no_new_keyring && got.no_pivot_root && got.systemd_cgroup);
        assert_eq!(got.root, "/run/x");
    }

    #[test]
    fn names_match_in_any_case_unknown_are_ignored() {
        let any = cri("systemdcgroup = true\nSomethingElse = [1]\n");
        assert!(runc(&translate(Some(&any), None).unwrap().unwrap()).systemd_cgroup);
    }

    #[test]
    fn an_explicit_no_wins_over_the_path() {
        let any = cri("SystemdCgroup = false");
        let got = translate(Some(&any), Some("a.slice:cri:b")).unwrap();
        assert!(!runc(&got.unwrap()).systemd_cgroup);
    }

    #[test]
    fn without_settings_the_path_tells_the_driver() {
        for given in [None, Some(cri(""))] {
            let got = translate(given.as_ref(), Some("kubepods-pod1.slice:cri-containerd:x"));
            assert!(runc(&got.unwrap().unwrap()).systemd_cgroup);
        }
        assert!(translate(None, Some("/kubepods/pod1/x")).unwrap().is_none());
        assert!(translate(None, None).unwrap().is_none());
        let got = translate(Some(&cri("")), Some("/default/x")).unwrap();
        assert!(!runc(&got.unwrap()).systemd_cgroup);
    }

    #[test]
    fn runc_options_and_strangers_stay_as_they_are() {
        for kind in [RUNC_OPTIONS, "type.googleapis.com/containerd.runc.v1.Options", "x.Y"] {
            let mut any = Any::new();
            any.type_url = kind.to_owned();
            any.value = vec![1, 2, 3];
            assert!(translate(Some(&any), Some("s:p:n")).unwrap().is_none());
        }
    }

    #[test]
    fn a_config_path_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("options.toml");
        std::fs::write(&path, "BinaryName = 'crun'").unwrap();
        let mut options = RuntimeOptions::new();
        options.config_path = path.to_str().unwrap().to_owned();
        let mut any = Any::new();
        any.type_url = format!("type.googleapis.com/{RUNTIME_OPTIONS}");
        any.value = options.write_to_bytes().unwrap();
        let got = translate(Some(&any), None).unwrap().unwrap();
        assert_eq!(runc(&got).binary_name, "crun");
        std::fs::remove_file(&path).unwrap();
        let error = translate(Some(&any), None).unwrap_err().to_string();
        assert!(error.contains("cannot read ConfigPath"), "{error}");
    }

    #[test]
    fn wrong_settings_are_named() {
        for (body, wanted) in [
            (
                "SystemdCgroup = 'yes'",
                "option SystemdCgroup of the runtime handler is string, expected true or false",
            ),
            (
                "IoUid = -1",
                "option IoUid of the runtime handler is integer, expected an integer from 0",
            ),
            ("= 1", "not TOML"),
        ] {
            let error = translate(Some(&cri(body)), None).unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
        }
    }

    #[test]
    fn systemd_paths() {
        for (path, wanted) in [
            ("system.slice:nerdctl:0123", true),
            (":cri:x", true),
            ("/default/x", false),
            ("/a:b:c", false),
            ("a:b", false),
            ("a.slice:p:", false),
            ("a:b:c:d", false),
        ] {
            assert_eq!(is_systemd(path), wanted, "{path}");
        }
    }
}
