//! The driver's sockets in the kubelet's folder: serves them, and checks that the kubelet uses them.

use std::{path::Path, path::PathBuf, time::Duration};

use tokio::sync::watch;

use super::{
    DRIVER,
    services::{self, PluginService, Registration, RegistrationService},
    sockets::{self, NodeSocket, SocketError},
};
use crate::node::host::HostPaths;

/// Interval between two checks of the sockets and the registration. The first check is one interval
/// after the start, so that the kubelet has time to find the sockets.
const CHECK_INTERVAL: Duration = Duration::from_secs(60);

/// Reason why the sockets are no longer served.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A socket cannot be created.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// Another process removed or replaced a socket, so the kubelet does not reach this driver.
    #[error(
        "another process removed or replaced a socket of DRA driver {DRIVER}, so the kubelet \
         cannot reach the driver"
    )]
    Replaced,
    /// The server of a socket failed.
    #[error(
        "DRA driver {DRIVER} can no longer serve the kubelet at one of its sockets (dra.sock or \
         {DRIVER}-reg.sock)"
    )]
    Server(#[from] tonic::transport::Error),
}

/// Paths of the driver's two sockets: the endpoint that prepares claims, and the registration
/// socket.
pub struct DriverSockets {
    kubelet_dir: PathBuf,
    /// Path of the endpoint as the node sees it, and as this process sees it.
    endpoint: [PathBuf; 2],
    registration: PathBuf,
}

impl DriverSockets {
    /// Computes the paths of the sockets below the kubelet's folder on the node.
    #[must_use]
    pub fn new(kubelet_dir: &Path, places: &HostPaths) -> DriverSockets {
        let endpoint = kubelet_dir.join("plugins").join(DRIVER).join("dra.sock");
        let registration = kubelet_dir.join(format!("plugins_registry/{DRIVER}-reg.sock"));
        DriverSockets {
            kubelet_dir: places.on_host(kubelet_dir),
            endpoint: [endpoint.clone(), places.on_host(&endpoint)],
            registration: places.on_host(&registration),
        }
    }

    /// Serves the driver's two sockets until an error occurs or the future is dropped. The sockets
    /// are then removed.
    ///
    /// # Errors
    /// [`ServeError`]: the kubelet does not reach this driver.
    pub async fn serve(
        &self,
        service: &PluginService,
        state: &watch::Sender<Registration>,
        problem: &watch::Sender<Option<String>>,
    ) -> Result<(), ServeError> {
        // A socket in another folder would never be found.
        sockets::check_folder(&self.kubelet_dir)?;
        // The kubelet calls the endpoint as soon as the registration socket exists. Values are
        // dropped in the opposite order: it is to find no registration socket without an endpoint.
        let [endpoint, path] = &self.endpoint;
        let (plugin, plugin_socket) = NodeSocket::bind(path)?;
        let (registration, registration_socket) = NodeSocket::bind(&self.registration)?;
        let preparing = service.clone();
        let registering =
            RegistrationService { endpoint: endpoint.display().to_string(), state: state.clone() };
        let bound = [&plugin_socket, &registration_socket];
        tokio::select! {
            ended = services::serve(plugin, move |request| preparing.clone().answer(request)) => Ok(ended?),
            ended = services::serve(registration, move |request| registering.clone().answer(request)) => Ok(ended?),
            replaced = check(bound, state, problem) => Err(replaced),
        }
    }
}

/// Checks at intervals whether the sockets still exist and whether the kubelet uses the driver.
/// Keeps in `problem` the reason why the kubelet does not use the driver, if there is one. Returns
/// when a socket is gone.
async fn check(
    bound: [&NodeSocket; 2],
    state: &watch::Sender<Registration>,
    problem: &watch::Sender<Option<String>>,
) -> ServeError {
    let mut registration = state.subscribe();
    let mut next = tokio::time::Instant::now() + CHECK_INTERVAL;
    loop {
        let due = tokio::select! {
            () = tokio::time::sleep_until(next) => true,
            _ = registration.changed() => false,
        };
        if due {
            next += CHECK_INTERVAL;
            if !bound.iter().all(|socket| socket.is_in_place()) {
                return ServeError::Replaced;
            }
        }
        let why = match &*registration.borrow_and_update() {
            Registration::Registered => None,
            Registration::Refused(why) => Some(format!("the kubelet refuses it: {why}")),
            Registration::Pending if due => Some(
                "the kubelet has not registered it; check that dra.kubeletDir is the kubelet's \
                 folder"
                    .to_owned(),
            ),
            Registration::Pending => continue,
        };
        problem.send_if_modified(|known| {
            let changed = *known != why;
            if let (true, Some(why)) = (changed, &why) {
                tracing::error!("DRA driver {DRIVER}: not in use: {why}");
            }
            *known = why;
            changed
        });
    }
}
