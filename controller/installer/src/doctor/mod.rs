//! The command `affinode doctor` checks whether this machine is ready, and prints how to fix each
//! problem.
//!
//! | module | what it checks |
//! | --- | --- |
//! | [`gpu`] | NVML, driver, devices, MPS |
//! | [`kernel`] | permissions, system calls that agents and controller need |
//! | [`memory`] | cgroups, host memory |
//! | [`disk`] | the folder for content of containers that are offloaded for long |
//! | [`containerd`] | the daemon: its process and version |
//! | [`imports`] | reads the files of the daemon's configuration |
//! | [`handler`] | the handler in the daemon's configuration |
//! | [`cdi`] | whether containers get their devices by CDI |
//! | [`programs`] | shims and runc on the daemon's PATH |
//! | [`library`] | the preload library, as a container's loader sees it |
//! | [`sharing`] | how Kubernetes hands out GPUs: time-slicing, KAI, DRA, MIG, HAMi |
//! | [`files`] | run directory, configuration, controller |
//! | [`remedies`] | meaning, cause and remedy of each check |
//!
//! Each module reads the values that its checks need (`gather`), and derives the checks from them
//! in a pure function (`judge`). Tests can call that function on any machine.

pub mod cdi;
pub mod containerd;
pub mod disk;
pub mod files;
pub mod gpu;
pub mod handler;
pub(crate) mod imports;
pub mod kernel;
pub mod library;
pub mod memory;
pub mod programs;
pub mod remedies;
pub mod sharing;

use std::path::{Path, PathBuf};

use affinode_controller::{config::Config, driver_library::DriverLibrary, error_chain};
use affinode_proto::{installation::InstallationPaths, paths};
use serde::Serialize;

/// Result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckVerdict {
    /// The check passed without a finding.
    Good,
    /// Affinode works, but with a limitation.
    Warning,
    /// Affinode does not work until the finding is fixed.
    Bad,
}

impl CheckVerdict {
    /// Returns the sign that the output shows for this result: √, ! or ×.
    #[must_use]
    pub fn sign(self) -> char {
        match self {
            CheckVerdict::Good => '√',
            CheckVerdict::Warning => '!',
            CheckVerdict::Bad => '×',
        }
    }
}

/// A check of `affinode doctor` with its result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DoctorCheck {
    /// The group in the output: `GPU`, `containerd`, …
    pub group: &'static str,
    /// Name of the check, stable and unique in its group.
    pub name: &'static str,
    /// Whether the check passed, passed with a warning, or failed.
    pub verdict: CheckVerdict,
    /// Text of the finding.
    pub found: String,
    /// Remedy for the finding. Empty: the check passed.
    pub hint: String,
}

/// Collects the checks of one group.
#[derive(Debug)]
pub struct CheckGroup {
    name: &'static str,
    /// The checks added so far.
    pub checks: Vec<DoctorCheck>,
}

impl CheckGroup {
    /// Creates a group without checks.
    #[must_use]
    pub fn new(name: &'static str) -> CheckGroup {
        CheckGroup { name, checks: Vec::new() }
    }

    /// Adds a check that passed.
    pub fn good(&mut self, name: &'static str, found: impl Into<String>) {
        self.add(name, CheckVerdict::Good, found.into(), String::new());
    }

    /// Adds a warning, with a hint how to resolve it.
    pub fn warning(
        &mut self,
        name: &'static str,
        found: impl Into<String>,
        hint: impl Into<String>,
    ) {
        self.add(name, CheckVerdict::Warning, found.into(), hint.into());
    }

    /// Adds a failed check, with a hint how to fix it.
    pub fn bad(&mut self, name: &'static str, found: impl Into<String>, hint: impl Into<String>) {
        self.add(name, CheckVerdict::Bad, found.into(), hint.into());
    }

    fn add(&mut self, name: &'static str, verdict: CheckVerdict, found: String, hint: String) {
        debug_assert!(remedies::is_explained(self.name, name), "{}: {name}: no entry", self.name);
        self.checks.push(DoctorCheck { group: self.name, name, verdict, found, hint });
    }
}

/// The paths to check.
#[derive(Clone, Debug)]
pub struct DoctorPaths {
    /// Run directory of the controller.
    pub run_dir: PathBuf,
    /// Path of containerd's socket. `None`: the default paths of distributions are searched.
    pub containerd: Option<PathBuf>,
}

/// Runs all checks except the check of the controller ([`files::controller`]).
#[must_use]
pub fn examine(asked: &DoctorPaths) -> Vec<DoctorCheck> {
    let daemon = containerd::find(asked.containerd.as_deref());
    // Shims inherit containerd's environment. Therefore containerd's variables take precedence over
    // those of this command.
    let named = |variable: &str, own: PathBuf| {
        let theirs = daemon.as_ref().ok().and_then(|daemon| daemon.variable(variable));
        theirs.map_or(own, PathBuf::from)
    };
    let own = InstallationPaths::own();
    let lib_dir = named(paths::LIB_DIR_ENV, own.lib_dir);
    let config_file = named(paths::CONFIG_ENV, own.config);
    let config = Config::load(&config_file).map_err(|error| error_chain::chain(&error));
    let rules = config.as_ref().cloned().unwrap_or_default();
    let gpus = gpu::GpuFacts::gather(&DriverLibrary::nvml(&rules).path());
    let vram_used_bytes = gpus.vram_used_bytes();

    let mut checks = gpu::judge(&gpus);
    checks.extend(kernel::judge(&kernel::KernelFacts::gather()));
    checks.extend(memory::judge(&memory::MemoryFacts::gather(&rules.memory, vram_used_bytes)));
    checks.extend(disk::judge(disk::DiskFacts::gather(&rules.memory).as_ref()));
    let podman_alone = is_on_path("podman") && !is_on_path("containerd");
    checks.extend(containerd::judge(&daemon, podman_alone));
    if let Ok(daemon) = &daemon {
        let files = imports::of(&daemon.config_file).files;
        let cdi = daemon.config.as_ref().is_ok_and(|config| cdi::injects(config, &files));
        checks.extend(handler::judge(&daemon.config, containerd::kubelet_runs(), cdi));
        checks.extend(programs::judge(&programs::ProgramFacts::gather(daemon)));
    }
    checks.extend(library::judge(&library::LibraryFacts::gather(&lib_dir)));
    checks.extend(sharing::judge(&sharing::SharingFacts::gather(Path::new("/"))));
    let run_dir = named(paths::RUN_DIR_ENV, own.run_dir);
    checks.extend(files::judge(&files::PathFacts::gather(
        &asked.run_dir,
        &run_dir,
        config_file,
        config.err(),
    )));
    checks
}

/// Returns the path of the program in the first of these folders that contains it.
fn on_path(folders: impl Iterator<Item = PathBuf>, program: &str) -> Option<PathBuf> {
    folders.map(|folder| folder.join(program)).find(|path| is_program(path))
}

/// Returns whether the PATH of this process contains a program of this name.
pub(crate) fn is_on_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    on_path(std::env::split_paths(&path), program).is_some()
}

fn is_program(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    std::fs::metadata(path)
        .is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
}
