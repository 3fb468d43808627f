//! `affinode doctor`: whether this machine is ready, and what to do where it is not.
//!
//! | module | what it looks at |
//! | --- | --- |
//! | [`gpu`] | NVML, driver, devices, MPS |
//! | [`kernel`] | permissions, system calls that agents and controller need |
//! | [`memory`] | cgroups, host memory |
//! | [`containerd`] | the daemon: who it is, its version |
//! | [`handler`] | how the daemon knows the runtime |
//! | [`programs`] | shims and runc on the daemon's PATH |
//! | [`library`] | the preload library, as the loader of a container would see it |
//! | [`sharing`] | how Kubernetes hands out GPUs: time-slicing, KAI, DRA, MIG, HAMi |
//! | [`files`] | run directory, configuration, controller |
//! | [`remedies`] | meaning, cause and remedy of each check |
//!
//! Each gathers facts at its edge and judges them in a function of its own, which needs
//! no machine to be tested.

pub mod containerd;
pub mod files;
pub mod gpu;
pub mod handler;
pub mod kernel;
pub mod library;
pub mod memory;
pub mod programs;
pub mod remedies;
pub mod sharing;

use std::path::{Path, PathBuf};

use affinode_proto::paths;
use serde::Serialize;

use crate::{config::Config, error_chain};

/// How a check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckVerdict {
    /// As it should be.
    Good,
    /// Works, but not as well as it could.
    Warning,
    /// Must be put right.
    Bad,
}

impl CheckVerdict {
    /// One column: √, ! or ×.
    #[must_use]
    pub fn sign(self) -> char {
        match self {
            CheckVerdict::Good => '√',
            CheckVerdict::Warning => '!',
            CheckVerdict::Bad => '×',
        }
    }
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DoctorCheck {
    /// What it belongs to: `GPU`, `containerd`, …
    pub group: &'static str,
    /// Its stable name in the group.
    pub name: &'static str,
    /// How it ended.
    pub verdict: CheckVerdict,
    /// What was found.
    pub found: String,
    /// What to do about it; empty when nothing is to be done.
    pub hint: String,
}

/// Checks of one group, as they are made.
#[derive(Debug)]
pub struct CheckGroup {
    name: &'static str,
    /// What was made so far.
    pub checks: Vec<DoctorCheck>,
}

impl CheckGroup {
    /// An empty one.
    #[must_use]
    pub fn new(name: &'static str) -> CheckGroup {
        CheckGroup { name, checks: Vec::new() }
    }

    /// As it should be.
    pub fn good(&mut self, name: &'static str, found: impl Into<String>) {
        self.add(name, CheckVerdict::Good, found.into(), String::new());
    }

    /// Works, could be better.
    pub fn warning(
        &mut self,
        name: &'static str,
        found: impl Into<String>,
        hint: impl Into<String>,
    ) {
        self.add(name, CheckVerdict::Warning, found.into(), hint.into());
    }

    /// Must be put right.
    pub fn bad(&mut self, name: &'static str, found: impl Into<String>, hint: impl Into<String>) {
        self.add(name, CheckVerdict::Bad, found.into(), hint.into());
    }

    fn add(&mut self, name: &'static str, verdict: CheckVerdict, found: String, hint: String) {
        debug_assert!(remedies::is_explained(self.name, name), "{}: {name}: no entry", self.name);
        self.checks.push(DoctorCheck { group: self.name, name, verdict, found, hint });
    }
}

/// Where to look.
#[derive(Clone, Debug)]
pub struct DoctorPaths {
    /// The controller's run directory.
    pub run_dir: PathBuf,
    /// containerd's socket; nothing: where distributions put it.
    pub containerd: Option<PathBuf>,
}

/// Looks at everything but the controller, which is asked by [`files::controller`].
#[must_use]
pub fn examine(asked: &DoctorPaths) -> Vec<DoctorCheck> {
    let daemon = containerd::find(asked.containerd.as_deref());
    // Shims inherit containerd's environment: where it names places, those count.
    let named = |variable: &str, default: &str| {
        let own = || std::env::var_os(variable).filter(|value| !value.is_empty());
        let theirs = daemon.as_ref().ok().and_then(|daemon| daemon.variable(variable));
        theirs.or_else(own).map_or_else(|| PathBuf::from(default), PathBuf::from)
    };
    let lib_dir = named(paths::LIB_DIR_ENV, paths::LIB_DIR);
    let config_file = named(paths::CONFIG_ENV, paths::CONFIG_FILE);
    let config = Config::load(&config_file).map_err(|error| error_chain::chain(&error));
    let rules = config.as_ref().cloned().unwrap_or_default();
    let gpus = gpu::GpuFacts::gather(&rules.nvml.library);
    let vram_used_bytes = gpus.vram_used_bytes();

    let mut checks = gpu::judge(&gpus);
    checks.extend(kernel::judge(&kernel::KernelFacts::gather()));
    checks.extend(memory::judge(&memory::MemoryFacts::gather(&rules.memory, vram_used_bytes)));
    checks.extend(containerd::judge(&daemon));
    if let Ok(daemon) = &daemon {
        checks.extend(handler::judge(&daemon.config, containerd::kubelet_runs()));
        checks.extend(programs::judge(&programs::ProgramFacts::gather(daemon)));
    }
    checks.extend(library::judge(&library::LibraryFacts::gather(&lib_dir)));
    checks.extend(sharing::judge(&sharing::SharingFacts::gather(Path::new("/"))));
    let run_dir = named(paths::RUN_DIR_ENV, paths::RUN_DIR);
    checks.extend(files::judge(&files::PathFacts::gather(
        &asked.run_dir,
        &run_dir,
        config_file,
        config.err(),
    )));
    checks
}

/// The first of these folders that has such a program.
fn on_path(folders: impl Iterator<Item = PathBuf>, program: &str) -> Option<PathBuf> {
    folders.map(|folder| folder.join(program)).find(|path| is_program(path))
}

fn is_program(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    std::fs::metadata(path)
        .is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
}
