//! Builds programs of a Go module, whose source is fetched from Go's module proxy.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::{output, sh};

/// A Go module with its version, and the name of a folder for its builds.
pub struct GoModule {
    pub folder: &'static str,
    pub path: &'static str,
    pub version: &'static str,
}

/// A program of a module.
pub struct GoProgram {
    /// Its source is in the folder `cmd/NAME` of the module.
    pub name: &'static str,
    /// Text that states how long the first build takes.
    pub time: &'static str,
    /// Whether the program contains C, so that the build needs a C compiler.
    pub has_c: bool,
}

impl GoModule {
    /// Builds the program `cmd/name` of the module, unless it is built already. Returns its path.
    pub fn build(&self, cache: &Path, program: &GoProgram) -> Result<PathBuf> {
        let GoProgram { name, time, has_c } = program;
        let folder = cache.join(self.folder);
        let program = folder.join(format!("{name}-{}", self.version));
        if program.is_file() {
            return Ok(program);
        }
        if sh::find("go").is_none() {
            bail!("go is missing: install Go 1.26 or later to build {}", self.path);
        }
        self.require(&folder)?;
        output::step(&format!("Building {name} of {} {} (once; {time})", self.path, self.version));
        let mut go = Command::new("nice");
        // A library that the program finds at its start is missing at its build.
        let flags = if *has_c { "-s -w -extldflags=-Wl,-z,lazy" } else { "-s -w" };
        go.args(["go", "build", "-trimpath", "-ldflags", flags, "-o"]).arg(&program);
        go.arg(format!("{}/cmd/{name}", self.path)).current_dir(&folder);
        go.env("CGO_ENABLED", if *has_c { "1" } else { "0" });
        go.env("GOFLAGS", "-mod=mod -buildvcs=false -p=2");
        sh::run(&mut go)?;
        Ok(program)
    }

    /// Copies a folder of the module's source, unless it is copied already. Returns the path of the
    /// copy.
    pub fn copied(&self, cache: &Path, source: &str, name: &str) -> Result<PathBuf> {
        let folder = cache.join(self.folder);
        let copy = folder.join(format!("{name}-{}", self.version));
        if copy.is_dir() {
            return Ok(copy);
        }
        self.require(&folder)?;
        let source = self.download(&folder)?.join(source);
        let half = folder.join(format!("{name}.new"));
        sh::read(Command::new("rm").arg("-rf").arg(&half))?;
        sh::read(Command::new("cp").args(["-r", "--no-preserve=mode"]).arg(&source).arg(&half))?;
        fs::rename(&half, &copy)?;
        Ok(copy)
    }

    /// Writes a go.mod that requires the module.
    fn require(&self, folder: &Path) -> Result<()> {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let GoModule { folder: name, path, version } = self;
        let text = format!("module affinode.io/{name}\n\ngo 1.26.0\n\nrequire {path} {version}\n");
        Ok(fs::write(folder.join("go.mod"), text)?)
    }

    /// Fetches the source of the module, and returns the folder in which Go stores it.
    fn download(&self, folder: &Path) -> Result<PathBuf> {
        #[derive(Deserialize)]
        struct Found {
            #[serde(rename = "Dir")]
            dir: PathBuf,
        }
        let mut download = Command::new("go");
        download.args(["mod", "download", "-json", &format!("{}@{}", self.path, self.version)]);
        download.current_dir(folder).env("GO111MODULE", "on");
        download.env("GOFLAGS", "-modcacherw -mod=mod");
        let told = sh::read(&mut download)?;
        let found: Found =
            serde_json::from_str(&told).context("cannot parse what go printed about the module")?;
        Ok(found.dir)
    }
}
