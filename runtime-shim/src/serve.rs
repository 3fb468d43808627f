//! The daemon of a group: accepts containerd's connections, proxies each, and
//! dies with the stock shim.
//!
//! ```text
//! start ──socket on stdin──> Joining ──stock shim answered──> Serving ──┬─ stock shim gone ─> Draining ─> end
//!                               └─ error on stdout, end                 └─ SIGTERM, SIGINT ─> end
//! ```
//!
//! On its end the sockets go first, then the clients: who finds a connection
//! closed finds the address dead too.

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
use crate::{EngineOf, report};

/// How long clients get the stock shim's last words.
const DRAIN: Duration = Duration::from_secs(1);
/// How long the controller is told of the last containers' end.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);

/// The daemon could not begin.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// An address that is none.
    #[error("cannot use an address")]
    Address(#[from] AddressError),
    /// The stock shim does not answer.
    #[error("cannot join the stock shim at {address}")]
    Stock {
        /// Its address.
        address: String,
        /// Why.
        source: RpcError,
    },
    /// The stock shim ended at once.
    #[error("the stock shim ended right after its start")]
    Gone,
    /// The system refused something.
    #[error("cannot set up the daemon")]
    Io(#[from] io::Error),
}

struct JoinedTask {
    listen: SocketAddress,
    upstream: SocketAddress,
    identity: ShimIdentity,
    listener: std::os::unix::net::UnixListener,
    /// Idle; its end is the stock shim's.
    watch: std::os::unix::net::UnixStream,
}

/// The action `serve`.
pub fn main(flags: &ShimFlags, engine_of: EngineOf) -> ExitCode {
    let level = if flags.debug { LevelFilter::DEBUG } else { LevelFilter::INFO };
    crate::log::init(level);
    // A session of its own: what ends `start`'s process group does not end us.
    let _ = rustix::process::setsid();
    let joined = match join(flags) {
        Ok(joined) => joined,
        Err(error) => {
            let _ = crate::print(report(&error).as_bytes());
            return ExitCode::FAILURE;
        }
    };
    match begin(joined, flags, engine_of) {
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

fn begin(joined: JoinedTask, flags: &ShimFlags, engine_of: EngineOf) -> Result<(), ServeError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(4)
        .thread_keep_alive(Duration::from_secs(1))
        .thread_stack_size(512 << 10)
        .build()?;
    let local = LocalSet::new();
    local.block_on(&runtime, async {
        let signals = SignalStream::new()?;
        // `start` reads this to its end, and answers containerd.
        crate::print(&serde_json::to_vec(&joined.identity).map_err(io::Error::from)?)?;
        let null = std::fs::File::options().read(true).write(true).open("/dev/null")?;
        rustix::stdio::dup2_stdin(&null).map_err(io::Error::from)?;
        rustix::stdio::dup2_stdout(&null).map_err(io::Error::from)?;
        serve(joined, Containers::new(&flags.namespace, engine_of), flags, signals).await
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
        "serving {listen} before {upstream}"
    );
    let stock_gone = loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    let (upstream, containers) = (upstream.clone(), Rc::clone(&containers));
                    clients.spawn_local(client(stream, upstream, identity, containers));
                }
                Err(error) => {
                    warn!("cannot accept a connection: {error}");
                    // Out of descriptors, likely: do not spin.
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
        info!("the stock shim is gone");
        // A stock shim of 1.x removes the address that it finds in the bundle,
        // which is ours; one that was killed removes nothing.
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

/// One connection of a client, from its first frame to its end.
async fn client(
    mut stream: UnixStream,
    upstream: SocketAddress,
    identity: ShimIdentity,
    containers: Rc<Containers>,
) {
    match stream.peer_cred() {
        // As the stock shim has it: the same user, or nobody.
        Ok(peer) if peer.uid() == rustix::process::geteuid().as_raw() => {}
        _ => return warn!("refused a connection of another user"),
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
        debug!("closed a connection: {}", report(&error));
    }
}

/// Signals as the stock shim takes them: TERM and INT end it; the others, which
/// would end a program that does not ask for them, do nothing.
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
