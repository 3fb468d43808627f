//! `cargo xtask k8s`: a real cluster of one node, on a network of its own.
//!
//! It shows what an operator and a user of a cluster do and see. The GPU is the simulated one,
//! handed out by a small device plugin; all else is what clusters run. It stays out of CI: the
//! first run builds Kubernetes and helm.

mod crds;
mod files;
mod plane;
mod programs;
mod release;
mod show;

use std::path::Path;

use affinode_e2e::{
    gpu::Gpu,
    release::Line,
    world::{MIB, Recipe, World},
};
use anyhow::{Context, Result, bail};
use clap::Args;
use nix::unistd::Uid;

use self::{plane::Plane, programs::Programs};
use crate::{build, deps, say};

/// VRAM of the simulated GPU.
const VRAM_BYTES: u64 = 1024 * MIB;

/// What to do beside the checks.
#[derive(Args)]
pub struct Options {
    /// Leave the cluster as it is when all was shown, or when something failed, until Enter.
    #[arg(long)]
    keep: bool,
}

/// Gives pods of a world a network, by the plugins of this folder.
pub fn pods(world: &World, plugins: &Path) -> Result<()> {
    files::cni(&world.dir().join("cni"), plugins)
}

/// Builds, starts, shows, checks, cleans up.
pub fn run(options: &Options) -> Result<()> {
    if !Uid::effective().is_root() {
        bail!("a cluster starts containers: run as root");
    }
    let releases = deps::all()?;
    let artifacts = build::all(build::Profile::Dev)?;
    let programs = Programs::prepare(&artifacts)?;
    let release = (releases.available.iter().find(|release| release.line == Line::V2))
        .context("no containerd 2 was found: Kubernetes needs it")?;
    let world = Recipe::default()
        .node()
        .artifacts(artifacts)
        .release(release)
        .gpu(Gpu::Simulated { vram_bytes: VRAM_BYTES })
        .world()?;
    let shown = Plane::start(&world, programs).and_then(|plane| {
        say::note(&format!("Kubernetes {}, containerd {}", programs::VERSION, release.version));
        show::all(&plane)
    });
    if let Err(error) = &shown {
        say::error(error);
    }
    if options.keep {
        say::note(&format!("all of it is in {}; Enter ends it", world.dir().display()));
        std::io::stdin().read_line(&mut String::new())?;
    }
    shown
}
