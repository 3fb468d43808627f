//! Runs containerd's own client tests. They start a containerd of their own and use it through the
//! Go client.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use affinode_e2e::{artifacts::Artifacts, release::Release};
use anyhow::{Context, Result, bail};

use super::{go, outcome::Outcomes, registry};
use crate::output;

const MODULE: &str = "github.com/containerd/containerd/v2";
const PACKAGE: &str = "integration/client";
/// Source file of containerd with the names of the images that the suite uses.
const IMAGES: &str = "integration/images/image_list.go";
/// Folders that the containerd of the tests always uses.
const PLACES: [&str; 2] = ["/var/lib/containerd-test", "/run/containerd-test"];
/// Name of a test that is skipped, because it needs an external registry.
const SKIPPED: &str = "TestBindLowPort";

pub struct Client {
    program: PathBuf,
    folder: PathBuf,
    path: String,
    run_dir: PathBuf,
    lib_dir: PathBuf,
    log_dir: PathBuf,
}

impl Client {
    /// Builds the suite for this release of containerd.
    pub fn prepare(artifacts: &Artifacts, release: &Release) -> Result<Self> {
        let cache = artifacts.cache_dir().join("conformance");
        // Debian appends its own revision to the project's version.
        let own = release.version.trim_start_matches('v');
        let own: String = own.chars().take_while(|c| c.is_ascii_digit() || *c == '.').collect();
        let version = format!("v{own}");
        let source = go::source(&cache, MODULE, &version)?;
        // A flag can name another list of images, but the tests read the list before they parse the
        // flag. Therefore the list itself is changed.
        let list = source.join(IMAGES);
        let names = fs::read_to_string(&list)?.replace("ghcr.io/containerd", registry::ADDRESS);
        fs::write(&list, names).with_context(|| format!("cannot write {}", list.display()))?;
        let folder = source.join(PACKAGE);
        let program = cache.join(format!("client-{version}.test"));
        go::build_tests(&folder, &program)?;
        let old = std::env::var("PATH").unwrap_or_default();
        let dirs = [artifacts.bin_dir(), release.bin_dir.clone()];
        let dirs = dirs.map(|dir| dir.display().to_string()).join(":");
        Ok(Self {
            program,
            folder,
            path: format!("{dirs}:{old}"),
            run_dir: cache.join("run"),
            lib_dir: artifacts.lib_dir(),
            log_dir: cache,
        })
    }

    /// Runs the suite, or only the tests that match the expression. `ours` is true for a run with
    /// Affinode, and false for a run with the stock runtime.
    pub fn run(&self, ours: bool, only: Option<&str>) -> Result<Outcomes> {
        for place in PLACES.map(Path::new).iter().filter(|place| place.exists()) {
            fs::remove_dir_all(place).with_context(|| {
                format!(
                    "cannot remove {}: end the programs that run from there first",
                    place.display()
                )
            })?;
        }
        let runtime = if ours { "io.containerd.affinode.v1" } else { "io.containerd.runc.v2" };
        let mut command = Command::new(&self.program);
        command.args(["-test.v", "-test.skip", SKIPPED, "-test.timeout", "30m", "-test.root"]);
        command.args(["-no-criu", "-no-shim-cgroup"]);
        command.args(only.map(|only| format!("-test.run={only}")));
        command.current_dir(&self.folder).env("PATH", &self.path).env("TEST_RUNTIME", runtime);
        command.env("AFFINODE_RUN_DIR", &self.run_dir).env("AFFINODE_LIB_DIR", &self.lib_dir);
        let output =
            command.output().with_context(|| format!("cannot run {}", self.program.display()))?;
        let name = if ours { "ours" } else { "stock" };
        let log = self.log_dir.join(format!("client-{name}.log"));
        fs::write(&log, [output.stdout.as_slice(), &output.stderr].concat())?;
        let outcomes = Outcomes::parse(&String::from_utf8_lossy(&output.stdout));
        if outcomes.len() == 0 {
            bail!("no test ran: see {}", log.display());
        }
        output::note(&format!(
            "{} tests; the whole output is in {}",
            outcomes.len(),
            log.display()
        ));
        Ok(outcomes)
    }
}
