//! Tests of the host pool over sockets, most of them without its process and its cgroup. They
//! create file systems, so they need root.

mod disk;
mod hostile;
mod memory;
mod process;

use std::{
    os::fd::OwnedFd,
    sync::Arc,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use affinode_proto::wire::{
    host_pool::{FromHostPool, HostPoolOrder, MAX_PENDING, ToHostPool},
    message::FRAME_BYTES,
};
use rustix::{
    fs::FallocateFlags,
    net::{AddressFamily, SocketFlags, SocketType, sockopt},
};

use crate::{HostPoolError, disk_folder::DiskFolder, pool::Pool, serve, socket, sys::Mapping};

const MIB: u64 = 1 << 20;

/// Time after which a test that still waits has failed.
const TOO_LONG: Duration = Duration::from_secs(60);

struct TestPool {
    controller: OwnedFd,
    pool: Arc<Pool>,
    server: JoinHandle<Result<(), HostPoolError>>,
}

struct Agent {
    socket: OwnedFd,
    file: OwnedFd,
}

fn pair() -> (OwnedFd, OwnedFd) {
    let flags = SocketFlags::CLOEXEC;
    let (ours, theirs) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    sockopt::set_socket_timeout(&ours, sockopt::Timeout::Recv, Some(TOO_LONG)).unwrap();
    (ours, theirs)
}

impl TestPool {
    /// Starts a host pool that refuses requests without room at once.
    fn strict() -> TestPool {
        TestPool::start(Duration::ZERO)
    }

    fn start(late_allow: Duration) -> TestPool {
        TestPool::start_with(late_allow, None)
    }

    fn start_with(late_allow: Duration, disk: Option<DiskFolder>) -> TestPool {
        let (controller, theirs) = pair();
        let pool = Pool::start(late_allow, disk).unwrap();
        let own = Arc::clone(&pool);
        let server = std::thread::spawn(move || serve::run(theirs, &own));
        TestPool { controller, pool, server }
    }

    fn order(&self, order: HostPoolOrder, along: Option<&OwnedFd>) {
        socket::send(&self.controller, &order.encode(), along).unwrap();
    }

    /// Attaches the only process of a container.
    fn attach(&self, process: u64) -> Agent {
        self.attach_to(process, process)
    }

    fn attach_to(&self, container: u64, process: u64) -> Agent {
        let (socket, theirs) = pair();
        self.order(HostPoolOrder::Attach { process, container }, Some(&theirs));
        drop(theirs);
        let (frame, file) = socket::receive_with_descriptor(&socket).unwrap().unwrap();
        assert_eq!(FromHostPool::decode(&frame), Ok(FromHostPool::File));
        Agent { socket, file: file.unwrap() }
    }

    fn allow(&self, process: u64, bytes: u64) {
        self.allow_with(process, bytes, 0);
    }

    fn allow_with(&self, process: u64, bytes: u64, kept_bytes: u64) {
        self.order(HostPoolOrder::Allow { process, bytes, kept_bytes }, None);
    }

    /// Same as [`TestPool::allow_with`], but waits as [`TestPool::allow_now`] does.
    fn allow_with_now(&self, process: u64, bytes: u64, kept_bytes: u64) {
        self.allow_with(process, bytes, kept_bytes);
        drop(self.attach(u64::MAX));
    }

    /// Sends an `Allow` and waits until it has taken effect: the host pool carries out its orders
    /// one after another, and the last of these orders has a visible effect.
    fn allow_now(&self, process: u64, bytes: u64) {
        self.allow(process, bytes);
        drop(self.attach(u64::MAX));
    }

    fn end(self) -> Result<(), HostPoolError> {
        drop(self.controller);
        self.server.join().unwrap()
    }
}

impl Agent {
    fn ask(&self, offset: u64, bytes: u64) {
        let request = ToHostPool::Populate { offset, bytes, processor: 0 };
        socket::send(&self.socket, &request.encode(), None::<OwnedFd>).unwrap();
    }

    fn reply(&self) -> (u64, bool) {
        let frame = socket::receive(&self.socket).unwrap().expect("the connection has ended");
        match FromHostPool::decode(&frame) {
            Ok(FromHostPool::Populated { offset, done }) => (offset, done),
            other => panic!("{other:?}"),
        }
    }

    fn populate(&self, offset: u64, bytes: u64) -> bool {
        self.ask(offset, bytes);
        let (replied, done) = self.reply();
        assert_eq!(replied, offset);
        done
    }

    fn free(&self, offset: u64, bytes: u64) {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&self.file, flags, offset, bytes).unwrap();
    }

    fn allocated_bytes(&self) -> u64 {
        rustix::fs::fstat(&self.file).unwrap().st_blocks as u64 * 512
    }

    /// Waits for the end of the connection.
    fn expect_end(&self) {
        match socket::receive(&self.socket) {
            Ok(None) => {}
            // The host pool had not read all packets.
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {}
            other => panic!("{other:?}"),
        }
    }
}
