//! A simulated API server in memory, for the webhook's tests. It stores objects by path and rejects
//! a write that is based on an old version. It also serves lists, and watches that report no
//! change.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    sync::{Arc, Mutex, MutexGuard},
};

use futures_util::stream;
use http_body_util::{BodyExt, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Bytes, Frame},
};
use kube::{Client, client::Body};
use serde_json::{Value, json};

/// Simulated API server with its objects. Clones share the objects.
#[derive(Clone, Default)]
pub struct Fake(Arc<Mutex<Inner>>);

#[derive(Default)]
struct Inner {
    objects: BTreeMap<String, Value>,
    version: u64,
    refused: usize,
    writes: usize,
}

type Answer = Response<UnsyncBoxBody<Bytes, Infallible>>;

impl Fake {
    /// Returns a client of this server, in the namespace `affinode`.
    pub fn client(&self) -> Client {
        let fake = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let fake = fake.clone();
            async move { Ok::<_, Infallible>(fake.answer(request).await) }
        });
        Client::new(service, "affinode")
    }

    /// Stores an object, as another client of the API server would.
    pub fn put(&self, path: &str, object: Value) {
        let mut inner = self.lock();
        let stamped = inner.stamp(object);
        inner.objects.insert(path.to_owned(), stamped);
    }

    /// Returns the stored object at this path. If there is none, returns a JSON null.
    pub fn get(&self, path: &str) -> Value {
        self.lock().objects.get(path).cloned().unwrap_or(Value::Null)
    }

    /// Returns the number of accepted writes and the number of rejected writes.
    pub fn writes(&self) -> (usize, usize) {
        let inner = self.lock();
        (inner.writes, inner.refused)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap()
    }

    async fn answer(&self, request: Request<Body>) -> Answer {
        let (head, body) = request.into_parts();
        let body = body.collect().await.map(|b| b.to_bytes()).unwrap_or_default();
        // Other requests may run here, so that concurrent requests interleave in any order.
        tokio::task::yield_now().await;
        let query = head.uri.query().unwrap_or_default();
        if query.contains("watch=true") {
            let silence = stream::pending::<Result<Frame<Bytes>, Infallible>>();
            return Response::new(StreamBody::new(silence).boxed_unsync());
        }
        let sent = serde_json::from_slice(&body).unwrap_or(Value::Null);
        let (status, answer) = self.lock().answer(&head.method, head.uri.path(), sent);
        let mut response = Response::new(Full::from(answer.to_string()).boxed_unsync());
        *response.status_mut() = status;
        response
    }
}

impl Inner {
    fn stamp(&mut self, mut object: Value) -> Value {
        self.version += 1;
        object["metadata"]["resourceVersion"] = self.version.to_string().into();
        object
    }

    fn answer(&mut self, method: &Method, path: &str, sent: Value) -> (StatusCode, Value) {
        let name = sent["metadata"]["name"].as_str().unwrap_or_default();
        let created = format!("{path}/{name}");
        match *method {
            Method::GET => match self.objects.get(path) {
                Some(object) => (StatusCode::OK, object.clone()),
                None if path.ends_with("runtimeclasses") => (StatusCode::OK, self.list(path)),
                None => failure(StatusCode::NOT_FOUND, "NotFound"),
            },
            Method::POST if self.objects.contains_key(&created) => {
                self.refused += 1;
                failure(StatusCode::CONFLICT, "AlreadyExists")
            }
            Method::POST => self.write(&created, sent),
            Method::PUT => match self.objects.get(path) {
                None => failure(StatusCode::NOT_FOUND, "NotFound"),
                Some(held)
                    if held["metadata"]["resourceVersion"]
                        != sent["metadata"]["resourceVersion"] =>
                {
                    self.refused += 1;
                    failure(StatusCode::CONFLICT, "Conflict")
                }
                Some(_) => self.write(path, sent),
            },
            _ => failure(StatusCode::METHOD_NOT_ALLOWED, "MethodNotAllowed"),
        }
    }

    fn write(&mut self, path: &str, sent: Value) -> (StatusCode, Value) {
        self.writes += 1;
        let object = self.stamp(sent);
        self.objects.insert(path.to_owned(), object.clone());
        (StatusCode::OK, object)
    }

    fn list(&self, path: &str) -> Value {
        let below = format!("{path}/");
        let items: Vec<&Value> =
            self.objects.iter().filter(|(p, _)| p.starts_with(&below)).map(|(_, o)| o).collect();
        json!({
            "apiVersion": "v1", "kind": "List",
            "metadata": { "resourceVersion": self.version.to_string() }, "items": items,
        })
    }
}

fn failure(status: StatusCode, reason: &str) -> (StatusCode, Value) {
    let answer = json!({
        "apiVersion": "v1", "kind": "Status", "status": "Failure",
        "reason": reason, "message": reason, "code": status.as_u16(),
    });
    (status, answer)
}

/// Path of the MutatingWebhookConfiguration.
pub const CONFIGURATION: &str =
    "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/affinode-webhook";
/// Path of the Secret with the certificate.
pub const SECRET: &str = "/api/v1/namespaces/affinode/secrets/affinode-webhook-tls";

/// Returns a MutatingWebhookConfiguration with two webhooks and no authority.
pub fn configuration() -> Value {
    let webhook = |name: &str| {
        json!({
            "name": name, "sideEffects": "None", "admissionReviewVersions": ["v1"],
            "clientConfig": { "service": { "name": "affinode-webhook", "namespace": "affinode" } },
        })
    };
    json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingWebhookConfiguration",
        "metadata": { "name": "affinode-webhook" },
        "webhooks": [webhook("a.affinode.io"), webhook("b.affinode.io")],
    })
}
