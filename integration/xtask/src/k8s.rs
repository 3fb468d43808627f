//! `cargo xtask k8s`: tests Affinode on a real Kubernetes cluster, in a private network.
//!
//! The tests check what operators and users of a cluster do and see. The GPU is simulated, and a
//! small device plugin assigns it. All other parts are those of real clusters. CI does not run
//! these tests, because the first run builds Kubernetes and helm.

mod control_plane;
mod crds;
mod files;
mod go_module;
mod metrics_programs;
mod node;
mod programs;
mod release;
mod scenarios;

use std::path::Path;

use affinode_e2e::{
    gpu::Gpu,
    release::Line,
    testbed::{MIB, Testbed, TestbedConfig},
};
use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use nix::unistd::Uid;

use self::{control_plane::Plane, programs::Programs};
use crate::{build, deps, output};

/// VRAM of the simulated GPU of each node.
const VRAM_BYTES: u64 = 1024 * MIB;

/// How to run the checks.
#[derive(Args)]
pub struct Options {
    /// Keep the cluster after the last check or an error, until Enter is pressed.
    #[arg(long)]
    keep: bool,
    /// Number of nodes in the cluster.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=9))]
    nodes: u8,
    /// Run only one part of the checks.
    #[arg(long)]
    only: Option<Part>,
}

/// A part of the checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// Everything but the parts below.
    Chart,
    /// The DRA driver of the node agents.
    Dra,
    /// Autoscaling by the wait for VRAM.
    Autoscale,
    /// The device plugin of the node agents.
    DevicePlugin,
}

/// Configures the network for the pods of a testbed, with the CNI plugins in the folder `plugins`.
pub fn pods(world: &Testbed, plugins: &Path) -> Result<()> {
    files::cni(&world.dir().join("cni"), plugins, "10.98.0.0/24")
}

/// Builds the programs, starts the cluster, runs the checks, and cleans up.
pub fn run(options: &Options) -> Result<()> {
    if !Uid::effective().is_root() {
        bail!("a cluster starts containers: run as root");
    }
    let releases = deps::all()?;
    let artifacts = build::all(build::Profile::Dev)?;
    let programs = Programs::prepare(&artifacts)?;
    let release = (releases.available.iter().find(|release| release.line == Line::V2))
        .context("no containerd 2 was found; Kubernetes needs one")?;
    let world = |number| {
        // The driver of the last node enforces limits of VRAM, if it is not the first.
        let has_limits = number > 1 && number == options.nodes;
        let driver: &[&str] = if has_limits { &["--memory-limits"] } else { &[] };
        TestbedConfig::default()
            .sim_options(driver)
            .node()
            .named(&node::name(number))
            .artifacts(artifacts.clone())
            .release(release)
            .gpu(Gpu::Simulated { vram_bytes: VRAM_BYTES })
            .world()
    };
    let worlds: Vec<Testbed> = (1..=options.nodes).map(world).collect::<Result<_>>()?;
    let shown = Plane::start(&worlds, programs).and_then(|plane| {
        output::note(&format!(
            "Kubernetes {}, containerd {}, {} nodes",
            programs::VERSION,
            release.version,
            options.nodes
        ));
        scenarios::run(&plane, options.only)
    });
    if let Err(error) = &shown {
        output::error(error);
    }
    if options.keep {
        let dirs: Vec<_> = worlds.iter().map(|world| world.dir().display().to_string()).collect();
        output::note(&format!("files are in {}; press Enter to end", dirs.join(", ")));
        std::io::stdin().read_line(&mut String::new())?;
    }
    shown
}
