//! Creates the text block that is added to containerd's configuration.

use std::fmt::Write;

use toml::{Table, Value};

use super::handler::{self, HandlerSpec};
use crate::doctor::handler::PLUGINS;

/// First line of the text block that is added to containerd's configuration.
pub const BEGIN: &str =
    "# >>> affinode: added by `affinode install`, removed by `affinode uninstall`\n";
/// Last line of the text block that is added to containerd's configuration.
pub const END: &str = "# <<< affinode\n";

/// Reason why the text block for containerd's configuration cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum BlockError {
    /// The configuration is of version 1, which has other names for plugins.
    #[error(
        "containerd's configuration has version {0}, which Affinode cannot edit: convert it with \
         `containerd config migrate` first"
    )]
    Version(i64),
    /// CRI is not configured in this containerd, so no pod could use a handler.
    #[error(
        "cannot add a handler, and nothing was changed: CRI is not configured in this containerd \
         (see disabled_plugins in its configuration). ctr, nerdctl and affinode run need no \
         handler: to use only them, {}",
        super::NO_HANDLER
    )]
    NoCri,
    /// A handler of this name already exists and runs another program.
    #[error(
        "handler {0:?} exists already and runs another program: remove that handler, or choose another name with --runtime-name"
    )]
    Taken(String),
    /// The handler cannot be written as TOML.
    #[error("cannot write handler {name:?} as TOML")]
    Copy {
        /// Name of the handler.
        name: String,
        /// Error of the TOML serializer.
        #[source]
        source: toml::ser::Error,
    },
}

/// Returns the text block for a configuration file of this version. `dump` is containerd's whole
/// configuration, and `own` is the present content of the file.
pub fn text(
    dump: &Table,
    own: &Table,
    version: i64,
    spec: &HandlerSpec,
) -> Result<String, BlockError> {
    let plugin = match version {
        2 => PLUGINS[0],
        3.. => PLUGINS[1],
        other => return Err(BlockError::Version(other)),
    };
    let wanted = spec.wanted(dump).ok_or(BlockError::NoCri)?;
    let mut blocks = vec![(spec.name.clone(), wanted)];
    // As soon as a file names a handler, containerd 1.x drops its built-in handlers. Therefore
    // these are copied into the block.
    let named = handler::cri_of(own, PLUGINS[0]).and_then(|cri| cri.get("runtimes"));
    if version == 2 && named.is_none() {
        let known = handler::cri(dump).and_then(|cri| cri.get("runtimes")?.as_table());
        let others = known.into_iter().flatten().filter(|(name, _)| **name != spec.name);
        blocks.extend(others.filter_map(|(n, h)| Some((n.clone(), h.as_table()?.clone()))));
    }
    let mut text = BEGIN.to_owned();
    for (name, mut handler) in blocks {
        let copy = |source| BlockError::Copy { name: name.clone(), source };
        let place = format!("plugins.\"{plugin}\".containerd.runtimes.\"{name}\"");
        let options = handler.remove("options");
        let _ = writeln!(text, "[{place}]");
        text.push_str(&toml::to_string(&handler).map_err(copy)?);
        // The copied handlers get their table `options` even if it is empty. Without this table,
        // `containerd config dump` of containerd 1.x would print another configuration than before.
        if let Some(Value::Table(options)) = options {
            let _ = writeln!(text, "[{place}.options]");
            text.push_str(&toml::to_string(&options).map_err(copy)?);
        }
    }
    text.push_str(END);
    Ok(text)
}

/// Returns an added text without what precedes the first line of the block, such as the `version`
/// line of a new file. A text without a block is returned unchanged.
pub fn in_text(text: &str) -> &str {
    text.find(BEGIN).map_or(text, |begin| &text[begin..])
}

#[cfg(test)]
mod tests;
