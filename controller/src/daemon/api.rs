//! Serves the control API on `<run dir>/control.sock`, and translates requests into commands for
//! the actor.

use std::{error::Error, path::Path, sync::Arc, time::Duration};

use affinode_core::{Request, hints::Hint};
use affinode_proto::{
    api::{
        control::{
            ActionResponse, AnnounceRequest, AnnounceResponse, CallBatch, CallsRequest,
            CallsResponse, EventsRequest, EventsResponse, HintRequest, HintResponse,
            HistoryRequest, HistoryResponse, ListRequest, ListResponse, OffloadRequest, PinRequest,
            PolicyRequest, PolicyResponse, ReloadRequest, ReloadResponse, ReportRequest,
            ReportResponse, RestoreRequest, SetAutoOffloadRequest, SetAutoOffloadResponse,
            SetPolicyRequest, SetPolicyResponse, WithdrawRequest, WithdrawResponse,
        },
        control_ttrpc::{Control, create_control},
    },
    paths,
};
use async_trait::async_trait;
use tokio::{
    net::UnixListener,
    sync::{Semaphore, mpsc, oneshot},
};
use ttrpc::r#async::{Server, TtrpcContext, transport::Listener};

use super::DaemonError;
use crate::{
    call_trace::{CallTraceBatch, CallTraceHub},
    config::{self, Config, ReportSection},
    error_chain,
    handle::{Command, EventLog},
    history::{NodeHistory, StoreError},
    socket_activation::ActivationSockets,
};

/// Maximum time that a request for events waits for a new event.
const MAX_WAIT: Duration = Duration::from_secs(60);

/// Maximum number of spans of the history in one response. A response with this many spans is far
/// smaller than the maximum size of a message.
const SPANS: usize = 1_000;
/// Maximum number of reads of the history at a time. Each may need memory for the whole history.
/// The HTTP API has a limit of its own, so that its clients do not delay `affinode report`.
const READS: usize = 2;

/// Text that an event shows as the author of a request, if the request came through the control
/// API.
const COMMAND: &str = "the command affinode";

/// The control API with all its methods, which only root may call.
#[derive(Clone)]
pub(super) struct ControlService {
    calls: mpsc::Sender<Command>,
    events: Arc<EventLog>,
    hub: Arc<CallTraceHub>,
    history: Option<Arc<NodeHistory>>,
    prices: ReportSection,
    configuring: Arc<Semaphore>,
    reads: Arc<Semaphore>,
}

/// Serves the control API at its socket, to which only root may connect.
pub(super) async fn serve(
    sockets: &mut ActivationSockets,
    run_dir: &Path,
    service: ControlService,
) -> Result<Server, DaemonError> {
    let path = run_dir.join(paths::CONTROL_SOCKET);
    let bound = sockets.listen(paths::CONTROL_SOCKET, 0o600).and_then(UnixListener::from_std);
    let listener = bound.map_err(|source| DaemonError::File {
        what: "cannot bind",
        path: path.clone(),
        source,
    })?;
    let service = create_control(Arc::new(service));
    let mut server = Server::new().add_listener(Listener::from(listener)).register_service(service);
    server.start().await.map_err(|source| DaemonError::Serve { path, source })?;
    Ok(server)
}

fn failed(code: ttrpc::Code, text: impl Into<String>) -> ttrpc::Error {
    ttrpc::Error::RpcStatus(ttrpc::get_status(code, text.into()))
}

fn refused(code: ttrpc::Code, error: &dyn Error) -> ttrpc::Error {
    failed(code, error_chain::chain(error))
}

fn ending() -> ttrpc::Error {
    failed(ttrpc::Code::UNAVAILABLE, "the controller is shutting down; try again")
}

fn code_of(error: &StoreError) -> ttrpc::Code {
    match error {
        StoreError::Opening | StoreError::Closed => ttrpc::Code::UNAVAILABLE,
        StoreError::NotOpen => ttrpc::Code::FAILED_PRECONDITION,
        _ => ttrpc::Code::INTERNAL,
    }
}

impl ControlService {
    /// Creates the control API. `calls` sends commands to the actor.
    pub(super) fn new(
        calls: mpsc::Sender<Command>,
        events: Arc<EventLog>,
        hub: Arc<CallTraceHub>,
        history: Option<Arc<NodeHistory>>,
        prices: ReportSection,
    ) -> ControlService {
        let (configuring, reads) = (Arc::new(Semaphore::new(1)), Arc::new(Semaphore::new(READS)));
        ControlService { calls, events, hub, history, prices, configuring, reads }
    }

    async fn ask<T>(&self, call: impl FnOnce(oneshot::Sender<T>) -> Command) -> ttrpc::Result<T> {
        let (answer, answered) = oneshot::channel();
        self.calls.send(call(answer)).await.map_err(|_| ending())?;
        answered.await.map_err(|_| ending())
    }

    /// Reads the configuration with `read`, and sends it to the actor in a command. The disk may be
    /// slow, so a separate thread does both. If the client disconnects meanwhile, a stored change
    /// is applied nevertheless. One such request runs at a time, so that the actor gets the
    /// configurations in the order in which they were read.
    async fn configure<T: Send + 'static, E: Error + Send + 'static>(
        &self,
        read: impl FnOnce() -> Result<Config, E> + Send + 'static,
        command: impl FnOnce(Box<Config>, oneshot::Sender<T>) -> Command + Send + 'static,
    ) -> ttrpc::Result<T> {
        let permit = Arc::clone(&self.configuring).acquire_owned().await.map_err(|_| ending())?;
        let (answer, answered) = oneshot::channel();
        let calls = self.calls.clone();
        let sent = tokio::task::spawn_blocking(move || {
            let config = read()?;
            // If the actor has ended, its channel and `answer` are closed.
            let _ = calls.blocking_send(command(Box::new(config), answer));
            drop(permit);
            Ok::<_, E>(())
        });
        sent.await
            .map_err(|_| failed(ttrpc::Code::INTERNAL, "cannot read the configuration"))?
            .map_err(|error| refused(ttrpc::Code::FAILED_PRECONDITION, &error))?;
        answered.await.map_err(|_| ending())
    }

    async fn read_history<T: Send + 'static>(
        &self,
        read: impl FnOnce(&NodeHistory) -> Result<T, StoreError> + Send + 'static,
    ) -> ttrpc::Result<T> {
        let Some(history) = self.history.clone() else {
            return Err(refused(ttrpc::Code::FAILED_PRECONDITION, &StoreError::NotOpen));
        };
        history.opened().await;
        let permit = Arc::clone(&self.reads).acquire_owned().await.map_err(|_| ending())?;
        // The disk may be slow, and the actor must not wait for it. If the client disconnects
        // meanwhile, the permit is held until the read has ended.
        let reading = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            read(&history)
        });
        match reading.await {
            Ok(Ok(found)) => Ok(found),
            Ok(Err(error)) => Err(refused(code_of(&error), &error)),
            Err(_) => Err(failed(ttrpc::Code::INTERNAL, "cannot read the history")),
        }
    }
}

#[async_trait]
impl Control for ControlService {
    async fn announce(
        &self,
        _: &TtrpcContext,
        request: AnnounceRequest,
    ) -> ttrpc::Result<AnnounceResponse> {
        let container = request.container.into_option().unwrap_or_default();
        let warnings = self
            .ask(|answer| Command::Announce(Box::new(container), answer))
            .await?
            .map_err(|error| refused(ttrpc::Code::INVALID_ARGUMENT, &error))?;
        Ok(AnnounceResponse { warnings, ..AnnounceResponse::default() })
    }

    async fn withdraw(
        &self,
        _: &TtrpcContext,
        request: WithdrawRequest,
    ) -> ttrpc::Result<WithdrawResponse> {
        let ending = |_| failed(ttrpc::Code::UNAVAILABLE, "the controller is shutting down");
        self.calls
            .send(Command::Withdraw(request.key, request.generation))
            .await
            .map_err(ending)?;
        Ok(WithdrawResponse::default())
    }

    async fn list(&self, _: &TtrpcContext, _: ListRequest) -> ttrpc::Result<ListResponse> {
        self.ask(Command::List).await
    }

    async fn offload(
        &self,
        _: &TtrpcContext,
        request: OffloadRequest,
    ) -> ttrpc::Result<ActionResponse> {
        self.ask(|answer| Command::Act(request.container, Request::Offload, answer)).await
    }

    async fn restore(
        &self,
        _: &TtrpcContext,
        request: RestoreRequest,
    ) -> ttrpc::Result<ActionResponse> {
        self.ask(|answer| Command::Act(request.container, Request::Restore, answer)).await
    }

    async fn pin(&self, _: &TtrpcContext, request: PinRequest) -> ttrpc::Result<ActionResponse> {
        let PinRequest { container, pinned, .. } = request;
        self.ask(|answer| Command::Pin(container, pinned, COMMAND.into(), answer)).await
    }

    async fn set_auto_offload(
        &self,
        _: &TtrpcContext,
        request: SetAutoOffloadRequest,
    ) -> ttrpc::Result<SetAutoOffloadResponse> {
        let changed = self
            .ask(|answer| Command::AutoOffload(request.on, COMMAND.into(), answer))
            .await?
            .map_err(|error| refused(ttrpc::Code::INTERNAL, &error))?;
        Ok(SetAutoOffloadResponse { changed, ..SetAutoOffloadResponse::default() })
    }

    async fn events(
        &self,
        _: &TtrpcContext,
        request: EventsRequest,
    ) -> ttrpc::Result<EventsResponse> {
        let wait = Duration::from_millis(request.timeout_ms.into()).min(MAX_WAIT);
        let events = self.events.after(request.after, wait).await;
        Ok(EventsResponse { events, ..EventsResponse::default() })
    }

    async fn calls(&self, _: &TtrpcContext, request: CallsRequest) -> ttrpc::Result<CallsResponse> {
        let scope = match request.container {
            all if all.is_empty() => None,
            name => {
                let found = self.ask(|answer| Command::Find(name, answer)).await?;
                Some(found.map_err(|error| refused(ttrpc::Code::NOT_FOUND, &error))?)
            }
        };
        let after = Some(request.after).filter(|after| *after > 0);
        let wait = Duration::from_millis(request.timeout_ms.into());
        let batches = self.hub.after(&scope, after, wait).await;
        let batches =
            batches.iter().map(|batch| CallBatch::from(CallTraceBatch::clone(batch))).collect();
        Ok(CallsResponse { batches, ..CallsResponse::default() })
    }

    async fn reload(&self, _: &TtrpcContext, _: ReloadRequest) -> ttrpc::Result<ReloadResponse> {
        let read = || Config::load(&Config::path());
        let taken = self.configure(read, Command::Reload).await?;
        let waits = taken.waits.iter().map(ToString::to_string).collect();
        Ok(ReloadResponse { changed: taken.changed, waits, ..ReloadResponse::default() })
    }

    async fn hint(&self, _: &TtrpcContext, request: HintRequest) -> ttrpc::Result<HintResponse> {
        let hint = if request.busy { Hint::Busy } else { Hint::Idle };
        self.ask(|answer| Command::Hint(request.container, hint, COMMAND.into(), answer))
            .await?
            .map_err(|error| refused(ttrpc::Code::NOT_FOUND, &error))
    }

    async fn policy(
        &self,
        _: &TtrpcContext,
        request: PolicyRequest,
    ) -> ttrpc::Result<PolicyResponse> {
        self.ask(|answer| Command::Policy(request.container, answer))
            .await?
            .map_err(|error| refused(ttrpc::Code::NOT_FOUND, &error))
    }

    async fn set_policy(
        &self,
        _: &TtrpcContext,
        request: SetPolicyRequest,
    ) -> ttrpc::Result<SetPolicyResponse> {
        let changes: Vec<_> = request.changes.into_iter().map(|c| (c.name, c.value)).collect();
        let stored = changes.clone();
        let read = move || config::set(&Config::path(), &stored);
        let apply = |config, answer| Command::SetPolicy(config, changes, answer);
        let values = self.configure(read, apply).await?;
        Ok(SetPolicyResponse { values, ..SetPolicyResponse::default() })
    }

    async fn history(
        &self,
        _: &TtrpcContext,
        request: HistoryRequest,
    ) -> ttrpc::Result<HistoryResponse> {
        let skip = usize::try_from(request.skip).unwrap_or(usize::MAX);
        // Only the page leaves the read, because the rest must not outlive the read's permit.
        let (spans, more) = self
            .read_history(move |history| {
                let spans = history.spans(request.since_unix_ms, request.until_unix_ms, None)?;
                let more = spans.len() > skip.saturating_add(SPANS);
                let page = spans.iter().skip(skip).take(SPANS).map(serde_json::to_string);
                Ok((page.collect::<Result<_, _>>().map_err(StoreError::Record)?, more))
            })
            .await?;
        Ok(HistoryResponse { spans, more, ..HistoryResponse::default() })
    }

    async fn report(
        &self,
        _: &TtrpcContext,
        request: ReportRequest,
    ) -> ttrpc::Result<ReportResponse> {
        let sums = self
            .read_history(move |history| {
                history.report(request.since_unix_ms, request.until_unix_ms)
            })
            .await?;
        Ok(sums.priced(&self.prices).into())
    }
}

#[cfg(test)]
mod tests;
