//! A simulated node agent and its controller. It uses real TLS, and grants rights by the token of a
//! request.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use affinode_cluster::https::{
    self, HttpsLimits, HttpsSite,
    tls::{ServedCertificate, TlsPair},
};
use affinode_controller::schema;
use affinode_proto::state::State;
use http_body_util::Full;
use hyper::{
    Request, Response,
    body::{Bytes, Incoming},
    header,
};
use serde_json::{Value, json};
use tokio_rustls::rustls::ServerConfig;

/// Token of the user.
pub const USER: &str = "the-token-of-ana";

/// A simulated agent that listens on loopback. It also acts as the controller of its node.
pub struct Agent {
    shown: ServedCertificate,
    /// The node that the controller reports. `None`: no controller runs.
    pub node: Mutex<Option<schema::Node>>,
    /// The report that the controller returns.
    pub report: Mutex<schema::Report>,
    /// Paths that the user may not request.
    pub forbidden: Mutex<Vec<String>>,
    /// Tokens that the agent received.
    pub tokens: Mutex<Vec<String>>,
    pub asked: Mutex<Vec<String>>,
}

impl Agent {
    /// Starts an agent on loopback. Returns also its address and the fingerprint of its
    /// certificate.
    pub async fn start(node: Option<schema::Node>) -> (Arc<Agent>, SocketAddr, String) {
        let made = rcgen::generate_simple_self_signed(vec!["node".to_owned()]).unwrap();
        let (cert, key) = (made.cert.pem().into(), made.signing_key.serialize_pem().into());
        let shown = ServedCertificate::default();
        shown.show(&TlsPair { cert, key }).unwrap();
        let fingerprint = shown.fingerprint().unwrap();
        let agent = Arc::new(Agent {
            shown,
            node: Mutex::new(node),
            report: Mutex::default(),
            forbidden: Mutex::default(),
            tokens: Mutex::default(),
            asked: Mutex::default(),
        });
        let listener = https::listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(https::serve(listener, Arc::clone(&agent)));
        (agent, address, fingerprint)
    }

    pub fn forbid(&self, path: &str) {
        self.forbidden.lock().unwrap().push(path.to_owned());
    }

    fn reply(&self, line: &str, path: &str, token: &str) -> (u16, Value) {
        if token != format!("Bearer {USER}") {
            return (401, json!({ "error": "the API server does not accept the token" }));
        }
        if self.forbidden.lock().unwrap().iter().any(|forbidden| path.ends_with(forbidden)) {
            return (403, json!({ "error": format!("ana may not {line}") }));
        }
        let node = self.node.lock().unwrap();
        match (&*node, line) {
            (None, _) => (503, json!({ "error": "no controller runs on this node" })),
            (Some(node), "GET /api/v1/node") => (200, serde_json::to_value(node).unwrap()),
            (Some(_), "GET /api/v1/report") => {
                (200, serde_json::to_value(&*self.report.lock().unwrap()).unwrap())
            }
            (Some(node), _) if path.starts_with("/api/v1/containers/") => moved(node, path),
            _ => (404, json!({ "error": "no such path" })),
        }
    }
}

/// Returns the simulated controller's reply to a request for a move. It refuses the offload of the
/// pod `busy`, and does not find an unknown container.
fn moved(node: &schema::Node, path: &str) -> (u16, Value) {
    let [key, verb] = path.rsplitn(3, '/').take(2).collect::<Vec<_>>()[..] else {
        panic!("{path}")
    };
    let (key, verb) = (verb, key);
    let Some(container) = node.containers.iter().find(|c| c.key == key) else {
        return (
            404,
            json!({ "error": "no container has this key; the container may have ended" }),
        );
    };
    let busy = verb == "offload" && container.pod == "busy";
    let action = schema::Action {
        done: !busy,
        state: if busy || verb == "restore" { "Active" } else { "Offloaded" }.into(),
        reason_text: if busy { "a call is in progress" } else { "was requested" }.into(),
        bytes: if busy { 0 } else { 24 << 30 },
        elapsed_ms: 490,
        ..schema::Action::default()
    };
    (if busy { 409 } else { 200 }, serde_json::to_value(action).unwrap())
}

impl HttpsSite for Agent {
    type Body = Full<Bytes>;
    const LIMITS: HttpsLimits = HttpsLimits {
        connections: 64,
        connections_per_address: 64,
        handshake: Duration::from_secs(20),
        head: Duration::from_secs(20),
    };

    fn papers(&self) -> Option<Arc<ServerConfig>> {
        self.shown.config()
    }

    async fn answer(&self, request: Request<Incoming>) -> Response<Self::Body> {
        let path = request.uri().path();
        let line = format!("{} {path}", request.method());
        let token = request.headers().get(header::AUTHORIZATION);
        let token = token.map_or("", |token| token.to_str().unwrap());
        // The agent accepts only its own address in this header.
        assert_eq!(request.headers()[header::HOST], "10.98.1.7:9411");
        self.tokens.lock().unwrap().push(token.to_owned());
        self.asked.lock().unwrap().push(line.clone());
        let (status, body) = self.reply(&line, path, token);
        let mut answer =
            Response::builder().status(status).header(header::CONTENT_TYPE, "application/json");
        if status == 503 {
            answer = answer.header("affinode-controller", "none");
        }
        answer.body(Full::from(body.to_string())).unwrap()
    }
}

/// Creates a node with one GPU and these containers.
pub fn node(containers: Vec<schema::Container>) -> schema::Node {
    let gpu = schema::Gpu {
        uuid: "GPU-a1".into(),
        name: "H200".into(),
        vram_total_bytes: 140 << 30,
        vram_used_bytes: 30 << 30,
        ..schema::Gpu::default()
    };
    schema::Node {
        version: "0.1.0".into(),
        auto_offload: true,
        gpus: vec![gpu],
        containers,
        ..schema::Node::default()
    }
}

/// Creates a container of a pod. `gib` is its VRAM, or its offloaded memory if it is offloaded.
pub fn container(namespace: &str, pod: &str, state: State, gib: u64) -> schema::Container {
    let (vram, offloaded) = if state == State::Offloaded { (0, gib) } else { (gib, 0) };
    let on_gpu = vec![schema::DeviceBytes { uuid: "GPU-a1".into(), bytes: 1 }];
    schema::Container {
        name: format!("{namespace}/{pod}/main"),
        key: format!("{:032x}", pod.bytes().fold(7u64, |sum, byte| sum * 31 + u64::from(byte))),
        pod_namespace: namespace.into(),
        pod: pod.into(),
        container: "main".into(),
        state: state.as_str().into(),
        reason_text: "the time since the last CUDA call is less than the idle timeout".into(),
        vram_bytes: vram << 30,
        offloaded_bytes: offloaded << 30,
        mode: "auto".into(),
        processes: vec![schema::Process { vram: on_gpu, ..schema::Process::default() }],
        ..schema::Container::default()
    }
}
