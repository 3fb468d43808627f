//! A mutating admission webhook. It sets the runtime class of pods that request a GPU, so that
//! manifests need not name it.
//!
//! ```text
//!  API server ──AdmissionReview──> [`serve`] ──> [`review`] ──> [`decide`] ──> JSON patch, or none
//!                                     │                            │
//!                             [`cert`]                     [`rules`], [`cluster`]
//! ```
//!
//! The code that decides does no I/O. Its input comes from a watch, or is read within two seconds.
//! If input is missing, the pod is created unchanged. The reply is always `allowed`, and the
//! `failurePolicy` of the MutatingWebhookConfiguration must be `Ignore`.

pub mod cert;
pub mod cluster;
pub mod decide;
#[cfg(test)]
pub(crate) mod fake;
pub mod metrics;
pub mod review;
pub mod rules;
pub mod serve;

use std::{net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use clap::Args;

use crate::{
    https::{self, tls::ServedCertificate},
    service::{self, ServiceError, StopSignal},
};
use cert::rotation::{CertificatePaths, CertificateRotation};
use cluster::ClusterState;
use rules::NamespaceRules;
use serve::WebhookServer;

/// Time for which the webhook still replies after SIGTERM. Within this time, API servers stop
/// sending requests to the ending webhook.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// Options of the webhook.
#[derive(Args, Clone, Debug)]
pub struct WebhookOptions {
    /// Address and port to serve on.
    #[arg(long, value_name = "ADDRESS", default_value = "[::]:8443", env = "AFFINODE_LISTEN")]
    listen: SocketAddr,
    /// PEM file with the certificate, renewed by another program. Without it, the webhook creates a
    /// certificate, keeps it in a Secret and publishes its authority to the API server.
    #[arg(long, value_name = "FILE", env = "AFFINODE_TLS_CERT_FILE", requires = "tls_key_file")]
    tls_cert_file: Option<PathBuf>,
    /// PEM file with the certificate's key.
    #[arg(long, value_name = "FILE", env = "AFFINODE_TLS_KEY_FILE", requires = "tls_cert_file")]
    tls_key_file: Option<PathBuf>,
    #[command(flatten)]
    places: CertificatePaths,
    #[command(flatten)]
    rules: NamespaceRules,
}

/// Runs the webhook until SIGTERM or SIGINT.
///
/// # Errors
/// [`ServiceError`]: the service cannot start.
pub fn run(options: &WebhookOptions) -> Result<(), ServiceError> {
    service::run(|stop| serve_all(options, stop))
}

async fn serve_all(options: &WebhookOptions, mut stop: StopSignal) -> Result<(), ServiceError> {
    let files = options.tls_cert_file.as_ref().zip(options.tls_key_file.as_ref());
    let shown = Arc::new(match files {
        Some((cert, key)) => ServedCertificate::of_files(cert, key)?,
        None => ServedCertificate::default(),
    });
    let client = service::client().await?;
    if files.is_none() {
        let keeper =
            CertificateRotation::new(client.clone(), options.places.clone(), Arc::clone(&shown));
        tokio::spawn(keeper.keep());
    }
    let cluster = ClusterState::watch(client, &options.rules.runtime_class);
    let door = WebhookServer::new(options.rules.clone(), cluster, shown);
    let listener = service::listen(options.listen).await?;
    tracing::info!("webhook: listening on {}", options.listen);
    let serving = tokio::spawn(https::serve(listener, Arc::new(door)));
    stop.wait().await;
    tracing::info!("webhook: stopping; it still serves requests for {DRAIN_TIMEOUT:?}");
    tokio::time::sleep(DRAIN_TIMEOUT).await;
    serving.abort();
    Ok(())
}
