//! `affinode-sim-gpud`: plays the kernel driver of the simulated GPU.
//!
//! ```text
//! affinode-sim-gpud [--socket /run/affinode-sim/gpu.sock] [--gpus 1] [--vram-mib 1024]
//!     [--name "NVIDIA Simulated H200"] [--context-mib 16] [--checkpoint-extra-mib 16]
//!     [--checkpoint-fixed-ms 0] [--checkpoint-gib-per-s 0] [--restore-fixed-ms 0] [--restore-gib-per-s 0]
//! ```
//!
//! Prints one line, `ready`, when it listens. It runs as root where processes of
//! several users or containers are to share the GPU. It ends on SIGTERM and SIGINT
//! and takes the contents of every simulated GPU with it.
//!
//! | module | does |
//! | --- | --- |
//! | [`ledger`] | who holds how much VRAM; pure |
//! | [`driver`] | the state of the node, and what a request does to it |
//! | [`checkpoint`] | lock, save, restore, unlock of one process |
//! | [`server`] | connections |
//! | [`usage`] | how busy each GPU was |
//! | [`memory`] | device memory, as sealed memory files |
//! | [`node`] | /proc and cgroups |

#![forbid(unsafe_code)]

mod checkpoint;
mod config;
mod driver;
mod ledger;
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
