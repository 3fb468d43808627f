use std::{
    collections::{BTreeMap, BTreeSet},
    convert::Infallible,
    sync::{Arc, Mutex, MutexGuard},
};

use http_body_util::BodyExt;
use hyper::{Request, Response};
use kube::client::Body;
use serde_json::{Value, json};

use super::*;
use crate::node::node_labels::ANNOTATIONS;

const OURS: &str = "system/affinode";
const SET: &str = "/apis/apps/v1/namespaces/system/daemonsets/affinode-node";

type StateAction = Box<dyn FnOnce(&mut FakeState) -> Option<u16> + Send>;

/// A simulated API server whose nodes have agents. Clones share the objects.
#[derive(Clone, Default)]
struct FakeCluster(Arc<Mutex<FakeState>>);

#[derive(Default)]
struct FakeState {
    nodes: BTreeMap<String, Value>,
    /// Nodes whose agents refuse, and the reason.
    refusals: BTreeMap<String, String>,
    has_agents: bool,
    /// Whether the pods of the agents do not end after the deletion of their DaemonSet.
    has_stuck_pods: bool,
    /// Nodes from which Affinode was removed.
    removed: BTreeSet<String>,
    /// Actions at the next request that begins with this text. An action can return the HTTP status
    /// of a failure.
    actions: Vec<(String, StateAction)>,
}

impl FakeCluster {
    fn with(nodes: &[&str]) -> FakeCluster {
        let cluster = FakeCluster::default();
        cluster.lock().has_agents = true;
        nodes.iter().for_each(|name| cluster.lock().join(name));
        cluster
    }

    fn lock(&self) -> MutexGuard<'_, FakeState> {
        self.0.lock().unwrap()
    }

    /// Runs this action when the API server receives the next request that begins with this text.
    fn at(
        &self,
        request: &str,
        action: impl FnOnce(&mut FakeState) -> Option<u16> + Send + 'static,
    ) {
        self.lock().actions.push((request.to_owned(), Box::new(action)));
    }

    fn annotation(&self, node: &str, name: &str) -> Value {
        self.lock().nodes[node]["metadata"]["annotations"][name].clone()
    }

    async fn retire(&self) -> Result<(), RetireError> {
        let cluster = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let cluster = cluster.clone();
            async move {
                let (head, body) = request.into_parts();
                let body = body.collect().await.unwrap().to_bytes();
                let sent = serde_json::from_slice(&body).unwrap_or(Value::Null);
                let line = format!("{} {}", head.method, head.uri.path());
                let (status, answer) = cluster.lock().answer(&line, &sent);
                let answer = Body::from(answer.to_string().into_bytes());
                Ok::<_, Infallible>(Response::builder().status(status).body(answer).unwrap())
            }
        });
        let options = RetireOptions {
            installation: OURS.into(),
            daemon_set: "affinode-node".into(),
            namespace: "system".into(),
            timeout: Duration::from_secs(60),
        };
        remove_all(Client::new(service, "system"), &options).await
    }
}

impl FakeState {
    fn join(&mut self, name: &str) {
        let annotations = json!({ AGENT: OURS, STATE: "served", "other": "stays" });
        let node = json!({
            "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1",
            "metadata": { "name": name, "annotations": annotations },
        });
        self.nodes.insert(name.to_owned(), node);
    }

    fn answer(&mut self, line: &str, sent: &Value) -> (u16, Value) {
        if let Some(at) = self.actions.iter().position(|(text, _)| line.starts_with(text)) {
            let (_, action) = self.actions.remove(at);
            if let Some(status) = action(self) {
                return failure(status);
            }
        }
        let (method, path) = line.split_once(' ').unwrap();
        match (method, path) {
            ("GET", "/api/v1/nodes") => (200, list(self.nodes.values().cloned().collect())),
            ("GET", SET) if self.has_agents || self.has_stuck_pods => {
                let ends = (!self.has_agents).then_some("2026-11-27T12:00:00Z");
                let metadata =
                    json!({ "name": "affinode-node", "uid": "set", "deletionTimestamp": ends });
                (200, json!({ "kind": "DaemonSet", "apiVersion": "apps/v1", "metadata": metadata }))
            }
            ("DELETE", SET) if self.has_agents => {
                self.has_agents = false;
                (200, json!({ "kind": "Status", "apiVersion": "v1", "status": "Success" }))
            }
            ("GET", "/api/v1/namespaces/system/pods") if self.has_stuck_pods => {
                let owner = json!({
                    "apiVersion": "apps/v1", "kind": "DaemonSet", "name": "affinode-node",
                    "uid": "set",
                });
                (200, list(vec![json!({ "metadata": { "ownerReferences": [owner] } })]))
            }
            ("GET", "/api/v1/namespaces/system/pods" | "/api/v1/pods") => (200, list(Vec::new())),
            ("PATCH", _) => self.patch(path.trim_start_matches("/api/v1/nodes/"), sent),
            _ => failure(404),
        }
    }

    /// Changes a node. Its agent, if there is one, follows the request at once.
    fn patch(&mut self, name: &str, sent: &Value) -> (u16, Value) {
        let Some(node) = self.nodes.get_mut(name) else { return failure(404) };
        json_patch::merge(node, sent);
        let annotations = &mut node["metadata"]["annotations"];
        let state = match annotations[RETIRE].as_str() {
            Some(asked) if asked == may_go(OURS) => READY,
            Some(asked) if asked == must_go(OURS) => RETIRED,
            _ => "served",
        };
        if self.has_agents {
            if state == RETIRED {
                self.removed.insert(name.to_owned());
            }
            let refused = self.refusals.get(name).filter(|_| state != "served");
            annotations[STATE] =
                refused.map_or(state.into(), |why| format!("{NOT_RETIRED}{why}").into());
        }
        (200, node.clone())
    }
}

fn list(items: Vec<Value>) -> Value {
    json!({
        "kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1",
        "metadata": { "resourceVersion": "1" }, "items": items,
    })
}

fn failure(code: u16) -> (u16, Value) {
    let answer = json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure",
        "reason": if code == 404 { "NotFound" } else { "Test" }, "message": "test", "code": code,
    });
    (code, answer)
}

#[tokio::test(start_paused = true)]
async fn nodes_are_retired_and_cleared() {
    let cluster = FakeCluster::with(&["a", "b"]);
    cluster.retire().await.unwrap();
    for node in ["a", "b"] {
        assert!(ANNOTATIONS.iter().all(|name| cluster.annotation(node, name).is_null()), "{node}");
        assert_eq!(cluster.annotation(node, "other"), "stays");
    }
    assert!(!cluster.lock().has_agents);
}

#[tokio::test(start_paused = true)]
async fn request_has_a_time_limit() {
    let cluster = FakeCluster::with(&["a"]);
    let limits = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&limits);
    cluster.at("DELETE", move |state| {
        seen.lock()
            .unwrap()
            .push(state.nodes["a"]["metadata"]["annotations"][RETIRE_UNTIL].clone());
        None
    });
    let before = Timestamp::now();
    cluster.retire().await.unwrap();
    let until: Timestamp = limits.lock().unwrap()[0].as_str().unwrap().parse().unwrap();
    assert!(until.duration_since(before) >= SignedDuration::from_secs(60), "{until}");
    assert!(until.duration_since(before) <= SignedDuration::from_secs(600), "{until}");
}

#[tokio::test(start_paused = true)]
async fn refusal_withdraws_the_requests() {
    let cluster = FakeCluster::with(&["a", "b"]);
    cluster.lock().refusals.insert("b".into(), "a pod runs".into());
    let error = cluster.retire().await.unwrap_err().to_string();
    assert!(error.contains("b: cannot be removed: a pod runs"), "{error}");
    for node in ["a", "b"] {
        assert!(cluster.annotation(node, RETIRE).is_null(), "{node}");
        assert!(cluster.annotation(node, RETIRE_UNTIL).is_null(), "{node}");
    }
}

#[tokio::test(start_paused = true)]
async fn failed_first_request_withdraws_the_others() {
    let cluster = FakeCluster::with(&["a", "b"]);
    cluster.at("PATCH /api/v1/nodes/b", |_| Some(500));
    let error = cluster.retire().await.unwrap_err();
    assert!(matches!(error, RetireError::Cluster(_)), "{error}");
    assert!(cluster.annotation("a", RETIRE).is_null());
    assert!(cluster.lock().has_agents);
}

#[tokio::test(start_paused = true)]
async fn deleted_node_is_no_error() {
    let cluster = FakeCluster::with(&["a", "b"]);
    cluster.at("PATCH /api/v1/nodes/b", |state| {
        state.nodes.remove("b");
        None
    });
    cluster.retire().await.unwrap();
    assert!(cluster.annotation("a", AGENT).is_null());
}

#[tokio::test(start_paused = true)]
async fn failed_cleanup_is_completed_by_a_second_run() {
    let cluster = FakeCluster::with(&["a", "b", "c"]);
    cluster.at("DELETE", |state| {
        state.actions.push(("PATCH /api/v1/nodes/b".into(), Box::new(|_| Some(500))));
        None
    });
    let error = cluster.retire().await.unwrap_err();
    assert!(matches!(error, RetireError::Cluster(_)), "{error}");
    let agent_of = |node| cluster.annotation(node, AGENT);
    assert_eq!(
        [agent_of("a"), agent_of("b"), agent_of("c")],
        [json!(null), OURS.into(), json!(null)]
    );
    cluster.retire().await.unwrap();
    assert!(agent_of("b").is_null());
}

#[tokio::test(start_paused = true)]
async fn ending_agents_are_not_asked_again() {
    let cluster = FakeCluster::with(&["a"]);
    cluster.lock().has_stuck_pods = true;
    let error = cluster.retire().await.unwrap_err();
    assert!(matches!(error, RetireError::Pods), "{error}");
    cluster.at("GET /api/v1/namespaces/system/pods", |state| {
        state.has_stuck_pods = false;
        None
    });
    cluster.retire().await.unwrap();
    assert!(cluster.annotation("a", AGENT).is_null());
}

#[tokio::test(start_paused = true)]
async fn node_that_joins_is_asked_too() {
    let cluster = FakeCluster::with(&["a"]);
    cluster.at("PATCH /api/v1/nodes/a", |state| {
        state.join("b");
        None
    });
    cluster.retire().await.unwrap();
    assert_eq!(cluster.lock().removed, ["a", "b"].map(str::to_owned).into());
    assert!(cluster.annotation("b", AGENT).is_null());
}

#[tokio::test(start_paused = true)]
async fn node_deleted_after_the_agents_is_no_error() {
    let cluster = FakeCluster::with(&["a", "b"]);
    cluster.at("DELETE", |state| {
        let remove = |state: &mut FakeState| state.nodes.remove("a").and(None);
        state.actions.push(("PATCH /api/v1/nodes/a".into(), Box::new(remove)));
        None
    });
    cluster.retire().await.unwrap();
    assert!(cluster.annotation("b", AGENT).is_null());
}

#[tokio::test(start_paused = true)]
async fn failed_deletion_of_agents_withdraws() {
    let cluster = FakeCluster::with(&["a"]);
    cluster.at("DELETE", |_| Some(500));
    cluster.retire().await.unwrap_err();
    assert!(cluster.annotation("a", RETIRE).is_null());
    assert_eq!(cluster.annotation("a", AGENT), OURS);
}
