//! Reads and edits a container's spec (config.json) as a JSON value. The spec is never converted to
//! types and back, so fields that this version does not define survive the edit.

mod detect;
mod edit;

pub use detect::{GpuDecision, decide};
pub use edit::{BindMount, EditError, add_mounts, take_file_mount};

use serde_json::Value;

/// Annotation with the kind of a container in its pod (sandbox or container), which CRI sets.
pub const CONTAINER_TYPE: &str = "io.kubernetes.cri.container-type";
/// Annotation with the kind of a container in its pod. CRI-O sets it for all containers, and Podman
/// sets it for containers in pods.
pub const CRIO_CONTAINER_TYPE: &str = "io.kubernetes.cri-o.ContainerType";
/// Annotation with the id of the sandbox of the container's pod.
pub const SANDBOX_ID: &str = "io.kubernetes.cri.sandbox-id";

/// The value of the annotation with this name.
#[must_use]
pub fn annotation<'a>(spec: &'a Value, name: &str) -> Option<&'a str> {
    spec.get("annotations")?.get(name)?.as_str()
}

/// All annotations whose values are strings.
pub fn annotations(spec: &Value) -> impl Iterator<Item = (&str, &str)> {
    spec.get("annotations")
        .and_then(Value::as_object)
        .into_iter()
        .flatten()
        .filter_map(|(name, value)| Some((name.as_str(), value.as_str()?)))
}

/// The spec's `linux.cgroupsPath`, if set.
#[must_use]
pub fn cgroups_path(spec: &Value) -> Option<&str> {
    spec.get("linux")?.get("cgroupsPath")?.as_str()
}

/// The spec's `root.path`, if set.
#[must_use]
pub fn root_path(spec: &Value) -> Option<&str> {
    spec.get("root")?.get("path")?.as_str()
}

/// Source and destination of each mount in the spec that has both.
pub fn mounts(spec: &Value) -> impl Iterator<Item = (&str, &str)> {
    let mounts = spec.get("mounts").and_then(Value::as_array);
    mounts.into_iter().flatten().filter_map(|mount| {
        Some((mount.get("source")?.as_str()?, mount.get("destination")?.as_str()?))
    })
}

/// Destinations of all mounts in the spec, with redundant slashes and dots removed.
fn destinations(spec: &Value) -> impl Iterator<Item = String> {
    spec.get("mounts")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(|mount| Some(clean(mount.get("destination")?.as_str()?)))
}

/// Normalises an absolute path without file access: `//etc/./x/../` is `/etc`.
fn clean(path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    format!("/{}", parts.join("/"))
}
