//! One blocking ttrpc call at a time, each bounded in time: to a stock shim, and
//! to the controller. The short commands need no more, and the daemon makes its
//! few calls from a thread that ends again; a full client would stay in memory
//! in every pod.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use affinode_proto::api::control::{
    AnnounceRequest, AnnounceResponse, Announcement, WithdrawRequest, WithdrawResponse,
};
use containerd_shim_protos::api::{ConnectRequest, ConnectResponse, ShutdownRequest};
use containerd_shim_protos::protobuf::{Message, MessageField};
use ttrpc::proto::{Code, Request, Response};

use crate::frame::{FrameError, FrameHeader, HEADER_BYTES, REQUEST, RESPONSE};

/// How long a peer may take to answer.
const TIMEOUT: Duration = Duration::from_secs(2);
const CONTROL_SERVICE: &str = "affinode.control.v1.Control";

/// A connection to a ttrpc service.
#[derive(Debug)]
pub struct RpcCaller {
    stream: UnixStream,
    service: &'static str,
    next_stream: u32,
}

/// A call failed.
#[derive(Debug, thiserror::Error)]
pub enum RpcError {
    /// The socket could not be reached, broke, or was silent for too long.
    #[error("no answer from the controller or the stock shim")]
    Io(#[from] io::Error),
    /// What came is not ttrpc.
    #[error("what answers does not speak ttrpc")]
    Frame(#[from] FrameError),
    /// What came is not the message that was asked for.
    #[error("the answer cannot be decoded")]
    Decode(#[from] protobuf::Error),
    /// The peer refused.
    #[error("{method} was refused: {message}")]
    Refused {
        /// The call.
        method: &'static str,
        /// Its words.
        message: String,
    },
}

impl RpcCaller {
    /// Connects to a stock shim. `task_version` is what it named in its answer.
    pub fn stock(path: &Path, task_version: i64) -> Result<RpcCaller, RpcError> {
        let service =
            if task_version >= 3 { "containerd.task.v3.Task" } else { "containerd.task.v2.Task" };
        RpcCaller::connect(path, service)
    }

    /// Connects to the controller.
    pub fn control(path: &Path) -> Result<RpcCaller, RpcError> {
        RpcCaller::connect(path, CONTROL_SERVICE)
    }

    fn connect(path: &Path, service: &'static str) -> Result<RpcCaller, RpcError> {
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        Ok(RpcCaller { stream, service, next_stream: 1 })
    }

    /// Tells the controller of a container. Returns what it did not understand of
    /// the annotations.
    pub fn announce(&mut self, container: Announcement) -> Result<Vec<String>, RpcError> {
        let mut request = AnnounceRequest::new();
        request.container = MessageField::some(container);
        let response: AnnounceResponse = self.call("Announce", &request)?;
        Ok(response.warnings)
    }

    /// Tells the controller that a container is gone.
    pub fn withdraw(&mut self, key: &str, generation: u64) -> Result<(), RpcError> {
        let mut request = WithdrawRequest::new();
        request.key = key.to_owned();
        request.generation = generation;
        self.call("Withdraw", &request).map(|_: WithdrawResponse| ())
    }

    /// The stock shim's pid.
    pub fn shim_pid(&mut self, id: &str) -> Result<i32, RpcError> {
        let mut request = ConnectRequest::new();
        request.id = id.to_owned();
        let response: ConnectResponse = self.call("Connect", &request)?;
        i32::try_from(response.shim_pid).ok().filter(|pid| *pid > 0).ok_or(RpcError::Refused {
            method: "Connect",
            message: format!("it names pid {}", response.shim_pid),
        })
    }

    /// Asks a stock shim without containers to end.
    pub fn shut_down(&mut self, id: &str) -> Result<(), RpcError> {
        let mut request = ShutdownRequest::new();
        request.id = id.to_owned();
        request.now = true;
        self.call("Shutdown", &request).map(|_: containerd_shim_protos::types::empty::Empty| ())
    }

    /// The connection itself, for those who keep it.
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
