//! Common parts of the node agent and the webhook: the async runtime on one thread, a client of the
//! API server, a listening port, and the shutdown on a signal.

use std::{io, net::SocketAddr};

use affinode_controller::http::GuardError;
use kube::Client;
use tokio::{
    net::TcpListener,
    signal::unix::{Signal, SignalKind, signal},
};
use tokio_rustls::rustls::crypto;

use crate::{
    api_client,
    error_chain::ApiError,
    https::{self, tls::TlsError},
    node::device_plugin::DevicePluginError,
};

/// Reason why a service could not start or continue.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// The async runtime or the signal handler could not be created: a resource of the machine is
    /// exhausted.
    #[error(
        "cannot start a thread; check the limits of processes (ulimit -u, pids cgroup) and memory"
    )]
    Start(#[source] io::Error),
    /// The address of the API server is unknown.
    #[error(
        "no API server: run in a pod whose service account token is mounted, or with KUBECONFIG"
    )]
    Cluster(#[source] ApiError),
    /// The TokenReview client could not be created.
    #[error("cannot create the TokenReview client")]
    Guard(#[source] GuardError),
    /// The certificate could not be created, or the named files are invalid.
    #[error("cannot load or create the TLS certificate of this server")]
    Papers(#[from] TlsError),
    /// The device plugin could not be started.
    #[error("cannot start the device plugin")]
    DevicePlugin(#[from] DevicePluginError),
    /// The port could not be bound.
    #[error("cannot listen on {0}; choose another address with --listen")]
    Listen(SocketAddr, #[source] io::Error),
}

/// Receiver of SIGTERM and SIGINT. A signal that arrives after the creation of the receiver is kept
/// until [`StopSignal::wait`] is called.
pub struct StopSignal {
    term: Signal,
    int: Signal,
}

impl StopSignal {
    fn new() -> io::Result<StopSignal> {
        Ok(StopSignal {
            term: signal(SignalKind::terminate())?,
            int: signal(SignalKind::interrupt())?,
        })
    }

    /// Waits for SIGTERM or SIGINT.
    pub async fn wait(&mut self) {
        tokio::select! {
            _ = self.term.recv() => {}
            _ = self.int.recv() => {}
        }
    }
}

/// Runs a service on the present thread until it ends.
///
/// # Errors
/// [`ServiceError`]: the async runtime cannot start, or the service has failed.
pub fn run<F: Future<Output = Result<(), ServiceError>>>(
    serve: impl FnOnce(StopSignal) -> F,
) -> Result<(), ServiceError> {
    // An error only means that the same provider is installed already.
    let _ = crypto::ring::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(ServiceError::Start)?;
    runtime.block_on(async { serve(StopSignal::new().map_err(ServiceError::Start)?).await })
}

/// Returns a client of the API server, with the pod's service account or with KUBECONFIG.
///
/// # Errors
/// [`ServiceError::Cluster`]: there is neither a service account nor a kubeconfig.
pub async fn client() -> Result<Client, ServiceError> {
    api_client::connect().await.map_err(|error| ServiceError::Cluster(ApiError(error)))
}

/// Binds the TCP port of a service.
///
/// # Errors
/// [`ServiceError::Listen`]: the port cannot be bound.
pub async fn listen(address: SocketAddr) -> Result<TcpListener, ServiceError> {
    https::listen(address).await.map_err(|error| ServiceError::Listen(address, error))
}
