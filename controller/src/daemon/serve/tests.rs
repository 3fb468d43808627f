use std::{
    cell::Cell,
    fs::{self, File},
};

use affinode_proto::api::{control::ListRequest, control_ttrpc::ControlClient};
use nix::sys::signal::{Signal as OsSignal, kill};
use tokio::{io::AsyncReadExt, net::UnixStream};
use ttrpc::{r#async::Client, context::with_duration};

use super::*;
use crate::{history, sys};

/// Takes a lease on the history's file, so that an open of the file blocks until the lease is
/// released.
fn block_history(run_dir: &Path) -> File {
    let folder = run_dir.join("state");
    fs::create_dir(&folder).unwrap();
    let file = File::create(folder.join(history::FILE)).unwrap();
    // Other tests fork children, which inherit this descriptor until their exec.
    while let Err(error) = sys::lease(&file, true) {
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "{error}");
        std::thread::yield_now();
    }
    file
}

/// Checks that the controller becomes ready and ends while its history cannot be opened, and that
/// it closes its connections before it waits for the history.
#[tokio::test]
async fn a_blocked_history_delays_no_decision() {
    let dir = tempfile::tempdir().unwrap();
    let leased = block_history(dir.path());
    let socket = dir.path().join(paths::CONTROL_SOCKET);
    let (is_closed, was_closed_at_end) = (Cell::new(false), Cell::new(false));
    let served = async {
        serve(dir.path().to_owned(), Config::default()).await.unwrap();
        was_closed_at_end.set(is_closed.get());
    };
    let client = async {
        while !socket.exists() {
            tokio::task::yield_now().await;
        }
        let mut waiting = UnixStream::connect(&socket).await.unwrap();
        let client = Client::connect(&format!("unix://{}", socket.display())).await.unwrap();
        let control = ControlClient::new(client);
        let context = with_duration(Duration::from_secs(20));
        control.list(context, &ListRequest::default()).await.unwrap();
        // The controller has responded, so it handles the signal.
        kill(nix::unistd::getpid(), OsSignal::SIGTERM).unwrap();
        let end = waiting.read(&mut [0]).await;
        is_closed.set(matches!(end, Ok(0) | Err(_)));
    };
    tokio::join!(served, client);
    assert!(was_closed_at_end.get(), "the controller waited for the history first");
    // The lease is released after the controller has ended.
    sys::lease(&leased, false).unwrap();
}
