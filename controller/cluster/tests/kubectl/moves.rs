//! Tests of `kubectl affinode offload` and `kubectl affinode restore`.

use std::sync::Arc;

use affinode_proto::state::State;

use crate::{
    Stage,
    agent::{Agent, container, node},
};

/// Creates a node with four containers, and a second node with a container in another namespace.
async fn stage() -> (Stage, Arc<Agent>, Arc<Agent>) {
    let stage = Stage::new().await;
    let first = vec![
        container("ml", "notebook", State::Idle, 24),
        container("ml", "busy", State::Active, 40),
        container("ml", "asleep", State::Offloaded, 8),
        container("ml", "lost", State::Lost, 0),
    ];
    let one = stage.node("one", Some(node(first))).await;
    let other = vec![container("web", "server", State::Idle, 8)];
    let two = stage.node("two", Some(node(other))).await;
    (stage, one, two)
}

/// Returns the moves that the command requested from an agent, each as verb and pod.
fn moves(agent: &Agent) -> Vec<String> {
    let node = agent.node.lock().unwrap().clone().unwrap();
    let asked = agent.asked.lock().unwrap().clone();
    let mut moves: Vec<String> = asked
        .iter()
        .filter_map(|line| line.strip_prefix("POST /api/v1/containers/")?.split_once('/'))
        .map(|(key, verb)| {
            let container = node.containers.iter().find(|c| c.key == key).unwrap();
            format!("{verb} {}", container.pod)
        })
        .collect();
    moves.sort();
    moves
}

#[tokio::test]
async fn a_named_pod_is_moved() {
    let (stage, one, two) = stage().await;
    let printed = stage.run("offload notebook").await;
    assert_eq!(printed.status, 0, "{printed}");
    assert_eq!(printed.out, "ml/notebook/main is offloaded, 24.0 GiB in 0.4s\n", "{printed}");
    let printed = stage.run("restore asleep/main web/server/main -o name").await;
    assert_eq!(printed.status, 0, "{printed}");
    assert_eq!(printed.out, "ml/asleep/main\nweb/server/main\n", "{printed}");
    assert_eq!(moves(&one), ["offload notebook", "restore asleep"]);
    assert_eq!(moves(&two), ["restore server"]);
}

#[tokio::test]
async fn all_means_what_can_be_moved() {
    let (stage, one, two) = stage().await;
    let printed = stage.run("offload --all").await;
    // The controller refuses to offload the busy container.
    assert_eq!(printed.status, 3, "{printed}");
    assert!(printed.out.starts_with("ml/notebook/main is offloaded"), "{printed}");
    let why = "ml/busy/main was not offloaded (Active): a call is in progress";
    assert!(printed.err.contains(why), "{printed}");
    assert_eq!(moves(&one), ["offload busy", "offload notebook"]);
    assert!(moves(&two).is_empty(), "it is in another namespace");
    let idle = stage.run("offload --all -A --state idle -o json").await;
    assert_eq!((idle.status, idle.json()["results"].as_array().unwrap().len()), (0, 2), "{idle}");
    assert_eq!(moves(&two), ["offload server"]);
    let restored = stage.run("restore --all -A").await;
    assert_eq!((restored.status, restored.rows().len()), (0, 1), "{restored}");
}

#[tokio::test]
async fn a_dry_run_moves_nothing() {
    let (stage, one, two) = stage().await;
    let printed = stage.run("offload --all -A --dry-run").await;
    assert_eq!((printed.status, printed.rows().len()), (0, 3), "{printed}");
    let line = "ml/notebook/main would be offloaded: Idle, 24.0 GiB, node one";
    assert!(printed.out.contains(line), "{printed}");
    stage.api.deny("post /affinode/v1/containers/offload");
    let refused = stage.run("offload notebook --dry-run").await;
    assert!(refused.status == 3 && refused.err.contains("the move would be refused"), "{refused}");
    assert!(moves(&one).is_empty() && moves(&two).is_empty());
}

#[tokio::test]
async fn moves_need_the_right_and_a_container() {
    let (stage, one, _two) = stage().await;
    let none = stage.run("offload nothing server").await;
    assert_eq!(none.status, 1, "{none}");
    for name in ["nothing", "server"] {
        let why = format!("no GPU container {name} was found in namespace ml");
        assert!(none.err.contains(&why), "{none}");
    }
    one.forbid("/offload");
    let refused = stage.run("offload notebook -o json").await;
    assert_eq!(refused.status, 3, "{refused}");
    let result = &refused.json()["results"][0];
    assert_eq!((&result["status"], &result["done"]), (&"refused".into(), &false.into()));
    assert!(result["why"].as_str().unwrap().contains("ana may not POST"), "{refused}");
    for line in ["offload", "offload a --all", "offload a/b/c/d", "offload /a"] {
        assert_eq!(stage.run(line).await.status, 2, "{line}");
    }
}

/// A node does not reply. The command must move the named container on the node that replies. It
/// must then report a failure, because the containers of the other node are unknown.
#[tokio::test]
async fn a_node_that_fails_is_told_after_moves() {
    let (stage, one, _two) = stage().await;
    stage.api.add("deaf", None, &"0a".repeat(32));
    let printed = stage.run("offload notebook").await;
    assert_eq!((printed.status, printed.rows().len()), (4, 1), "{printed}");
    assert_eq!(moves(&one), ["offload notebook"]);
}
