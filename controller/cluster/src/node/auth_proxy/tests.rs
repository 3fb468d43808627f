use affinode_controller::config::HttpSection;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixListener,
};

use super::*;
use crate::https::answer_all;

const TOKEN: &str = "a-long-and-secret-token";

/// A proxy under test, with a folder for the socket of a simulated controller.
struct Stage {
    bridge: AuthProxy,
    _folder: tempfile::TempDir,
}

fn stage() -> Stage {
    let folder = tempfile::tempdir().unwrap();
    let token_file = folder.path().join("token");
    std::fs::write(&token_file, TOKEN).unwrap();
    let guard = HttpGuard::new(&HttpSection {
        token_file: token_file.display().to_string(),
        hosts: vec!["agent.example".into()],
        ..HttpSection::default()
    });
    let bridge = AuthProxy {
        guard: guard.unwrap(),
        socket: folder.path().join("http.sock"),
        shown: Arc::default(),
        metrics: Arc::default(),
    };
    Stage { bridge, _folder: folder }
}

fn controller(socket: &std::path::Path) {
    let listener = UnixListener::bind(socket).unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut request = vec![0; 4096];
            let length = stream.read(&mut request).await.unwrap();
            let request = String::from_utf8_lossy(&request[..length]).into_owned();
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", request.len());
            stream.write_all(format!("{head}{request}").as_bytes()).await.unwrap();
        }
    });
}

async fn ask(stage: &Stage, path: &str, headers: &[&str]) -> String {
    let (mut near, far) = tokio::io::duplex(1 << 16);
    let mut request = format!("GET {path} HTTP/1.1\r\nconnection: close\r\n");
    for header in headers {
        request.push_str(&format!("{header}\r\n"));
    }
    near.write_all(format!("{request}\r\n").as_bytes()).await.unwrap();
    let mut answer = String::new();
    let read = async { near.read_to_string(&mut answer).await.unwrap() };
    tokio::join!(answer_all(far, &stage.bridge), read);
    answer
}

#[tokio::test]
async fn authorized_request_passes_without_its_token() {
    let stage = stage();
    controller(&stage.bridge.socket);
    let bearer = format!("authorization: Bearer {TOKEN}");
    let answer = ask(&stage, "/api/v1/node?x=1", &["host: 10.0.0.7:9411", &bearer]).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(answer.contains("GET /api/v1/node?x=1 HTTP/1.1\r\n"), "{answer}");
    assert!(answer.contains("host: localhost\r\n"), "{answer}");
    assert!(!answer.contains(TOKEN), "{answer}");
    // The page contains no secret, so it needs no token.
    let page = ask(&stage, "/", &["host: agent.example"]).await;
    assert!(page.starts_with("HTTP/1.1 200"), "{page}");
}

#[tokio::test]
async fn denied_request_never_reaches_controller() {
    let stage = stage();
    controller(&stage.bridge.socket);
    let bearer = format!("authorization: Bearer {TOKEN}");
    for (path, headers, status) in [
        ("/metrics", vec!["host: 10.0.0.7"], "401"),
        (
            "/api/v1/node",
            vec!["host: 10.0.0.7", "authorization: Bearer another-one-altogether"],
            "401",
        ),
        ("/metrics", vec!["host: evil.example", &bearer], "421"),
        ("/metrics", vec!["host: 10.0.0.7", "origin: https://evil.example", &bearer], "403"),
    ] {
        let answer = ask(&stage, path, &headers).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{path} {headers:?}: {answer}");
        assert!(!answer.contains("host: localhost"), "{answer}");
        // The page shows this text. If a token is required, the page asks the user for one.
        assert!(answer.contains("\r\n\r\n{\"error\":\""), "{answer}");
    }
}

#[tokio::test]
async fn readiness_depends_on_the_runtime_alone() {
    let stage = stage();
    let status = async |path: &str| {
        let answer =
            ask(&stage, path, &["host: 10.0.0.7", &format!("authorization: Bearer {TOKEN}")]).await;
        answer.split(' ').nth(1).unwrap_or_default().to_owned()
    };
    assert_eq!(status("/healthz").await, "200");
    assert_eq!(status("/readyz").await, "503");
    stage.bridge.metrics.serves(true);
    stage.bridge.metrics.now(crate::node::agent_metrics::InstallState::Served);
    assert_eq!(status("/readyz").await, "200");
    let bearer = format!("authorization: Bearer {TOKEN}");
    let answer = ask(&stage, "/api/v1/node", &["host: 10.0.0.7", &bearer]).await;
    assert!(answer.contains("affinode-controller: none\r\n"), "{answer}");
}

/// Starts a controller that replies to each request with the given metrics text.
fn metrics_of_controller(socket: &std::path::Path, kind: &'static str, text: &'static str) {
    let listener = UnixListener::bind(socket).unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut request = vec![0; 4096];
            let length = stream.read(&mut request).await.unwrap();
            let head = String::from_utf8_lossy(&request[..length]).to_lowercase();
            assert!(!head.contains("accept-encoding"), "{head}");
            let length = text.len();
            let head = format!("content-type: {kind}\r\ncontent-length: {length}\r\n");
            let answer = format!("HTTP/1.1 200 OK\r\n{head}\r\n{text}");
            stream.write_all(answer.as_bytes()).await.unwrap();
        }
    });
}

#[tokio::test]
async fn a_node_without_controller_serves_metrics() {
    let stage = stage();
    stage.bridge.metrics.serves(true);
    let bearer = format!("authorization: Bearer {TOKEN}");
    let answer = ask(&stage, "/metrics", &["host: 10.0.0.7", &bearer]).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(answer.contains("content-type: text/plain; version=0.0.4"), "{answer}");
    assert!(answer.contains("\naffinode_controller_up 0\n"), "{answer}");
    assert!(answer.contains("\naffinode_agent_runtime_served 1\n"), "{answer}");
    let accept = "accept: application/openmetrics-text;version=1.0.0";
    let answer = ask(&stage, "/metrics", &["host: 10.0.0.7", &bearer, accept]).await;
    assert!(answer.contains("content-type: application/openmetrics-text"), "{answer}");
    assert!(answer.ends_with("# EOF\n"), "{answer}");
}

#[tokio::test]
async fn controller_metrics_follow_those_of_the_agent() {
    let stage = stage();
    let open = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    metrics_of_controller(
        &stage.bridge.socket,
        open,
        "# TYPE affinode_x gauge\naffinode_x 1\n# EOF\n",
    );
    let bearer = format!("authorization: Bearer {TOKEN}");
    let headers = ["host: 10.0.0.7", &bearer, "accept-encoding: gzip"];
    let answer = ask(&stage, "/metrics", &headers).await;
    // The reply has the controller's format, whatever format was requested.
    assert!(answer.contains(&format!("content-type: {open}")), "{answer}");
    assert!(answer.contains("\naffinode_controller_up 1\n"), "{answer}");
    assert!(answer.ends_with("\naffinode_x 1\n# EOF\n"), "{answer}");
    assert_eq!(answer.matches("# EOF").count(), 1);
}
