//! Serves the control API for viewers: the members of the group `control.view_group`. They use a
//! separate socket, on which they can read the state but change nothing.
//!
//! Shims and root use another socket, whose backlog viewers cannot fill. The viewers' socket is
//! served on a thread of its own, so viewers cannot occupy the actor's thread. The mode of the
//! socket's file lets only root and members of the group connect. The socket option `SO_PEERCRED`
//! states the user of a connection, and the number of connections of each user is limited.

use std::{
    fs, io,
    os::unix::{
        fs::{PermissionsExt, chown},
        net,
    },
    path::{Path, PathBuf},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use affinode_proto::{
    api::{
        control::{
            CallsRequest, CallsResponse, EventsRequest, EventsResponse, HistoryRequest,
            HistoryResponse, ListRequest, ListResponse, PolicyRequest, PolicyResponse,
            ReportRequest, ReportResponse,
        },
        control_ttrpc::{Control, create_control},
    },
    paths,
};
use async_trait::async_trait;
use futures_util::stream;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{UnixListener, UnixStream},
};
use ttrpc::r#async::{Server, TtrpcContext, transport::Listener};

use super::{
    api::ControlService,
    user_count::{UserCount, UserPlace},
};
use crate::{isolated_runtime::IsolatedRuntime, socket_activation::ActivationSockets, sys};

/// Maximum number of simultaneous connections of one user to the viewers' socket. The next
/// constant, `IN_ALL`, is the maximum for all users together.
const PER_USER: usize = 16;
const IN_ALL: usize = 128;

/// Serves the members of the configured group until the returned runtime is dropped. Returns `None`
/// if no group is configured, or if its socket cannot be served. Root uses another socket, which is
/// served in any case.
pub(super) fn serve(
    sockets: &mut ActivationSockets,
    run_dir: &Path,
    group: &str,
    service: ControlService,
) -> Option<IsolatedRuntime> {
    let path = run_dir.join(paths::VIEW_SOCKET);
    if group.is_empty() {
        // Removes the socket of an earlier configuration, at which a client would wait without a
        // response.
        let _ = fs::remove_file(path);
        return None;
    }
    let begun = sockets.listen(paths::VIEW_SOCKET, 0o600).and_then(|listener| {
        let ward = IsolatedRuntime::begin("viewers")?;
        ward.spawn(admit(listener, path, group.to_owned(), service));
        Ok(ward)
    });
    begun
        .inspect_err(|error| {
            tracing::error!(
                %error, group,
                "control.view_group: cannot serve the socket for group {group}, so its members \
                 cannot view containers"
            );
        })
        .ok()
}

/// Allows the group to connect to the viewers' socket, and serves the socket.
async fn admit(listener: net::UnixListener, path: PathBuf, group: String, service: ControlService) {
    let opened = async {
        // Before Linux 6.16 the kernel cannot refuse descriptors. A client can then send
        // descriptors, which are closed when they are read.
        let _ = sys::refuse_descriptors(&listener);
        let listener = UnixListener::from_std(listener)?;
        open_to(&path, gid_of(&group)?)?;
        let service = create_control(Arc::new(ViewService(service)));
        let connections = stream::unfold((listener, UserCount::new(PER_USER, IN_ALL)), accept);
        let mut server =
            Server::new().add_listener(Listener::new(connections)).register_service(service);
        server.start().await.map_err(io::Error::other)?;
        Ok::<_, io::Error>(server)
    };
    match opened.await {
        Ok(_server) => std::future::pending().await,
        Err(error) => {
            tracing::error!(
                %error, group,
                "control.view_group: cannot serve the socket for group {group}, so its members \
                 cannot view containers"
            );
        }
    }
}

/// Returns the id of a group that is given by name or by id.
fn gid_of(group: &str) -> io::Result<u32> {
    if let Ok(gid) = group.parse() {
        return Ok(gid);
    }
    let found = nix::unistd::Group::from_name(group)?;
    let unknown =
        || io::Error::new(io::ErrorKind::NotFound, "the machine has no group of this name");
    found.map(|group| group.gid.as_raw()).ok_or_else(unknown)
}

/// Allows the members of a group to connect to a socket. Sets the socket's group first and its mode
/// second, so that no other group can connect meanwhile.
fn open_to(path: &Path, gid: u32) -> io::Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    chown(path, None, Some(gid))?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o660))
}

type ViewerListener = (UnixListener, UserCount);

/// Accepts the next connection within the limits `PER_USER` and `IN_ALL`. Connections beyond the
/// limits are closed.
async fn accept(
    (listener, count): ViewerListener,
) -> Option<(io::Result<ViewerConnection>, ViewerListener)> {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let uid = stream.peer_cred().map(|peer| peer.uid());
                // A connection beyond the maximum is closed.
                if let Some(place) = uid.ok().and_then(|uid| count.take(uid)) {
                    let connection = ViewerConnection { stream, _place: place };
                    return Some((Ok(connection), (listener, count)));
                }
            }
            Err(error) => {
                tracing::warn!(
                    %error,
                    "control.view_group: the controller cannot accept a connection on the socket \
                     of the group, and tries again"
                );
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        }
    }
}

/// A viewer's connection. While it is open, it counts as a connection of its user.
#[derive(Debug)]
struct ViewerConnection {
    stream: UnixStream,
    _place: UserPlace,
}

impl AsyncRead for ViewerConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for ViewerConnection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, buffer)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// The control API with only the methods that read. The trait's default rejects each method that is
/// not implemented here, so a method that is added later is rejected, too.
struct ViewService(ControlService);

#[async_trait]
impl Control for ViewService {
    async fn list(&self, call: &TtrpcContext, asked: ListRequest) -> ttrpc::Result<ListResponse> {
        self.0.list(call, asked).await
    }

    async fn events(
        &self,
        call: &TtrpcContext,
        asked: EventsRequest,
    ) -> ttrpc::Result<EventsResponse> {
        self.0.events(call, asked).await
    }

    async fn calls(
        &self,
        call: &TtrpcContext,
        asked: CallsRequest,
    ) -> ttrpc::Result<CallsResponse> {
        self.0.calls(call, asked).await
    }

    async fn policy(
        &self,
        call: &TtrpcContext,
        asked: PolicyRequest,
    ) -> ttrpc::Result<PolicyResponse> {
        self.0.policy(call, asked).await
    }

    async fn history(
        &self,
        call: &TtrpcContext,
        asked: HistoryRequest,
    ) -> ttrpc::Result<HistoryResponse> {
        self.0.history(call, asked).await
    }

    async fn report(
        &self,
        call: &TtrpcContext,
        asked: ReportRequest,
    ) -> ttrpc::Result<ReportResponse> {
        self.0.report(call, asked).await
    }
}

#[cfg(test)]
mod tests;
