//! Edits the text of dockerd's `daemon.json`: adds or removes the runtime, and leaves every other
//! byte unchanged.

use jsonc_parser::{
    ParseOptions,
    cst::{CstInputValue, CstObjectProp, CstRootNode},
};
use serde_json::Value;

use crate::doctor::handler::RUNTIME_TYPE;

const RUNTIMES: &str = "runtimes";
const TYPE_KEY: &str = "runtimeType";
/// Byte order mark, which dockerd accepts at the beginning of the file.
const BYTE_ORDER_MARK: &str = "\u{feff}";

/// Result of a search for a runtime of a given name in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RuntimeEntry {
    /// The file has no runtime of this name.
    Absent,
    /// The runtime is Affinode's shim.
    Affinode,
    /// The name belongs to another runtime.
    Other,
}

/// Searches for the runtime of this name. An empty file has none.
///
/// # Errors
/// The text is not a JSON object. The error is the reason.
pub fn entry(text: &str, name: &str) -> Result<RuntimeEntry, String> {
    let file = read(text)?;
    let Some(entry) = file.get(RUNTIMES).and_then(|runtimes| runtimes.get(name)) else {
        return Ok(RuntimeEntry::Absent);
    };
    let is_ours = entry.get(TYPE_KEY).and_then(Value::as_str) == Some(RUNTIME_TYPE);
    Ok(if is_ours { RuntimeEntry::Affinode } else { RuntimeEntry::Other })
}

/// Returns whether the text sets the runtime `name` as default runtime. Docker uses the default
/// runtime for containers that name no runtime.
pub fn is_default(text: &str, name: &str) -> bool {
    read(text).is_ok_and(|file| {
        file.get("default-runtime").and_then(Value::as_str).is_some_and(|said| said == name)
    })
}

/// Returns the text with the runtime added.
///
/// # Errors
/// The text is not a JSON object, or its key `runtimes` is not an object. The error is the reason.
pub fn with_runtime(text: &str, name: &str) -> Result<String, String> {
    read(text)?;
    let (mark, root) = parse(text)?;
    let file = root.object_value_or_create().ok_or("the file is not a JSON object")?;
    let runtimes =
        file.object_value_or_create(RUNTIMES).ok_or(format!("{RUNTIMES} is not a JSON object"))?;
    let shim = CstInputValue::String(RUNTIME_TYPE.into());
    runtimes.append(name, CstInputValue::Object(vec![(TYPE_KEY.into(), shim)]));
    let mut edited = format!("{mark}{root}");
    if text.trim().is_empty() && !edited.ends_with('\n') {
        edited.push('\n');
    }
    Ok(edited)
}

/// Returns the text without the runtime. The key `runtimes` remains even if it is empty. If the key
/// were missing, dockerd would keep the runtimes that it has loaded.
///
/// # Errors
/// The text is not a JSON object, or its key `runtimes` is not an object. The error is the reason.
pub fn with_list_only(text: &str, name: &str) -> Result<String, String> {
    read(text)?;
    let (mark, root) = parse(text)?;
    let file = root.object_value_or_create().ok_or("the file is not a JSON object")?;
    let runtimes =
        file.object_value_or_create(RUNTIMES).ok_or(format!("{RUNTIMES} is not a JSON object"))?;
    if let Some(entry) = runtimes.get(name) {
        entry.remove();
    }
    Ok(format!("{mark}{root}"))
}

/// Returns the text without the runtime. The key `runtimes` is removed if it is then empty.
///
/// # Errors
/// The text is not a JSON object, or its key `runtimes` is not an object. The error is the reason.
pub fn without_runtime(text: &str, name: &str) -> Result<String, String> {
    let rest = with_list_only(text, name)?;
    let (mark, root) = parse(&rest)?;
    let list = root.object_value().and_then(|file| file.get(RUNTIMES));
    let is_empty = |list: &CstObjectProp| {
        list.object_value().is_some_and(|runtimes| runtimes.properties().is_empty())
    };
    if let Some(list) = list.filter(is_empty) {
        list.remove();
    }
    Ok(format!("{mark}{root}"))
}

/// Returns whether the text is an empty JSON object.
pub fn is_empty(text: &str) -> bool {
    read(text).is_ok_and(|file| file.as_object().is_some_and(serde_json::Map::is_empty))
}

/// Parses the text as dockerd does.
fn read(text: &str) -> Result<Value, String> {
    let text = text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(text);
    if text.trim().is_empty() {
        return Ok(Value::Object(serde_json::Map::new()));
    }
    let file: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    if file.is_object() { Ok(file) } else { Err("the file is not a JSON object".into()) }
}

fn parse(text: &str) -> Result<(&str, CstRootNode), String> {
    let (mark, text) = match text.strip_prefix(BYTE_ORDER_MARK) {
        Some(rest) => (BYTE_ORDER_MARK, rest),
        None => ("", text),
    };
    let root = CstRootNode::parse(text, &ParseOptions::default());
    Ok((mark, root.map_err(|error| error.to_string())?))
}

#[cfg(test)]
mod tests;
