//! The nodes of a cluster, and requests to their agents through the API server.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use futures_util::{StreamExt, stream};
use hyper::{Method, StatusCode};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{Api, ResourceExt, api::ListParams, core::PartialObjectMeta};
use tokio::{io::DuplexStream, time::timeout};
use tokio_rustls::client::TlsStream;

use super::{
    access::ClusterAccess,
    agent_client::{self, AgentClientError, AgentRequest},
    cert_pin::{self, Fingerprint},
    error::PluginError,
};
use crate::node::{
    NO_CONTROLLER,
    node_labels::{AGENT, CERTIFICATE, GPUS_IDLE_SINCE, STATE},
};

/// Maximum number of nodes to which requests are sent at the same time.
const MAX_CONCURRENT_NODES: usize = 16;
/// Time limit for opening a port-forward to an agent's pod, including the TLS handshake.
const OPEN: Duration = Duration::from_secs(20);
/// Time limit for the reply to a request other than a move of a container.
pub const LOOK: Duration = Duration::from_secs(20);
/// Name of the port in the agent's pod on which the agent serves HTTPS.
const PORT: &str = "https";

/// A node that an agent manages.
#[derive(Clone, Debug)]
pub struct ManagedNode {
    /// Name of the node object.
    pub name: String,
    /// State of the node as text, from the annotation that the agent writes.
    pub state: String,
    /// Time since when nothing has used a GPU of the node, from the annotation that the agent
    /// writes. `None`: the node does not have the label for this.
    pub gpus_idle_since: Option<String>,
    /// Namespace and name of the installation.
    pub installation: String,
    certificate: Option<Fingerprint>,
    agent: Option<AgentPod>,
}

/// The running pod of a node's agent.
#[derive(Clone, Debug)]
struct AgentPod {
    namespace: String,
    name: String,
    address: SocketAddr,
}

/// Reply that a node's agent sends to a request of [`ClusterAgents::ask`].
#[derive(Debug)]
pub enum AgentAnswer {
    /// HTTP status and body of the controller's reply.
    Controller(StatusCode, Vec<u8>),
    /// No controller runs on the node, so the node has no container that Affinode manages.
    NoController,
}

/// The nodes of a cluster that have an agent, and the access to send requests to the agents.
pub struct ClusterAgents<'a> {
    access: &'a ClusterAccess,
    /// Nodes with an agent, by name.
    pub nodes: Vec<ManagedNode>,
}

impl<'a> ClusterAgents<'a> {
    /// Lists the nodes that have an agent, or only the node `only`, and finds the pods of the
    /// agents.
    ///
    /// # Errors
    /// [`PluginError`]: the API server refuses or cannot be reached, or the node `only` has no
    /// agent.
    pub async fn find(
        access: &'a ClusterAccess,
        only: Option<&str>,
    ) -> Result<ClusterAgents<'a>, PluginError> {
        let mut nodes = nodes(access, only).await?;
        let installations: BTreeSet<&str> = nodes.iter().map(|n| &*n.installation).collect();
        let mut pods = BTreeMap::new();
        for installation in installations {
            pods.extend(agent_pods(access, installation).await?);
        }
        for node in &mut nodes {
            node.agent = pods.remove(&(node.installation.clone(), node.name.clone()));
        }
        Ok(ClusterAgents { access, nodes })
    }

    /// Sends a GET request to all nodes, a few at a time. The results are in the order of the
    /// nodes.
    pub async fn get_each(&self, path: &str) -> Vec<(&ManagedNode, NodeAnswer)> {
        let asked = self.nodes.iter().map(|node| async move {
            let answer = self.ask(node, Method::GET, path, LOOK).await;
            (node, answer.and_then(content))
        });
        stream::iter(asked).buffered(MAX_CONCURRENT_NODES).collect().await
    }

    /// Sends a request to a node's agent, with the user's token.
    ///
    /// # Errors
    /// [`PluginError`]: the request was refused, or the agent did not reply.
    pub async fn ask(
        &self,
        node: &ManagedNode,
        method: Method,
        path: &str,
        time: Duration,
    ) -> Result<AgentAnswer, PluginError> {
        let authorization = self.access.authorization()?;
        let agent = node.agent.as_ref().ok_or(PluginError::NoAgent)?;
        let certificate = node.certificate.ok_or(AgentClientError::NoCertificate)?;
        let peer = agent.address.to_string();
        let late = |_| AgentClientError::Time(peer.clone(), OPEN);
        let opened = timeout(OPEN, self.open(agent, &peer, certificate)).await;
        let stream = opened.map_err(late)??;
        let question = AgentRequest { method, path, authorization, time };
        let answer = agent_client::exchange(stream, &peer, question).await?;
        let (status, absent) = (answer.status(), answer.headers().contains_key(NO_CONTROLLER));
        if status == StatusCode::SERVICE_UNAVAILABLE && absent {
            return Ok(AgentAnswer::NoController);
        }
        let body = answer.into_body();
        match status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                Err(PluginError::Refused(agent_client::said(&body)))
            }
            StatusCode::BAD_GATEWAY
            | StatusCode::SERVICE_UNAVAILABLE
            | StatusCode::GATEWAY_TIMEOUT => Err(PluginError::NoController {
                status: status.as_u16(),
                text: agent_client::said(&body),
            }),
            _ => Ok(AgentAnswer::Controller(status, body)),
        }
    }

    /// Opens a port-forward to the agent's pod, and performs the TLS handshake on it.
    async fn open(
        &self,
        agent: &AgentPod,
        peer: &str,
        certificate: Fingerprint,
    ) -> Result<TlsStream<DuplexStream>, PluginError> {
        let port = agent.address.port();
        let pods: Api<Pod> = Api::namespaced(self.access.client.clone(), &agent.namespace);
        let what = format!("forward a port of pod {}/{}", agent.namespace, agent.name);
        let forward = pods.portforward(&agent.name, &[port]).await;
        let mut forward = forward.map_err(PluginError::api(what))?;
        let failed = |why: &str| PluginError::Forward { pod: agent.name.clone(), why: why.into() };
        let (Some(stream), Some(error)) = (forward.take_stream(port), forward.take_error(port))
        else {
            return Err(failed("no stream was opened for the agent's port"));
        };
        tokio::select! {
            stream = agent_client::handshake(stream, peer, certificate) => Ok(stream?),
            Some(why) = error => Err(failed(&why)),
        }
    }
}

/// Body of the reply of a node's agent. `None`: no controller runs on the node.
pub type NodeAnswer = Result<Option<Vec<u8>>, PluginError>;

fn content(answer: AgentAnswer) -> NodeAnswer {
    match answer {
        AgentAnswer::NoController => Ok(None),
        AgentAnswer::Controller(StatusCode::OK, body) => Ok(Some(body)),
        AgentAnswer::Controller(status, body) => {
            let text = agent_client::said(&body);
            Err(PluginError::Reply(format!("the node's controller replied {status}: {text}")))
        }
    }
}

async fn nodes(
    access: &ClusterAccess,
    only: Option<&str>,
) -> Result<Vec<ManagedNode>, PluginError> {
    let api: Api<Node> = Api::all(access.client.clone());
    let listed = api.list_metadata(&ListParams::default()).await;
    let listed = listed.map_err(PluginError::api("list nodes"))?;
    let mut nodes: Vec<ManagedNode> = listed.items.iter().filter_map(managed).collect();
    nodes.sort_by(|a, b| a.name.cmp(&b.name));
    match only {
        _ if nodes.is_empty() => Err(PluginError::NoAgents),
        None => Ok(nodes),
        Some(name) => {
            nodes.retain(|node| node.name == name);
            if nodes.is_empty() { Err(PluginError::NoNode(name.to_owned())) } else { Ok(nodes) }
        }
    }
}

fn managed(node: &PartialObjectMeta<Node>) -> Option<ManagedNode> {
    let said = |name: &str| node.annotations().get(name).map_or("", String::as_str);
    let installation = node.annotations().get(AGENT)?.clone();
    Some(ManagedNode {
        name: node.name_any(),
        state: said(STATE).to_owned(),
        gpus_idle_since: node.annotations().get(GPUS_IDLE_SINCE).cloned(),
        installation,
        certificate: cert_pin::parse(said(CERTIFICATE)),
        agent: None,
    })
}

/// Returns the running agent pods of an installation. The key is the installation's name and the
/// node's name.
async fn agent_pods(
    access: &ClusterAccess,
    installation: &str,
) -> Result<BTreeMap<(String, String), AgentPod>, PluginError> {
    let (namespace, release) = installation.split_once('/').unwrap_or((installation, ""));
    let labels = format!("app.kubernetes.io/component=node,app.kubernetes.io/instance={release}");
    let api: Api<Pod> = Api::namespaced(access.client.clone(), namespace);
    let listed = api.list(&ListParams::default().labels(&labels)).await;
    let listed = listed.map_err(PluginError::api(format!("list pods of namespace {namespace}")))?;
    let mut found = BTreeMap::new();
    // While an agent is being replaced, its node has two agent pods. The ready pod is used.
    let (ready, others): (Vec<&Pod>, Vec<&Pod>) = listed.iter().partition(|pod| is_ready(pod));
    for pod in others.into_iter().chain(ready) {
        if let Some((node, agent)) = agent_of(pod) {
            found.insert((installation.to_owned(), node), agent);
        }
    }
    Ok(found)
}

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().filter_map(|status| status.conditions.as_ref()).flatten();
    conditions.into_iter().any(|c| c.type_ == "Ready" && c.status == "True")
        && pod.metadata.deletion_timestamp.is_none()
}

/// Returns the name of the node on which an agent pod runs, and the pod's name and address. `None`:
/// the pod does not run yet.
fn agent_of(pod: &Pod) -> Option<(String, AgentPod)> {
    let (spec, status) = (pod.spec.as_ref()?, pod.status.as_ref()?);
    if status.phase.as_deref() != Some("Running") {
        return None;
    }
    let ip: IpAddr = status.pod_ip.as_ref()?.parse().ok()?;
    let mut ports = spec.containers.iter().filter_map(|c| c.ports.as_ref()).flatten();
    let port = ports.find(|port| port.name.as_deref() == Some(PORT))?.container_port;
    let address = SocketAddr::new(ip, u16::try_from(port).ok()?);
    let (namespace, name) = (pod.namespace()?, pod.name_any());
    Some((spec.node_name.clone()?, AgentPod { namespace, name, address }))
}
