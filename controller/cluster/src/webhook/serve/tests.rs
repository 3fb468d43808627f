use std::{convert::Infallible, net::SocketAddr, path::Path};

use clap::Parser;
use futures_util::stream;
use http_body_util::StreamBody;
use hyper::{body::Frame, client::conn::http1::handshake};
use hyper_util::rt::TokioIo;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpStream;
use tokio_rustls::{
    TlsConnector,
    rustls::{
        ClientConfig, RootCertStore, crypto,
        pki_types::{CertificateDer, pem::PemObject},
    },
};

use super::*;
use crate::{
    https::{answer_all, listen, serve},
    webhook::fake::Fake,
};

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    rules: NamespaceRules,
}

/// A running webhook with a certificate from files, and a RuntimeClass.
struct Stage {
    folder: TempDir,
    address: SocketAddr,
}

/// Creates a certificate authority and a certificate that it signs. Writes both and the key of the
/// certificate into files of `folder`.
fn papers(folder: &Path) {
    let mut ca = CertificateParams::default();
    ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let ca_key = KeyPair::generate().unwrap();
    let ca_cert = ca.self_signed(&ca_key).unwrap();
    let key = KeyPair::generate().unwrap();
    let leaf = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
    let cert = leaf.signed_by(&key, &Issuer::new(ca, ca_key)).unwrap();
    std::fs::write(folder.join("ca.crt"), ca_cert.pem()).unwrap();
    std::fs::write(folder.join("tls.crt"), cert.pem()).unwrap();
    std::fs::write(folder.join("tls.key"), key.serialize_pem()).unwrap();
}

fn cluster() -> Fake {
    let fake = Fake::default();
    fake.put(
        "/apis/node.k8s.io/v1/runtimeclasses/affinode",
        json!({
            "apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass",
            "metadata": { "name": "affinode" }, "handler": "affinode",
        }),
    );
    fake
}

fn door(fake: &Fake, shown: ServedCertificate) -> WebhookServer {
    let rules = Line::try_parse_from(["test"]).unwrap().rules;
    let cluster = ClusterState::watch(fake.client(), "affinode");
    WebhookServer::new(rules, cluster, Arc::new(shown))
}

async fn stage(fake: &Fake) -> Stage {
    let folder = tempfile::tempdir().unwrap();
    papers(folder.path());
    let files = ["tls.crt", "tls.key"].map(|name| folder.path().join(name));
    let shown = ServedCertificate::of_files(&files[0], &files[1]).unwrap();
    let door = Arc::new(door(fake, shown));
    let listener = listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(serve(listener, door));
    let stage = Stage { folder, address };
    while stage.get("/readyz").await.0 != StatusCode::OK {
        tokio::task::yield_now().await;
    }
    stage
}

type Sender = hyper::client::conn::http1::SendRequest<Full<Bytes>>;

impl Stage {
    /// Connects to the webhook. The client trusts the authority that the files contain now.
    async fn connect(&self) -> io::Result<Sender> {
        let mut roots = RootCertStore::empty();
        let ca = CertificateDer::from_pem_file(self.folder.path().join("ca.crt")).unwrap();
        roots.add(ca).unwrap();
        let provider = Arc::new(crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let stream = TcpStream::connect(self.address).await?;
        let name = "localhost".try_into().unwrap();
        let stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
        let (sender, connection) = handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        Ok(sender)
    }

    async fn send(&self, request: Request<Full<Bytes>>) -> (StatusCode, String) {
        let mut sender = self.connect().await.unwrap();
        exchange(&mut sender, request).await
    }

    async fn get(&self, path: &str) -> (StatusCode, String) {
        self.send(Request::get(path).body(Full::default()).unwrap()).await
    }

    async fn post(&self, body: impl Into<Bytes>) -> (StatusCode, String) {
        self.send(Request::post("/mutate").body(Full::new(body.into())).unwrap()).await
    }

    async fn review(&self, pod: Value) -> Value {
        let (status, answer) = self.post(review(pod).to_string()).await;
        assert_eq!(status, StatusCode::OK, "{answer}");
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!(answer["apiVersion"], "admission.k8s.io/v1");
        assert_eq!(answer["response"]["uid"], "1234");
        assert_eq!(answer["response"]["allowed"], true);
        answer["response"].clone()
    }
}

async fn exchange(sender: &mut Sender, request: Request<Full<Bytes>>) -> (StatusCode, String) {
    let response = sender.send_request(request).await.unwrap();
    let status = response.status();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    (status, String::from_utf8(body.to_vec()).unwrap())
}

fn review(pod: Value) -> Value {
    json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": "1234", "operation": "CREATE", "namespace": "ml",
            "kind": { "group": "", "version": "v1", "kind": "Pod" },
            "resource": { "group": "", "version": "v1", "resource": "pods" },
            "userInfo": { "username": "user" }, "object": pod, "oldObject": null,
            "dryRun": false, "options": { "kind": "CreateOptions", "apiVersion": "meta.k8s.io/v1" },
        },
    })
}

fn pod(spec: Value) -> Value {
    json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "generateName": "job-" }, "spec": spec })
}

fn gpu_pod() -> Value {
    pod(json!({ "containers": [{
        "name": "main", "image": "cuda", "resources": { "limits": { "nvidia.com/gpu": "1" } },
    }] }))
}

fn patched(mut pod: Value, response: &Value) -> Value {
    assert_eq!(response["patchType"], "JSONPatch");
    let bytes: Vec<u8> = serde_json::from_value(response["patch"].clone()).unwrap();
    let patch: json_patch::Patch = serde_json::from_slice(&bytes).unwrap();
    json_patch::patch(&mut pod, &patch).unwrap();
    pod
}

#[tokio::test]
async fn only_gpu_pods_get_a_patch() {
    let stage = stage(&cluster()).await;
    let response = stage.review(gpu_pod()).await;
    assert_eq!(patched(gpu_pod(), &response)["spec"]["runtimeClassName"], "affinode");
    assert_eq!(response["auditAnnotations"]["decision"], "injected");
    assert_eq!(response["auditAnnotations"]["because"], "nvidia.com/gpu");
    let plain = stage.review(pod(json!({ "containers": [{ "name": "main" }] }))).await;
    assert_eq!(plain["patch"], Value::Null);
    assert_eq!(plain["warnings"], Value::Null);
    let (_, metrics) = stage.get("/metrics").await;
    assert!(
        metrics.contains(r#"affinode_webhook_decisions_total{decision="injected"} 1"#),
        "{metrics}"
    );
    assert!(
        metrics.contains(r#"affinode_webhook_decisions_total{decision="no-gpu"} 1"#),
        "{metrics}"
    );
    assert!(metrics.contains("affinode_webhook_answer_seconds_count 2"), "{metrics}");
    assert!(!metrics.contains("not_after_timestamp_seconds 0"), "{metrics}");
}

#[tokio::test]
async fn request_other_than_create_is_allowed() {
    let stage = stage(&cluster()).await;
    let mut update = review(gpu_pod());
    update["request"]["operation"] = "UPDATE".into();
    let mut ephemeral = review(gpu_pod());
    ephemeral["request"]["subResource"] = "ephemeralcontainers".into();
    let mut deletion = review(Value::Null);
    deletion["request"]["operation"] = "DELETE".into();
    for review in [update, ephemeral, deletion] {
        let (status, answer) = stage.post(review.to_string()).await;
        assert_eq!(status, StatusCode::OK, "{answer}");
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!(answer["response"]["allowed"], true);
        assert_eq!(answer["response"]["patch"], Value::Null);
        assert_eq!(answer["response"]["auditAnnotations"]["decision"], "not-a-creation");
    }
}

#[tokio::test]
async fn missing_class_warns_the_pods_creator() {
    let stage = stage(&Fake::default()).await;
    let response = stage.review(gpu_pod()).await;
    assert_eq!(response["patch"], Value::Null);
    let warning = response["warnings"][0].as_str().unwrap();
    assert_eq!(
        warning,
        "affinode: the pod is created without the runtime class affinode: there is no RuntimeClass affinode"
    );
}

#[tokio::test]
async fn claims_are_read_from_the_api_server() {
    let fake = cluster();
    let claim = |spec: Value, kind: &str| {
        json!({
            "apiVersion": "resource.k8s.io/v1", "kind": kind,
            "metadata": { "name": "one", "namespace": "ml" }, "spec": spec,
        })
    };
    let devices = |request: Value| json!({ "devices": { "requests": [request] } });
    let exactly = |class: &str, admin: bool| json!({ "name": "r", "exactly": { "deviceClassName": class, "adminAccess": admin } });
    let any = json!({ "name": "r", "firstAvailable": [
        { "name": "big", "deviceClassName": "net.example.com" },
        { "name": "small", "deviceClassName": "mig.nvidia.com" },
    ] });
    let base = "/apis/resource.k8s.io/v1/namespaces/ml";
    let claims = [
        ("gpu", exactly("gpu.nvidia.com", false), "injected"),
        ("any", any, "injected"),
        ("net", exactly("net.example.com", false), "no-gpu"),
        ("admin", exactly("gpu.nvidia.com", true), "no-gpu"),
    ];
    for (name, request, _) in &claims {
        let own = claim(devices(request.clone()), "ResourceClaim");
        fake.put(&format!("{base}/resourceclaims/{name}"), own);
        let made = json!({ "spec": devices(request.clone()) });
        let made = claim(made, "ResourceClaimTemplate");
        fake.put(&format!("{base}/resourceclaimtemplates/{name}"), made);
    }
    let stage = stage(&fake).await;
    let claiming = |reference: Value| {
        pod(json!({
            "containers": [{ "name": "main", "resources": { "claims": [{ "name": "gpu" }] } }],
            "resourceClaims": [reference],
        }))
    };
    for (name, _, expected) in &claims {
        for field in ["resourceClaimName", "resourceClaimTemplateName"] {
            let response = stage.review(claiming(json!({ "name": "gpu", field: name }))).await;
            assert_eq!(response["auditAnnotations"]["decision"], *expected, "{field} {name}");
        }
    }
    let missing =
        stage.review(claiming(json!({ "name": "gpu", "resourceClaimName": "gone" }))).await;
    let warning = missing["warnings"][0].as_str().unwrap();
    assert!(warning.contains("cannot read ResourceClaim gone"), "{warning}");
}

#[tokio::test]
async fn renewed_certificate_serves_next_connection() {
    let stage = stage(&cluster()).await;
    let mut early = stage.connect().await.unwrap();
    let old = std::fs::read(stage.folder.path().join("ca.crt")).unwrap();
    papers(stage.folder.path());
    assert_eq!(stage.get("/healthz").await.0, StatusCode::OK, "only the new authority is trusted");
    let request = Request::get("/healthz").body(Full::default()).unwrap();
    assert_eq!(
        exchange(&mut early, request).await.0,
        StatusCode::OK,
        "an open connection stays open"
    );
    std::fs::write(stage.folder.path().join("tls.crt"), "half a certific").unwrap();
    assert_eq!(
        stage.get("/healthz").await.0,
        StatusCode::OK,
        "the last valid certificate is served"
    );
    std::fs::write(stage.folder.path().join("ca.crt"), old).unwrap();
    assert!(stage.connect().await.is_err(), "the first certificate is no longer served");
}

#[tokio::test]
async fn invalid_review_gets_an_error_with_advice() {
    let stage = stage(&cluster()).await;
    let mut beta = review(gpu_pod());
    beta["apiVersion"] = "admission.k8s.io/v1beta1".into();
    let mut service = review(gpu_pod());
    service["request"]["object"]["kind"] = "Service".into();
    let answer = json!({ "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview" });
    for (body, expected) in [
        ("none".to_owned(), "must contain only the operation CREATE on pods"),
        (String::new(), "must contain only the operation CREATE on pods"),
        (service.to_string(), "must contain only the operation CREATE on pods"),
        (beta.to_string(), "admissionReviewVersions"),
        (answer.to_string(), "admissionReviewVersions"),
    ] {
        let (status, text) = stage.post(body).await;
        assert_eq!(status, StatusCode::BAD_REQUEST);
        assert!(text.contains(expected), "{text}");
    }
    assert_eq!(stage.get("/mutate").await.0, StatusCode::METHOD_NOT_ALLOWED);
    assert_eq!(stage.get("/other").await.0, StatusCode::NOT_FOUND);
    let (_, metrics) = stage.get("/metrics").await;
    assert!(metrics.contains("affinode_webhook_refused_requests_total 5"), "{metrics}");
}

#[tokio::test]
async fn review_is_read_up_to_the_size_limit() {
    let stage = stage(&cluster()).await;
    let mut large = gpu_pod();
    large["metadata"]["annotations"] = json!({ "text": "x".repeat(3 << 20) });
    assert_eq!(stage.review(large).await["auditAnnotations"]["decision"], "injected");
    let (status, text) = stage.post(vec![b' '; BODY_BYTES + 1]).await;
    assert_eq!(status, StatusCode::PAYLOAD_TOO_LARGE, "{text}");
}

#[tokio::test(start_paused = true)]
async fn stalled_reviews_free_their_turn() {
    let door = Arc::new(door(&cluster(), ServedCertificate::default()));
    while !door.cluster.is_known() {
        tokio::task::yield_now().await;
    }
    let connect = async || {
        let (near, far) = tokio::io::duplex(1 << 16);
        let door = Arc::clone(&door);
        tokio::spawn(async move { answer_all(far, &*door).await });
        let (sender, connection) = handshake(TokioIo::new(near)).await.unwrap();
        tokio::spawn(connection);
        sender
    };
    let mut slow = Vec::new();
    for _ in 0..MAX_CONCURRENT_REVIEWS {
        let never = stream::pending::<Result<Frame<Bytes>, Infallible>>();
        let request = Request::post("/mutate").body(StreamBody::new(never).boxed()).unwrap();
        let mut sender = connect().await;
        slow.push(tokio::spawn(
            async move { sender.send_request(request).await.unwrap().status() },
        ));
    }
    let whole = Full::from(review(gpu_pod()).to_string()).boxed();
    let mut sender = connect().await;
    let response =
        sender.send_request(Request::post("/mutate").body(whole).unwrap()).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    for status in slow {
        assert_eq!(status.await.unwrap(), StatusCode::REQUEST_TIMEOUT);
    }
}
