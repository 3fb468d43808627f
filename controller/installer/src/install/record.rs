//! The record of the installed files and handlers. An uninstallation removes what the record lists.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use serde::{Deserialize, Serialize, de::DeserializeOwned, de::Error as _};

use super::{
    FileError, SourceFile,
    containerd::ContainerdNode,
    edit::AddedText,
    files,
    plan::{self, HandlerPlan},
};
use crate::doctor::programs::SHIM;

const FILE: &str = "install.json";
/// Version of the record. A release that adds a field which older releases may ignore does not
/// change it. A release whose record older releases would misunderstand increases it.
const VERSION: u32 = 1;

/// Returns whether a folder contains a record.
pub fn exists(folder: &Path) -> bool {
    folder.join(FILE).exists()
}

/// Parses the JSON of a record. Fields that this release does not know are ignored, so that an
/// older release can read the record after a rollback. Fails if the version of the record is
/// greater than `version`.
pub fn parse<T: DeserializeOwned>(text: &[u8], version: u32) -> Result<T, serde_json::Error> {
    #[derive(Deserialize)]
    struct VersionOnly {
        version: u32,
    }
    match serde_json::from_slice(text)? {
        VersionOnly { version: written } if written > version => {
            Err(serde_json::Error::custom(format!(
                "the record has version {written}, and this release reads version {version}: use the release that wrote it, or a newer one"
            )))
        }
        VersionOnly { .. } => serde_json::from_slice(text),
    }
}

/// Record of an installation: the installed files, and the handlers in containerd's configuration.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct InstallRecord {
    version: u32,
    files: Vec<InstalledFile>,
    /// Folders that the installation created, each after its parent.
    #[serde(default)]
    pub folders: Vec<PathBuf>,
    /// Whether the installation was completed, so that containerd has loaded the handler.
    pub settled: bool,
    /// Path of the socket of the containerd that was configured.
    #[serde(default)]
    pub containerd: Option<PathBuf>,
    /// The handler that the installation added to containerd's configuration or found in it.
    pub block: Option<AddedBlock>,
    /// Handlers with earlier names, which stay in containerd's configuration because running pods
    /// may need them.
    #[serde(default)]
    pub former: Vec<AddedBlock>,
    /// Only while the installation is not completed: texts of the last completed installation,
    /// which containerd has loaded.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    loaded: Vec<AddedText>,
}

/// Record of a handler in containerd's configuration, and of the texts that were added for it. The
/// text of a handler that existed already is empty.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AddedBlock {
    /// Path of the file.
    pub path: PathBuf,
    /// Name of the handler.
    pub runtime_name: String,
    /// The text exactly as it is in the file.
    pub text: String,
    /// Whether the installation created the file.
    pub created: bool,
    /// Further texts of the handler that the installation added to other files, or that an earlier
    /// installation added.
    #[serde(default)]
    pub also: Vec<AddedText>,
    /// Path of the configuration file that containerd read first.
    #[serde(default)]
    pub root: Option<PathBuf>,
    /// Time at which the installation wrote the file for this handler, in milliseconds since 1970.
    /// Other programs may have written the file since then.
    #[serde(default)]
    written_ms: Option<u64>,
    /// If this handler replaced an earlier one: the time at which the earlier handler was written,
    /// in milliseconds since 1970. `None`: containerd cannot have loaded an earlier handler.
    #[serde(default)]
    replaced_ms: Option<u64>,
    /// Whether containers got their devices from CDI.
    #[serde(default)]
    pub cdi: bool,
}

impl AddedBlock {
    /// Creates the entry of a handler that another program or a person has written into this file.
    pub fn of(name: &str, path: PathBuf, node: &ContainerdNode, cdi: bool) -> AddedBlock {
        let none = AddedText { path, text: String::new(), created: false };
        let mut block = AddedBlock::added(name, vec![none], node, cdi);
        block.settle();
        block
    }

    /// Creates the entry of a handler. `texts` are the texts that the installation adds to
    /// containerd's files. The first text is for the file that defines the handler.
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

    /// Returns all texts that were added for the handler.
    pub fn texts(&self) -> impl Iterator<Item = AddedText> {
        let (path, text) = (self.path.clone(), self.text.clone());
        let first = AddedText { path, text, created: self.created };
        std::iter::once(first).chain(self.also.iter().cloned()).filter(|one| !one.text.is_empty())
    }

    /// Returns the time at which the handler was written.
    pub fn written(&self) -> SystemTime {
        self.written_ms.map_or_else(|| plan::written(&self.path), at)
    }

    /// Returns the time at which the replaced handler was written. containerd may still serve that
    /// handler.
    pub fn replaced(&self) -> Option<SystemTime> {
        self.replaced_ms.map(at)
    }

    /// Records that this handler replaces `old`, which containerd may have loaded.
    pub fn replaces(&mut self, old: &AddedBlock, node: &ContainerdNode) {
        let known = [Some(old.written()), old.replaced()];
        self.replaced_ms =
            known.into_iter().flatten().find(|time| node.runs_since(*time)).and_then(ms);
    }

    /// Stores the time at which the handler's file was written. Removes those texts in `also` that
    /// their files no longer contain.
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

#[derive(Clone, Debug, Serialize, Deserialize)]
struct InstalledFile {
    path: PathBuf,
    sha256: String,
}

/// Reason why the record cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The file cannot be read or written.
    #[error("cannot {action} {}{}", path.display(), super::advice(source, super::ANOTHER_PLACE))]
    Io {
        /// The operation that failed, as a verb.
        action: &'static str,
        /// Path of the record's file.
        path: PathBuf,
        /// System error of the failed operation.
        #[source]
        source: io::Error,
    },
    /// The content of the file is not a record of this version.
    #[error("{} is not a valid record of an installation", path.display())]
    Content {
        /// Path of the file.
        path: PathBuf,
        /// Error of the JSON parser.
        #[source]
        source: serde_json::Error,
    },
}

impl InstallRecord {
    /// Creates the record of an installation that is about to begin.
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
        // containerd has loaded the handler if the earlier record says so and this installation
        // changes none of containerd's files.
        let settled = plan.edit.is_none() && older.as_ref().is_some_and(|older| older.settled);
        let containerd = older.as_ref().and_then(|older| older.containerd.clone());
        let loaded = older.as_ref().filter(|_| !settled).map(InstallRecord::loaded);
        let mut former = plan.former.clone();
        if let Some(older) = older {
            // Until a removal is complete, the record still lists the handlers that are removed.
            let leaves =
                |block: &AddedBlock| plan.gone.iter().any(|g| g.name == block.runtime_name);
            former.extend(older.blocks().filter(|block| leaves(block)).cloned());
            let elsewhere = |old: &InstalledFile| files.iter().all(|file| file.path != old.path);
            let (left, _): (Vec<_>, Vec<_>) = older.files.into_iter().partition(elsewhere);
            files.extend(left);
            folders.splice(..0, older.folders);
        }
        let block = plan.block.clone();
        InstallRecord {
            version: VERSION,
            files,
            folders,
            settled,
            containerd,
            block,
            former,
            loaded: loaded.unwrap_or_default(),
        }
    }

    /// Returns the texts of the last completed installation.
    fn loaded(&self) -> Vec<AddedText> {
        match self.settled {
            true => self.blocks().flat_map(AddedBlock::texts).collect(),
            false => self.loaded.clone(),
        }
    }

    /// Returns the texts of an installation that was not completed. containerd may not start with
    /// them. Texts of an earlier, completed installation are left out.
    pub fn unverified(&self) -> impl Iterator<Item = AddedText> {
        let texts = self.blocks().filter(|_| !self.settled).flat_map(AddedBlock::texts);
        let is_loaded = |text: &AddedText| {
            self.loaded.iter().any(|known| known.path == text.path && known.text == text.text)
        };
        texts.filter(move |text| !is_loaded(text))
    }

    /// Changes the record of a failed installation after all edits of containerd's files were
    /// undone. The handlers are those of the earlier record. Each file may be the earlier file or
    /// the new one.
    pub fn revert(&mut self, older: &InstallRecord) {
        self.settled = older.settled;
        self.containerd.clone_from(&older.containerd);
        self.block.clone_from(&older.block);
        self.former.clone_from(&older.former);
        self.loaded.clone_from(&older.loaded);
        for file in &mut self.files {
            let earlier = older.files.iter().find(|earlier| earlier.path == file.path);
            let is_there = |sha256: &str| files::digest(&file.path).is_ok_and(|now| now == sha256);
            if let Some(earlier) = earlier.filter(|earlier| is_there(&earlier.sha256)) {
                file.sha256.clone_from(&earlier.sha256);
            }
        }
    }

    /// Records that all changes of the plan were made, so that the installation is complete.
    pub fn settle(&mut self, plan: &HandlerPlan) {
        self.settled = true;
        self.loaded.clear();
        self.former.clone_from(&plan.former);
        if let Some(block) = self.block.as_mut().filter(|_| plan.edit.is_some()) {
            block.settle();
        }
    }

    /// Returns the entries of all handlers in containerd's configuration.
    pub fn blocks(&self) -> impl Iterator<Item = &AddedBlock> {
        self.block.iter().chain(&self.former)
    }

    /// Returns the path at which the shim was installed.
    pub fn shim(&self) -> Option<&Path> {
        self.listed().map(|(path, _)| path).find(|path| path.ends_with(SHIM))
    }

    /// Reads the record from a folder. `None`: nothing is installed.
    pub fn read(folder: &Path) -> Result<Option<InstallRecord>, RecordError> {
        let path = folder.join(FILE);
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(RecordError::Io { action: "read", path, source }),
        };
        match parse(&text, VERSION) {
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

    /// Removes the record, because nothing is installed any more.
    pub fn remove(&self, folder: &Path) -> Result<(), RecordError> {
        let path = folder.join(FILE);
        fs::remove_file(&path).map_err(|source| RecordError::Io { action: "remove", path, source })
    }

    /// Returns the path of the record's file in a folder.
    pub fn file(folder: &Path) -> PathBuf {
        folder.join(FILE)
    }

    /// Returns the path and the SHA-256 of every installed file.
    pub fn listed(&self) -> impl Iterator<Item = (&Path, &str)> {
        self.files.iter().map(|file| (file.path.as_path(), file.sha256.as_str()))
    }

    /// Returns the installed files that still exist. The first list contains the unchanged files,
    /// the second list the changed files.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// After a rollback, an older release reads the record of a newer one. It must ignore fields
    /// that it does not know, and refuse a record that it would misunderstand.
    #[test]
    fn a_record_of_a_newer_release_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let block = r#"{"path":"/c","runtime_name":"a","text":"","created":true,"new":1,
                        "also":[{"path":"/d","text":"x","created":false,"new":1}]}"#;
        let write = |version: u32| {
            let text = format!(
                r#"{{"version":{version},"files":[{{"path":"/x","sha256":"0","new":{{}}}}],
                    "settled":true,"block":{block},"new":[1]}}"#
            );
            fs::write(folder.path().join(FILE), text).unwrap();
            InstallRecord::read(folder.path())
        };
        let record = write(VERSION).unwrap().unwrap();
        assert_eq!(record.blocks().flat_map(AddedBlock::texts).count(), 1);
        assert_eq!(record.listed().next().unwrap().0, Path::new("/x"));
        let RecordError::Content { source, .. } = write(VERSION + 1).unwrap_err() else { panic!() };
        assert!(source.to_string().contains("version 2"), "{source}");
    }
}
