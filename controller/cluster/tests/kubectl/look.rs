//! Tests of `kubectl affinode ps` and `kubectl affinode status`.

use affinode_controller::schema;
use affinode_proto::state::State;

use crate::{
    Stage,
    agent::{Agent, USER, container, node},
};

/// Creates two nodes with three containers in two namespaces.
async fn stage() -> Stage {
    let stage = Stage::new().await;
    let first = vec![
        container("ml", "notebook", State::Idle, 24),
        container("web", "server", State::Active, 40),
    ];
    stage.node("one", Some(node(first))).await;
    stage.node("two", Some(node(vec![container("ml", "agent", State::Offloaded, 8)]))).await;
    stage
}

#[tokio::test]
async fn ps_lists_a_namespace_of_all_nodes() {
    let stage = stage().await;
    let printed = stage.run("ps").await;
    assert_eq!(printed.status, 0, "{printed}");
    let rows = printed.rows();
    assert_eq!(rows[0][..3], ["NODE", "CONTAINER", "STATE"], "{printed}");
    assert_eq!(rows[1][..3], ["two", "ml/agent/main", "Offloaded"], "{printed}");
    assert_eq!(rows[2][..3], ["one", "ml/notebook/main", "Idle"], "{printed}");
    assert_eq!(rows.len(), 3, "{printed}");
    let wide = stage.run("ps -A -o wide --no-headers").await;
    assert_eq!((wide.status, wide.rows().len()), (0, 3), "{wide}");
    assert!(wide.rows()[0].len() > rows[1].len(), "{wide}");
}

#[tokio::test]
async fn ps_filters_and_sorts() {
    let stage = stage().await;
    for (options, expected) in [
        ("-A", "ml/agent ml/notebook web/server"),
        ("-n web", "web/server"),
        ("-A --node one", "ml/notebook web/server"),
        ("-A --state idle,offloaded", "ml/agent ml/notebook"),
        ("-A --gpu GPU-a --node two", "ml/agent"),
        ("-A --gpu 0 --state active", "web/server"),
        ("-A --gpu 7", ""),
        ("-A --sort-by vram", "web/server ml/notebook ml/agent"),
        ("-A --sort-by host-ram", "ml/agent ml/notebook web/server"),
        ("-A --sort-by state", "web/server ml/notebook ml/agent"),
        ("-A --sort-by node", "ml/notebook web/server ml/agent"),
    ] {
        let printed = stage.run(&format!("ps -o name {options}")).await;
        let names: Vec<&str> =
            printed.out.lines().map(|name| name.strip_suffix("/main").unwrap()).collect();
        assert_eq!(names.join(" "), expected, "{options}: {printed}");
        assert_eq!(printed.status, 0, "{options}: {printed}");
    }
}

#[tokio::test]
async fn ps_of_one_node_asks_no_other() {
    let stage = stage().await;
    stage.run("ps -A --node one").await;
    let forwards: Vec<String> =
        stage.api.asked().into_iter().filter(|line| line.ends_with("portforward")).collect();
    assert_eq!(forwards, ["GET /api/v1/namespaces/system/pods/agent-one/portforward"]);
    let none = stage.run("ps --node seven").await;
    assert!(none.status == 1 && none.err.contains("node seven does not exist"), "{none}");
}

#[tokio::test]
async fn json_has_every_container_and_node() {
    let stage = stage().await;
    stage.node("empty", None).await;
    let list = stage.run("ps -A -o json").await.json();
    let found = &list["containers"][1];
    assert_eq!((&found["node"], &found["pod"]), (&"one".into(), &"notebook".into()), "{list}");
    assert_eq!(found["vram_bytes"], 24u64 << 30, "{list}");
    let nodes: Vec<_> = list["nodes"].as_array().unwrap().iter().collect();
    assert_eq!(nodes.len(), 3, "{list}");
    // A node without a controller has no container, so its part of the list is complete.
    assert!(nodes.iter().all(|node| node["status"] == "done"), "{list}");
}

#[tokio::test]
async fn an_empty_list_prints_no_row() {
    let stage = stage().await;
    let printed = stage.run("ps -n quiet --no-headers").await;
    assert_eq!((printed.status, &*printed.out), (0, ""), "{printed}");
    assert!(printed.err.contains("in namespace quiet"), "{printed}");
}

#[tokio::test]
async fn agents_see_the_users_own_token() {
    let stage = Stage::new().await;
    let agent = stage.node("one", Some(node(Vec::new()))).await;
    stage.run("ps -A").await;
    assert_eq!(*agent.tokens.lock().unwrap(), [format!("Bearer {USER}")]);
}

#[tokio::test]
async fn a_node_that_fails_leaves_the_others() {
    let stage = stage().await;
    // No program listens on the port of this agent's pod.
    stage.api.add("deaf", None, &"0a".repeat(32));
    let (agent, address, _) = Agent::start(Some(node(Vec::new()))).await;
    stage.api.add("impostor", Some(address), &"0a".repeat(32));
    stage.api.add("unknown", Some(address), "");
    let endless = schema::Node { version: "x".repeat(3 << 20), ..schema::Node::default() };
    stage.node("endless", Some(endless)).await;
    let printed = stage.run("ps -A").await;
    assert_eq!((printed.status, printed.rows().len()), (4, 4), "{printed}");
    assert!(printed.err.contains("node deaf: "), "{printed}");
    assert!(printed.err.contains("connection refused in the pod"), "{printed}");
    assert!(printed.err.contains("node impostor: "), "{printed}");
    assert!(printed.err.contains("does not present the certificate"), "{printed}");
    assert!(printed.err.contains("node unknown: "), "{printed}");
    assert!(printed.err.contains("has not published its certificate"), "{printed}");
    assert!(printed.err.contains("reply has more than 2097152 bytes"), "{printed}");
    assert!(agent.tokens.lock().unwrap().is_empty(), "no token is sent to it");
    let list = stage.run("ps -A -o json").await;
    assert_eq!((list.status, &list.json()["nodes"][0]["status"]), (4, &"unreachable".into()));
}

#[tokio::test]
async fn a_refusal_is_exit_status_3() {
    let stage = Stage::new().await;
    let agent = stage.node("one", Some(node(Vec::new()))).await;
    agent.forbid("/api/v1/node");
    let refused = stage.run("ps").await;
    assert!(refused.status == 3 && refused.err.contains("ana may not GET"), "{refused}");
    for request in [
        "GET /api/v1/namespaces/system/pods/agent-one/portforward",
        "GET /api/v1/namespaces/system/pods",
        "GET /api/v1/nodes",
    ] {
        stage.api.deny(request);
        let refused = stage.run("ps -o json").await;
        assert_eq!(refused.status, 3, "{refused}");
        assert!(refused.err.contains(&format!("may not {request}")), "{refused}");
        assert!(refused.err.contains("affinode-kubectl"), "{refused}");
        let object = refused.json();
        let status = if object["status"].is_null() { &object["nodes"][0] } else { &object };
        assert_eq!(status["status"], "refused", "{refused}");
    }
    let other = stage.run("ps --context other").await;
    assert_eq!(other.status, 3, "{other}");
}

#[tokio::test]
async fn exit_status_tells_usage_from_failure() {
    let stage = stage().await;
    for line in ["", "fly", "ps --state asleep", "ps -o yaml", "ps --service-account x"] {
        assert_eq!(stage.run(line).await.status, 2, "{line}");
    }
    for (line, said) in [
        ("ps --context none", "cannot use the kubeconfig"),
        ("ps --kubeconfig /nonexistent", "cannot use the kubeconfig"),
        ("ps --context disguised", "impersonates another user"),
        ("ps --context nameless", "API server refused"),
    ] {
        let printed = stage.run(line).await;
        assert!(printed.err.contains(said), "{line}: {printed}");
        let expected = if said.contains("refused") { 3 } else { 1 };
        assert_eq!(printed.status, expected, "{line}: {printed}");
    }
    let empty = Stage::new().await.run("status").await;
    assert!(empty.status == 1 && empty.err.contains("no node of this cluster"), "{empty}");
}

/// A user with a client certificate must use the token of a service account, because agents accept
/// only tokens.
#[tokio::test]
async fn a_client_certificate_needs_an_account() {
    let stage = stage().await;
    stage.api.cluster.lock().unwrap().open = true;
    let none = stage.run("ps -A --context nameless").await;
    assert!(none.status == 1 && none.err.contains("--service-account NAMESPACE/NAME"), "{none}");
    let some = stage.run("ps -A -o name --context nameless --service-account ml/ana").await;
    assert_eq!((some.status, some.rows().len()), (0, 3), "{some}");
    stage.api.deny("POST /api/v1/namespaces/ml/serviceaccounts/ana/token");
    let denied = stage.run("ps --context nameless --service-account ml/ana").await;
    assert!(denied.status == 3 && denied.err.contains("create a token"), "{denied}");
}

#[tokio::test]
async fn status_sums_all_nodes() {
    let stage = stage().await;
    stage.node("empty", None).await;
    let printed = stage.run("status").await;
    let rows = printed.rows();
    assert_eq!(printed.status, 0, "{printed}");
    assert_eq!(rows[1][..4], ["empty", "Resting", "-", "-"], "{printed}");
    assert_eq!(rows[2][..4], ["one", "Serving", "1", "140.0"], "{printed}");
    let all = ["all", "2", "of", "3", "serving", "2", "280.0", "GiB", "60.0", "GiB"];
    assert_eq!(rows[4][..10], all, "{printed}");
    // VRAM of the idle container, then memory of the offloaded one.
    assert_eq!(rows[4][10..14], ["24.0", "GiB", "8192", "MiB"], "{printed}");
    let sorted = stage.run("status --sort-by reclaimable -o name").await;
    assert_eq!(sorted.out, "one\ntwo\nempty\n", "{sorted}");
    let list = stage.run("status -o json --node two").await.json();
    assert_eq!(list["all"]["offloaded"], 1, "{list}");
    assert_eq!(list["nodes"][0]["health"], "Serving", "{list}");
}

/// `status -o wide` shows since when nothing has used a GPU of a node, if the node's agent has
/// published this.
#[tokio::test]
async fn status_shows_idle_gpus() {
    const SINCE: &str = "2026-11-27T01:02:03Z";
    let stage = stage().await;
    stage.api.cluster.lock().unwrap().nodes.get_mut("two").unwrap()["metadata"]["annotations"]["affinode.io/gpus-idle-since"] =
        SINCE.into();
    let printed = stage.run("status -o wide").await;
    let lines: Vec<&str> = printed.out.lines().filter(|line| line.contains(SINCE)).collect();
    assert!(lines.len() == 1 && lines[0].starts_with("two "), "{printed}");
    assert!(printed.out.contains("IDLE SINCE"), "{printed}");
    let list = stage.run("status -o json").await.json();
    assert_eq!(list["nodes"][1]["gpus_idle_since"], SINCE, "{list}");
    assert!(list["nodes"][0]["gpus_idle_since"].is_null(), "{list}");
}
