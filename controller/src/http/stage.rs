//! An HTTP server for tests. It serves a Unix socket, with an actor whose answers are fixed.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use affinode_proto::api::control::{ActionResponse, Announcement, Container, ListResponse};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
    sync::mpsc,
};

use super::{AppState, DataSources, HttpGuard, HttpListener, serve};
use crate::{
    call_trace::{CallSampler, CallTraceHub},
    config::{HttpSection, ListenAddress, ReportSection},
    handle::{Command, ControllerHandle, EventLog},
    history::{NodeHistory, SpanStore, StoreLimits},
    metrics::{DeliveryCounts, Metrics},
    observe::{ViewHub, ViewObserver},
};

/// Key of the test node's only container.
pub const KEY: &str = "0123456789abcdef0123456789abcdef";

/// The running HTTP server of a test, and handles of its parts.
pub struct Running {
    folder: tempfile::TempDir,
    pub events: Arc<EventLog>,
    pub metrics: Arc<Metrics>,
    pub calls: Arc<CallTraceHub>,
    pub site: Arc<AppState>,
    /// Number of pings that the actor has received.
    pub pings: Arc<AtomicUsize>,
}

/// Starts a server for a node with one container, which can be offloaded but not restored. The
/// server requires the token if one is given.
pub fn run(may_act: bool, token: Option<&str>) -> Running {
    let folder = tempfile::tempdir().unwrap();
    let token_file = folder.path().join("token");
    if let Some(token) = token {
        std::fs::write(&token_file, token).unwrap();
    }
    let file = token.map(|_| token_file.to_str().unwrap()).unwrap_or_default();
    run_behind(folder, may_act, &HttpSection { token_file: file.into(), ..HttpSection::default() })
}

/// Starts a server for the same node as [`run`], with the guard that the section `http` describes.
pub fn run_behind(folder: tempfile::TempDir, may_act: bool, http: &HttpSection) -> Running {
    let guard = HttpGuard::new(http).unwrap();
    let only_shows = (!may_act).then_some("this site is read-only");
    let (calls, mut asked) = mpsc::channel(64);
    let pings = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&pings);
    tokio::spawn(async move {
        while let Some(call) = asked.recv().await {
            match call {
                Command::Ping(answer) => {
                    counted.fetch_add(1, Ordering::Relaxed);
                    let _ = answer.send(());
                }
                Command::List(answer) => drop(answer.send(list())),
                Command::Sights(_, answer) => drop(answer.send(Vec::new())),
                Command::Act(_, request, answer) => {
                    let done = request == affinode_core::Request::Offload;
                    drop(answer.send(ActionResponse {
                        done,
                        bytes: 7,
                        ..ActionResponse::default()
                    }));
                }
                Command::Pin(_, pinned, who, answer) => {
                    let state = format!("{pinned} {}", !who.is_empty());
                    let done = true;
                    drop(answer.send(ActionResponse { done, state, ..ActionResponse::default() }));
                }
                Command::AutoOffload(on, _, answer) => drop(answer.send(Ok(on))),
                _ => {}
            }
        }
    });
    let events = Arc::new(EventLog::default());
    let door = ControllerHandle::new(calls, Arc::clone(&events));
    let (hub, metrics) = (Arc::new(ViewHub::default()), Arc::new(Metrics::new(1)));
    let observer = ViewObserver::new(door.clone(), Arc::clone(&hub), Arc::clone(&metrics), None);
    tokio::spawn(observer.run());
    let prices = ReportSection::default();
    let calls = Arc::new(CallTraceHub::default());
    tokio::spawn(CallSampler::new(door.clone(), Arc::clone(&calls)).run());
    let limits = StoreLimits { keep_ms: 3_600_000, max_bytes: 1 << 20 };
    let file = folder.path().join("history.redb");
    let history = NodeHistory::start(move || SpanStore::open(&file, limits), |_| {}).unwrap();
    let history = Some(Arc::new(history));
    let sources =
        DataSources { hub, calls: Arc::clone(&calls), metrics: Arc::clone(&metrics), history };
    let site = Arc::new(AppState::new(door, sources, guard, prices, only_shows));
    let (bound, _) =
        HttpListener::bind(&ListenAddress::Unix(folder.path().join("s"))).unwrap().unwrap();
    tokio::spawn(serve(HttpListener::new(bound, None).unwrap(), Arc::clone(&site)));
    Running { folder, events, metrics, calls, site, pings }
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
    pub fn socket(&self) -> std::path::PathBuf {
        self.folder.path().join("s")
    }

    /// Sends the text of an HTTP request unchanged, and returns the whole response.
    pub async fn raw(&self, request: &str) -> String {
        let mut stream = UnixStream::connect(self.socket()).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        String::from_utf8_lossy(&answer).into_owned()
    }

    pub async fn ask(&self, method: &str, path: &str, headers: &str) -> (u16, String) {
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}\r\n"
        );
        let answer = self.raw(&request).await;
        let status = answer.split(' ').nth(1).and_then(|word| word.parse().ok()).unwrap_or(0);
        (status, answer)
    }

    /// Returns the text of the current metrics.
    pub fn metrics_text(&self) -> String {
        self.metrics.text(&crate::schema::Node::default(), DeliveryCounts::default()).unwrap()
    }

    /// Opens a stream at a path of the test server.
    pub async fn open(&self, path: &str, headers: &str) -> Stream {
        let mut stream = UnixStream::connect(self.socket()).await.unwrap();
        let request =
            format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        Stream { stream, seen: String::new() }
    }
}

/// An open stream, and the text received on it so far.
pub struct Stream {
    pub stream: UnixStream,
    pub seen: String,
}

impl Stream {
    /// Reads the stream until `wanted` was received. Returns `false` if the stream ended first.
    pub async fn until(&mut self, wanted: &str) -> bool {
        let reading = async {
            while !self.seen.contains(wanted) {
                let mut bytes = [0; 4096];
                let count = self.stream.read(&mut bytes).await.unwrap_or(0);
                if count == 0 {
                    return false;
                }
                self.seen.push_str(&String::from_utf8_lossy(&bytes[..count]));
            }
            true
        };
        tokio::time::timeout(Duration::from_secs(20), reading).await.expect(wanted)
    }

    /// Reads the beginning of the response. Returns whether it has status 200.
    pub async fn begins(&mut self) -> bool {
        self.until("\r\n\r\n").await && self.seen.starts_with("HTTP/1.1 200")
    }
}
