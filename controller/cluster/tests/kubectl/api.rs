//! A simulated API server in memory. It serves nodes, pods of agents, and port-forwards to agents
//! on loopback. Its HTTP and WebSocket frames are real.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use futures_util::{SinkExt, StreamExt};
use http_body_util::{BodyExt, Full};
use hyper::{
    Method, Request, Response,
    body::{Bytes, Incoming},
    header::{self, HeaderValue},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{Message, handshake::derive_accept_key, protocol::Role},
};

use super::agent::USER;

/// Port on which the agents' pods listen.
const PORT: u16 = 9411;
/// Path of the pods in the agents' namespace.
const PODS: &str = "/api/v1/namespaces/system/pods";

/// Path of requests that review the user's own rights.
const REVIEW: &str = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
/// Path of requests that create a token for a service account.
const TOKEN: &str = "/api/v1/namespaces/ml/serviceaccounts/ana/token";

/// Objects and behaviour of the API server.
#[derive(Default)]
pub struct Cluster {
    /// Node objects by name.
    pub nodes: BTreeMap<String, Value>,
    /// Address of the agent of each pod. `None`: no process listens on the port of the pod.
    pub agents: BTreeMap<String, Option<SocketAddr>>,
    /// Whether the API server accepts requests without a token, as from a user with a client
    /// certificate.
    pub open: bool,
    /// Method and path of requests that are denied.
    pub denied: Vec<String>,
    /// Method and path of each request that the server received.
    pub asked: Vec<String>,
}

#[derive(Clone, Default)]
pub struct ApiServer {
    pub cluster: Arc<Mutex<Cluster>>,
}

impl ApiServer {
    /// Adds a node with an agent. The annotation of the node contains `fingerprint`, the
    /// fingerprint of the agent's certificate.
    pub fn add(&self, name: &str, agent: Option<SocketAddr>, fingerprint: &str) {
        let node = json!({
            "apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata",
            "metadata": { "name": name, "annotations": {
                "affinode.io/agent": "system/affinode", "affinode.io/state": "served",
                "affinode.io/certificate-sha256": fingerprint,
            } },
        });
        let mut cluster = self.cluster.lock().unwrap();
        cluster.nodes.insert(name.to_owned(), node);
        cluster.agents.insert(format!("agent-{name}"), agent);
    }

    pub fn deny(&self, request: &str) {
        self.cluster.lock().unwrap().denied.push(request.to_owned());
    }

    pub fn asked(&self) -> Vec<String> {
        self.cluster.lock().unwrap().asked.clone()
    }

    /// Serves requests on loopback until the test ends. Returns the address.
    pub async fn serve(&self) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = self.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let server = server.clone();
                let answer = service_fn(move |request| {
                    let server = server.clone();
                    async move { Ok::<_, Infallible>(server.answer(request).await) }
                });
                let connection =
                    http1::Builder::new().serve_connection(TokioIo::new(stream), answer);
                tokio::spawn(connection.with_upgrades());
            }
        });
        address
    }

    async fn answer(&self, mut request: Request<Incoming>) -> Response<Full<Bytes>> {
        let path = request.uri().path().to_owned();
        let line = format!("{} {path}", request.method());
        let token = request.headers().get(header::AUTHORIZATION).cloned();
        let (open, denied) = {
            let mut cluster = self.cluster.lock().unwrap();
            cluster.asked.push(line.clone());
            (cluster.open, cluster.denied.contains(&line))
        };
        if !open
            && token.as_ref().map(HeaderValue::as_bytes)
                != Some(format!("Bearer {USER}").as_bytes())
        {
            return failure(401, "Unauthorized");
        }
        if denied {
            return failure(403, &format!("the user may not {line}"));
        }
        if let Some(pod) = path.strip_suffix("/portforward") {
            let pod = pod.rsplit('/').next().unwrap_or_default();
            let agent = self.cluster.lock().unwrap().agents.get(pod).copied();
            return match agent {
                Some(agent) => upgrade(&mut request, agent),
                None => failure(404, "pods not found"),
            };
        }
        let method = request.method().clone();
        let sent = request.into_body().collect().await.unwrap().to_bytes();
        let sent = serde_json::from_slice(&sent).unwrap_or(Value::Null);
        self.object(&method, &path, &sent)
    }

    fn object(&self, method: &Method, path: &str, sent: &Value) -> Response<Full<Bytes>> {
        let mut cluster = self.cluster.lock().unwrap();
        if let Some(name) = path.strip_prefix("/api/v1/nodes/") {
            return match cluster.nodes.get_mut(name) {
                Some(node) => node_reply(node, method, sent),
                None => failure(404, "nodes not found"),
            };
        }
        match (method, path) {
            (&Method::GET, "/api/v1/nodes") => {
                let items: Vec<&Value> = cluster.nodes.values().collect();
                reply(200, &list("meta.k8s.io/v1", "PartialObjectMetadataList", &json!(items)))
            }
            (&Method::GET, PODS) => {
                let items: Vec<Value> = cluster.agents.keys().map(|name| pod(name)).collect();
                reply(200, &list("v1", "PodList", &json!(items)))
            }
            (&Method::POST, REVIEW) => {
                let attributes = &sent["spec"]["nonResourceAttributes"];
                let word = |name: &str| attributes[name].as_str().unwrap();
                let asked = format!("{} {}", word("verb"), word("path"));
                let allowed = !cluster.denied.contains(&asked);
                reply(201, &json!({ "metadata": {}, "spec": {}, "status": { "allowed": allowed } }))
            }
            (&Method::POST, TOKEN) => {
                reply(201, &json!({ "metadata": {}, "spec": {}, "status": { "token": USER } }))
            }
            _ => failure(404, "not found"),
        }
    }
}

/// Returns the reply to a request for a node object. A patch sets the label that excludes the node,
/// and the state annotation that an agent would write after this.
fn node_reply(node: &mut Value, method: &Method, sent: &Value) -> Response<Full<Bytes>> {
    if method == Method::PATCH {
        let excluded = &sent["metadata"]["labels"]["affinode.io/exclude"];
        node["metadata"]["labels"]["affinode.io/exclude"] = excluded.clone();
        let busy = node["metadata"]["name"] == "busy";
        let state = match (excluded == "true", busy) {
            (true, false) => "excluded: Affinode is not on this node",
            (true, true) => "cannot be removed: 1 shim runs",
            (false, _) => "served",
        };
        node["metadata"]["annotations"]["affinode.io/state"] = state.into();
    }
    let mut shown = node.clone();
    if let Some(labels) = shown["metadata"]["labels"].as_object_mut() {
        labels.retain(|_, value| !value.is_null());
    }
    reply(200, &shown)
}

fn list(version: &str, kind: &str, items: &Value) -> Value {
    json!({ "apiVersion": version, "kind": kind, "metadata": {}, "items": items })
}

fn pod(name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "name": name, "namespace": "system" },
        "spec": {
            "nodeName": name.trim_start_matches("agent-"),
            "containers": [{ "name": "node", "ports": [{ "name": "https", "containerPort": PORT }] }],
        },
        "status": {
            "phase": "Running", "podIP": "10.98.1.7",
            "conditions": [{ "type": "Ready", "status": "True" }],
        },
    })
}

fn reply(status: u16, object: &Value) -> Response<Full<Bytes>> {
    let body = Full::from(object.to_string());
    Response::builder()
        .status(status)
        .header(header::CONTENT_TYPE, "application/json")
        .body(body)
        .unwrap()
}

fn failure(code: u16, message: &str) -> Response<Full<Bytes>> {
    reply(
        code,
        &json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": message, "reason": message, "code": code,
        }),
    )
}

/// Accepts a port-forward of one port, as a kubelet does.
fn upgrade(request: &mut Request<Incoming>, agent: Option<SocketAddr>) -> Response<Full<Bytes>> {
    let query = request.uri().query().unwrap_or_default();
    assert!(query.ends_with(&format!("ports={PORT}")), "{query}");
    let key = request.headers()[header::SEC_WEBSOCKET_KEY].clone();
    let upgraded = hyper::upgrade::on(&mut *request);
    tokio::spawn(async move {
        let stream = TokioIo::new(upgraded.await.unwrap());
        forward(WebSocketStream::from_raw_socket(stream, Role::Server, None).await, agent).await;
    });
    Response::builder()
        .status(101)
        .header(header::CONNECTION, "Upgrade")
        .header(header::UPGRADE, "websocket")
        .header(header::SEC_WEBSOCKET_PROTOCOL, "v4.channel.k8s.io")
        .header(header::SEC_WEBSOCKET_ACCEPT, derive_accept_key(key.as_bytes()))
        .body(Full::default())
        .unwrap()
}

/// Forwards bytes between a WebSocket and a port. The WebSocket's channel 0 carries the bytes, and
/// channel 1 an error. Both begin with the number of the port.
async fn forward<S>(mut socket: WebSocketStream<S>, agent: Option<SocketAddr>)
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
{
    let [low, high] = PORT.to_le_bytes();
    for channel in [0, 1] {
        socket.send(Message::binary(vec![channel, low, high])).await.unwrap();
    }
    let Some(agent) = agent else {
        let why = b"\x01connection refused in the pod".to_vec();
        socket.send(Message::binary(why)).await.unwrap();
        // Wait until the client closes the socket.
        while socket.next().await.is_some_and(|message| message.is_ok()) {}
        return;
    };
    let mut stream = TcpStream::connect(agent).await.unwrap();
    let mut bytes = vec![0; 16 << 10];
    loop {
        tokio::select! {
            read = stream.read(&mut bytes) => match read {
                Ok(read) if read > 0 => {
                    let frame = [&[0], &bytes[..read]].concat();
                    if socket.send(Message::binary(frame)).await.is_err() {
                        return;
                    }
                }
                _ => return,
            },
            message = socket.next() => match message {
                Some(Ok(Message::Binary(frame))) => {
                    assert_eq!(frame[0], 0, "only the port's channel is written");
                    if stream.write_all(&frame[1..]).await.is_err() {
                        return;
                    }
                }
                _ => return,
            },
        }
    }
}
