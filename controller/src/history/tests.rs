use super::*;

const LIMITS: StoreLimits = StoreLimits { keep_ms: 1_000_000_000_000, max_bytes: 64 << 20 };

fn node() -> schema::Node {
    let container = schema::Container {
        key: "a".into(),
        state: "Active".into(),
        ..schema::Container::default()
    };
    schema::Node { containers: vec![container], ..schema::Node::default() }
}

#[tokio::test(start_paused = true)]
async fn spans_wait_for_a_slow_open() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(FILE);
    let (disk, stalled) = mpsc::channel::<()>();
    let (counted, runs) = mpsc::channel();
    let file = path.clone();
    let open = move || {
        let _ = stalled.recv();
        SpanStore::open(&file, LIMITS)
    };
    let history = NodeHistory::start(open, move |runs| counted.send(runs).unwrap()).unwrap();
    history.observe(&node(), 1_000);
    history.observe(&node(), 2_000);
    history.opened().await;
    assert!(matches!(history.spans(0, 9_000, None), Err(StoreError::Opening)));
    assert!(runs.try_recv().is_err(), "the number of runs is unknown");
    drop(disk);
    history.close();
    assert_eq!(runs.recv().unwrap().starts, 1);
    assert!(matches!(history.spans(0, 9_000, None), Err(StoreError::Closed)));
    let store = SpanStore::open(&path, LIMITS).unwrap();
    assert_eq!(store.spans(0, 9_000, None).unwrap().len(), 1);
    assert_eq!(store.count_start().unwrap().unexpected_ends, 0, "the end was recorded");
}

#[tokio::test]
async fn a_file_that_cannot_be_opened_is_named() {
    let (counted, runs) = mpsc::channel();
    let open = || Err(StoreError::NotOpen);
    let history = NodeHistory::start(open, move |runs| counted.send(runs).unwrap()).unwrap();
    history.opened().await;
    for now_ms in 1..100 {
        history.observe(&node(), now_ms * 60_000);
    }
    assert!(matches!(history.report(0, 9_000), Err(StoreError::NotOpen)));
    assert_eq!(runs.recv().unwrap(), ControllerRuns { starts: 1, unexpected_ends: 0 });
    assert_eq!(history.dropped(), 0, "the disk is not too slow");
}
