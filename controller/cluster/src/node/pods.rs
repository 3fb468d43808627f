//! Writes the GPU status of pods to the API server. It uses only the `status` subresource, so the
//! agent needs no right to change pods.

use std::time::Duration;

use affinode_proto::api::control::ListResponse;
use k8s_openapi::{api::core::v1::Pod, jiff::Timestamp};
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};

use super::pod_condition::{
    CONDITION, ConditionChange, LABEL, PodGpuStatus, PodName, PodStatusWriter,
};
use crate::error_chain::{self, ApiError};

/// Time limit for one write.
const TIME: Duration = Duration::from_secs(10);

/// Writes the GPU conditions of this node's pods.
pub struct Pods {
    client: Client,
    board: PodStatusWriter,
}

impl Pods {
    /// Creates a writer that has not written the condition of any pod yet.
    #[must_use]
    pub fn new(client: Client) -> Pods {
        Pods { client, board: PodStatusWriter::default() }
    }

    /// Writes the conditions that have changed. A write that fails is repeated at a later call.
    /// `EventRateLimiter` limits how often the condition of a pod is set or
    /// removed. Failed attempts count.
    pub async fn show(&mut self, list: &ListResponse) {
        let now_ms = Timestamp::now().as_millisecond();
        for change in self.board.due(list, now_ms) {
            let (name, patch) = match &change {
                ConditionChange::Show(name, standing) => (name, show(name, standing)),
                ConditionChange::Clear(name) => (name, clear(&name.uid)),
            };
            match write(&self.client, &name.namespace, &name.name, patch).await {
                Ok(()) => self.board.done(change, now_ms),
                Err(why) => {
                    tracing::warn!(
                        "pod {}/{}: cannot write the pod's status: {why}",
                        name.namespace,
                        name.name
                    );
                }
            }
        }
    }
}

/// Returns the patch that removes Affinode's condition and label from a pod.
#[must_use]
pub fn clear(uid: &str) -> Value {
    json!({
        "metadata": { "uid": uid, "labels": { LABEL: null } },
        "status": { "conditions": [{ "type": CONDITION, "$patch": "delete" }] },
    })
}

fn show(name: &PodName, standing: &PodGpuStatus) -> Value {
    let since = Timestamp::from_second(standing.since_ms / 1000).unwrap_or_default();
    let condition = json!({
        "type": CONDITION, "status": if standing.is_resident() { "True" } else { "False" },
        "reason": standing.reason, "message": standing.message,
        "lastTransitionTime": since.to_string(),
    });
    json!({
        "metadata": { "uid": name.uid, "labels": { LABEL: standing.state.as_str() } },
        "status": { "conditions": [condition] },
    })
}

/// Patches the status of a pod. It is not an error if the pod no longer exists, or if another pod
/// with the same name has replaced it.
///
/// # Errors
/// The message of the API server's error.
pub async fn write(
    client: &Client,
    namespace: &str,
    name: &str,
    patch: Value,
) -> Result<(), String> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let (params, patch) = (PatchParams::default(), Patch::Strategic(patch));
    match tokio::time::timeout(TIME, pods.patch_status(name, &params, &patch)).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => Ok(()),
        Ok(Err(error)) => Err(error_chain::chain(&ApiError(error))),
        Err(_) => Err(format!("no reply from the API server within {TIME:?}")),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use affinode_proto::{
        api::control::{Announcement, Container},
        state::State,
    };
    use http_body_util::BodyExt;
    use hyper::{Request, Response, StatusCode};
    use kube::client::Body;

    use super::*;

    type Asked = Arc<Mutex<Vec<(String, Value)>>>;

    /// Returns a client of a simulated API server, and the list of requests that the server has
    /// received. The server replies to each request with this HTTP status.
    fn server(status: StatusCode) -> (Client, Asked) {
        let asked = Asked::default();
        let keep = Arc::clone(&asked);
        let service = tower::service_fn(move |request: Request<Body>| {
            let keep = Arc::clone(&keep);
            async move {
                let line = format!("{} {}", request.method(), request.uri().path());
                let body = request.into_body().collect().await.unwrap().to_bytes();
                keep.lock().unwrap().push((line, serde_json::from_slice(&body).unwrap()));
                let answer = match status {
                    StatusCode::OK => json!({ "kind": "Pod", "apiVersion": "v1", "metadata": {} }),
                    _ => json!({
                        "kind": "Status", "apiVersion": "v1", "status": "Failure",
                        "reason": "Test", "message": "so", "code": status.as_u16(),
                    }),
                };
                let answer = Body::from(answer.to_string().into_bytes());
                Ok::<_, std::convert::Infallible>(
                    Response::builder().status(status).body(answer).unwrap(),
                )
            }
        });
        (Client::new(service, "affinode"), asked)
    }

    fn offloaded() -> ListResponse {
        let announcement = Announcement {
            pod_namespace: "ml".into(),
            pod: "notebook".into(),
            pod_uid: "1234".into(),
            ..Announcement::default()
        };
        let container = Container {
            announcement: Some(announcement).into(),
            state: State::Offloaded.as_str().into(),
            since_unix_ms: 1_700_000_000_500,
            ..Container::default()
        };
        ListResponse { containers: vec![container], ..ListResponse::default() }
    }

    #[tokio::test]
    async fn status_patch_is_written_once() {
        let (client, asked) = server(StatusCode::OK);
        let mut pods = Pods::new(client);
        pods.show(&offloaded()).await;
        pods.show(&offloaded()).await;
        let asked = asked.lock().unwrap();
        let [(line, patch)] = &asked[..] else { panic!("{asked:?}") };
        assert_eq!(line, "PATCH /api/v1/namespaces/ml/pods/notebook/status");
        assert_eq!(
            patch["metadata"]["uid"], "1234",
            "the patch applies to no other pod of that name"
        );
        assert_eq!(patch["metadata"]["labels"][LABEL], "Offloaded");
        let condition = &patch["status"]["conditions"][0];
        assert_eq!(
            (&condition["type"], &condition["status"]),
            (&CONDITION.into(), &"False".into())
        );
        assert_eq!(condition["lastTransitionTime"], "2023-11-14T22:13:20Z");
        assert!(patch["spec"].is_null());
    }

    #[tokio::test]
    async fn failed_write_is_repeated_missing_pod_is_not() {
        for (status, times) in [
            (StatusCode::NOT_FOUND, 1),
            (StatusCode::CONFLICT, 1),
            (StatusCode::INTERNAL_SERVER_ERROR, 2),
            (StatusCode::FORBIDDEN, 2),
        ] {
            let (client, asked) = server(status);
            let mut pods = Pods::new(client);
            pods.show(&offloaded()).await;
            pods.show(&offloaded()).await;
            assert_eq!(asked.lock().unwrap().len(), times, "{status}");
        }
    }
}
