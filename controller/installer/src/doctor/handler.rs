//! Checks of Affinode's handler in containerd's CRI plugin. A RuntimeClass refers to the handler.

use std::path::Path;

use toml::{Table, Value};

use super::{CheckGroup, DoctorCheck, is_program, programs::SHIM};

/// The runtime type from which containerd derives the name of the shim.
pub const RUNTIME_TYPE: &str = "io.containerd.affinode.v1";
/// Names of the CRI plugin in configuration files of version 2 and of version 3.
pub const PLUGINS: [&str; 2] = ["io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"];
/// Pattern of the annotations that containerd must pass to the shim.
pub const ANNOTATIONS: &str = "affinode.io/*";
/// Name of containerd's stock handler.
const STOCK: &str = "runc";
/// Name of the handler that NVIDIA's toolkit adds.
const NVIDIA: &str = "nvidia";
/// Options of Affinode's handler that must have the same values as in the model handler (see
/// [`model`]).
const OPTIONS: [&str; 2] = ["SystemdCgroup", "BinaryName"];

/// Names under which containerd's configuration can disable CRI. Docker's packages use the first
/// name.
const DISABLED_NAMES: [&str; 3] = ["cri", PLUGINS[0], PLUGINS[1]];

/// Returns whether the configuration disables CRI. The presence of CRI's settings is no proof that
/// CRI is enabled, because the dump of containerd 2 also contains the settings of disabled plugins.
#[must_use]
pub fn disables_cri(config: &Table) -> bool {
    let disabled = config.get("disabled_plugins").and_then(Value::as_array);
    let is_cri = |name: &Value| name.as_str().is_some_and(|name| DISABLED_NAMES.contains(&name));
    disabled.into_iter().flatten().any(is_cri)
}

/// Checks Affinode's handler in containerd's configuration. `kubernetes`: whether pods run on this
/// machine. `cdi`: whether containers get their devices from CDI.
#[must_use]
pub fn judge(config: &Result<Table, String>, kubernetes: bool, cdi: bool) -> Vec<DoctorCheck> {
    let mut group = CheckGroup::new("containerd");
    let config = match config {
        Ok(config) => config,
        Err(why) => {
            let hint = "correct the error that `containerd config dump` prints";
            group.bad("configuration", why.clone(), hint);
            return group.checks;
        }
    };
    let cri = PLUGINS.iter().find_map(|plugin| table(config, &["plugins", plugin, "containerd"]));
    let Some(cri) = cri.filter(|_| !disables_cri(config)) else {
        let (found, hint) = match disables_cri(config) {
            true => (
                "CRI is disabled in containerd's configuration",
                "remove CRI's name from disabled_plugins in containerd's configuration",
            ),
            false => ("CRI is not configured", "enable the CRI plugin of containerd"),
        };
        if kubernetes {
            group.bad("handler", found, hint);
        } else {
            group.good("handler", format!("{found}, and no handler is needed without Kubernetes"));
        }
        return group.checks;
    };
    let handlers = table(cri, &["runtimes"]);
    let ours = handlers.into_iter().flatten().find(|(_, handler)| is_ours(handler));
    match ours {
        Some((name, Value::Table(handler))) => {
            judge_handler(&mut group, (name, handler), handlers, cri, cdi)
        }
        _ => {
            let hint = "run affinode install. By hand: append config/containerd/affinode-v2.toml to config.toml (containerd 1.x), or copy affinode-v3.toml into a folder that config.toml imports (2.x), and restart containerd";
            if kubernetes {
                group.bad(
                    "handler",
                    "Affinode's handler is missing: pods cannot use Affinode",
                    hint,
                );
            } else {
                group.warning(
                    "handler",
                    "Affinode's handler is missing: only pods need it, ctr and nerdctl do not",
                    hint,
                );
            }
        }
    }
    group.checks
}

fn table<'a>(from: &'a Table, path: &[&str]) -> Option<&'a Table> {
    path.iter().try_fold(from, |table, key| table.get(*key)?.as_table())
}

/// Returns the name and the table of the model handler. It is the handler that pods would use
/// without Affinode, and Affinode's handler copies its options. `ours` is the name of Affinode's
/// handler. `cdi`: whether containers get their devices from CDI.
///
/// | handlers in the configuration | model handler |
/// | --- | --- |
/// | the default handler is `nvidia`, or there is no `nvidia` | the default handler |
/// | devices come from CDI | the default handler. `nvidia` would also give GPUs to a container that requests none, if its image sets `NVIDIA_VISIBLE_DEVICES` |
/// | all other cases | `nvidia`: pods get their GPU because their runtime class names it |
#[must_use]
pub fn model<'a>(cri: &'a Table, ours: &str, cdi: bool) -> Option<(&'a str, &'a Table)> {
    let handlers = table(cri, &["runtimes"])?;
    let default = cri.get("default_runtime_name").and_then(Value::as_str);
    let default = default.filter(|name| *name != ours && !name.is_empty()).unwrap_or(STOCK);
    let order = if cdi { [default, NVIDIA] } else { [NVIDIA, default] };
    order.into_iter().find_map(|name| {
        let (name, handler) = handlers.get_key_value(name)?;
        Some((name.as_str(), handler.as_table()?))
    })
}

fn is_ours(handler: &Value) -> bool {
    let text = |key: &str| handler.get(key).and_then(Value::as_str).unwrap_or_default();
    text("runtime_type") == RUNTIME_TYPE
        || Path::new(text("runtime_path")).file_name().is_some_and(|name| name == SHIM)
}

fn judge_handler(
    group: &mut CheckGroup,
    (name, handler): (&str, &Table),
    handlers: Option<&Table>,
    cri: &Table,
    cdi: bool,
) {
    let path = handler.get("runtime_path").and_then(Value::as_str).unwrap_or_default();
    if path.is_empty() || is_program(Path::new(path)) {
        group.good(
            "handler",
            format!("{name}: name this handler in a RuntimeClass (see config/kubernetes)"),
        );
    } else {
        let hint = "set runtime_path to the file containerd-shim-affinode-v1, or remove the key";
        group.bad(
            "handler",
            format!("{name}: runtime_path {path} is not an executable file"),
            hint,
        );
    }
    for key in ["pod_annotations", "container_annotations"] {
        let passed = handler.get(key).and_then(Value::as_array).into_iter().flatten();
        if !passed.filter_map(Value::as_str).any(|passed| passed == ANNOTATIONS || passed == "*") {
            let found = format!("{key} of handler {name} does not contain {ANNOTATIONS}");
            group.warning(
                "annotations",
                found,
                "add the pattern to this key; without it, containerd does not pass the annotations \
                 to the runtime, and they have no effect",
            );
        }
    }
    let default = cri.get("default_runtime_name").and_then(Value::as_str).unwrap_or("runc");
    let known =
        |name: &str| handlers.and_then(|handlers| handlers.get(name)).and_then(Value::as_table);
    if known(default).is_none() {
        let found = format!("the default handler {default} is not configured");
        group.bad(
            "default handler",
            found,
            "add the default handler: without it, pods without a runtime class fail",
        );
    }
    let Some((model, other)) = model(cri, name, cdi) else { return };
    for option in OPTIONS {
        let of =
            |handler: &Table| table(handler, &["options"]).and_then(|o| o.get(option)).cloned();
        let (theirs, ours) =
            (of(other).filter(|v| !is_default(v)), of(handler).filter(|v| !is_default(v)));
        if theirs != ours {
            let say =
                |value: &Option<Value>| value.as_ref().map_or("not set".into(), Value::to_string);
            let found = format!(
                "option {option} is {} in handler {name}, but {} in handler {model}",
                say(&ours),
                say(&theirs)
            );
            let hint = format!(
                "copy the options of handler {model}, so that pods run in the same environment"
            );
            group.warning("options", found, hint);
        }
    }
}

fn is_default(value: &Value) -> bool {
    matches!(value, Value::Boolean(false)) || value.as_str() == Some("")
}

#[cfg(test)]
mod tests {
    use super::{super::CheckVerdict, *};

    const RUNC: &str = r#"[plugins."io.containerd.cri.v1.runtime".containerd]
default_runtime_name = "runc"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
"#;

    fn judged(text: &str, kubernetes: bool) -> Vec<(&'static str, CheckVerdict)> {
        let checks = judge(&Ok(text.parse().unwrap()), kubernetes, false);
        checks.iter().map(|check| (check.name, check.verdict)).collect()
    }

    /// Returns a configuration for containerd 2. It contains the path of a shim that exists in the
    /// returned folder.
    fn snippet() -> (tempfile::TempDir, String) {
        let folder = tempfile::tempdir().unwrap();
        let shim = folder.path().join(SHIM);
        std::fs::copy("/bin/true", &shim).unwrap();
        let text = include_str!("../../../../config/containerd/affinode-v3.toml");
        let here =
            text.replace("/usr/local/bin/containerd-shim-affinode-v1", shim.to_str().unwrap());
        assert_ne!(here, text);
        (folder, here)
    }

    /// The configuration files that the project offers for containerd must pass the checks. Without
    /// one of them, the check of the handler must fail on a node of Kubernetes, and warn on other
    /// machines.
    #[test]
    fn the_snippets_register_the_handler() {
        let (_folder, v3) = snippet();
        assert_eq!(judged(&format!("{v3}{RUNC}"), true), [("handler", CheckVerdict::Good)]);
        let v2 = include_str!("../../../../config/containerd/affinode-v2.toml");
        let runc = RUNC.replace("io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri");
        assert_eq!(judged(&format!("{v2}{runc}"), true), [("handler", CheckVerdict::Good)]);
        assert_eq!(judged(RUNC, true), [("handler", CheckVerdict::Bad)]);
        assert_eq!(judged(RUNC, false), [("handler", CheckVerdict::Warning)]);
    }

    #[test]
    fn a_missing_default_handler_fails() {
        let (_folder, v3) = snippet();
        assert!(judged(&v3, true).contains(&("default handler", CheckVerdict::Bad)));
    }

    #[test]
    fn what_a_handler_lacks_is_named() {
        let handler = r#"[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.gpu]
runtime_type = "io.containerd.affinode.v1"
runtime_path = "/nonexistent/containerd-shim-affinode-v1"
pod_annotations = ["affinode.io/*"]
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.nvidia.options]
BinaryName = "/usr/bin/nvidia-container-runtime"
SystemdCgroup = false
"#;
        let judged = judged(&format!("{RUNC}{handler}"), true);
        let expected = [
            ("handler", CheckVerdict::Bad),
            ("annotations", CheckVerdict::Warning),
            ("options", CheckVerdict::Warning),
        ];
        assert_eq!(judged, expected);
    }

    #[test]
    fn without_cri_only_kubernetes_fails() {
        assert_eq!(judged("version = 2", false), [("handler", CheckVerdict::Good)]);
        assert_eq!(judged("version = 2", true), [("handler", CheckVerdict::Bad)]);
        assert_eq!(judge(&Err("no".into()), false, false)[0].verdict, CheckVerdict::Bad);
        let disabled = format!("disabled_plugins = [\"cri\"]\n{RUNC}");
        assert_eq!(judged(&disabled, false), [("handler", CheckVerdict::Good)]);
        assert_eq!(judged(&disabled, true), [("handler", CheckVerdict::Bad)]);
    }
}
