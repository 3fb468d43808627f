//! `affinode-sim-gpud`: simulates the kernel driver of the simulated GPU.
//!
//! ```text
//! affinode-sim-gpud [--socket /run/affinode-sim/gpu.sock] [--gpus 1] [--vram-mib 1024]
//!     [--name "NVIDIA Simulated H200"] [--context-mib 16] [--checkpoint-extra-mib 16]
//!     [--memory-limits] [--checkpoint-fixed-ms 0] [--checkpoint-gib-per-s 0] [--restore-fixed-ms 0] [--restore-gib-per-s 0]
//! ```
//!
//! Prints one line, `ready`, as soon as it listens. It must run as root if processes of several
//! users or containers share the GPU. It ends on SIGTERM and SIGINT. The contents of every
//! simulated GPU are then lost.
//!
//! | module | content |
//! | --- | --- |
//! | [`ledger`] | VRAM by process; pure |
//! | [`driver`] | the state of the node, and the effect of each request |
//! | [`limits`] | VRAM limits of cgroups; pure |
//! | [`checkpoint`] | lock, save, restore, unlock of one process |
//! | [`server`] | connections |
//! | [`usage`] | utilisation of each GPU |
//! | [`memory`] | device memory, as sealed memory files |
//! | [`node`] | /proc and cgroups |

#![forbid(unsafe_code)]

mod checkpoint;
mod config;
mod driver;
mod ledger;
mod limits;
mod memory;
mod node;
mod server;
mod usage;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    match server::run(config::Config::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            server::complain(&error);
            ExitCode::FAILURE
        }
    }
}
