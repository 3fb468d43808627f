//! What the parts of this program that serve have in common: one thread, a client of the API
//! server, a port, and an end when they are told to.

use std::{io, net::SocketAddr};

use affinode_controller::http::GuardError;
use kube::Client;
use tokio::{
    net::TcpListener,
    signal::unix::{Signal, SignalKind, signal},
};
use tokio_rustls::rustls::crypto;

use crate::{
    error_chain::ApiError,
    https::{self, tls::TlsError},
};

/// Why one does not run.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// No runtime, no signals: the machine is out of something.
    #[error("cannot start threads; is a limit of processes or memory reached?")]
    Start(#[source] io::Error),
    /// It does not know where the API server is.
    #[error(
        "no API server: run in a pod whose service account token is mounted, or with KUBECONFIG"
    )]
    Cluster(#[source] ApiError),
    /// Nobody could be let in.
    #[error("cannot set up the questions whose a token is (TokenReview)")]
    Guard(#[source] GuardError),
    /// There is no certificate, or the files that were named are of no use.
    #[error("there is no certificate to show")]
    Papers(#[from] TlsError),
    /// It cannot listen.
    #[error("cannot listen on {0}; choose another address with --listen")]
    Listen(SocketAddr, #[source] io::Error),
}

/// SIGTERM and SIGINT, from the moment that this is made.
pub struct Told {
    term: Signal,
    int: Signal,
}

impl Told {
    fn new() -> io::Result<Told> {
        Ok(Told { term: signal(SignalKind::terminate())?, int: signal(SignalKind::interrupt())? })
    }

    /// Waits for either.
    pub async fn wait(&mut self) {
        tokio::select! {
            _ = self.term.recv() => {}
            _ = self.int.recv() => {}
        }
    }
}

/// Runs one on this thread.
///
/// # Errors
/// [`ServiceError`], its own among them.
pub fn run<F: Future<Output = Result<(), ServiceError>>>(
    serve: impl FnOnce(Told) -> F,
) -> Result<(), ServiceError> {
    // Whoever installed one before us installed the same.
    let _ = crypto::ring::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(ServiceError::Start)?;
    runtime.block_on(async { serve(Told::new().map_err(ServiceError::Start)?).await })
}

/// The API server, as the pod's service account or KUBECONFIG names it.
///
/// # Errors
/// [`ServiceError::Cluster`].
pub async fn client() -> Result<Client, ServiceError> {
    Client::try_default().await.map_err(|error| ServiceError::Cluster(ApiError(error)))
}

/// A port to serve on.
///
/// # Errors
/// [`ServiceError::Listen`].
pub async fn listen(address: SocketAddr) -> Result<TcpListener, ServiceError> {
    https::listen(address).await.map_err(|error| ServiceError::Listen(address, error))
}
