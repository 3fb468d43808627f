//! Finds the paths of an installation: run directory, preload library and configuration.
//!
//! ```text
//! environment variable ──> else beside the program ──> else the default
//! PREFIX/bin/PROGRAM: the library is in PREFIX/lib/affinode,
//!                     the other paths are in PREFIX/share/affinode/paths.conf
//! ```
//!
//! containerd starts a shim with its own environment, which has no variables of Affinode unless an
//! operator adds them. The shim therefore uses the path of its own program to find an installation
//! outside the default folders.

use std::{
    ffi::OsString,
    fs, io,
    path::{Path, PathBuf},
};

use crate::paths;

/// Path of `paths.conf`, relative to the prefix.
const FILE: &str = "share/affinode/paths.conf";
/// Folder of the preload library, relative to the prefix.
const LIBRARY: &str = "lib/affinode";
/// First line of `paths.conf`.
const HEADER: &str = "# Written by affinode install: folders of this installation.\n";

/// Paths of the installation to which a program belongs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstallationPaths {
    /// Run directory: the folder of the sockets, locks and containers' folders.
    pub run_dir: PathBuf,
    /// Folder of the preload library on the host.
    pub lib_dir: PathBuf,
    /// Path of the configuration file, config.toml.
    pub config: PathBuf,
}

impl InstallationPaths {
    /// Returns the paths of the installation to which the running program belongs.
    #[must_use]
    pub fn own() -> InstallationPaths {
        let program = std::env::current_exe().ok();
        Self::of(program.as_deref(), |name| std::env::var_os(name))
    }

    /// Returns the paths of the installation to which `program` belongs. If an upgrade replaced the
    /// program's file since the start, the kernel appends ` (deleted)` to the file's name. The
    /// folder in the path is still correct.
    fn of(
        program: Option<&Path>,
        variable: impl Fn(&str) -> Option<OsString>,
    ) -> InstallationPaths {
        let prefix = program.and_then(|program| program.parent()?.parent());
        let file = prefix.and_then(|prefix| PathsFile::read(prefix).ok()).unwrap_or_default();
        let library = prefix.map(|prefix| prefix.join(LIBRARY));
        let library = library.filter(|folder| folder.join(paths::LIB_FILE).is_file());
        let choose = |name: &str, beside: Option<PathBuf>, default: &str| {
            let named = variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
            named.or(beside).unwrap_or_else(|| PathBuf::from(default))
        };
        InstallationPaths {
            run_dir: choose(paths::RUN_DIR_ENV, file.run_dir, paths::RUN_DIR),
            lib_dir: choose(paths::LIB_DIR_ENV, library, paths::LIB_DIR),
            config: choose(paths::CONFIG_ENV, file.config, paths::CONFIG_FILE),
        }
    }
}

/// Folders of an installation, as stored in `paths.conf` for the installed programs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PathsFile {
    /// Path of the run directory. `None` means the default.
    pub run_dir: Option<PathBuf>,
    /// Path of the configuration file. `None` means the default.
    pub config: Option<PathBuf>,
}

impl PathsFile {
    /// Returns the path of `paths.conf` in the installation with this prefix.
    #[must_use]
    pub fn path(prefix: &Path) -> PathBuf {
        prefix.join(FILE)
    }

    /// Reads `paths.conf` of the installation with this prefix. If the file does not exist, all
    /// folders are the defaults. Unknown lines and relative paths are ignored.
    ///
    /// # Errors
    /// The file exists and cannot be read.
    pub fn read(prefix: &Path) -> io::Result<PathsFile> {
        let text = match fs::read_to_string(Self::path(prefix)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            text => text?,
        };
        let value = |name: &str| {
            let values = text.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix('='));
            values.map(PathBuf::from).rfind(|path| path.is_absolute())
        };
        Ok(PathsFile { run_dir: value(paths::RUN_DIR_ENV), config: value(paths::CONFIG_ENV) })
    }

    /// Returns whether all folders are the defaults.
    #[must_use]
    pub fn is_default(&self) -> bool {
        let is = |path: &Option<PathBuf>, default: &str| {
            path.as_deref().is_none_or(|path| path == Path::new(default))
        };
        is(&self.run_dir, paths::RUN_DIR) && is(&self.config, paths::CONFIG_FILE)
    }

    /// Returns the text for `paths.conf`. Returns `None` if a path is relative, is not Unicode, or
    /// has a line break.
    #[must_use]
    pub fn text(&self) -> Option<String> {
        let mut text = HEADER.to_owned();
        let lines = [(paths::RUN_DIR_ENV, &self.run_dir), (paths::CONFIG_ENV, &self.config)];
        for (name, path) in lines {
            let Some(path) = path else { continue };
            let fits = |path: &&str| path.starts_with('/') && !path.contains(['\n', '\r']);
            let path = path.to_str().filter(fits)?;
            text.push_str(&format!("{name}={path}\n"));
        }
        Some(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lab() -> PathsFile {
        let config = Some("/etc/lab/config.toml".into());
        PathsFile { run_dir: Some("/run/lab".into()), config }
    }

    fn write(prefix: &Path, text: &str) {
        let file = PathsFile::path(prefix);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, text).unwrap();
    }

    #[test]
    fn program_finds_its_installation() {
        let prefix = tempfile::tempdir().unwrap();
        let program = prefix.path().join("bin/containerd-shim-affinode-v1 (deleted)");
        let of = || InstallationPaths::of(Some(&program), |_| None);
        assert_eq!(
            of(),
            InstallationPaths::of(None, |_| None),
            "there is no library or file beside the program"
        );
        let library = prefix.path().join(LIBRARY);
        fs::create_dir_all(&library).unwrap();
        fs::write(library.join(paths::LIB_FILE), "").unwrap();
        write(prefix.path(), &lab().text().unwrap());
        let PathsFile { run_dir, config } = lab();
        let expected = InstallationPaths {
            run_dir: run_dir.unwrap(),
            lib_dir: library,
            config: config.unwrap(),
        };
        assert_eq!(of(), expected);
    }

    #[test]
    fn environment_prevails() {
        let prefix = tempfile::tempdir().unwrap();
        write(prefix.path(), &lab().text().unwrap());
        let program = prefix.path().join("bin/affinode");
        let of = |value: &'static str| {
            let run_dir = |name: &str| (name == paths::RUN_DIR_ENV).then(|| value.into());
            InstallationPaths::of(Some(&program), run_dir)
        };
        assert_eq!(of("/run/mine").run_dir, Path::new("/run/mine"));
        assert_eq!(of("/run/mine").config, Path::new("/etc/lab/config.toml"));
        assert_eq!(of("").run_dir, Path::new("/run/lab"), "an empty variable counts as not set");
    }

    #[test]
    fn text_is_read_as_it_was_written() {
        let prefix = tempfile::tempdir().unwrap();
        assert_eq!(PathsFile::read(prefix.path()).unwrap(), PathsFile::default());
        for file in [PathsFile::default(), lab(), PathsFile { config: None, ..lab() }] {
            write(prefix.path(), &file.text().unwrap());
            assert_eq!(PathsFile::read(prefix.path()).unwrap(), file);
        }
        write(prefix.path(), "AFFINODE_RUN_DIR=run\nAFFINODE_OTHER=/x\n");
        assert_eq!(PathsFile::read(prefix.path()).unwrap(), PathsFile::default());
    }

    #[test]
    fn path_that_is_no_line_is_refused() {
        for path in ["run", "/run/a\nAFFINODE_CONFIG=/x", "/run/a\r"] {
            let file = PathsFile { run_dir: Some(path.into()), config: None };
            assert_eq!(file.text(), None, "{path:?}");
        }
    }

    #[test]
    fn default_folders_are_recognized() {
        assert!(PathsFile::default().is_default() && !lab().is_default());
        let file = PathsFile { run_dir: Some(paths::RUN_DIR.into()), config: None };
        assert!(file.is_default());
    }
}
