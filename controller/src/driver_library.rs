//! Finds the libraries of the NVIDIA driver. Some Kubernetes operators and node images install them
//! in folders that the dynamic loader does not search.
//!
//! The search is repeated each time that a library is opened, because an operator can install the
//! driver after the controller has started. The operator also replaces the driver when the
//! operator's pod restarts.

use std::path::{Path, PathBuf};

use crate::config::Config;

/// File name of NVML's library. A folder that contains this file is a library folder of the driver,
/// because every installation of the driver has NVML.
const MARKER: &str = "libnvidia-ml.so.1";
/// Library folders that are searched below the driver's root. The first is that of Debian and
/// Ubuntu, and the second that of Red Hat. The others belong to further distributions.
const LIB_DIRS: [&str; 4] = ["usr/lib/x86_64-linux-gnu", "usr/lib64", "lib64", "usr/lib"];
/// Library folders that the dynamic loader searches on the usual distributions.
const LOADER_DIRS: [&str; 6] = [
    "usr/lib/x86_64-linux-gnu",
    "lib/x86_64-linux-gnu",
    "usr/lib64",
    "lib64",
    "usr/lib",
    "usr/local/lib",
];
/// Root folder of the driver container of NVIDIA's GPU Operator.
const OPERATOR_ROOT: &str = "run/nvidia/driver";
/// Library folders of node images: Container-Optimized OS of GKE, and images that imitate it.
const IMAGE_DIRS: [&str; 2] = ["/home/kubernetes/bin/nvidia/lib64", "/usr/local/nvidia/lib64"];

/// A library of the NVIDIA driver, identified by its name or path in the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverLibrary {
    name: String,
    driver_root: PathBuf,
    host_root: PathBuf,
}

impl DriverLibrary {
    /// Creates the value for a library. `name` is a file name or a path. `driver_root` is the
    /// folder in which the driver is installed, or empty if it is not configured.
    #[must_use]
    pub fn new(name: &str, driver_root: &Path) -> DriverLibrary {
        DriverLibrary {
            name: name.to_owned(),
            driver_root: driver_root.to_owned(),
            host_root: "/".into(),
        }
    }

    /// Returns the library of NVML, by its name or path in the configuration.
    #[must_use]
    pub fn nvml(config: &Config) -> DriverLibrary {
        DriverLibrary::new(&config.nvml.library, &config.driver.root)
    }

    /// Returns the library of the CUDA driver API, by its name or path in the configuration.
    #[must_use]
    pub fn cuda(config: &Config) -> DriverLibrary {
        DriverLibrary::new(&config.copier.library, &config.driver.root)
    }

    /// Returns the path with which the library is opened. It is a plain file name if the dynamic
    /// loader must search for the library.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.folder().map_or_else(|| PathBuf::from(&self.name), |folder| folder.join(&self.name))
    }

    /// Returns the folder of the driver's libraries. It contains this library, and the libraries
    /// that this library opens by name. Returns `None` if the dynamic loader finds the library by
    /// itself, or if the configured name is a path.
    #[must_use]
    pub fn folder(&self) -> Option<PathBuf> {
        if self.name.contains('/') {
            return None;
        }
        let below = |root: &Path, folders: &[&str]| {
            let folders = folders.iter().map(|folder| root.join(folder.trim_start_matches('/')));
            folders.into_iter().find(|folder| folder.join(MARKER).exists())
        };
        if !self.driver_root.as_os_str().is_empty() {
            // If no driver is in the configured root yet, this path is opened and the error names
            // it. A driver elsewhere is not used.
            let first = || self.driver_root.join(LIB_DIRS[0]);
            return Some(below(&self.driver_root, &LIB_DIRS).unwrap_or_else(first));
        }
        if below(&self.host_root, &LOADER_DIRS).is_some() || loader_path_has_driver() {
            return None;
        }
        below(&self.host_root.join(OPERATOR_ROOT), &LIB_DIRS)
            .or_else(|| below(&self.host_root, &IMAGE_DIRS))
    }
}

/// Returns whether a folder of `LD_LIBRARY_PATH` contains the driver's libraries.
fn loader_path_has_driver() -> bool {
    let folders = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    std::env::split_paths(&folders).any(|folder| folder.join(MARKER).exists())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn library(name: &str, host: &Path, driver_root: &Path) -> DriverLibrary {
        let library = DriverLibrary::new(name, driver_root);
        DriverLibrary { host_root: host.to_owned(), ..library }
    }

    fn install(folder: &Path) {
        fs::create_dir_all(folder).unwrap();
        fs::write(folder.join(MARKER), "").unwrap();
    }

    #[test]
    fn host_without_a_driver_leaves_it_to_the_loader() {
        let host = tempfile::tempdir().unwrap();
        let cuda = library("libcuda.so.1", host.path(), Path::new(""));
        assert_eq!((cuda.path(), cuda.folder()), (PathBuf::from("libcuda.so.1"), None));
    }

    #[test]
    fn operator_folder_is_found_once_it_appears() {
        let host = tempfile::tempdir().unwrap();
        let cuda = library("libcuda.so.1", host.path(), Path::new(""));
        let image = host.path().join(IMAGE_DIRS[0].trim_start_matches('/'));
        install(&image);
        assert_eq!(cuda.path(), image.join("libcuda.so.1"));
        let operator = host.path().join(OPERATOR_ROOT).join(LIB_DIRS[1]);
        install(&operator);
        assert_eq!(cuda.folder(), Some(operator), "before the folders of images");
        install(&host.path().join(LOADER_DIRS[0]));
        assert_eq!(cuda.folder(), None, "a driver of the host comes first");
    }

    #[test]
    fn configured_root_hides_every_other_driver() {
        let host = tempfile::tempdir().unwrap();
        install(&host.path().join(LOADER_DIRS[0]));
        let root = host.path().join("opt/driver");
        let nvml = library(MARKER, host.path(), &root);
        assert_eq!(nvml.path(), root.join(LIB_DIRS[0]).join(MARKER), "not installed yet");
        install(&root.join(LIB_DIRS[2]));
        assert_eq!(nvml.path(), root.join(LIB_DIRS[2]).join(MARKER));
    }

    #[test]
    fn configured_path_is_opened_as_it_is() {
        let host = tempfile::tempdir().unwrap();
        install(&host.path().join(IMAGE_DIRS[1].trim_start_matches('/')));
        let nvml = library("/opt/nvml.so", host.path(), Path::new(""));
        assert_eq!((nvml.path(), nvml.folder()), (PathBuf::from("/opt/nvml.so"), None));
    }
}
