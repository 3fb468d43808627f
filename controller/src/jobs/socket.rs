//! The socket that takes jobs: a line of JSON in, a line out. Everybody may knock; who it is
//! the kernel says.

use std::{io, os::unix::net, sync::Arc, time::Duration};

use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{UnixListener, UnixStream},
    sync::{Semaphore, mpsc, oneshot},
};

use super::{Reply, Request, User};
use crate::daemon::Call;

/// Below the run directory: where jobs are taken.
pub const SOCKET: &str = "jobs.sock";
/// The longest request in bytes.
const MOST_BYTES: u64 = 16 << 10;
/// How long a request may take to come, and an answer to go.
const PATIENCE: Duration = Duration::from_secs(5);
/// Requests at a time; others wait in the kernel's backlog.
const AT_A_TIME: usize = 16;

/// Takes jobs until the task is aborted.
///
/// # Errors
/// The runtime cannot watch the socket.
pub fn serve(
    listener: net::UnixListener,
    calls: mpsc::Sender<Call>,
) -> io::Result<tokio::task::AbortHandle> {
    let listener = UnixListener::from_std(listener)?;
    Ok(tokio::spawn(accept(listener, calls)).abort_handle())
}

async fn accept(listener: UnixListener, calls: mpsc::Sender<Call>) {
    let places = Arc::new(Semaphore::new(AT_A_TIME));
    while let Ok(place) = Arc::clone(&places).acquire_owned().await {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "cannot accept who asks for a job");
                tokio::time::sleep(Duration::from_millis(200)).await;
                continue;
            }
        };
        let calls = calls.clone();
        tokio::spawn(async move {
            // Whoever goes away in the middle has no job, or one that is soon over.
            let _ = tokio::time::timeout(PATIENCE, answer(stream, calls)).await;
            drop(place);
        });
    }
}

async fn answer(stream: UnixStream, calls: mpsc::Sender<Call>) -> io::Result<()> {
    let peer = stream.peer_cred()?;
    let (read, mut write) = stream.into_split();
    let mut line = String::new();
    BufReader::new(read.take(MOST_BYTES)).read_line(&mut line).await?;
    let reply = match serde_json::from_str::<Request>(&line) {
        Ok(request) => ask(request, (peer.uid(), peer.gid()), calls).await,
        Err(error) => Reply::Refused(format!("the request is not understood: {error}")),
    };
    let mut text = serde_json::to_string(&reply)?;
    text.push('\n');
    write.write_all(text.as_bytes()).await
}

async fn ask(request: Request, (uid, gid): (u32, u32), calls: mpsc::Sender<Call>) -> Reply {
    // The user database may be slow; containers do not wait for it.
    let known = tokio::task::spawn_blocking(move || {
        nix::unistd::User::from_uid(nix::unistd::Uid::from_raw(uid)).ok().flatten()
    });
    let name = known.await.ok().flatten().map_or_else(|| uid.to_string(), |user| user.name);
    let (answer, answered) = oneshot::channel();
    let call = Call::Job(request, User { uid, gid, name }, answer);
    let ending = || Reply::Refused("the controller is ending; try again".into());
    if calls.send(call).await.is_err() {
        return ending();
    }
    answered.await.unwrap_or_else(|_| ending())
}
