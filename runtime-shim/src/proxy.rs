//! Serves one client's connection, and forwards its frames on a separate connection to the stock
//! shim.
//!
//! ```text
//! client ── requests ──> match service and method ──> stock shim
//!                          Create: spec edited, options translated
//!                          Delete: stream id recorded
//! client <── responses ── unchanged; Create's and Delete's are decoded ── stock shim
//! ```
//!
//! Frames keep their bytes, stream ids and order. No frame waits for a reply, so a Wait may stay
//! open for a container's life. A frame that cannot be decoded is forwarded unchanged, and the
//! stock shim answers it.

use std::cell::RefCell;
use std::collections::HashMap;
use std::future::Future;

use containerd_shim_protos::api::{CreateTaskRequest, DeleteRequest};
use containerd_shim_protos::protobuf::{Message, MessageField, well_known_types::any::Any};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use ttrpc::proto::{Code, Request, Response};

use crate::frame::{FrameError, FrameHeader, HEADER_BYTES, REQUEST, RESPONSE, read_header};

/// Size of the chunks in which the proxy copies the frames that it does not decode.
const CHUNK_BYTES: usize = 8 << 10;
/// Size of the read-ahead buffer of a connection.
const AHEAD_BYTES: usize = 2 << 10;

/// Callbacks for the RPC calls on a connection that concern containers.
pub trait TaskService {
    /// Handles a Create request. The proxy forwards the request after this function returns. The
    /// returned options replace those of the request.
    fn create(&self, request: &CreateTaskRequest) -> impl Future<Output = Option<Any>>;
    /// Handles the stock shim's reply to a Create. `done` is true if the reply reports success.
    fn created(&self, id: &str, done: bool);
    /// Handles the deletion of a container by the stock shim.
    fn deleted(&self, id: &str);
}

/// A reply of the stock shim that the proxy will decode.
#[derive(Debug)]
enum PendingReply {
    Create(String),
    Delete(String),
}

type Watched = RefCell<HashMap<u32, PendingReply>>;

/// Proxies one connection: copies frames in both directions until one side ends. `first` is the
/// header that was already read from the client.
pub async fn run(
    first: [u8; HEADER_BYTES],
    client: (impl AsyncRead + Unpin, impl AsyncWrite + Unpin),
    stock: (impl AsyncRead + Unpin, impl AsyncWrite + Unpin),
    tasks: &impl TaskService,
) -> Result<(), FrameError> {
    let watched = Watched::default();
    // If either side ends, both directions end. Everything that the stock shim sent before its end
    // has been forwarded by then.
    tokio::select! {
        result = requests(first, client.0, stock.1, tasks, &watched) => result,
        result = responses(stock.0, client.1, tasks, &watched) => result,
    }
}

async fn requests(
    first: [u8; HEADER_BYTES],
    from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    tasks: &impl TaskService,
    watched: &Watched,
) -> Result<(), FrameError> {
    let mut from = BufReader::with_capacity(AHEAD_BYTES, from);
    let mut next = Some(first);
    while let Some(bytes) = next {
        let header = FrameHeader::decode(bytes)?;
        if header.kind == REQUEST {
            let payload = read_payload(&mut from, &header).await?;
            let frame = match inspect(&header, &payload, tasks, watched).await {
                Some(frame) => frame,
                None => [&bytes[..], &payload].concat(),
            };
            to.write_all(&frame).await?;
        } else {
            copy(&bytes, &header, &mut from, &mut to).await?;
        }
        next = read_header(&mut from).await?;
    }
    Ok(())
}

async fn responses(
    from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    tasks: &impl TaskService,
    watched: &Watched,
) -> Result<(), FrameError> {
    let mut from = BufReader::with_capacity(AHEAD_BYTES, from);
    while let Some(bytes) = read_header(&mut from).await? {
        let header = FrameHeader::decode(bytes)?;
        let awaited = (header.kind == RESPONSE)
            .then(|| watched.borrow_mut().remove(&header.stream))
            .flatten();
        let Some(awaited) = awaited else {
            copy(&bytes, &header, &mut from, &mut to).await?;
            continue;
        };
        let payload = read_payload(&mut from, &header).await?;
        to.write_all(&[&bytes[..], &payload].concat()).await?;
        let done = succeeded(&payload);
        match awaited {
            PendingReply::Create(id) => tasks.created(&id, done),
            PendingReply::Delete(id) if done => tasks.deleted(&id),
            PendingReply::Delete(_) => {}
        }
    }
    Ok(())
}

/// Decodes a request. If the request must change, returns the frame that replaces it.
async fn inspect(
    header: &FrameHeader,
    payload: &[u8],
    tasks: &impl TaskService,
    watched: &Watched,
) -> Option<Vec<u8>> {
    let mut request = Request::parse_from_bytes(payload).ok()?;
    if !matches!(request.service.as_str(), "containerd.task.v2.Task" | "containerd.task.v3.Task") {
        return None;
    }
    let watch = |awaited| watched.borrow_mut().insert(header.stream, awaited);
    match request.method.as_str() {
        "Create" => {
            let mut create = CreateTaskRequest::parse_from_bytes(&request.payload).ok()?;
            let options = tasks.create(&create).await;
            watch(PendingReply::Create(create.id.clone()));
            create.options = MessageField::some(options?);
            request.payload = create.write_to_bytes().ok()?;
            header.with_payload(&request.write_to_bytes().ok()?)
        }
        "Delete" => {
            let delete = DeleteRequest::parse_from_bytes(&request.payload).ok()?;
            // The end of an exec is not the end of its container.
            if delete.exec_id.is_empty() {
                watch(PendingReply::Delete(delete.id));
            }
            None
        }
        _ => None,
    }
}

fn succeeded(payload: &[u8]) -> bool {
    Response::parse_from_bytes(payload).is_ok_and(|response| {
        response.status.as_ref().is_none_or(|status| status.code() == Code::OK)
    })
}

async fn read_payload(
    from: &mut (impl AsyncRead + Unpin),
    header: &FrameHeader,
) -> Result<Vec<u8>, FrameError> {
    // The buffer grows with the received bytes: the length in the header is not trusted.
    let mut payload = Vec::new();
    from.take(header.payload_bytes.into()).read_to_end(&mut payload).await?;
    if payload.len() < header.payload_bytes as usize {
        return Err(std::io::Error::from(std::io::ErrorKind::UnexpectedEof).into());
    }
    Ok(payload)
}

/// Copies a frame to the other side, in chunks.
async fn copy(
    bytes: &[u8],
    header: &FrameHeader,
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
) -> Result<(), FrameError> {
    let mut left = header.payload_bytes as usize;
    let mut piece = bytes.to_vec();
    loop {
        let wanted = left.min(CHUNK_BYTES);
        let start = piece.len();
        piece.resize(start + wanted, 0);
        from.read_exact(&mut piece[start..]).await?;
        to.write_all(&piece).await?;
        left -= wanted;
        if left == 0 {
            return Ok(());
        }
        piece.clear();
    }
}

#[cfg(test)]
mod tests;
