//! Determines whether containers get their GPUs through the Container Device Interface (CDI). The
//! container runtime then needs no program of NVIDIA.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde::Deserialize;
use toml::{Table, Value};

use super::{containerd::RENDERED, handler::PLUGINS};

/// Setting of the CRI plugin that turns CDI on, in containerd 1.7 to 2.3.
const ENABLE: &str = "enable_cdi";
/// First version of containerd's configuration format that has no setting for CDI. From this
/// version on, CDI is always on (seen with containerd 2.4.2).
const ALWAYS_ON_SINCE: i64 = 4;
/// Folders of CDI specifications that containerd reads by default.
const SPEC_DIRS: [&str; 2] = ["/etc/cdi", "/var/run/cdi"];
/// Vendors in the CDI specifications of NVIDIA's device plugin and of NVIDIA's GPU operator.
const VENDORS: [&str; 2] = ["k8s.device-plugin.nvidia.com", "management.nvidia.com"];
/// Maximum size of a CDI specification file, in bytes. Larger files are ignored when the vendor of
/// a specification is determined.
const MAX_SPEC_BYTES: u64 = 16 << 20;

/// Returns whether containers get their devices from CDI. `config` is containerd's whole
/// configuration, and `files` are the files from which it is made.
///
/// CDI must be on in `config`. containerd 2 turns CDI on by default, so this alone does not show
/// that CDI is used. In addition, one of `files` must turn CDI on explicitly, as NVIDIA's toolkit
/// does, or there must be CDI specifications for Kubernetes.
#[must_use]
pub fn injects(config: &Table, files: &[PathBuf]) -> bool {
    is_enabled(config)
        && (files.iter().any(|file| says(file)) || spec_dirs(config).iter().any(has_spec))
}

/// Returns whether CDI is on, according to containerd's whole configuration.
#[must_use]
pub fn is_enabled(config: &Table) -> bool {
    let version = config.get("version").and_then(Value::as_integer);
    enables(config) || version.is_some_and(|version| version >= ALWAYS_ON_SINCE)
}

/// Returns whether a configuration contains the setting that turns CDI on.
fn enables(config: &Table) -> bool {
    plugin_value(config, ENABLE).and_then(Value::as_bool) == Some(true)
}

fn plugin_value<'a>(config: &'a Table, key: &str) -> Option<&'a Value> {
    PLUGINS.iter().find_map(|plugin| config.get("plugins")?.get(*plugin)?.get(key))
}

/// Returns whether this file itself contains the setting that turns CDI on. For the file that k3s
/// or rke2 generates, returns false, because its content is not an operator's choice.
fn says(file: &Path) -> bool {
    let text = fs::read_to_string(file).unwrap_or_default();
    let own = text.parse::<Table>().unwrap_or_default();
    !file.ends_with(RENDERED) && enables(&own)
}

fn spec_dirs(config: &Table) -> Vec<PathBuf> {
    let named = plugin_value(config, "cdi_spec_dirs").and_then(Value::as_array);
    let named: Vec<_> = named.into_iter().flatten().filter_map(Value::as_str).collect();
    let dirs = if named.is_empty() { SPEC_DIRS.to_vec() } else { named };
    dirs.into_iter().map(PathBuf::from).collect()
}

#[derive(Deserialize)]
struct CdiSpec {
    kind: String,
}

fn has_spec(folder: &PathBuf) -> bool {
    fs::read_dir(folder).into_iter().flatten().flatten().any(|entry| {
        let small = entry.metadata().is_ok_and(|data| data.len() <= MAX_SPEC_BYTES);
        let text = if small { fs::read_to_string(entry.path()) } else { return false };
        // Every JSON file is valid YAML.
        let spec = serde_yaml_ng::from_str::<CdiSpec>(&text.unwrap_or_default());
        spec.is_ok_and(|spec| {
            spec.kind.split_once('/').is_some_and(|(vendor, _)| VENDORS.contains(&vendor))
        })
    })
}

#[cfg(test)]
mod tests;
