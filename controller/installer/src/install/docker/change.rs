//! A change of dockerd's configuration file, with the values that are needed to revert it.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use super::{
    DockerError, DockerPlan,
    daemon::DockerDaemon,
    edit::{self, RuntimeEntry},
    record::DockerRecord,
};
use crate::{
    doctor::handler::RUNTIME_TYPE,
    install::{Steps, files},
};

/// Name of the temporary file that `dockerd --validate` checks. The file is in the folder of the
/// record and contains the planned content of dockerd's file.
pub const SCRATCH: &str = "docker-check.json";

/// A change of dockerd's configuration file: its content before and after the change, and the
/// dockerd that reads it.
#[derive(Debug)]
pub struct DockerChange {
    /// The running dockerd. `None`: no dockerd runs, and the next one reads the file at its start.
    daemon: Option<DockerDaemon>,
    file: PathBuf,
    name: String,
    before: Option<String>,
    after: Option<String>,
    kind: ChangeKind,
}

#[derive(Debug)]
enum ChangeKind {
    /// Adds the runtime. The record is written before the file.
    Register(DockerRecord),
    /// Only makes dockerd reload its file, which already contains the runtime.
    Reload,
    /// Removes the runtime, and the folders that the installation created.
    Remove { folders: Vec<PathBuf> },
}

impl DockerChange {
    /// Plans the registration of the runtime `name` in this dockerd. `record` describes an earlier
    /// registration.
    pub fn to_register(
        daemon: DockerDaemon,
        record: Option<&DockerRecord>,
        name: &str,
    ) -> Result<DockerPlan, DockerError> {
        let file = daemon.config_file.clone();
        if let Some(record) = record.filter(|record| record.config_file != file) {
            return Err(DockerError::Moved { now: file, then: record.config_file.clone() });
        }
        let before = read(&file)?;
        let text = before.as_deref().unwrap_or_default();
        let invalid = |why| DockerError::Invalid { path: file.clone(), why };
        let (before, after, kind) = match edit::entry(text, name).map_err(invalid)? {
            RuntimeEntry::Other => {
                return Err(DockerError::Taken { path: file, name: name.to_owned() });
            }
            RuntimeEntry::Affinode => {
                let silent = |source| DockerError::Absent { socket: daemon.socket.clone(), source };
                if daemon.serves(name).map_err(silent)? {
                    return Ok(DockerPlan::Served);
                }
                // An earlier installer was killed after it wrote the file and before the reload.
                // `old` is the file's content before that installer ran. It must be restored if the
                // reload fails now.
                let own = record.filter(|record| record.written == text);
                let old = own.map_or_else(|| before.clone(), |record| record.original.clone());
                (old, before, ChangeKind::Reload)
            }
            RuntimeEntry::Absent => {
                let written = edit::with_runtime(text, name).map_err(invalid)?;
                let original = before.as_deref();
                let record = DockerRecord::new(&daemon.socket, &file, name, original, &written);
                (before, Some(written), ChangeKind::Register(record))
            }
        };
        let (daemon, name) = (Some(daemon), name.to_owned());
        Ok(DockerPlan::Change(Box::new(DockerChange { daemon, file, name, before, after, kind })))
    }

    /// Plans the removal of the runtime that this record describes.
    pub fn to_remove(record: &DockerRecord) -> Result<DockerPlan, DockerError> {
        let (file, name) = (record.config_file.clone(), record.runtime_name.clone());
        let daemon = DockerDaemon::running(&record.socket).ok();
        let before = read(&file)?;
        let text = before.as_deref().unwrap_or_default();
        if edit::is_default(text, &name) || daemon.as_ref().is_some_and(|d| d.is_default(&name)) {
            return Err(DockerError::Default { path: file, name });
        }
        let invalid = |why| DockerError::Invalid { path: file.clone(), why };
        // The file has the second of these texts if an uninstallation was killed.
        let ours =
            [Some(record.written.clone()), edit::with_list_only(&record.written, &name).ok()];
        let after = match edit::entry(text, &name).map_err(invalid)? {
            _ if before.is_some() && ours.contains(&before) => record.original.clone(),
            RuntimeEntry::Other => return Err(DockerError::Taken { path: file, name }),
            RuntimeEntry::Absent => before.clone(),
            RuntimeEntry::Affinode => {
                let rest = edit::without_runtime(text, &name).map_err(invalid)?;
                let needed = record.original.is_some() || !edit::is_empty(&rest);
                needed.then_some(rest)
            }
        };
        let kind = ChangeKind::Remove { folders: record.folders.clone() };
        Ok(DockerPlan::Change(Box::new(DockerChange { daemon, file, name, before, after, kind })))
    }

    /// Returns descriptions of the steps, one per line.
    pub fn steps(&self) -> Steps {
        let (file, name) = (self.file.display(), &self.name);
        let mut steps = Vec::new();
        match (&self.kind, &self.before) {
            _ if self.before == self.after => {}
            (ChangeKind::Register(_), None) => {
                steps.push(format!("make {file}\n  + runtime {name}: {RUNTIME_TYPE}"));
            }
            (ChangeKind::Register(_), Some(_)) => {
                steps.push(format!("edit {file}\n  + runtime {name}: {RUNTIME_TYPE}"));
            }
            (ChangeKind::Reload, _) => {}
            (ChangeKind::Remove { .. }, _) => {
                steps.push(format!("restore {file}\n  - runtime {name}: {RUNTIME_TYPE}"));
            }
        }
        if self.daemon.is_some() {
            steps.push("reload dockerd: containers keep running".into());
        }
        steps
    }

    /// Executes the change. If it fails, the previous state is restored.
    pub fn make(&self, state_dir: &Path) -> Result<(), DockerError> {
        self.examine(state_dir)?;
        if let ChangeKind::Register(record) = &self.kind {
            record.write(state_dir)?;
        }
        let made = match &self.kind {
            ChangeKind::Remove { .. } => self.unload(&self.before, &self.after),
            _ => self.put(self.after.as_deref()).and_then(|()| self.reload(true)),
        };
        match (made, &self.kind) {
            (Ok(()), ChangeKind::Remove { folders }) => {
                files::remove_folders(folders);
                DockerRecord::remove(state_dir)
            }
            (Ok(()), _) => Ok(()),
            (Err(error), _) => {
                self.back(state_dir).map_err(|after| self.lost(&error, &after))?;
                Err(error)
            }
        }
    }

    /// Restores the file as it was before the change, and makes dockerd read it.
    pub fn undo(&self, state_dir: &Path) -> Result<(), DockerError> {
        self.back(state_dir)
    }

    fn back(&self, state_dir: &Path) -> Result<(), DockerError> {
        if self.before == self.after {
            return Ok(());
        }
        match &self.kind {
            ChangeKind::Register(record) => {
                self.unload(&self.after, &self.before)?;
                files::remove_folders(&record.folders);
                DockerRecord::remove(state_dir)
            }
            ChangeKind::Reload => {
                self.unload(&self.after, &self.before)?;
                DockerRecord::remove(state_dir)
            }
            ChangeKind::Remove { .. } => {
                self.put(self.before.as_deref())?;
                self.reload(true)
            }
        }
    }

    /// Makes dockerd unload the runtime, and then restores the file. `with` is the text of the file
    /// with the runtime, and `without` is the text without it. `None`: the file does not exist.
    fn unload(&self, with: &Option<String>, without: &Option<String>) -> Result<(), DockerError> {
        let serves = |daemon: &DockerDaemon| daemon.serves(&self.name).unwrap_or(true);
        let mut unloaded = Ok(());
        if self.daemon.as_ref().is_some_and(serves) {
            let list = edit::with_list_only(with.as_deref().unwrap_or_default(), &self.name);
            self.put(list.ok().as_deref().or(without.as_deref()))?;
            unloaded = self.reload(false);
        }
        self.put(without.as_deref())?;
        unloaded
    }

    fn lost(&self, before: &DockerError, after: &DockerError) -> DockerError {
        let (before, after) = (before.to_string(), after.to_string());
        DockerError::Lost { path: self.file.clone(), before, after }
    }

    fn reload(&self, served: bool) -> Result<(), DockerError> {
        let Some(daemon) = &self.daemon else { return Ok(()) };
        let failed = |why| DockerError::Reload { path: self.file.clone(), why };
        daemon.reload(&self.name, served).map_err(failed)
    }

    /// Checks the new content of the file with dockerd's own program.
    fn examine(&self, state_dir: &Path) -> Result<(), DockerError> {
        let (Some(daemon), Some(after)) = (&self.daemon, &self.after) else { return Ok(()) };
        let scratch = state_dir.join(SCRATCH);
        let io = |source| DockerError::Io { action: "write", path: scratch.clone(), source };
        let judge = |text: &str| -> Result<Result<(), String>, DockerError> {
            files::replace(&scratch, text.as_bytes(), Some(0o600)).map_err(io)?;
            let judged = daemon.validate(&scratch);
            let _ = fs::remove_file(&scratch);
            Ok(judged.map_err(|why| why.replace(&*scratch.to_string_lossy(), "the file")))
        };
        let path = self.file.clone();
        match (judge(after)?, &self.before) {
            (Ok(()), _) => Ok(()),
            (Err(why), Some(before)) if judge(before)?.is_err() => {
                Err(DockerError::Invalid { path, why })
            }
            (Err(why), _) => Err(DockerError::Refused { path, why }),
        }
    }

    fn put(&self, text: Option<&str>) -> Result<(), DockerError> {
        let path = &self.file;
        let failed = |action| move |source| DockerError::Io { action, path: path.clone(), source };
        if read(path)?.as_deref() == text {
            return Ok(());
        }
        match text {
            Some(text) => {
                if let Some(folder) = path.parent() {
                    fs::create_dir_all(folder).map_err(failed("write"))?;
                }
                files::replace(path, text.as_bytes(), None).map_err(failed("write"))
            }
            None => fs::remove_file(path).map_err(failed("remove")),
        }
    }
}

/// Returns the text of a file. `None`: the file does not exist.
pub fn read(path: &Path) -> Result<Option<String>, DockerError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(DockerError::Io { action: "read", path: path.to_owned(), source }),
    }
}
