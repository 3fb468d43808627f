//! Tests of `kubectl affinode node` and `kubectl affinode check`.

use crate::{Stage, agent::node};

const FINGERPRINT: &str = "0a";

async fn stage() -> Stage {
    let stage = Stage::new().await;
    for name in ["one", "two", "busy"] {
        stage.api.add(name, None, FINGERPRINT);
    }
    stage
}

fn excluded(stage: &Stage, name: &str) -> bool {
    let cluster = stage.api.cluster.lock().unwrap();
    cluster.nodes[name]["metadata"]["labels"]["affinode.io/exclude"] == "true"
}

#[tokio::test]
async fn nodes_are_excluded_and_included() {
    let stage = stage().await;
    let printed = stage.run("node exclude one busy").await;
    assert_eq!(printed.out, "node one is excluded\nnode busy is excluded\n", "{printed}");
    assert_eq!(printed.status, 0, "{printed}");
    assert!(excluded(&stage, "one") && excluded(&stage, "busy") && !excluded(&stage, "two"));
    let printed = stage.run("node include one").await;
    assert_eq!(printed.status, 0, "{printed}");
    assert!(!excluded(&stage, "one") && excluded(&stage, "busy"));
}

#[tokio::test]
async fn retire_waits_for_the_removal() {
    let stage = stage().await;
    let printed = stage.run("node retire one").await;
    assert_eq!(printed.status, 0, "{printed}");
    assert!(printed.out.ends_with("Affinode is removed from node one\n"), "{printed}");
    let busy = stage.run("node retire busy --timeout 0s").await;
    assert_eq!(busy.status, 1, "{busy}");
    assert!(busy.err.contains("its state: cannot be removed: 1 shim runs"), "{busy}");
}

#[tokio::test]
async fn a_node_needs_a_name_and_the_right() {
    let stage = stage().await;
    stage.api.deny("PATCH /api/v1/nodes/one");
    let refused = stage.run("node exclude one").await;
    assert!(refused.status == 3 && refused.err.contains("patch node one"), "{refused}");
    assert!(!excluded(&stage, "one"));
    let none = stage.run("node exclude seven").await;
    assert_eq!(none.status, 1, "{none}");
    for line in ["node", "node exclude", "node retire one --timeout soon"] {
        assert_eq!(stage.run(line).await.status, 2, "{line}");
    }
}

#[tokio::test]
async fn check_names_each_fault() {
    let stage = Stage::new().await;
    stage.node("one", Some(node(Vec::new()))).await;
    stage.node("resting", None).await;
    let fine = stage.run("check").await;
    assert!(fine.status == 0 && fine.out.contains("the runtime is served, 1 GPU,"), "{fine}");
    assert_eq!(fine.rows().len(), 5, "{fine}");
    stage.api.deny("post /affinode/v1/containers/offload");
    let viewer = stage.run("check").await;
    assert!(viewer.status == 0 && viewer.out.contains("affinode-operator allows it"), "{viewer}");
    stage.run("node exclude one").await;
    let excluded = stage.run("check -o name").await;
    assert_eq!((excluded.status, &*excluded.out), (1, "node one\n"), "{excluded}");
    stage.api.add("deaf", None, &"0a".repeat(32));
    let deaf = stage.run("check --node deaf -o json").await;
    assert_eq!((deaf.status, &deaf.json()[2]["result"]), (4, &"failed".into()), "{deaf}");
}

/// A node has refused a configuration. `check` must fail and print the refusal, with and without a
/// controller on the node.
#[tokio::test]
async fn check_names_a_refused_configuration() {
    const STATE: &str = "served, but the cluster's configuration is not in use: unknown key";
    let stage = Stage::new().await;
    stage.node("one", Some(node(Vec::new()))).await;
    stage.node("resting", None).await;
    for name in ["one", "resting"] {
        stage.api.cluster.lock().unwrap().nodes.get_mut(name).unwrap()["metadata"]["annotations"]
            ["affinode.io/state"] = STATE.into();
        let printed = stage.run(&format!("check --node {name}")).await;
        assert!(printed.status == 1 && printed.out.contains(STATE), "{printed}");
    }
}
