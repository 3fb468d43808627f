//! Detects whether a container has a GPU.
//!
//! | sign | where |
//! | --- | --- |
//! | device node `/dev/nvidia<number>` | `linux.devices`, or bind-mounted |
//! | CDI device `…nvidia.com/gpu=…` or `…nvidia.com/mig…=…` | annotations `cdi.k8s.io/*` |
//! | `NVIDIA_VISIBLE_DEVICES` other than empty, `void`, `none` | `process.env` |
//! | `affinode.io/inject: true` | annotations; `false` wins over everything |

use serde_json::Value;

use super::{CONTAINER_TYPE, CRIO_CONTAINER_TYPE, annotation, annotations, destinations};

/// Annotation that overrides all other signs of a GPU.
const INJECT: &str = "affinode.io/inject";

/// Decision whether a container is managed, and a warning about its annotation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuDecision {
    /// Whether the container is to be edited and announced.
    pub manage: bool,
    /// Warning about an invalid value of the annotation, for the log.
    pub warning: Option<String>,
}

/// Decides from the spec whether the container is to be managed. Accesses no file or device.
#[must_use]
pub fn decide(spec: &Value) -> GpuDecision {
    // The sandbox has the pod's annotations, but runs no CUDA program.
    let kind = |name| annotation(spec, name) == Some("sandbox");
    if kind(CONTAINER_TYPE) || kind(CRIO_CONTAINER_TYPE) {
        return GpuDecision::default();
    }
    let mut warning = None;
    let manage = match annotation(spec, INJECT) {
        Some("true") => true,
        Some("false") => false,
        None | Some("auto") => has_gpu(spec),
        Some(other) => {
            warning = Some(format!(
                "annotation {INJECT} is {other:?}, expected auto, true or false; using auto"
            ));
            has_gpu(spec)
        }
    };
    GpuDecision { manage, warning }
}

fn has_gpu(spec: &Value) -> bool {
    has_node(spec) || has_cdi_device(spec) || has_visible_devices(spec)
}

fn has_node(spec: &Value) -> bool {
    let devices =
        spec.get("linux").and_then(|linux| linux.get("devices")).and_then(Value::as_array);
    devices.into_iter().flatten().filter_map(|device| device.get("path")?.as_str()).any(is_node)
        || destinations(spec).any(|path| is_node(&path))
}

fn is_node(path: &str) -> bool {
    path.strip_prefix("/dev/nvidia").is_some_and(|number| {
        !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
    })
}

fn has_cdi_device(spec: &Value) -> bool {
    annotations(spec)
        .filter(|(name, _)| name.starts_with("cdi.k8s.io/"))
        .flat_map(|(_, devices)| devices.split(','))
        .any(|device| {
            let kind = device.split('=').next().unwrap_or_default().trim();
            let Some((vendor, class)) = kind.split_once('/') else {
                return false;
            };
            // The vendor is nvidia.com itself, or a subdomain such as k8s.device-plugin.nvidia.com.
            let nvidia = vendor == "nvidia.com" || vendor.ends_with(".nvidia.com");
            nvidia && (class == "gpu" || class.starts_with("mig"))
        })
}

fn has_visible_devices(spec: &Value) -> bool {
    let env = spec.get("process").and_then(|process| process.get("env")).and_then(Value::as_array);
    // If a variable occurs more than once, the last entry applies, as in the container's process.
    env.into_iter()
        .flatten()
        .filter_map(|entry| entry.as_str()?.strip_prefix("NVIDIA_VISIBLE_DEVICES="))
        .next_back()
        .is_some_and(|devices| !matches!(devices.trim(), "" | "void" | "none"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn env(value: &str) -> Value {
        json!({"process": {"env": ["PATH=/bin", format!("NVIDIA_VISIBLE_DEVICES={value}")]}})
    }

    fn node(path: &str) -> Value {
        json!({"linux": {"devices": [{"path": "/dev/null"}, {"path": path, "major": 195}]}})
    }

    fn cdi(value: &str) -> Value {
        json!({"annotations": {"cdi.k8s.io/nvidia-device-plugin_x": value}})
    }

    #[test]
    fn the_table_of_signs() {
        for (spec, wanted) in [
            (json!({}), false),
            (json!({"annotations": null, "linux": null, "process": null, "mounts": null}), false),
            (
                json!({"annotations": [], "linux": {"devices": {}}, "process": {"env": [1, null]}}),
                false,
            ),
            (node("/dev/nvidia0"), true),
            (node("/dev/nvidia15"), true),
            (node("/dev/nvidia"), false),
            (node("/dev/nvidiactl"), false),
            (node("/dev/nvidia-uvm"), false),
            (node("/dev/nvidia0x"), false),
            (node("/dev/dri/card0"), false),
            (json!({"mounts": [{"destination": "/dev//nvidia3", "source": "/dev/nvidia3"}]}), true),
            (env("all"), true),
            (env("0,1"), true),
            (env("GPU-8b2e6a5c"), true),
            (env("MIG-1"), true),
            (env(""), false),
            (env("void"), false),
            (env("none"), false),
            (
                json!({"process": {"env": ["NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_VISIBLE_DEVICES=void"]}}),
                false,
            ),
            (json!({"process": {"env": ["MY_NVIDIA_VISIBLE_DEVICES=all"]}}), false),
            (cdi("nvidia.com/gpu=0"), true),
            (cdi("vendor.com/nic=a, k8s.device-plugin.nvidia.com/gpu=GPU-1"), true),
            (cdi("nvidia.com/mig-1g.10gb=0"), true),
            (cdi("nvidia.com/nic=0"), false),
            (cdi("notnvidia.com/gpu=0"), false),
            (cdi("gpu"), false),
            (json!({"annotations": {"other.io/x": "nvidia.com/gpu=0"}}), false),
        ] {
            assert_eq!(decide(&spec).manage, wanted, "{spec}");
        }
    }

    #[test]
    fn the_annotation_decides() {
        for (value, gpu, wanted) in [
            ("true", false, true),
            ("false", true, false),
            ("auto", true, true),
            ("auto", false, false),
        ] {
            let mut spec = env(if gpu { "all" } else { "none" });
            spec["annotations"] = json!({ INJECT: value });
            let wanted = GpuDecision { manage: wanted, warning: None };
            assert_eq!(decide(&spec), wanted, "{spec}");
        }
    }

    #[test]
    fn a_bad_value_is_told_and_changes_nothing() {
        for gpu in ["all", "none"] {
            let plain = decide(&env(gpu));
            let mut spec = env(gpu);
            spec["annotations"] = json!({ INJECT: "yes" });
            let got = decide(&spec);
            assert_eq!(got.manage, plain.manage);
            let warning = got.warning.unwrap();
            assert!(warning.contains("\"yes\", expected auto, true or false"), "{warning}");
        }
    }

    #[test]
    fn a_sandbox_is_never_managed() {
        for kind in [CONTAINER_TYPE, CRIO_CONTAINER_TYPE] {
            let spec = json!({"annotations": {kind: "sandbox", INJECT: "true"}});
            assert!(!decide(&spec).manage, "{kind}");
        }
        let spec = json!({"annotations": {CONTAINER_TYPE: "container", INJECT: "true"}});
        assert!(decide(&spec).manage);
    }
}
