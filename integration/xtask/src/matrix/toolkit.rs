//! Builds NVIDIA's container toolkit from source that Go's module proxy provides. Its program
//! rewrites containerd's configuration files, as GPU Operator does at each start.

use std::{
    fmt, fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::Command,
};

use affinode_e2e::{artifacts::Artifacts, testbed::Testbed};
use anyhow::{Context, Result, bail, ensure};

use crate::{output, sh};

const MODULE: &str = "github.com/NVIDIA/nvidia-container-toolkit";
/// Versions of the toolkit that are tested. The second value is true if the version writes its
/// settings to a separate file, and false if it changes containerd's main configuration file. The
/// first version is the newest release at the time of the last update. The second version is the
/// last release that writes no separate file.
const VERSIONS: [(&str, bool); 2] = [("1.20.1", true), ("1.17.8", false)];
/// Name of the toolkit's separate file, in the folder whose files containerd imports.
const DROP_IN: &str = "99-nvidia.toml";

/// Source from which the toolkit copies containerd's configuration into its own file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Only containerd's main configuration file, which it reads first.
    File,
    /// All configuration files, as `containerd config dump` prints them.
    Command,
}

/// A release of the toolkit.
pub struct Toolkit {
    program: PathBuf,
    version: &'static str,
    /// Whether this release writes its settings to a separate file, `DROP_IN`.
    pub drops_in: bool,
}

/// Returns the tested releases of the toolkit, and builds each unless it is built already.
pub fn releases(artifacts: &Artifacts) -> Result<Vec<Toolkit>> {
    let build = |(version, drops_in): (&'static str, bool)| {
        let folder = artifacts.cache_dir().join(format!("nvidia-ctk-{version}"));
        let program = folder.join("nvidia-ctk");
        if !program.is_file() {
            make(&folder, &program, version)?;
        }
        Ok(Toolkit { program, version, drops_in })
    };
    VERSIONS.into_iter().map(build).collect()
}

fn make(folder: &Path, program: &Path, version: &str) -> Result<()> {
    if sh::find("go").is_none() {
        bail!("go is missing: install Go 1.26 or later to build nvidia-ctk");
    }
    output::step(&format!("Building nvidia-ctk {version} (once; a minute)"));
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let module = format!("module affinode.io/test\n\ngo 1.26.0\n\nrequire {MODULE} v{version}\n");
    fs::write(folder.join("go.mod"), module)?;
    // The build writes to a temporary name, so that an interrupted build leaves no program.
    let fresh = program.with_extension("new");
    let mut go = Command::new("nice");
    go.args(["go", "build", "-trimpath", "-o"]).arg(&fresh);
    go.arg(format!("{MODULE}/cmd/nvidia-ctk"));
    // The Go bindings of NVML contain C code that causes many warnings, so warnings are off.
    go.current_dir(folder).env("CGO_ENABLED", "1").env("CGO_CFLAGS", "-g -O2 -w");
    go.env("GOFLAGS", "-mod=mod -modcacherw -buildvcs=false -p=2");
    sh::run(&mut go)?;
    Ok(fs::rename(fresh, program)?)
}

impl Toolkit {
    /// Runs the toolkit, and then restarts containerd, as the toolkit's container does when it
    /// starts.
    pub fn start(&self, world: &Testbed, source: Source, default: bool) -> Result<()> {
        let file = world.containerd().config_file();
        let folder = world.dir().join("tools");
        fs::create_dir_all(&folder)?;
        // The toolkit runs `containerd config dump`. Without this wrapper the command would print
        // the configuration of the machine's own containerd.
        let wrapper = folder.join("containerd-of-the-node");
        let program = world.containerd().release().bin_dir.join("containerd");
        let text =
            format!("#!/bin/sh\nexec {} --config {} \"$@\"\n", program.display(), file.display());
        fs::write(&wrapper, text)?;
        fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755))?;
        let mut command = Command::new(&self.program);
        command.args(["runtime", "configure", "--runtime", "containerd", "--cdi.enabled"]);
        command.arg("--config").arg(&file).arg("--executable-path").arg(&wrapper);
        let source = if source == Source::File { "file" } else { "command" };
        command.args(["--config-source", source]);
        command.arg("--nvidia-runtime-path").arg(runtime(world)?);
        if default {
            command.arg("--nvidia-set-as-default");
        }
        if self.drops_in {
            let conf = file.with_file_name("conf.d");
            fs::create_dir_all(&conf)?;
            command.arg("--drop-in-config").arg(conf.join(DROP_IN));
        }
        let output = command.output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "nvidia-ctk {}: {said}", self.version);
        world.restart_containerd()
    }
}

/// Creates a link to runc, which replaces NVIDIA's runtime in these tests (NVIDIA's runtime calls
/// runc as well). Returns the link's path.
pub fn runtime(world: &Testbed) -> Result<PathBuf> {
    let link = world.dir().join("tools/nvidia-container-runtime");
    if !link.exists() {
        let runc = sh::find("runc").context("no runc")?;
        symlink(runc, &link)?;
    }
    Ok(link)
}

impl fmt::Display for Toolkit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "nvidia-ctk {}", self.version)
    }
}
