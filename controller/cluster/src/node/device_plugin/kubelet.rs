//! The plugin's connection to the kubelet: a socket in the kubelet's folder, and the registration.
//!
//! ```text
//! wait for the kubelet's socket ──> own socket ──> Register ──> the kubelet lists the devices
//!   ^                                                              │ kubelet restarted, own
//!   └── own socket removed <───────────────────────────────────────┘ socket gone, or unwatched
//! ```
//!
//! `Unwatched` means that no kubelet watches the list of devices. A kubelet that starts removes all
//! sockets in its folder and then makes its own socket. The plugin must then make its socket again.

use std::{
    fs,
    os::{fd::AsRawFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use hyper_util::rt::TokioIo;
use tokio::{net::UnixStream, sync::watch};
use tonic::{
    Request, Status,
    client::Grpc,
    codegen::http::{Uri, uri::PathAndQuery},
    transport::{Channel, Endpoint, Error as TransportError},
};
use tonic_prost::ProstCodec;
use tower::service_fn;

use super::{
    messages::{Empty, RegisterRequest},
    resource::ResourceName,
    seats::SeatList,
    service::{self, SeatService},
};
use crate::{
    error_chain,
    node::dra::{
        cdi_lookup::CdiLookup,
        services,
        sockets::{self, NodeSocket, SocketError},
    },
};

/// Name of the kubelet's socket in its folder.
pub const KUBELET: &str = "kubelet.sock";
/// Name of the plugin's socket in the kubelet's folder.
pub const ENDPOINT: &str = "gpu.affinode.io.sock";
/// Path of the method that registers a plugin.
pub const REGISTER: &str = "/v1beta1.Registration/Register";
/// Version of the kubelet's API for device plugins.
const VERSION: &str = "v1beta1";
/// Time limit for the registration. During this time, the kubelet calls the plugin.
const REGISTER_TIMEOUT: Duration = Duration::from_secs(20);

/// Intervals at which the plugin checks its connection to the kubelet.
#[derive(Clone, Copy, Debug)]
pub struct LinkPace {
    /// Interval between two checks of the sockets.
    pub look: Duration,
    /// Pause after a failed registration.
    pub retry: Duration,
    /// Number of consecutive checks in which no kubelet watches the list of seats. After this
    /// number, the plugin registers again.
    pub unwatched_looks: u32,
}

impl Default for LinkPace {
    fn default() -> LinkPace {
        let (look, retry) = (Duration::from_secs(1), Duration::from_secs(5));
        LinkPace { look, retry, unwatched_looks: 30 }
    }
}

/// Reason why the kubelet does not use the plugin.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The plugin's socket cannot be made.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The plugin's server has ended.
    #[error("the device plugin can no longer serve the kubelet at its socket")]
    Server(#[source] TransportError),
    /// The plugin cannot connect to the kubelet's socket.
    #[error("cannot connect to {}; check that the kubelet runs", .0.display())]
    Connect(PathBuf, #[source] TransportError),
    /// The folder of the kubelet's socket cannot be opened.
    #[error("cannot open {}; check --device-plugin-dir", .0.display())]
    Folder(PathBuf, #[source] std::io::Error),
    /// The kubelet refused the registration.
    #[error("the kubelet refused resource {0}: {1}")]
    Refused(ResourceName, String),
    /// The kubelet did not answer in time.
    #[error("the kubelet did not register resource {0} within {REGISTER_TIMEOUT:?}")]
    Late(ResourceName),
}

/// Identity of a socket's file: device, inode and modification time. The inode alone is not enough,
/// because the file of a new socket may get the inode of a removed file.
type SocketFile = (u64, u64, i64, i64);

/// Connection of the device plugin to the kubelet. It keeps the plugin registered.
pub struct KubeletLink {
    /// Folder of the kubelet's sockets, as this process sees it.
    pub folder: PathBuf,
    /// Name of the resource by which pods request seats.
    pub resource: ResourceName,
    /// Channel through which the list of seats reaches the streams of the kubelet. Only these
    /// streams have a receiver, so the number of receivers shows whether a kubelet watches the
    /// list.
    pub seats: watch::Sender<SeatList>,
    /// Finds the CDI device of each GPU.
    pub lookup: CdiLookup,
    /// Intervals at which the plugin checks its connection.
    pub pace: LinkPace,
}

impl KubeletLink {
    /// Serves the kubelet until the future is dropped, which removes the plugin's socket.
    pub async fn run(self) {
        let mut said = None;
        loop {
            match self.session().await {
                Ok(why) => {
                    tracing::info!(
                        "device plugin {}: registering again, because {why}",
                        self.resource
                    );
                    said = None;
                }
                Err(error) => {
                    let why = error_chain::chain(&error);
                    if said.replace(why.clone()).as_ref() != Some(&why) {
                        tracing::warn!("device plugin {}: not registered: {why}", self.resource);
                    }
                    tokio::time::sleep(self.pace.retry).await;
                }
            }
        }
    }

    /// Waits until the kubelet's socket exists and the seats are known. Returns the identity of the
    /// socket's file.
    async fn kubelet_socket(&self) -> SocketFile {
        loop {
            if !self.seats.borrow().gpus.is_empty()
                && let Some(socket) = socket_file(&self.folder.join(KUBELET))
            {
                return socket;
            }
            tokio::time::sleep(self.pace.look).await;
        }
    }

    /// Registers the plugin at the kubelet, and serves the kubelet until the registration is lost.
    /// Returns the reason why the plugin must register again.
    async fn session(&self) -> Result<&'static str, LinkError> {
        // A socket in another folder would never be found.
        sockets::check_folder(&self.folder)?;
        let kubelet = self.kubelet_socket().await;
        let (listener, socket) = NodeSocket::bind(&self.folder.join(ENDPOINT))?;
        let service = SeatService { seats: self.seats.clone(), lookup: self.lookup.clone() };
        let registered = async {
            // The kubelet calls the plugin before it answers.
            match tokio::time::timeout(REGISTER_TIMEOUT, self.register()).await {
                Ok(registered) => registered?,
                Err(_) => return Err(LinkError::Late(self.resource.clone())),
            }
            tracing::info!("device plugin {}: registered at the kubelet", self.resource);
            Ok(self.until_lost(kubelet, &socket).await)
        };
        tokio::select! {
            ended = services::serve(listener, move |request| service.clone().answer(request)) => {
                ended.map_err(LinkError::Server)?;
                Ok("the gRPC server at the plugin's socket ended")
            }
            lost = registered => lost,
        }
    }

    async fn register(&self) -> Result<(), LinkError> {
        let mut client = Grpc::new(connect(&self.folder).await?);
        let refused =
            |status: Status| LinkError::Refused(self.resource.clone(), status.message().to_owned());
        let failed = |error| LinkError::Connect(self.folder.join(KUBELET), error);
        client.ready().await.map_err(failed)?;
        let request = RegisterRequest {
            version: VERSION.into(),
            endpoint: ENDPOINT.into(),
            resource_name: self.resource.to_string(),
            options: Some(service::options()),
        };
        let codec = ProstCodec::<RegisterRequest, Empty>::default();
        let path = PathAndQuery::from_static(REGISTER);
        client.unary(Request::new(request), path, codec).await.map_err(refused)?;
        Ok(())
    }

    /// Waits until the kubelet no longer uses the plugin, and returns the reason as text.
    async fn until_lost(&self, kubelet: SocketFile, own: &NodeSocket) -> &'static str {
        let mut unwatched = 0;
        loop {
            tokio::time::sleep(self.pace.look).await;
            if socket_file(&self.folder.join(KUBELET)) != Some(kubelet) {
                return "the kubelet's socket was removed or replaced";
            }
            if !own.is_in_place() {
                return "the plugin's socket was removed";
            }
            // A kubelet that gave up a plugin waits for its registration.
            unwatched = if self.seats.receiver_count() == 0 { unwatched + 1 } else { 0 };
            if unwatched >= self.pace.unwatched_looks {
                return "the kubelet no longer watches the list of devices";
            }
        }
    }
}

fn socket_file(path: &Path) -> Option<SocketFile> {
    let data = fs::symlink_metadata(path).ok()?;
    Some((data.dev(), data.ino(), data.mtime(), data.mtime_nsec()))
}

/// Connects to the kubelet's socket in a folder.
pub(super) async fn connect(folder: &Path) -> Result<Channel, LinkError> {
    let opened =
        fs::File::open(folder).map_err(|error| LinkError::Folder(folder.to_owned(), error))?;
    let opened = Arc::new(opened);
    let connector = service_fn(move |_: Uri| {
        let opened = Arc::clone(&opened);
        async move {
            // The address of a socket has at most 107 bytes, but the path to the node's root may be
            // long.
            let short = format!("/proc/self/fd/{}/{KUBELET}", opened.as_raw_fd());
            UnixStream::connect(short).await.map(TokioIo::new)
        }
    });
    let endpoint = Endpoint::from_static("http://localhost");
    let failed = |error| LinkError::Connect(folder.join(KUBELET), error);
    endpoint.connect_with_connector(connector).await.map_err(failed)
}

#[cfg(test)]
mod tests;
