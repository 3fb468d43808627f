//! Edits containerd's files, or the template from which k3s and rke2 make containerd's file. A text
//! block is added at the end of a file and later removed, so that every other byte stays unchanged.
//! If another program has rewritten the file in the meantime, the handler is removed by its place
//! in the TOML tree.

use std::{
    fmt, fs, io,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use toml::Table;

use super::{
    block, files,
    handler::{self, HandlerSpec},
    removal, target,
};

/// A text that the installation added to a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AddedText {
    /// Path of the file.
    pub path: PathBuf,
    /// The text, exactly as it is in the file.
    pub text: String,
    /// Whether the installation created the file.
    pub created: bool,
}

/// Reason why a file cannot be edited.
#[derive(Debug, thiserror::Error)]
pub enum EditError {
    /// The file cannot be read or written.
    #[error("cannot {action} {}{}", path.display(), super::advice(source, super::BY_HAND))]
    Io {
        /// The operation that failed, as a verb.
        action: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// System error of the failed operation.
        #[source]
        source: io::Error,
    },
    /// The text block for the file cannot be created.
    #[error(transparent)]
    Block(#[from] block::BlockError),
    /// The handler cannot be removed from the file, because its text was changed.
    #[error("cannot remove handler {name:?} from {}, because the handler's text was changed since the installation: remove the handler by hand", path.display())]
    Changed {
        /// Path of the file.
        path: PathBuf,
        /// Name of the handler.
        name: String,
    },
}

/// The content of a file before and after the edit. `None`: the file does not exist.
#[derive(Clone, Debug)]
struct FileEdit {
    path: PathBuf,
    before: Option<String>,
    after: Option<String>,
    /// Changed lines for the output. Added lines begin with a plus, removed lines with a minus.
    shown: Vec<String>,
}

/// An edit of several files: their content before and after it.
#[derive(Debug, Default)]
pub struct ConfigEdit {
    files: Vec<FileEdit>,
    /// First, the texts of the handlers that the edit removes. Second, the texts of the handlers
    /// that it adds. They are needed to predict the file that k3s or rke2 render from a template.
    blocks: (Vec<String>, Vec<String>),
}

impl ConfigEdit {
    /// Creates an edit of these files. It does not contain any change yet.
    pub fn of(paths: impl IntoIterator<Item = PathBuf>) -> Result<ConfigEdit, EditError> {
        let mut edit = ConfigEdit::default();
        for path in paths {
            if edit.files.iter().all(|file| file.path != path) {
                let before = read(&path)?;
                let after = before.clone();
                edit.files.push(FileEdit { path, before, after, shown: Vec::new() });
            }
        }
        Ok(edit)
    }

    /// Returns the content of one of the files after the edit.
    pub fn text(&self, path: &Path) -> Option<&str> {
        self.files.iter().find(|file| file.path == path)?.after.as_deref()
    }

    /// Returns the content of one of the files after the edit, parsed as TOML. Invalid content
    /// counts as empty, because `containerd config dump` reports the error.
    pub fn table(&self, path: &Path) -> Table {
        self.text(path).unwrap_or_default().parse().unwrap_or_default()
    }

    /// Adds a text at the end of a file.
    pub fn append(&mut self, path: &Path, added: &str) {
        let Some(file) = self.files.iter_mut().find(|file| file.path == path) else { return };
        file.after = Some(format!("{}{added}", file.after.as_deref().unwrap_or_default()));
        file.shown.extend(added.lines().filter(|line| !line.is_empty()).map(|l| format!("+ {l}")));
        self.blocks.1.push(block::in_text(added).to_owned());
    }

    /// Removes a recorded text from its file, if the file still contains the text unchanged.
    pub fn remove_text(&mut self, added: &AddedText) {
        let Some(file) = self.files.iter_mut().find(|file| file.path == added.path) else { return };
        let Some((head, tail)) =
            file.after.as_deref().and_then(|text| text.split_once(added.text.as_str()))
        else {
            return;
        };
        let rest = format!("{head}{tail}");
        let lines = added.text.lines().filter(|line| !line.is_empty());
        file.shown.extend(lines.map(|line| format!("- {line}")));
        file.after = (!(added.created && rest.is_empty())).then_some(rest);
        self.blocks.0.push(block::in_text(&added.text).to_owned());
    }

    /// Removes the handlers that `specs` names from every file. In a file, a handler is removed if
    /// it runs Affinode's shim. A file may contain only some keys of a handler, without the shim.
    /// Such keys are removed if `merged` contains the handler's name. `merged` lists the handlers
    /// that run Affinode's shim in containerd's whole configuration.
    pub fn remove_handlers(
        &mut self,
        specs: &[HandlerSpec],
        merged: &[&str],
    ) -> Result<(), EditError> {
        for file in &mut self.files {
            for spec in specs {
                let Some(text) = file.after.as_deref() else { break };
                let changed =
                    EditError::Changed { path: file.path.clone(), name: spec.name.clone() };
                if target::is_template(&file.path) {
                    // A template is not TOML.
                    match text.contains(&format!("runtimes.\"{}\"", spec.name)) {
                        true => return Err(changed),
                        false => continue,
                    }
                }
                let own = text.parse::<Table>().unwrap_or_default();
                let ours = handler::handler_of(&own, &spec.name);
                let merged = merged.contains(&spec.name.as_str());
                if !ours.is_some_and(|handler| merged || spec.is_ours(handler)) {
                    continue;
                }
                let rest = removal::without(text, &spec.name).ok_or(changed)?;
                file.shown.push(format!("- handler {}", spec.name));
                let emptied = target::is_drop_in(&file.path) && is_bare(&rest);
                file.after = (!emptied).then_some(rest);
            }
        }
        Ok(())
    }

    /// Returns whether the edit changes no file.
    pub fn is_empty(&self) -> bool {
        self.changed().next().is_none()
    }

    fn changed(&self) -> impl Iterator<Item = &FileEdit> {
        self.files.iter().filter(|file| file.before != file.after)
    }

    /// Returns the paths of the files that the edit changes.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.changed().map(|file| file.path.as_path())
    }

    /// Predicts the content of the containerd file that k3s or rke2 render from the edited
    /// template. `root` is the file's present content.
    pub fn preview(&self, root: &str) -> String {
        let without = self.blocks.0.iter().fold(root.to_owned(), |all, one| all.replace(one, ""));
        self.blocks.1.iter().fold(without, |all, one| format!("{all}\n{one}"))
    }

    /// Writes the edited files. If a file cannot be written, all files are restored.
    pub fn make(&self) -> Result<(), EditError> {
        for (at, file) in self.changed().enumerate() {
            if let Err(error) = put(&file.path, file.after.as_deref()) {
                let mut written = self.changed().take(at);
                written.try_for_each(|file| put(&file.path, file.before.as_deref()))?;
                return Err(error);
            }
        }
        Ok(())
    }

    /// Returns whether all files have the content that they had before the edit.
    pub fn is_undone(&self) -> bool {
        self.changed().all(|file| read(&file.path).is_ok_and(|there| there == file.before))
    }

    /// Returns a file that another program has changed since the edit was made.
    pub fn overwritten(&self) -> Option<&Path> {
        let there = |file: &FileEdit| read(&file.path).is_ok_and(|there| there == file.after);
        self.changed().find(|file| !there(file)).map(|file| file.path.as_path())
    }

    /// Restores the original content of the files that no other program has changed since.
    pub fn undo_own(&self) -> Result<(), EditError> {
        let own = |file: &&FileEdit| read(&file.path).is_ok_and(|there| there == file.after);
        let files: Vec<_> = self.changed().filter(own).collect();
        files.into_iter().try_for_each(|file| put(&file.path, file.before.as_deref()))
    }

    /// Restores the original content of the files.
    pub fn undo(&self) -> Result<(), EditError> {
        // A file that cannot be written must not prevent the others from being restored.
        let undone: Vec<_> =
            self.changed().map(|file| put(&file.path, file.before.as_deref())).collect();
        undone.into_iter().collect()
    }
}

/// Returns whether the text of a configuration file sets nothing except the version.
fn is_bare(text: &str) -> bool {
    text.parse::<Table>().is_ok_and(|rest| {
        rest.iter().all(|(key, value)| key == "version" || handler::is_empty(value))
    })
}

fn put(path: &Path, text: Option<&str>) -> Result<(), EditError> {
    let failed = |action| move |source| EditError::Io { action, path: path.to_owned(), source };
    match text {
        Some(text) => {
            if let Some(folder) = path.parent() {
                fs::create_dir_all(folder).map_err(failed("write"))?;
            }
            files::replace(path, text.as_bytes(), None).map_err(failed("write"))
        }
        None => match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed("remove")(error)),
            _ => Ok(()),
        },
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
        for (at, file) in self.changed().enumerate() {
            let adds = file.shown.iter().any(|line| line.starts_with('+'));
            let verb = match (adds, &file.before) {
                (true, None) => "make",
                (true, Some(_)) => "edit",
                (false, _) => "restore",
            };
            let newline = if at == 0 { "" } else { "\n" };
            write!(f, "{newline}{verb} {}", file.path.display())?;
            file.shown.iter().try_for_each(|line| write!(f, "\n  {line}"))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
