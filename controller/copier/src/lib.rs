//! The copier: one process for each GPU from which somebody is away, a child of the controller.
//!
//! The driver restores a context at its own pace, a third of a second and more, and no call of the
//! restored process goes through meanwhile. This process has a context of its own: it makes the
//! memory of who comes home, copies the content into it and hands it over, all beside that restore.
//! Where it was told ahead who will leave, it copies that one's memory out, beside its checkpoint.
//!
//! | module | what |
//! | --- | --- |
//! | `serve` | the loop: who has a turn |
//! | `client` | one process, from its memory file to the end of its fill |
//! | `taking` | what one process has handed over to be copied out |
//! | `socket` | frames with a descriptor |
//! | `sys` | the driver, and files in memory |
//!
//! It owns nothing that anybody needs: the content is in a memory file of the process it belongs
//! to, or still in device memory that the process has descriptors of, and the process copies it by
//! itself where there is no copier. So it may die at any moment, and it is
//! ended whenever its VRAM (a context) is wanted.
//!
//! What agents send is hostile until proven: sizes are bounded by what the controller knows of the
//! process, the file must be a sealed one with all its pages, and no byte of it is read here; the
//! device copies it.

mod clock;
mod copy_out;
mod dedup;
mod host_budget;
mod serve;
mod session;
pub mod socket;
mod sys;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
mod tests;

pub use serve::CopierError;

use std::{ffi::OsString, io, os::fd::AsFd};

/// The environment variable that names the driver's library.
pub const LIBRARY_ENV: &str = "AFFINODE_COPIER_LIBRARY";

/// The command `copier UUID`: the controller is on standard input. Serves until it hangs up.
///
/// # Errors
/// [`CopierError`]
pub fn main(args: impl Iterator<Item = OsString>) -> Result<(), CopierError> {
    let _ = tracing_subscriber::fmt()
        .with_writer(io::stderr)
        .with_ansi(false)
        .without_time()
        .with_target(false)
        .try_init();
    // Without its controller it is of no use, also while the driver keeps it from noticing.
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    let library = std::env::var(LIBRARY_ENV).unwrap_or_else(|_| "libcuda.so.1".into());
    let uuid = args.last().unwrap_or_default().to_string_lossy().into_owned();
    let controller = io::stdin().as_fd().try_clone_to_owned()?;
    serve::run(controller, &library, &uuid)
}
