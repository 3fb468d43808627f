//! The shim's command `start`: starts the stock shim, then a proxy in front of it.
//!
//! ```text
//! translate stdin ─> stock start ─> its address ─> ours ─┬─ no listener ──> bind, spawn the daemon ─┐
//!                                                        └─ our group's proxy answers: join ────────┤
//!                                       answer with our address <─ note and `address` written <─────┘
//! ```
//!
//! containerd reads stdout and stderr together, so `start` prints only the reply. If `start` fails
//! after it has started the stock shim, it ends the stock shim.

use std::ffi::OsString;
use std::io::{self, ErrorKind, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::address::{AddressError, SocketAddress};
use crate::bootstrap::{BootstrapInput, BootstrapReply, BootstrapReplyError};
use crate::bundle::{Bundle, BundleError, BundleNote};
use crate::cgroup;
use crate::cli::ShimFlags;
use crate::info::read_stdin;
use crate::options::OptionsError;
use crate::probe::{self, ProbedPeer, ShimIdentity};
use crate::process;
use crate::rpc::RpcCaller;
use crate::runc_shim::{RuncShim, RuncShimError};
use crate::spec;

/// Time limit for the reply of the proxy that serves the container's group.
const PROXY_REPLY_TIMEOUT: Duration = Duration::from_secs(5);
/// Number of attempts to remove a stale socket and bind a new one.
const ATTEMPTS: usize = 5;
/// Maximum size of the message that the daemon sends when it is ready to serve.
const READY_MAX_BYTES: u64 = 4096;

/// Reason why `start` failed.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The working folder or stdin could not be read.
    #[error(
        "cannot read this command's stdin, or cannot find its working folder; containerd provides \
         both"
    )]
    Input(#[source] io::Error),
    /// The runtime handler's options are invalid.
    #[error("cannot use the options of the runtime handler in containerd's configuration")]
    Options(#[from] OptionsError),
    /// The stock shim could not be found or started.
    #[error("cannot start the stock shim")]
    Stock(#[from] RuncShimError),
    /// The stock shim's reply has an unknown form.
    #[error("cannot parse the output of containerd-shim-runc-v2")]
    Answer(#[from] BootstrapReplyError),
    /// The proxy cannot serve in front of this address.
    #[error("cannot derive the proxy's address from the stock shim's address")]
    Address(#[from] AddressError),
    /// The proxy's socket could not be bound.
    #[error("cannot listen on {address}")]
    Bind {
        /// Address of the proxy.
        address: String,
        /// Error of the system call.
        source: io::Error,
    },
    /// Another proxy listens at this address and does not reply.
    #[error("the proxy at {address}, which serves the other containers of the pod, does not reply")]
    Silent {
        /// Address of that proxy.
        address: String,
        /// Error of the probe.
        source: io::Error,
    },
    /// The daemon could not be started.
    #[error("cannot start the proxy")]
    Spawn(#[source] io::Error),
    /// The daemon reported an error before it was ready to serve.
    #[error("the proxy did not start serving: {0}")]
    Daemon(String),
    /// The daemon could not be moved to its cgroup.
    #[error("cannot join cgroup {path} (ShimCgroup of the runtime handler)")]
    Cgroup {
        /// Path of the cgroup.
        path: String,
        /// Error of the system call.
        source: io::Error,
    },
    /// A file of the bundle could not be written.
    #[error("cannot record the proxy's address in the bundle")]
    Bundle(#[from] BundleError),
}

/// Runs the command `start`. Returns the bytes to print on stdout.
pub fn start(flags: &ShimFlags, argv: &[OsString]) -> Result<Vec<u8>, StartError> {
    let stdin = read_stdin().map_err(StartError::Input)?;
    let bundle = Bundle::new(std::env::current_dir().map_err(StartError::Input)?);
    // A spec that cannot be read is not an error here, because the stock shim reports it.
    let spec = bundle.read_spec().ok();
    let cgroups_path = spec.as_ref().and_then(spec::cgroups_path);
    let (stdin, shim_cgroup) =
        BootstrapInput::parse(&stdin, &flags.namespace, &flags.id).translate(cgroups_path)?;
    let (stock_pid, stdout) = RuncShim::find(&flags.publish_binary)?.run(argv, &stdin)?;
    let answer = BootstrapReply::parse(&stdout)?;
    let upstream = SocketAddress::parse(answer.address())?;
    let version = answer.task_version();

    let stand = || -> Result<Vec<u8>, StartError> {
        let listen = upstream.proxy()?;
        let daemon = ShimDaemon {
            flags,
            listen: &listen,
            upstream: &upstream,
            version,
            shim_cgroup: shim_cgroup.as_deref(),
            bundle: &bundle,
        };
        let identity = daemon.join_or_spawn()?;
        bundle.write_note(&BundleNote {
            address: listen.to_string(),
            upstream: upstream.to_string(),
            shim: identity,
        })?;
        bundle.rewrite_address(&listen.to_string())?;
        Ok(answer.with_address(&listen.to_string())?)
    };
    stand().inspect_err(|_| abandon(&upstream, stock_pid, version, &flags.id))
}

struct ShimDaemon<'a> {
    flags: &'a ShimFlags,
    listen: &'a SocketAddress,
    upstream: &'a SocketAddress,
    version: i64,
    shim_cgroup: Option<&'a str>,
    bundle: &'a Bundle,
}

impl ShimDaemon<'_> {
    /// Joins the group's running proxy, or starts a new one. Returns the identity of the stock shim
    /// behind it.
    fn join_or_spawn(&self) -> Result<ShimIdentity, StartError> {
        let failed = |source| StartError::Bind { address: self.listen.to_string(), source };
        for _ in 0..ATTEMPTS {
            match bind(self.listen) {
                Ok(listener) => {
                    let inode = self.listen.inode();
                    return self.spawn(listener).inspect_err(|_| self.listen.unlink(inode));
                }
                Err(error) if error.kind() == ErrorKind::AddrInUse => {}
                Err(error) => return Err(failed(error)),
            }
            let inode = self.listen.inode();
            match probe::ask(self.listen, PROXY_REPLY_TIMEOUT) {
                ProbedPeer::Alive(identity)
                    if Some(identity.socket_inode) == self.upstream.inode() =>
                {
                    return Ok(identity);
                }
                // There is no proxy, or a proxy for an earlier stock shim, which will end.
                ProbedPeer::Alive(_) | ProbedPeer::Dead => {
                    clear(self.listen, inode).map_err(failed)?
                }
                ProbedPeer::Silent(source) => {
                    return Err(StartError::Silent { address: self.listen.to_string(), source });
                }
            }
        }
        Err(failed(ErrorKind::AddrInUse.into()))
    }

    fn spawn(&self, listener: UnixListener) -> Result<ShimIdentity, StartError> {
        let stderr =
            crate::log::open_pipe(self.bundle.path()).map_or_else(|_| Stdio::null(), Stdio::from);
        let version = self.version.to_string();
        let (listen, upstream) = (self.listen.to_string(), self.upstream.to_string());
        // The daemon runs under its full path: when rke2's unit stops, rke2 ends processes that
        // were started under the name of containerd's binary.
        let mut command = Command::new(std::env::current_exe().map_err(StartError::Spawn)?);
        command.args(["-namespace", &self.flags.namespace, "-id", &self.flags.id]);
        command.args(["-address", &self.flags.address, "-listen", &listen]);
        command.args(["-upstream", &upstream, "-task-version", &version]);
        if self.flags.debug {
            command.arg("-debug");
        }
        let mut child = command
            .arg("serve")
            .stdin(OwnedFd::from(listener))
            .stdout(Stdio::piped())
            .stderr(stderr)
            .spawn()
            .map_err(StartError::Spawn)?;
        let ready = || -> Result<ShimIdentity, StartError> {
            process::adjust_oom_score(child.id()).map_err(StartError::Spawn)?;
            if let Some(path) = self.shim_cgroup {
                cgroup::join(path, child.id())
                    .map_err(|source| StartError::Cgroup { path: path.to_owned(), source })?;
            }
            let mut words = String::new();
            if let Some(stdout) = child.stdout.take() {
                stdout
                    .take(READY_MAX_BYTES)
                    .read_to_string(&mut words)
                    .map_err(StartError::Spawn)?;
            }
            serde_json::from_str(&words).map_err(|_| StartError::Daemon(words))
        };
        let result = { ready }();
        if result.is_err() {
            // The daemon has ended already in most cases.
            let _ = child.kill();
            let _ = child.wait();
        }
        result
    }
}

/// Binds the proxy's socket, with the permissions that the stock shim gives its own socket.
fn bind(address: &SocketAddress) -> io::Result<UnixListener> {
    let listener = UnixListener::bind(address.path())?;
    std::fs::set_permissions(address.path(), std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Removes a socket that no process listens on, under the lock of its folder. If another `start`
/// has bound a new socket at the path meanwhile, the inode differs, and the new socket stays.
fn clear(address: &SocketAddress, inode: Option<u64>) -> io::Result<()> {
    let folder = std::fs::File::open(address.path().parent().unwrap_or(Path::new("/")))?;
    folder.lock()?;
    address.unlink(inode);
    Ok(())
}

/// Ends the stock shim at `address` if this run of `start` has started it. `stock_pid` is the pid
/// of the process that ran the stock shim's `start`. If that process created the listener at
/// `address`, the stock shim is new and has no containers yet. Otherwise the stock shim is left
/// running.
fn abandon(address: &SocketAddress, stock_pid: u32, version: i64, id: &str) {
    let inode = address.inode();
    let maker = || -> io::Result<i32> {
        let stream = UnixStream::connect(address.path())?;
        let probe = rustix::net::sockopt::socket_peercred(&stream)?;
        Ok(probe.pid.as_raw_nonzero().get())
    };
    match maker() {
        Ok(pid) if u32::try_from(pid) == Ok(stock_pid) => {}
        // The stock shim ended by itself and left its socket.
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
            return address.unlink(inode);
        }
        // The listener is the stock shim of another container, or not a stock shim.
        _ => return,
    }
    let Ok(mut caller) = RpcCaller::stock(address.path(), version) else {
        return address.unlink(inode);
    };
    let process = caller.shim_pid(id).ok().and_then(|pid| Some((pid, process::start_ticks(pid)?)));
    if caller.shut_down(id).is_err()
        && let Some((pid, began)) = process
    {
        // An error of this kill is ignored, because the caller reports the error that made the kill
        // necessary.
        let _ = process::kill(pid, began, PROXY_REPLY_TIMEOUT);
    }
    address.unlink(inode);
}
