//! The copier: one process per GPU with offloaded processes, a child of the controller.
//!
//! The driver restores a context at its own pace, a third of a second and more, and no call of the
//! restored process passes meanwhile. The copier has a context of its own: beside that restore it
//! creates the memory of the restored process, copies the content in and exports it to the process.
//! For a process that was prefaulted, it copies the memory out beside the checkpoint.
//!
//! | module | content |
//! | --- | --- |
//! | `serve` | the loop: messages, and whose turn it is |
//! | `session` | one process, from its memory file to the end of its fill |
//! | `copy_out` | what one process has exported to be copied out |
//! | `dedup`, `host_budget` | content that processes have in common; host memory for it |
//! | `socket` | frames with a descriptor |
//! | `sys` | the driver, and memory files |
//!
//! The copier owns nothing that a process needs: the content is in a memory file of its process,
//! or still in device memory that the process has descriptors of, and the process copies it by
//! itself without a copier. So the copier may die at any moment, and the controller
//! ends it whenever the VRAM of its context is needed.
//!
//! What agents send is hostile until proven: sizes are bounded by what the controller knows of the
//! process, and the file must be sealed with all its pages. The device copies the content.

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
    // A copier without its controller is of no use, also while the driver blocks it.
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    let library = std::env::var(LIBRARY_ENV).unwrap_or_else(|_| "libcuda.so.1".into());
    let uuid = args.last().unwrap_or_default().to_string_lossy().into_owned();
    let controller = io::stdin().as_fd().try_clone_to_owned()?;
    serve::run(controller, &library, &uuid)
}
