//! The edit of containerd's file: a block at its end, so that all else stays as it is, byte
//! for byte.

use std::{
    fmt, fs, io,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use toml::Table;

use super::{block, files};

/// What was added, and to which file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Added {
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
pub struct Edit {
    /// What is added, or taken out.
    pub added: Added,
    before: Option<String>,
    after: Option<String>,
}

/// Why it cannot be edited.
#[derive(Debug, thiserror::Error)]
pub enum EditError {
    /// The file.
    #[error("cannot {action} {}", path.display())]
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

impl Edit {
    /// Adds a handler to the file of a containerd whose whole configuration is `dump`.
    pub fn plan(path: &Path, dump: &Table, name: &str) -> Result<Edit, EditError> {
        let before = read(path)?;
        let own: Table = before
            .as_deref()
            .unwrap_or_default()
            .parse()
            .map_err(|source| EditError::Toml { path: path.to_owned(), source })?;
        let version = |table: &Table| table.get("version").and_then(toml::Value::as_integer);
        // A file without a version is of the first one.
        let version = match before {
            Some(_) => version(&own).unwrap_or(1),
            None => version(dump).unwrap_or(2),
        };
        let mut text = block::text(dump, &own, version, name)?;
        match &before {
            None => text = format!("version = {version}\n\n{text}"),
            Some(before) if before.ends_with('\n') => text.insert(0, '\n'),
            Some(_) => text.insert_str(0, "\n\n"),
        }
        let after = format!("{}{text}", before.as_deref().unwrap_or_default());
        let (path, runtime_name) = (path.to_owned(), name.to_owned());
        let added = Added { path, runtime_name, text, created: before.is_none() };
        Ok(Edit { added, before, after: Some(after) })
    }

    /// Takes out what was added; `None` when the handler is not there.
    pub fn removal(added: &Added) -> Result<Option<Edit>, EditError> {
        let Some(before) = read(&added.path)? else { return Ok(None) };
        let Some((head, tail)) = before.split_once(&added.text) else {
            let own: Table = before
                .parse()
                .map_err(|source| EditError::Toml { path: added.path.clone(), source })?;
            let handlers = block::cri(&own).and_then(|cri| cri.get("runtimes"));
            if handlers.is_none_or(|handlers| handlers.get(&added.runtime_name).is_none()) {
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
        Ok(Some(Edit { added: added.clone(), before: Some(before), after }))
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
            Some(text) => files::replace(path, text.as_bytes(), None).map_err(failed("write")),
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

impl fmt::Display for Edit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let longer = self.after.as_ref().map_or(0, String::len)
            > self.before.as_ref().map_or(0, String::len);
        let (verb, sign) = if longer { ("edit", '+') } else { ("restore", '-') };
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

    const DUMP: &str = "version = 3\n[plugins.\"io.containerd.cri.v1.runtime\".containerd]\n";

    /// Whatever the file looks like, and whatever is added behind the block later, all else stays.
    #[test]
    fn what_goes_in_comes_out_byte_for_byte() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.toml");
        let dump: Table = DUMP.parse().unwrap();
        for text in ["version = 3", "version = 3\n", "# a comment\nversion = 3\n\n\n"] {
            fs::write(&path, text).unwrap();
            let edit = Edit::plan(&path, &dump, "affinode").unwrap();
            edit.make().unwrap();
            let with: Table = fs::read_to_string(&path).unwrap().parse().unwrap();
            assert!(block::cri(&with).unwrap()["runtimes"].get("affinode").is_some());
            fs::write(&path, fs::read_to_string(&path).unwrap() + "# later\n").unwrap();
            Edit::removal(&edit.added).unwrap().unwrap().make().unwrap();
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
        let edit = Edit::plan(&path, &dump, "affinode").unwrap();
        edit.make().unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.starts_with("version = 3\n"));
        fs::write(&path, text.replace("affinode.io/*", "*")).unwrap();
        assert!(matches!(Edit::removal(&edit.added), Err(EditError::Changed { .. })));
        fs::write(&path, text).unwrap();
        Edit::removal(&edit.added).unwrap().unwrap().make().unwrap();
        assert!(!path.exists());
        assert!(Edit::removal(&edit.added).unwrap().is_none());
        fs::write(&path, "version = ").unwrap();
        assert!(matches!(Edit::plan(&path, &dump, "affinode"), Err(EditError::Toml { .. })));
    }
}
