//! A small Kubernetes API server for tests. It uses TLS on loopback with its own certificate
//! authority, and has a table of tokens and rights.

use std::{
    convert::Infallible,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use crate::{config::KubernetesSection, http::TlsIdentity};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{
    Request, Response, StatusCode, body::Incoming, server::conn::http1, service::service_fn,
};
use hyper_util::rt::TokioIo;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use serde_json::{Value, json};
use tokio::net::TcpListener;

/// Token that the controller sends to the API server in tests.
pub const OWN_TOKEN: &str = "the-controller-itself";

/// How the fake API server responds to requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ApiBehavior {
    Well,
    /// Refuses every request with status 403.
    Forbidden,
    /// Responds with invalid JSON.
    Rubbish,
    /// Responds with an endless body.
    Endless,
    /// Reads the request and never responds.
    Silent,
}

/// A right that the fake API server grants: user, verb and path.
pub type Right = (&'static str, &'static str, &'static str);

/// The running fake API server. It ends with the async runtime of the test.
pub struct Fake {
    pub section: KubernetesSection,
    pub desk: Arc<Desk>,
}

/// State of the fake API server: its behaviour, the known tokens and rights, and the number of
/// requests.
pub struct Desk {
    behavior: Mutex<ApiBehavior>,
    pub users: Mutex<Vec<(&'static str, &'static str)>>,
    pub rights: Mutex<Vec<Right>>,
    token_reviews: AtomicUsize,
    access_reviews: AtomicUsize,
    at_once: AtomicUsize,
    pub most_at_once: AtomicUsize,
}

/// Creates a TLS identity for 127.0.0.1, and a new certificate authority that has signed it. The
/// authority's certificate is written to `ca.crt`.
pub fn papers(folder: &Path) -> TlsIdentity {
    let write = |name: &str, text: String| {
        let file = folder.join(name);
        std::fs::write(&file, text).unwrap();
        file.to_str().unwrap().to_owned()
    };
    let ca_key = KeyPair::generate().unwrap();
    let mut ca = CertificateParams::new(Vec::new()).unwrap();
    ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    write("ca.crt", ca.self_signed(&ca_key).unwrap().pem());
    let key = KeyPair::generate().unwrap();
    let server = CertificateParams::new(vec!["127.0.0.1".into()]).unwrap();
    let certificate = server.signed_by(&key, &Issuer::new(ca, ca_key)).unwrap();
    let certificate = write("server.crt", certificate.pem());
    TlsIdentity::new(&certificate, &write("server.key", key.serialize_pem())).unwrap()
}

impl Fake {
    /// Starts a fake API server. Writes its certificates and the controller's token into the
    /// folder.
    pub async fn start(folder: &Path) -> Fake {
        let (ca_file, token_file) = (folder.join("ca.crt"), folder.join("api-token"));
        std::fs::write(&token_file, format!("{OWN_TOKEN}\n")).unwrap();
        let papers = papers(folder);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let desk = Arc::new(Desk {
            behavior: Mutex::new(ApiBehavior::Well),
            users: Mutex::new(vec![("annas-token", "anna"), ("bobs-token", "bob")]),
            rights: Mutex::new(vec![
                ("anna", "get", "/affinode/v1/node"),
                ("anna", "get", "/affinode/v1/events"),
                ("anna", "post", "/affinode/v1/containers/offload"),
                ("bob", "get", "/affinode/v1/node"),
            ]),
            token_reviews: AtomicUsize::new(0),
            access_reviews: AtomicUsize::new(0),
            at_once: AtomicUsize::new(0),
            most_at_once: AtomicUsize::new(0),
        });
        let section = KubernetesSection {
            api_server: format!("https://{}", listener.local_addr().unwrap()),
            ca_file: ca_file.to_str().unwrap().into(),
            token_file: token_file.to_str().unwrap().into(),
            audiences: Vec::new(),
        };
        let fake = Fake { section, desk: Arc::clone(&desk) };
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (papers, desk) = (papers.clone(), Arc::clone(&desk));
                tokio::spawn(async move {
                    let Ok(stream) = papers.accept(stream).await else { return };
                    let service = service_fn(|request| {
                        let desk = Arc::clone(&desk);
                        async move { Ok::<_, Infallible>(desk.answer(request).await) }
                    });
                    let _ =
                        http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
                });
            }
        });
        fake
    }

    pub fn set(&self, behavior: ApiBehavior) {
        *self.desk.behavior.lock().unwrap() = behavior;
    }

    /// Returns the numbers of token reviews and of access reviews so far.
    pub fn asked(&self) -> (usize, usize) {
        let desk = &self.desk;
        (desk.token_reviews.load(Ordering::SeqCst), desk.access_reviews.load(Ordering::SeqCst))
    }
}

impl Desk {
    async fn answer(&self, request: Request<Incoming>) -> Response<Full<Bytes>> {
        let now = self.at_once.fetch_add(1, Ordering::SeqCst) + 1;
        self.most_at_once.fetch_max(now, Ordering::SeqCst);
        let answer = self.consider(request).await;
        self.at_once.fetch_sub(1, Ordering::SeqCst);
        answer
    }

    async fn consider(&self, request: Request<Incoming>) -> Response<Full<Bytes>> {
        let path = request.uri().path().to_owned();
        let own = format!("Bearer {OWN_TOKEN}");
        let authorised = request.headers().get("authorization").is_some_and(|v| *v == *own);
        let body = request.into_body().collect().await.unwrap().to_bytes();
        let asked: Value = serde_json::from_slice(&body).unwrap();
        let spec = &asked["spec"];
        let status = match asked["kind"].as_str().unwrap() {
            "TokenReview" => {
                assert_eq!(path, "/apis/authentication.k8s.io/v1/tokenreviews");
                self.token_reviews.fetch_add(1, Ordering::SeqCst);
                let users = self.users.lock().unwrap();
                match users.iter().find(|(token, _)| spec["token"] == **token) {
                    Some((_, user)) => json!({
                        "authenticated": true, "audiences": ["https://kubernetes.default.svc"],
                        "user": { "username": user, "uid": "7", "groups": ["people"], "extra": { "a": ["b"] } },
                    }),
                    None => json!({ "authenticated": false, "error": "unknown" }),
                }
            }
            "SubjectAccessReview" => {
                assert_eq!(path, "/apis/authorization.k8s.io/v1/subjectaccessreviews");
                assert_eq!(
                    (&spec["groups"][0], &spec["extra"]["a"][0]),
                    (&json!("people"), &json!("b"))
                );
                self.access_reviews.fetch_add(1, Ordering::SeqCst);
                let what = &spec["nonResourceAttributes"];
                let rights = self.rights.lock().unwrap();
                let allowed = rights.iter().any(|(user, verb, path)| {
                    spec["user"] == **user && what["verb"] == **verb && what["path"] == **path
                });
                json!({ "allowed": allowed })
            }
            other => panic!("{other}"),
        };
        let behavior = *self.behavior.lock().unwrap();
        let (code, text) = match behavior {
            ApiBehavior::Well if authorised => {
                (StatusCode::CREATED, json!({ "status": status }).to_string())
            }
            ApiBehavior::Well => (StatusCode::UNAUTHORIZED, "{}".into()),
            ApiBehavior::Forbidden => (StatusCode::FORBIDDEN, "{}".into()),
            ApiBehavior::Rubbish => (StatusCode::OK, "{\"status\": [".into()),
            ApiBehavior::Endless => (StatusCode::OK, " ".repeat(1 << 20)),
            ApiBehavior::Silent => std::future::pending().await,
        };
        let mut reply = Response::new(Full::new(Bytes::from(text)));
        *reply.status_mut() = code;
        reply
    }
}
