//! One page for all nodes: VRAM of each node, VRAM that can be offloaded, waiting containers, and a
//! link to each node's own dashboard.
//!
//! ```text
//!  browser ──TLS, token──> [`server`] ──TokenReview, SubjectAccessReview──> API server
//!                            │ may get the list            │ may call the node's own API
//!                            v                             v
//!                         [`poller`] ──its own token──> [`agent_client`] ──the user's token──> node agent,
//!                            ^                            TLS, pinned                 which reviews again
//!                         [`discovery`]: nodes, agents' addresses, their certificates
//! ```
//!
//! A user receives the list if the API server allows that user `get /affinode/v1/node`. An agent
//! requires the same right from a user who asks the agent directly. This program's account has only
//! that right, so the list shows nothing that the user's own token would not show. A request to a
//! path below a node's name is forwarded to the node's agent with the user's own token. The page
//! itself always comes from this program, for all nodes: an agent can send data, but no script.

pub(crate) mod agent_client;
pub(crate) mod cert_pin;
mod discovery;
pub(crate) mod poller;
mod server;
pub(crate) mod summary;
#[cfg(test)]
mod tests;

use std::{net::SocketAddr, path::PathBuf, sync::Arc};

use clap::Args;

use self::{discovery::NodeDiscovery, poller::FleetPoller, server::FleetServer};
use crate::{
    https::{self, authz, tls},
    service::{self, ServiceError, StopSignal},
};

/// Options of the page of all nodes.
#[derive(Args, Clone, Debug)]
pub struct FleetOptions {
    /// Name of this installation in the cluster, as namespace/name.
    #[arg(long, value_name = "NAME")]
    installation: String,
    /// Namespace in which the agents run.
    #[arg(long, value_name = "NAME", env = "POD_NAMESPACE")]
    namespace: String,
    /// Name of the agents' Service.
    #[arg(long, value_name = "NAME")]
    service: String,
    /// Address and port to serve on.
    #[arg(long, value_name = "ADDRESS", default_value = "[::]:8443", env = "AFFINODE_LISTEN")]
    listen: SocketAddr,
    /// A host name by which clients reach the page. IP addresses need not be listed.
    #[arg(long = "host", value_name = "NAME", value_delimiter = ',')]
    hosts: Vec<String>,
    #[command(flatten)]
    papers: tls::TlsFiles,
}

/// Serves the page of all nodes until SIGTERM or SIGINT.
///
/// # Errors
/// [`ServiceError`]: the service cannot start.
pub fn run(options: &FleetOptions) -> Result<(), ServiceError> {
    service::run(|stop| serve(options, stop))
}

async fn serve(options: &FleetOptions, mut stop: StopSignal) -> Result<(), ServiceError> {
    let client = service::client().await?;
    let roster =
        NodeDiscovery::watch(client, &options.namespace, &options.service, &options.installation);
    let roster = Arc::new(move || roster.nodes());
    let token = PathBuf::from(authz::ACCOUNT).join("token");
    let survey = Arc::new(FleetPoller::new(roster.clone(), token));
    tokio::spawn(Arc::clone(&survey).run());
    let fleet = FleetServer {
        guard: authz::by_review(&options.hosts).map_err(ServiceError::Guard)?,
        shown: options.papers.shown(&options.hosts)?,
        roster,
        survey,
    };
    let listener = service::listen(options.listen).await?;
    tracing::info!("page of all nodes: listening on {}", options.listen);
    tokio::select! {
        () = https::serve(listener, Arc::new(fleet)) => {}
        () = stop.wait() => {}
    }
    Ok(())
}
