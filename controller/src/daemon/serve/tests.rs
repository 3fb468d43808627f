use std::{
    cell::Cell,
    fs::{self, File},
};

use affinode_core::ProcessId;
use affinode_proto::api::{control::ListRequest, control_ttrpc::ControlClient};
use nix::sys::signal::{Signal as OsSignal, kill};
use tokio::{io::AsyncReadExt, net::UnixStream};
use ttrpc::{r#async::Client, context::with_duration};

use super::*;
use crate::{history, sys};

/// Checks that neither a full channel of commands nor a full channel of agents delays the other, and
/// that neither delays ticks.
#[tokio::test]
async fn commands_and_agents_take_turns() {
    let (_findings, findings) = mpsc::unbounded_channel();
    let (calls, commands) = mpsc::channel(COMMANDS);
    let (_of_copiers, copiers) = mpsc::unbounded_channel();
    let (mail, agents) = mpsc::channel(INBOX);
    let mut inbox = ActorInbox { findings, commands, copiers, agents, had_command: false };
    // Another test sends SIGTERM to this process.
    let no_signal = || signal(SignalKind::user_defined1()).unwrap();
    let mut signals = EndSignals { terminate: no_signal(), interrupt: no_signal() };
    for _ in 0..COMMANDS {
        calls.try_send(Command::Withdraw(String::new(), 0)).unwrap();
        mail.try_send(AgentMail::Detached(ProcessId(1))).unwrap();
    }
    let later = Instant::now() + Duration::from_secs(3_600);
    let (mut of_clients, mut of_agents) = (0, 0);
    for _ in 0..10 {
        match inbox.next(&mut signals, later, None).await {
            Turn::Command(_) => of_clients += 1,
            Turn::Agent(_) => of_agents += 1,
            _ => panic!("nothing else is due"),
        }
    }
    assert_eq!((of_clients, of_agents), (5, 5));
    assert!(matches!(inbox.next(&mut signals, later, None).await, Turn::Command(_)));
    let past = Instant::now() - Duration::from_secs(1);
    assert!(matches!(inbox.next(&mut signals, past, None).await, Turn::Tick));
}

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
