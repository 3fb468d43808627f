//! Affinode's own files: finds, installs and removes them.

use std::{
    fmt, fs,
    io::{self, Write},
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::Arc,
};

use affinode_proto::{installation::PathsFile, paths};
use sha2::{Digest, Sha256};

use super::podman::{self, PodmanFile, PodmanPlan};
use crate::doctor::{library, programs::SHIM};

/// File name of the program `affinode`, which users run.
const COMMAND: &str = "affinode";

/// The files that an installation writes, with their contents in memory. They are read before this
/// process enters the node's root, because their folder may not be visible afterwards.
#[derive(Clone)]
pub struct SourceFile {
    command: Arc<[u8]>,
    shim: Arc<[u8]>,
    library: Arc<[u8]>,
    /// Content of `affinode-runtime`, the runtime for Podman. `None`: the source folder does not
    /// contain it.
    runtime: Option<Arc<[u8]>>,
    /// Folder from which the contents were read.
    folder: PathBuf,
    podman: PodmanPlan,
    /// Text of `paths.conf`, which names the installation's folders. `None`: this file is not
    /// installed.
    folders: Option<String>,
}

/// Reason why one of Affinode's files was not installed or removed.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// A file is not in the source folder.
    #[error("{file} is not in {}: set --from to the folder that `cargo xtask build` created, or to \
             the folder of an unpacked package", folder.display())]
    Missing {
        /// Name of the file.
        file: &'static str,
        /// The folder that was searched.
        folder: PathBuf,
    },
    /// The library would not load in containers.
    #[error("containers could not load {}: {why}", path.display())]
    Library {
        /// Path of the library.
        path: PathBuf,
        /// Reason why containers could not load the library.
        why: String,
    },
    /// A file operation failed.
    #[error("cannot {action} {}{}", path.display(), super::advice(source, super::ANOTHER_PLACE))]
    Io {
        /// The operation that failed, as a verb.
        action: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// System error of the failed operation.
        #[source]
        source: io::Error,
    },
}

impl SourceFile {
    /// Reads Affinode's programs and its preload library from `folder`, or from its subfolders
    /// `bin` and `lib`.
    ///
    /// # Errors
    /// [`FileError`]: a file is missing or cannot be read, or containers could not load the preload
    /// library.
    pub fn of(folder: &Path) -> Result<SourceFile, FileError> {
        let places = [
            folder.to_owned(),
            folder.join("bin"),
            folder.join("lib"),
            folder.join("lib/affinode"),
        ];
        let find = |file: &'static str| {
            let found = places.iter().map(|place| place.join(file)).find(|path| path.is_file());
            found.ok_or(FileError::Missing { file, folder: folder.to_owned() })
        };
        let path = find(paths::LIB_FILE)?;
        let library = read(&path)?;
        library::loadable(&library).map_err(|why| FileError::Library { path, why })?;
        Ok(SourceFile {
            command: read(&find(COMMAND)?)?.into(),
            shim: read(&find(SHIM)?)?.into(),
            library: library.into(),
            runtime: find(podman::RUNTIME)
                .ok()
                .map(|path| read(&path))
                .transpose()?
                .map(Into::into),
            podman: PodmanPlan::LeftOut,
            folder: folder.to_owned(),
            folders: None,
        })
    }

    /// Creates files that all have this content.
    #[cfg(test)]
    pub(super) fn simulated(content: &[u8]) -> SourceFile {
        let content: Arc<[u8]> = content.into();
        SourceFile {
            command: Arc::clone(&content),
            shim: Arc::clone(&content),
            library: content,
            runtime: None,
            folder: PathBuf::new(),
            podman: PodmanPlan::LeftOut,
            folders: None,
        }
    }

    /// Returns a copy of these files that also contains Podman's files, if `plan` requires them.
    ///
    /// # Errors
    /// [`FileError`]: Podman is required, but its runtime is not in the source folder.
    pub(super) fn with_podman(&self, plan: PodmanPlan, required: bool) -> Result<Self, FileError> {
        let mut source = self.clone();
        match self.runtime {
            Some(_) => source.podman = plan,
            None if required => {
                let folder = self.folder.clone();
                return Err(FileError::Missing { file: podman::RUNTIME, folder });
            }
            None => {}
        }
        Ok(source)
    }

    /// Returns these files with the given text of `paths.conf`. `None`: no `paths.conf` is
    /// installed.
    pub(super) fn with_folders(mut self, text: Option<String>) -> Self {
        self.folders = text;
        self
    }

    /// Returns whether the files for Podman are installed.
    pub(super) fn has_podman(&self) -> bool {
        self.podman != PodmanPlan::LeftOut
    }

    /// Returns the content of each file, its target path and its mode.
    pub(super) fn places(&self, prefix: &Path) -> Vec<(Arc<[u8]>, PathBuf, u32)> {
        let bin =
            |bytes: &Arc<[u8]>, name| (Arc::clone(bytes), prefix.join("bin").join(name), 0o755);
        let library = prefix.join("lib/affinode").join(paths::LIB_FILE);
        // `paths.conf` is written first, so that no shim of this installation runs without its
        // folders.
        let folders = |text: &String| (text.as_bytes().into(), PathsFile::path(prefix), 0o644);
        let mut places: Vec<_> = self.folders.iter().map(folders).collect();
        places.extend([
            bin(&self.command, COMMAND),
            bin(&self.shim, SHIM),
            (Arc::clone(&self.library), library, 0o644),
        ]);
        if let PodmanPlan::Register(file) = &self.podman {
            places.extend(self.runtime.iter().map(|runtime| bin(runtime, podman::RUNTIME)));
            // Podman's file names the program, so it is written after the program.
            let conf = |file: &PodmanFile| (file.text.as_bytes().into(), file.path.clone(), 0o644);
            places.extend(file.as_ref().map(conf));
        }
        places
    }
}

/// A file that must be written, because it is missing at its target or has another content.
pub struct FileChange {
    content: Arc<[u8]>,
    to: PathBuf,
    mode: u32,
    replaces: bool,
}

impl FileChange {
    /// Returns the path at which the file is installed.
    pub fn to(&self) -> &Path {
        &self.to
    }

    /// Returns whether a file with other content exists at the target.
    pub fn replaces(&self) -> bool {
        self.replaces
    }

    /// Returns whether the file at the target has the new content.
    pub fn is_made(&self) -> bool {
        fs::read(&self.to).is_ok_and(|there| there == *self.content)
    }

    /// Writes the new file next to its target.
    fn stage(&self) -> Result<StagedFile, FileError> {
        if let Some(folder) = self.to.parent() {
            fs::create_dir_all(folder).map_err(|source| self.failed(source))?;
        }
        StagedFile::write(&self.to, &self.content, Some(self.mode))
            .map_err(|source| self.failed(source))
    }

    fn failed(&self, source: io::Error) -> FileError {
        FileError::Io { action: "write", path: self.to.clone(), source }
    }
}

/// Writes all new files next to their targets, and then renames each over its old file. If one
/// cannot be written, for example because the disk is full, no old file is replaced. Processes that
/// run or map an old file keep its content.
pub fn make(changes: &[FileChange]) -> Result<(), FileError> {
    let staged: Vec<StagedFile> =
        changes.iter().map(FileChange::stage).collect::<Result<_, _>>()?;
    for (change, file) in changes.iter().zip(staged) {
        file.put().map_err(|source| change.failed(source))?;
    }
    Ok(())
}

impl fmt::Display for FileChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verb = if self.replaces { "replace" } else { "copy" };
        write!(f, "{verb} {}", self.to.display())
    }
}

/// Returns the files that are missing at their targets or have another content.
pub fn plan(source: &SourceFile, prefix: &Path) -> Vec<FileChange> {
    let mut changes = Vec::new();
    for (content, to, mode) in source.places(prefix) {
        let there = fs::read(&to).ok();
        if there.as_deref() != Some(&*content) {
            changes.push(FileChange { content, to, mode, replaces: there.is_some() });
        }
    }
    changes
}

/// Returns the paths under which /proc and command lines may name an installed program: its path
/// below the prefix, and this path with symbolic links resolved. The kernel resolves the links. On
/// some distributions /usr/local is a link to /var/usrlocal.
pub fn places_of_program(prefix: &Path, name: &str) -> Vec<PathBuf> {
    let bin = prefix.join("bin");
    let named = bin.join(name);
    // The folder is resolved on its own, because the program's file may be missing.
    let folder = fs::canonicalize(&bin).map(|bin| bin.join(name));
    let file = fs::canonicalize(&named);
    let mut places = vec![named];
    for place in [folder, file].into_iter().flatten() {
        if !places.contains(&place) {
            places.push(place);
        }
    }
    places
}

/// Returns the path of a file with symbolic links resolved, and the path of the temporary file next
/// to it.
fn places_of(path: &Path) -> (PathBuf, PathBuf) {
    // A symbolic link stays: its target is replaced.
    let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".affinode-new");
    let fresh = path.with_file_name(name);
    (path, fresh)
}

/// Removes the temporary file that a killed installer left next to this file.
pub fn tidy(path: &Path) -> Result<(), FileError> {
    remove_left(&places_of(path).1)
}

/// Removes a temporary file if it exists. If it does not exist, the call succeeds without a write,
/// even on a read-only file system.
pub fn remove_left(path: &Path) -> Result<(), FileError> {
    if fs::symlink_metadata(path).is_ok() { remove(path) } else { Ok(()) }
}

/// Writes a file completely or not at all. If `mode` is `None`, an existing file keeps its mode,
/// and a new file gets the mode 0644.
pub fn replace(path: &Path, bytes: &[u8], mode: Option<u32>) -> io::Result<()> {
    StagedFile::write(path, bytes, mode)?.put()
}

/// A complete new file next to its target. When this value is dropped, the new file is removed
/// unless it was renamed.
struct StagedFile {
    fresh: PathBuf,
    path: PathBuf,
}

impl StagedFile {
    fn write(path: &Path, bytes: &[u8], mode: Option<u32>) -> io::Result<StagedFile> {
        let (path, fresh) = places_of(path);
        let there = fs::metadata(&path).map(|file| file.permissions().mode() & 0o7777);
        let mode = mode.or(there.ok()).unwrap_or(0o644);
        let staged = StagedFile { fresh, path };
        let mut file = fs::File::options()
            .create(true)
            .write(true)
            .truncate(true)
            .mode(mode)
            .open(&staged.fresh)?;
        file.set_permissions(fs::Permissions::from_mode(mode))?;
        file.write_all(bytes)?;
        file.sync_all()?;
        Ok(staged)
    }

    /// Renames the new file over its target.
    fn put(self) -> io::Result<()> {
        fs::rename(&self.fresh, &self.path)
    }
}

impl Drop for StagedFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.fresh);
    }
}

/// Removes a file if it exists.
pub fn remove(path: &Path) -> Result<(), FileError> {
    match fs::remove_file(path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(FileError::Io { action: "remove", path: path.to_owned(), source })
        }
        _ => Ok(()),
    }
}

/// Returns the missing folders of this path, the outermost first.
pub fn missing_folders(folder: &Path) -> Vec<PathBuf> {
    let there = |folder: &&Path| folder.as_os_str().is_empty() || folder.exists();
    let mut missing: Vec<_> =
        folder.ancestors().take_while(|f| !there(f)).map(Path::to_owned).collect();
    missing.reverse();
    missing
}

/// Removes the folders that the installation created, unless they contain other files.
pub fn remove_folders(made: &[PathBuf]) {
    for folder in made.iter().rev() {
        let _ = fs::remove_dir(folder);
    }
}

/// Returns the SHA-256 of a file as hex digits.
pub fn digest(path: &Path) -> Result<String, FileError> {
    Ok(digest_of(&read(path)?))
}

/// Returns the SHA-256 of these bytes as hex digits.
pub fn digest_of(content: &[u8]) -> String {
    Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn read(path: &Path) -> Result<Vec<u8>, FileError> {
    fs::read(path).map_err(|source| FileError::Io { action: "read", path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The second file cannot be written, because its folder is a file. The first file must keep
    /// its content, so that the installed files are of one version.
    #[test]
    fn all_files_are_replaced_or_none() {
        let folder = tempfile::tempdir().unwrap();
        let shim = folder.path().join("shim");
        fs::write(&shim, "old").unwrap();
        let change = |to: &Path| FileChange {
            content: b"new".as_slice().into(),
            to: to.to_owned(),
            mode: 0o755,
            replaces: true,
        };
        let changes = [change(&shim), change(&shim.join("library"))];
        let error = make(&changes).unwrap_err().to_string();
        assert!(error.contains("shim/library"), "{error}");
        assert_eq!(fs::read_to_string(&shim).unwrap(), "old");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no temporary file is left");
        make(&changes[..1]).unwrap();
        assert!(changes[0].is_made());
        assert_eq!(fs::metadata(&shim).unwrap().permissions().mode() & 0o777, 0o755);
    }
}
