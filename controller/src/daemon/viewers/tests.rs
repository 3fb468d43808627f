use affinode_proto::api::{
    control::{OffloadRequest, SetAutoOffloadRequest, SetPolicyRequest, WithdrawRequest},
    control_ttrpc::ControlClient,
};
use tokio::sync::mpsc;
use ttrpc::{r#async::Client, context::with_duration};

use super::*;
use crate::{
    call_trace::CallTraceHub,
    config::ReportSection,
    handle::{Command, EventLog},
};

/// Serves the viewers' socket with this process's own group as the group of viewers. A fake actor
/// answers list requests, and sends the text of all other commands to the returned receiver.
fn viewers(folder: &Path) -> (IsolatedRuntime, mpsc::UnboundedReceiver<String>) {
    let (calls, mut asked) = mpsc::channel(8);
    let (note, noted) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Some(call) = asked.recv().await {
            match call {
                Command::List(answer) => drop(answer.send(ListResponse::default())),
                other => drop(note.send(format!("{other:?}"))),
            }
        }
    });
    let service = ControlService::new(
        calls,
        Arc::new(EventLog::default()),
        Arc::new(CallTraceHub::default()),
        None,
        ReportSection::default(),
    );
    let group = nix::unistd::getgid().to_string();
    let mut sockets = ActivationSockets::take(folder);
    (serve(&mut sockets, folder, &group, service).unwrap(), noted)
}

async fn client(folder: &Path) -> Client {
    let path = folder.join(paths::VIEW_SOCKET);
    while fs::metadata(&path).unwrap().permissions().mode() & 0o777 != 0o660 {
        tokio::task::yield_now().await;
    }
    Client::connect(&format!("unix://{}", path.display())).await.unwrap()
}

#[tokio::test]
async fn a_viewer_looks_and_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (_ward, mut noted) = viewers(folder.path());
    let control = ControlClient::new(client(folder.path()).await);
    let context = || with_duration(Duration::from_secs(20));
    control.list(context(), &ListRequest::default()).await.unwrap();
    control.events(context(), &EventsRequest::default()).await.unwrap();
    let denied = [
        control.offload(context(), &OffloadRequest::default()).await.map(drop),
        control.set_auto_offload(context(), &SetAutoOffloadRequest::default()).await.map(drop),
        control.set_policy(context(), &SetPolicyRequest::default()).await.map(drop),
        control.withdraw(context(), &WithdrawRequest::default()).await.map(drop),
    ];
    for answer in denied {
        let error = answer.unwrap_err().to_string();
        assert!(error.contains("not supported"), "{error}");
    }
    assert!(noted.try_recv().is_err(), "a request reached the actor");
}

#[test]
fn without_a_group_no_socket_is_left() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(paths::VIEW_SOCKET);
    drop(net::UnixListener::bind(&path).unwrap());
    let (calls, _asked) = mpsc::channel(1);
    let (events, hub) = (Arc::new(EventLog::default()), Arc::new(CallTraceHub::default()));
    let service = ControlService::new(calls, events, hub, None, ReportSection::default());
    let mut sockets = ActivationSockets::take(folder.path());
    assert!(serve(&mut sockets, folder.path(), "", service).is_none());
    assert!(!path.exists());
}

#[test]
fn a_group_has_a_name_or_a_number() {
    assert_eq!(gid_of("7").unwrap(), 7);
    assert_eq!(gid_of("root").unwrap(), 0);
    assert!(gid_of("no-such-group").is_err());
}
