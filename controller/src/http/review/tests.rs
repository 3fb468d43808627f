//! Tests of the token reviewer, and of requests that it checks, with a small API server.

use std::time::Duration;

use hyper::Method;
use serde::Deserialize;

use super::{
    fake::{ApiBehavior, Fake, OWN_TOKEN},
    *,
};
use crate::{
    config::{HttpAuth, HttpSection},
    http::{
        routes::access,
        stage::{KEY, Running, run_behind},
    },
};

const NODE: AccessRule = AccessRule { verb: "get", path: "/affinode/v1/node" };
const OFFLOAD: AccessRule = AccessRule { verb: "post", path: "/affinode/v1/containers/offload" };

async fn reviewer() -> (tempfile::TempDir, Fake, TokenReviewer) {
    let folder = tempfile::tempdir().unwrap();
    let fake = Fake::start(folder.path()).await;
    let reviewer = TokenReviewer::new(&fake.section).unwrap();
    (folder, fake, reviewer)
}

async fn kind(
    reviewer: &TokenReviewer,
    token: &str,
    access: AccessRule,
) -> Result<String, DenyReason> {
    reviewer.admit(token.as_bytes(), access).await.map_err(|refusal| refusal.kind)
}

#[tokio::test]
async fn rights_follow_the_api_server() {
    let (_folder, _fake, reviewer) = reviewer().await;
    assert_eq!(kind(&reviewer, "annas-token", NODE).await, Ok("anna".into()));
    assert_eq!(kind(&reviewer, "annas-token", OFFLOAD).await, Ok("anna".into()));
    assert_eq!(kind(&reviewer, "bobs-token", NODE).await, Ok("bob".into()));
    let no = reviewer.admit(b"bobs-token", OFFLOAD).await.unwrap_err();
    assert_eq!(no.kind, DenyReason::Forbidden);
    assert!(no.why.starts_with("bob may not post /affinode/v1/containers/offload"), "{}", no.why);
    assert_eq!(kind(&reviewer, "nobodys-token", NODE).await, Err(DenyReason::Token));
}

#[tokio::test]
async fn results_are_cached_until_they_expire() {
    let (_folder, fake, reviewer) = reviewer().await;
    for _ in 0..5 {
        kind(&reviewer, "annas-token", NODE).await.unwrap();
        kind(&reviewer, "nobodys-token", NODE).await.unwrap_err();
        kind(&reviewer, "bobs-token", OFFLOAD).await.unwrap_err();
    }
    assert_eq!(fake.asked(), (3, 2));
    // The token of anna is deleted, and bob gets a right. Both changes take effect when the cache
    // entries expire.
    fake.desk.users.lock().unwrap().retain(|(_, user)| *user != "anna");
    fake.desk.rights.lock().unwrap().push(("bob", "post", "/affinode/v1/containers/offload"));
    kind(&reviewer, "annas-token", NODE).await.unwrap();
    tokio::time::pause();
    tokio::time::advance(NO).await;
    tokio::time::resume();
    assert_eq!(kind(&reviewer, "bobs-token", OFFLOAD).await, Ok("bob".into()));
    tokio::time::pause();
    tokio::time::advance(ALLOW_TTL).await;
    tokio::time::resume();
    assert_eq!(kind(&reviewer, "annas-token", NODE).await, Err(DenyReason::Token));
}

#[tokio::test]
async fn an_unreachable_server_admits_no_user() {
    let (folder, fake, reviewer) = reviewer().await;
    for (behavior, why) in [
        (ApiBehavior::Forbidden, "403 Forbidden: the token in http.kubernetes.token_file needs"),
        (ApiBehavior::Rubbish, "is invalid"),
        (ApiBehavior::Endless, "to a TokenReview: length limit exceeded"),
    ] {
        fake.set(behavior);
        let refusal = reviewer.admit(b"annas-token", NODE).await.unwrap_err();
        assert_eq!(refusal.kind, DenyReason::Review, "{behavior:?}");
        assert!(refusal.detail.contains(why), "{}", refusal.detail);
        assert!(!refusal.why.contains("127.0.0.1"), "strangers learn nothing: {}", refusal.why);
    }
    fake.set(ApiBehavior::Well);
    // The controller's own token is read again for each request.
    let token = folder.path().join("api-token");
    std::fs::write(&token, "an old one").unwrap();
    let refusal = reviewer.admit(b"annas-token", NODE).await.unwrap_err();
    assert!(refusal.detail.contains("401"), "{}", refusal.detail);
    std::fs::write(&token, OWN_TOKEN).unwrap();
    assert_eq!(kind(&reviewer, "annas-token", NODE).await, Ok("anna".into()));
    std::fs::remove_file(&token).unwrap();
    let refusal = reviewer.admit(b"bobs-token", NODE).await.unwrap_err();
    assert!(
        refusal.detail.contains("api-token, the file of the setting http.kubernetes.token_file"),
        "{}",
        refusal.detail
    );
}

#[tokio::test]
async fn an_untrusted_api_server_is_refused() {
    let (folder, _fake, reviewer) = reviewer().await;
    let other = tempfile::tempdir().unwrap();
    fake::papers(other.path());
    let ca = folder.path().join("ca.crt");
    std::fs::copy(other.path().join("ca.crt"), &ca).unwrap();
    let refusal = reviewer.admit(b"annas-token", NODE).await.unwrap_err();
    assert_eq!(refusal.kind, DenyReason::Review);
    assert!(refusal.detail.contains("certificate"), "{}", refusal.detail);
    std::fs::write(&ca, "no certificate").unwrap();
    let refusal = reviewer.admit(b"annas-token", NODE).await.unwrap_err();
    assert!(refusal.detail.contains("has no usable certificate"), "{}", refusal.detail);
}

#[tokio::test]
async fn requests_are_limited_in_number_and_time() {
    let (_folder, fake, reviewer) = reviewer().await;
    let reviewer = Arc::new(reviewer);
    for rubbish in ["", "two words", "a\"b", "é", &"x".repeat(TOKEN_BYTES + 1)] {
        assert_eq!(kind(&reviewer, rubbish, NODE).await, Err(DenyReason::Token), "{rubbish}");
    }
    assert_eq!(fake.asked(), (0, 0), "an invalid token must not reach the API server");
    fake.set(ApiBehavior::Silent);
    let mut asking = tokio::task::JoinSet::new();
    for n in 0..40 {
        let reviewer = Arc::clone(&reviewer);
        asking.spawn(async move { kind(&reviewer, &format!("token-{n}"), NODE).await });
    }
    let most = || fake.desk.most_at_once.load(std::sync::atomic::Ordering::SeqCst);
    while most() < 8 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(5)).await;
    let all = asking.join_all().await;
    assert!(all.iter().all(|answer| *answer == Err(DenyReason::Review)), "{all:?}");
    assert_eq!(most(), 8, "at once");
}

#[tokio::test]
async fn a_token_of_another_audience_is_refused() {
    let (_folder, fake, _) = reviewer().await;
    let meant = |audience: &str| {
        let audiences = vec![audience.to_owned()];
        TokenReviewer::new(&KubernetesSection { audiences, ..fake.section.clone() }).unwrap()
    };
    let ours = meant("https://kubernetes.default.svc");
    assert_eq!(kind(&ours, "annas-token", NODE).await, Ok("anna".into()));
    assert_eq!(kind(&meant("copier"), "annas-token", NODE).await, Err(DenyReason::Token));
}

async fn site() -> (Fake, Running) {
    let folder = tempfile::tempdir().unwrap();
    let fake = Fake::start(folder.path()).await;
    let http = HttpSection {
        auth: HttpAuth::TokenReview,
        kubernetes: fake.section.clone(),
        ..HttpSection::default()
    };
    (fake, run_behind(folder, true, &http))
}

#[tokio::test]
async fn actions_require_rights_and_name_the_user() {
    let (fake, site) = site().await;
    let anna = "Authorization: Bearer annas-token\r\n";
    let bob = "Authorization: Bearer bobs-token\r\n";
    let offload = format!("/api/v1/containers/{KEY}/offload");
    assert_eq!(site.ask("GET", "/", "").await.0, 200, "the page asks for the token");
    assert_eq!(site.ask("GET", "/healthz", "").await.0, 200);
    let (status, why) = site.ask("GET", "/api/v1/node", "").await;
    assert!(status == 401 && why.contains("kubectl create token"), "{why}");
    assert_eq!(site.ask("GET", "/api/v1/node", anna).await.0, 200);
    assert_eq!(site.ask("GET", "/api/v1/node", bob).await.0, 200);
    let (status, why) = site.ask("POST", &offload, bob).await;
    assert!(status == 403 && why.contains("bob may not post"), "{status} {why}");
    assert!(site.events.now(0).is_empty(), "nothing was moved");
    assert_eq!(site.ask("POST", &offload, anna).await.0, 200);
    let noted = site.events.now(0);
    assert!(noted[0].text.starts_with("offload was requested by anna from "), "{}", noted[0].text);
    // A request must be refused if its path needs a right that no role grants. This also protects
    // paths that are added later.
    assert_eq!(site.ask("GET", "/api/v1/later", anna).await.0, 403);
    assert_eq!(site.ask("GET", "/metrics", anna).await.0, 403);
    fake.set(ApiBehavior::Forbidden);
    let (status, why) = site.ask("POST", "/api/v1/auto-offload/off", anna).await;
    assert!(status == 503 && why.contains("tokens cannot be checked"), "{status} {why}");
    let text = site.metrics_text();
    assert!(
        text.contains("affinode_http_refused_requests_total{reason=\"forbidden\"} 3"),
        "{text}"
    );
    assert!(text.contains("affinode_http_refused_requests_total{reason=\"review\"} 1"), "{text}");
}

#[tokio::test]
async fn a_stream_ends_with_its_users_right() {
    let (fake, site) = site().await;
    let mut stream = site.open("/api/v1/events", "Authorization: Bearer annas-token\r\n").await;
    assert!(stream.until("retry: 1000").await, "it begins");
    fake.desk.users.lock().unwrap().clear();
    tokio::time::pause();
    tokio::time::advance(ALLOW_TTL).await;
    tokio::time::resume();
    assert!(!stream.until("never said").await, "it ends");
}

/// Paths that every user of a Kubernetes cluster may get by default. The ClusterRoles
/// system:discovery and system:public-info-viewer grant them, in part even without authentication.
const EVERYBODYS: [&str; 11] = [
    "/api",
    "/api/*",
    "/apis",
    "/apis/*",
    "/healthz",
    "/livez",
    "/openapi",
    "/openapi/*",
    "/readyz",
    "/version",
    "/version/",
];

/// Returns whether a rule of a Kubernetes role grants a path. The rule is a path, or the beginning
/// of a path followed by `*`.
fn fits(rule: &str, path: &str) -> bool {
    match rule.strip_suffix('*') {
        Some(start) => path.starts_with(start),
        None => path == rule,
    }
}

/// Checks that the roles in `config/kubernetes` grant all rights that requests need, and no others.
#[test]
fn the_roles_grant_exactly_the_rights() {
    let text = include_str!("../../../../config/kubernetes/dashboard.yaml");
    let mut allowed = Vec::new();
    for document in serde_yaml_ng::Deserializer::from_str(text) {
        let object = serde_json::Value::deserialize(document).unwrap();
        for rule in object["rules"].as_array().into_iter().flatten() {
            for url in rule["nonResourceURLs"].as_array().unwrap() {
                allowed.push((rule["verbs"][0].clone(), url.as_str().unwrap().to_owned()));
            }
        }
    }
    let document = include_str!("../../../../config/openapi.yaml");
    let document: serde_json::Value = serde_yaml_ng::from_str(document).unwrap();
    let mut used = std::collections::BTreeSet::new();
    for (path, methods) in document["paths"].as_object().unwrap() {
        let get = methods.get("get").is_some();
        let method = if get { Method::GET } else { Method::POST };
        for (action, switch) in
            [("offload", "on"), ("restore", "off"), ("pin", "on"), ("unpin", "off")]
        {
            let filled = path.replace("{key}", KEY).replace("{action}", action);
            let AccessRule { verb, path } = access(&method, &filled.replace("{switch}", switch));
            if filled == "/healthz" {
                continue;
            }
            assert!(!EVERYBODYS.iter().any(|rule| fits(rule, path)), "every user may get {path}");
            let rule =
                allowed.iter().position(|(allowed, url)| *allowed == verb && fits(url, path));
            used.insert(rule.unwrap_or_else(|| panic!("no role grants {verb} on {path}")));
        }
    }
    assert_eq!(used.len(), allowed.len(), "a role grants a right that no request needs");
}
