//! Finds the stock shim, and runs it with containerd's own arguments.

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// Name of the stock shim's binary.
pub const NAME: &str = "containerd-shim-runc-v2";
/// Environment variable with the path of the stock shim, if it cannot be found by its name.
pub const PATH_ENV: &str = "AFFINODE_STOCK_SHIM";

/// The stock shim, as the path of its binary.
#[derive(Clone, Debug)]
pub struct RuncShim(PathBuf);

/// Reason why the stock shim could not be found or run.
#[derive(Debug, thiserror::Error)]
pub enum RuncShimError {
    /// The binary is in none of the searched folders.
    #[error(
        "{NAME} is not installed in PATH, next to containerd or next to this binary; install containerd's package, or name the file in {PATH_ENV}"
    )]
    Missing,
    /// The value of the environment variable is not an executable file.
    #[error("{PATH_ENV} is {0:?}, which is not an executable file")]
    NotAFile(PathBuf),
    /// The file is this binary under the stock shim's name.
    #[error(
        "{0:?} should be containerd's own shim, but is this shim itself; install containerd's own \
         shim, or name its file in {PATH_ENV}"
    )]
    Ourselves(PathBuf),
    /// The stock shim's process could not be started.
    #[error("cannot run {path:?}")]
    Run {
        /// Path of the binary.
        path: PathBuf,
        /// Error of the system call.
        source: io::Error,
    },
    /// The process exited with an error.
    #[error("{path:?} failed ({status}): {output}")]
    Failed {
        /// Path of the binary.
        path: PathBuf,
        /// Exit status of the process.
        status: std::process::ExitStatus,
        /// Output on stdout and stderr.
        output: String,
    },
}

impl RuncShim {
    /// Finds the binary in containerd's order: in PATH, then next to containerd (`publish_binary`),
    /// then next to this binary.
    pub fn find(publish_binary: &str) -> Result<RuncShim, RuncShimError> {
        let own = std::env::current_exe().ok();
        if let Some(path) = std::env::var_os(PATH_ENV).filter(|path| !path.is_empty()) {
            let path = PathBuf::from(path);
            if !is_program(&path) {
                return Err(RuncShimError::NotAFile(path));
            }
            return RuncShim::other_than(own.as_deref(), path);
        }
        let search = std::env::var_os("PATH").unwrap_or_default();
        let folders = std::env::split_paths(&search)
            .chain(Path::new(publish_binary).parent().map(Path::to_owned))
            .chain(own.as_deref().and_then(Path::parent).map(Path::to_owned))
            .filter(|folder| folder.is_absolute());
        let found = folders
            .map(|folder| folder.join(NAME))
            .find(|path| is_program(path))
            .ok_or(RuncShimError::Missing)?;
        RuncShim::other_than(own.as_deref(), found)
    }

    fn other_than(own: Option<&Path>, path: PathBuf) -> Result<RuncShim, RuncShimError> {
        if own.is_some_and(|own| is_same_file(own, &path)) {
            return Err(RuncShimError::Ourselves(path));
        }
        Ok(RuncShim(path))
    }

    /// Writes this script to `path`, and returns it in place of the stock shim, for a test.
    #[cfg(test)]
    pub fn script(path: &Path, text: &str) -> RuncShim {
        let written = path.with_extension("text");
        std::fs::write(&written, text).unwrap();
        // The file is copied by `install`, in another process. If this process wrote the file, a
        // child that another test forks at that time could hold it open for writing. The kernel
        // does not execute such a file (ETXTBSY).
        let mut install = Command::new("install");
        assert!(install.args(["-m", "755"]).arg(written).arg(path).status().unwrap().success());
        RuncShim(path.to_owned())
    }

    /// Builds a command that runs the stock shim with these arguments.
    #[must_use]
    pub fn command(&self, argv: &[OsString]) -> Command {
        let mut command = Command::new(&self.0);
        command.args(argv);
        command
    }

    /// Runs the stock shim with `stdin` as its input. Returns its pid and its stdout. An error
    /// contains stdout and stderr.
    pub fn run(&self, argv: &[OsString], stdin: &[u8]) -> Result<(u32, Vec<u8>), RuncShimError> {
        let failed = |source| RuncShimError::Run { path: self.0.clone(), source };
        let mut child = self
            .command(argv)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        let pid = child.id();
        if let Some(mut pipe) = child.stdin.take() {
            match pipe.write_all(stdin) {
                // The process ended without reading stdin. Its exit status explains the failure
                // better than this error.
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
                other => other.map_err(failed)?,
            }
        }
        let Output { status, stdout, stderr } = child.wait_with_output().map_err(failed)?;
        if status.success() {
            return Ok((pid, stdout));
        }
        let output = [stderr, stdout].concat();
        Err(RuncShimError::Failed {
            path: self.0.clone(),
            status,
            output: String::from_utf8_lossy(&output).trim().to_owned(),
        })
    }
}

/// Whether both paths lead to one file.
pub fn is_same_file(one: &Path, other: &Path) -> bool {
    let real = |path: &Path| std::fs::canonicalize(path).ok();
    real(one).is_some() && real(one) == real(other)
}

/// Whether the path leads to an executable file.
pub fn is_program(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    std::fs::metadata(path)
        .is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn script(text: &str) -> (tempfile::TempDir, RuncShim) {
        let dir = tempfile::tempdir().unwrap();
        let shim = RuncShim::script(&dir.path().join(NAME), &format!("#!/bin/sh\n{text}\n"));
        (dir, shim)
    }

    #[test]
    fn stdout_comes_back_as_it_is() {
        let (_dir, stock) = script("cat; echo \"$@\"; echo noise >&2");
        let (pid, stdout) = stock.run(&["-id".into(), "x".into()], b"in:").unwrap();
        assert!(pid > 0);
        assert_eq!(stdout, b"in:-id x\n");
    }

    #[test]
    fn a_failure_carries_its_words() {
        let (_dir, stock) = script("echo out; echo oops >&2; exit 3");
        let error = stock.run(&[], &[0; 1 << 20]).unwrap_err().to_string();
        assert!(error.contains("exit status: 3"), "{error}");
        assert!(error.ends_with("oops\nout"), "{error}");
    }

    #[test]
    fn this_binary_is_not_the_stock_shim() {
        let own = std::env::current_exe().unwrap();
        let error = RuncShim::other_than(Some(&own), own.clone()).unwrap_err();
        assert!(matches!(error, RuncShimError::Ourselves(_)));
        let (_dir, stock) = script("");
        assert!(RuncShim::other_than(Some(&own), stock.0).is_ok());
    }
}
