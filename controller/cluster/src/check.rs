//! The check that `helm test` runs: this program runs in a GPU pod of the runtime class and checks
//! whether its own container is managed. It makes no CUDA call.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use affinode_proto::paths;
use clap::Args;

/// Options of the check.
#[derive(Args, Clone, Debug)]
pub struct CheckOptions {
    /// Root directory of the container to check.
    #[arg(long, value_name = "DIR", default_value = "/")]
    root: PathBuf,
}

/// Reason why the check failed.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// The shim did not add Affinode's files to the container.
    #[error(
        "this container is not managed by Affinode, because {0} is missing; check that the pod requests a GPU (chart value test.resources), and that the node's GPU plugin assigns one; containerd's log has the shim's reason"
    )]
    Unmanaged(PathBuf),
    /// The dynamic loader did not load Affinode's library into this process.
    #[error(
        "Affinode's library is mounted, but not loaded into this process; run `affinode doctor` on the node to check the library"
    )]
    NotLoaded,
    /// The memory map of this process cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// Path of the memory map that cannot be read.
        path: PathBuf,
        /// I/O error of the failed read.
        #[source]
        source: io::Error,
    },
}

/// Checks whether the container in which this process runs is managed by Affinode.
///
/// # Errors
/// [`CheckError`]: the container is not managed, or its state cannot be read.
pub fn run(options: &CheckOptions) -> Result<(), CheckError> {
    let inside = |path: &str| options.root.join(path.trim_start_matches('/'));
    for mounted in [paths::CONTAINER_LIB, paths::CONTAINER_RUN_DIR] {
        let path = inside(mounted);
        if fs::symlink_metadata(&path).is_err() {
            return Err(CheckError::Unmanaged(path));
        }
    }
    tracing::info!(
        "the container is managed by Affinode: its library and its run folder are mounted"
    );
    let maps = inside("/proc/self/maps");
    let read = |source| CheckError::Read { path: maps.clone(), source };
    let text = fs::read_to_string(&maps).map_err(read)?;
    let library = Path::new(paths::CONTAINER_LIB).file_name().and_then(|name| name.to_str());
    if !library.is_some_and(|library| text.contains(library)) {
        return Err(CheckError::NotLoaded);
    }
    tracing::info!("Affinode's library is loaded into this process");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a temporary folder with these files, each given by path and text. The folder serves
    /// as the root of a container that a test checks.
    fn container(files: &[(&str, &str)]) -> (tempfile::TempDir, CheckOptions) {
        let folder = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let options = CheckOptions { root: folder.path().to_owned() };
        (folder, options)
    }

    const LIBRARY: (&str, &str) = (".affinode/lib/libaffinode_preload.so", "");
    const SOCKET: (&str, &str) = (".affinode/run/agent.sock", "");

    #[test]
    fn a_managed_container_passes() {
        let maps =
            ("proc/self/maps", "7f00-7f01 r-xp 0 0:1 7 /.affinode/lib/libaffinode_preload.so\n");
        let (_folder, options) = container(&[LIBRARY, SOCKET, maps]);
        run(&options).unwrap();
    }

    #[test]
    fn each_missing_part_is_named() {
        let plain = ("proc/self/maps", "7f00-7f01 r-xp 0 0:1 7 /usr/lib/libc.so.6\n");
        for (files, said) in [
            (vec![plain], "libaffinode_preload.so is missing"),
            (vec![plain, LIBRARY], ".affinode/run is missing"),
            (vec![plain, LIBRARY, SOCKET], "not loaded"),
            (vec![LIBRARY, SOCKET], "cannot read"),
        ] {
            let (_folder, options) = container(&files);
            let error = run(&options).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
    }
}
