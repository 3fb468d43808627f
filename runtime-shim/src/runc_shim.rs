//! The stock shim: found, and run with containerd's own arguments.

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// Name of the stock shim.
pub const NAME: &str = "containerd-shim-runc-v2";
/// Environment variable with its path, where it is not found by name.
pub const PATH_ENV: &str = "AFFINODE_STOCK_SHIM";

/// The stock shim's binary.
#[derive(Clone, Debug)]
pub struct RuncShim(PathBuf);

/// The stock shim could not be found or run.
#[derive(Debug, thiserror::Error)]
pub enum RuncShimError {
    /// Nowhere.
    #[error(
        "{NAME} is not installed: not in PATH, not beside containerd and not beside this binary; install containerd's package, or name the file in {PATH_ENV}"
    )]
    Missing,
    /// The variable names something else.
    #[error("{PATH_ENV} names {0:?}, which is not a file that can be run")]
    NotAFile(PathBuf),
    /// It is this very binary.
    #[error(
        "{0:?} is this shim itself, under the stock shim's name; install containerd's own, or name it in {PATH_ENV}"
    )]
    Ourselves(PathBuf),
    /// It could not be started.
    #[error("cannot run {path:?}")]
    Run {
        /// The binary.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It failed.
    #[error("{path:?} failed ({status}): {output}")]
    Failed {
        /// The binary.
        path: PathBuf,
        /// How.
        status: std::process::ExitStatus,
        /// What it said.
        output: String,
    },
}

impl RuncShim {
    /// Finds it where containerd would: in PATH, then beside containerd
    /// (`publish_binary`), and at last beside this binary.
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
        let real = |path: &Path| std::fs::canonicalize(path).ok();
        if own.is_some_and(|own| real(own).is_some() && real(own) == real(&path)) {
            return Err(RuncShimError::Ourselves(path));
        }
        Ok(RuncShim(path))
    }

    /// A command with these arguments.
    #[must_use]
    pub fn command(&self, argv: &[OsString]) -> Command {
        let mut command = Command::new(&self.0);
        command.args(argv);
        command
    }

    /// Runs it with this on stdin. Returns its pid and what it wrote to stdout;
    /// a failure carries what it said on both.
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
                // Ended without reading: its status tells more.
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

fn is_program(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    std::fs::metadata(path)
        .is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn script(text: &str) -> (tempfile::TempDir, RuncShim) {
        let dir = tempfile::tempdir().unwrap();
        let (written, path) = (dir.path().join("text"), dir.path().join(NAME));
        std::fs::write(&written, format!("#!/bin/sh\n{text}\n")).unwrap();
        // By another process: a child of another test, just forked, would hold a file of ours open
        // for writing, and the kernel runs no such file (ETXTBSY).
        let mut install = Command::new("install");
        assert!(install.args(["-m", "755"]).arg(written).arg(&path).status().unwrap().success());
        (dir, RuncShim(path))
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
