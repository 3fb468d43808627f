//! Lists the metrics for the reference pages: name, type, labels and help, as in `/metrics`.
//!
//! `/metrics` omits a family without a series, so an example node gives every family a series.

use std::{collections::BTreeMap, fmt};

use affinode_proto::{event::EventKind, state::State};
use serde::Serialize;

use super::{DeliveryCounts, Metrics};
use crate::schema::{Container, DeviceBytes, Event, Gpu, Node, Process};

/// A metric in the form of the reference pages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MetricReference {
    /// Full name of the metric, including the suffix of a series, such as `_total`, if there is one.
    pub name: String,
    /// Type of the metric: counter, gauge or histogram.
    #[serde(rename = "type")]
    pub kind: String,
    /// Names of the metric's labels, in the order of `/metrics`.
    pub labels: Vec<String>,
    /// Help text of the metric, as `/metrics` prints it.
    pub help: String,
}

/// Lists every metric of a controller, in the order of `/metrics`.
///
/// # Errors
/// The list of the metrics cannot be created.
pub fn metrics() -> Result<Vec<MetricReference>, fmt::Error> {
    let metrics = Metrics::new(1);
    let mut node = example();
    // Time in use and idle time have separate families. An observation counts the time since the
    // previous observation, so each state needs an observation after it.
    for (at_ms, state) in [(1, State::Active), (2, State::Idle), (3, State::Idle)] {
        node.containers[0].state = state.as_str().into();
        metrics.observe(&node, at_ms);
    }
    metrics.event(&Event { kind: EventKind::Refused.to_string(), ..Event::default() });
    metrics.event(&Event { kind: EventKind::StoredOnDisk.to_string(), ..Event::default() });
    metrics.refused_request("host");
    Ok(parse(&metrics.text(&node, DeliveryCounts::default())?))
}

fn example() -> Node {
    let on_gpu = || vec![DeviceBytes { uuid: "GPU-0".into(), bytes: 1 }];
    let process =
        Process { call_cost_ps: 1, vram: on_gpu(), offloaded: on_gpu(), ..Process::default() };
    Node {
        gpus: vec![Gpu { uuid: "GPU-0".into(), ..Gpu::default() }],
        containers: vec![Container {
            copyable_share: Some(1.0),
            processes: vec![process],
            ..Container::default()
        }],
        ..Node::default()
    }
}

fn parse(text: &str) -> Vec<MetricReference> {
    let mut found: Vec<MetricReference> = Vec::new();
    let mut helps = BTreeMap::new();
    for line in text.lines() {
        if let Some((name, help)) = line.strip_prefix("# HELP ").and_then(|l| l.split_once(' ')) {
            helps.insert(name.to_owned(), help.trim_end_matches('.').to_owned());
        } else if let Some((name, kind)) =
            line.strip_prefix("# TYPE ").and_then(|l| l.split_once(' '))
        {
            found.push(MetricReference {
                name: name.to_owned(),
                kind: kind.to_owned(),
                labels: Vec::new(),
                help: String::new(),
            });
        } else if let (Some(metric), false) = (found.last_mut(), line.starts_with('#')) {
            let (series, labels) = line.split_once('{').unwrap_or((line, ""));
            if metric.kind == "counter" {
                metric.name = series.split(' ').next().unwrap_or_default().to_owned();
            }
            for label in label_names(labels) {
                if label != "le" && !metric.labels.contains(&label) {
                    metric.labels.push(label);
                }
            }
        }
    }
    for metric in &mut found {
        let family = metric.name.strip_suffix("_total").unwrap_or(&metric.name);
        let help = helps.get(&metric.name).or_else(|| helps.get(family));
        metric.help = help.cloned().unwrap_or_default();
    }
    found
}

/// Returns the label names before each `="` in a text such as `a="1",b="2"} 3`.
fn label_names(labels: &str) -> impl Iterator<Item = String> + '_ {
    let inside = labels.rsplit_once('}').map_or("", |(inside, _)| inside);
    inside.split(',').filter_map(|pair| Some(pair.split_once("=\"")?.0.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_registered_metric_is_listed() {
        let code = include_str!("families.rs");
        let registered = code.matches(".add").count();
        let listed = metrics().unwrap();
        assert_eq!(listed.len(), registered, "the example node fills too few families");
        for metric in &listed {
            assert!(metric.name.starts_with("affinode_"), "{metric:?}");
            assert!(!metric.help.is_empty(), "{metric:?}");
        }
    }

    #[test]
    fn labels_and_suffixes_are_those_of_the_series() {
        let listed = metrics().unwrap();
        let of = |name: &str| listed.iter().find(|metric| metric.name == name).unwrap();
        let calls = of("affinode_container_cuda_calls_total");
        assert_eq!(calls.kind, "counter");
        assert_eq!(calls.labels, ["namespace", "pod", "container"]);
        assert_eq!(of("affinode_gpu_vram_total_bytes").labels, ["UUID", "gpu", "model"]);
        assert_eq!(of("affinode_wake_latency_seconds").kind, "histogram");
        assert!(of("affinode_wake_latency_seconds").labels.is_empty());
    }
}
