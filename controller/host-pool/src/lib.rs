//! The host pool: a child process of the controller, one for the node. It allocates the host memory
//! into which processes copy their VRAM, so that this memory is charged to Affinode's memory cgroup
//! and not to the container's.
//!
//! | module | content |
//! | --- | --- |
//! | `serve` | the loop of the main thread: the controller's orders |
//! | `pool` | the attached processes, and the threads that read and carry out their requests |
//! | `client` | the connection of one process |
//! | `queue` | the order in which requests are carried out |
//! | `memory_file` | the memory file of one process, and its limit |
//! | `disk_folder` | the folder for disk files, and their maximum size |
//! | `disk_file`, `disk_writers` | the disk file of one process, and the threads that write it |
//! | `cgroup` | the memory cgroup of the host pool |
//! | `socket` | frames on packet sockets |
//! | `sys` | the system calls that need `unsafe` |
//!
//! The host pool owns nothing that a process needs. Each process maps its own memory file, and its
//! content lives as long as this mapping. Of content on disk, the process has the file and the key.
//! The host pool may therefore end at any moment.
//!
//! Input from agents is untrusted. Each memory file is on a file system of its own, whose size is
//! the allowed amount. The kernel enforces this limit. Each process has a thread that reads its
//! socket, so no process can block another one.

// A function that fits on one screen can be read at once.
#![cfg_attr(not(test), deny(clippy::too_many_lines))]

mod cgroup;
mod client;
mod disk_file;
mod disk_folder;
mod disk_writers;
mod ended_files;
mod memory_file;
mod open_files;
mod pool;
mod queue;
mod serve;
mod socket;
mod sys;
#[cfg(test)]
mod tests;

pub use cgroup::{cgroup_path, cgroup_path_in, used_bytes};
pub use disk_folder::DiskError;
pub use memory_file::CreateError;

use std::{ffi::OsString, io, os::fd::AsFd, path::PathBuf};

use affinode_proto::wire::message::FrameError;

/// Reason why the host pool has ended.
#[derive(Debug, thiserror::Error)]
pub enum HostPoolError {
    /// The command line does not name a cgroup.
    #[error(
        "the command host-pool needs the absolute path of a memory cgroup, and optionally the \
         absolute path of a folder on disk and the maximum size of its files in bytes"
    )]
    Usage,
    /// The host pool cannot move itself to its cgroup.
    #[error("cannot {step} {}", path.display())]
    Cgroup {
        /// The step that failed, as a verb.
        step: &'static str,
        /// Folder or file of the cgroup.
        path: PathBuf,
        /// Error of the system call.
        #[source]
        source: io::Error,
    },
    /// The kernel does not count the memory of the cgroup.
    #[error(
        "the kernel does not count the memory of the cgroup {}: enable the memory controller in its \
         parent",
        path.display()
    )]
    Uncounted {
        /// Folder of the cgroup.
        path: PathBuf,
        /// Error of the attempt to read the memory's size.
        #[source]
        source: io::Error,
    },
    /// The kernel or a sandbox does not permit memory files.
    #[error(transparent)]
    File(#[from] CreateError),
    /// The controller's socket has failed.
    #[error("the host pool's socket to the controller failed")]
    Io(#[from] io::Error),
    /// The controller has sent an invalid frame.
    #[error("the controller sent an invalid frame")]
    Frame(#[from] FrameError),
}

/// Runs the command `host-pool CGROUP [FOLDER MAX_BYTES]`, with the controller's socket on standard
/// input, until the controller closes that socket. `CGROUP` is the folder of the memory cgroup.
/// `FOLDER` is the folder for disk files, which have at most `MAX_BYTES` in all.
///
/// # Errors
/// [`HostPoolError`]: the cgroup, the controller's socket or one of its frames cannot be used.
pub fn main(mut args: impl Iterator<Item = OsString>) -> Result<(), HostPoolError> {
    let _ = tracing_subscriber::fmt()
        .with_writer(io::stderr)
        .with_ansi(false)
        .without_time()
        .with_target(false)
        .try_init();
    // Without its controller the host pool is useless. The kernel ends it even while it allocates.
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    let mut folder = || match args.next().map(PathBuf::from) {
        Some(path) if path.is_absolute() => Ok(Some(path)),
        Some(_) => Err(HostPoolError::Usage),
        None => Ok(None),
    };
    let cgroup = folder()?.ok_or(HostPoolError::Usage)?;
    let disk = match folder()? {
        Some(path) => {
            let max_bytes = args.next().and_then(|bytes| bytes.to_str()?.parse().ok());
            Some((path, max_bytes.ok_or(HostPoolError::Usage)?))
        }
        None => None,
    };
    cgroup::enter(&cgroup)?;
    // If this node does not permit memory files, the controller must know it before an offload.
    drop(memory_file::MemoryFile::create()?);
    let disk = disk.and_then(|(path, max_bytes)| {
        // Without the disk, content stays in host memory.
        let failed = |error: &DiskError| {
            let error: &dyn std::error::Error = error;
            tracing::warn!(error, "no content is stored on disk");
        };
        disk_folder::DiskFolder::open(&path, max_bytes).inspect_err(failed).ok()
    });
    let controller = io::stdin().as_fd().try_clone_to_owned()?;
    serve::run(controller, &pool::Pool::start(pool::LATE_ALLOW, disk)?)
}
