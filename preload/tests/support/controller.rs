//! A fake controller for tests. It sends the orders that the test chooses.

use std::fs::File;
use std::io::{IoSliceMut, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use affinode_proto::wire::counters::{CounterSnapshot, PAGE_BYTES, header};
use affinode_proto::wire::message::{
    Action, AgentMessage, ControllerMessage, FRAME_BYTES, Outcome,
};
use affinode_proto::wire::{Engine, Hazards, Phase};
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg, setsockopt, sockopt};

/// Time limit of every wait, after which a test that hangs fails. It is much longer than any
/// expected wait.
const GUARD: Duration = Duration::from_secs(60);

/// A fake controller: a listening socket in a folder of its own.
pub struct Controller {
    listener: UnixListener,
    folder: tempfile::TempDir,
}

impl Controller {
    pub fn new() -> Controller {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("agent.sock")).unwrap();
        let guard = nix::sys::time::TimeVal::new(GUARD.as_secs() as i64, 0);
        setsockopt(&listener, sockopt::ReceiveTimeout, &guard).unwrap();
        Controller { listener, folder }
    }

    /// The path of the socket.
    pub fn path(&self) -> String {
        let path = self.folder.path().join("agent.sock");
        path.to_str().unwrap().to_owned()
    }

    /// Writes a file into the folder of the socket.
    pub fn write_beside(&self, name: &str, content: &[u8]) {
        std::fs::write(self.folder.path().join(name), content).unwrap();
    }

    /// Accepts the connection of the next agent, but sends no Welcome message.
    pub fn accept(&self) -> Connection {
        let (stream, _) = self.listener.accept().unwrap();
        stream.set_read_timeout(Some(GUARD)).unwrap();
        let mut frame = [0; FRAME_BYTES];
        let mut space = nix::cmsg_space!(i32);
        let page = {
            let mut parts = [IoSliceMut::new(&mut frame)];
            let flags = MsgFlags::empty();
            let message =
                recvmsg::<()>(stream.as_raw_fd(), &mut parts, Some(&mut space), flags).unwrap();
            assert_eq!(message.bytes, FRAME_BYTES);
            let mut fds = message.cmsgs().unwrap().filter_map(|message| match message {
                ControlMessageOwned::ScmRights(fds) => fds.first().copied(),
                _ => None,
            });
            let fd = fds.next().expect("the Hello has no descriptor of the counters");
            #[expect(unsafe_code, reason = "a descriptor comes as a number")]
            // SAFETY: the descriptor was just received and has no other owner.
            let page = unsafe { File::from_raw_fd(fd) };
            page
        };
        let hello = AgentMessage::decode(&frame).unwrap();
        Connection {
            stream,
            page,
            hello,
            wakes: Vec::new(),
            notices: Vec::new(),
            asks: 0,
            next_order: 1,
        }
    }

    /// Accepts the connection of the next agent, and sends it the Welcome message.
    pub fn welcome(&self) -> Connection {
        self.welcome_to_wait(0)
    }

    /// Accepts the connection of the next agent, and sends a Welcome message that makes failed
    /// allocations wait for VRAM.
    pub fn welcome_to_wait(&self, wait_for_room_ms: u32) -> Connection {
        self.welcome_with(wait_for_room_ms, 0)
    }

    /// Accepts the next agent, and sends a Welcome with a limit of VRAM.
    pub fn welcome_to_limit(&self, vram_limit_bytes: u64) -> Connection {
        self.welcome_with(0, vram_limit_bytes)
    }

    fn welcome_with(&self, wait_for_room_ms: u32, vram_limit_bytes: u64) -> Connection {
        let mut connection = self.accept();
        connection.send(ControllerMessage::Welcome {
            process: 1,
            wait_for_room_ms,
            engine: Engine::Checkpoint,
            vram_limit_bytes,
        });
        connection
    }
}

/// The controller's side of a connection to an agent.
pub struct Connection {
    pub stream: UnixStream,
    pub page: File,
    pub hello: AgentMessage,
    /// Wake messages that arrived while the test waited for another message.
    pub wakes: Vec<AgentMessage>,
    /// Notices of hazards that arrived while the test waited for another message.
    pub notices: Vec<Hazards>,
    /// Number of the agent's requests for GPU figures that the test has not consumed yet.
    pub asks: usize,
    next_order: u64,
}

impl Connection {
    pub fn send(&mut self, message: ControllerMessage) {
        self.stream.write_all(&message.encode()).unwrap();
    }

    fn receive(&mut self) -> AgentMessage {
        let mut frame = [0; FRAME_BYTES];
        self.stream.read_exact(&mut frame).unwrap();
        AgentMessage::decode(&frame).unwrap()
    }

    /// Sends an order without waiting for its report.
    pub fn start(&mut self, action: Action) {
        self.start_decided(action, 0);
    }

    /// Sends an order without waiting for its report. The order states that it was decided at
    /// `decided_ms` of the monotonic clock.
    pub fn start_decided(&mut self, action: Action, decided_ms: u64) {
        let order = self.next_order;
        self.next_order += 1;
        self.send(ControllerMessage::Order { order, action, decided_ms });
    }

    /// Waits for the agent's report about the last order that was sent.
    pub fn report(&mut self) -> (Outcome, Phase, u32) {
        loop {
            match self.receive() {
                AgentMessage::Report { order, outcome, phase, cuda_error, .. } => {
                    assert_eq!(order + 1, self.next_order);
                    return (outcome, phase, cuda_error);
                }
                other => self.note(other),
            }
        }
    }

    /// Sends an order and waits for its report.
    pub fn order(&mut self, action: Action) -> (Outcome, Phase, u32) {
        self.start(action);
        self.report()
    }

    /// Sends orders one by one. The agent must report each as done.
    pub fn done(&mut self, actions: &[Action]) {
        for action in actions {
            let (outcome, phase, error) = self.order(*action);
            assert_eq!(outcome, Outcome::Done, "{action:?}: {phase:?}, {error}");
        }
    }

    fn note(&mut self, message: AgentMessage) {
        match message {
            AgentMessage::Wake { .. } => self.wakes.push(message),
            AgentMessage::Notice { hazards } => self.notices.push(hazards),
            AgentMessage::AskReadings => self.asks += 1,
            other => panic!("unexpected {other:?}"),
        }
    }

    /// Waits for a Wake message that the test has not consumed yet. Returns its generation, number
    /// of waiters and hook.
    pub fn wake(&mut self) -> (u64, u32, u32) {
        while self.wakes.is_empty() {
            let message = self.receive();
            self.note(message);
        }
        match self.wakes.remove(0) {
            AgentMessage::Wake { generation, waiters, hook } => (generation, waiters, hook),
            other => panic!("{other:?}"),
        }
    }

    /// Discards the Wake messages that arrived while the test waited for other messages. An agent
    /// repeats its Wake, so such a message can belong to an earlier wait.
    pub fn forget_wakes(&mut self) {
        self.wakes.clear();
    }

    /// Waits until the agent requests GPU figures.
    pub fn ask(&mut self) {
        while self.asks == 0 {
            let message = self.receive();
            self.note(message);
        }
        self.asks = 0;
    }

    /// Whether the agent sends no message within this time.
    pub fn is_silent_for(&mut self, time: Duration) -> bool {
        self.stream.set_read_timeout(Some(time)).unwrap();
        let mut byte = [0; 1];
        let came = self.stream.read(&mut byte);
        self.stream.set_read_timeout(Some(GUARD)).unwrap();
        came.is_err()
    }

    /// Waits for a notice of hazards, and returns the hazards.
    pub fn notice(&mut self) -> Hazards {
        while self.notices.is_empty() {
            let message = self.receive();
            self.note(message);
        }
        self.notices.remove(0)
    }

    /// Waits for the message that an allocation begins or ends its wait for VRAM.
    pub fn want(&mut self) -> AgentMessage {
        loop {
            match self.receive() {
                message @ (AgentMessage::AllocWait { .. } | AgentMessage::AllocWaitDone { .. }) => {
                    return message;
                }
                other => self.note(other),
            }
        }
    }

    /// Waits for a message about an allowance under a VRAM limit.
    pub fn vram(&mut self) -> AgentMessage {
        loop {
            match self.receive() {
                message @ (AgentMessage::AskVram { .. } | AgentMessage::VramTaken) => {
                    return message;
                }
                other => self.note(other),
            }
        }
    }

    /// Recalls the allowances of the process.
    pub fn recall_vram(&self, epoch: u64) {
        self.page.write_all_at(&epoch.to_ne_bytes(), header::VRAM_EPOCH as u64).unwrap();
    }

    /// Bytes of the process's allocations that are pending under its limit.
    pub fn pending_vram(&self) -> u64 {
        let mut bytes = [0; 8];
        self.page.read_exact_at(&mut bytes, header::VRAM_PENDING as u64).unwrap();
        u64::from_ne_bytes(bytes)
    }

    /// Waits for the other side to end the connection.
    pub fn ended(mut self) {
        let mut frame = [0; FRAME_BYTES];
        while self.stream.read(&mut frame).unwrap_or(0) > 0 {}
    }

    /// Waits until the agent ends the connection. Returns the number of Wake messages that came
    /// before.
    pub fn wakes_until_end(mut self) -> usize {
        let mut frame = [0; FRAME_BYTES];
        while self.stream.read_exact(&mut frame).is_ok() {
            self.note(AgentMessage::decode(&frame).unwrap());
        }
        self.wakes.len()
    }

    /// Reads the process's shared counters as they are now.
    pub fn page(&self) -> CounterSnapshot {
        let mut bytes = vec![0; PAGE_BYTES];
        self.page.read_exact_at(&mut bytes, 0).unwrap();
        CounterSnapshot::decode(&bytes).unwrap()
    }
}

pub const CLOSE: Action = Action::Close { deadline_ms: 30_000 };
pub const LOCK: Action = Action::Lock { timeout_ms: 1_000 };
pub const CHECKPOINT: Action = Action::Checkpoint { vram_bytes: 4096 };
pub const OFFLOAD: [Action; 3] = [CLOSE, LOCK, CHECKPOINT];
pub const BRING_BACK: [Action; 3] = [Action::Restore, Action::Unlock, Action::Open];
