//! Streams the controller's events as server-sent events. With `watch=node` the stream also
//! contains the changes of the node.
//!
//! ```text
//!  event: node     the whole node, at the start, and each time that this stream fell behind
//!  event: change   the differences since the last message
//!  event: event    an event; a client can continue after the event's id
//! ```
//!
//! The id of an event is `<start time of the controller>-<number>`. A restarted controller numbers
//! its events from the beginning again. A client that sends an id of an earlier controller receives
//! all events of the present controller.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use hyper::body::{Body, Frame};
use tokio::sync::{OwnedSemaphorePermit, broadcast::error::RecvError, mpsc};

use super::{
    AppState,
    guard::{Denied, Principal},
};
use crate::{
    observe::{ViewMessage, ViewWatch},
    schema,
};

/// Time without a message after which the server sends an SSE comment, so that proxies and clients
/// keep the connection open.
const QUIET: Duration = Duration::from_secs(15);
/// Maximum number of messages that wait to be written to a stream's connection.
const PIPE: usize = 8;
/// Maximum time that a stream waits for its client to accept a message. The server then closes the
/// stream.
const WRITE_TIMEOUT: Duration = Duration::from_secs(20);

/// Holds the permit of a stream, and checks the right of its user.
#[derive(Debug)]
pub struct StreamGuard {
    /// Permit for one of a limited number of streams.
    pub permit: OwnedSemaphorePermit,
    /// Sender of the request, whose right is checked again. `None` if no right is required.
    pub admitted: Option<Principal>,
}

impl StreamGuard {
    /// Starts the task that writes a stream. The stream ends when the client closes it, does not
    /// read, or loses its right.
    pub fn spawn(
        self,
        site: Arc<AppState>,
        written: impl Future<Output = Option<()>> + Send + 'static,
    ) {
        tokio::spawn(async move {
            let ended = async {
                match &self.admitted {
                    Some(admitted) => admitted.ended().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                // `None`: the client has disconnected or does not read.
                _ = written => {}
                refusal = ended => {
                    let Denied { why, detail, .. } = refusal;
                    site.note(format!(
                        "the event stream of a client was closed: {}",
                        if detail.is_empty() { why } else { detail }
                    ));
                }
            }
            drop(self.permit);
        });
    }
}

/// Body of the HTTP response of a stream: receives the text to send.
#[derive(Debug)]
pub struct StreamBody(mpsc::Receiver<Bytes>);

/// Sending end of a stream's body.
#[derive(Debug)]
pub struct EventPipe(mpsc::Sender<Bytes>);

/// Creates a stream's body and its sending end.
pub fn pipe() -> (EventPipe, StreamBody) {
    let (pipe, body) = mpsc::channel(PIPE);
    (EventPipe(pipe), StreamBody(body))
}

impl EventPipe {
    /// Sends text to the client. Returns `None` if the client has closed the stream or does not
    /// read.
    pub async fn send(&self, text: String) -> Option<()> {
        tokio::time::timeout(WRITE_TIMEOUT, self.0.send(text.into())).await.ok()?.ok()
    }
}

impl Body for StreamBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.get_mut().0.poll_recv(context).map(|bytes| bytes.map(|bytes| Ok(Frame::data(bytes))))
    }
}

/// What the client of an event stream requests.
#[derive(Clone, Copy, Debug)]
pub struct StreamQuery {
    /// Number of the last event that the client has received.
    pub after: u64,
    /// Whether the stream also contains the state of the node and its changes.
    pub node: bool,
}

impl StreamQuery {
    /// Determines which messages a client requests. `last_id` is the value of the request's header
    /// `Last-Event-ID`. The controller started at `started_unix_ms`, and its newest event has the
    /// number `newest`.
    #[must_use]
    pub fn new(
        last_id: Option<&str>,
        started_unix_ms: i64,
        newest: u64,
        node: bool,
    ) -> StreamQuery {
        let known = last_id.and_then(|id| {
            let (start, number) = id.split_once('-')?;
            (start.parse() == Ok(started_unix_ms)).then_some(number.parse().ok()?)
        });
        // With an id of an earlier controller, the client gets all events. Without an id it gets
        // only new events. With `watch=node` it also gets the last hundred, so that the dashboard
        // is not empty.
        let after = match (known, last_id) {
            (Some(number), _) => number,
            (None, Some(_)) => 0,
            (None, None) => newest.saturating_sub(if node { 100 } else { 0 }),
        };
        StreamQuery { after, node }
    }
}

/// Begins an event stream. Returns the body of its response.
pub fn begin(
    site: &Arc<AppState>,
    wish: StreamQuery,
    started_unix_ms: i64,
    hold: StreamGuard,
) -> StreamBody {
    let (pipe, body) = pipe();
    let writer = EventWriter {
        site: Arc::clone(site),
        pipe,
        started_unix_ms,
        last: wish.after,
        node: wish.node,
    };
    hold.spawn(Arc::clone(site), writer.run());
    body
}

struct EventWriter {
    site: Arc<AppState>,
    pipe: EventPipe,
    started_unix_ms: i64,
    last: u64,
    node: bool,
}

impl EventWriter {
    async fn run(mut self) -> Option<()> {
        let mut watch = self.site.hub.watch();
        self.send("retry: 1000\n\n".into()).await?;
        self.catch_up(&watch).await?;
        loop {
            let message = match tokio::time::timeout(QUIET, watch.messages.recv()).await {
                Ok(Ok(message)) => message,
                Ok(Err(RecvError::Lagged(count))) => {
                    self.site.hub.add_missed(count);
                    watch = self.site.hub.watch();
                    self.catch_up(&watch).await?;
                    continue;
                }
                Ok(Err(RecvError::Closed)) => return None,
                Err(_) => {
                    self.send(":\n\n".into()).await?;
                    continue;
                }
            };
            match message {
                // `catch_up` has already sent this event.
                ViewMessage::Event(number, _) if number <= self.last => {}
                ViewMessage::Event(number, json) => self.event(number, &json).await?,
                ViewMessage::Change(json) if self.node => {
                    self.send(format!("event: change\ndata: {json}\n\n")).await?
                }
                ViewMessage::Change(_) => {}
            }
        }
    }

    /// Sends the current state of the node if the client wants it, then every event that the client
    /// does not have yet.
    async fn catch_up(&mut self, watch: &ViewWatch) -> Option<()> {
        if self.node {
            let json = serde_json::to_string(&*watch.present).ok()?;
            self.send(format!("event: node\ndata: {json}\n\n")).await?;
        }
        loop {
            let events = self.site.door.events().now(self.last);
            if events.is_empty() {
                return Some(());
            }
            for event in events {
                let json = serde_json::to_string(&schema::Event::from(event.clone())).ok()?;
                self.event(event.sequence, &json).await?;
            }
        }
    }

    async fn event(&mut self, number: u64, json: &str) -> Option<()> {
        self.last = number;
        self.send(format!("id: {}-{number}\nevent: event\ndata: {json}\n\n", self.started_unix_ms))
            .await
    }

    async fn send(&self, text: String) -> Option<()> {
        self.pipe.send(text).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_continues_after_its_last_event() {
        assert_eq!(StreamQuery::new(Some("77-5"), 77, 9, false).after, 5);
        assert_eq!(StreamQuery::new(Some("66-5"), 77, 9, false).after, 0);
        assert_eq!(StreamQuery::new(Some("rubbish"), 77, 9, false).after, 0);
        assert_eq!(StreamQuery::new(None, 77, 900, false).after, 900);
        assert_eq!(StreamQuery::new(None, 77, 900, true).after, 800);
    }
}
