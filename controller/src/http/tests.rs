//! The site over a Unix socket, with an actor that answers from a script.

use std::{path::Path, sync::Arc, time::Duration};

use affinode_proto::api::control::{ActionResponse, Announcement, Container, Event, ListResponse};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
    sync::mpsc,
};

use super::{CONNECTIONS, Guard, Listener, STREAMS, Site, Sources, serve};
use crate::{
    calls::{CallHub, Scout},
    config::{Listen, ReportSection},
    daemon::{Call, Door, EventLog},
    metrics::Metrics,
    observe::{Hub, Observer},
};

const KEY: &str = "0123456789abcdef0123456789abcdef";

struct Running {
    folder: tempfile::TempDir,
    events: Arc<EventLog>,
    metrics: Arc<Metrics>,
}

/// A site whose node has one container; it offloads, and does not restore.
fn run(may_act: bool, token: Option<&str>) -> Running {
    let folder = tempfile::tempdir().unwrap();
    let (calls, mut asked) = mpsc::channel(64);
    tokio::spawn(async move {
        while let Some(call) = asked.recv().await {
            match call {
                Call::List(answer) => drop(answer.send(list())),
                Call::Sights(_, answer) => drop(answer.send(Vec::new())),
                Call::Act(_, request, answer) => {
                    let done = request == crate::core::Request::Offload;
                    drop(answer.send(ActionResponse {
                        done,
                        bytes: 7,
                        ..ActionResponse::default()
                    }));
                }
                Call::Pin(_, pinned, who, answer) => {
                    let state = format!("{pinned} {}", !who.is_empty());
                    let done = true;
                    drop(answer.send(ActionResponse { done, state, ..ActionResponse::default() }));
                }
                Call::AutoOffload(on, _, answer) => drop(answer.send(Ok(on))),
                _ => {}
            }
        }
    });
    let token_file = folder.path().join("token");
    if let Some(token) = token {
        std::fs::write(&token_file, token).unwrap();
    }
    let file = token.map(|_| token_file.to_str().unwrap()).unwrap_or_default();
    let guard = Guard::new(&[], file).unwrap();
    let events = Arc::new(EventLog::default());
    let door = Door::new(calls, Arc::clone(&events));
    let (hub, metrics) = (Arc::new(Hub::default()), Arc::new(Metrics::new(1)));
    let observer = Observer::new(door.clone(), Arc::clone(&hub), Arc::clone(&metrics), None);
    tokio::spawn(observer.run());
    let prices = ReportSection::default();
    let calls = Arc::new(CallHub::default());
    tokio::spawn(Scout::new(door.clone(), Arc::clone(&calls)).run());
    let sources = Sources { hub, calls, metrics: Arc::clone(&metrics), history: None };
    let site = Site::new(door, sources, guard, prices, may_act);
    let (bound, _) = Listener::bind(&Listen::Unix(folder.path().join("s"))).unwrap().unwrap();
    tokio::spawn(serve(Listener::new(bound).unwrap(), Arc::new(site)));
    Running { folder, events, metrics }
}

fn list() -> ListResponse {
    let announcement = Announcement {
        key: KEY.into(),
        namespace: "ml".into(),
        id: "one".into(),
        ..Announcement::default()
    };
    ListResponse {
        node: "n".into(),
        started_unix_ms: 77,
        containers: vec![Container {
            announcement: Some(announcement).into(),
            state: "Idle".into(),
            ..Container::default()
        }],
        ..ListResponse::default()
    }
}

impl Running {
    fn socket(&self) -> std::path::PathBuf {
        self.folder.path().join("s")
    }

    /// Sends a request as it stands and reads the answer to its end.
    async fn raw(&self, request: &str) -> String {
        let mut stream = UnixStream::connect(self.socket()).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        String::from_utf8_lossy(&answer).into_owned()
    }

    async fn ask(&self, method: &str, path: &str, headers: &str) -> (u16, String) {
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}\r\n"
        );
        let answer = self.raw(&request).await;
        let status = answer.split(' ').nth(1).and_then(|word| word.parse().ok()).unwrap_or(0);
        (status, answer)
    }
}

/// Opens a stream and reads until the text is there.
async fn stream_until(socket: &Path, headers: &str, wanted: &str) -> String {
    let mut stream = open_stream(socket, headers).await;
    let mut seen = String::new();
    let reading = async {
        while !seen.contains(wanted) {
            let mut bytes = [0; 4096];
            let count = stream.read(&mut bytes).await.unwrap();
            assert!(count > 0, "the stream ended: {seen}");
            seen.push_str(&String::from_utf8_lossy(&bytes[..count]));
        }
    };
    tokio::time::timeout(Duration::from_secs(20), reading).await.expect(wanted);
    seen
}

async fn open_stream(socket: &Path, headers: &str) -> UnixStream {
    let mut stream = UnixStream::connect(socket).await.unwrap();
    let request =
        format!("GET /api/v1/events?watch=node HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    stream
}

#[tokio::test]
async fn the_page_comes_with_a_strict_policy_and_a_tag() {
    let site = run(true, None);
    let (status, page) = site.ask("GET", "/", "").await;
    assert_eq!(status, 200);
    assert!(page.contains("default-src 'none'") && page.contains("<title>Affinode"), "{page}");
    let tag = page.lines().find_map(|line| line.strip_prefix("etag: ")).unwrap().trim();
    assert_eq!(site.ask("GET", "/", &format!("If-None-Match: {tag}\r\n")).await.0, 304);
    // Every file that the page and its modules name is there.
    for file in ["/style.css", "/icon.svg", "/app.js", "/rows.js", "/stream.js"] {
        assert_eq!(site.ask("GET", file, "").await.0, 200, "{file}");
    }
    assert!(
        !page.contains("http://") && !page.contains("https://"),
        "nothing comes from elsewhere"
    );
}

#[tokio::test]
async fn the_node_and_its_metrics_are_told() {
    let site = run(true, None);
    let (status, node) = site.ask("GET", "/api/v1/node", "").await;
    assert!(status == 200 && node.contains("\"name\":\"ml/one\""), "{node}");
    let (_, classic) = site.ask("GET", "/metrics", "").await;
    assert!(classic.contains("affinode_containers{state=\"Idle\"} 1"), "{classic}");
    assert!(!classic.contains("# EOF"));
    let (_, open) = site.ask("GET", "/metrics", "Accept: application/openmetrics-text\r\n").await;
    assert!(open.trim_end().ends_with("# EOF"), "{open}");
    assert_eq!(site.ask("GET", "/healthz", "").await.0, 200);
}

#[tokio::test]
async fn a_move_is_made_answered_and_noted() {
    let site = run(true, None);
    let path = format!("/api/v1/containers/{KEY}");
    let (status, done) =
        site.ask("POST", &format!("{path}/offload"), "Content-Length: 0\r\n").await;
    assert!(status == 200 && done.contains("\"done\":true"), "{done}");
    assert_eq!(site.ask("POST", &format!("{path}/restore"), "").await.0, 409);
    let noted = site.events.now(0);
    assert_eq!(noted.len(), 2);
    assert!(noted[0].kind == "request" && noted[0].text.starts_with("offload was asked for by"));
    assert_eq!(site.ask("GET", &format!("{path}/offload"), "").await.0, 405);
    assert_eq!(site.ask("POST", &format!("{path}/explode"), "").await.0, 404);
    let unknown = format!("/api/v1/containers/{}/offload", "f".repeat(32));
    assert_eq!(site.ask("POST", &unknown, "").await.0, 404);
    let looking = run(false, None);
    assert_eq!(looking.ask("POST", &format!("{path}/offload"), "").await.0, 403);
    assert!(looking.events.now(0).is_empty());
}

#[tokio::test]
async fn strangers_are_refused_and_counted() {
    let site = run(true, None);
    let other = "GET /api/v1/node HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n";
    assert!(site.raw(other).await.starts_with("HTTP/1.1 421"));
    let path = format!("/api/v1/containers/{KEY}/offload");
    assert_eq!(site.ask("POST", &path, "Origin: http://evil.example\r\n").await.0, 403);
    assert_eq!(site.ask("POST", &path, "Sec-Fetch-Site: cross-site\r\n").await.0, 403);
    for path in [
        "/../etc/passwd",
        "/page/../../etc/passwd",
        "/%2e%2e/etc/passwd",
        "/api/v1/containers/../node",
    ] {
        assert_eq!(site.ask("GET", path, "").await.0, 404, "{path}");
    }
    assert!(site.events.now(0).is_empty(), "nothing was moved");
    let text = site.metrics.text(&crate::schema::Node::default(), &Hub::default(), 0).unwrap();
    assert!(text.contains("affinode_http_refused_requests_total{reason=\"origin\"} 2"), "{text}");
}

#[tokio::test]
async fn with_a_token_nothing_but_the_page_is_told_without_it() {
    let site = run(true, Some("a-long-and-secret-token"));
    for path in ["/api/v1/node", "/metrics", "/api/v1/events", "/api/v1/report"] {
        assert_eq!(site.ask("GET", path, "").await.0, 401, "{path}");
        let wrong = "Authorization: Bearer a-long-and-secret-tokem\r\n";
        assert_eq!(site.ask("GET", path, wrong).await.0, 401, "{path}");
    }
    let right = "Authorization: Bearer a-long-and-secret-token\r\n";
    assert_eq!(site.ask("GET", "/api/v1/node", right).await.0, 200);
    assert_eq!(site.ask("GET", "/", "").await.0, 200);
}

#[tokio::test]
async fn what_is_too_big_is_refused() {
    let site = run(true, None);
    let body = "x".repeat(100_000);
    let path = format!("/api/v1/containers/{KEY}/offload");
    let big = format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    assert!(site.raw(&big).await.starts_with("HTTP/1.1 413"));
    let head = format!("X: {}\r\n", "y".repeat(40_000));
    assert_eq!(site.ask("GET", "/", &head).await.0, 431);
    let many: String = (0..200).map(|n| format!("X-{n}: 1\r\n")).collect();
    assert_eq!(site.ask("GET", "/", &many).await.0, 431);
    assert!(site.events.now(0).is_empty());
}

#[tokio::test]
async fn a_stream_begins_with_the_node_and_goes_on_where_it_was() {
    let site = run(true, None);
    site.events.add(Event { text: "first".into(), ..Event::default() }, 1);
    site.events.add(Event { text: "second".into(), ..Event::default() }, 2);
    let all = stream_until(&site.socket(), "", "id: 77-2").await;
    assert!(all.contains("event: node") && all.contains("first"), "{all}");
    let rest = stream_until(&site.socket(), "Last-Event-ID: 77-1\r\n", "id: 77-2").await;
    assert!(!rest.contains("first"), "{rest}");
    // The id is one of a controller that is dead: everything that this one knows.
    let anew = stream_until(&site.socket(), "Last-Event-ID: 66-1\r\n", "id: 77-2").await;
    assert!(anew.contains("first"), "{anew}");
}

#[tokio::test]
async fn streams_are_bounded_and_come_back_when_others_leave() {
    let site = run(true, None);
    let mut held = Vec::new();
    for _ in 0..STREAMS {
        let mut stream = open_stream(&site.socket(), "").await;
        let mut begin = [0; 15];
        stream.read_exact(&mut begin).await.unwrap();
        assert_eq!(&begin, b"HTTP/1.1 200 OK");
        held.push(stream);
    }
    let (status, why) = site.ask("GET", "/api/v1/events", "").await;
    assert!(status == 503 && why.contains("retry-after"), "{why}");
    // Others are still answered.
    assert_eq!(site.ask("GET", "/api/v1/node", "").await.0, 200);
    held.clear();
    let free = async {
        while site.ask("HEAD", "/nothing", "").await.0 != 404
            || !stream_begins(&site.socket()).await
        {
            // A stream notices at its next word that its client is gone.
            site.events.add(Event::default(), 1);
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), free).await.unwrap();
}

async fn stream_begins(socket: &Path) -> bool {
    let mut stream = open_stream(socket, "").await;
    let mut begin = [0; 12];
    stream.read_exact(&mut begin).await.is_ok() && &begin == b"HTTP/1.1 200"
}

#[tokio::test]
async fn connections_are_bounded_and_the_next_is_served_when_one_leaves() {
    let site = run(true, None);
    let mut held = Vec::new();
    for _ in 0..CONNECTIONS {
        held.push(UnixStream::connect(site.socket()).await.unwrap());
    }
    let waiting = site.ask("GET", "/healthz", "");
    tokio::pin!(waiting);
    let early = tokio::time::timeout(Duration::from_millis(100), waiting.as_mut()).await;
    assert!(early.is_err(), "one too many was served");
    held.pop();
    assert_eq!(waiting.await.0, 200);
}

#[tokio::test]
async fn pins_and_the_switch_are_posts_and_nothing_else() {
    let site = run(true, None);
    let path = format!("/api/v1/containers/{KEY}");
    for (word, expected) in [("pin", "true true"), ("unpin", "false true")] {
        let (status, body) =
            site.ask("POST", &format!("{path}/{word}"), "Content-Length: 0\r\n").await;
        assert!(status == 200 && body.contains(expected), "{status} {body}");
    }
    assert_eq!(site.ask("GET", &format!("{path}/pin"), "").await.0, 405);
    let switch = "/api/v1/auto-offload";
    let (status, body) = site.ask("POST", &format!("{switch}/off"), "Content-Length: 0\r\n").await;
    assert!(status == 200 && body.contains("false"), "{status} {body}");
    assert_eq!(site.ask("GET", &format!("{switch}/off"), "").await.0, 405);
    assert_eq!(site.ask("POST", &format!("{switch}/maybe"), "").await.0, 404);
    let looking = run(false, None);
    assert_eq!(looking.ask("POST", &format!("{switch}/off"), "").await.0, 403);
    assert_eq!(looking.ask("POST", &format!("{path}/pin"), "").await.0, 403);
}

/// What `config/openapi.yaml` promises is there, under its method and no other.
#[tokio::test]
async fn every_path_of_the_document_is_served() {
    let document = include_str!("../../../config/openapi.yaml");
    let document: serde_json::Value = serde_yaml_ng::from_str(document).unwrap();
    let site = run(true, None);
    let paths = document["paths"].as_object().unwrap();
    assert!(paths.len() > 8, "{paths:?}");
    for (path, methods) in paths {
        let filled = path.replace("{key}", KEY).replace("{switch}", "on");
        for action in ["offload", "pin"] {
            let filled = filled.replace("{action}", action);
            let get = methods.get("get").is_some();
            if filled == "/api/v1/events" || filled == "/api/v1/calls" {
                assert!(get && stream_starts(&site.socket(), &filled).await, "{filled}");
                continue;
            }
            let (right, wrong) = if get { ("GET", "POST") } else { ("POST", "GET") };
            let empty = "Content-Length: 0\r\n";
            let (status, body) = site.ask(right, &filled, empty).await;
            assert!(!body.contains("there is nothing here"), "{right} {filled}: {status} {body}");
            assert_eq!(site.ask(wrong, &filled, empty).await.0, 405, "{wrong} {filled}");
        }
    }
}

async fn stream_starts(socket: &Path, path: &str) -> bool {
    let mut stream = UnixStream::connect(socket).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut begin = [0; 12];
    stream.read_exact(&mut begin).await.is_ok() && &begin == b"HTTP/1.1 200"
}
