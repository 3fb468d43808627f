//! One page for all nodes: how much VRAM each has, what could be moved out, who waits; and the way
//! to each node's own dashboard.
//!
//! ```text
//!  browser ──TLS, token──> [`site`] ──TokenReview, SubjectAccessReview──> API server
//!                            │ may look: the list          │ may do that: the node's own API
//!                            v                             v
//!                         [`survey`] ──its own token──> [`ask`] ──the user's token──> node agent,
//!                            ^                            TLS, pinned                 which asks again
//!                         [`roster`]: nodes, agents' addresses, their certificates
//! ```
//!
//! The list is shown to whom the API server lets `get /affinode/v1/node`, which is what each agent would
//! ask; this program's account has that one right and no other, so nobody sees by it what a token
//! would not show. What is below a node's name goes to its agent with the user's own token. The
//! page itself is ours, whichever node it shows: an agent can send data, never a script.

mod agent_client;
mod cert_pin;
mod discovery;
mod poller;
mod server;
mod summary;
#[cfg(test)]
mod tests;

use std::{net::SocketAddr, path::PathBuf, sync::Arc};

use clap::Args;

use self::{discovery::NodeDiscovery, poller::FleetPoller, server::FleetServer};
use crate::{
    https::{self, authz, tls},
    service::{self, ServiceError, Told},
};

/// How it runs.
#[derive(Args, Clone, Debug)]
pub struct FleetOptions {
    /// This installation in the cluster: namespace/name.
    #[arg(long, value_name = "NAME")]
    installation: String,
    /// Namespace of the agents.
    #[arg(long, value_name = "NAME", env = "POD_NAMESPACE")]
    namespace: String,
    /// The agents' Service.
    #[arg(long, value_name = "NAME")]
    service: String,
    /// Where the page is.
    #[arg(long, value_name = "ADDRESS", default_value = "[::]:8443", env = "AFFINODE_LISTEN")]
    listen: SocketAddr,
    /// A name, other than addresses, that clients call it by.
    #[arg(long = "host", value_name = "NAME", value_delimiter = ',')]
    hosts: Vec<String>,
    #[command(flatten)]
    papers: tls::TlsFiles,
}

/// Serves until SIGTERM or SIGINT.
///
/// # Errors
/// [`ServiceError`].
pub fn run(options: &FleetOptions) -> Result<(), ServiceError> {
    service::run(|told| serve(options, told))
}

async fn serve(options: &FleetOptions, mut told: Told) -> Result<(), ServiceError> {
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
    tracing::info!("listening on {}", options.listen);
    tokio::select! {
        () = https::serve(listener, Arc::new(fleet)) => {}
        () = told.wait() => {}
    }
    Ok(())
}
