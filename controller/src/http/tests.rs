//! Tests of the HTTP paths that are served, and of the conditions for requests.

use affinode_proto::api::control::Event;

use super::stage::{KEY, run};

#[tokio::test]
async fn the_page_has_a_strict_policy_and_a_tag() {
    let site = run(true, None);
    let (status, page) = site.ask("GET", "/", "").await;
    assert_eq!(status, 200);
    assert!(page.contains("default-src 'none'") && page.contains("<title>Affinode"), "{page}");
    let tag = page.lines().find_map(|line| line.strip_prefix("etag: ")).unwrap().trim();
    assert_eq!(site.ask("GET", "/", &format!("If-None-Match: {tag}\r\n")).await.0, 304);
    // Every file that the page and its modules refer to must be served.
    for file in ["/style.css", "/icon.svg", "/app.js", "/rows.js", "/stream.js"] {
        assert_eq!(site.ask("GET", file, "").await.0, 200, "{file}");
    }
    assert!(
        !page.contains("http://") && !page.contains("https://"),
        "the page loads nothing from another server"
    );
}

#[tokio::test]
async fn the_node_and_its_metrics_are_served() {
    let site = run(true, None);
    let (status, node) = site.ask("GET", "/api/v1/node", "").await;
    assert!(status == 200 && node.contains("\"name\":\"ml/one\""), "{node}");
    let (_, classic) = site.ask("GET", "/metrics", "").await;
    assert!(classic.contains("affinode_containers{state=\"Idle\"} 1"), "{classic}");
    assert!(!classic.contains("# EOF"));
    let (_, open) = site.ask("GET", "/metrics", "Accept: application/openmetrics-text\r\n").await;
    assert!(open.trim_end().ends_with("# EOF"), "{open}");
    assert_eq!(site.ask("GET", "/healthz", "").await.0, 200);
}

#[tokio::test]
async fn a_move_is_executed_and_recorded() {
    let site = run(true, None);
    let path = format!("/api/v1/containers/{KEY}");
    let (status, done) =
        site.ask("POST", &format!("{path}/offload"), "Content-Length: 0\r\n").await;
    assert!(status == 200 && done.contains("\"done\":true"), "{done}");
    assert_eq!(site.ask("POST", &format!("{path}/restore"), "").await.0, 409);
    let noted = site.events.now(0);
    assert_eq!(noted.len(), 2);
    assert!(noted[0].kind == "request" && noted[0].text.starts_with("offload was requested by"));
    assert_eq!(site.ask("GET", &format!("{path}/offload"), "").await.0, 405);
    assert_eq!(site.ask("POST", &format!("{path}/explode"), "").await.0, 404);
    let unknown = format!("/api/v1/containers/{}/offload", "f".repeat(32));
    assert_eq!(site.ask("POST", &unknown, "").await.0, 404);
    let looking = run(false, None);
    assert_eq!(looking.ask("POST", &format!("{path}/offload"), "").await.0, 403);
    assert!(looking.events.now(0).is_empty());
    // If the header says that actions are off, the page hides its buttons.
    for (site, only_shows) in [(looking, true), (site, false)] {
        let mut stream = site.open("/api/v1/events", "").await;
        assert!(stream.begins().await);
        let told = stream.seen.contains("affinode-actions: off");
        assert_eq!(told, only_shows, "{}", stream.seen);
    }
}

#[tokio::test]
async fn a_token_protects_all_but_the_page() {
    let site = run(true, Some("a-long-and-secret-token"));
    for path in ["/api/v1/node", "/metrics", "/api/v1/events", "/api/v1/report"] {
        assert_eq!(site.ask("GET", path, "").await.0, 401, "{path}");
        let wrong = "Authorization: Bearer a-long-and-secret-tokem\r\n";
        assert_eq!(site.ask("GET", path, wrong).await.0, 401, "{path}");
    }
    let right = "Authorization: Bearer a-long-and-secret-token\r\n";
    assert_eq!(site.ask("GET", "/api/v1/node", right).await.0, 200);
    assert_eq!(site.ask("GET", "/", "").await.0, 200);
}

#[tokio::test]
async fn a_stream_begins_with_the_node() {
    let site = run(true, None);
    site.events.add(Event { text: "first".into(), ..Event::default() }, 1);
    site.events.add(Event { text: "second".into(), ..Event::default() }, 2);
    let path = "/api/v1/events?watch=node";
    let mut all = site.open(path, "").await;
    assert!(all.until("id: 77-2").await, "{}", all.seen);
    assert!(all.seen.contains("event: node") && all.seen.contains("first"), "{}", all.seen);
    let mut rest = site.open(path, "Last-Event-ID: 77-1\r\n").await;
    assert!(rest.until("id: 77-2").await && !rest.seen.contains("first"), "{}", rest.seen);
    // The id is from an earlier controller, so all events of this controller are sent.
    let mut anew = site.open(path, "Last-Event-ID: 66-1\r\n").await;
    assert!(anew.until("id: 77-2").await && anew.seen.contains("first"), "{}", anew.seen);
}

#[tokio::test]
async fn pins_and_the_switch_require_post() {
    let site = run(true, None);
    let path = format!("/api/v1/containers/{KEY}");
    for (word, expected) in [("pin", "true true"), ("unpin", "false true")] {
        let (status, body) =
            site.ask("POST", &format!("{path}/{word}"), "Content-Length: 0\r\n").await;
        assert!(status == 200 && body.contains(expected), "{status} {body}");
    }
    assert_eq!(site.ask("GET", &format!("{path}/pin"), "").await.0, 405);
    let switch = "/api/v1/auto-offload";
    let (status, body) = site.ask("POST", &format!("{switch}/off"), "Content-Length: 0\r\n").await;
    assert!(status == 200 && body.contains("false"), "{status} {body}");
    assert_eq!(site.ask("GET", &format!("{switch}/off"), "").await.0, 405);
    assert_eq!(site.ask("POST", &format!("{switch}/maybe"), "").await.0, 404);
    let looking = run(false, None);
    assert_eq!(looking.ask("POST", &format!("{switch}/off"), "").await.0, 403);
    assert_eq!(looking.ask("POST", &format!("{path}/pin"), "").await.0, 403);
}

/// Checks that every path in `config/openapi.yaml` is served, and only under its HTTP method.
#[tokio::test]
async fn every_path_of_the_document_is_served() {
    let document = include_str!("../../../config/openapi.yaml");
    let document: serde_json::Value = serde_yaml_ng::from_str(document).unwrap();
    let site = run(true, None);
    let paths = document["paths"].as_object().unwrap();
    assert!(paths.len() > 8, "{paths:?}");
    for (path, methods) in paths {
        let filled = path.replace("{key}", KEY).replace("{switch}", "on");
        for action in ["offload", "pin"] {
            let filled = filled.replace("{action}", action);
            let get = methods.get("get").is_some();
            if filled == "/api/v1/events" || filled == "/api/v1/calls" {
                assert!(get && site.open(&filled, "").await.begins().await, "{filled}");
                continue;
            }
            let (right, wrong) = if get { ("GET", "POST") } else { ("POST", "GET") };
            let empty = "Content-Length: 0\r\n";
            let (status, body) = site.ask(right, &filled, empty).await;
            assert!(!body.contains("no such path"), "{right} {filled}: {status} {body}");
            assert_eq!(site.ask(wrong, &filled, empty).await.0, 405, "{wrong} {filled}");
        }
    }
}
