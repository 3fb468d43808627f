//! The block that is added to containerd's configuration, as text, and the comparison of
//! containerd's configuration before and after.

use std::{fmt::Write, path::Path};

use toml::{Table, Value};

use crate::doctor::handler::{PLUGINS, RUNTIME_TYPE};

/// First line of the block.
const BEGIN: &str =
    "# >>> affinode: added by `affinode install`, removed by `affinode uninstall`\n";
/// Last line of the block.
const END: &str = "# <<< affinode\n";
/// Annotations that must be passed to the shim.
const ANNOTATIONS: &str = "affinode.io/*";
/// Type of the stock runtime. containerd 2.0 to 2.3 query only this type for its features; pods of
/// other types have neither user namespaces nor recursive read-only mounts.
const STOCK_TYPE: &str = "io.containerd.runc.v2";
/// Keys of the handler that are not copied from the model.
const OWN: [&str; 4] = ["runtime_type", "runtime_path", "pod_annotations", "container_annotations"];

/// Why the block cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum BlockError {
    /// Files of version 1 use other names for plugins.
    #[error(
        "containerd's configuration is of version {0}: convert it with `containerd config migrate` first"
    )]
    Version(i64),
    /// Without CRI no pod can use a handler.
    #[error(
        "CRI is not configured in this containerd (disabled_plugins?), so there is no place for a handler, and nothing was changed. ctr, nerdctl and affinode run need none: {}",
        super::NO_HANDLER
    )]
    NoCri,
    /// A handler with this name exists already.
    #[error("handler {0:?} exists already: choose another name with --runtime-name, or remove it")]
    Taken(String),
    /// The handler cannot be written as TOML.
    #[error("cannot copy handler {name:?}")]
    Copy {
        /// Name of the handler.
        name: String,
        #[source]
        source: toml::ser::Error,
    },
}

/// The block for a file of this version. `own` is the content of the file itself. The handler is a
/// copy of `nvidia`, or of the default one, with Affinode's shim, the file `shim`.
pub fn text(
    dump: &Table,
    own: &Table,
    version: i64,
    name: &str,
    shim: &Path,
) -> Result<String, BlockError> {
    let plugin = match version {
        2 => PLUGINS[0],
        3.. => PLUGINS[1],
        other => return Err(BlockError::Version(other)),
    };
    let cri = cri(dump).ok_or(BlockError::NoCri)?;
    let handlers = cri.get("runtimes").and_then(Value::as_table).cloned().unwrap_or_default();
    if handlers.contains_key(name) {
        return Err(BlockError::Taken(name.into()));
    }
    let default = cri.get("default_runtime_name").and_then(Value::as_str).unwrap_or("runc");
    let model = ["nvidia", default].into_iter().find_map(|n| handlers.get(n)?.as_table());
    let mut handler = like(model);
    // containerd 2 prints its configuration in version 3 or later, whatever the version of its
    // file.
    let is_new =
        dump.get("version").and_then(Value::as_integer).unwrap_or(version).max(version) > 2;
    if is_new {
        handler.insert("runtime_type".into(), STOCK_TYPE.into());
        handler.insert("runtime_path".into(), shim.display().to_string().into());
    } else {
        // Some releases of containerd 1.x ignore the path; pods would then run without Affinode.
        handler.insert("runtime_type".into(), RUNTIME_TYPE.into());
    }
    let mut blocks = vec![(name.to_owned(), handler)];
    // containerd 1.x drops its built-in handlers when a file names one.
    let named = cri_of(own, PLUGINS[0]).and_then(|cri| cri.get("runtimes"));
    if version == 2 && named.is_none() {
        let others = handlers.iter().filter_map(|(n, h)| Some((n.clone(), h.as_table()?.clone())));
        blocks.extend(others);
    }
    let mut text = BEGIN.to_owned();
    for (name, mut handler) in blocks {
        let copy = |source| BlockError::Copy { name: name.clone(), source };
        let place = format!("plugins.\"{plugin}\".containerd.runtimes.\"{name}\"");
        let options = handler.remove("options");
        let _ = writeln!(text, "[{place}]");
        text.push_str(&toml::to_string(&handler).map_err(copy)?);
        // For the other handlers also empty options: without them containerd 1.x prints another
        // configuration.
        if let Some(Value::Table(options)) = options {
            let _ = writeln!(text, "[{place}.options]");
            text.push_str(&toml::to_string(&options).map_err(copy)?);
        }
    }
    text.push_str(END);
    Ok(text)
}

/// The block within the added text.
pub fn in_text(text: &str) -> &str {
    text.find(BEGIN).map_or(text, |begin| &text[begin..])
}

/// Affinode's handler: a copy of the model except for the program.
fn like(model: Option<&Table>) -> Table {
    let mut handler = Table::new();
    for (key, value) in model.into_iter().flatten() {
        if !OWN.contains(&key.as_str()) && !is_default(value) {
            handler.insert(key.clone(), without_defaults(value));
        }
    }
    for key in ["pod_annotations", "container_annotations"] {
        let theirs = model.and_then(|model| model.get(key)?.as_array().cloned());
        let mut passed = theirs.unwrap_or_default();
        if !passed.iter().any(|one| one.as_str() == Some(ANNOTATIONS)) {
            passed.push(ANNOTATIONS.into());
        }
        handler.insert(key.into(), passed.into());
    }
    handler
}

fn without_defaults(value: &Value) -> Value {
    let Value::Table(table) = value else { return value.clone() };
    let set = table.iter().filter(|(_, value)| !is_default(value));
    Value::Table(set.map(|(key, value)| (key.clone(), value.clone())).collect())
}

/// Whether a value is the same as containerd's default.
fn is_default(value: &Value) -> bool {
    match value {
        Value::Boolean(set) => !set,
        Value::String(text) => text.is_empty(),
        Value::Integer(number) => *number == 0,
        Value::Array(items) => items.is_empty(),
        Value::Table(table) => table.values().all(is_default),
        _ => false,
    }
}

/// The table of CRI's handlers in a configuration.
pub fn cri(config: &Table) -> Option<&Table> {
    PLUGINS.iter().find_map(|plugin| cri_of(config, plugin))
}

/// Whether a configuration has a handler of this name.
pub fn has_handler(config: &Table, name: &str) -> bool {
    cri(config).and_then(|cri| cri.get("runtimes")?.get(name)).is_some()
}

fn cri_of<'a>(config: &'a Table, plugin: &str) -> Option<&'a Table> {
    config.get("plugins")?.get(plugin)?.get("containerd")?.as_table()
}

/// Compares two whole configurations.
///
/// # Errors
/// The path of the first difference, besides the handler.
pub fn only_handler_differs(before: &Table, after: &Table, name: &str) -> Result<(), String> {
    let without = |config: &Table| {
        let mut config = config.clone();
        // containerd 1.x prints imports in any order.
        if let Some(Value::Array(imports)) = config.get_mut("imports") {
            imports.sort_by(|one, other| one.as_str().cmp(&other.as_str()));
        }
        let mut config = Value::Table(config);
        for plugin in PLUGINS {
            let handlers = ["plugins", plugin, "containerd", "runtimes"]
                .iter()
                .try_fold(&mut config, |value, key| value.as_table_mut()?.get_mut(*key));
            if let Some(handlers) = handlers.and_then(Value::as_table_mut) {
                handlers.remove(name);
            }
        }
        config
    };
    first_difference(&without(before), &without(after), "").map_or(Ok(()), Err)
}

fn first_difference(before: &Value, after: &Value, place: &str) -> Option<String> {
    let (Value::Table(before), Value::Table(after)) = (before, after) else {
        return (before != after).then(|| place.trim_start_matches('.').to_owned());
    };
    let keys = before.keys().chain(after.keys().filter(|key| !before.contains_key(*key)));
    keys.into_iter().find_map(|key| {
        let place = format!("{place}.{key}");
        match (before.get(key), after.get(key)) {
            (Some(before), Some(after)) => first_difference(before, after, &place),
            _ => Some(place.trim_start_matches('.').to_owned()),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const V2: &str = r#"version = 2
[plugins."io.containerd.grpc.v1.cri".containerd]
default_runtime_name = "runc"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
privileged_without_host_devices = false
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = true
Root = ""
"#;

    const SHIM: &str = "/opt/bin/containerd-shim-affinode-v1";

    fn table(text: &str) -> Table {
        text.parse().unwrap()
    }

    #[test]
    fn the_handler_is_a_copy_of_nvidias_as_our_shim() {
        let nvidia = r#"[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia]
runtime_type = "io.containerd.runc.v2"
base_runtime_spec = "/etc/spec.json"
pod_annotations = ["nvidia.com/*"]
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia.options]
BinaryName = "/usr/bin/nvidia-container-runtime"
"#;
        let dump = table(&format!("{V2}{nvidia}"));
        let text = text(&dump, &dump, 2, "affinode", SHIM.as_ref()).unwrap();
        let after = table(&format!("{V2}{nvidia}{text}"));
        let ours = cri(&after).unwrap()["runtimes"]["affinode"].clone();
        assert_eq!(ours["runtime_type"].as_str(), Some(RUNTIME_TYPE));
        assert_eq!(ours["base_runtime_spec"].as_str(), Some("/etc/spec.json"));
        assert_eq!(ours["pod_annotations"].as_array().unwrap().len(), 2);
        let binary = ours["options"]["BinaryName"].as_str();
        assert_eq!(binary, Some("/usr/bin/nvidia-container-runtime"));
        assert_eq!(only_handler_differs(&dump, &after, "affinode"), Ok(()));
    }

    /// Affinode's shim reports the features of the stock shim.
    #[test]
    fn containerd_2_asks_our_shim_what_it_can_do() {
        let dump = V2.replace("version = 2", "version = 3").replace(PLUGINS[0], PLUGINS[1]);
        let text = text(&table(&dump), &table(&dump), 3, "affinode", SHIM.as_ref()).unwrap();
        let after = table(&format!("{dump}{text}"));
        let ours = &cri(&after).unwrap()["runtimes"]["affinode"];
        assert_eq!(ours["runtime_type"].as_str(), Some(STOCK_TYPE));
        assert_eq!(ours["runtime_path"].as_str(), Some(SHIM));
        assert_eq!(ours["options"]["SystemdCgroup"].as_bool(), Some(true));
        // The same if its file is older than that version.
        let text = super::text(&table(&dump), &table(V2), 2, "affinode", SHIM.as_ref()).unwrap();
        let after = table(&text);
        let ours = &cri(&after).unwrap()["runtimes"]["affinode"];
        assert_eq!(ours["runtime_path"].as_str(), Some(SHIM));
    }

    #[test]
    fn a_file_without_handlers_keeps_the_built_in() {
        let dump = table(V2);
        let text = text(&dump, &table("version = 2"), 2, "affinode", SHIM.as_ref()).unwrap();
        let after = table(&text);
        let handlers = cri(&after).unwrap()["runtimes"].as_table().unwrap();
        assert_eq!(handlers["runc"]["runtime_type"].as_str(), Some("io.containerd.runc.v2"));
        assert_eq!(handlers["affinode"]["options"]["SystemdCgroup"].as_bool(), Some(true));
    }

    /// Debian's file names no handler, and its containerd prints all options of runc, each empty.
    #[test]
    fn a_built_in_handler_keeps_empty_options() {
        let dump = table(&V2.replace("= true", "= false"));
        let text = text(&dump, &table("version = 2"), 2, "affinode", SHIM.as_ref()).unwrap();
        let (before, after) = (cri(&dump).unwrap(), table(&text));
        assert_eq!(cri(&after).unwrap()["runtimes"]["runc"], before["runtimes"]["runc"]);
        assert!(cri(&after).unwrap()["runtimes"]["affinode"].get("options").is_none());
    }

    #[test]
    fn what_cannot_be_registered_is_refused() {
        let dump = table(V2);
        assert!(matches!(
            text(&dump, &dump, 1, "affinode", SHIM.as_ref()),
            Err(BlockError::Version(1))
        ));
        assert!(matches!(text(&dump, &dump, 2, "runc", SHIM.as_ref()), Err(BlockError::Taken(_))));
        let bare = table("version = 3");
        assert!(matches!(text(&bare, &bare, 3, "affinode", SHIM.as_ref()), Err(BlockError::NoCri)));
    }

    #[test]
    fn a_difference_anywhere_else_is_named() {
        let (before, after) = (table(V2), table(&V2.replace("= true", "= false")));
        let place =
            "plugins.io.containerd.grpc.v1.cri.containerd.runtimes.runc.options.SystemdCgroup";
        assert_eq!(only_handler_differs(&before, &after, "affinode"), Err(place.into()));
        assert_eq!(only_handler_differs(&before, &after, "runc"), Ok(()));
        let less = table("version = 2");
        assert_eq!(only_handler_differs(&before, &less, "x"), Err("plugins".into()));
    }
}
