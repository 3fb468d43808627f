//! The page of all nodes with agents on loopback. TLS and the agents' certificates are real. A
//! token file is used in place of the API server.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use affinode_controller::{config::HttpSection, http::HttpGuard};
use http_body_util::{BodyExt, StreamBody, combinators::UnsyncBoxBody};
use hyper::{
    Request, Response,
    body::{Bytes, Frame, Incoming},
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};
use tokio_rustls::rustls::ServerConfig;

use super::{
    cert_pin,
    discovery::{KnownNode, Nodes},
    poller::{FleetPoller, NodeHealth, NodeRow},
    server::FleetServer,
};
use crate::{
    https::{
        self, HttpsLimits, HttpsSite, answer_all,
        tls::{ServedCertificate, TlsPair},
    },
    node::NO_CONTROLLER,
};

/// Token that the fleet server itself sends to the agents.
const OWN: &str = "the-account-of-the-fleet-server";
/// Token of a user of the page.
const USER: &str = "a-long-and-secret-token";

/// Behaviour of a simulated agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AgentBehavior {
    Well,
    NoController,
    Forbids,
    /// Accepts the request and never replies.
    Silent,
    /// Sends a body that never ends.
    Endless,
    /// Sends HTML with a script.
    Page,
}

struct Agent {
    behavior: AgentBehavior,
    shown: ServedCertificate,
    /// Tokens that the agent received.
    asked: std::sync::Mutex<Vec<String>>,
    busy: AtomicUsize,
    most: AtomicUsize,
}

impl HttpsSite for Agent {
    type Body = UnsyncBoxBody<Bytes, std::io::Error>;
    const LIMITS: HttpsLimits = HttpsLimits {
        connections: 64,
        handshake: Duration::from_secs(5),
        head: Duration::from_secs(5),
    };

    fn papers(&self) -> Option<Arc<ServerConfig>> {
        self.shown.config()
    }

    async fn answer(&self, request: Request<Incoming>) -> Response<Self::Body> {
        let header = |name: &str| {
            request.headers().get(name).map(|v| v.to_str().unwrap().to_owned()).unwrap_or_default()
        };
        let token = header("authorization");
        self.asked.lock().unwrap().push(token.clone());
        let now = self.busy.fetch_add(1, Ordering::Relaxed) + 1;
        self.most.fetch_max(now, Ordering::Relaxed);
        tokio::task::yield_now().await;
        self.busy.fetch_sub(1, Ordering::Relaxed);
        let json = |status: u16, value: Value| (status, "application/json", value.to_string());
        let (status, kind, text) = match self.behavior {
            AgentBehavior::Silent => std::future::pending().await,
            AgentBehavior::NoController => {
                json(503, json!({ "error": "no controller runs on this node" }))
            }
            AgentBehavior::Forbids => {
                json(403, json!({ "error": "the fleet may not get /api/v1/node" }))
            }
            AgentBehavior::Page => (200, "text/html", "<script>steal()</script>".to_owned()),
            AgentBehavior::Endless => json(200, json!({})),
            AgentBehavior::Well if request.uri().path() == "/api/v1/node" => json(
                200,
                json!({
                    "version": "0.1.0", "gpus": [{ "name": "H200", "vram_total_bytes": 100 }],
                    "containers": [{ "state": "Offloaded", "offloaded_bytes": 7 }],
                }),
            ),
            AgentBehavior::Well => {
                let (method, uri) = (request.method().to_string(), request.uri().to_string());
                json(
                    200,
                    json!({
                        "token": token, "method": method, "uri": uri, "host": header("host"),
                        "id": header("last-event-id"), "origin": header("origin"),
                    }),
                )
            }
        };
        let body = if self.behavior == AgentBehavior::Endless {
            let piece = || Ok(Frame::data(Bytes::from_static(&[b' '; 64 << 10])));
            StreamBody::new(futures_util::stream::repeat_with(piece)).boxed_unsync()
        } else {
            http_body_util::Full::from(text).map_err(|never| match never {}).boxed_unsync()
        };
        let mut answer = Response::builder().status(status).header("content-type", kind);
        if self.behavior == AgentBehavior::NoController {
            answer = answer.header(NO_CONTROLLER, "none");
        }
        answer.header("set-cookie", "a=b").body(body).unwrap()
    }
}

async fn agent(behavior: AgentBehavior) -> (Arc<Agent>, KnownNode) {
    let made = rcgen::generate_simple_self_signed(vec!["node".to_owned()]).unwrap();
    let (cert, key) = (made.cert.pem().into(), made.signing_key.serialize_pem().into());
    let shown = ServedCertificate::default();
    shown.show(&TlsPair { cert, key }).unwrap();
    let certificate = cert_pin::parse(&shown.fingerprint().unwrap());
    let asked = std::sync::Mutex::default();
    let agent =
        Agent { behavior, shown, asked, busy: AtomicUsize::new(0), most: AtomicUsize::new(0) };
    let agent = Arc::new(agent);
    let listener = https::listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let address = Some(listener.local_addr().unwrap());
    tokio::spawn(https::serve(listener, Arc::clone(&agent)));
    let name = format!("{behavior:?}").to_lowercase();
    (agent, KnownNode { name, state: "served".into(), address, certificate })
}

struct Stage {
    fleet: FleetServer,
    _folder: tempfile::TempDir,
}

fn stage(nodes: Vec<KnownNode>) -> Stage {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        std::fs::write(folder.path().join(name), text).unwrap();
        folder.path().join(name)
    };
    let section = HttpSection {
        token_file: file("user", USER).display().to_string(),
        ..HttpSection::default()
    };
    let roster: Nodes = Arc::new(move || nodes.clone());
    let survey = Arc::new(FleetPoller::new(roster.clone(), file("own", OWN)));
    let guard = HttpGuard::new(&section).unwrap();
    Stage { fleet: FleetServer { guard, shown: Arc::default(), roster, survey }, _folder: folder }
}

impl Stage {
    async fn ask(&self, line: &str, headers: &[&str]) -> String {
        let (mut near, far) = tokio::io::duplex(1 << 20);
        let mut request = format!("{line} HTTP/1.1\r\nhost: 10.0.0.1\r\nconnection: close\r\n");
        for header in headers {
            request.push_str(&format!("{header}\r\n"));
        }
        near.write_all(format!("{request}\r\n").as_bytes()).await.unwrap();
        let mut answer = String::new();
        let read = async { near.read_to_string(&mut answer).await.unwrap() };
        tokio::join!(answer_all(far, &self.fleet), read);
        answer
    }

    async fn as_user(&self, line: &str) -> String {
        self.ask(line, &[&format!("authorization: Bearer {USER}")]).await
    }

    fn row(&self, name: &str) -> NodeRow {
        self.fleet.survey.listed().nodes.into_iter().find(|row| row.name == name).unwrap()
    }
}

fn body(answer: &str) -> Value {
    let (_, body) = answer.split_once("\r\n\r\n").unwrap();
    serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {answer}"))
}

#[tokio::test]
async fn list_reports_each_node_independently() {
    let (well, known) = agent(AgentBehavior::Well).await;
    let mut nodes = vec![known];
    for behavior in [AgentBehavior::NoController, AgentBehavior::Forbids, AgentBehavior::Endless] {
        nodes.push(agent(behavior).await.1);
    }
    let gone = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let other = |name: &str, address: Option<SocketAddr>, certificate, state: &str| KnownNode {
        name: name.into(),
        state: state.into(),
        address,
        certificate,
    };
    let well_address = nodes[0].address;
    nodes.push(other("gone", Some(gone), Some([7; 32]), "served"));
    nodes.push(other("agentless", None, Some([7; 32]), "not installed: no containerd"));
    let elsewhere = KnownNode { name: "elsewise".into(), ..nodes[0].clone() };
    nodes.push(KnownNode { state: "served, with another configuration: why".into(), ..elsewhere });
    nodes.push(other("unknown", well_address, None, "served"));
    nodes.push(other("impostor", well_address, Some([7; 32]), "served"));
    let stage = stage(nodes);
    assert_eq!(stage.row("well").health, NodeHealth::Asking, "the list was not requested yet");
    stage.fleet.survey.round().await;
    let seen = stage.row("well");
    assert_eq!((seen.health, &*seen.why), (NodeHealth::Serving, ""));
    assert_eq!(seen.figures.unwrap().offloaded_bytes, 7);
    assert!(seen.seen_unix_ms.is_some());
    assert_eq!(stage.row("nocontroller").health, NodeHealth::Resting);
    let elsewise = stage.row("elsewise");
    assert_eq!(elsewise.health, NodeHealth::Serving);
    assert_eq!(elsewise.why, "served, with another configuration: why");
    for (name, why) in [
        ("forbids", "agent returned 403 Forbidden: the fleet may not get /api/v1/node"),
        ("endless", "more than 2097152 bytes"),
        ("gone", "cannot connect to 127.0.0.1"),
        (
            "agentless",
            "no agent runs on the node, or it has no address yet; last published state: not installed",
        ),
        ("unknown", "has not published its certificate"),
        ("impostor", "does not present the certificate of the node's agent"),
    ] {
        let row = stage.row(name);
        assert_eq!(row.health, NodeHealth::Unreachable, "{name}");
        assert!(row.why.contains(why), "{name}: {}", row.why);
    }
    // Only agents with the right certificate got the fleet server's own token.
    assert_eq!(*well.asked.lock().unwrap(), [(); 2].map(|()| format!("Bearer {OWN}")));
}

#[tokio::test]
async fn lost_node_keeps_its_last_figures_and_time() {
    let (_, known) = agent(AgentBehavior::Well).await;
    let there = Arc::new(AtomicBool::new(true));
    let switch = Arc::clone(&there);
    let mut stage = stage(Vec::new());
    let roster: Nodes = Arc::new(move || {
        let address = known.address.filter(|_| switch.load(Ordering::Relaxed));
        vec![KnownNode { address, ..known.clone() }]
    });
    let token = stage._folder.path().join("own");
    stage.fleet.survey = Arc::new(FleetPoller::new(roster, token));
    stage.fleet.survey.round().await;
    let before = stage.row("well");
    there.store(false, Ordering::Relaxed);
    stage.fleet.survey.round().await;
    let after = stage.row("well");
    assert_eq!(after.health, NodeHealth::Unreachable);
    assert_eq!((after.figures, after.seen_unix_ms), (before.figures, before.seen_unix_ms));
}

#[tokio::test(start_paused = true)]
async fn silent_nodes_delay_neither_page_nor_others() {
    let (silent, known) = agent(AgentBehavior::Silent).await;
    let mut nodes: Vec<KnownNode> =
        (0..100).map(|n| KnownNode { name: format!("silent-{n}"), ..known.clone() }).collect();
    nodes.push(agent(AgentBehavior::Well).await.1);
    let stage = stage(nodes);
    let survey = Arc::clone(&stage.fleet.survey);
    let round = tokio::spawn(async move { survey.round().await });
    let list = body(&stage.as_user("GET /api/v1/fleet").await);
    assert_eq!(
        list["nodes"].as_array().unwrap().len(),
        101,
        "the list does not wait for a node: {list}"
    );
    assert_eq!(round.await.unwrap(), 101);
    assert!(stage.row("silent-0").why.contains("within"), "{:?}", stage.row("silent-0"));
    // The paused clock may pass the time limit while this node's reply is still in the kernel.
    for _ in 0..10 {
        if stage.row("well").health == NodeHealth::Serving {
            break;
        }
        stage.fleet.survey.round().await;
    }
    assert_eq!(stage.row("well").health, NodeHealth::Serving);
    assert!(silent.most.load(Ordering::Relaxed) <= 16);
}

#[tokio::test]
async fn request_without_token_or_host_reaches_no_node() {
    let (agent, known) = agent(AgentBehavior::Well).await;
    let stage = stage(vec![known]);
    let user = format!("authorization: Bearer {USER}");
    for (headers, status) in [
        (vec![], "401"),
        (vec!["authorization: Bearer another-one-altogether"], "401"),
        (vec![&*user, "origin: https://evil.example"], "403"),
        (vec![&*user, "sec-fetch-site: cross-site"], "403"),
    ] {
        for line in [
            "GET /api/v1/fleet",
            "GET /nodes/well/api/v1/node",
            "POST /nodes/well/api/v1/auto-offload/off",
        ] {
            let answer = stage.ask(line, &headers).await;
            assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{line}: {answer}");
            assert!(body(&answer)["error"].is_string());
            assert!(!answer.contains("\"nodes\""), "{answer}");
        }
    }
    assert!(agent.asked.lock().unwrap().is_empty());
    // The page contains no secret, so it needs no token.
    let page = stage.ask("GET /", &[]).await;
    assert!(page.starts_with("HTTP/1.1 200") && page.contains("all nodes"), "{page}");
    assert!(page.contains("content-security-policy: default-src 'none'"), "{page}");
}

#[tokio::test]
async fn node_requests_carry_the_users_own_token() {
    let (_, known) = agent(AgentBehavior::Well).await;
    let address = known.address.unwrap();
    let stage = stage(vec![known]);
    let user = format!("authorization: Bearer {USER}");
    let headers = [&*user, "last-event-id: 7", "cookie: c=d", "origin: https://10.0.0.1"];
    let answer = stage.ask("GET /nodes/well/api/v1/history?key=1&since_ms=2", &headers).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(
        !answer.contains("set-cookie") && answer.contains("content-security-policy"),
        "{answer}"
    );
    let expected = json!({
        "token": format!("Bearer {USER}"), "method": "GET", "id": "7", "origin": "",
        "uri": "/api/v1/history?key=1&since_ms=2", "host": address.to_string(),
    });
    assert_eq!(body(&answer), expected);
    let moved = stage.as_user("POST /nodes/well/api/v1/auto-offload/off").await;
    assert_eq!(body(&moved)["method"], "POST", "{moved}");
    for (line, status) in [
        ("GET /nodes/other/api/v1/node", "404"),
        ("DELETE /nodes/well/api/v1/node", "405"),
        ("POST /api/v1/fleet", "405"),
        ("GET /nodes/well", "308"),
        ("GET /nodes/well/../../api", "404"),
        ("GET /elsewhere", "404"),
    ] {
        let answer = stage.as_user(line).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{line}: {answer}");
    }
}

#[tokio::test]
async fn agent_cannot_send_a_page_or_a_script() {
    let (agent, known) = agent(AgentBehavior::Page).await;
    let stage = stage(vec![known]);
    let page = stage.ask("GET /nodes/page/", &[]).await;
    assert!(page.starts_with("HTTP/1.1 200") && page.contains("<title>Affinode"), "{page}");
    let script = stage.ask("GET /nodes/page/app.js", &[]).await;
    assert!(script.contains("content-type: text/javascript"), "{script}");
    assert!(agent.asked.lock().unwrap().is_empty(), "no agent was asked for it");
    let answer = stage.as_user("GET /nodes/page/api/v1/node").await;
    assert!(answer.starts_with("HTTP/1.1 502") && !answer.contains("steal"), "{answer}");
}

#[tokio::test]
async fn every_file_that_the_page_names_is_there() {
    let stage = stage(Vec::new());
    let mut names = vec!["fleet.js".to_owned()];
    let mut seen = Vec::new();
    let page = stage.ask("GET /", &[]).await;
    for quoted in page.split(['"']).filter(|part| part.ends_with(".css") || part.ends_with(".svg"))
    {
        names.push(quoted.to_owned());
    }
    while let Some(name) = names.pop() {
        let answer = stage.ask(&format!("GET /{name}"), &[]).await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{name}: {answer}");
        for import in answer.lines().filter(|line| line.starts_with("import")) {
            let (_, file) = import.split_once("\"./").unwrap();
            let file = file.trim_end_matches("\";").to_owned();
            if !seen.contains(&file) {
                names.push(file);
            }
        }
        seen.push(name);
    }
    assert!(seen.len() >= 7, "{seen:?}");
}

#[tokio::test]
async fn an_empty_request_is_enough_for_probes() {
    let stage = stage(Vec::new());
    for path in ["/healthz", "/readyz"] {
        assert!(stage.ask(&format!("GET {path}"), &[]).await.starts_with("HTTP/1.1 200"));
    }
}
