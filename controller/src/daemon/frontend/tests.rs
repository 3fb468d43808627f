use affinode_proto::api::control::ListResponse;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
    sync::mpsc,
};

use super::*;
use crate::handle::{Command, EventLog};

/// Sends a request to the dashboard's Unix socket, and returns the response.
async fn get(run_dir: &Path, path: &str) -> String {
    let mut stream = UnixStream::connect(run_dir.join("http.sock")).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

/// Checks that a disk that stalls while the history is opened delays neither the dashboard nor the
/// end of the controller.
#[tokio::test]
async fn a_stalled_disk_delays_no_start_and_no_end() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join(FILE);
    let (disk, stalled) = std::sync::mpsc::channel::<()>();
    let (opened, was_opened) = std::sync::mpsc::channel();
    let open = move || {
        let _ = stalled.recv();
        opened.send(()).unwrap();
        SpanStore::open(&file, StoreLimits { keep_ms: 1_000, max_bytes: 1 << 20 })
    };
    let history = Some(Arc::new(NodeHistory::start(open, |_| {}).unwrap()));
    let (calls, mut asked) = mpsc::channel(8);
    let door = ControllerHandle::new(calls, Arc::new(EventLog::default()));
    let actor = tokio::spawn(async move {
        while let Some(call) = asked.recv().await {
            if let Command::List(answer) = call {
                let _ = answer.send(ListResponse::default());
            }
        }
    });
    let parts = (Arc::new(Metrics::before_history()), history);
    let hub = Arc::new(CallTraceHub::default());
    let show = Frontend::with_history(folder.path(), &Config::default(), door, hub, parts);
    assert!(get(folder.path(), "/api/v1/node").await.contains("200 OK"));
    let past = get(folder.path(), "/api/v1/history").await;
    assert!(past.contains(" 503 ") && past.contains("still being opened"), "{past}");
    actor.abort();
    let _ = actor.await;
    show.end().await;
    assert!(was_opened.try_recv().is_err(), "the file was opened before the end");
    drop(disk);
    was_opened.recv().unwrap();
}
