//! `containerd-shim-affinode-v1`: parses, runs, exits. The controller of a node
//! is named in this file alone.

use std::ffi::OsString;
use std::process::ExitCode;

fn main() -> ExitCode {
    affinode_shim::run(std::env::args_os(), controller)
}

fn controller(args: Vec<OsString>) -> ExitCode {
    affinode_controller::run(args.into_iter().skip(1))
}
