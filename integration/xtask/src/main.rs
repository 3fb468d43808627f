//! `cargo xtask`: everything a developer does with this repository, and all that CI does.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod apt;
mod bench;
mod browser;
mod build;
mod chaos;
mod conformance;
mod demo;
mod deps;
mod docs;
mod fuzz;
mod gpu_kit;
mod hazards;
mod k8s;
mod load;
mod matrix;
mod output;
mod package;
mod packages;
mod runc;
mod sh;
mod step;
mod suite;
mod systemd;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Build, test and show Affinode")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Build everything into target/affinode.
    Build {
        /// Optimised, into target/affinode/release.
        #[arg(long)]
        release: bool,
    },
    /// Install what is missing, and fetch the containerd releases to test with (needs root).
    Deps,
    /// Show it: two containers that together want more VRAM than there is (needs root).
    Demo(demo::Options),
    /// Test the dashboard in a headless Chromium (needs root, chromium, node and npm).
    Browser(browser::Options),
    /// Measure what it costs, beside the stock runtime (needs root).
    Bench(bench::Options),
    /// Kill at random, and show that nothing is lost, stuck, corrupted or left (needs root).
    Chaos(chaos::Options),
    /// Run containerd's own client tests and critest with the stock runtime and with ours (needs
    /// root, Go).
    Conformance(conformance::Options),
    /// Write the reference pages of docs/ from what the code says.
    Docs(docs::Options),
    /// Search for inputs that break a reader, guided by coverage (needs g++).
    Fuzz(fuzz::Options),
    /// Play every hazard without Affinode and with it, and print what happens (needs root).
    Hazards(hazards::Options),
    /// Install into a real cluster of two nodes, and show what its people see (needs root, Go).
    K8s(k8s::Options),
    /// Fill a node, and print what its controller needs while nothing changes (needs root).
    Load(load::Options),
    /// Install, use, upgrade and uninstall on each containerd, also when things go wrong (needs
    /// root, Go).
    Matrix(matrix::Options),
    /// Pack what a machine with a GPU needs to run the suite there.
    GpuKit(gpu_kit::Options),
    /// Make .deb, .rpm, container image, bill of materials and checksums; --check installs them.
    Package(package::Options),
    /// Boot a real systemd, and show installation, the controller's unit, systemd-run and Slurm
    /// (needs root, Debian).
    Systemd(systemd::Options),
    /// Run all tests of this machine (needs root).
    Test(suite::Options),
}

fn main() -> ExitCode {
    let result = match Arguments::parse().task {
        Task::Build { release } => build::all(build::Profile::from_release(release)).map(|_| ()),
        Task::Deps => deps::all().and_then(|_| deps::promtool()).map(|_| ()),
        Task::Demo(options) => demo::run(&options),
        Task::Browser(options) => browser::run(&options),
        Task::Bench(options) => bench::run(&options),
        Task::Chaos(options) => chaos::run(&options),
        Task::Conformance(options) => conformance::run(&options),
        Task::Docs(options) => docs::run(&options),
        Task::Fuzz(options) => fuzz::run(&options),
        Task::Hazards(options) => hazards::run(&options),
        Task::K8s(options) => k8s::run(&options),
        Task::Load(options) => load::run(&options),
        Task::Matrix(options) => matrix::run(&options),
        Task::GpuKit(options) => gpu_kit::pack(&options),
        Task::Package(options) => package::run(&options),
        Task::Systemd(options) => systemd::run(&options),
        Task::Test(options) => suite::run(&options),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            output::error(&error);
            ExitCode::FAILURE
        }
    }
}
