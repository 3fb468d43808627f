//! Paths of the built programs, libraries and downloads. All are in one folder, which `cargo xtask
//! build` creates. A kit for GPU machines contains a copy of this folder.
//!
//! ```text
//! target/affinode/
//!   bin/       containerd-shim-affinode-v1, affinode, affinode-sim-gpud, affinode-keeper, …
//!   lib/       libaffinode_preload.so
//!   sim/       libcuda.so.1, libnvidia-ml.so.1 (simulated)
//!   clients/   small CUDA programs
//!   cache/     containerd releases, an old glibc
//! ```

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

/// Environment variable with the path of the folder of built files. If it is not set, the default
/// folder is used.
pub const ARTIFACTS_ENV: &str = "AFFINODE_ARTIFACTS";

/// The folder that contains all built programs and libraries, and the downloads.
#[derive(Clone, Debug)]
pub struct Artifacts {
    root: PathBuf,
}

impl Artifacts {
    /// Finds the folder of built files. Its path is in [`ARTIFACTS_ENV`], or else it is
    /// `target/affinode` of the workspace.
    ///
    /// # Errors
    /// When the folder does not exist.
    pub fn find() -> Result<Self> {
        let root = match std::env::var_os(ARTIFACTS_ENV) {
            Some(root) => PathBuf::from(root),
            None => target_dir().join("affinode"),
        };
        if !root.is_dir() {
            bail!("{} does not exist: run `cargo xtask build` first", root.display());
        }
        Ok(Self { root })
    }

    /// Creates the value for the folder `root` without checking it. The folder contains the built
    /// files, or is empty until they are built.
    #[must_use]
    pub fn at(root: PathBuf) -> Self {
        Self { root }
    }

    /// Path of the folder with all built files.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Folder of the built programs.
    #[must_use]
    pub fn bin_dir(&self) -> PathBuf {
        self.root.join("bin")
    }

    /// Folder of the preload library. It is the value for the variable `AFFINODE_LIB_DIR`.
    #[must_use]
    pub fn lib_dir(&self) -> PathBuf {
        self.root.join("lib")
    }

    /// Folder of the simulated driver libraries. Their file names are those of the real libraries.
    #[must_use]
    pub fn sim_dir(&self) -> PathBuf {
        self.root.join("sim")
    }

    /// Folder of the CUDA client programs.
    #[must_use]
    pub fn clients_dir(&self) -> PathBuf {
        self.root.join("clients")
    }

    /// Folder of downloads that are kept between builds.
    #[must_use]
    pub fn cache_dir(&self) -> PathBuf {
        self.root.join("cache")
    }

    /// Folder of a runc that supports id-mapped mounts (mounts with their own user mapping). The
    /// folder exists only if `cargo xtask deps` has built this runc.
    #[must_use]
    pub fn own_users_runc_dir(&self) -> PathBuf {
        self.cache_dir().join("runc")
    }

    /// The folder of CRI-O's programs. It exists only if `cargo xtask deps` has built them.
    #[must_use]
    pub fn crio_dir(&self) -> PathBuf {
        self.cache_dir().join("crio")
    }

    /// Folder of Docker's unpacked packages. The folder exists only if `cargo xtask deps` found the
    /// packages.
    #[must_use]
    pub fn docker_dir(&self) -> PathBuf {
        self.cache_dir().join("docker")
    }

    /// Returns the path of a program in the folder of built programs.
    ///
    /// # Errors
    /// When the program does not exist.
    pub fn bin(&self, name: &str) -> Result<PathBuf> {
        let path = self.bin_dir().join(name);
        if !path.is_file() {
            bail!("{} is missing: run `cargo xtask build`", path.display());
        }
        Ok(path)
    }
}

/// Cargo's target folder of this workspace.
#[must_use]
pub fn target_dir() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => workspace_dir().join(dir),
        None => workspace_dir().join("target"),
    }
}

/// The workspace's root folder.
#[must_use]
pub fn workspace_dir() -> PathBuf {
    let crate_dir = Path::new(env!("CARGO_MANIFEST_DIR"));
    crate_dir.ancestors().nth(2).unwrap_or(crate_dir).to_path_buf()
}
