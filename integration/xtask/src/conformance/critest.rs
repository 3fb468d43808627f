//! Runs critest, the validation suite of the container runtime interface (CRI). It sends requests
//! to containerd or CRI-O as a kubelet does, and names the runtime handler of each pod.
//!
//! Each run has its own environment: a containerd or CRI-O, a network for the pods, and a registry
//! on the loopback of that network. All images of the suite are pulled from this registry instead
//! of public registries.

use std::{
    fs,
    fs::File,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use affinode_e2e::{
    artifacts::Artifacts,
    containerd,
    crio::{self, Crio, CrioPrograms},
    release::Release,
    testbed::{Testbed, TestbedConfig},
};
use anyhow::{Context, Result};
use nix::sys::signal::Signal;

use super::{go, mirror, outcome::Outcomes, registry};
use crate::{apt, k8s, output};

const MODULE: &str = "sigs.k8s.io/cri-tools";
/// Version of the suite.
pub const VERSION: &str = "1.36.0";
/// Source file of critest with the names of the images that the suite uses.
const IMAGES: &str = "pkg/validate/consts.go";
/// Prefix of the name of an image that the suite pulls by digest. The digest after this prefix must
/// be replaced, because the local image has another digest.
const DIGESTED: &str = "test-image-digest@sha256:";
const PLUGINS: &str = "containernetworking-plugins";

pub struct Critest {
    program: PathBuf,
    plugins: PathBuf,
    artifacts: Artifacts,
    release: Release,
    crio: Option<CrioPrograms>,
    log_dir: PathBuf,
}

impl Critest {
    /// Builds the suite, and fetches the CNI plugins of the pods' network.
    pub fn prepare(artifacts: &Artifacts, release: &Release) -> Result<Self> {
        let cache = artifacts.cache_dir().join("conformance/critest");
        let source = go::source(&cache, MODULE, &format!("v{VERSION}"))?;
        let digest = registry::digest(registry::DIGESTED)?;
        let list = source.join(IMAGES);
        let names = with_digest(&fs::read_to_string(&list)?, &digest)
            .with_context(|| format!("{} names no image by its digest", list.display()))?;
        fs::write(&list, names).with_context(|| format!("cannot write {}", list.display()))?;
        let program = cache.join(format!("critest-{VERSION}-{}.test", &digest[..12]));
        go::build_tests(&source.join("cmd/critest"), &program)?;
        let plugins = cache.join("usr/lib/cni");
        if !plugins.is_dir() {
            output::step(&format!("Fetching {PLUGINS}"));
            apt::unpack_own(PLUGINS, &cache)?;
        }
        Ok(Self {
            program,
            plugins,
            artifacts: artifacts.clone(),
            release: release.clone(),
            crio: None,
            log_dir: cache,
        })
    }

    /// Returns the same suite, but for CRI-O in place of containerd.
    pub fn of_crio(self, programs: CrioPrograms) -> Self {
        Self { crio: Some(programs), ..self }
    }

    /// Runs the suite, or only the tests whose names match the expression. `ours` is true for a run
    /// with Affinode, and false for a run with the stock runtime.
    pub fn run(&self, ours: bool, only: Option<&str>) -> Result<Outcomes> {
        let world = self.world()?;
        let crio = self.crio.as_ref().map(|programs| start_crio(&world, programs)).transpose()?;
        let (socket, log, stock) = match &crio {
            Some(crio) => (crio.socket(), crio.log(), crio::OWN),
            None => {
                self.start_containerd(&world)?;
                (world.containerd().socket(), world.containerd().log(), "runc")
            }
        };
        let handler = if ours { crio::AFFINODE } else { stock };
        let engine = if crio.is_some() { "crio" } else { "containerd" };
        let name = format!("{engine}-{}", if ours { "ours" } else { "stock" });
        let report = self.log_dir.join(format!("{name}.json"));
        let mut command = world.keeper().command(&self.program);
        command.arg(format!("-runtime-endpoint=unix://{}", socket.display()));
        command.arg(format!("-runtime-handler={handler}"));
        // The fixed seed gives both runs the same order of tests.
        command.args(["-ginkgo.seed=1", "-ginkgo.no-color", "-test.timeout=60m"]);
        command.arg(format!("-ginkgo.json-report={}", report.display()));
        command.args(only.map(|only| format!("-ginkgo.focus={only}")));
        let output =
            command.output().with_context(|| format!("cannot run {}", self.program.display()))?;
        let said = self.log_dir.join(format!("{name}.log"));
        fs::write(&said, [output.stdout.as_slice(), &output.stderr].concat())?;
        fs::copy(log, self.log_dir.join(format!("{name}-engine.log")))?;
        let text = fs::read_to_string(&report)
            .with_context(|| format!("no test ran: see {}", said.display()))?;
        let outcomes = Outcomes::of_ginkgo(&text)?;
        output::note(&format!(
            "{} tests; the whole output is in {}",
            outcomes.len(),
            said.display()
        ));
        Ok(outcomes)
    }

    /// Creates an environment that has a network for pods and a registry.
    fn world(&self) -> Result<Testbed> {
        let recipe = TestbedConfig::default().node().artifacts(self.artifacts.clone());
        let world = recipe.release(&self.release).world()?;
        containerd::run(world.keeper().command(Path::new("ip")).args(["link", "set", "lo", "up"]))
            .context("cannot set up the environment's network; `ip` is in the package iproute2")?;
        let network = format!("/proc/{}/ns/net", world.keeper().pid());
        registry::serve(Some(File::open(network)?))?;
        k8s::pods(&world, &self.plugins)?;
        Ok(world)
    }

    /// Starts the environment's containerd with Affinode's handler. Before the start, creates
    /// symbolic links to Affinode's programs at the paths where an installation has them.
    fn start_containerd(&self, world: &Testbed) -> Result<()> {
        // Folders that exist where Affinode is installed and that its programs need.
        fs::create_dir_all(world.prefix().join("lib"))?;
        symlink(self.artifacts.bin_dir(), world.prefix().join("bin"))?;
        symlink(self.artifacts.lib_dir(), world.prefix().join("lib/affinode"))?;
        mirror::of_containerd(world.dir())?;
        world.containerd().stop(Signal::SIGTERM)?;
        world.containerd().register()?;
        world.start_containerd()
    }
}

/// Starts CRI-O with Affinode's handler, in place of containerd.
fn start_crio<'a>(world: &'a Testbed, programs: &CrioPrograms) -> Result<Crio<'a>> {
    world.containerd().stop(Signal::SIGTERM)?;
    mirror::of_crio(world)?;
    Crio::start(world, programs)
}

/// Returns the expression that matches only the test with this name.
pub fn alone(name: &str) -> String {
    let special = |c: char| c.is_ascii_punctuation();
    let escaped: String =
        name.chars().flat_map(|c| special(c).then_some('\\').into_iter().chain([c])).collect();
    escaped + "$"
}

/// Replaces the digest of an image in the suite's list of images. Only the first match of the
/// prefix is changed. A later match belongs to the Windows image, whose name contains the same
/// text.
fn with_digest(list: &str, digest: &str) -> Option<String> {
    let (before, after) = list.split_once(DIGESTED)?;
    let (_, rest) = after.split_once('"')?;
    Some(format!("{before}{DIGESTED}{digest}\"{rest}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_digest_is_another_and_the_rest_stays() {
        let list = "a = r + \"test-image-digest@sha256:00ff\"\nb = r + \"win-test-image-digest@sha256:11\"\n";
        let changed = with_digest(list, "aa").unwrap();
        assert_eq!(changed, list.replace("00ff", "aa"));
        assert_eq!(with_digest(&changed, "aa").unwrap(), changed);
        assert!(with_digest("", "aa").is_none());
    }
}
