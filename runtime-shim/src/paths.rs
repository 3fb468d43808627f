//! Paths of an Affinode installation on the host.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

use affinode_proto::api::Message;
use affinode_proto::api::control::Announcement;
use affinode_proto::installation::InstallationPaths;
use affinode_proto::paths as names;
use affinode_proto::wire::StartSettings;
use sha2::{Digest, Sha256};

use crate::address::hex;

/// The folders and files of an Affinode installation.
#[derive(Clone, Debug)]
pub struct ShimPaths {
    /// Folder with the sockets, the locks and the folders of containers.
    pub run_dir: PathBuf,
    /// Folder with the preload library.
    pub lib_dir: PathBuf,
    /// Path of the node's config.toml.
    pub config: PathBuf,
}

/// Affinode's folder of one container, below the run directory.
#[derive(Clone, Debug)]
pub struct ContainerDir(PathBuf);

impl ShimPaths {
    /// Returns the paths of the installation to which this program belongs.
    #[must_use]
    pub fn own() -> ShimPaths {
        let InstallationPaths { run_dir, lib_dir, config } = InstallationPaths::own();
        ShimPaths { run_dir, lib_dir, config }
    }

    /// Path of the preload library on the host.
    #[must_use]
    pub fn library(&self) -> PathBuf {
        self.lib_dir.join(names::LIB_FILE)
    }

    /// Path of the controller's socket.
    #[must_use]
    pub fn control_socket(&self) -> PathBuf {
        self.run_dir.join(names::CONTROL_SOCKET)
    }

    /// The folder of the container with this key.
    #[must_use]
    pub fn container(&self, key: &str) -> ContainerDir {
        ContainerDir(self.run_dir.join(names::CONTAINERS_DIR).join(key))
    }

    /// Whether the folder of any container contains an announcement.
    #[must_use]
    pub fn keeps_any(&self) -> bool {
        let folders = fs::read_dir(self.run_dir.join(names::CONTAINERS_DIR));
        folders.into_iter().flatten().flatten().any(|folder| ContainerDir(folder.path()).is_kept())
    }

    /// Creates the run directory. All users can traverse it, because a container's processes may
    /// run as any user.
    pub fn make_run_dir(&self) -> io::Result<()> {
        make_dir(&self.run_dir)
    }
}

impl ContainerDir {
    /// Creates the container's folder and the subfolder that is mounted into the container, and
    /// writes the merged `/etc/ld.so.preload`. Removes the files of an earlier container with the
    /// same id.
    pub fn make(&self, generation: u64, preload: &[u8]) -> io::Result<()> {
        let containers = self.0.parent().unwrap_or(Path::new("/"));
        if let Some(run_dir) = containers.parent() {
            make_dir(run_dir)?;
        }
        make_dir(containers)?;
        // The folder is searchable but not readable. A process that could open it could hold its
        // lock, and then no further container could be created.
        fs::set_permissions(containers, Permissions::from_mode(0o711))?;
        let _lock = self.lock()?;
        self.clear()?;
        // A failure, such as a full disk, leaves no partial folder.
        self.fill(generation, preload).inspect_err(|_| drop(self.clear()))
    }

    fn fill(&self, generation: u64, preload: &[u8]) -> io::Result<()> {
        make_dir(&self.0)?;
        // Containers reach their folder through mounts only. On the host only root may reach the
        // sockets.
        fs::set_permissions(&self.0, Permissions::from_mode(0o700))?;
        make_dir(&self.mount())?;
        fs::write(self.0.join(names::GENERATION_FILE), generation.to_string())?;
        let (path, fresh) = (self.preload(), self.0.join(".ld.so.preload.new"));
        fs::write(&fresh, preload)?;
        fs::set_permissions(&fresh, Permissions::from_mode(0o644))?;
        fs::rename(&fresh, &path)
    }

    /// Writes the engine, and the VRAM limit if there is one, into the folder, for the container's
    /// processes. The folder was emptied before.
    pub fn write_settings(&self, settings: StartSettings) -> io::Result<()> {
        let write = |name: &str, text: &str| {
            let path = self.mount().join(name);
            fs::write(&path, text)?;
            fs::set_permissions(&path, Permissions::from_mode(0o644))
        };
        if settings.vram_limit_bytes > 0 {
            write(names::VRAM_LIMIT_FILE, &settings.vram_limit_bytes.to_string())?;
        }
        write(names::ENGINE_FILE, settings.engine.as_str())
    }

    /// Stores the announcement of the container that owns the folder. A controller that starts
    /// later reads it. Returns false if a later container with the same id owns the folder.
    pub fn keep(&self, announcement: &Announcement) -> io::Result<bool> {
        let _lock = self.lock()?;
        if self.generation() != Some(announcement.generation) {
            return Ok(false);
        }
        let bytes = announcement.write_to_bytes().map_err(io::Error::other)?;
        let (path, fresh) = (self.announcement_file(), self.0.join(".announcement.new"));
        fs::write(&fresh, bytes)?;
        fs::rename(&fresh, &path)?;
        Ok(true)
    }

    /// The announcement that was stored by `keep`.
    pub fn kept(&self) -> io::Result<Announcement> {
        let bytes = fs::read(self.announcement_file())?;
        Announcement::parse_from_bytes(&bytes).map_err(io::Error::other)
    }

    /// Whether an announcement is stored in the folder.
    #[must_use]
    pub fn is_kept(&self) -> bool {
        self.announcement_file().exists()
    }

    fn announcement_file(&self) -> PathBuf {
        self.0.join(names::ANNOUNCEMENT_FILE)
    }

    /// Path of the subfolder that is mounted into the container.
    #[must_use]
    pub fn mount(&self) -> PathBuf {
        self.0.join(names::MOUNT_DIR)
    }

    /// Path of the file that is mounted over the container's `/etc/ld.so.preload`.
    #[must_use]
    pub fn preload(&self) -> PathBuf {
        self.0.join(names::PRELOAD_FILE)
    }

    /// Whether the folder exists, which means that the shim has edited the container.
    #[must_use]
    pub fn exists(&self) -> bool {
        self.0.is_dir()
    }

    /// Returns the generation (a unique number) of the container that owns the folder. Returns
    /// `None` if there is no folder.
    #[must_use]
    pub fn generation(&self) -> Option<u64> {
        fs::read_to_string(self.0.join(names::GENERATION_FILE)).ok()?.parse().ok()
    }

    /// Removes the folder if it belongs to the container with this generation. A later container
    /// with the same id may own the folder already. A missing folder is not an error.
    pub fn remove(&self, generation: Option<u64>) -> io::Result<()> {
        if !self.exists() {
            return Ok(());
        }
        let _lock = self.lock()?;
        if self.generation() == generation { self.clear() } else { Ok(()) }
    }

    /// Locks the folder that contains all containers' folders. Creating or removing a container's
    /// folder takes several system calls, and another process must not see a folder that is only
    /// partly created or removed.
    fn lock(&self) -> io::Result<File> {
        let containers = File::open(self.0.parent().unwrap_or(Path::new("/")))?;
        containers.lock()?;
        Ok(containers)
    }

    fn clear(&self) -> io::Result<()> {
        match fs::remove_dir_all(&self.0) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }
}

/// Returns a container's key. It is unique on the node, and valid as a file name.
#[must_use]
pub fn container_key(namespace: &str, id: &str) -> String {
    let mut key = hex(&Sha256::digest(format!("{namespace}/{id}")));
    key.truncate(32);
    key
}

fn make_dir(path: &Path) -> io::Result<()> {
    match fs::DirBuilder::new().mode(0o755).create(path) {
        // The mode must not depend on the umask of containerd.
        Ok(()) => fs::set_permissions(path, Permissions::from_mode(0o755)),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            fs::create_dir_all(path)?;
            fs::set_permissions(path, Permissions::from_mode(0o755))
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_hashes_of_namespace_and_id() {
        // printf 'k8s.io/abc' | sha256sum | cut -c1-32 prints the same key.
        assert_eq!(container_key("k8s.io", "abc"), hex(&Sha256::digest(b"k8s.io/abc"))[..32]);
        assert_ne!(container_key("a", "b/c"), container_key("b", "c"));
        assert_eq!(container_key("a", "../../x").len(), 32);
    }

    #[test]
    fn container_reads_its_mount_others_only_as_root() {
        let dir = tempfile::tempdir().unwrap();
        let paths = ShimPaths {
            run_dir: dir.path().join("a/run"),
            lib_dir: PathBuf::new(),
            config: PathBuf::new(),
        };
        let container = paths.container("00");
        container.make(1, b"line\n").unwrap();
        fs::write(container.mount().join("agent.sock"), "of the first").unwrap();
        container.make(2, b"again\n").unwrap();
        assert_eq!(fs::read_dir(container.mount()).unwrap().count(), 0, "begun anew");
        assert_eq!(fs::read(container.preload()).unwrap(), b"again\n");
        let (run, inside, folder) = (&paths.run_dir, &container.mount(), &container.0);
        let all = &paths.run_dir.join(names::CONTAINERS_DIR);
        for (path, expected) in [(run, 0o755), (all, 0o711), (inside, 0o755), (folder, 0o700)] {
            let mode = fs::metadata(path).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, expected, "{}", path.display());
        }
        // The first container's end is reported late.
        container.remove(Some(1)).unwrap();
        assert!(container.exists());
        container.remove(Some(2)).unwrap();
        container.remove(Some(2)).unwrap();
        assert!(!container.exists());
    }
}
