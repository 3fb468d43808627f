//! Makes blocking ttrpc calls to a stock shim and to the controller, one at a time, each with a
//! time limit. This is enough for the short commands. The daemon makes its few calls on a temporary
//! thread, because an asynchronous client would take more memory in the shim of every pod.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use affinode_proto::api::control::{
    AnnounceRequest, AnnounceResponse, Announcement, WithdrawRequest, WithdrawResponse,
};
use containerd_shim_protos::api::{ConnectRequest, ConnectResponse, ShutdownRequest};
use containerd_shim_protos::protobuf::{Message, MessageField};
use ttrpc::proto::{Code, Request, Response};

use crate::frame::{FrameError, FrameHeader, HEADER_BYTES, REQUEST, RESPONSE};

/// Time limit for a peer's reply.
const TIMEOUT: Duration = Duration::from_secs(2);
const CONTROL_SERVICE: &str = "affinode.control.v1.Control";

/// A connection to a ttrpc service.
#[derive(Debug)]
pub struct RpcCaller {
    stream: UnixStream,
    service: &'static str,
    next_stream: u32,
}

/// Reason why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum RpcError {
    /// The connection could not be made, it broke, or the peer did not reply in time.
    #[error("the connection failed, ended, or got no reply in time (at most {TIMEOUT:?})")]
    Io(#[from] io::Error),
    /// The reply is not a ttrpc frame.
    #[error("the reply is not a ttrpc frame")]
    Frame(#[from] FrameError),
    /// The reply does not decode as the expected message.
    #[error("the reply cannot be decoded")]
    Decode(#[from] protobuf::Error),
    /// The peer returned an error.
    #[error("{method} failed: {message}")]
    Refused {
        /// Name of the ttrpc method.
        method: &'static str,
        /// Message of the peer's error.
        message: String,
    },
}

impl RpcCaller {
    /// Connects to a stock shim. `task_version` is the version of the task service, from the reply
    /// to the stock shim's `start`.
    pub fn stock(path: &Path, task_version: i64) -> Result<RpcCaller, RpcError> {
        let service =
            if task_version >= 3 { "containerd.task.v3.Task" } else { "containerd.task.v2.Task" };
        RpcCaller::connect(path, service, TIMEOUT)
    }

    /// Connects to the controller.
    pub fn control(path: &Path) -> Result<RpcCaller, RpcError> {
        RpcCaller::connect(path, CONTROL_SERVICE, TIMEOUT)
    }

    /// Connects to the controller for calls that must end before `deadline`. Does not connect if
    /// the deadline has passed.
    pub fn control_until(path: &Path, deadline: Instant) -> Result<RpcCaller, RpcError> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::Error::from(io::ErrorKind::TimedOut).into());
        }
        RpcCaller::connect(path, CONTROL_SERVICE, left.min(TIMEOUT))
    }

    fn connect(
        path: &Path,
        service: &'static str,
        timeout: Duration,
    ) -> Result<RpcCaller, RpcError> {
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(timeout))?;
        stream.set_write_timeout(Some(timeout))?;
        Ok(RpcCaller { stream, service, next_stream: 1 })
    }

    /// Announces a container to the controller. Returns the controller's warnings about invalid
    /// annotations.
    pub fn announce(&mut self, container: Announcement) -> Result<Vec<String>, RpcError> {
        let mut request = AnnounceRequest::new();
        request.container = MessageField::some(container);
        let response: AnnounceResponse = self.call("Announce", &request)?;
        Ok(response.warnings)
    }

    /// Withdraws a container from the controller.
    pub fn withdraw(&mut self, key: &str, generation: u64) -> Result<(), RpcError> {
        let mut request = WithdrawRequest::new();
        request.key = key.to_owned();
        request.generation = generation;
        self.call("Withdraw", &request).map(|_: WithdrawResponse| ())
    }

    /// Requests the stock shim's pid.
    pub fn shim_pid(&mut self, id: &str) -> Result<i32, RpcError> {
        let mut request = ConnectRequest::new();
        request.id = id.to_owned();
        let response: ConnectResponse = self.call("Connect", &request)?;
        i32::try_from(response.shim_pid).ok().filter(|pid| *pid > 0).ok_or(RpcError::Refused {
            method: "Connect",
            message: format!("the reply contains the invalid pid {}", response.shim_pid),
        })
    }

    /// Requests the exit of a stock shim that has no containers.
    pub fn shut_down(&mut self, id: &str) -> Result<(), RpcError> {
        let mut request = ShutdownRequest::new();
        request.id = id.to_owned();
        request.now = true;
        self.call("Shutdown", &request).map(|_: containerd_shim_protos::types::empty::Empty| ())
    }

    /// Returns the underlying connection, so that the caller can keep it open.
    #[must_use]
    pub fn into_stream(self) -> UnixStream {
        self.stream
    }

    fn call<A: Message>(
        &mut self,
        method: &'static str,
        request: &impl Message,
    ) -> Result<A, RpcError> {
        let mut envelope = Request::new();
        envelope.service = self.service.to_owned();
        envelope.method = method.to_owned();
        envelope.payload = request.write_to_bytes()?;
        let header =
            FrameHeader { payload_bytes: 0, stream: self.next_stream, kind: REQUEST, flags: 0 };
        self.next_stream += 2;
        let frame = header
            .with_payload(&envelope.write_to_bytes()?)
            .ok_or(FrameError::TooLong { payload_bytes: u32::MAX })?;
        self.stream.write_all(&frame)?;
        loop {
            let mut bytes = [0; HEADER_BYTES];
            self.stream.read_exact(&mut bytes)?;
            let answer = FrameHeader::decode(bytes)?;
            let mut payload = vec![0; answer.payload_bytes as usize];
            self.stream.read_exact(&mut payload)?;
            if answer.stream != header.stream || answer.kind != RESPONSE {
                continue;
            }
            let response = Response::parse_from_bytes(&payload)?;
            let status = response.status.unwrap_or_default();
            if status.code() != Code::OK {
                return Err(RpcError::Refused { method, message: status.message });
            }
            return Ok(A::parse_from_bytes(&response.payload)?);
        }
    }
}
