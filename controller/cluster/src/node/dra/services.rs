//! The two gRPC services of a DRA driver, each on its own socket. The kubelet finds the driver by
//! the registration service. The other service prepares claims.
//!
//! ```text
//! kubelet ──GetInfo──────────────────> registration socket     name, endpoint, versions
//!         ──NotifyRegistrationStatus─>                         whether the driver is in use
//!         ──NodePrepareResources─────> endpoint                CDI devices of each claim
//!         ──NodeUnprepareResources───>
//!         ──NodeWatchResources───────>                         health of each GPU, at each reading
//! ```

use std::{convert::Infallible, future::Future, io, sync::Arc, time::Duration};

use futures_util::stream;
use prost::Message;
use tokio::{
    io::DuplexStream,
    net::{UnixListener, UnixStream},
    sync::watch,
};
use tonic::{
    Request, Response, Status,
    body::Body,
    codegen::http,
    server::Grpc,
    transport::{Error as TransportError, Server},
};
use tonic_prost::ProstCodec;
use tower::service_fn;

use super::{
    DRIVER, authority,
    health::HealthRecord,
    messages::{
        ClaimsRequest, HealthReport, HealthRequest, InfoRequest, PluginInfo, PrepareResponse,
        RegistrationStatus, RegistrationStatusResponse, UnprepareResponse,
    },
    prepare::ClaimPreparer,
};

/// Type of the plugin, as the registration reports it to the kubelet.
const PLUGIN_TYPE: &str = "DRAPlugin";
/// Name of the service on the driver's endpoint, as the registration reports it to the kubelet.
const SERVICE: &str = "v1.DRAPlugin";
const GET_INFO: &str = "/pluginregistration.Registration/GetInfo";
const NOTIFY: &str = "/pluginregistration.Registration/NotifyRegistrationStatus";
const PREPARE: &str = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources";
const WATCH_HEALTH: &str = "/v1alpha1.DRAResourceHealth/NodeWatchResources";
const UNPREPARE: &str = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodeUnprepareResources";
/// Maximum size of a request in bytes. It is enough for the claims of a pod, which are at most 32,
/// each with namespace, name and UID.
const MAX_REQUEST_BYTES: usize = 1 << 20;
/// Maximum number of requests on one connection that are processed at the same time.
const MAX_CONCURRENT: usize = 16;
/// Size of the buffer for each direction between a client's connection and the server, in bytes.
const BUFFER_BYTES: usize = 64 << 10;
/// Pause after a failed accept.
const ACCEPT_BACKOFF: Duration = Duration::from_secs(1);
/// Time limit for a request. It is equal to the kubelet's limit.
const TIMEOUT: Duration = Duration::from_secs(45);

/// Whether the kubelet uses the driver.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Registration {
    /// The kubelet has not sent a result yet.
    #[default]
    Pending,
    /// The kubelet uses the driver.
    Registered,
    /// The kubelet does not use the driver, for this reason.
    Refused(String),
}

/// The registration service, by which the kubelet finds the driver.
#[derive(Clone)]
pub struct RegistrationService {
    /// Path of the socket that prepares claims, as the node sees it.
    pub endpoint: String,
    /// Channel to which the kubelet's registration results are sent.
    pub state: watch::Sender<Registration>,
}

impl RegistrationService {
    fn info(&self) -> PluginInfo {
        PluginInfo {
            r#type: PLUGIN_TYPE.into(),
            name: DRIVER.into(),
            endpoint: self.endpoint.clone(),
            supported_versions: vec![SERVICE.into()],
        }
    }

    fn record(&self, status: RegistrationStatus) {
        let state = match status.plugin_registered {
            true => Registration::Registered,
            false => Registration::Refused(status.error),
        };
        match &state {
            Registration::Refused(why) => {
                tracing::error!("DRA driver {DRIVER}: the kubelet does not use it: {why}");
            }
            _ => tracing::info!("DRA driver {DRIVER}: registered at the kubelet"),
        }
        self.state.send_replace(state);
    }
}

impl RegistrationService {
    /// Answers a request of the kubelet's plugin watcher.
    pub async fn answer(self, request: http::Request<Body>) -> http::Response<Body> {
        match request.uri().path() {
            GET_INFO => unary(request, async move |_: InfoRequest| self.info()).await,
            NOTIFY => {
                let notify = async move |status: RegistrationStatus| {
                    self.record(status);
                    RegistrationStatusResponse {}
                };
                unary(request, notify).await
            }
            other => unknown(other),
        }
    }
}

/// The health of the driver's devices, for the kubelet.
#[derive(Clone)]
pub struct HealthSource {
    /// Pool of the devices. It is the name of the node.
    pub pool: String,
    /// The health after the last reading of the GPUs.
    pub record: watch::Receiver<HealthRecord>,
}

/// The service that prepares claims and reports health, on the driver's endpoint.
#[derive(Clone)]
pub struct PluginService {
    /// Prepares claims for the kubelet.
    pub preparer: Arc<ClaimPreparer>,
    /// Health of the devices.
    pub health: HealthSource,
}

impl PluginService {
    /// Answers a request of the kubelet about claims or health.
    pub async fn answer(self, request: http::Request<Body>) -> http::Response<Body> {
        let PluginService { preparer, health } = self;
        match request.uri().path() {
            PREPARE => {
                let prepare = async move |asked: ClaimsRequest| PrepareResponse {
                    claims: preparer.prepare(asked.claims).await,
                };
                unary(request, prepare).await
            }
            UNPREPARE => {
                let unprepare = async move |asked: ClaimsRequest| UnprepareResponse {
                    claims: preparer.unprepare(asked.claims),
                };
                unary(request, unprepare).await
            }
            WATCH_HEALTH => health_stream(request, health).await,
            other => unknown(other),
        }
    }
}

/// Replies to a request for health reports with a stream that stays open. The stream contains a
/// report of the present health, and one after each reading of the GPUs.
async fn health_stream(request: http::Request<Body>, source: HealthSource) -> http::Response<Body> {
    let reports = service_fn(move |_: Request<HealthRequest>| {
        let HealthSource { pool, mut record } = source.clone();
        record.mark_changed();
        let next = async move |(pool, mut record): (String, watch::Receiver<HealthRecord>)| {
            record.changed().await.ok()?;
            let report = record.borrow_and_update().report(&pool);
            Some((Ok::<_, Status>(report), (pool, record)))
        };
        let reports = stream::unfold((pool, record), next);
        async { Ok::<_, Status>(Response::new(reports)) }
    });
    let codec = ProstCodec::<HealthReport, HealthRequest>::default();
    Grpc::new(codec).server_streaming(reports, request).await
}

/// Answers a request for a method that is not served.
#[must_use]
pub fn unknown(path: &str) -> http::Response<Body> {
    Status::unimplemented(format!("this driver does not serve {path}")).into_http()
}

/// Serves a gRPC method that always succeeds. Decodes the request, calls `method`, and encodes its
/// reply.
async fn unary<Q, A, F>(
    request: http::Request<Body>,
    method: impl FnOnce(Q) -> F + Clone,
) -> http::Response<Body>
where
    Q: Message + Default + Send + 'static,
    A: Message + Send + Sync + 'static,
    F: Future<Output = A> + Send,
{
    let answer = move |asked| {
        let reply = method(asked);
        async move { Ok(reply.await) }
    };
    try_unary(request, answer).await
}

/// Serves a gRPC method that may fail. Decodes the request, calls `method`, and encodes its reply
/// or error.
pub async fn try_unary<Q, A, F>(
    request: http::Request<Body>,
    method: impl FnOnce(Q) -> F + Clone,
) -> http::Response<Body>
where
    Q: Message + Default + Send + 'static,
    A: Message + Send + Sync + 'static,
    F: Future<Output = Result<A, Status>> + Send,
{
    let answer = service_fn(move |request: Request<Q>| {
        let reply = method.clone()(request.into_inner());
        async move { Ok::<_, Status>(Response::new(reply.await?)) }
    });
    let codec = ProstCodec::<A, Q>::default();
    Grpc::new(codec).max_decoding_message_size(MAX_REQUEST_BYTES).unary(answer, request).await
}

/// Serves gRPC requests on a socket until the future is dropped. `answer` replies to one request.
///
/// # Errors
/// The server of tonic has failed.
pub async fn serve<R>(
    listener: UnixListener,
    answer: impl Fn(http::Request<Body>) -> R + Clone + Send + 'static,
) -> Result<(), TransportError>
where
    R: Future<Output = http::Response<Body>> + Send + 'static,
{
    let service = service_fn(move |request| {
        let reply = answer(request);
        async move { Ok::<_, Infallible>(reply.await) }
    });
    let incoming = stream::unfold(listener, |listener| async {
        let stream = valid(accept(&listener).await);
        Some((Ok::<_, io::Error>(stream), listener))
    });
    Server::builder()
        .concurrency_limit_per_connection(MAX_CONCURRENT)
        .timeout(TIMEOUT)
        .serve_with_incoming(service, incoming)
        .await
}

/// Returns the stream that the server reads in place of a client's connection. A task copies the
/// bytes in both directions, and gives each request of the client a valid authority. The task ends
/// when the client or the server ends.
fn valid(client: UnixStream) -> DuplexStream {
    let (server, stream) = tokio::io::duplex(BUFFER_BYTES);
    tokio::spawn(async move {
        let (requests, mut replies) = client.into_split();
        let (mut from_server, to_server) = tokio::io::split(server);
        let sending = authority::forward(requests, to_server);
        let mut receiving = std::pin::pin!(tokio::io::copy(&mut from_server, &mut replies));
        // An error means that a side has closed its connection.
        tokio::select! {
            _ = &mut receiving => {}
            sent = sending => match sent {
                // The client sends no more, and still reads.
                Ok(()) => drop(receiving.await),
                Err(error) => {
                    tracing::debug!("plugin socket: a client's connection (usually the kubelet's) \
                                     ended: {error}");
                }
            }
        }
    });
    stream
}

/// Waits for the next connection. After a failed accept, it waits and tries again.
async fn accept(listener: &UnixListener) -> UnixStream {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => return stream,
            Err(error) => {
                tracing::warn!(
                    "plugin socket: cannot accept a connection of the kubelet, and tries again: \
                     {error}"
                );
                // Without a pause, a lack of file descriptors would use a processor fully.
                tokio::time::sleep(ACCEPT_BACKOFF).await;
            }
        }
    }
}

#[cfg(test)]
mod tests;
