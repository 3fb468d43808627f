//! `cargo xtask`: the commands for developers and CI.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod apt;
mod bench;
mod browser;
mod build;
mod chaos;
mod conformance;
mod crio;
mod demo;
mod deps;
mod docker;
mod docs;
mod fuzz;
mod gpu_kit;
mod hazards;
mod helm;
mod install;
mod k8s;
mod load;
mod matrix;
mod output;
mod package;
mod packages;
mod personas;
mod podman;
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
        /// Build with optimisations, into target/affinode/release.
        #[arg(long)]
        release: bool,
    },
    /// Install missing packages, and fetch or build all programs that tests use, CRI-O included
    /// (needs root).
    Deps,
    /// Demo: two containers that together need more VRAM than the GPU has (needs root).
    Demo(demo::Options),
    /// Test the dashboard in a headless Chromium (needs root, chromium, node and npm).
    Browser(browser::Options),
    /// Measure the overhead, compared with the stock runtime (needs root).
    Bench(bench::Options),
    /// Cause random faults, such as killed processes, and check that no container is lost, stuck or
    /// corrupted, and that no resource has leaked (needs root).
    Chaos(chaos::Options),
    /// Run containerd's own client tests, and critest with containerd and CRI-O, with the stock
    /// runtime and with Affinode (needs root, Go).
    Conformance(conformance::Options),
    /// Write the reference pages of docs/ from the code.
    Docs(docs::Options),
    /// Fuzz the parsers, guided by coverage (needs g++).
    Fuzz(fuzz::Options),
    /// Run every hazard without and with Affinode, and print the results (needs root).
    Hazards(hazards::Options),
    /// Build, and install Affinode on this machine (needs root).
    Install(install::Options),
    /// Install into a real cluster of three nodes, and check what its users see (needs root, Go).
    K8s(k8s::Options),
    /// Fill a node, and print the cost of its controller while nothing changes (needs root).
    Load(load::Options),
    /// Install, use, upgrade and uninstall on each containerd release, also with injected faults
    /// (needs root, Go).
    Matrix(matrix::Options),
    /// Pack everything that a machine with a GPU needs to run the GPU suite.
    GpuKit(gpu_kit::Options),
    /// Build .deb, .rpm, container image, bill of materials and checksums; --check installs them.
    Package(package::Options),
    /// Count and run the commands that users find in the documents (needs root).
    Personas(personas::Options),
    /// Boot a real systemd, and check installation, the controller's unit, systemd-run and Slurm
    /// (needs root, Debian).
    Systemd(systemd::Options),
    /// Run all tests that can run on this machine (needs root).
    Test(suite::Options),
}

fn main() -> ExitCode {
    let result = match Arguments::parse().task {
        Task::Build { release } => build::all(build::Profile::from_release(release)).map(|_| ()),
        Task::Deps => deps::everything(),
        Task::Demo(options) => demo::run(&options),
        Task::Browser(options) => browser::run(&options),
        Task::Bench(options) => bench::run(&options),
        Task::Chaos(options) => chaos::run(&options),
        Task::Conformance(options) => conformance::run(&options),
        Task::Docs(options) => docs::run(&options),
        Task::Fuzz(options) => fuzz::run(&options),
        Task::Hazards(options) => hazards::run(&options),
        Task::Install(options) => install::run(&options),
        Task::K8s(options) => k8s::run(&options),
        Task::Load(options) => load::run(&options),
        Task::Matrix(options) => matrix::run(&options),
        Task::GpuKit(options) => gpu_kit::pack(&options),
        Task::Package(options) => package::run(&options),
        Task::Personas(options) => personas::run(&options),
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
