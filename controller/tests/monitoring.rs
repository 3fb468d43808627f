//! Tests that dashboards and alert rules in `config/` use only existing metrics. If Prometheus's
//! tool `promtool` is installed, it must accept the metrics and rules.

#![allow(clippy::unwrap_used)] // Helpers of tests.

use std::{
    collections::BTreeSet,
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use affinode_controller::{
    metrics::{DeliveryCounts, Metrics, classic},
    schema::{Container, DeviceBytes, Event, Gpu, Node, Process},
};

fn config() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../config")
}

fn document(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs").join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Returns the metrics of a node on which every kind of event has happened.
fn scrape() -> String {
    let metrics = Metrics::new(2);
    let on = |bytes| vec![DeviceBytes { uuid: "GPU-0".into(), bytes }];
    let process = Process { vram: on(1), offloaded: on(1), ..Process::default() };
    let container = Container {
        key: "k".into(),
        namespace: "ml".into(),
        id: "one".into(),
        state: "Idle".into(),
        processes: vec![process],
        ..Container::default()
    };
    let gpu = Gpu { uuid: "GPU-0".into(), name: "H200".into(), ..Gpu::default() };
    let node = Node { gpus: vec![gpu], containers: vec![container], ..Node::default() };
    metrics.observe(&node, 1_000);
    metrics.observe(&node, 2_000);
    let mut busy = node.clone();
    busy.containers[0].state = "Active".into();
    metrics.observe(&busy, 3_000);
    metrics.observe(&busy, 4_000);
    metrics.event(&Event { kind: "refused".into(), reason: "busy".into(), ..Event::default() });
    metrics.refused_request(affinode_controller::http::DenyReason::Host.as_str());
    classic(
        &metrics
            .text(&node, DeliveryCounts { history_dropped: 1, ..DeliveryCounts::default() })
            .unwrap(),
    )
}

/// Returns whether a metric belongs to the node agent or the webhook. The crate affinode-cluster
/// checks the names of these metrics.
fn is_of_the_cluster(name: &str) -> bool {
    ["affinode_agent_", "affinode_webhook_"].iter().any(|prefix| name.starts_with(prefix))
        || name == "affinode_controller_up"
}

fn names(text: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for (start, _) in text.match_indices("affinode_") {
        let end = text[start..].find(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
        names.insert(text[start..start + end.unwrap_or(text.len() - start)].to_owned());
    }
    names
}

#[test]
fn dashboards_and_rules_query_known_metrics() {
    let known = names(&scrape());
    let mut asked = BTreeSet::new();
    for folder in ["grafana", "prometheus", "kubernetes/autoscaling"] {
        for entry in fs::read_dir(config().join(folder)).unwrap() {
            asked.extend(names(&fs::read_to_string(entry.unwrap().path()).unwrap()));
        }
    }
    assert!(asked.len() > 20, "{asked:?}");
    let unknown: Vec<&String> =
        asked.difference(&known).filter(|name| !is_of_the_cluster(name)).collect();
    assert!(unknown.is_empty(), "no such metrics: {unknown:?}");
}

#[test]
fn rules_and_dashboards_name_nodes_not_addresses() {
    for folder in ["grafana", "prometheus"] {
        for entry in fs::read_dir(config().join(folder)).unwrap() {
            let path = entry.unwrap().path();
            let text = fs::read_to_string(&path).unwrap();
            // The label has the address of an agent's pod, which changes with the pod.
            assert!(!text.contains("instance"), "{}", path.display());
        }
    }
}

#[test]
fn documents_name_metrics_that_exist() {
    let known = names(&scrape());
    let pages = ["autoscaling.md", "concepts.md", "engines.md", "gpu-sharing.md", "operations.md"];
    let text: String = pages.map(document).concat().replace("libaffinode_preload.so", "");
    let named = names(&text);
    assert!(named.len() > 5, "{named:?}");
    let unknown: Vec<&String> =
        named.difference(&known).filter(|name| !is_of_the_cluster(name)).collect();
    assert!(unknown.is_empty(), "no such metrics: {unknown:?}");
}

#[test]
fn dashboards_are_json_with_numbered_panels() {
    for entry in fs::read_dir(config().join("grafana")).unwrap() {
        let path = entry.unwrap().path();
        let board: serde_json::Value =
            serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        let panels = board["panels"].as_array().unwrap();
        let numbers: BTreeSet<u64> = panels.iter().filter_map(|p| p["id"].as_u64()).collect();
        assert_eq!(numbers.len(), panels.len(), "{}", path.display());
    }
}

fn promtool(arguments: &[&str], input: &str) {
    let child = Command::new("promtool")
        .args(arguments)
        .current_dir(config().join("prometheus"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    // `cargo xtask test` downloads promtool. Without it, a plain `cargo test` skips this check.
    let Ok(mut child) = child else {
        assert!(std::env::var_os("AFFINODE_NEEDS_PROMTOOL").is_none(), "no promtool in the PATH");
        affinode_test_notes::skip("prometheus", "promtool (Debian: prometheus) is missing");
        return;
    };
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&said));
}

#[test]
fn promtool_accepts_the_metrics() {
    promtool(&["check", "metrics"], &scrape());
}

#[test]
fn promtool_accepts_rules_and_their_tests() {
    promtool(&["check", "rules", "affinode.rules.yml"], "");
    promtool(&["test", "rules", "affinode.test.yml"], "");
}
