//! Checks the metrics that alert rules, dashboards and documents name. Each metric of the node
//! agent and of the webhook must exist.

#![allow(clippy::unwrap_used)] // Helpers of tests.

use std::{collections::BTreeSet, fs, path::Path};

use affinode_cluster::{
    node::agent_metrics::AgentMetrics,
    webhook::{
        decide::AdmissionDecision,
        metrics::{DecisionOutcome, Metrics as WebhookMetrics},
    },
};

/// Returns the metrics of the node agent and the webhook that a text names. A name that ends with
/// `_` is a prefix of several metrics.
fn names(text: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for (start, _) in text.match_indices("affinode_") {
        let end = text[start..].find(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
        let name = &text[start..start + end.unwrap_or(text.len() - start)];
        let ours = ["affinode_agent_", "affinode_webhook_", "affinode_controller_up"];
        if ours.iter().any(|prefix| name.starts_with(prefix)) {
            names.insert(name.to_owned());
        }
    }
    names
}

#[test]
fn named_metrics_are_served() {
    let agent = AgentMetrics::default().text(true, Some(1)).unwrap();
    let webhook = WebhookMetrics::default();
    // The metric of decisions exists from the first decision on.
    webhook.decided(&DecisionOutcome::of(&AdmissionDecision::Ask(BTreeSet::new())));
    let webhook = webhook.text(Some(1)).unwrap();
    let known = names(&format!("{agent}{webhook}"));
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut asked = BTreeSet::new();
    for folder in ["config/grafana", "config/prometheus", "docs"] {
        for entry in fs::read_dir(root.join(folder)).unwrap() {
            let path = entry.unwrap().path();
            if path.is_file() {
                asked.extend(names(&fs::read_to_string(path).unwrap()));
            }
        }
    }
    assert!(asked.len() > 4, "{asked:?}");
    let unknown: Vec<&String> = asked.difference(&known).collect();
    assert!(unknown.is_empty(), "no such metrics: {unknown:?}");
}
