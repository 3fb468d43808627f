//! Streams the CUDA calls of processes as server-sent events: `event: calls` with a
//! [`CallTraceBatch`](crate::call_trace::CallTraceBatch), five per second while calls are made.

use std::{sync::Arc, time::Duration};

use super::{
    AppState,
    stream::{EventPipe, StreamBody, StreamGuard, pipe},
};
use crate::call_trace::Scope;

/// Time without a batch after which the server sends an SSE comment. If the client has closed the
/// connection, this write fails. Without a write, the server would not notice.
const QUIET: Duration = Duration::from_secs(2);

/// Begins a stream of CUDA calls. Processes record their calls while the stream is open.
pub fn begin(site: &Arc<AppState>, scope: Scope, hold: StreamGuard) -> StreamBody {
    let (out, body) = pipe();
    let watched = Arc::clone(site);
    hold.spawn(Arc::clone(site), async move { run(&watched, &scope, &out).await });
    body
}

async fn run(site: &AppState, scope: &Scope, out: &EventPipe) -> Option<()> {
    out.send("retry: 1000\n\n".into()).await?;
    let mut last = None;
    loop {
        let batches = site.calls.after(scope, last, QUIET).await;
        if batches.is_empty() {
            out.send(":\n\n".into()).await?;
        }
        for batch in batches {
            last = Some(batch.sequence);
            let json = serde_json::to_string(&*batch).ok()?;
            out.send(format!("event: calls\ndata: {json}\n\n")).await?;
        }
    }
}
