//! Owns the processes and mounts of a private world; see `affinode_e2e::keeper`.

use std::{path::PathBuf, process::ExitCode};

fn main() -> ExitCode {
    let Some(world) = std::env::args_os().nth(1).map(PathBuf::from) else {
        return ExitCode::from(2);
    };
    match affinode_e2e::keeper::serve(&world) {
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
