//! The daemon of a group (pod): accepts containerd's connections, proxies each, and ends when the
//! stock shim ends.
//!
//! ```text
//! start ──socket on stdin──> Joining ──stock shim answered──> Serving ──┬─ stock shim gone ─> Draining ─> end
//!                               └─ error on stdout, end                 └─ SIGTERM, SIGINT ─> end
//! ```
//!
//! At the end, the daemon first removes its socket and then closes its clients' connections. So a
//! client whose connection was closed cannot connect to the address again.

use std::io;
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::{JoinSet, LocalSet};
use tracing::level_filters::LevelFilter;
use tracing::{debug, info, warn};

use crate::address::{AddressError, SocketAddress};
use crate::cli::ShimFlags;
use crate::containers::Containers;
use crate::frame::read_header;
use crate::probe::{QUESTION, ShimIdentity};
use crate::process::start_ticks;
use crate::proxy;
use crate::rpc::{RpcCaller, RpcError};
use crate::{StartSettingsOf, report};

/// Maximum time for which the daemon still delivers the stock shim's last replies to clients.
const DRAIN: Duration = Duration::from_secs(1);
/// Maximum time for which the daemon withdraws the last containers from the controller, before it
/// ends.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);

/// Reason why the daemon could not start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// An address that cannot be parsed.
    #[error("cannot use the socket address of the proxy or of the stock shim")]
    Address(#[from] AddressError),
    /// The stock shim does not reply.
    #[error("cannot connect to the stock shim at {address}")]
    Stock {
        /// Address of the stock shim.
        address: String,
        /// Error of the ttrpc call.
        source: RpcError,
    },
    /// The stock shim ended while the daemon was starting.
    #[error("the stock shim exited right after its start")]
    Gone,
    /// A system call of the setup failed.
    #[error("cannot set up the proxy between containerd and the stock shim")]
    Io(#[from] io::Error),
}

struct JoinedTask {
    listen: SocketAddress,
    upstream: SocketAddress,
    identity: ShimIdentity,
    listener: std::os::unix::net::UnixListener,
    /// An idle connection to the stock shim. When it ends, the stock shim has ended.
    watch: std::os::unix::net::UnixStream,
}

/// The command `serve`: connects to the stock shim, reports on stdout to `start` that it is ready,
/// then serves.
pub fn main(flags: &ShimFlags, start_settings_of: StartSettingsOf) -> ExitCode {
    let level = if flags.debug { LevelFilter::DEBUG } else { LevelFilter::INFO };
    crate::log::init(level);
    // The daemon gets its own session, so that a signal to the process group of `start` does not
    // end the daemon.
    let _ = rustix::process::setsid();
    let joined = match join(flags) {
        Ok(joined) => joined,
        Err(error) => {
            let _ = crate::print(report(&error).as_bytes());
            return ExitCode::FAILURE;
        }
    };
    match begin(joined, flags, start_settings_of) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            warn!("{}", report(&error));
            ExitCode::FAILURE
        }
    }
}

fn join(flags: &ShimFlags) -> Result<JoinedTask, ServeError> {
    let listen = SocketAddress::parse(&flags.listen)?;
    let upstream = SocketAddress::parse(&flags.upstream)?;
    let listener = io::stdin().as_fd().try_clone_to_owned()?;
    let listener = std::os::unix::net::UnixListener::from(listener);
    let failed = |source| ServeError::Stock { address: upstream.to_string(), source };
    let socket_inode = upstream.inode().ok_or(ServeError::Gone)?;
    let version = flags.task_version.parse().unwrap_or(2);
    let mut caller = RpcCaller::stock(upstream.path(), version).map_err(failed)?;
    let pid = caller.shim_pid(&flags.id).map_err(failed)?;
    let identity = ShimIdentity {
        pid,
        start_ticks: start_ticks(pid).ok_or(ServeError::Gone)?,
        socket_inode,
        proxy_inode: listen.inode().unwrap_or(0),
    };
    let watch = caller.into_stream();
    listener.set_nonblocking(true)?;
    watch.set_nonblocking(true)?;
    Ok(JoinedTask { listen, upstream, identity, listener, watch })
}

fn begin(
    joined: JoinedTask,
    flags: &ShimFlags,
    start_settings_of: StartSettingsOf,
) -> Result<(), ServeError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(4)
        .thread_keep_alive(Duration::from_secs(1))
        .thread_stack_size(512 << 10)
        .build()?;
    let local = LocalSet::new();
    local.block_on(&runtime, async {
        let signals = SignalStream::new()?;
        // `start` reads stdout to its end, then replies to containerd.
        crate::print(&serde_json::to_vec(&joined.identity).map_err(io::Error::from)?)?;
        let null = std::fs::File::options().read(true).write(true).open("/dev/null")?;
        rustix::stdio::dup2_stdin(&null).map_err(io::Error::from)?;
        rustix::stdio::dup2_stdout(&null).map_err(io::Error::from)?;
        serve(joined, Containers::new(&flags.namespace, start_settings_of), flags, signals).await
    })
}

async fn serve(
    joined: JoinedTask,
    containers: Containers,
    flags: &ShimFlags,
    mut signals: SignalStream,
) -> Result<(), ServeError> {
    let JoinedTask { listen, upstream, identity, listener, watch } = joined;
    let listener = UnixListener::from_std(listener)?;
    let mut watch = UnixStream::from_std(watch)?;
    let containers = Rc::new(containers);
    let mut clients = JoinSet::new();
    info!(
        namespace = flags.namespace,
        id = flags.id,
        stock_pid = identity.pid,
        "proxy {listen}: serving, stock shim at {upstream}"
    );
    let stock_gone = loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    let (upstream, containers) = (upstream.clone(), Rc::clone(&containers));
                    clients.spawn_local(client(stream, upstream, identity, containers));
                }
                Err(error) => {
                    warn!(
                        "proxy: cannot accept the connection of a client, and tries again: {error}"
                    );
                    // In most cases the process has no free descriptor. The pause avoids a busy
                    // loop.
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            },
            Some(_) = clients.join_next() => {}
            () = ended(&mut watch) => break true,
            () = signals.terminate() => break false,
        }
    };
    listen.unlink(Some(identity.proxy_inode));
    drop(listener);
    if stock_gone {
        info!("proxy: the stock shim ended");
        // A stock shim of containerd 1.x removes the socket whose address it finds in the bundle,
        // which is the proxy's address. A killed stock shim removes no socket. So the stock shim's
        // own socket is removed here.
        upstream.unlink(Some(identity.socket_inode));
        let drained = async { while clients.join_next().await.is_some() {} };
        let _ = tokio::time::timeout(DRAIN, drained).await;
    }
    drop(clients);
    if let Ok(containers) = Rc::try_unwrap(containers) {
        containers.finish(DRAIN_TIMEOUT).await;
    }
    Ok(())
}

/// Serves one connection of a client, from its first frame to its end.
async fn client(
    mut stream: UnixStream,
    upstream: SocketAddress,
    identity: ShimIdentity,
    containers: Rc<Containers>,
) {
    match stream.peer_cred() {
        // As in the stock shim, only a peer with the same user may connect.
        Ok(peer) if peer.uid() == rustix::process::geteuid().as_raw() => {}
        _ => return warn!("proxy: rejected a client that does not run as the proxy's user"),
    }
    let result = async {
        let Some(first) = read_header(&mut stream).await? else {
            return Ok(());
        };
        if first == QUESTION {
            let answer = serde_json::to_vec(&identity).map_err(io::Error::from)?;
            return Ok(stream.write_all(&answer).await?);
        }
        let stock = UnixStream::connect(upstream.path()).await?;
        proxy::run(first, stream.into_split(), stock.into_split(), &*containers).await
    };
    if let Err(error) = result.await {
        debug!("proxy: closed a connection: {}", report(&error));
    }
}

/// The signals that the daemon handles, as the stock shim does. SIGTERM and SIGINT end the daemon.
/// The daemon ignores other signals, even those whose default action would end it.
struct SignalStream {
    terminate: Signal,
    interrupt: Signal,
    _ignored: [Signal; 4],
}

impl SignalStream {
    fn new() -> io::Result<SignalStream> {
        Ok(SignalStream {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            _ignored: [
                signal(SignalKind::hangup())?,
                signal(SignalKind::pipe())?,
                signal(SignalKind::user_defined1())?,
                signal(SignalKind::user_defined2())?,
            ],
        })
    }

    async fn terminate(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// Returns when the connection ends.
async fn ended(stream: &mut UnixStream) {
    let mut bytes = [0; 64];
    while let Ok(1..) = stream.read(&mut bytes).await {}
}
