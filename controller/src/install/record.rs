//! The record of what was installed, for the uninstallation.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use serde::{Deserialize, Serialize};

use super::{
    FileError, SourceFile,
    containerd::ContainerdNode,
    edit::AddedText,
    files,
    plan::{self, HandlerPlan},
};
use crate::doctor::programs::SHIM;

const FILE: &str = "install.json";
const VERSION: u32 = 1;

/// Whether a folder has a record.
pub fn exists(folder: &Path) -> bool {
    folder.join(FILE).exists()
}

/// The installed files, and the block in containerd's file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InstallRecord {
    version: u32,
    files: Vec<InstalledFile>,
    /// Folders that were created, each after its parent.
    #[serde(default)]
    pub folders: Vec<PathBuf>,
    /// Whether containerd has loaded the handler.
    pub settled: bool,
    /// Socket of that containerd.
    #[serde(default)]
    pub containerd: Option<PathBuf>,
    /// The handler in containerd's configuration.
    pub block: Option<AddedBlock>,
    /// Handlers of earlier names, which running pods may need.
    #[serde(default)]
    pub former: Vec<AddedBlock>,
}

/// A handler in containerd's configuration, and the text that was added for it. An adopted handler
/// has none.
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
    /// What was added to other files, and what was added before.
    #[serde(default)]
    pub also: Vec<AddedText>,
    /// The file that containerd read first.
    #[serde(default)]
    pub root: Option<PathBuf>,
    /// When the file was written, in milliseconds since 1970. Other programs write it too.
    #[serde(default)]
    written_ms: Option<u64>,
    /// The same of a handler that was replaced.
    #[serde(default)]
    replaced_ms: Option<u64>,
    /// Whether devices came from CDI.
    #[serde(default)]
    pub cdi: bool,
}

impl AddedBlock {
    /// A handler that another program or a person wrote into this file.
    pub fn of(name: &str, path: PathBuf, node: &ContainerdNode, cdi: bool) -> AddedBlock {
        let none = AddedText { path, text: String::new(), created: false };
        let mut block = AddedBlock::added(name, vec![none], node, cdi);
        block.settle();
        block
    }

    /// A handler with the texts that are added for it, the first of them in its own file.
    pub fn added(
        name: &str,
        texts: Vec<AddedText>,
        node: &ContainerdNode,
        cdi: bool,
    ) -> AddedBlock {
        let mut texts = texts.into_iter();
        let first = texts.next();
        let first = first.unwrap_or(AddedText {
            path: node.config_file(),
            text: String::new(),
            created: false,
        });
        AddedBlock {
            path: first.path,
            runtime_name: name.to_owned(),
            text: first.text,
            created: first.created,
            also: texts.collect(),
            root: Some(node.config_file()),
            written_ms: None,
            replaced_ms: None,
            cdi,
        }
    }

    /// Every text that was added.
    pub fn texts(&self) -> impl Iterator<Item = AddedText> {
        let (path, text) = (self.path.clone(), self.text.clone());
        let first = AddedText { path, text, created: self.created };
        std::iter::once(first).chain(self.also.iter().cloned()).filter(|one| !one.text.is_empty())
    }

    /// When the handler was written.
    pub fn written(&self) -> SystemTime {
        self.written_ms.map_or_else(|| plan::written(&self.path), at)
    }

    /// When a handler was written that this one replaced and that containerd may still serve.
    pub fn replaced(&self) -> Option<SystemTime> {
        self.replaced_ms.map(at)
    }

    /// Notes that this handler replaces another one, which containerd may have loaded.
    pub fn replaces(&mut self, old: &AddedBlock, node: &ContainerdNode) {
        let known = [Some(old.written()), old.replaced()];
        self.replaced_ms =
            known.into_iter().flatten().find(|time| node.runs_since(*time)).and_then(ms);
    }

    /// Notes the time of the write, and forgets texts that were replaced.
    fn settle(&mut self) {
        self.written_ms = ms(plan::written(&self.path));
        let there = |added: &AddedText| {
            fs::read_to_string(&added.path).is_ok_and(|text| text.contains(&added.text))
        };
        self.also.retain(there);
    }
}

fn at(ms: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(ms)
}

fn ms(time: SystemTime) -> Option<u64> {
    u64::try_from(time.duration_since(UNIX_EPOCH).unwrap_or_default().as_millis()).ok()
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct InstalledFile {
    path: PathBuf,
    sha256: String,
}

/// Why the record cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The file cannot be read or written.
    #[error("cannot {action} {}{}", path.display(), super::advice(source, super::ANOTHER_PLACE))]
    Io {
        /// What the failed operation was.
        action: &'static str,
        /// Path of the file.
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The content is not a record of this version.
    #[error("{} is not a valid record of an installation", path.display())]
    Content {
        /// Path of the file.
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
}

impl InstallRecord {
    /// The record of an installation that begins.
    pub fn of(
        prefix: &Path,
        source: &SourceFile,
        older: Option<InstallRecord>,
        plan: &HandlerPlan,
        made: &[PathBuf],
    ) -> InstallRecord {
        let mut files = Vec::new();
        for (content, path, _) in source.places(prefix) {
            files.push(InstalledFile { sha256: files::digest_of(&content), path });
        }
        let mut folders = made.to_vec();
        // containerd has loaded a handler that is not changed.
        let settled = plan.edit.is_none() && older.as_ref().is_some_and(|older| older.settled);
        let containerd = older.as_ref().and_then(|older| older.containerd.clone());
        let mut former = plan.former.clone();
        if let Some(older) = older {
            // What is removed now is recorded until it is gone.
            let leaves =
                |block: &AddedBlock| plan.gone.iter().any(|g| g.name == block.runtime_name);
            former.extend(older.blocks().filter(|block| leaves(block)).cloned());
            let elsewhere = |old: &InstalledFile| files.iter().all(|file| file.path != old.path);
            let (left, _): (Vec<_>, Vec<_>) = older.files.into_iter().partition(elsewhere);
            files.extend(left);
            folders.splice(..0, older.folders);
        }
        let block = plan.block.clone();
        InstallRecord { version: VERSION, files, folders, settled, containerd, block, former }
    }

    /// Records that the plan was carried out.
    pub fn settle(&mut self, plan: &HandlerPlan) {
        self.settled = true;
        self.former.clone_from(&plan.former);
        if let Some(block) = self.block.as_mut().filter(|_| plan.edit.is_some()) {
            block.settle();
        }
    }

    /// The handlers in containerd's configuration.
    pub fn blocks(&self) -> impl Iterator<Item = &AddedBlock> {
        self.block.iter().chain(&self.former)
    }

    /// Path of the shim as it was installed.
    pub fn shim(&self) -> Option<&Path> {
        self.listed().map(|(path, _)| path).find(|path| path.ends_with(SHIM))
    }

    /// Reads the record; `None` if nothing is installed.
    pub fn read(folder: &Path) -> Result<Option<InstallRecord>, RecordError> {
        let path = folder.join(FILE);
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(RecordError::Io { action: "read", path, source }),
        };
        match serde_json::from_slice(&text) {
            Ok(record) => Ok(Some(record)),
            Err(source) => Err(RecordError::Content { path, source }),
        }
    }

    /// Writes the record into a folder.
    pub fn write(&self, folder: &Path) -> Result<(), RecordError> {
        let path = folder.join(FILE);
        let text = serde_json::to_vec_pretty(self)
            .map_err(|source| RecordError::Content { path: path.clone(), source })?;
        files::replace(&path, &text, Some(0o600)).map_err(|source| RecordError::Io {
            action: "write",
            path,
            source,
        })
    }

    /// Removes the record: nothing is installed then.
    pub fn remove(&self, folder: &Path) -> Result<(), RecordError> {
        let path = folder.join(FILE);
        fs::remove_file(&path).map_err(|source| RecordError::Io { action: "remove", path, source })
    }

    /// Path of the record's file.
    pub fn file(folder: &Path) -> PathBuf {
        folder.join(FILE)
    }

    /// Every installed file with its SHA-256.
    pub fn listed(&self) -> impl Iterator<Item = (&Path, &str)> {
        self.files.iter().map(|file| (file.path.as_path(), file.sha256.as_str()))
    }

    /// The files that are unchanged, and those that were changed since.
    pub fn files(&self) -> Result<(Vec<PathBuf>, Vec<PathBuf>), FileError> {
        let there = self.files.iter().filter(|file| file.path.exists());
        let mut known = Vec::new();
        for file in there {
            known.push((file.path.clone(), files::digest(&file.path)? == file.sha256));
        }
        let (ours, others): (Vec<_>, Vec<_>) = known.into_iter().partition(|(_, same)| *same);
        let paths = |files: Vec<(PathBuf, bool)>| files.into_iter().map(|(path, _)| path).collect();
        Ok((paths(ours), paths(others)))
    }
}
