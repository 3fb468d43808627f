//! The edit of containerd's file, or of the one that it is made from: a block at its end, so that
//! all else stays as it is, byte for byte.

use std::{
    fmt, fs, io,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use toml::Table;

use super::{block, files, target::InstallTarget};

/// What a template of k3s and rke2 begins with that adds to theirs.
const BASE: &str = "{{ template \"base\" . }}";

/// What was added, and to which file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AddedBlock {
    /// The file.
    pub path: PathBuf,
    /// Name of the handler.
    pub runtime_name: String,
    /// The text, as it stands in the file.
    pub text: String,
    /// There was no file before.
    pub created: bool,
}

/// A file as it is and as it shall be.
#[derive(Debug)]
pub struct ConfigEdit {
    /// What is added, or taken out.
    pub added: AddedBlock,
    before: Option<String>,
    after: Option<String>,
    adds: bool,
}

/// Why it cannot be edited.
#[derive(Debug, thiserror::Error)]
pub enum EditError {
    /// The file.
    #[error("cannot {action} {}{}", path.display(), super::advice(source, super::BY_HAND))]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// It is not understood.
    #[error("{} is no TOML", path.display())]
    Toml {
        /// The file.
        path: PathBuf,
        /// Where.
        #[source]
        source: toml::de::Error,
    },
    /// What would be added.
    #[error(transparent)]
    Block(#[from] block::BlockError),
    /// Somebody changed it.
    #[error("what was added to {} was changed since: take handler {name:?} out by hand", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
        /// Its handler.
        name: String,
    },
}

impl ConfigEdit {
    /// Adds a handler, the file `shim`. `root` is what containerd's own file says, `dump` its whole
    /// configuration.
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
        // A file without a version is of the first one; where there is none, containerd says.
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

    /// Takes out what was added; `None` when the handler is not there.
    pub fn removal(added: &AddedBlock) -> Result<Option<ConfigEdit>, EditError> {
        let Some(before) = read(&added.path)? else { return Ok(None) };
        let Some((head, tail)) = before.split_once(&added.text) else {
            let named = match before.parse::<Table>() {
                Ok(own) => block::has_handler(&own, &added.runtime_name),
                // A template is none.
                Err(_) if added.path.extension().is_some_and(|e| e == "tmpl") => {
                    before.contains(&format!("runtimes.\"{}\"", added.runtime_name))
                }
                Err(source) => return Err(EditError::Toml { path: added.path.clone(), source }),
            };
            if !named {
                // It was never written, or somebody took it out.
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

    /// What containerd's own file will say, which says `root` now and is made from the edited one.
    pub fn preview(&self, root: &str) -> String {
        let block = block::in_text(&self.added.text);
        if self.adds { format!("{root}\n{block}") } else { root.replace(block, "") }
    }

    /// Name of the handler.
    pub fn runtime_name(&self) -> &str {
        &self.added.runtime_name
    }

    /// Writes the file as it shall be.
    pub fn make(&self) -> Result<(), EditError> {
        self.put(self.after.as_deref())
    }

    /// Writes the file as it was.
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

    /// As of a distribution's containerd.
    fn plan(path: &Path, dump: &Table) -> Result<ConfigEdit, EditError> {
        let root = read(path)?.unwrap_or_default().parse();
        let root = root.map_err(|source| EditError::Toml { path: path.to_owned(), source })?;
        ConfigEdit::plan(&InstallTarget::Root(path.to_owned()), &root, dump, "affinode", path)
    }

    const DUMP: &str = "version = 3\n[plugins.\"io.containerd.cri.v1.runtime\".containerd]\n";

    /// Whatever the file looks like, and whatever is added behind the block later, all else stays.
    #[test]
    fn what_goes_in_comes_out_byte_for_byte() {
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
    fn a_file_that_was_made_goes_and_one_that_was_changed_is_left() {
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

    /// Of k3s and rke2: what stands in it is for them.
    #[test]
    fn a_template_is_added_to_and_comes_back() {
        let folder = tempfile::tempdir().unwrap();
        let target = InstallTarget::Template(folder.path().join("config-v3.toml.tmpl"));
        let dump: Table = DUMP.parse().unwrap();
        let edit = ConfigEdit::plan(&target, &dump, &dump, "affinode", folder.path()).unwrap();
        edit.make().unwrap();
        let text = fs::read_to_string(target.path()).unwrap();
        assert!(text.starts_with(BASE), "{text}");
        // What containerd will be started with is the one with the block, and the other way.
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
