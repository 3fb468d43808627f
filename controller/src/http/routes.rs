//! Handlers of the HTTP paths. `config/openapi.yaml` describes the paths.

use std::{sync::Arc, time::Duration};

use affinode_core::{Key, Request as Wanted};
use affinode_proto::{api::control::Event, event::EventKind, reason::Reason};
use http_body_util::{BodyExt, Limited};
use hyper::{
    HeaderMap, Method, Request, StatusCode,
    body::Incoming,
    header::{self, HeaderValue},
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{
    AppState, assets,
    guard::{AccessRule, Denied, DenyReason, Principal},
    query,
    reply::{self, Reply},
    socket::HttpPeer,
    stream::{self, StreamGuard, StreamQuery},
};
use crate::{
    clock, error_chain,
    history::StoreError,
    metrics::{DeliveryCounts, classic},
    schema,
};

/// Prefix of the HTTP paths for actions on one container.
const CONTAINERS: &str = "/api/v1/containers/";
/// Prefix of the HTTP paths that turn automatic offloads on or off.
const AUTO_OFFLOAD: &str = "/api/v1/auto-offload/";
/// Response header of event streams. The controller sets it if it accepts no actions over HTTP.
const ACTIONS: &str = "affinode-actions";
/// Maximum size of the body of an action request in bytes. The body is not used.
const BODY_BYTES: usize = 4 << 10;
/// Time limit for reading a request's body.
const BODY_TIME: Duration = Duration::from_secs(5);
/// Time limit for creating a response. It does not apply to moves of containers.
const ANSWER_TIME: Duration = Duration::from_secs(10);
/// Length of a report's time range in milliseconds, if the query has no `since_ms`.
const DAY_MS: i64 = 24 * 3600 * 1000;

/// Handles an HTTP request: checks whether it is admitted, and runs its handler.
pub async fn answer(site: &Arc<AppState>, peer: &HttpPeer, request: Request<Incoming>) -> Reply {
    let caller = match check(site, peer, &request).await {
        Ok(caller) => caller,
        Err(refusal) => return refuse(site, peer, &request, refusal),
    };
    let path = request.uri().path().to_owned();
    let get = request.method() == Method::GET;
    if let Some(reply) = assets::find(&path, request.headers()) {
        return if get { reply } else { only("GET") };
    }
    match path.as_str() {
        _ if path.starts_with(CONTAINERS) => container(site, &caller, request, &path).await,
        _ if path.starts_with(AUTO_OFFLOAD) => auto_offload(site, &caller, request, &path).await,
        "/healthz" | "/metrics" | "/api/v1/node" | "/api/v1/report" | "/api/v1/history"
        | "/api/v1/events" | "/api/v1/calls"
            if !get =>
        {
            only("GET")
        }
        "/api/v1/events" => events(site, caller, &request).await,
        "/api/v1/calls" => calls(site, caller, &request).await,
        _ => match tokio::time::timeout(ANSWER_TIME, look(site, &request, &path)).await {
            Ok(reply) => reply,
            Err(_) => {
                reply::error(StatusCode::SERVICE_UNAVAILABLE, "the controller is busy; try again")
            }
        },
    }
}

/// Sender of an admitted HTTP request.
struct HttpCaller {
    /// User and address of the sender, as far as they are known, for events and the log.
    who: String,
    admitted: Option<Principal>,
}

/// Returns the right that a request needs. The path of the right has no variable part. It begins
/// with /affinode instead of /api, because every user of a cluster may get /api/* (ClusterRole
/// system:discovery). An unknown request needs a right that no role grants by name.
#[must_use]
pub fn access(method: &Method, path: &str) -> AccessRule {
    const RIGHTS: [&str; 7] = [
        "/affinode/v1/node",
        "/affinode/v1/report",
        "/affinode/v1/history",
        "/affinode/v1/events",
        "/affinode/v1/calls",
        "/affinode/v1/auto-offload/on",
        "/affinode/v1/auto-offload/off",
    ];
    let verb = if method == Method::GET { "get" } else { "post" };
    let action = path.strip_prefix(CONTAINERS).and_then(|rest| rest.split('/').nth(1));
    let path = match action {
        Some("offload") => "/affinode/v1/containers/offload",
        Some("restore") => "/affinode/v1/containers/restore",
        Some("pin") => "/affinode/v1/containers/pin",
        Some("unpin") => "/affinode/v1/containers/unpin",
        // Other exporters use the path `/metrics` too, and ClusterRoles for Prometheus grant it.
        _ if path == "/metrics" => "/metrics",
        _ => {
            let below = path.strip_prefix("/api");
            let known = |right: &&str| below.is_some() && right.strip_prefix("/affinode") == below;
            RIGHTS.into_iter().find(known).unwrap_or("/affinode/v1/other")
        }
    };
    AccessRule { verb, path }
}

/// Returns whether requests for a path need a right. The dashboard's own files need none, because
/// they contain no secret. The page asks its user for the token.
#[must_use]
pub fn needs_right(path: &str) -> bool {
    path.starts_with("/api/") || path == "/metrics"
}

async fn check(
    site: &AppState,
    peer: &HttpPeer,
    request: &Request<Incoming>,
) -> Result<HttpCaller, Denied> {
    site.guard.place(request.headers())?;
    let path = request.uri().path();
    if !needs_right(path) {
        return Ok(HttpCaller { who: peer.to_string(), admitted: None });
    }
    let admitted = site.guard.admit(request.headers(), access(request.method(), path)).await?;
    let who = match &admitted.user {
        Some(user) => format!("{user} from {peer}"),
        None => peer.to_string(),
    };
    Ok(HttpCaller { who, admitted: Some(admitted) })
}

fn refuse(site: &AppState, peer: &HttpPeer, request: &Request<Incoming>, refusal: Denied) -> Reply {
    let Denied { kind, why, detail } = refusal;
    let path = shown(request.uri().path());
    let what = if detail.is_empty() { &why } else { &detail };
    site.refused(kind, format!("client {peer}: {} {path} was refused: {what}", request.method()));
    let status = match kind {
        DenyReason::Host => StatusCode::MISDIRECTED_REQUEST,
        DenyReason::Origin | DenyReason::Forbidden => StatusCode::FORBIDDEN,
        DenyReason::Token => StatusCode::UNAUTHORIZED,
        DenyReason::Review | DenyReason::Busy => StatusCode::SERVICE_UNAVAILABLE,
        DenyReason::Malformed => StatusCode::BAD_REQUEST,
    };
    let mut reply = reply::error(status, &why);
    if kind == DenyReason::Token {
        let bearer = HeaderValue::from_static("Bearer");
        reply.headers_mut().insert(header::WWW_AUTHENTICATE, bearer);
    }
    reply
}

fn only(method: &'static str) -> Reply {
    let mut reply =
        reply::error(StatusCode::METHOD_NOT_ALLOWED, "method not allowed for this path");
    reply.headers_mut().insert(header::ALLOW, HeaderValue::from_static(method));
    reply
}

/// Returns the path in a form that can be logged: printable and short.
fn shown(path: &str) -> String {
    path.chars().filter(|c| c.is_ascii_graphic()).take(80).collect()
}

async fn look(site: &Arc<AppState>, request: &Request<Incoming>, path: &str) -> Reply {
    let query = request.uri().query();
    match path {
        // This path needs no token, so its requests must cost the actor little.
        "/healthz" => match site.door.ping().await {
            Ok(()) => reply::text(StatusCode::OK, "ok\n"),
            Err(ending) => reply::text(StatusCode::SERVICE_UNAVAILABLE, format!("{ending}\n")),
        },
        "/metrics" => match site.door.list().await {
            Ok(list) => metrics(site, &schema::Node::from(list), request.headers()),
            Err(ending) => reply::error(StatusCode::SERVICE_UNAVAILABLE, &ending.to_string()),
        },
        "/api/v1/node" => match site.door.list().await {
            Ok(list) => reply::json(StatusCode::OK, &schema::Node::from(list)),
            Err(ending) => reply::error(StatusCode::SERVICE_UNAVAILABLE, &ending.to_string()),
        },
        "/api/v1/report" | "/api/v1/history" => past(site, query, path).await,
        _ => reply::error(StatusCode::NOT_FOUND, "no such path"),
    }
}

fn metrics(site: &AppState, node: &schema::Node, headers: &HeaderMap) -> Reply {
    let counts = DeliveryCounts {
        watchers: site.hub.watchers(),
        missed: site.hub.missed(),
        history_dropped: site.history.as_ref().map_or(0, |history| history.dropped()),
    };
    let accept =
        headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    let (kind, text) = match site.metrics.text(node, counts) {
        Ok(text) if accept.contains("application/openmetrics-text") => {
            ("application/openmetrics-text; version=1.0.0; charset=utf-8", text)
        }
        Ok(text) => ("text/plain; version=0.0.4; charset=utf-8", classic(&text)),
        Err(error) => {
            return reply::error(
                StatusCode::INTERNAL_SERVER_ERROR,
                &format!("cannot write metrics: {error}"),
            );
        }
    };
    reply::with(StatusCode::OK, kind, http_body_util::Full::new(text.into()))
}

pub(super) async fn past(site: &Arc<AppState>, query: Option<&str>, path: &str) -> Reply {
    let Some(history) = site.history.clone() else {
        return reply::error(
            StatusCode::NOT_FOUND,
            "there is no history: check history.dir in the configuration, and see the controller's log",
        );
    };
    let times = query::number(query, "since_ms")
        .and_then(|since_ms| Ok((since_ms, query::number(query, "until_ms")?)));
    let (since_ms, until_ms) = match times {
        Ok(times) => times,
        Err(why) => return reply::error(StatusCode::BAD_REQUEST, &why),
    };
    let until_ms = until_ms.unwrap_or_else(clock::unix_ms);
    let since_ms = since_ms.unwrap_or(until_ms - DAY_MS);
    let key = query::value(query, "key").map(ToOwned::to_owned);
    let report = (path == "/api/v1/report").then(|| site.report.clone());
    let Ok(permit) = Arc::clone(&site.reads).acquire_owned().await else {
        return reply::error(StatusCode::SERVICE_UNAVAILABLE, "the controller is shutting down");
    };
    history.opened().await;
    // The disk may be slow, and this thread serves other requests. If the client disconnects
    // meanwhile, the permit is held until the read has ended.
    let read = tokio::task::spawn_blocking(move || {
        let written = match report {
            Some(prices) => {
                let report = history.report(since_ms, until_ms)?;
                reply::large_json(&report.priced(&prices), permit)
            }
            None => {
                let spans = history.spans(since_ms, until_ms, key.as_deref())?;
                reply::large_json(&SpanQuery { spans }, permit)
            }
        };
        written.map_err(StoreError::Record)
    });
    match read.await {
        Ok(Ok(reply)) => reply,
        Ok(Err(error)) => reply::error(status_of(&error), &error_chain::chain(&error)),
        Err(_) => reply::error(StatusCode::INTERNAL_SERVER_ERROR, "cannot read the history"),
    }
}

fn status_of(error: &StoreError) -> StatusCode {
    match error {
        StoreError::Opening | StoreError::Closed => StatusCode::SERVICE_UNAVAILABLE,
        StoreError::NotOpen => StatusCode::NOT_FOUND,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

/// Response to `/api/v1/history` with the requested spans, which is sent as JSON.
#[derive(serde::Serialize)]
struct SpanQuery {
    spans: Vec<crate::history::StateSpan>,
}

/// Returns a permit for a stream. Returns `None` and records a refusal if all permits are in use.
fn place_among(
    streams: &Arc<Semaphore>,
    site: &AppState,
    caller: &HttpCaller,
) -> Option<OwnedSemaphorePermit> {
    let permit = Arc::clone(streams).try_acquire_owned().ok();
    if permit.is_none() {
        site.refused(
            DenyReason::Busy,
            format!("client {}: refused, because too many streams are open", caller.who),
        );
    }
    permit
}

fn too_many_streams() -> Reply {
    let mut reply =
        reply::error(StatusCode::SERVICE_UNAVAILABLE, "too many streams are open; close one");
    reply.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("5"));
    reply
}

/// Handles `/api/v1/calls?container={key}`: opens a stream of CUDA calls.
async fn calls(site: &Arc<AppState>, caller: HttpCaller, request: &Request<Incoming>) -> Reply {
    let key = query::value(request.uri().query(), "container").map(Key::parse).transpose();
    let Ok(scope) = key else {
        let why = "invalid container key: expected 32 hex digits, as in /api/v1/node";
        return reply::error(StatusCode::BAD_REQUEST, why);
    };
    // Only existing containers are watched. Otherwise clients could fill memory with unknown keys.
    let known = match site.door.list().await {
        Ok(list) => schema::Node::from(list).containers,
        Err(ending) => return reply::error(StatusCode::SERVICE_UNAVAILABLE, &ending.to_string()),
    };
    if scope.as_ref().is_some_and(|key| known.iter().all(|c| c.key != key.as_str())) {
        return reply::error(StatusCode::NOT_FOUND, "no such container");
    }
    let Some(permit) = place_among(&site.call_streams, site, &caller) else {
        return too_many_streams();
    };
    let body =
        super::call_trace::begin(site, scope, StreamGuard { permit, admitted: caller.admitted });
    reply::with(StatusCode::OK, "text/event-stream", body)
}

async fn events(site: &Arc<AppState>, caller: HttpCaller, request: &Request<Incoming>) -> Reply {
    let Some(permit) = place_among(&site.streams, site, &caller) else {
        return too_many_streams();
    };
    let Ok(list) = site.door.list().await else {
        return reply::error(StatusCode::SERVICE_UNAVAILABLE, "the controller is shutting down");
    };
    let node = query::value(request.uri().query(), "watch") == Some("node");
    let id = request.headers().get("last-event-id").and_then(|id| id.to_str().ok());
    let started = list.started_unix_ms;
    let wish = StreamQuery::new(id, started, site.door.events().last(), node);
    let hold = StreamGuard { permit, admitted: caller.admitted };
    let body = stream::begin(site, wish, started, hold);
    let mut reply = reply::with(StatusCode::OK, "text/event-stream", body);
    if site.only_shows.is_some() {
        // This header makes the page hide its buttons.
        reply.headers_mut().insert(ACTIONS, HeaderValue::from_static("off"));
    }
    reply
}

/// Action on a container that an HTTP request asks for.
#[derive(Clone, Copy)]
enum RequestedMove {
    Move(Wanted, &'static str),
    Pin(bool),
}

/// Handles `/api/v1/auto-offload/{on|off}`: turns automatic offloads on or off.
async fn auto_offload(
    site: &Arc<AppState>,
    caller: &HttpCaller,
    request: Request<Incoming>,
    path: &str,
) -> Reply {
    let on = match path.trim_start_matches(AUTO_OFFLOAD) {
        "on" => true,
        "off" => false,
        _ => return reply::error(StatusCode::NOT_FOUND, "no such path"),
    };
    if let Err(reply) = may_act(site, caller, request).await {
        return reply;
    }
    match site.door.auto_offload(on, caller.who.clone()).await {
        Ok(Ok(_)) => reply::json(StatusCode::OK, &serde_json::json!({ "auto_offload": on })),
        Ok(Err(error)) => {
            reply::error(StatusCode::INTERNAL_SERVER_ERROR, &error_chain::chain(&error))
        }
        Err(ending) => reply::error(StatusCode::SERVICE_UNAVAILABLE, &ending.to_string()),
    }
}

/// Checks that a request may change something, and reads its body, which is not used. Returns `Err`
/// with the response if the request is refused.
async fn may_act(
    site: &AppState,
    caller: &HttpCaller,
    request: Request<Incoming>,
) -> Result<(), Reply> {
    if request.method() != Method::POST {
        return Err(only("POST"));
    }
    if let Some(why) = site.only_shows {
        return Err(reply::error(StatusCode::FORBIDDEN, why));
    }
    let body = Limited::new(request.into_body(), BODY_BYTES).collect();
    match tokio::time::timeout(BODY_TIME, body).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(_)) => {
            site.refused(
                DenyReason::Malformed,
                format!(
                    "client {}: refused, because the body of the request is too large",
                    caller.who
                ),
            );
            Err(reply::error(
                StatusCode::PAYLOAD_TOO_LARGE,
                "the body of the request is too large; send this request without a body",
            ))
        }
        Err(_) => Err(reply::error(
            StatusCode::REQUEST_TIMEOUT,
            "the body of the request did not arrive in time",
        )),
    }
}

/// Handles `/api/v1/containers/{key}/{offload|restore|pin|unpin}`: executes an action on a
/// container.
async fn container(
    site: &Arc<AppState>,
    caller: &HttpCaller,
    request: Request<Incoming>,
    path: &str,
) -> Reply {
    let mut parts = path.trim_start_matches(CONTAINERS).split('/');
    let (key, what, more) = (parts.next(), parts.next(), parts.next());
    let wanted = match (what, more) {
        (Some("offload"), None) => RequestedMove::Move(Wanted::Offload, "offload"),
        (Some("restore"), None) => RequestedMove::Move(Wanted::Restore, "restore"),
        (Some("pin"), None) => RequestedMove::Pin(true),
        (Some("unpin"), None) => RequestedMove::Pin(false),
        _ => return reply::error(StatusCode::NOT_FOUND, "no such path"),
    };
    if let Err(reply) = may_act(site, caller, request).await {
        return reply;
    }
    let Ok(key) = Key::parse(key.unwrap_or_default()) else {
        return reply::error(
            StatusCode::NOT_FOUND,
            "invalid container key: expected 32 hex digits, as in /api/v1/node",
        );
    };
    let Ok(_permit) = Arc::clone(&site.actions).try_acquire_owned() else {
        site.refused(
            DenyReason::Busy,
            format!("client {}: refused, because too many moves are in progress", caller.who),
        );
        return reply::error(
            StatusCode::TOO_MANY_REQUESTS,
            "too many moves are in progress; wait for one to end",
        );
    };
    act(site, &caller.who, &key, wanted).await
}

async fn act(site: &AppState, who: &str, key: &Key, asked: RequestedMove) -> Reply {
    let node = match site.door.list().await {
        Ok(list) => schema::Node::from(list),
        Err(ending) => return reply::error(StatusCode::SERVICE_UNAVAILABLE, &ending.to_string()),
    };
    let Some(known) = node.containers.into_iter().find(|c| c.key == key.as_str()) else {
        return reply::error(
            StatusCode::NOT_FOUND,
            "no container has this key; the container may have ended",
        );
    };
    let answer = match asked {
        RequestedMove::Move(wanted, word) => {
            site.door.audit(Event {
                kind: EventKind::Request.to_string(),
                key: key.to_string(),
                container: known.name,
                reason: Reason::Requested.to_string(),
                text: format!("{word} was requested by {who}"),
                ..Event::default()
            });
            site.door.act(key.to_string(), wanted).await
        }
        RequestedMove::Pin(pinned) => site.door.pin(key.to_string(), pinned, who.to_owned()).await,
    };
    match answer {
        Ok(response) => {
            let status = if response.done { StatusCode::OK } else { StatusCode::CONFLICT };
            reply::json(status, &schema::Action::from(response))
        }
        Err(ending) => reply::error(StatusCode::SERVICE_UNAVAILABLE, &ending.to_string()),
    }
}
