//! The routes of the page of all nodes.
//!
//! | path | allowed for | reply |
//! | --- | --- | --- |
//! | `/`, its files | everyone | the page, which holds no secret |
//! | `/api/v1/fleet` | users with `get /affinode/v1/node` | [`super::poller`] |
//! | `/nodes/NAME/`, its files | everyone | a node's page, as every controller has it |
//! | `/nodes/NAME/api/…`, `/nodes/NAME/metrics` | users with the same right at that node | forwarded to its agent, with the user's token |

use std::{sync::Arc, time::Duration};

use affinode_controller::http::{
    AccessRule, Denied, HttpGuard, access, assets, needs_right,
    reply::{self, Reply},
};
use http_body_util::{BodyExt, combinators::UnsyncBoxBody};
use hyper::{
    HeaderMap, Method, Request, Response, StatusCode,
    body::{Bytes, Incoming},
    header::{self, HeaderName, HeaderValue},
};
use tokio_rustls::rustls::ServerConfig;

use super::{
    agent_client::{AgentRequest, ask},
    discovery::Nodes,
    poller::FleetPoller,
};
use crate::{
    error_chain,
    https::{HttpsLimits, HttpsSite, authz, tls::ServedCertificate},
};

/// The right that a user needs for the list. Each agent requires it for the figures of its node.
const LIST: AccessRule = AccessRule { verb: "get", path: "/affinode/v1/node" };
/// Prefix of the paths of a node's page and API: `/nodes/NAME/…`.
const NODES: &str = "/nodes/";
/// Time limit for the head of a node's reply. Requests that move a container have a longer limit.
const TIME: Duration = Duration::from_secs(20);
const MOVE: Duration = Duration::from_secs(620);
/// Content types that a reply of a node may have. A browser renders none of them as a page.
const KINDS: [&str; 4] =
    ["application/json", "text/event-stream", "application/openmetrics-text", "text/plain"];

type Body = UnsyncBoxBody<Bytes, hyper::Error>;

/// Serves the page and its API.
pub struct FleetServer {
    /// Checks tokens and rights at the API server.
    pub guard: HttpGuard,
    /// The certificate that this server presents.
    pub shown: Arc<ServedCertificate>,
    /// Returns the nodes of the installation.
    pub roster: Nodes,
    /// Contains the last known state of the nodes.
    pub survey: Arc<FleetPoller>,
}

impl HttpsSite for FleetServer {
    type Body = Body;
    const LIMITS: HttpsLimits = HttpsLimits { connections: 256, handshake: TIME, head: TIME };

    fn papers(&self) -> Option<Arc<ServerConfig>> {
        self.shown.fresh_config()
    }

    async fn answer(&self, request: Request<Incoming>) -> Response<Body> {
        let path = request.uri().path();
        if matches!(path, "/healthz" | "/readyz") {
            return own(reply::text(StatusCode::OK, "ok\n"));
        }
        if let Err(refusal) = self.guard.place(request.headers()) {
            return refused(&refusal);
        }
        let get = request.method() == Method::GET;
        match path.strip_prefix(NODES) {
            Some(below) => match below.split_once('/') {
                Some((name, _)) => {
                    let inside = below[name.len()..].to_owned();
                    self.node(name.to_owned(), &inside, request).await
                }
                None if get => own(moved(&format!("{path}/"))),
                None => own(only_get()),
            },
            None if !get => own(only_get()),
            None if path == "/api/v1/fleet" => match self.may(request.headers(), LIST).await {
                Ok(()) => own(reply::json(StatusCode::OK, &self.survey.listed())),
                Err(refused) => refused,
            },
            None => own(file(path, request.headers()).unwrap_or_else(nothing)),
        }
    }
}

impl FleetServer {
    /// Checks that the user has this right. If the user does not have it, returns the reply that
    /// denies the request.
    async fn may(&self, headers: &HeaderMap, access: AccessRule) -> Result<(), Response<Body>> {
        self.guard.admit(headers, access).await.map(|_| ()).map_err(|refusal| refused(&refusal))
    }

    async fn node(&self, name: String, inside: &str, request: Request<Incoming>) -> Response<Body> {
        let get = request.method() == Method::GET;
        if !needs_right(inside) {
            let page = assets::find(inside, request.headers()).unwrap_or_else(nothing);
            return own(if get { page } else { only_get() });
        }
        if !get && request.method() != Method::POST {
            return own(only_get());
        }
        if let Err(refused) = self.may(request.headers(), access(request.method(), inside)).await {
            return refused;
        }
        let Some(node) = (self.roster)().into_iter().find(|node| node.name == name) else {
            let why = "there is no such node, or no agent of this installation manages it";
            return own(reply::error(StatusCode::NOT_FOUND, why));
        };
        let path = match request.uri().query() {
            Some(query) => format!("{inside}?{query}"),
            None => inside.to_owned(),
        };
        let headers = request.headers();
        let Some(authorization) = headers.get(header::AUTHORIZATION).cloned() else {
            return own(reply::error(StatusCode::UNAUTHORIZED, "a bearer token is required"));
        };
        let kept = [header::ACCEPT, HeaderName::from_static("last-event-id")];
        let kept =
            kept.into_iter().filter_map(|name| Some((name.clone(), headers.get(name)?.clone())));
        let question = AgentRequest {
            method: request.method().clone(),
            path: &path,
            authorization,
            more: kept.collect(),
            time: if get { TIME } else { MOVE },
        };
        match ask(&node, question).await {
            Ok(answer) => passed_on(answer),
            Err(error) => {
                let why = format!("node {name}: {}", error_chain::chain(&error));
                tracing::info!("{why}");
                own(reply::error(StatusCode::BAD_GATEWAY, &why))
            }
        }
    }
}

/// Returns a node's reply with the headers of this server, so that this server's content policy
/// applies.
fn passed_on<B>(answer: Response<B>) -> Response<Body>
where
    B: hyper::body::Body<Data = Bytes, Error = hyper::Error> + Send + 'static,
{
    let (parts, body) = answer.into_parts();
    let said = parts.headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    let plain = |kind: &&str| said.is_some_and(|said| said.starts_with(*kind));
    let Some(kind) = KINDS.into_iter().find(plain) else {
        let why = "the node's reply has a content type that is not allowed";
        return own(reply::error(StatusCode::BAD_GATEWAY, why));
    };
    let mut reply = reply::with(parts.status, kind, http_body_util::Empty::new());
    for name in [header::RETRY_AFTER, header::CONTENT_TYPE] {
        if let Some(value) = parts.headers.get(&name) {
            reply.headers_mut().insert(name, value.clone());
        }
    }
    reply.map(|_| body.boxed_unsync())
}

macro_rules! files {
    ($($path:literal: $kind:literal, $file:literal;)*) => {
        const FILES: &[(&str, &str, &str)] = &[$(($path, $kind, include_str!(concat!("page/", $file)))),*];
    };
}

files! {
    "/": "text/html; charset=utf-8", "index.html";
    "/fleet.css": "text/css; charset=utf-8", "fleet.css";
    "/fleet.js": "text/javascript; charset=utf-8", "fleet.js";
}
/// Files that the page of all nodes shares with the page of a node.
const SHARED: [&str; 5] = ["/style.css", "/icon.svg", "/format.js", "/stream.js", "/theme.js"];

fn file(path: &str, headers: &HeaderMap) -> Option<Reply> {
    if SHARED.contains(&path) {
        return assets::find(path, headers);
    }
    let (_, kind, text) = FILES.iter().find(|(known, ..)| *known == path)?;
    let mut reply = reply::with(StatusCode::OK, kind, http_body_util::Full::from(*text));
    reply.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    Some(reply)
}

fn own(reply: Reply) -> Response<Body> {
    reply.map(|body| body.map_err(|never| match never {}).boxed_unsync())
}

fn refused(refusal: &Denied) -> Response<Body> {
    tracing::debug!("request refused: {} {}", refusal.why, refusal.detail);
    own(authz::refused(refusal))
}

fn nothing() -> Reply {
    reply::error(StatusCode::NOT_FOUND, "there is no page at this address")
}

fn only_get() -> Reply {
    reply::error(StatusCode::METHOD_NOT_ALLOWED, "only GET")
}

fn moved(to: &str) -> Reply {
    let mut reply = reply::text(StatusCode::PERMANENT_REDIRECT, "");
    match HeaderValue::from_str(to) {
        Ok(to) => drop(reply.headers_mut().insert(header::LOCATION, to)),
        Err(_) => return nothing(),
    }
    reply
}
