//! The copier: a child process of the controller, one for each GPU that has offloaded processes.
//!
//! The driver takes at least a third of a second to restore a context, and meanwhile no CUDA call
//! of that process returns. The copier has a context of its own. While the driver restores a
//! process, the copier creates the process's memory, copies the content into it and exports it to
//! the process. If the process was prefaulted (its host memory was prepared before the offload),
//! the copier also copies its memory out while the driver makes the checkpoint.
//!
//! | module | content |
//! | --- | --- |
//! | `serve` | the loop: messages, and the order of work |
//! | `session` | one process, from its memory file to the end of its fill (copy back into VRAM) |
//! | `copy_out` | pieces that one process has exported to be copied out |
//! | `dedup`, `host_budget` | content that several processes have; host memory for it |
//! | `socket` | frames, each with at most one file descriptor |
//! | `sys` | the driver, and memory files |
//!
//! The copier owns nothing that a process needs. The content is in a memory file of the process, or
//! still in device memory of which the process has descriptors. In both cases the process can copy
//! it without a copier. The copier may therefore end at any moment. The controller ends it when the
//! VRAM of its context is needed.
//!
//! Input from agents is untrusted. The controller limits the sizes that a process may announce. The
//! memory file must be sealed, with all its pages allocated. The copier does not access the mapping
//! of the file: the GPU copies the content.

// A function that fits on one screen can be read at once.
#![cfg_attr(not(test), deny(clippy::too_many_lines))]

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

/// Environment variable with the name of the driver's library.
pub const LIBRARY_ENV: &str = "AFFINODE_COPIER_LIBRARY";

/// Runs the command `copier UUID`, with the controller's socket on standard input, until the
/// controller closes that socket.
///
/// # Errors
/// [`CopierError`]: the GPU, the controller's socket or one of its frames cannot be used.
pub fn main(args: impl Iterator<Item = OsString>) -> Result<(), CopierError> {
    let _ = tracing_subscriber::fmt()
        .with_writer(io::stderr)
        .with_ansi(false)
        .without_time()
        .with_target(false)
        .try_init();
    // Without its controller the copier is useless. The kernel ends it even while the driver
    // blocks.
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    let library = std::env::var(LIBRARY_ENV).unwrap_or_else(|_| "libcuda.so.1".into());
    let uuid = args.last().unwrap_or_default().to_string_lossy().into_owned();
    let controller = io::stdin().as_fd().try_clone_to_owned()?;
    serve::run(controller, &library, &uuid)
}
