//! An installation of Affinode in a testbed, created and removed by the command `affinode`. To
//! restart containerd, the command runs `systemctl`, which is a script here. The script sends a
//! request to the test, and waits until the test has restarted containerd.

use std::{
    fs,
    io::Write,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output},
    thread,
    time::Duration,
};

use affinode_proto::paths::LIB_FILE;
use anyhow::{Context, Result, ensure};

use crate::{artifacts::Artifacts, release::Line, testbed::Testbed};

/// Name of the installed shim.
pub const SHIM: &str = "containerd-shim-affinode-v1";
/// Paths of the installed files, relative to the installation's prefix.
pub const FILES: [&str; 3] =
    ["bin/affinode", "bin/containerd-shim-affinode-v1", "lib/affinode/libaffinode_preload.so"];
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// An installation of Affinode in a testbed. This value exists before the files are installed.
pub struct Installation<'a> {
    world: &'a Testbed,
    prefix: PathBuf,
    state_dir: PathBuf,
    tools: PathBuf,
    handler: String,
}

impl<'a> Installation<'a> {
    /// Describes an installation below `prefix` whose containerd handler has this name. Nothing is
    /// installed yet.
    ///
    /// # Errors
    /// When the testbed's folder cannot be written.
    pub fn new(world: &'a Testbed, prefix: &Path, handler: &str) -> Result<Self> {
        let tools = world.dir().join("tools");
        fs::create_dir_all(&tools)?;
        let state_dir = world.dir().join("state-affinode");
        Ok(Self { world, prefix: prefix.to_owned(), state_dir, tools, handler: handler.into() })
    }

    /// Path of an installed file. `name` is relative to the prefix.
    #[must_use]
    pub fn file(&self, name: &str) -> PathBuf {
        self.prefix.join(name)
    }

    /// Path of the installed shim.
    #[must_use]
    pub fn shim(&self) -> PathBuf {
        self.file("bin").join(SHIM)
    }

    /// Path of a file in the folder in which the installation records its state.
    #[must_use]
    pub fn state(&self, name: &str) -> PathBuf {
        self.state_dir.join(name)
    }

    /// Path of containerd's configuration.
    #[must_use]
    pub fn config(&self) -> PathBuf {
        self.world.containerd().config_file()
    }

    /// Path of the file to which the installer adds containerd's handler for Affinode. If
    /// containerd imports a folder, this is a separate file in that folder.
    #[must_use]
    pub fn handler_file(&self) -> PathBuf {
        match self.world.containerd().release().line {
            Line::V2 => self.config().with_file_name("conf.d").join("99-zz-affinode.toml"),
            Line::V1_6 | Line::V1_7 => self.config(),
        }
    }

    /// Builds the command `affinode install`, `uninstall` or `status` for this node. The arguments
    /// in `more` override the usual arguments.
    ///
    /// # Errors
    /// When the command was not built.
    pub fn command(&self, verb: &str, more: &[&str]) -> Result<Command> {
        let mut command = Command::new(self.world.artifacts().bin("affinode")?);
        command.arg(verb);
        let socket = self.world.containerd().socket();
        let usual = [
            ("--containerd", socket.as_path()),
            ("--state-dir", &self.state_dir),
            ("--prefix", &self.prefix),
            ("--from", self.world.artifacts().root()),
            ("--runtime-name", Path::new(&self.handler)),
        ];
        let known = if verb == "install" { 5 } else { 3 };
        for (option, value) in usual.into_iter().take(known) {
            if !more.contains(&option) {
                command.arg(option).arg(value);
            }
        }
        let path = std::env::var("PATH").unwrap_or_default();
        command.env("PATH", format!("{}:{path}", self.tools.display()));
        command.args(more);
        Ok(command)
    }

    /// Runs `affinode install`, `uninstall` or `status`, and returns its output, whatever the exit
    /// status.
    ///
    /// # Errors
    /// When the command cannot be run.
    pub fn run(&self, verb: &str, more: &[&str]) -> Result<Output> {
        Ok(self.command(verb, more)?.output()?)
    }

    /// Runs `affinode install`, `uninstall` or `status`, requires success, and returns its output.
    ///
    /// # Errors
    /// When the command fails.
    pub fn done(&self, verb: &str, more: &[&str]) -> Result<String> {
        let output = self.run(verb, more)?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure!(
            output.status.success(),
            "affinode {verb} failed: {said}{}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(said)
    }

    /// Runs `affinode install`, `uninstall` or `status`, requires exit status 1, and returns its
    /// error text.
    ///
    /// # Errors
    /// When the command ends with another status.
    pub fn refused(&self, verb: &str, more: &[&str]) -> Result<String> {
        let output = self.run(verb, more)?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(
            output.status.code() == Some(1),
            "affinode {verb}: expected exit status 1, got {:?}: {said}",
            output.status
        );
        Ok(said)
    }

    /// Writes a `systemctl` whose subcommand `restart` runs this shell script.
    ///
    /// # Errors
    /// When the script cannot be written.
    pub fn systemctl(&self, script: &str) -> Result<()> {
        let unit = self.world.containerd().unit();
        let text = format!("#!/bin/sh\n[ \"$*\" = 'restart {unit}' ] || exit 64\n{script}\n");
        self.tool("systemctl", &text)
    }

    /// Writes a script with this name into a folder of the command's PATH.
    ///
    /// # Errors
    /// When the script cannot be written.
    pub fn tool(&self, name: &str, text: &str) -> Result<()> {
        let tool = self.tools.join(name);
        fs::write(&tool, text)?;
        Ok(fs::set_permissions(&tool, fs::Permissions::from_mode(0o755))?)
    }

    /// Runs `work`. Meanwhile, restarts containerd whenever the script `systemctl` requests a
    /// restart. Returns the result of `work`, and the number of restarts.
    ///
    /// # Errors
    /// When `work` fails, or containerd does not start again.
    pub fn restarted<T: Send>(
        &self,
        work: impl FnOnce() -> Result<T> + Send,
    ) -> Result<(T, usize)> {
        self.served(work, |_| {
            self.world.restart_containerd()?;
            Ok(true)
        })
    }

    /// Runs `work`. Meanwhile, calls `restart` whenever the script `systemctl` requests a restart.
    /// `restart` gets the number of earlier requests, and returns whether the restart succeeded.
    /// Returns the result of `work`, and the number of requests.
    ///
    /// # Errors
    /// When `work` or `restart` fails.
    pub fn served<T: Send>(
        &self,
        work: impl FnOnce() -> Result<T> + Send,
        mut restart: impl FnMut(usize) -> Result<bool>,
    ) -> Result<(T, usize)> {
        let (asked, done) = (self.tools.join("asked"), self.tools.join("done"));
        let (a, d) = (asked.display(), done.display());
        // A request of a killed process also gets a reply, but no process reads it.
        self.systemctl(&format!(
            "rm -f {d}; : > {a}; while [ ! -e {d} ]; do sleep 0.02; done; code=$(cat {d}); rm {d}; exit $code"
        ))?;
        let mut restarts = 0;
        let result = thread::scope(|scope| {
            let worker = scope.spawn(work);
            while !worker.is_finished() {
                if asked.exists() {
                    fs::remove_file(&asked)?;
                    let code = if restart(restarts)? { "0" } else { "1" };
                    restarts += 1;
                    let fresh = done.with_extension("new");
                    fs::write(&fresh, code)?;
                    fs::rename(fresh, &done)?;
                }
                thread::sleep(LOOK_EVERY);
            }
            worker.join().map_err(|_| anyhow::anyhow!("the command's thread panicked"))?
        });
        Ok((result?, restarts))
    }
}

/// Fills a folder with files that differ from the built files but have the same version. Bytes that
/// loaders ignore are appended to each program and the library.
///
/// # Errors
/// When a file is missing, or cannot be copied.
pub fn another_build(artifacts: &Artifacts, folder: &Path) -> Result<()> {
    let library = artifacts.lib_dir().join(LIB_FILE);
    for path in [artifacts.bin("affinode")?, artifacts.bin(SHIM)?, library] {
        let copy = folder.join(path.file_name().context("the path has no file name")?);
        fs::copy(&path, &copy).with_context(|| format!("cannot copy {}", path.display()))?;
        fs::File::options().append(true).open(copy)?.write_all(b"\nanother build\n")?;
    }
    Ok(())
}
