//! `containerd-shim-affinode-v1`: parses the command line and runs it. Only this file and the main
//! file of `affinode-runtime` use the crates of the controller, the copier and the host pool.

use std::ffi::OsString;
use std::process::ExitCode;

fn main() -> ExitCode {
    affinode_shim::run(
        std::env::args_os(),
        &[("controller", controller), ("copier", copier), ("host-pool", host_pool)],
        affinode_controller::start_settings_of,
    )
}

fn controller(args: Vec<OsString>) -> ExitCode {
    affinode_controller::run(args.into_iter().skip(1))
}

fn copier(args: Vec<OsString>) -> ExitCode {
    match affinode_copier::main(args.into_iter().skip(1)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => affinode_shim::fail(&affinode_shim::report(&error)),
    }
}

fn host_pool(args: Vec<OsString>) -> ExitCode {
    match affinode_host_pool::main(args.into_iter().skip(1)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => affinode_shim::fail(&affinode_shim::report(&error)),
    }
}
