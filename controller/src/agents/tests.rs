//! Tests of connections to agents that are valid, silent, malformed or hostile.

use std::{
    io::{IoSlice, Read, Write},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use affinode_proto::wire::{
    Capabilities, Hazards, Phase, WIRE_VERSION,
    counters::{PAGE_BYTES, PAGE_MAGIC, SLOT_COUNT, header},
    message::{Action, AgentMessage, ControllerMessage, CopyOptions, FRAME_BYTES},
};
use rustix::{
    fs::{MemfdFlags, SealFlags},
    net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags},
};
use tokio::{runtime::Handle, sync::mpsc};

use super::*;
use crate::{isolated_runtime::tests::LingeringTask, socket_activation::ActivationSockets};

fn unsealed_page() -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("page", flags).unwrap();
    rustix::fs::ftruncate(&fd, PAGE_BYTES as u64).unwrap();
    fd
}

fn page() -> OwnedFd {
    let fd = unsealed_page();
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
    let file = File::from(fd);
    file.write_all_at(&PAGE_MAGIC.to_ne_bytes(), header::MAGIC as u64).unwrap();
    file.write_all_at(&WIRE_VERSION.to_ne_bytes(), header::VERSION as u64).unwrap();
    file.write_all_at(&(SLOT_COUNT as u32).to_ne_bytes(), header::SLOT_COUNT as u64).unwrap();
    file.into()
}

fn hello(version: u32) -> [u8; FRAME_BYTES] {
    hello_with(version, Capabilities::default())
}

fn hello_with(version: u32, abilities: Capabilities) -> [u8; FRAME_BYTES] {
    AgentMessage::Hello {
        version,
        pid_in_namespace: 1,
        phase: Phase::Open,
        generation: 0,
        driver_version: 13_000,
        hazards: Hazards::default(),
        abilities,
        swappable_bytes: 0,
        copied_out_bytes: 0,
        local_memory_bytes: 0,
    }
    .encode()
}

fn send_with(stream: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    }
    rustix::net::sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::empty()).unwrap();
}

struct Bench {
    peer: UnixStream,
    mail: mpsc::Receiver<AgentMail>,
}

/// Creates a socket pair. One end is served in the way in which the controller serves the
/// connection of a process. The test uses the other end.
fn bench() -> Bench {
    let (peer, ours) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    let (sender, mail) = mpsc::channel(8);
    let key = Key::parse(&"0".repeat(32)).unwrap();
    let stream = tokio::net::UnixStream::from_std(ours).unwrap();
    let budgets = Arc::new(rate_limit::RateLimits::new());
    tokio::spawn(connection::serve(stream, key, ProcessId(1), budgets, Handle::current(), sender));
    Bench { peer, mail }
}

fn refusal(peer: &mut UnixStream) -> ControllerMessage {
    let mut frame = [0; FRAME_BYTES];
    peer.read_exact(&mut frame).unwrap();
    ControllerMessage::decode(&frame).unwrap()
}

#[tokio::test]
async fn an_identified_process_joins() {
    let mut bench = bench();
    let page = page();
    send_with(&bench.peer, &hello(WIRE_VERSION), &[page.as_fd()]);
    let Some(AgentMail::Joined { identity, mut agent, .. }) = bench.mail.recv().await else {
        panic!("not joined")
    };
    assert_eq!(identity.pid, std::process::id());
    assert_eq!(agent.read_page(&mut [0; PAGE_BYTES]).unwrap().phase, Phase::Open);

    let order = ControllerMessage::Order { order: 1, action: Action::Restore, decided_ms: 9 };
    assert!(agent.send(order));
    let answer = tokio::task::spawn_blocking(move || refusal(&mut bench.peer)).await.unwrap();
    assert_eq!(answer, order);
}

/// Checks that the Hello alone tells the controller which capabilities the library has. No further
/// message must be necessary.
#[tokio::test]
async fn hello_with_capabilities_tells_the_core() {
    let mut bench = bench();
    send_with(&bench.peer, &hello_with(WIRE_VERSION, Capabilities::CHECKS), &[page().as_fd()]);
    let Some(AgentMail::Joined { hello, mut agent, .. }) = bench.mail.recv().await else {
        panic!("not joined")
    };
    assert!(matches!(hello, AgentMessage::Hello { abilities: Capabilities::CHECKS, .. }));
    let how = CopyOptions { check: true, ..CopyOptions::default() };
    let action = Action::CopyOut { vram_bytes: 7, how };
    let order = ControllerMessage::Order { order: 1, action, decided_ms: 9 };
    assert!(agent.send(order));
    let answer = tokio::task::spawn_blocking(move || refusal(&mut bench.peer)).await.unwrap();
    assert_eq!(answer, order, "the agent receives the order as the core made it");
}

#[tokio::test]
async fn an_overwritten_counter_file_is_an_error() {
    let mut bench = bench();
    let page = page();
    send_with(&bench.peer, &hello(WIRE_VERSION), &[page.as_fd()]);
    let Some(AgentMail::Joined { agent, .. }) = bench.mail.recv().await else {
        panic!("not joined")
    };
    let file = File::from(page);
    file.write_all_at(&[0xff; 64], 0).unwrap();
    assert!(matches!(agent.read_page(&mut [0; PAGE_BYTES]), Err(CounterReadError::Content(_))));
    assert!(file.set_len(10).is_err(), "the size is sealed");
}

#[tokio::test]
async fn another_version_is_told_not_to_retry() {
    let mut bench = bench();
    send_with(&bench.peer, &hello(WIRE_VERSION + 1), &[page().as_fd()]);
    let Some(AgentMail::Refused { why, .. }) = bench.mail.recv().await else {
        panic!("not refused")
    };
    assert!(why.contains("restart the container"), "{why}");
    assert_eq!(
        refusal(&mut bench.peer),
        ControllerMessage::Refuse { version: WIRE_VERSION, retry: false }
    );
}

#[tokio::test]
async fn a_hello_with_wrong_descriptors_is_refused() {
    let first = page();
    let second = page();
    let cases: [(&[u8], Vec<BorrowedFd<'_>>, &str); 4] = [
        (&[0xab; FRAME_BYTES], vec![first.as_fd()], "magic"),
        (
            &AgentMessage::Notice { hazards: Hazards(1) }.encode(),
            vec![first.as_fd()],
            "not a Hello",
        ),
        (&hello(WIRE_VERSION), vec![], "0 descriptors"),
        (&hello(WIRE_VERSION), vec![first.as_fd(), second.as_fd(), first.as_fd()], "2 descriptors"),
    ];
    // The connection takes two descriptors of a message at most, so a third one is not counted.
    for (frame, fds, expected) in cases {
        let mut bench = bench();
        send_with(&bench.peer, frame, &fds);
        let Some(AgentMail::Refused { why, .. }) = bench.mail.recv().await else {
            panic!("{expected}")
        };
        assert!(why.contains(expected), "{why}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_silent_peer_is_refused() {
    let mut bench = bench();
    let Some(AgentMail::Refused { why, .. }) = bench.mail.recv().await else {
        panic!("not refused")
    };
    assert!(why.contains("no first message (Hello) within"), "{why}");
}

#[tokio::test]
async fn an_invalid_frame_closes_one_connection() {
    let mut bench = bench();
    send_with(&bench.peer, &hello(WIRE_VERSION), &[page().as_fd()]);
    let Some(AgentMail::Joined { agent: _agent, .. }) = bench.mail.recv().await else {
        panic!("not joined")
    };
    bench.peer.write_all(&[7; FRAME_BYTES]).unwrap();
    assert!(matches!(bench.mail.recv().await, Some(AgentMail::Detached(ProcessId(1)))));
}

#[tokio::test]
async fn an_agent_that_never_reads_is_closed() {
    let mut bench = bench();
    send_with(&bench.peer, &hello(WIRE_VERSION), &[page().as_fd()]);
    let Some(AgentMail::Joined { mut agent, .. }) = bench.mail.recv().await else {
        panic!("not joined")
    };
    let sent = (0..1_000_000)
        .take_while(|_| {
            agent.send(ControllerMessage::Welcome {
                vram_limit_bytes: 0,
                process: 1,
                wait_for_room_ms: 0,
                engine: affinode_proto::wire::Engine::Checkpoint,
            })
        })
        .count();
    // Every place of the channel is used, because the writer task has not run in between.
    assert_eq!(sent, OUTBOX);
    assert!(matches!(bench.mail.recv().await, Some(AgentMail::Detached(_))));
}

#[tokio::test]
async fn the_listener_replaces_a_stale_socket() {
    let run_dir = tempfile::tempdir().unwrap();
    // The path is longer than a socket address may be.
    let deep = run_dir.path().join("d".repeat(100));
    let key = Key::parse(&"0".repeat(32)).unwrap();
    let (sender, mut mail) = mpsc::channel(8);
    let numbers = Arc::new(std::sync::atomic::AtomicU64::new(1));
    for _ in 0..2 {
        let listener = AgentListener::open(
            &mut ActivationSockets::take(&deep),
            &deep,
            &key,
            None,
            Arc::clone(&numbers),
            sender.clone(),
        )
        .unwrap();
        let folder = deep.join("containers").join(key.as_str()).join("mount");
        let opened = File::open(&folder).unwrap();
        let address =
            format!("/proc/self/fd/{}/agent.sock", std::os::fd::AsRawFd::as_raw_fd(&opened));
        let mut peer = UnixStream::connect(address).unwrap();
        peer.write_all(&[0; FRAME_BYTES]).unwrap();
        assert!(matches!(mail.recv().await, Some(AgentMail::Refused { .. })));
        drop(listener);
    }
}

#[tokio::test]
async fn connections_of_a_container_are_limited() {
    let run_dir = tempfile::tempdir().unwrap();
    let key = Key::parse(&"0".repeat(32)).unwrap();
    let (sender, mut mail) = mpsc::channel(8);
    let numbers = Arc::new(std::sync::atomic::AtomicU64::new(1));
    let _listener = AgentListener::open(
        &mut ActivationSockets::take(run_dir.path()),
        run_dir.path(),
        &key,
        None,
        Arc::clone(&numbers),
        sender,
    )
    .unwrap();
    let socket = run_dir.path().join("containers").join(key.as_str()).join("mount/agent.sock");
    // These peers send nothing. Connections above the limit are closed.
    let connect = || tokio::net::UnixStream::connect(&socket);
    let mut held = Vec::new();
    for _ in 0..listener::MAX_CONNECTIONS {
        held.push(connect().await.unwrap());
    }
    let (mut one_more, mut byte) = (connect().await.unwrap(), [0]);
    let read = tokio::io::AsyncReadExt::read(&mut one_more, &mut byte).await;
    assert!(matches!(read, Ok(0) | Err(_)), "{read:?}");
    held.clear();
    // The controller frees the slots of these connections as soon as it notices that they are
    // closed.
    loop {
        let peer = connect().await.unwrap().into_std().unwrap();
        peer.set_nonblocking(false).unwrap();
        if (&peer).write_all(&[0; FRAME_BYTES]).is_ok()
            && let Ok(Some(AgentMail::Refused { .. })) =
                tokio::time::timeout(Duration::from_secs(3), mail.recv()).await
        {
            return;
        }
    }
}

/// Checks that a container cannot exceed its rate limit by opening many connections.
#[tokio::test(start_paused = true)]
async fn connections_of_a_container_share_one_rate() {
    let budgets = Arc::new(rate_limit::RateLimits::new());
    let (sender, mut mail) = mpsc::channel(64);
    let key = Key::parse(&"0".repeat(32)).unwrap();
    let mut peers = Vec::new();
    for number in 0..40 {
        let (peer, ours) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        send_with(&peer, &hello(WIRE_VERSION), &[page().as_fd()]);
        for _ in 0..100 {
            send_with(&peer, &AgentMessage::Notice { hazards: Hazards(0) }.encode(), &[]);
        }
        let stream = tokio::net::UnixStream::from_std(ours).unwrap();
        let (budgets, sender) = (Arc::clone(&budgets), sender.clone());
        let (key, runtime) = (key.clone(), Handle::current());
        tokio::spawn(connection::serve(stream, key, ProcessId(number), budgets, runtime, sender));
        peers.push(peer);
    }
    let began = tokio::time::Instant::now();
    let (mut messages, mut agents) = (0, Vec::new());
    while messages < 4_000 {
        match mail.recv().await {
            Some(AgentMail::Message(..)) => messages += 1,
            Some(AgentMail::Joined { agent, .. }) => agents.push(agent),
            other => panic!("{other:?}"),
        }
    }
    // A burst of 2000, then 1000 per second. Without the shared limit, each connection could send
    // 200 per second.
    assert!(began.elapsed() >= Duration::from_secs(2), "{:?}", began.elapsed());
}

#[tokio::test]
async fn descriptors_of_every_wrong_kind_are_refused() {
    let (socket, _other) = UnixStream::pair().unwrap();
    let large = rustix::fs::memfd_create("page", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&large, 1 << 40).unwrap();
    let opened = |path: &str| OwnedFd::from(File::open(path).unwrap());
    let other = [socket.into(), large, opened("/"), opened("/dev/zero"), opened("/proc/self/mem")];
    let wrong = other.map(|descriptor| (descriptor, "not a memfd"));
    for (descriptor, expected) in wrong.into_iter().chain([(unsealed_page(), "not sealed")]) {
        let mut bench = bench();
        send_with(&bench.peer, &hello(WIRE_VERSION), &[descriptor.as_fd()]);
        let Some(AgentMail::Refused { why, .. }) = bench.mail.recv().await else {
            panic!("{descriptor:?} was accepted as a counter file")
        };
        assert!(why.contains(expected), "{why}");
    }
}

/// Sends the controller a message with a descriptor that blocks the receiving thread in the kernel.
/// Checks that only the thread of the sending container is blocked, and that another container is
/// still served.
#[tokio::test]
async fn a_blocked_reader_blocks_one_container() {
    let run_dir = tempfile::tempdir().unwrap();
    let (sender, mut mail) = mpsc::channel(8);
    let numbers = Arc::new(std::sync::atomic::AtomicU64::new(1));
    let mut sockets = ActivationSockets::take(run_dir.path());
    let mut open = |digit: &str| {
        let key = Key::parse(&digit.repeat(32)).unwrap();
        let (numbers, sender) = (Arc::clone(&numbers), sender.clone());
        let listener =
            AgentListener::open(&mut sockets, run_dir.path(), &key, None, numbers, sender);
        (listener.unwrap(), run_dir.path().join(AgentListener::socket(&key)))
    };
    let ((_hostile, hostile), (_other, other)) = (open("0"), open("1"));
    let (mut hostiles, mut kept) = (Vec::new(), Vec::new());
    // The message with the descriptor follows a Hello, or comes in its place.
    for joins in [true, false] {
        let mut lingering = LingeringTask::new();
        let peer = UnixStream::connect(&hostile).unwrap();
        let page = page();
        if joins {
            send_with(&peer, &hello(WIRE_VERSION), &[page.as_fd()]);
            kept.push(mail.recv().await);
        }
        send_with(&peer, &[0; FRAME_BYTES], &[lingering.descriptor()]);
        lingering.let_go();
        hostiles.push((peer, lingering));
    }
    while hostiles.iter().all(|(_, lingering)| lingering.is_open()) {
        tokio::task::yield_now().await;
    }
    let (peer, page) = (UnixStream::connect(&other).unwrap(), page());
    send_with(&peer, &hello(WIRE_VERSION), &[page.as_fd()]);
    let theirs = Key::parse(&"1".repeat(32)).unwrap();
    while !matches!(mail.recv().await, Some(AgentMail::Joined { key, .. }) if key == theirs) {}
    let waits = hostiles.iter().any(|(_, lingering)| lingering.is_waited_for());
    assert!(waits, "the second container was served only after the blocked thread went on");
}

/// Sends one packet with `descriptor` through the relay between a process and its copier. Returns
/// what the copier receives.
async fn carried(descriptor: &OwnedFd) -> std::io::Result<affinode_copier::socket::Received> {
    let ((process, theirs), (ours, copier)) = (copier::pair().unwrap(), copier::pair().unwrap());
    affinode_copier::socket::send(&process, &[7; FRAME_BYTES], Some(descriptor)).unwrap();
    tokio::spawn(copier_relay::carry(theirs, ours));
    let copier = crate::sys::watch_readable(copier).unwrap();
    copier
        .async_io(tokio::io::Interest::READABLE, |copier| affinode_copier::socket::receive(copier))
        .await
}

#[tokio::test]
async fn a_copier_receives_memory_and_devices_only() {
    let opened = |path: &str| OwnedFd::from(File::open(path).unwrap());
    for harmless in [page(), opened("/dev/null")] {
        let (frame, descriptor) = carried(&harmless).await.unwrap();
        assert!(frame == [7; FRAME_BYTES] && descriptor.is_some());
    }
    let (reader, _writer) = nix::unistd::pipe().unwrap();
    let (socket, _other) = UnixStream::pair().unwrap();
    for wrong in [reader, socket.into(), opened("/"), opened("/proc/self/stat")] {
        let error = carried(&wrong).await.unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::UnexpectedEof, "{wrong:?}");
    }
}

#[tokio::test]
async fn a_copier_relay_ends_for_both_sides() {
    for copier_ends in [false, true] {
        let ((process, theirs), (ours, copier)) =
            (copier::pair().unwrap(), copier::pair().unwrap());
        affinode_copier::socket::send(&copier, &[9; FRAME_BYTES], None).unwrap();
        tokio::spawn(copier_relay::carry(theirs, ours));
        let process = crate::sys::watch_readable(process).unwrap();
        let receive = |from: &OwnedFd| affinode_copier::socket::receive(from);
        let readable = tokio::io::Interest::READABLE;
        assert_eq!(process.async_io(readable, receive).await.unwrap().0, [9; FRAME_BYTES]);
        let (ended, left) = match copier_ends {
            true => (copier, process),
            false => (process.into_inner(), crate::sys::watch_readable(copier).unwrap()),
        };
        drop(ended);
        let error = left.async_io(readable, receive).await.unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::UnexpectedEof);
    }
}

#[tokio::test]
async fn a_copier_relay_keeps_the_order() {
    const MANY: u8 = 250;
    const TIMES: usize = 20;
    let ((process, theirs), (ours, copier)) = (copier::pair().unwrap(), copier::pair().unwrap());
    tokio::spawn(copier_relay::carry(theirs, ours));
    let sent = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&sent);
    let told = tokio::spawn(async move {
        let copier = crate::sys::watch(copier).unwrap();
        for n in (0..TIMES).flat_map(|_| 0..MANY) {
            let send = |to: &OwnedFd| affinode_copier::socket::send(to, &[n; FRAME_BYTES], None);
            copier.async_io(tokio::io::Interest::WRITABLE, send).await.unwrap();
            count.fetch_add(1, Ordering::SeqCst);
        }
        copier
    });
    // Wait until the copier stops sending because all buffers are full.
    let mut before = usize::MAX;
    while std::mem::replace(&mut before, sent.load(Ordering::SeqCst)) != before {
        for _ in 0..1_000 {
            tokio::task::yield_now().await;
        }
    }
    assert!(!told.is_finished());
    let process = crate::sys::watch_readable(process).unwrap();
    for n in (0..TIMES).flat_map(|_| 0..MANY) {
        let receive = |from: &OwnedFd| affinode_copier::socket::receive(from);
        let (frame, _) = process.async_io(tokio::io::Interest::READABLE, receive).await.unwrap();
        assert_eq!(frame, [n; FRAME_BYTES]);
    }
    told.await.unwrap();
}
