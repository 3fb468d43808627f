//! The agent's connection to the controller.

use core::ffi::{CStr, c_char, c_void};

use affinode_proto::paths::{AGENT_SOCKET_ENV, CONTAINER_AGENT_SOCKET};
use affinode_proto::wire::message::{AgentMessage, ControllerMessage, FRAME_BYTES};

use crate::fds::{self, TrackedFd};
use crate::{libc, sys};

const FIRST_BACKOFF_MS: u64 = 100;
const MAX_BACKOFF_MS: u64 = 5_000;
/// Maximum time in microseconds between the agent's Hello and the controller's Welcome.
const WELCOME_WITHIN_US: u64 = 5_000_000;

/// Value of the environment variable that names a socket other than the default one. Null: the
/// variable is not set or is ignored. Must be called on the application's thread, because the
/// application may change its environment later.
pub fn named_socket() -> *mut c_void {
    // The caller of a setuid program controls the program's environment, so it is ignored.
    let value = libc::environment(AGENT_SOCKET_ENV.as_bytes()).filter(|_| !libc::is_secure());
    value.map_or(core::ptr::null_mut(), |v| v.as_ptr().cast_mut().cast())
}

/// Returns the path of the socket to which the agent connects. `named` is the result of
/// [`named_socket`].
fn socket_path<'a>(named: *const c_void) -> &'a [u8] {
    if named.is_null() {
        CONTAINER_AGENT_SOCKET.as_bytes()
    } else {
        // SAFETY: a string of the environment, which libc never frees.
        unsafe { CStr::from_ptr(named.cast::<c_char>()) }.to_bytes()
    }
}

/// Returns the path of a file in the folder of the socket. `named` is the result of
/// [`named_socket`]. `None`: the path is too long.
pub fn file_beside<'a>(
    named: *const c_void,
    name: &str,
    buffer: &'a mut [u8; PATH_BYTES],
) -> Option<&'a CStr> {
    let socket = socket_path(named);
    let slash = socket.iter().rposition(|byte| *byte == b'/')?;
    let path = socket.iter().take(slash + 1).chain(name.as_bytes()).chain(&[0]);
    *buffer = [0; PATH_BYTES];
    for (to, from) in buffer.iter_mut().zip(path) {
        *to = *from;
    }
    // If the path is too long, it has no terminating zero, and this returns `None`.
    CStr::from_bytes_until_nul(buffer).ok()
}

/// Maximum length of a socket's path, with its terminating zero.
pub const PATH_BYTES: usize = 108;

/// The agent's connection to the controller, or the wait for the next attempt to connect.
pub struct ControllerConnection {
    path: [u8; PATH_BYTES],
    path_bytes: usize,
    tid: u32,
    page_file: TrackedFd,
    socket: Option<TrackedFd>,
    /// A socket for the next connection, which keeps its descriptor while there is no connection. A
    /// program at its limit of descriptors would otherwise take it, and no connection would be
    /// possible.
    spare: Option<TrackedFd>,
    welcomed: bool,
    /// A time in microseconds. While connected, it is the time by which the Welcome must arrive.
    /// Otherwise it is the time of the next attempt to connect.
    due_us: u64,
    backoff_ms: u64,
    frame: [u8; FRAME_BYTES],
    received: usize,
    /// Descriptor that arrived with the frame that is being received.
    descriptor: Option<sys::Descriptor>,
}

/// Creates a socket that is not connected yet.
fn new_socket() -> Option<TrackedFd> {
    let fd = sys::stream_socket().ok()?;
    let socket = TrackedFd::note(fd)?;
    fds::SPARE.set(socket);
    Some(socket)
}

/// Result of an attempt to receive a message from the controller.
pub enum ReceivedMessage {
    /// No complete message has arrived.
    Nothing,
    /// A message, and the descriptor that arrived with it.
    Message(ControllerMessage, Option<sys::Descriptor>),
    /// The connection has ended, or was dropped because of an invalid message.
    Lost,
}

impl ControllerConnection {
    /// Creates a connection that has not tried to connect yet. `named` is the result of
    /// [`named_socket`].
    pub fn new(named: *const c_void, tid: u32, page_file: TrackedFd) -> ControllerConnection {
        fds::PAGE.set(page_file);
        let path = socket_path(named);
        let mut link = ControllerConnection {
            path: [0; PATH_BYTES],
            path_bytes: path.len(),
            tid,
            page_file,
            socket: None,
            spare: None,
            welcomed: false,
            due_us: 0,
            backoff_ms: FIRST_BACKOFF_MS,
            frame: [0; FRAME_BYTES],
            received: 0,
            descriptor: None,
        };
        for (to, from) in link.path.iter_mut().zip(path) {
            *to = *from;
        }
        link
    }

    /// Whether the controller manages the process, which it confirms by its Welcome.
    pub fn is_welcomed(&self) -> bool {
        self.welcomed
    }

    /// Whether there is no connection, because the last attempt failed or the connection has ended.
    pub fn is_alone(&self) -> bool {
        self.socket.is_none()
    }

    /// Records that the Welcome has arrived.
    pub fn set_welcomed(&mut self) {
        self.welcomed = true;
        self.backoff_ms = FIRST_BACKOFF_MS;
    }

    /// Without a connection: connects and sends the Hello, if the time of the next attempt has
    /// come. With a connection: closes it if the Welcome does not arrive in time, or if the
    /// application has closed the socket's descriptor.
    pub fn keep(&mut self, now_us: u64, hello: impl FnOnce() -> AgentMessage) {
        if let Some(socket) = self.socket {
            let overdue = !self.welcomed && now_us >= self.due_us;
            if overdue || socket.get().is_none() {
                self.lose(now_us);
            }
        } else if now_us >= self.due_us && !self.connect(now_us, hello) {
            self.lose(now_us);
        }
    }

    fn connect(&mut self, now_us: u64, hello: impl FnOnce() -> AgentMessage) -> bool {
        let Some(path) = self.path.get(..self.path_bytes) else {
            return false;
        };
        let spare = self.spare.filter(|spare| spare.get().is_some());
        self.spare = spare.or_else(new_socket);
        let Some((socket, fd)) = self.spare.and_then(|spare| Some((spare, spare.get()?))) else {
            return false;
        };
        if sys::connect(fd, path).is_err() {
            return false;
        }
        self.spare = None;
        self.socket = Some(socket);
        fds::SOCKET.set(socket);
        (self.received, self.descriptor) = (0, None);
        self.due_us = now_us + WELCOME_WITHIN_US;
        if sys::notify(fd, self.tid, sys::SIGURG).is_err() {
            return false;
        }
        let Some(page_fd) = self.page_file.get() else {
            return false;
        };
        sys::send(fd, &hello().encode(), Some(page_fd)) == Ok(FRAME_BYTES)
    }

    /// Closes the connection. The next attempt to connect follows after a pause that doubles each
    /// time, up to 5 s.
    pub fn lose(&mut self, now_us: u64) {
        if let Some(socket) = self.socket.take() {
            socket.close();
        }
        // At once, before the program takes the descriptor.
        self.spare = self.spare.or_else(new_socket);
        self.welcomed = false;
        self.due_us = now_us + self.backoff_ms * 1_000;
        self.backoff_ms = (2 * self.backoff_ms).min(MAX_BACKOFF_MS);
    }

    /// Time until [`Self::keep`] must be called again, in milliseconds.
    pub fn patience_ms(&self, now_us: u64) -> u64 {
        if self.welcomed {
            MAX_BACKOFF_MS
        } else {
            self.due_us.saturating_sub(now_us).div_ceil(1_000)
        }
    }

    /// Sends a message. If the socket does not accept the whole message, the connection ends.
    pub fn send(&mut self, now_us: u64, message: &AgentMessage) {
        let fd = self.socket.and_then(|socket| socket.get());
        let sent = fd.is_some_and(|fd| sys::send(fd, &message.encode(), None) == Ok(FRAME_BYTES));
        if !sent {
            self.lose(now_us);
        }
    }

    /// Receives the next message of the controller if it has arrived. Does not wait.
    pub fn receive(&mut self, now_us: u64) -> ReceivedMessage {
        let Some(socket) = self.socket else {
            return ReceivedMessage::Nothing;
        };
        while self.received < FRAME_BYTES {
            let (Some(fd), Some(rest)) = (socket.get(), self.frame.get_mut(self.received..)) else {
                self.lose(now_us);
                return ReceivedMessage::Lost;
            };
            match sys::receive(fd, rest) {
                Ok((bytes, descriptor)) if bytes > 0 => {
                    self.received += bytes;
                    self.descriptor = descriptor.or(self.descriptor.take());
                }
                Err(sys::EAGAIN | sys::EINTR) => return ReceivedMessage::Nothing,
                _ => {
                    self.lose(now_us);
                    return ReceivedMessage::Lost;
                }
            }
        }
        self.received = 0;
        let descriptor = self.descriptor.take();
        if let Ok(message) = ControllerMessage::decode(&self.frame) {
            ReceivedMessage::Message(message, descriptor)
        } else {
            self.lose(now_us);
            ReceivedMessage::Lost
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_engines_word_lies_beside_the_socket() {
        let mut buffer = [1; PATH_BYTES];
        let mut beside = |socket: Option<&CStr>| {
            let named = socket.map_or(core::ptr::null(), |socket| socket.as_ptr().cast());
            file_beside(named, "engine", &mut buffer).map(CStr::to_owned)
        };
        assert_eq!(beside(None).as_deref(), Some(c"/.affinode/run/engine"));
        assert_eq!(beside(Some(c"/run/x/agent.sock")).as_deref(), Some(c"/run/x/engine"));
        assert_eq!(beside(Some(c"agent.sock")), None);
        for (folder_bytes, fits) in [(PATH_BYTES - 9, true), (PATH_BYTES - 8, false)] {
            let socket = format!("/{}/s", "x".repeat(folder_bytes));
            let socket = std::ffi::CString::new(socket).unwrap();
            assert_eq!(beside(Some(&socket)).is_some(), fits);
        }
    }
}
