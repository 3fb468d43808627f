use std::{
    io::{IoSlice, Read, Write},
    mem::MaybeUninit,
    os::unix::net::UnixStream,
    sync::atomic::{AtomicUsize, Ordering},
};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use super::*;
use crate::{isolated_runtime::tests::LingeringTask, jobs::SOCKET};

fn every_user() -> watch::Receiver<Vec<String>> {
    watch::Sender::new(vec!["*".into()]).subscribe()
}

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
    let _ward = runtime.block_on(async { serve(listener, calls, every_user()) }).unwrap();

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
    let Some(Command::Job(request, _, answer)) = asked.blocking_recv() else { panic!("no job") };
    assert_eq!(request.name, "train");
    answer.send(JobReply::Refused("no".into())).unwrap();
    let mut said = String::new();
    asks.read_to_string(&mut said).unwrap();
    assert_eq!(said, "{\"refused\":\"no\"}\n");
}

/// A job socket in a folder of its own.
struct TestServer {
    dir: tempfile::TempDir,
    /// Requests that the socket passes to the controller.
    asked: mpsc::Receiver<Command>,
}

impl TestServer {
    fn start(find_user: FindUser) -> TestServer {
        let dir = tempfile::tempdir().unwrap();
        let (calls, asked) = mpsc::channel(1);
        let requests = JobRequests { calls, allowed: every_user() };
        let listener = UnixListener::bind(dir.path().join(SOCKET)).unwrap();
        tokio::spawn(accept(listener, requests, find_user));
        TestServer { dir, asked }
    }

    async fn connect(&self) -> tokio::net::UnixStream {
        tokio::net::UnixStream::connect(self.dir.path().join(SOCKET)).await.unwrap()
    }
}

/// Number of connections that [`first_user_then_root`] has seen.
static SEEN: AtomicUsize = AtomicUsize::new(0);
/// Uid and gid of a user who has no name.
const USER: (u32, u32) = (4711, 4711);

/// Returns a user for the first connections, and root for the connection after them.
fn first_user_then_root(_: &tokio::net::UnixStream) -> io::Result<(u32, u32)> {
    let is_user = SEEN.fetch_add(1, Ordering::Relaxed) < AT_A_TIME;
    Ok(if is_user { USER } else { (0, 0) })
}

#[tokio::test]
async fn silent_users_delay_only_themselves() {
    let mut server = TestServer::start(first_user_then_root);
    let mut silent = Vec::new();
    for _ in 0..AT_A_TIME {
        silent.push(server.connect().await);
    }
    let mut of_root = server.connect().await;
    of_root.write_all(b"{\"name\":\"train\"}\n").await.unwrap();
    let Some(Command::Job(_, user, _)) = server.asked.recv().await else { panic!("no job") };
    assert_eq!(user.uid, 0);
    // All connections are still open. Those of the user wait for each other.
    for stream in silent {
        let read = stream.try_read(&mut [0]);
        assert_eq!(read.unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }
}

/// Returns one of four users for the first connections, and root for the connection after them.
fn four_users_then_root(_: &tokio::net::UnixStream) -> io::Result<(u32, u32)> {
    static SEEN: AtomicUsize = AtomicUsize::new(0);
    let seen = SEEN.fetch_add(1, Ordering::Relaxed);
    let uid = 4711 + u32::try_from(seen / PER_USER).unwrap();
    Ok(if seen < AT_A_TIME { (uid, uid) } else { (0, 0) })
}

/// Other users have all places and send nothing. A request must get a place before it is refused.
#[tokio::test(start_paused = true)]
async fn silent_users_lose_their_places() {
    let mut server = TestServer::start(four_users_then_root);
    let mut silent = Vec::new();
    for _ in 0..AT_A_TIME {
        silent.push(server.connect().await);
    }
    let mut of_root = server.connect().await;
    of_root.write_all(b"{\"name\":\"train\"}\n").await.unwrap();
    let answered = async {
        let mut said = String::new();
        of_root.read_to_string(&mut said).await.unwrap();
        said
    };
    let granted = async {
        let Some(Command::Job(_, _, answer)) = server.asked.recv().await else { panic!("no job") };
        answer.send(JobReply::Refused("granted".into())).unwrap();
        std::future::pending().await
    };
    let said: String = tokio::select! {
        said = answered => said,
        () = granted => unreachable!(),
    };
    assert_eq!(said, "{\"refused\":\"granted\"}\n");
}

/// mpirun starts all jobs of a program at the same moment.
#[tokio::test]
async fn many_requests_of_a_user_are_granted() {
    let mut server = TestServer::start(|_| Ok(USER));
    let mut streams = Vec::new();
    for _ in 0..16 {
        let mut stream = server.connect().await;
        stream.write_all(b"{\"name\":\"rank\"}\n").await.unwrap();
        streams.push(stream);
    }
    for _ in 0..16 {
        let Some(Command::Job(_, _, answer)) = server.asked.recv().await else { panic!("no job") };
        answer.send(JobReply::Refused("granted".into())).unwrap();
    }
    for mut stream in streams {
        let mut said = String::new();
        stream.read_to_string(&mut said).await.unwrap();
        assert_eq!(said, "{\"refused\":\"granted\"}\n");
    }
}

#[tokio::test]
async fn waiting_requests_of_a_user_are_limited() {
    let server = TestServer::start(|_| Ok(USER));
    let mut silent = Vec::new();
    for _ in 0..OPEN_PER_USER {
        silent.push(server.connect().await);
    }
    let mut further = server.connect().await;
    let mut said = String::new();
    further.read_to_string(&mut said).await.unwrap();
    assert!(said.contains("too many job requests of this user"), "{said}");
}

#[tokio::test]
async fn an_unlisted_user_is_refused_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(SOCKET);
    let (calls, _asked) = mpsc::channel(1);
    let (allowed, listed) = watch::channel(vec!["ana".to_owned()]);
    let listener = UnixListener::bind(&path).unwrap();
    let requests = JobRequests { calls, allowed: listed };
    tokio::spawn(accept(listener, requests, |_| Ok(USER)));
    let mut silent = tokio::net::UnixStream::connect(&path).await.unwrap();
    let mut said = String::new();
    silent.read_to_string(&mut said).await.unwrap();
    assert!(said.contains("user 4711 may not run jobs"), "{said}");
    // A reload of the configuration applies to the next request.
    allowed.send_replace(vec!["4711".into()]);
    let mut listed = tokio::net::UnixStream::connect(&path).await.unwrap();
    listed.write_all(b"{}\n").await.unwrap();
    let mut said = String::new();
    listed.read_to_string(&mut said).await.unwrap();
    assert!(said.contains("invalid request"), "{said}");
}
