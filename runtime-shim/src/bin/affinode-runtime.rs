//! `affinode-runtime`: the OCI runtime that Podman and CRI-O run in place of crun or runc.

use std::process::ExitCode;

fn main() -> ExitCode {
    affinode_shim::oci::run(
        std::env::args_os(),
        affinode_controller::start_settings_of,
        affinode_controller::oci_runtime_of,
    )
}
