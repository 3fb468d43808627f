//! The client of the API server, with a time limit for each request. Without it, a request on a
//! connection whose peer has vanished would wait until the kernel gives the connection up, which
//! takes up to 15 min.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use http_body_util::{BodyExt, Full, combinators::UnsyncBoxBody};
use hyper::{Request, Response, body::Bytes};
use kube::{
    Client, Config,
    client::{Body, ClientBuilder},
};
use tokio::time::timeout;
use tower::{BoxError, Layer, Service};

/// Time limit for a request and its reply. Of a watch, it limits only the time until the reply
/// begins, because the watcher limits the time between two events.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(15);

/// Returns a client of the API server, with the pod's service account or with KUBECONFIG.
///
/// # Errors
/// If there is neither a service account nor a kubeconfig, or one that cannot be used.
pub async fn connect() -> kube::Result<Client> {
    let config = Config::infer().await.map_err(kube::Error::InferConfig)?;
    Ok(ClientBuilder::try_from(config)?.with_layer(&TimeLimit).build())
}

/// The API server did not reply in time.
#[derive(Debug, thiserror::Error)]
#[error("no reply from the API server within {REQUEST_TIMEOUT:?}")]
struct LateError;

/// Adds the time limit to a service that sends requests to the API server.
struct TimeLimit;

impl<S> Layer<S> for TimeLimit {
    type Service = TimedService<S>;

    fn layer(&self, inner: S) -> TimedService<S> {
        TimedService { inner }
    }
}

/// A service that sends requests to the API server with a time limit.
struct TimedService<S> {
    inner: S,
}

type ApiReply = Response<UnsyncBoxBody<Bytes, BoxError>>;

impl<S, B> Service<Request<Body>> for TimedService<S>
where
    S: Service<Request<Body>, Response = Response<B>, Error: Into<BoxError>>,
    S::Future: Send + 'static,
    B: hyper::body::Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    type Response = ApiReply;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<ApiReply, BoxError>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let is_watch = is_watch(&request);
        let reply = self.inner.call(request);
        Box::pin(async move {
            let whole = async {
                let (head, body) = reply.await.map_err(Into::into)?.into_parts();
                let body = body.map_err(Into::into);
                if is_watch {
                    return Ok(Response::from_parts(head, body.boxed_unsync()));
                }
                let body = Full::from(body.collect().await?.to_bytes());
                let body = body.map_err(|never| match never {}).boxed_unsync();
                Ok(Response::from_parts(head, body))
            };
            timeout(REQUEST_TIMEOUT, whole).await.map_err(|_| LateError)?
        })
    }
}

fn is_watch(request: &Request<Body>) -> bool {
    let query = request.uri().query().unwrap_or_default();
    query.split('&').any(|parameter| parameter == "watch=true")
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use futures_util::{StreamExt, TryStreamExt, stream};
    use http_body_util::StreamBody;
    use hyper::body::Frame;
    use k8s_openapi::api::core::v1::Node;
    use kube::{
        Api,
        api::{WatchEvent, WatchParams},
    };
    use serde_json::json;
    use tokio::time::{Instant, sleep};

    use super::*;

    /// Returns a client of an API server whose replies begin after one time, and end after another.
    fn server(begins: Duration, ends: Duration) -> Client {
        let service = tower::service_fn(move |request: Request<Body>| async move {
            sleep(begins).await;
            let node = json!({ "kind": "Node", "apiVersion": "v1", "metadata": { "name": "one" } });
            let text = match is_watch(&request) {
                true => format!("{}\n", json!({ "type": "ADDED", "object": node })),
                false => node.to_string(),
            };
            let text = stream::once(async move {
                sleep(ends.saturating_sub(begins)).await;
                Ok::<_, Infallible>(Frame::data(Bytes::from(text)))
            });
            Ok::<_, Infallible>(Response::new(StreamBody::new(text)))
        });
        ClientBuilder::new(service, "affinode").with_layer(&TimeLimit).build()
    }

    async fn read(begins: Duration, ends: Duration) -> kube::Result<Node> {
        Api::<Node>::all(server(begins, ends)).get("one").await
    }

    #[tokio::test(start_paused = true)]
    async fn request_without_a_reply_fails_in_time() {
        let began = Instant::now();
        let late = 2 * REQUEST_TIMEOUT;
        for begins in [Duration::ZERO, late] {
            let error = read(begins, late).await.unwrap_err();
            assert!(
                error.to_string().contains("no reply from the API server within 15s"),
                "{error}"
            );
        }
        assert_eq!(began.elapsed(), 2 * REQUEST_TIMEOUT);
    }

    #[tokio::test(start_paused = true)]
    async fn slow_reply_within_the_limit_arrives() {
        let node = read(REQUEST_TIMEOUT / 3, REQUEST_TIMEOUT / 2).await.unwrap();
        assert_eq!(node.metadata.name.as_deref(), Some("one"));
    }

    #[tokio::test(start_paused = true)]
    async fn only_the_begin_of_a_watch_is_limited() {
        let params = WatchParams::default();
        let late = 2 * REQUEST_TIMEOUT;
        let watched = async |begins| -> kube::Result<Vec<WatchEvent<Node>>> {
            let api = Api::<Node>::all(server(begins, late));
            api.watch(&params, "0").await?.boxed().try_collect().await
        };
        assert_eq!(watched(Duration::ZERO).await.unwrap().len(), 1);
        assert!(watched(late).await.is_err());
    }
}
