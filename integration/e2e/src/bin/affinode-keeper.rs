//! The supervisor of a testbed. It owns the testbed's processes and mounts. See
//! `affinode_e2e::supervisor`.

use std::{path::PathBuf, process::ExitCode};

use affinode_e2e::supervisor::{self, Scope};

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    let Some(world) = arguments.next().map(PathBuf::from) else {
        return ExitCode::from(2);
    };
    match supervisor::serve(&world, Scope::of(arguments.next().as_deref())) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report(&error);
            ExitCode::FAILURE
        }
    }
}

#[expect(clippy::print_stderr, reason = "the one place where it speaks")]
fn report(error: &anyhow::Error) {
    eprintln!("affinode-keeper: {error:#}");
}
