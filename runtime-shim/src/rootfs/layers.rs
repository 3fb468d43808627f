//! Determines the folders (layers) that make a container's rootfs.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use containerd_shim_protos::types::mount::Mount;
use rustix::fs::{Mode, OFlags, StatVfsMountFlags};

use super::resolve::{self, ResolvedPath};

/// The folders that make a rootfs, topmost first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RootfsLayers {
    layers: Vec<PathBuf>,
    writable: bool,
}

/// Reason why a file of the rootfs cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum RootfsError {
    /// The snapshotter's mounts are of an unsupported type.
    #[error(
        "the rootfs is made by mounts of type {0:?}, which the shim cannot read before they are mounted; supported types: overlay, bind"
    )]
    Unsupported(String),
    /// The request has neither mounts nor a `root.path`, so there is no rootfs.
    #[error("the Create request contains no rootfs")]
    None,
    /// The overlay uses a feature that the lookup does not support.
    #[error("the overlay mount of the rootfs uses {0}, which is not supported")]
    Overlay(&'static str),
    /// The path has too many components or symlinks, or a symlink loop.
    #[error("path {0:?} has too many symlinks or components")]
    TooLong(PathBuf),
    /// The file is larger than the maximum size that the caller gave.
    #[error("{path:?} of the image is larger than {max_bytes} bytes")]
    TooLarge {
        /// Path of the file in the image.
        path: PathBuf,
        /// The maximum size in bytes.
        max_bytes: u64,
    },
    /// A system call on a layer failed.
    #[error("cannot open or read {path:?} in the rootfs")]
    Io {
        /// Path of the file in the image.
        path: PathBuf,
        /// Error of the system call.
        source: std::io::Error,
    },
}

impl RootfsLayers {
    /// Determines the layers of the rootfs that a Create request will mount. If the request has no
    /// mounts, the only layer is the spec's `root.path`, relative to the bundle.
    pub fn new(
        mounts: &[Mount],
        root_path: Option<&str>,
        bundle: &Path,
    ) -> Result<RootfsLayers, RootfsError> {
        match mounts {
            [] => {
                let path = bundle.join(root_path.ok_or(RootfsError::None)?);
                let read_only = rustix::fs::statvfs(&path)
                    .map_err(|error| RootfsError::Io { path: path.clone(), source: error.into() })?
                    .f_flag
                    .contains(StatVfsMountFlags::RDONLY);
                Ok(RootfsLayers { layers: vec![path], writable: !read_only })
            }
            [mount] => RootfsLayers::from_mount(mount),
            more => {
                let kinds: Vec<&str> = more.iter().map(|mount| mount.type_.as_str()).collect();
                Err(RootfsError::Unsupported(kinds.join("+")))
            }
        }
    }

    fn from_mount(mount: &Mount) -> Result<RootfsLayers, RootfsError> {
        let has = |name: &str| mount.options.iter().any(|option| option == name);
        if mount.type_ == "overlay" {
            let rootfs = RootfsLayers::from_overlay(&mount.options)?;
            return Ok(RootfsLayers { writable: rootfs.writable && !has("ro"), ..rootfs });
        }
        if mount.type_ == "bind" || has("bind") || has("rbind") {
            return Ok(RootfsLayers {
                layers: vec![PathBuf::from(&mount.source)],
                writable: !has("ro"),
            });
        }
        Err(RootfsError::Unsupported(mount.type_.clone()))
    }

    fn from_overlay(options: &[String]) -> Result<RootfsLayers, RootfsError> {
        let mut upper = None;
        let mut lower = Vec::new();
        for option in options {
            if option.contains("{{") {
                return Err(RootfsError::Overlay("mount templates"));
            }
            if let Some(path) = option.strip_prefix("upperdir=") {
                upper = Some(PathBuf::from(path));
            } else if let Some(list) = option.strip_prefix("lowerdir=") {
                lower.extend(split_lower(list)?);
            } else if let Some(path) = option.strip_prefix("lowerdir+=") {
                lower.push(PathBuf::from(path));
            } else if option.starts_with("datadir+=") {
                return Err(RootfsError::Overlay("data-only layers"));
            }
        }
        if lower.iter().chain(&upper).any(|path| !path.is_absolute()) {
            return Err(RootfsError::Overlay("relative layers"));
        }
        let writable = upper.is_some();
        let layers: Vec<PathBuf> = upper.into_iter().chain(lower).collect();
        if layers.is_empty() {
            return Err(RootfsError::None);
        }
        Ok(RootfsLayers { layers, writable })
    }

    /// Whether missing mount points can be created in the rootfs.
    #[must_use]
    pub fn writable(&self) -> bool {
        self.writable
    }

    /// Returns the entry that the container will find at this absolute path. The content of a
    /// regular file is read, up to `max_bytes`.
    pub fn find(&self, path: &str, max_bytes: u64) -> Result<ResolvedPath, RootfsError> {
        let open = |layer: &PathBuf| -> Result<OwnedFd, RootfsError> {
            rustix::fs::open(
                layer,
                OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
                Mode::empty(),
            )
            .map_err(|error| RootfsError::Io { path: layer.clone(), source: error.into() })
        };
        let layers = self.layers.iter().map(open).collect::<Result<_, _>>()?;
        resolve::find(layers, Path::new(path), max_bytes)
    }
}

/// Splits the overlay's list of lower folders at colons. A backslash escapes the next character.
fn split_lower(list: &str) -> Result<Vec<PathBuf>, RootfsError> {
    let mut layers = vec![String::new()];
    let mut chars = list.chars();
    while let Some(char) = chars.next() {
        let last = layers.len() - 1;
        match char {
            '\\' => layers[last].extend(chars.next()),
            ':' if layers[last].is_empty() => {
                return Err(RootfsError::Overlay("data-only layers"));
            }
            ':' => layers.push(String::new()),
            other => layers[last].push(other),
        }
    }
    Ok(layers.into_iter().map(PathBuf::from).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(kind: &str, source: &str, options: &[&str]) -> Mount {
        Mount {
            type_: kind.to_owned(),
            source: source.to_owned(),
            options: options.iter().map(ToString::to_string).collect(),
            ..Mount::default()
        }
    }

    fn rootfs(mounts: &[Mount]) -> Result<RootfsLayers, RootfsError> {
        RootfsLayers::new(mounts, None, Path::new("/bundle"))
    }

    #[test]
    fn mounts_of_the_usual_snapshotters() {
        for (mount, layers, writable) in [
            (
                mount(
                    "overlay",
                    "overlay",
                    &["index=off", "workdir=/w", "upperdir=/u", "lowerdir=/2:/1"],
                ),
                vec!["/u", "/2", "/1"],
                true,
            ),
            (
                mount("overlay", "overlay", &["index=off", "lowerdir=/a\\:b:/1"]),
                vec!["/a:b", "/1"],
                false,
            ),
            (
                mount("overlay", "overlay", &["upperdir=/u", "lowerdir+=/2", "lowerdir+=/1", "ro"]),
                vec!["/u", "/2", "/1"],
                false,
            ),
            (mount("bind", "/x", &["rbind", "rw"]), vec!["/x"], true),
            (mount("bind", "/x", &["rbind", "ro"]), vec!["/x"], false),
            (mount("", "/x", &["rbind"]), vec!["/x"], true),
        ] {
            let layers = layers.into_iter().map(PathBuf::from).collect();
            assert_eq!(rootfs(&[mount]).unwrap(), RootfsLayers { layers, writable });
        }
    }

    #[test]
    fn the_rest_is_refused_by_name() {
        for (mounts, wanted) in [
            (vec![mount("ext4", "/dev/mapper/x", &[])], "type \"ext4\""),
            (vec![mount("erofs", "a", &[]), mount("overlay", "b", &[])], "type \"erofs+overlay\""),
            (vec![mount("overlay", "o", &["lowerdir={{ mount 0 }}"])], "mount templates"),
            (vec![mount("overlay", "o", &["lowerdir=/1::/data"])], "data-only"),
            (vec![mount("overlay", "o", &["lowerdir=1:2"])], "relative"),
            (vec![mount("overlay", "o", &[])], "no rootfs"),
            (vec![], "no rootfs"),
        ] {
            let error = rootfs(&mounts).unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
        }
    }

    #[test]
    fn without_mounts_the_specs_root_counts() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("rootfs")).unwrap();
        let got = RootfsLayers::new(&[], Some("rootfs"), dir.path()).unwrap();
        assert_eq!(got.layers, [dir.path().join("rootfs")]);
        assert!(got.writable());
        let gone = RootfsLayers::new(&[], Some("/nowhere/at/all"), dir.path());
        assert!(matches!(gone, Err(RootfsError::Io { .. })));
    }
}
