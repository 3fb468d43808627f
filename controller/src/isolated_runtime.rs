//! Runs an async runtime on a thread of its own, for operations that a container can block.
//!
//! Reading from a Unix socket, or closing it, may close descriptors that are in transit in it. The
//! kernel returns only when these descriptors are closed. Closing a lingering TCP socket waits
//! until its peer has received everything. Closing a file of a file system in user space waits for
//! a response of that file system. A pipe is read under a lock, which a writer holds while the
//! kernel pages in the writer's memory. None of these waits has a timeout, so they happen on a
//! thread that serves only the container that causes them.

use std::{future::Future, io, thread};

use tokio::{
    runtime::{Builder, Handle},
    sync::oneshot,
};

/// An async runtime on a thread that one container may block. Dropping this value ends the thread
/// and all its tasks, but does not wait for their end.
#[derive(Debug)]
pub struct IsolatedRuntime {
    runtime: Handle,
    _end: oneshot::Sender<()>,
}

impl IsolatedRuntime {
    /// Starts a thread with this name and an async runtime.
    ///
    /// # Errors
    /// No thread or descriptor is available.
    pub fn begin(name: &str) -> io::Result<IsolatedRuntime> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let (end, ended) = oneshot::channel::<()>();
        let handle = runtime.handle().clone();
        let live = move || {
            let _ = runtime.block_on(ended);
        };
        thread::Builder::new().name(name.into()).spawn(live)?;
        Ok(IsolatedRuntime { runtime: handle, _end: end })
    }

    /// Starts a task on the runtime's thread.
    pub fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.runtime.spawn(work);
    }

    /// Returns the handle of the async runtime on the thread. Sockets and other objects that tasks
    /// on the thread use must be registered with this runtime.
    #[must_use]
    pub fn runtime(&self) -> &Handle {
        &self.runtime
    }
}

#[cfg(test)]
pub mod tests {
    use std::{
        fs,
        io::Write,
        net::{TcpListener, TcpStream},
        os::fd::{AsFd, BorrowedFd},
        time::Duration,
    };

    /// A TCP connection whose last descriptor takes a minute to close, because its peer does not
    /// read.
    pub struct LingeringTask {
        /// The peer's end of the connection. This field is dropped before `stream`, which ends the
        /// connection. The close of `stream` then does not wait.
        _peer: TcpStream,
        stream: Option<TcpStream>,
        port: u16,
    }

    impl LingeringTask {
        pub fn new() -> LingeringTask {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (peer, _) = listener.accept().unwrap();
            stream.set_nonblocking(true).unwrap();
            while stream.write(&[0; 64 << 10]).is_ok() {}
            stream.set_nonblocking(false).unwrap();
            let long = Some(Duration::from_secs(60));
            rustix::net::sockopt::set_socket_linger(&stream, long).unwrap();
            let port = stream.local_addr().unwrap().port();
            LingeringTask { stream: Some(stream), port, _peer: peer }
        }

        pub fn descriptor(&self) -> BorrowedFd<'_> {
            self.stream.as_ref().unwrap().as_fd()
        }

        /// Closes this value's descriptor of the connection, on another thread. If the code under
        /// test holds the last other descriptor, its close of that descriptor waits for the peer.
        pub fn let_go(&mut self) {
            let stream = self.stream.take();
            std::thread::spawn(move || drop(stream));
        }

        /// Returns whether the last descriptor of the connection is still open.
        pub fn is_open(&self) -> bool {
            /// State `TCP_ESTABLISHED` in /proc/net/tcp, in hex.
            const OPEN: &str = "01";
            self.state().is_some_and(|state| state == OPEN)
        }

        /// Returns whether the last descriptor is being closed, so that a thread waits for the
        /// peer.
        pub fn is_waited_for(&self) -> bool {
            /// State `TCP_FIN_WAIT1` in /proc/net/tcp, in hex.
            const CLOSING: &str = "04";
            self.state().is_some_and(|state| state == CLOSING)
        }

        fn state(&self) -> Option<String> {
            let table = fs::read_to_string("/proc/self/net/tcp").unwrap();
            let own = format!(":{:04X}", self.port);
            table.lines().find_map(|line| {
                let mut fields = line.split_whitespace().skip(1);
                let is_own = fields.next().is_some_and(|local| local.ends_with(&own));
                is_own.then(|| fields.nth(1).map(str::to_owned)).flatten()
            })
        }
    }
}
