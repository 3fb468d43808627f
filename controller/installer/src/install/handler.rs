//! Affinode's handler: its wanted form on this node, and its present form in a configuration. Other
//! programs rewrite containerd's files, so handlers are compared by their keys, never by their
//! text.

use std::path::{Path, PathBuf};

use toml::{Table, Value};

use super::{record::InstallRecord, target};
use crate::doctor::{
    handler::{ANNOTATIONS, PLUGINS, RUNTIME_TYPE, model},
    programs::SHIM,
};

/// Runtime type of the stock runtime. containerd 2.0 to 2.3 query only runtimes of this type for
/// features. Pods with a runtime of another type have neither user namespaces nor recursive
/// read-only mounts.
const STOCK_TYPE: &str = "io.containerd.runc.v2";
/// Keys of the handler that Affinode sets. They are not copied from the model handler (see
/// [`model`]).
const OWN: [&str; 4] = ["runtime_type", "runtime_path", "pod_annotations", "container_annotations"];

/// Keys that name the sandboxer, in containerd 2 and in containerd 1.7.
const SANDBOXER: [&str; 2] = ["sandboxer", "sandbox_mode"];

/// Specification of the handler that this installation adds.
#[derive(Clone, Debug)]
pub struct HandlerSpec {
    /// Name of the handler.
    pub name: String,
    /// Path of the shim.
    shim: PathBuf,
    /// Path of the shim in the record of an earlier installation. `None`: no shim is recorded.
    earlier: Option<PathBuf>,
    /// Whether containers get their devices from CDI.
    cdi: bool,
}

/// Result of the comparison of a configuration's handler with the wanted handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandlerVerdict {
    /// There is no handler of this name.
    Absent,
    /// The handler equals the wanted handler.
    Same,
    /// The handler runs this installation's shim, but differs from the wanted handler.
    Differs,
    /// The handler runs another program.
    Foreign,
}

impl HandlerSpec {
    /// Creates the specification of the handler `name` with the shim below `prefix`. `cdi`: whether
    /// containers get their devices from CDI.
    pub fn new(
        name: &str,
        prefix: &Path,
        record: Option<&InstallRecord>,
        cdi: bool,
    ) -> HandlerSpec {
        let earlier = record.and_then(InstallRecord::shim).map(Path::to_owned);
        HandlerSpec { name: name.to_owned(), shim: prefix.join("bin").join(SHIM), earlier, cdi }
    }

    /// Returns a copy of the specification for a handler of another name.
    pub fn named(&self, name: &str) -> HandlerSpec {
        HandlerSpec { name: name.to_owned(), ..self.clone() }
    }

    /// Returns the specification of the handler as it was installed. It contains the path of the
    /// shim from the record of an earlier installation, if there is such a record.
    pub fn installed(mut self) -> HandlerSpec {
        if let Some(shim) = self.earlier.take() {
            self.shim = shim;
        }
        self
    }

    /// Returns the handler that containerd should have. It is a copy of the model handler (see
    /// [`model`]) that runs Affinode's shim and receives Affinode's annotations. `dump` is
    /// containerd's whole configuration. `None`: CRI is not configured.
    pub fn wanted(&self, dump: &Table) -> Option<Table> {
        let mut handler = like(model(cri(dump)?, &self.name, self.cdi).map(|(_, model)| model));
        // containerd 2 prints its configuration in version 3 or later, whatever the version of its
        // file.
        if version(dump) > 2 {
            handler.insert("runtime_type".into(), STOCK_TYPE.into());
            handler.insert("runtime_path".into(), self.shim.display().to_string().into());
        } else {
            // Some releases of containerd 1.x ignore `runtime_path`. Pods would then run without
            // Affinode.
            handler.insert("runtime_type".into(), RUNTIME_TYPE.into());
        }
        Some(handler)
    }

    /// Compares the handler of this name in containerd's whole configuration with the wanted
    /// handler.
    pub fn judge(&self, dump: &Table) -> HandlerVerdict {
        let Some(handler) = handler_of(dump, &self.name) else { return HandlerVerdict::Absent };
        match self.is_ours(handler) {
            false => HandlerVerdict::Foreign,
            true if self.is_wanted(dump, handler) => HandlerVerdict::Same,
            true => HandlerVerdict::Differs,
        }
    }

    /// Returns whether a handler runs the shim of this installation. A handler without a path
    /// counts too, because containerd then searches for the shim in its PATH.
    pub fn is_ours(&self, handler: &Table) -> bool {
        let text = |key: &str| handler.get(key).and_then(Value::as_str).unwrap_or_default();
        match text("runtime_path") {
            "" => text("runtime_type") == RUNTIME_TYPE,
            path => [Some(&self.shim), self.earlier.as_ref()]
                .into_iter()
                .flatten()
                .any(|shim| shim.as_path() == Path::new(path)),
        }
    }

    fn is_wanted(&self, dump: &Table, handler: &Table) -> bool {
        let Some(wanted) = self.wanted(dump) else { return false };
        let set = |table: &Table, key: &str| table.get(key).filter(|v| !is_default(v)).cloned();
        let model = cri(dump).and_then(|cri| model(cri, &self.name, self.cdi));
        OWN.iter().all(|key| set(handler, key) == set(&wanted, key))
            && model.is_none_or(|(_, model)| normal(model) == normal(handler))
    }
}

/// Returns the version of a configuration. A configuration that states no version has version 1.
pub fn version(config: &Table) -> i64 {
    config.get("version").and_then(Value::as_integer).unwrap_or(1)
}

/// Returns the containerd section of the CRI plugin, which contains the handlers.
pub fn cri(config: &Table) -> Option<&Table> {
    PLUGINS.iter().find_map(|plugin| cri_of(config, plugin))
}

/// Returns the containerd section of the CRI plugin under one of the plugin's names. The name
/// depends on the version of the configuration.
pub fn cri_of<'a>(config: &'a Table, plugin: &str) -> Option<&'a Table> {
    config.get("plugins")?.get(plugin)?.get("containerd")?.as_table()
}

/// Returns whether the handler of this name is that of containers that name none. It is the default
/// if one of the CRI sections says so, whatever the version of the configuration.
pub fn is_default_handler(config: &Table, name: &str) -> bool {
    let default = |plugin: &&str| cri_of(config, plugin)?.get("default_runtime_name")?.as_str();
    PLUGINS.iter().filter_map(default).any(|default| default == name)
}

/// Returns the handler of this name, for any version of the configuration.
pub fn handler_of<'a>(config: &'a Table, name: &str) -> Option<&'a Table> {
    let of = |plugin: &&str| cri_of(config, plugin)?.get("runtimes")?.get(name)?.as_table();
    PLUGINS.iter().find_map(of)
}

/// Creates a handler with the copied keys of the model handler, which also passes Affinode's
/// annotations to the shim. The handler names no program, because the caller adds it.
fn like(model: Option<&Table>) -> Table {
    let mut handler = model.map(copied).unwrap_or_default();
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

/// Returns the keys and values that are copied from one handler to another.
fn copied(handler: &Table) -> Table {
    let set =
        handler.iter().filter(|(key, value)| !OWN.contains(&key.as_str()) && !is_default(value));
    set.map(|(key, value)| (key.clone(), without_defaults(value))).collect()
}

/// Returns the keys and values of a handler that count in a comparison with another handler. The
/// default sandboxer is left out, because containerd prints it even if the configuration sets no
/// sandboxer.
fn normal(handler: &Table) -> Table {
    let mut handler = copied(handler);
    handler
        .retain(|key, value| !(SANDBOXER.contains(&key) && value.as_str() == Some("podsandbox")));
    handler
}

fn without_defaults(value: &Value) -> Value {
    let Value::Table(table) = value else { return value.clone() };
    let set = table.iter().filter(|(_, value)| !is_default(value));
    Value::Table(set.map(|(key, value)| (key.clone(), value.clone())).collect())
}

/// Returns whether a value equals containerd's default for a value of its type.
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

/// Returns whether a value is an empty table. A table that contains only empty tables also counts
/// as empty.
pub fn is_empty(value: &Value) -> bool {
    value.as_table().is_some_and(|table| table.values().all(is_empty))
}

/// Checks that two whole configurations are equal except for the handlers of these names.
///
/// # Errors
/// The path of the first difference outside the handlers with these names.
pub fn only_handlers_differ(before: &Table, after: &Table, names: &[String]) -> Result<(), String> {
    let without = |config: &Table| {
        let mut config = config.clone();
        // containerd 1.x prints the list of imports in any order, and the list contains the
        // handler's file.
        if let Some(Value::Array(imports)) = config.get_mut("imports") {
            let own = |import: &Value| import.as_str().is_some_and(target::is_drop_in);
            imports.retain(|import| !own(import));
            imports.sort_by(|one, other| one.as_str().cmp(&other.as_str()));
        }
        let mut config = Value::Table(config);
        for plugin in PLUGINS {
            let handlers = ["plugins", plugin, "containerd", "runtimes"]
                .iter()
                .try_fold(&mut config, |value, key| value.as_table_mut()?.get_mut(*key));
            if let Some(handlers) = handlers.and_then(Value::as_table_mut) {
                handlers.retain(|name, _| names.iter().all(|other| other != name));
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
mod tests;
