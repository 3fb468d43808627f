//! Accepts the connections of clients. Each connection has a thread, which ends with its client.

use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{fs, fs::File, thread};

use affinode_sim_protocol::{Packet, Reply, Request, code};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::stat::fstat;
use rustix::pty::OpenptFlags;

use crate::checkpoint;
use crate::config::Config;
use crate::driver::{Answer, Driver, Process, lock};
use crate::usage;

const MAX_CONNECTIONS: usize = 1024;
const STACK_BYTES: usize = 256 * 1024;

/// Reason why the daemon did not start, or why it ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another daemon listens at this socket.
    #[error("another simulated GPU already listens on {0}; stop it, or choose another --socket")]
    InUse(String),
    #[error("cannot listen on {path}; choose a --socket in a folder that you can write")]
    Listen { path: String, source: io::Error },
    #[error("cannot {what}")]
    System { what: &'static str, source: io::Error },
}

/// Prints an error with its causes.
pub fn complain(error: &dyn std::error::Error) {
    let mut line = format!("affinode-sim-gpud: {error}");
    let mut cause = error.source();
    while let Some(error) = cause {
        line.push_str(&format!(": {error}"));
        cause = error.source();
    }
    let _ = writeln!(io::stderr(), "{line}");
}

pub fn run(config: Config) -> Result<(), Error> {
    // Each object of VRAM is an open file.
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE) {
        let _ = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
    }
    let listener = listen(&config.socket)?;
    let driver = Arc::new(Driver::new(config));
    let sampler = Arc::clone(&driver);
    let sample = move || {
        loop {
            sampler.sample(usage::now_ns());
            thread::sleep(usage::PERIOD);
        }
    };
    start(sample).map_err(|source| Error::System { what: "start a thread", source })?;
    let _ = writeln!(io::stdout(), "ready");
    let connections = Arc::new(AtomicUsize::new(0));
    loop {
        let Ok(client) = listener.accept() else {
            // The usual cause of this error is that the daemon has no free descriptors. Descriptors
            // become free when a client ends.
            thread::sleep(usage::PERIOD);
            continue;
        };
        if connections.fetch_add(1, Ordering::Relaxed) >= MAX_CONNECTIONS {
            connections.fetch_sub(1, Ordering::Relaxed);
            continue;
        }
        let (driver, served) = (Arc::clone(&driver), Arc::clone(&connections));
        let serving = start(move || {
            serve(&driver, client);
            served.fetch_sub(1, Ordering::Relaxed);
        });
        if serving.is_err() {
            connections.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

fn start(work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new().stack_size(STACK_BYTES).spawn(work).map(drop)
}

fn listen(path: &Path) -> Result<Packet, Error> {
    let failed = |source| Error::Listen { path: path.display().to_string(), source };
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(failed)?;
    }
    if Packet::connect(path).is_ok() {
        return Err(Error::InUse(path.display().to_string()));
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    let listener = Packet::listen(path).map_err(failed)?;
    // Any user of the node may use the GPU, as with /dev/nvidia*.
    fs::set_permissions(path, fs::Permissions::from_mode(0o666)).map_err(failed)?;
    Ok(listener)
}

fn serve(driver: &Arc<Driver>, client: Packet) {
    let Ok(peer) = client.peer() else { return };
    let Ok(pid) = u32::try_from(peer.pid()) else { return };
    let client = Arc::new(client);
    let mut process: Option<Arc<Process>> = None;
    while let Ok(Some((request, fd))) = client.receive::<Request>() {
        let answer = match request {
            Request::Attach if process.is_none() => driver
                .attach(pid, peer.uid())
                .map_err(|_| code::OPERATING_SYSTEM)
                .map(|(attached, page)| {
                    process = Some(attached);
                    (Reply::Attached { gpus: driver.config.gpu_infos() }, Some(page))
                }),
            Request::Control { tid } => {
                let Some(process) = driver.process(pid) else { return };
                // The thread is registered before the reply is sent, because an order may follow as
                // soon as the process has the reply.
                let mut control = lock(&process.control);
                if control.is_none() && client.send(&Reply::Done, None).is_ok() {
                    *control = Some((client, tid));
                }
                return;
            }
            Request::Checkpoint { pid: target, operation } => {
                checkpoint::perform(driver, pid, peer.uid(), target, &operation)
                    .map(|reply| (reply, None))
            }
            Request::Snapshot => Ok((driver.snapshot(pid), None)),
            Request::Memory { gpu } => driver.memory(process.as_ref().map(|it| it.id), gpu),
            Request::LimitMemory(limit) => driver.limit_memory(peer.uid(), limit),
            Request::Limits => Ok((driver.limits(), None)),
            request => match &process {
                Some(process) => handle(driver, process, request, fd),
                None => Err(code::NOT_INITIALIZED),
            },
        };
        let (reply, memory) = answer.unwrap_or_else(|error| (Reply::Error(error), None));
        if client.send(&reply, memory.as_ref().map(|memory| memory.as_fd())).is_err() {
            break;
        }
    }
    if let Some(process) = process {
        driver.detach(&process);
    }
}

/// Handles the requests that only a CUDA process can make.
fn handle(
    driver: &Arc<Driver>,
    process: &Process,
    request: Request,
    fd: Option<OwnedFd>,
) -> Answer {
    let client = process.id;
    match request {
        Request::CreateContext { gpu } => driver.create_context(client, gpu),
        Request::DestroyContext { gpu } => {
            driver.state().ledger.destroy_context(client, gpu);
            Ok((Reply::Done, None))
        }
        Request::SetStackLimit { gpu, bytes } => driver.set_stack_limit(client, gpu, bytes),
        Request::Allocate { gpu, bytes } => driver.allocate(client, gpu, bytes),
        Request::Free { object } => driver.free(client, object),
        Request::Export { object } => export(driver, process, object),
        Request::Import => driver.import(client, name(&fd.ok_or(code::INVALID_VALUE)?)?),
        Request::IpcExport { object } => driver.ipc_export(client, object),
        Request::IpcOpen { token } => driver.ipc_open(client, &token),
        _ => Err(code::INVALID_VALUE),
    }
}

/// Exports an object as a descriptor. As with the real driver, the descriptor refers to a character
/// device that cannot be mapped. Here it is one end of a pseudoterminal, whose number identifies
/// the object. The daemon keeps the other end, and a thread reads from it. This read fails when the
/// last copy of the exported descriptor is closed.
fn export(driver: &Arc<Driver>, process: &Process, object: u64) -> Answer {
    let (ours, theirs) = terminal().map_err(|_| code::OPERATING_SYSTEM)?;
    let name = name(&theirs)?;
    driver.export(process.id, object, name)?;
    let (watcher, mut ours) = (Arc::clone(driver), File::from(ours));
    let watch = start(move || {
        let _ = io::copy(&mut ours, &mut io::sink());
        // Another terminal can get the same name only after the daemon's end is closed as well.
        watcher.close_export(name);
    });
    match watch {
        Ok(()) => Ok((Reply::Done, Some(Arc::new(theirs)))),
        Err(_) => {
            driver.close_export(name);
            Err(code::OUT_OF_MEMORY)
        }
    }
}

fn terminal() -> rustix::io::Result<(OwnedFd, OwnedFd)> {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let ours = rustix::pty::openpt(flags)?;
    rustix::pty::unlockpt(&ours)?;
    let theirs = rustix::pty::ioctl_tiocgptpeer(&ours, flags)?;
    Ok((ours, theirs))
}

/// Returns the name of an exported descriptor, which is a number. It combines the device number of
/// the file system and the inode number of the descriptor's pseudoterminal. The name is unique
/// while one end of the pseudoterminal is open. It includes the file system, because each container
/// has its own file system for pseudoterminals.
fn name(fd: &impl AsFd) -> Result<u64, i32> {
    let stat = fstat(fd).map_err(|_| code::OPERATING_SYSTEM)?;
    let is_device = stat.st_mode & nix::libc::S_IFMT == nix::libc::S_IFCHR;
    if is_device { Ok(stat.st_dev << 32 | stat.st_ino) } else { Err(code::INVALID_VALUE) }
}
