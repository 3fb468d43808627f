//! The client of the controller's control API.

use std::{path::Path, time::Duration};

use affinode_controller::{call_trace::CallTraceBatch, history::StateSpan, schema};
use affinode_proto::{
    api::{
        control::{
            ActionResponse, CallsRequest, Event, EventsRequest, HintRequest, HintResponse,
            HistoryRequest, ListRequest, ListResponse, OffloadRequest, PinRequest, PolicyChange,
            PolicyRequest, PolicyResponse, PolicyValue, ReloadRequest, ReloadResponse,
            ReportRequest, RestoreRequest, SetAutoOffloadRequest, SetPolicyRequest,
        },
        control_ttrpc,
    },
    paths,
};
use ttrpc::context::{Context, with_duration};

use super::CliError;

/// Timeout of a request that the controller answers at once.
const QUICK: Duration = Duration::from_secs(10);
/// Time limit for an offload or a restore. The time is enough to wait in the controller's queue and
/// then to move the memory of a whole GPU at 1 GB/s.
const LONG: Duration = Duration::from_secs(600);

/// A connection to the controller. The path of its socket is kept for error messages.
pub struct ControlClient {
    control: control_ttrpc::ControlClient,
    socket: String,
    rights: ClientRights,
}

/// Rights that the user of this command has at the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ClientRights {
    /// The user may make all requests, because the user is root.
    Full,
    /// The user is a member of `control.view_group`. Such a user may read, but not change anything.
    View,
}

impl ControlClient {
    /// Connects to the controller whose socket is in this run directory.
    pub async fn connect(run_dir: &Path) -> Result<ControlClient, CliError> {
        let socket = run_dir.join(paths::CONTROL_SOCKET);
        match open(&socket, ClientRights::Full).await {
            // The mode of this socket lets only root connect. Members of `control.view_group` use
            // the socket for viewers.
            Err(error) if may_not_connect(&socket) => {
                let viewing = open(&run_dir.join(paths::VIEW_SOCKET), ClientRights::View).await;
                viewing.map_err(|_| error)
            }
            opened => opened,
        }
    }

    /// Checks whether this user may send a request that changes something. Returns an error if the
    /// user may only read. The controller checks this as well: on the socket for members of
    /// `control.view_group`, it refuses requests that change something.
    fn may_change(&self) -> Result<(), CliError> {
        match self.rights {
            ClientRights::Full => Ok(()),
            ClientRights::View => Err(CliError::NotDone(
                "this command needs root; members of control.view_group can only view".into(),
            )),
        }
    }

    /// Returns a function that converts the error of a request with this time limit.
    fn error(&self, limit: Duration) -> impl FnOnce(ttrpc::Error) -> CliError + '_ {
        move |source| match source {
            // The controller and this client have the same limit, and the first of them ends the
            // request.
            ttrpc::Error::RpcStatus(status) if status.code() == ttrpc::Code::DEADLINE_EXCEEDED => {
                CliError::TimedOut { limit_s: limit.as_secs() }
            }
            ttrpc::Error::Others(text) if text.contains("deadline elapsed") => {
                CliError::TimedOut { limit_s: limit.as_secs() }
            }
            ttrpc::Error::RpcStatus(status) => CliError::Refused(status.message),
            _ => CliError::NoController { socket: self.socket.clone(), source },
        }
    }

    /// Requests the GPUs and containers of the node.
    pub async fn list(&self) -> Result<ListResponse, CliError> {
        self.control.list(context(QUICK), &ListRequest::default()).await.map_err(self.error(QUICK))
    }

    /// Offloads a container. Returns when the offload is done or refused.
    pub async fn offload(&self, container: String) -> Result<ActionResponse, CliError> {
        self.may_change()?;
        let request = OffloadRequest { container, ..OffloadRequest::default() };
        self.control.offload(context(LONG), &request).await.map_err(self.error(LONG))
    }

    /// Restores a container. Returns when the restore is done or refused.
    pub async fn restore(&self, container: String) -> Result<ActionResponse, CliError> {
        self.may_change()?;
        let request = RestoreRequest { container, ..RestoreRequest::default() };
        self.control.restore(context(LONG), &request).await.map_err(self.error(LONG))
    }

    /// Pins a container to the GPU, or unpins it.
    pub async fn pin(&self, container: String, pinned: bool) -> Result<ActionResponse, CliError> {
        self.may_change()?;
        let request = PinRequest { container, pinned, ..PinRequest::default() };
        self.control.pin(context(LONG), &request).await.map_err(self.error(LONG))
    }

    /// Sends a hint that a container is idle or busy.
    pub async fn hint(&self, container: String, busy: bool) -> Result<HintResponse, CliError> {
        self.may_change()?;
        let request = HintRequest { container, busy, ..HintRequest::default() };
        self.control.hint(context(QUICK), &request).await.map_err(self.error(QUICK))
    }

    /// Turns automatic offloads on or off.
    pub async fn set_auto_offload(&self, on: bool) -> Result<(), CliError> {
        self.may_change()?;
        let request = SetAutoOffloadRequest { on, ..SetAutoOffloadRequest::default() };
        let set = self.control.set_auto_offload(context(QUICK), &request).await;
        set.map(drop).map_err(self.error(QUICK))
    }

    /// Returns the events with a sequence number above `after`. If there are none yet, waits until
    /// the first arrives or `timeout_ms` has passed.
    pub async fn events(&self, after: u64, timeout_ms: u32) -> Result<Vec<Event>, CliError> {
        let request = EventsRequest { after, timeout_ms, ..EventsRequest::default() };
        let wait = QUICK + Duration::from_millis(timeout_ms.into());
        Ok(self.control.events(context(wait), &request).await.map_err(self.error(wait))?.events)
    }

    /// Returns batches of recorded CUDA calls with a sequence number above `after`. The batches are
    /// those of one container, or those of all containers if `container` is empty. If there are
    /// none yet, waits up to a second for the first batch.
    pub async fn calls(
        &self,
        container: String,
        after: u64,
    ) -> Result<Vec<CallTraceBatch>, CliError> {
        let request =
            CallsRequest { container, after, timeout_ms: 1_000, ..CallsRequest::default() };
        let response = self.control.calls(context(QUICK), &request).await;
        let batches = response.map_err(self.error(QUICK))?.batches;
        Ok(batches.into_iter().map(CallTraceBatch::from).collect())
    }

    /// Requests the report of the GPU use between two times, in milliseconds since 1970.
    pub async fn report(&self, since_ms: i64, until_ms: i64) -> Result<schema::Report, CliError> {
        let request = ReportRequest {
            since_unix_ms: since_ms,
            until_unix_ms: until_ms,
            ..ReportRequest::default()
        };
        let response = self.control.report(context(QUICK), &request).await;
        Ok(response.map_err(self.error(QUICK))?.into())
    }

    /// Returns the policy of one container, or the policies of all containers if `container` is
    /// empty.
    pub async fn policy(&self, container: String) -> Result<PolicyResponse, CliError> {
        let request = PolicyRequest { container, ..PolicyRequest::default() };
        self.control.policy(context(QUICK), &request).await.map_err(self.error(QUICK))
    }

    /// Changes values of the node's policy. Returns the values that are in effect after the change.
    pub async fn set_policy(
        &self,
        changes: Vec<PolicyChange>,
    ) -> Result<Vec<PolicyValue>, CliError> {
        self.may_change()?;
        let request = SetPolicyRequest { changes, ..SetPolicyRequest::default() };
        let response = self.control.set_policy(context(QUICK), &request).await;
        Ok(response.map_err(self.error(QUICK))?.values)
    }

    /// Returns all recorded spans of the history between two times, in milliseconds since 1970. A
    /// span is one container's stay in one state.
    pub async fn history(&self, since_ms: i64, until_ms: i64) -> Result<Vec<StateSpan>, CliError> {
        let mut spans = Vec::new();
        loop {
            let request = HistoryRequest {
                since_unix_ms: since_ms,
                until_unix_ms: until_ms,
                skip: spans.len() as u64,
                ..HistoryRequest::default()
            };
            let page = self.control.history(context(QUICK), &request).await;
            let page = page.map_err(self.error(QUICK))?;
            for span in &page.spans {
                spans.push(serde_json::from_str(span)?);
            }
            if !page.more {
                return Ok(spans);
            }
        }
    }

    /// Makes the controller read its configuration files again.
    pub async fn reload(&self) -> Result<ReloadResponse, CliError> {
        self.may_change()?;
        let asked = ReloadRequest::default();
        self.control.reload(context(QUICK), &asked).await.map_err(self.error(QUICK))
    }
}

async fn open(socket: &Path, rights: ClientRights) -> Result<ControlClient, CliError> {
    let socket = socket.display().to_string();
    match ttrpc::r#async::Client::connect(&format!("unix://{socket}")).await {
        Ok(client) => {
            let control = control_ttrpc::ControlClient::new(client);
            Ok(ControlClient { control, socket, rights })
        }
        Err(source) => Err(CliError::NoController { socket, source }),
    }
}

/// Returns whether this user lacks the permission to connect to a socket.
fn may_not_connect(socket: &Path) -> bool {
    let connected = std::os::unix::net::UnixStream::connect(socket);
    connected.is_err_and(|error| error.kind() == std::io::ErrorKind::PermissionDenied)
}

fn context(wait: Duration) -> Context {
    with_duration(wait)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_refusal_is_printed_unchanged() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join(paths::CONTROL_SOCKET);
        let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let client = ControlClient::connect(folder.path()).await.unwrap();
        drop(listener);
        let said = ttrpc::get_status(ttrpc::Code::NOT_FOUND, "no container is named \"x\"");
        let told = affinode_controller::error_chain::chain(&client.error(QUICK)(
            ttrpc::Error::RpcStatus(said),
        ));
        assert_eq!(told, "the controller refused the request: no container is named \"x\"");
    }

    /// A move can take longer than this command waits. The controller works then, so the error must
    /// not be that it cannot be reached.
    #[tokio::test(start_paused = true)]
    async fn a_request_without_response_times_out() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join(paths::CONTROL_SOCKET);
        let _silent = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let client = ControlClient::connect(folder.path()).await.unwrap();
        let error = client.offload("x".into()).await.unwrap_err();
        assert!(matches!(error, CliError::TimedOut { limit_s: 600 }), "{error}");
        let late = ttrpc::get_status(ttrpc::Code::DEADLINE_EXCEEDED, "timeout");
        let error = client.error(QUICK)(ttrpc::Error::RpcStatus(late));
        assert!(matches!(error, CliError::TimedOut { limit_s: 10 }), "{error}");
    }
}
