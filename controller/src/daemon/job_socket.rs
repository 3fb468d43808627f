//! Serves the socket for job requests. A request is one line of JSON, and so is its response. Every
//! user may connect, and the kernel identifies the user.

use std::{
    collections::HashMap,
    io::{self, Write},
    os::unix::net,
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{UnixListener, UnixStream},
    sync::{Semaphore, mpsc, oneshot, watch},
    time::timeout_at,
};

use super::user_count::UserCount;
use crate::{
    handle::Command,
    isolated_runtime::IsolatedRuntime,
    jobs::{JobReply, JobRequest, JobUser, permit_user},
    sys,
};

/// Maximum size of a job request in bytes.
const MAX_BYTES: u64 = 16 << 10;
/// Time limit for receiving a job request and sending its response.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum time for which a request waits until it is handled. It is longer than [`READ_TIMEOUT`],
/// so that a request waits for users who send nothing.
const WAIT_TIMEOUT: Duration = Duration::from_secs(4);
/// Time limit for receiving the line of a request, during which the request takes a place.
const READ_TIMEOUT: Duration = Duration::from_secs(2);
/// Refusal of a request of a user who has too many requests already.
const USER_IS_BUSY: &str = "too many job requests of this user are in progress; try again";
/// Refusal of a request that cannot be handled because of other users' requests.
const ALL_ARE_BUSY: &str = "too many job requests of all users are in progress; try again";
/// Maximum number of job requests of one user that are handled at a time. Further requests wait. It
/// is a part of [`AT_A_TIME`], so that one user cannot delay the jobs of others.
const PER_USER: usize = 4;
/// Maximum number of job requests that are handled at a time.
const AT_A_TIME: usize = 16;
/// Maximum number of open requests of one user, handled or waiting. Further requests are refused at
/// once. A program such as mpirun may start that many jobs at the same moment.
const OPEN_PER_USER: usize = 128;
/// Maximum number of open requests of all users.
const OPEN_IN_ALL: usize = 1024;

/// Returns the uid and the gid of the process at the other end of a connection.
type FindUser = fn(&UnixStream) -> io::Result<(u32, u32)>;

/// Serves job requests on a thread of their own, until the returned runtime is dropped. `allowed`
/// is the current setting `jobs.users`.
///
/// # Errors
/// The runtime cannot watch the socket.
pub fn serve(
    listener: net::UnixListener,
    calls: mpsc::Sender<Command>,
    allowed: watch::Receiver<Vec<String>>,
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
    ward.spawn(accept(listener, JobRequests { calls, allowed }, user_of));
    Ok(ward)
}

fn user_of(stream: &UnixStream) -> io::Result<(u32, u32)> {
    stream.peer_cred().map(|peer| (peer.uid(), peer.gid()))
}

async fn accept(listener: UnixListener, requests: JobRequests, find_user: FindUser) {
    let places = Arc::new(Semaphore::new(AT_A_TIME));
    let count = UserCount::new(OPEN_PER_USER, OPEN_IN_ALL);
    let mut turns = UserTurns::default();
    loop {
        let accepted = listener.accept().await;
        let (stream, user) = match accepted.and_then(|(stream, _)| {
            let user = find_user(&stream)?;
            Ok((stream, user))
        }) {
            Ok(accepted) => accepted,
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
        let Some(open) = count.take(user.0) else {
            refuse_busy(stream, USER_IS_BUSY);
            continue;
        };
        let (requests, places, turns) = (requests.clone(), Arc::clone(&places), turns.of(user.0));
        tokio::spawn(async move {
            let deadline = tokio::time::Instant::now() + WAIT_TIMEOUT;
            // A request that waits for the user's own requests takes no place of other users.
            let Ok(Ok(own)) = timeout_at(deadline, turns.acquire_owned()).await else {
                return refuse_busy(stream, USER_IS_BUSY);
            };
            let Ok(Ok(place)) = timeout_at(deadline, places.acquire_owned()).await else {
                return refuse_busy(stream, ALL_ARE_BUSY);
            };
            // If the client disconnects before the response, there are two cases: no job was
            // created, or the job is removed soon, because no process locks its file.
            let _ = tokio::time::timeout(REQUEST_TIMEOUT, requests.answer(stream, user)).await;
            drop((own, place, open));
        });
    }
}

/// The turns of each user's requests: [`PER_USER`] of them are handled at a time.
#[derive(Default)]
struct UserTurns {
    /// An entry exists as long as a request of the user is open.
    users: HashMap<u32, Weak<Semaphore>>,
}

impl UserTurns {
    fn of(&mut self, uid: u32) -> Arc<Semaphore> {
        self.users.retain(|_, turns| turns.strong_count() > 0);
        if let Some(turns) = self.users.get(&uid).and_then(Weak::upgrade) {
            return turns;
        }
        let turns = Arc::new(Semaphore::new(PER_USER));
        self.users.insert(uid, Arc::downgrade(&turns));
        turns
    }
}

/// Refuses a request before it is read, and closes its connection.
fn refuse_busy(stream: UnixStream, why: &str) {
    let why = why.to_owned();
    // The connection is new, so its buffer has room for the response.
    if let (Ok(line), Ok(mut stream)) = (line_of(&JobReply::Refused(why)), stream.into_std()) {
        let _ = stream.write_all(line.as_bytes());
    }
}

fn line_of(reply: &JobReply) -> io::Result<String> {
    Ok(serde_json::to_string(reply)? + "\n")
}

/// Sends job requests to the actor.
#[derive(Clone)]
struct JobRequests {
    calls: mpsc::Sender<Command>,
    allowed: watch::Receiver<Vec<String>>,
}

impl JobRequests {
    /// Reads a request of a user, and writes its response. A user who may not run jobs gets a
    /// response before the request is read.
    async fn answer(&self, mut stream: UnixStream, (uid, gid): (u32, u32)) -> io::Result<()> {
        // The user database may be slow; the actor must not wait for it.
        let known = tokio::task::spawn_blocking(move || {
            nix::unistd::User::from_uid(nix::unistd::Uid::from_raw(uid)).ok().flatten()
        });
        let name = known.await.ok().flatten().map_or_else(|| uid.to_string(), |user| user.name);
        let user = JobUser { uid, gid, name };
        let permitted = permit_user(&user, &self.allowed.borrow());
        let reply = match permitted {
            Ok(()) => {
                let mut line = String::new();
                let mut reader = BufReader::new((&mut stream).take(MAX_BYTES));
                tokio::time::timeout(READ_TIMEOUT, reader.read_line(&mut line)).await??;
                match serde_json::from_str::<JobRequest>(&line) {
                    Ok(request) => self.ask(request, user).await,
                    Err(error) => JobReply::Refused(format!("invalid request: {error}")),
                }
            }
            Err(refusal) => JobReply::Refused(refusal.to_string()),
        };
        stream.write_all(line_of(&reply)?.as_bytes()).await
    }

    async fn ask(&self, request: JobRequest, user: JobUser) -> JobReply {
        let (answer, answered) = oneshot::channel();
        let ending = || JobReply::Refused("the controller is shutting down; try again".into());
        if self.calls.send(Command::Job(request, user, answer)).await.is_err() {
            return ending();
        }
        answered.await.unwrap_or_else(|_| ending())
    }
}

#[cfg(test)]
mod tests;
