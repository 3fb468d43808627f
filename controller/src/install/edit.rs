//! The edit of containerd's file, or of the template that it is made from: a block at its end, so
//! that everything else stays the same, byte for byte.

use std::{
    fmt, fs, io,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use toml::Table;

use super::{block, files, target::InstallTarget};

/// First line of a template of k3s and rke2 that extends the built-in one.
const BASE: &str = "{{ template \"base\" . }}";

/// The added text and its file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AddedBlock {
    /// Path of the file.
    pub path: PathBuf,
    /// Name of the handler.
    pub runtime_name: String,
    /// The text exactly as in the file.
    pub text: String,
    /// Whether the file was created.
    pub created: bool,
}

/// A file before and after the edit.
#[derive(Debug)]
pub struct ConfigEdit {
    /// The text that is added or removed.
    pub added: AddedBlock,
    before: Option<String>,
    after: Option<String>,
    adds: bool,
}

/// Why the file cannot be edited.
#[derive(Debug, thiserror::Error)]
pub enum EditError {
    /// The file cannot be read or written.
    #[error("cannot {action} {}{}", path.display(), super::advice(source, super::BY_HAND))]
    Io {
        /// What the failed operation was.
        action: &'static str,
        /// Path of the file.
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The file is not valid TOML.
    #[error("{} is not valid TOML", path.display())]
    Toml {
        /// Path of the file.
        path: PathBuf,
        #[source]
        source: toml::de::Error,
    },
    /// The block cannot be created.
    #[error(transparent)]
    Block(#[from] block::BlockError),
    /// The added text was changed since.
    #[error("the block in {} was changed since the installation: remove handler {name:?} by hand", path.display())]
    Changed {
        /// Path of the file.
        path: PathBuf,
        /// Name of the handler.
        name: String,
    },
}

impl ConfigEdit {
    /// Plans to add a handler with the file `shim`. `root` is the content of containerd's own file,
    /// `dump` its whole configuration.
    pub fn plan(
        target: &InstallTarget,
        root: &Table,
        dump: &Table,
        name: &str,
        shim: &Path,
    ) -> Result<ConfigEdit, EditError> {
        let path = target.path();
        let before = read(path)?;
        let version = |table: &Table| table.get("version").and_then(toml::Value::as_integer);
        // A file without a version has version 1; without a file the version is that of the dump.
        let version = match (target, &before) {
            (InstallTarget::Root(_), None) => version(dump).unwrap_or(2),
            _ => version(root).unwrap_or(1),
        };
        let mut text = block::text(dump, root, version, name, shim)?;
        match (target, &before) {
            (InstallTarget::Template(_), None) => text = format!("{BASE}\n\n{text}"),
            (_, None) => text = format!("version = {version}\n\n{text}"),
            (_, Some(before)) if before.ends_with('\n') => text.insert(0, '\n'),
            (_, Some(_)) => text.insert_str(0, "\n\n"),
        }
        let after = format!("{}{text}", before.as_deref().unwrap_or_default());
        let (path, runtime_name) = (path.to_owned(), name.to_owned());
        let added = AddedBlock { path, runtime_name, text, created: before.is_none() };
        Ok(ConfigEdit { added, before, after: Some(after), adds: true })
    }

    /// Plans to remove what was added; `None` if the handler is not there.
    pub fn removal(added: &AddedBlock) -> Result<Option<ConfigEdit>, EditError> {
        let Some(before) = read(&added.path)? else { return Ok(None) };
        let Some((head, tail)) = before.split_once(&added.text) else {
            let named = match before.parse::<Table>() {
                Ok(own) => block::has_handler(&own, &added.runtime_name),
                // A template is not TOML.
                Err(_) if added.path.extension().is_some_and(|e| e == "tmpl") => {
                    before.contains(&format!("runtimes.\"{}\"", added.runtime_name))
                }
                Err(source) => return Err(EditError::Toml { path: added.path.clone(), source }),
            };
            if !named {
                // The block was never written, or was removed by hand.
                return Ok(None);
            }
            return Err(EditError::Changed {
                path: added.path.clone(),
                name: added.runtime_name.clone(),
            });
        };
        let rest = format!("{head}{tail}");
        let after = (!(added.created && rest.is_empty())).then_some(rest);
        Ok(Some(ConfigEdit { added: added.clone(), before: Some(before), after, adds: false }))
    }

    /// The content of containerd's own file after the edit; it is `root` now and is rendered from
    /// the edited template.
    pub fn preview(&self, root: &str) -> String {
        let block = block::in_text(&self.added.text);
        if self.adds { format!("{root}\n{block}") } else { root.replace(block, "") }
    }

    /// Name of the handler.
    pub fn runtime_name(&self) -> &str {
        &self.added.runtime_name
    }

    /// Writes the edited file.
    pub fn make(&self) -> Result<(), EditError> {
        self.put(self.after.as_deref())
    }

    /// Writes the original file.
    pub fn undo(&self) -> Result<(), EditError> {
        self.put(self.before.as_deref())
    }

    fn put(&self, text: Option<&str>) -> Result<(), EditError> {
        let path = &self.added.path;
        let failed = |action| move |source| EditError::Io { action, path: path.clone(), source };
        match text {
            Some(text) => {
                if let Some(folder) = path.parent() {
                    fs::create_dir_all(folder).map_err(failed("write"))?;
                }
                files::replace(path, text.as_bytes(), None).map_err(failed("write"))
            }
            None => match fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    Err(failed("remove")(error))
                }
                _ => Ok(()),
            },
        }
    }
}

fn read(path: &Path) -> Result<Option<String>, EditError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(EditError::Io { action: "read", path: path.to_owned(), source }),
    }
}

impl fmt::Display for ConfigEdit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (verb, sign) = match (self.adds, &self.before) {
            (true, None) => ("make", '+'),
            (true, Some(_)) => ("edit", '+'),
            (false, _) => ("restore", '-'),
        };
        write!(f, "{verb} {}", self.added.path.display())?;
        for line in self.added.text.lines().filter(|line| !line.is_empty()) {
            write!(f, "\n  {sign} {line}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A plan for the containerd of a distribution.
    fn plan(path: &Path, dump: &Table) -> Result<ConfigEdit, EditError> {
        let root = read(path)?.unwrap_or_default().parse();
        let root = root.map_err(|source| EditError::Toml { path: path.to_owned(), source })?;
        ConfigEdit::plan(&InstallTarget::Root(path.to_owned()), &root, dump, "affinode", path)
    }

    const DUMP: &str = "version = 3\n[plugins.\"io.containerd.cri.v1.runtime\".containerd]\n";

    /// Whatever the file contains, and whatever is added after the block later, everything else
    /// stays.
    #[test]
    fn removal_restores_the_file_exactly() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.toml");
        let dump: Table = DUMP.parse().unwrap();
        for text in ["version = 3", "version = 3\n", "# a comment\nversion = 3\n\n\n"] {
            fs::write(&path, text).unwrap();
            let edit = plan(&path, &dump).unwrap();
            edit.make().unwrap();
            let with: Table = fs::read_to_string(&path).unwrap().parse().unwrap();
            assert!(block::cri(&with).unwrap()["runtimes"].get("affinode").is_some());
            fs::write(&path, fs::read_to_string(&path).unwrap() + "# later\n").unwrap();
            ConfigEdit::removal(&edit.added).unwrap().unwrap().make().unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), format!("{text}# later\n"));
            edit.undo().unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
    }

    #[test]
    fn a_changed_block_is_not_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.toml");
        let dump: Table = DUMP.parse().unwrap();
        let edit = plan(&path, &dump).unwrap();
        edit.make().unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.starts_with("version = 3\n"));
        fs::write(&path, text.replace("affinode.io/*", "*")).unwrap();
        assert!(matches!(ConfigEdit::removal(&edit.added), Err(EditError::Changed { .. })));
        fs::write(&path, text).unwrap();
        ConfigEdit::removal(&edit.added).unwrap().unwrap().make().unwrap();
        assert!(!path.exists());
        assert!(ConfigEdit::removal(&edit.added).unwrap().is_none());
        fs::write(&path, "version = ").unwrap();
        assert!(matches!(ConfigEdit::removal(&edit.added), Err(EditError::Toml { .. })));
    }

    /// For k3s and rke2, whose template may have content of its own.
    #[test]
    fn a_template_is_added_to_and_comes_back() {
        let folder = tempfile::tempdir().unwrap();
        let target = InstallTarget::Template(folder.path().join("config-v3.toml.tmpl"));
        let dump: Table = DUMP.parse().unwrap();
        let edit = ConfigEdit::plan(&target, &dump, &dump, "affinode", folder.path()).unwrap();
        edit.make().unwrap();
        let text = fs::read_to_string(target.path()).unwrap();
        assert!(text.starts_with(BASE), "{text}");
        // containerd starts with the rendered file, with the block and then without.
        let rendered = text.replace(BASE, DUMP);
        let with: Table = edit.preview(DUMP).parse().unwrap();
        assert_eq!(with, rendered.parse::<Table>().unwrap());
        let removal = ConfigEdit::removal(&edit.added).unwrap().unwrap();
        let without: Table = removal.preview(&rendered).parse().unwrap();
        assert_eq!(without, DUMP.parse::<Table>().unwrap());
        removal.make().unwrap();
        assert!(!target.path().exists());
        fs::write(target.path(), "{{ template \"base\" . }}\n# ours").unwrap();
        let edit = ConfigEdit::plan(&target, &dump, &dump, "affinode", folder.path()).unwrap();
        edit.make().unwrap();
        let text = fs::read_to_string(target.path()).unwrap();
        fs::write(target.path(), text.replace("affinode.io/*", "*")).unwrap();
        assert!(matches!(ConfigEdit::removal(&edit.added), Err(EditError::Changed { .. })));
        edit.undo().unwrap();
        assert!(ConfigEdit::removal(&edit.added).unwrap().is_none());
    }
}
