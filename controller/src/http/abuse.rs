//! Tests of HTTP requests that are invalid, too large or too many. The server must refuse or limit
//! them, and count the refusals.

use std::{future::Future, sync::atomic::Ordering, task::Poll, time::Duration};

use affinode_proto::api::control::Event;
use tokio::{io::AsyncReadExt, net::UnixStream};

use super::{
    CALL_STREAMS, CONNECTIONS, READS, STREAMS, routes,
    stage::{KEY, run},
};
use crate::{
    call_trace::{CallTraceBatch, ProcessCalls, RecordedCall},
    schema::{Container, Node},
};

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
    let text = site.metrics_text();
    assert!(text.contains("affinode_http_refused_requests_total{reason=\"origin\"} 2"), "{text}");
}

#[tokio::test]
async fn an_oversized_request_is_refused() {
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

/// Opens as many streams at `path` as the limit `most` allows. One more stream at `path` must be
/// refused, but a stream at the path `other` must still open. After all streams are closed, a
/// stream at `path` must open again.
async fn hoard(path: &str, most: usize, other: &str) {
    let site = run(true, None);
    let mut held = Vec::new();
    for _ in 0..most {
        let mut stream = site.open(path, "").await;
        assert!(stream.begins().await, "{}", stream.seen);
        held.push(stream);
    }
    let (status, why) = site.ask("GET", path, "").await;
    assert!(status == 503 && why.contains("retry-after"), "{why}");
    let text = site.metrics_text();
    assert!(text.contains("affinode_http_refused_requests_total{reason=\"busy\"} 1"), "{text}");
    // Other requests and other streams are still served.
    assert_eq!(site.ask("GET", "/api/v1/node", "").await.0, 200);
    assert!(site.open(other, "").await.begins().await, "{other}");
    held.clear();
    let free = async {
        while !site.open(path, "").await.begins().await {
            // A stream notices that its client has gone when it sends the next message.
            site.events.add(Event::default(), 1);
            site.calls.add(CallTraceBatch::default());
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), free).await.unwrap();
}

#[tokio::test]
async fn closed_streams_can_be_opened_again() {
    hoard("/api/v1/events?watch=node", STREAMS, "/api/v1/calls").await;
}

#[tokio::test]
async fn call_streams_do_not_block_event_streams() {
    hoard("/api/v1/calls", CALL_STREAMS, "/api/v1/events?watch=node").await;
}

#[tokio::test]
async fn a_call_stream_without_a_reader_is_closed() {
    let site = run(true, None);
    let mut slow = site.open("/api/v1/calls", "").await;
    assert!(slow.begins().await);
    assert_eq!(site.site.call_streams.available_permits(), CALL_STREAMS - 1);
    let recorded =
        vec![RecordedCall { name: "cuLaunchKernel".into(), ..RecordedCall::default() }; 40];
    let process = ProcessCalls { recorded, ..ProcessCalls::default() };
    // Only the slow client is connected, so the clock advances until that client's write timeout.
    tokio::time::pause();
    for round in 0.. {
        site.calls.add(CallTraceBatch {
            processes: vec![process.clone(); 64],
            ..CallTraceBatch::default()
        });
        tokio::time::advance(Duration::from_millis(200)).await;
        tokio::task::yield_now().await;
        if site.site.call_streams.available_permits() == CALL_STREAMS {
            break;
        }
        assert!(round < 2_000, "the stream without a reader was not closed");
    }
}

#[tokio::test]
async fn an_invalid_call_stream_is_refused() {
    let site = run(true, None);
    let ask = async |wish: &str| site.ask("GET", &format!("/api/v1/calls{wish}"), "").await.0;
    let long = |length: usize| format!("?container={}", "a".repeat(length));
    assert_eq!(ask("?container=").await, 400);
    assert_eq!(ask("?container=../../etc").await, 400);
    assert_eq!(ask(&format!("?container={}%00", &KEY[..30])).await, 400);
    assert_eq!(ask(&format!("?container={}", KEY.to_uppercase())).await, 400);
    assert_eq!(ask(&long(31)).await, 400);
    assert_eq!(ask(&long(8_000)).await, 400);
    assert_eq!(ask(&long(100_000)).await, 431);
    assert_eq!(ask(&long(32)).await, 404, "no container has this key");
    assert_eq!(site.ask("POST", "/api/v1/calls", "Content-Length: 0\r\n").await.0, 405);
    assert!(site.calls.watched().is_empty(), "no stream is open");
    assert_eq!(site.site.call_streams.available_permits(), CALL_STREAMS);
    let text = site.metrics_text();
    assert!(
        text.contains("affinode_http_refused_requests_total{reason=\"malformed\"} 1"),
        "{text}"
    );
}

#[tokio::test]
async fn a_closed_connection_admits_the_next() {
    let site = run(true, None);
    let mut held = Vec::new();
    for _ in 0..CONNECTIONS {
        held.push(UnixStream::connect(site.socket()).await.unwrap());
    }
    let waiting = site.ask("GET", "/healthz", "");
    tokio::pin!(waiting);
    let early = tokio::time::timeout(Duration::from_millis(100), waiting.as_mut()).await;
    assert!(early.is_err(), "one request more than the maximum was served");
    held.pop();
    assert_eq!(waiting.await.0, 200);
}

/// Checks that no more than `READS` responses with history are in memory at a time. The next
/// request for history must wait until one of these responses is dropped. Each response may be as
/// large as the whole history, and a client may read it slowly.
#[tokio::test]
async fn history_responses_are_limited() {
    let site = run(true, None);
    let ask = |path| routes::past(&site.site, Some("since_ms=0"), path);
    let mut held = Vec::new();
    for _ in 0..READS {
        held.push(ask("/api/v1/history").await);
    }
    let next = ask("/api/v1/report");
    tokio::pin!(next);
    // An invalid request needs no permit.
    let wrong = routes::past(&site.site, Some("since_ms=1h"), "/api/v1/history").await;
    assert_eq!(wrong.status(), 400);
    let early = std::future::poll_fn(|context| Poll::Ready(next.as_mut().poll(context))).await;
    assert!(early.is_pending(), "one response more than the maximum was made");
    // Each response holds a permit as long as it exists, so no further response can begin.
    assert_eq!(site.site.reads.available_permits(), 0);
    held.pop();
    assert_eq!(next.await.status(), 200);
}

/// Checks that a client keeps its permit for a history response until it has read the response. A
/// response is larger than the buffers of its connection here.
#[tokio::test]
async fn slow_readers_keep_their_history_permits() {
    let site = run(true, None);
    let history = site.site.history.as_ref().unwrap();
    history.opened().await;
    let container = Container {
        key: KEY.into(),
        state: "Idle".into(),
        reason: "x".repeat(4 << 20),
        ..Container::default()
    };
    history.observe(&Node { containers: vec![container], ..Node::default() }, 1_000);
    let mut held = Vec::new();
    for _ in 0..READS {
        let mut slow = site.open("/api/v1/history?since_ms=0", "").await;
        assert!(slow.begins().await, "{}", slow.seen);
        held.push(slow);
    }
    assert_eq!(site.site.reads.available_permits(), 0);
    let mut reader = held.pop().unwrap();
    let mut rest = Vec::new();
    reader.stream.read_to_end(&mut rest).await.unwrap();
    assert!(reader.seen.len() + rest.len() > 4 << 20, "the whole response arrives");
    assert_eq!(site.ask("GET", "/api/v1/report?since_ms=0", "").await.0, 200);
    held.clear();
    // A closed connection returns its permit, too.
    let all = site.site.reads.acquire_many(READS as u32).await;
    assert!(all.is_ok());
}

/// Checks that `/healthz`, which needs no token, does not make the actor list its containers.
#[tokio::test]
async fn a_health_check_makes_no_list() {
    let site = run(true, Some("a-long-and-secret-token"));
    assert_eq!(site.ask("GET", "/healthz", "").await.0, 200);
    assert_eq!(site.pings.load(Ordering::Relaxed), 1);
}
