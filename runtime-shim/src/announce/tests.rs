use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use affinode_proto::api::control::{AnnounceRequest, AnnounceResponse, WithdrawResponse};
use containerd_shim_protos::protobuf::Message;
use tokio::net::UnixListener;
use tokio::task::JoinSet;
use ttrpc::proto::{Request, Response};

use super::*;
use crate::frame::{FrameHeader, HEADER_BYTES, RESPONSE};

/// Test setup: a run directory, and a program that writes a line each time it is launched.
struct Node {
    dir: tempfile::TempDir,
}

impl Node {
    fn new() -> Node {
        let dir = tempfile::tempdir().unwrap();
        let node = Node { dir };
        let launched = node.path("launched");
        let script = format!("#!/bin/sh\necho \"$@\" >> {}\n", launched.display());
        fs::write(node.path("program"), script).unwrap();
        fs::set_permissions(node.path("program"), fs::Permissions::from_mode(0o755)).unwrap();
        node
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn launcher(&self) -> Launcher {
        Launcher {
            paths: ShimPaths {
                run_dir: self.path("run"),
                lib_dir: self.path("lib"),
                config: self.path("config.toml"),
            },
            program: self.path("program"),
        }
    }

    fn launches(&self) -> usize {
        fs::read_to_string(self.path("launched")).map_or(0, |text| text.lines().count())
    }

    fn serve(&self) -> Fake {
        Fake { listener: self.listen(), connections: JoinSet::new() }
    }

    fn listen(&self) -> UnixListener {
        fs::create_dir_all(self.path("run")).unwrap();
        let socket = self.launcher().paths.control_socket();
        let _ = fs::remove_file(&socket);
        UnixListener::bind(socket).unwrap()
    }
}

fn container(id: &str) -> Announcement {
    Announcement { key: id.to_owned(), id: id.to_owned(), ..Announcement::default() }
}

/// A fake controller that replies to calls. When it is dropped, its connections end.
struct Fake {
    listener: UnixListener,
    connections: JoinSet<()>,
}

impl Fake {
    /// Replies to the next `wanted` calls, and returns these calls as text.
    async fn answer(&mut self, wanted: usize) -> Vec<String> {
        let (calls, mut heard) = mpsc::unbounded_channel();
        let mut words = Vec::new();
        while words.len() < wanted {
            tokio::select! {
                accepted = self.listener.accept() => {
                    let mut stream = accepted.unwrap().0;
                    let calls = calls.clone();
                    self.connections.spawn(async move {
                        let mut header = [0; HEADER_BYTES];
                        // The announcer's watch connection ends without a call.
                        if stream.read_exact(&mut header).await.is_err() {
                            return;
                        }
                        let header = FrameHeader::decode(header).unwrap();
                        let mut payload = vec![0; header.payload_bytes as usize];
                        stream.read_exact(&mut payload).await.unwrap();
                        let word = reply(&mut stream, &header, &payload).await;
                        let _ = calls.send(word);
                    });
                }
                word = heard.recv() => words.push(word.unwrap()),
            }
        }
        words
    }
}

async fn reply(stream: &mut UnixStream, header: &FrameHeader, payload: &[u8]) -> String {
    use tokio::io::AsyncWriteExt;
    let request = Request::parse_from_bytes(payload).unwrap();
    assert_eq!(request.service, "affinode.control.v1.Control");
    let mut response = Response::new();
    let word = match request.method.as_str() {
        "Announce" => {
            let announced = AnnounceRequest::parse_from_bytes(&request.payload).unwrap();
            response.payload = AnnounceResponse::new().write_to_bytes().unwrap();
            format!("announce {}", announced.container.id)
        }
        method => {
            response.payload = WithdrawResponse::new().write_to_bytes().unwrap();
            method.to_lowercase()
        }
    };
    let header = FrameHeader { kind: RESPONSE, ..*header };
    let frame = header.with_payload(&response.write_to_bytes().unwrap()).unwrap();
    stream.write_all(&frame).await.unwrap();
    word
}

async fn until(mut check: impl FnMut() -> bool) {
    let wait = async {
        while !check() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), wait)
        .await
        .expect("the condition holds within 60 s");
}

#[tokio::test]
async fn without_containers_nothing_is_started() {
    let node = Node::new();
    let announcer = Announcer::spawn(node.launcher());
    announcer.remove("unknown".to_owned());
    announcer.finish(Duration::from_secs(60)).await;
    assert_eq!(node.launches(), 0);
    assert!(!Path::new(&node.path("run")).exists());
}

#[tokio::test]
async fn a_missing_controller_is_launched_once_for_all() {
    let node = Node::new();
    let announcers: Vec<_> = (0..12)
        .map(|number| {
            let announcer = Announcer::spawn(node.launcher());
            announcer.add(container(&format!("c{number}")));
            announcer
        })
        .collect();
    until(|| node.launches() > 0).await;
    let mut words = node.serve().answer(announcers.len()).await;
    words.sort();
    words.dedup();
    assert_eq!(words.len(), announcers.len(), "each container is announced once: {words:?}");
    let text = fs::read_to_string(node.path("launched")).unwrap();
    assert_eq!(text, "launch\n", "exactly one announcer starts the controller");
}

#[tokio::test]
async fn containers_are_reannounced_after_restart() {
    let node = Node::new();
    let mut fake = node.serve();
    let announcer = Announcer::spawn(node.launcher());
    announcer.add(container("a"));
    announcer.add(container("b"));
    let mut words = fake.answer(2).await;
    words.sort();
    assert_eq!(words, ["announce a", "announce b"]);
    assert_eq!(node.launches(), 0, "a controller was launched although one was running");

    node.launcher().paths.container("a").make(container("a").generation, b"").unwrap();
    announcer.remove("a".to_owned());
    assert_eq!(fake.answer(1).await, ["withdraw"]);
    until(|| !node.path("run/containers/a").exists()).await;

    drop(fake);
    fs::remove_file(node.launcher().paths.control_socket()).unwrap();
    until(|| node.launches() == 1).await;
    let words = node.serve().answer(1).await;
    assert_eq!(words, ["announce b"], "only the live container is announced");
    announcer.remove("b".to_owned());
    drop(announcer);
}

/// The end of a container is reported only after the next container with the same id was created.
/// The next container must keep its folder.
#[tokio::test]
async fn the_next_container_of_an_id_keeps_its_folder() {
    let node = Node::new();
    let mut fake = node.serve();
    let announcer = Announcer::spawn(node.launcher());
    announcer.add(container("a"));
    assert_eq!(fake.answer(1).await, ["announce a"]);
    let next = container("a").generation + 1;
    node.launcher().paths.container("a").make(next, b"").unwrap();
    announcer.remove("a".to_owned());
    assert_eq!(fake.answer(1).await, ["withdraw"]);
    announcer.finish(Duration::from_secs(60)).await;
    assert_eq!(node.launcher().paths.container("a").generation(), Some(next));
}

#[tokio::test]
async fn garbage_replies_do_not_stop_announcing() {
    use tokio::io::AsyncWriteExt;
    let node = Node::new();
    let listener = node.listen();
    let announcer = Announcer::spawn(node.launcher());
    announcer.add(container("a"));
    // The watch connection and the first call get garbage. The next call gets a reply.
    for _ in 0..2 {
        let (mut stream, _) = listener.accept().await.unwrap();
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await;
    }
    let mut fake = Fake { listener, connections: JoinSet::new() };
    assert_eq!(fake.answer(1).await, ["announce a"]);
}

/// `delete` has no time left. It must not wait for a controller that may not reply, but must remove
/// the container's folder.
#[test]
fn without_time_only_the_folder_is_removed() {
    let node = Node::new();
    let paths = node.launcher().paths;
    let folder = paths.container("a");
    folder.make(1, b"").unwrap();
    let controller = std::os::unix::net::UnixListener::bind(paths.control_socket()).unwrap();
    controller.set_nonblocking(true).unwrap();
    withdraw(&paths, "a", std::time::Instant::now());
    let call = controller.accept().unwrap_err();
    assert_eq!(call.kind(), std::io::ErrorKind::WouldBlock, "no call is made");
    assert!(!folder.exists());
}

/// The controller accepts connections and is silent. A shim that ends must remove the folders of
/// its ended containers, and no others.
#[tokio::test]
async fn silent_controller_leaves_no_folder() {
    let node = Node::new();
    let mute = node.listen();
    let paths = node.launcher().paths;
    let announcer = Announcer::spawn(node.launcher());
    for id in ["ended", "next", "running"] {
        paths.container(id).make(0, b"").unwrap();
        announcer.add(container(id));
    }
    // The connection that the shim watches, and the first call, which gets no reply.
    let _connections = (mute.accept().await.unwrap(), mute.accept().await.unwrap());
    announcer.remove("ended".to_owned());
    announcer.remove("next".to_owned());
    // Another shim has a container of the same id meanwhile.
    paths.container("next").make(1, b"").unwrap();
    announcer.finish(Duration::from_millis(50)).await;
    let left = ["ended", "next", "running"].map(|id| paths.container(id).exists());
    assert_eq!(left, [false, true, true]);
}
