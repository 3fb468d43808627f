//! Watches objects of the cluster to find nodes, the addresses of their agents, and the
//! certificates.

use std::{collections::BTreeMap, net::SocketAddr, sync::Arc};

use futures_util::StreamExt;
use k8s_openapi::api::{core::v1::Node, discovery::v1::EndpointSlice};
use kube::{
    Api, Client, ResourceExt,
    core::PartialObjectMeta,
    runtime::{
        WatchStreamExt,
        reflector::{self, Store},
        watcher,
    },
};

use super::cert_pin::{self, Fingerprint};
use crate::{
    error_chain,
    node::node_labels::{AGENT, CERTIFICATE, STATE},
};

/// Maximum number of nodes shown. Kubernetes supports no larger cluster.
pub const NODES: usize = 5000;

/// A node that an agent of this installation manages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnownNode {
    /// Name of the node object.
    pub name: String,
    /// State of the node as its agent reports it in the annotation.
    pub state: String,
    /// Address of the agent. `None`: the agent has no address now.
    pub address: Option<SocketAddr>,
    /// Fingerprint that the agent has published.
    pub certificate: Option<Fingerprint>,
}

/// All known nodes, sorted by name.
pub type Nodes = Arc<dyn Fn() -> Vec<KnownNode> + Send + Sync>;

/// Watches the nodes and the endpoints of the agents.
pub struct NodeDiscovery {
    nodes: Store<PartialObjectMeta<Node>>,
    agents: Store<EndpointSlice>,
    installation: String,
}

impl NodeDiscovery {
    /// Starts the watches, which run until the async runtime ends.
    #[must_use]
    pub fn watch(
        client: Client,
        namespace: &str,
        service: &str,
        installation: &str,
    ) -> NodeDiscovery {
        let (nodes, writer) = reflector::store();
        let events =
            watcher(Api::<PartialObjectMeta<Node>>::all(client.clone()), Default::default())
                .default_backoff()
                .modify(|node| node.managed_fields_mut().clear());
        tokio::spawn(reflector::reflector(writer, events).for_each(|event| async {
            if let Err(error) = event {
                tracing::warn!(
                    "nodes: the watch of the node objects failed, and is started again: {}",
                    error_chain::chain(&error)
                );
            }
        }));
        let (agents, writer) = reflector::store();
        let of =
            watcher::Config::default().labels(&format!("kubernetes.io/service-name={service}"));
        let events = watcher(Api::namespaced(client, namespace), of).default_backoff();
        tokio::spawn(reflector::reflector(writer, events).for_each(|event| async {
            if let Err(error) = event {
                tracing::warn!(
                    "agents: the watch of the agents' addresses failed, and is started again: {}",
                    error_chain::chain(&error)
                );
            }
        }));
        NodeDiscovery { nodes, agents, installation: installation.to_owned() }
    }

    /// All nodes of the installation.
    #[must_use]
    pub fn nodes(&self) -> Vec<KnownNode> {
        roster(&self.nodes.state(), &self.agents.state(), &self.installation)
    }
}

fn roster(
    nodes: &[Arc<PartialObjectMeta<Node>>],
    slices: &[Arc<EndpointSlice>],
    installation: &str,
) -> Vec<KnownNode> {
    let mut addresses = BTreeMap::new();
    for slice in slices {
        let ports = slice.ports.iter().flatten();
        let Some(port) = ports.filter_map(|p| u16::try_from(p.port?).ok()).next() else { continue };
        for endpoint in slice.endpoints.iter().flatten() {
            let (Some(node), Some(ip)) = (&endpoint.node_name, endpoint.addresses.first()) else {
                continue;
            };
            let Ok(ip) = ip.parse() else { continue };
            let ready = endpoint.conditions.as_ref().and_then(|c| c.ready).unwrap_or(true);
            // While an agent is being replaced, the node has two addresses. The address of the
            // agent that is ready is used.
            let seen = addresses.entry(node.as_str()).or_insert((ready, SocketAddr::new(ip, port)));
            if ready && !seen.0 {
                *seen = (ready, SocketAddr::new(ip, port));
            }
        }
    }
    let mut known: Vec<KnownNode> = nodes
        .iter()
        .filter(|node| node.annotations().get(AGENT).is_some_and(|agent| agent == installation))
        .map(|node| {
            let said = |name: &str| node.annotations().get(name).map_or("", String::as_str);
            let name = node.name_any();
            KnownNode {
                state: said(STATE).chars().take(300).collect(),
                address: addresses.get(name.as_str()).map(|(_, address)| *address),
                certificate: cert_pin::parse(said(CERTIFICATE)),
                name,
            }
        })
        .collect();
    known.sort_by(|a, b| a.name.cmp(&b.name));
    known
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn node(name: &str, annotations: Value) -> Arc<PartialObjectMeta<Node>> {
        let node = json!({
            "apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata",
            "metadata": { "name": name, "annotations": annotations },
        });
        Arc::new(serde_json::from_value(node).unwrap())
    }

    fn slice(endpoints: Value) -> Arc<EndpointSlice> {
        let slice = json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
            "metadata": { "name": "agents" }, "ports": [{ "port": 9411 }], "endpoints": endpoints,
        });
        Arc::new(serde_json::from_value(slice).unwrap())
    }

    #[test]
    fn only_nodes_of_this_installation_are_known() {
        let fingerprint = "0a".repeat(32);
        let nodes = [
            node("b", json!({ AGENT: "ns/us", STATE: "served", CERTIFICATE: fingerprint })),
            node("a", json!({ AGENT: "ns/us", STATE: "not installed: no containerd" })),
            node("theirs", json!({ AGENT: "ns/them" })),
            node("nobodys", json!({})),
        ];
        let slices = [slice(json!([
            { "nodeName": "b", "addresses": ["10.0.0.9"], "conditions": { "ready": false } },
            { "nodeName": "b", "addresses": ["10.0.0.2"], "conditions": { "ready": true } },
            { "nodeName": "theirs", "addresses": ["10.0.0.3"] },
            { "nodeName": "a", "addresses": ["no address"] },
        ]))];
        let known = roster(&nodes, &slices, "ns/us");
        assert_eq!(known.iter().map(|k| &*k.name).collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!((known[0].address, known[0].certificate), (None, None));
        assert_eq!(known[0].state, "not installed: no containerd");
        assert_eq!(known[1].address, Some("10.0.0.2:9411".parse().unwrap()));
        assert_eq!(known[1].certificate, Some([10; 32]));
    }

    #[test]
    fn a_fingerprint_is_64_hex_digits() {
        let long = "0a".repeat(33);
        for wrong in ["", "0a", &"zz".repeat(32), &"é".repeat(32), &long] {
            assert_eq!(cert_pin::parse(wrong), None, "{wrong}");
        }
    }
}
