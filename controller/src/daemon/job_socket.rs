//! Serves the socket for job requests. A request is one line of JSON, and so is its response. Every
//! user may connect, and the kernel identifies the user.

use std::{io, os::unix::net, sync::Arc, time::Duration};

use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{UnixListener, UnixStream},
    sync::{Semaphore, mpsc, oneshot},
};

use crate::{
    handle::Command,
    isolated_runtime::IsolatedRuntime,
    jobs::{JobReply, JobRequest, JobUser},
    sys,
};

/// Maximum size of a job request in bytes.
const MAX_BYTES: u64 = 16 << 10;
/// Time limit for receiving a job request and sending its response.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of job requests that are handled at a time. Further requests wait in the kernel's
/// backlog.
const AT_A_TIME: usize = 16;

/// Serves job requests on a thread of their own, until the returned runtime is dropped.
///
/// # Errors
/// The runtime cannot watch the socket.
pub fn serve(
    listener: net::UnixListener,
    calls: mpsc::Sender<Command>,
) -> io::Result<IsolatedRuntime> {
    // Before Linux 6.16, a user who sends descriptors can delay the jobs of others.
    if let Err(error) = sys::refuse_descriptors(&listener) {
        tracing::debug!(%error, "jobs: this kernel cannot reject file descriptors in requests (Linux 6.16 and newer can). A user who sends many descriptors can delay the jobs of other users");
    }
    let ward = IsolatedRuntime::begin("jobs")?;
    let listener = {
        let _there = ward.runtime().enter();
        UnixListener::from_std(listener)?
    };
    ward.spawn(accept(listener, calls));
    Ok(ward)
}

async fn accept(listener: UnixListener, calls: mpsc::Sender<Command>) {
    let places = Arc::new(Semaphore::new(AT_A_TIME));
    while let Ok(place) = Arc::clone(&places).acquire_owned().await {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(
                    %error,
                    "jobs: the controller cannot accept the connection of an `affinode run` \
                     command, and tries again"
                );
                tokio::time::sleep(Duration::from_millis(200)).await;
                continue;
            }
        };
        let calls = calls.clone();
        tokio::spawn(async move {
            // If the client disconnects before the response, there are two cases: no job was
            // created, or the job is removed soon, because no process locks its file.
            let _ = tokio::time::timeout(REQUEST_TIMEOUT, answer(stream, calls)).await;
            drop(place);
        });
    }
}

async fn answer(stream: UnixStream, calls: mpsc::Sender<Command>) -> io::Result<()> {
    let peer = stream.peer_cred()?;
    let (read, mut write) = stream.into_split();
    let mut line = String::new();
    BufReader::new(read.take(MAX_BYTES)).read_line(&mut line).await?;
    let reply = match serde_json::from_str::<JobRequest>(&line) {
        Ok(request) => ask(request, (peer.uid(), peer.gid()), calls).await,
        Err(error) => JobReply::Refused(format!("invalid request: {error}")),
    };
    let mut text = serde_json::to_string(&reply)?;
    text.push('\n');
    write.write_all(text.as_bytes()).await
}

async fn ask(
    request: JobRequest,
    (uid, gid): (u32, u32),
    calls: mpsc::Sender<Command>,
) -> JobReply {
    // The user database may be slow; the actor must not wait for it.
    let known = tokio::task::spawn_blocking(move || {
        nix::unistd::User::from_uid(nix::unistd::Uid::from_raw(uid)).ok().flatten()
    });
    let name = known.await.ok().flatten().map_or_else(|| uid.to_string(), |user| user.name);
    let (answer, answered) = oneshot::channel();
    let call = Command::Job(request, JobUser { uid, gid, name }, answer);
    let ending = || JobReply::Refused("the controller is shutting down; try again".into());
    if calls.send(call).await.is_err() {
        return ending();
    }
    answered.await.unwrap_or_else(|_| ending())
}

#[cfg(test)]
mod tests {
    use std::{
        io::{IoSlice, Read, Write},
        mem::MaybeUninit,
        os::unix::net::UnixStream,
    };

    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

    use super::*;
    use crate::{isolated_runtime::tests::LingeringTask, jobs::SOCKET};

    /// Checks that a descriptor whose close blocks delays only the thread of the job requests. The
    /// kernel closes unread descriptors in the thread that reads the message. The close of this
    /// test's descriptor waits until its peer has read all data, or for a timeout.
    #[test]
    fn a_sent_descriptor_delays_only_jobs() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(SOCKET);
        let listener = net::UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let (calls, mut asked) = mpsc::channel(1);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let refuses = sys::refuse_descriptors(&listener).is_ok();
        let _ward = runtime.block_on(async { serve(listener, calls) }).unwrap();

        let mut lingering = LingeringTask::new();
        let hostile = UnixStream::connect(&path).unwrap();
        let fds = [lingering.descriptor()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        let parts = [IoSlice::new(b"{")];
        let sent = rustix::net::sendmsg(&hostile, &parts, &mut control, SendFlags::empty());
        assert_eq!(sent.is_err(), refuses);
        if !refuses {
            lingering.let_go();
            // The close blocks the thread of the job requests. The thread of the test must not be
            // blocked.
            runtime.block_on(async {
                while lingering.is_open() {
                    tokio::task::yield_now().await;
                }
            });
            assert!(lingering.is_waited_for(), "it has waited");
            return;
        }
        let mut asks = UnixStream::connect(&path).unwrap();
        asks.write_all(b"{\"name\":\"train\"}\n").unwrap();
        let Some(Command::Job(request, _, answer)) = asked.blocking_recv() else {
            panic!("no job")
        };
        assert_eq!(request.name, "train");
        answer.send(JobReply::Refused("no".into())).unwrap();
        let mut said = String::new();
        asks.read_to_string(&mut said).unwrap();
        assert_eq!(said, "{\"refused\":\"no\"}\n");
    }
}
