//! A thread with a runtime of its own for what strangers can hold up.
//!
//! Who reads from a Unix socket, or closes one, may have to let go of descriptors that are still in
//! it, and the kernel does not return before it has: of a TCP socket that lingers not before its
//! peer has everything, of a file of a file system in user space not before that answers. A pipe is
//! read under a lock that a writer holds while the memory that it writes from is brought in. None of
//! it has a deadline, so it happens where nobody but the same strangers waits.

use std::{future::Future, io, thread};

use tokio::{
    runtime::{Builder, Handle},
    sync::oneshot,
};

/// The thread. It ends, with all that runs there, when this is dropped; nobody waits for that.
#[derive(Debug)]
pub struct IsolatedRuntime {
    runtime: Handle,
    _end: oneshot::Sender<()>,
}

impl IsolatedRuntime {
    /// Begins a thread of this name.
    ///
    /// # Errors
    /// There is no more of something.
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

    /// Runs something there.
    pub fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.runtime.spawn(work);
    }

    /// Its runtime, for what is made elsewhere and used there.
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

    /// A connection of which the last descriptor is let go of after a minute: its peer does not read.
    pub struct LingeringTask {
        /// The first that is dropped: nobody waits any more then.
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

        /// Lets go of the own descriptor; whoever has the last one waits.
        pub fn let_go(&mut self) {
            let stream = self.stream.take();
            std::thread::spawn(move || drop(stream));
        }

        /// Whether nobody has let go of the last descriptor yet.
        pub fn is_open(&self) -> bool {
            /// `TCP_ESTABLISHED`, in hex.
            const OPEN: &str = "01";
            self.state().is_some_and(|state| state == OPEN)
        }

        /// Whether somebody waits for its end.
        pub fn is_waited_for(&self) -> bool {
            /// `TCP_FIN_WAIT1`, in hex.
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
