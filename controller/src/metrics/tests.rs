//! Tests that every metric changes when the event that it counts happens.

use super::*;
use crate::{
    history::ControllerRuns,
    schema::{Container, DeviceBytes, Event, Gpu, Node, Process},
};

fn node(state: &str, held: u64, offloaded: u64) -> Node {
    let on = |bytes| vec![DeviceBytes { uuid: "GPU-0".into(), bytes }];
    Node {
        version: "1".into(),
        started_unix_ms: 5_000,
        auto_offload: true,
        host_used_bytes: offloaded,
        host_free_bytes: 1 << 30,
        host_pool_bytes: 2 << 30,
        host_pool_used_bytes: 1 << 26,
        gpus: vec![Gpu {
            uuid: "GPU-0".into(),
            name: "H200".into(),
            vram_total_bytes: 8,
            vram_used_bytes: 4,
            vram_reclaimed_bytes: 2,
            vram_reserved_bytes: 1,
            vram_unmovable_bytes: 3,
            copier_vram_bytes: 1,
            copier_shared_bytes: 4,
            copier_stored_bytes: 2,
            utilization_percent: 50,
            utilization_minute_percent: 40,
            ..Gpu::default()
        }],
        containers: vec![Container {
            key: "k".into(),
            namespace: "ml".into(),
            id: "one".into(),
            state: state.into(),
            idle_ms: 1,
            no_progress_ms: 1,
            vram_bytes: held,
            offloaded_bytes: offloaded,
            disk_bytes: offloaded / 2,
            copyable_share: Some(0.5),
            processes: vec![Process {
                calls: held + offloaded,
                waiters: 1,
                polls: 1,
                call_cost_ps: 2_000,
                held_us: 250_000 * held,
                kept_bytes: 1,
                vram: on(held),
                offloaded: on(offloaded),
                ..Process::default()
            }],
            ..Container::default()
        }],
        ..Node::default()
    }
}

fn state(from: &str, to: &str, unix_ms: i64) -> Event {
    Event {
        kind: "state".into(),
        key: "k".into(),
        from: from.into(),
        to: to.into(),
        unix_ms,
        bytes: 32 << 20,
        elapsed_ms: 700,
        ..Event::default()
    }
}

/// Returns metrics after observations and events that change every metric.
fn lived() -> Metrics {
    let runs = ControllerRuns { starts: 2, unexpected_ends: 1 };
    let metrics = Metrics::before_history();
    let unknown = metrics.text(&Node::default(), DeliveryCounts::default()).unwrap();
    assert!(!unknown.contains("restarts") && !unknown.contains("unexpected_ends"), "{unknown}");
    metrics.set_runs(runs);
    for (at, what, held, offloaded) in [
        (1_000, "Active", 4, 0),
        (2_000, "Idle", 4, 0),
        (3_000, "Offloaded", 0, 9),
        (4_000, "Queued", 0, 9),
    ] {
        metrics.observe(&node(what, held, offloaded), at);
    }
    for (from, to, at) in [
        ("Offloading", "Offloaded", 10),
        ("Offloaded", "Queued", 20),
        ("Queued", "Restoring", 120),
        ("Restoring", "Active", 620),
    ] {
        metrics.event(&state(from, to, at));
    }
    metrics.event(&Event {
        kind: "refused".into(),
        reason: "managed-memory".into(),
        ..Event::default()
    });
    for kind in ["stored-on-disk", "disk-failed", "disk-failed"] {
        metrics.event(&Event { kind: kind.into(), ..Event::default() });
    }
    metrics.refused_request("host");
    metrics
}

#[test]
fn every_metric_is_moved() {
    let metrics = lived();
    let counts = DeliveryCounts { watchers: 1, missed: 3, history_dropped: 5 };
    let text = metrics.text(&node("Queued", 3, 4), counts).unwrap();
    let names: Vec<&str> =
        text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect();
    assert!(names.len() > 25, "{names:?}");
    for name in names {
        assert!(name.starts_with("affinode_"), "{name}");
        let moved = text.lines().any(|line| {
            line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ', '_']))
                && line
                    .rsplit(' ')
                    .next()
                    .and_then(|value| value.parse::<f64>().ok())
                    .is_some_and(|value| value != 0.0)
        });
        assert!(moved, "{name} is 0 in all series:\n{text}");
    }
}

#[test]
fn disk_steps_are_counted_by_result() {
    let text = lived().text(&node("Offloaded", 0, 9), DeliveryCounts::default()).unwrap();
    for line in [
        "affinode_disk_content_bytes 4",
        "affinode_disk_steps_total{result=\"stored\"} 1",
        "affinode_disk_steps_total{result=\"failed\"} 2",
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
}

/// Checks that the dedup metrics of a GPU end with the GPU. If the node no longer has a GPU, the
/// output must omit these metrics.
#[test]
fn dedup_series_end_with_their_gpu() {
    let metrics = lived();
    let figures = |node: &Node| {
        let text = metrics.text(node, DeliveryCounts::default()).unwrap();
        ["shared", "stored"].map(|name| {
            let name = format!("affinode_gpu_host_memory_{name}_bytes{{");
            let line = text.lines().find(|line| line.starts_with(&name))?;
            line.rsplit(' ').next().map(str::to_owned)
        })
    };
    assert_eq!(figures(&node("Offloaded", 0, 9)), ["4", "2"].map(|n| Some(n.to_owned())));
    assert_eq!(figures(&Node::default()), [None, None]);
}

#[test]
fn vram_time_is_split_by_use() {
    let metrics = lived();
    let text = metrics.text(&node("Queued", 0, 0), DeliveryCounts::default()).unwrap();
    let labels = "{namespace=\"ml\",pod=\"\",container=\"one\"}";
    let pressure = |line: &str| line.starts_with("affinode_gpu_vram_pressure_ratio{");
    let pressure = text.lines().find(|line| pressure(line)).unwrap_or_default();
    assert!(pressure.ends_with(" 0.75"), "4 bytes in use and 2 offloaded, of 8: {pressure}");
    for (name, value) in [("used", "4.0"), ("idle", "4.0"), ("returned", "9.0")] {
        let line = format!("affinode_container_{name}_vram_byte_seconds_total{labels} {value}");
        assert!(text.contains(&line), "{line} is not in\n{text}");
    }
    // Each GPU of the test has 8 bytes of VRAM.
    let labels = "{namespace=\"ml\",pod=\"\",container=\"one\",state=";
    for (state, value) in [("used", "0.5"), ("idle", "0.5"), ("returned", "1.125")] {
        let line = format!("affinode_container_gpu_seconds_total{labels}\"{state}\"}} {value}");
        assert!(text.contains(&line), "{line} is not in\n{text}");
    }
    assert!(text.contains("affinode_queue_wait_seconds_sum 0.1"), "{text}");
    assert!(text.contains("affinode_restore_duration_seconds_sum 0.5"), "{text}");
    assert!(text.contains("affinode_wake_latency_seconds_sum 0.7"), "{text}");
}

/// Checks that a container counts as waiting only while it is in the queue, and on the GPU whose
/// VRAM it waits for.
#[test]
fn wait_of_a_container_is_shown() {
    let metrics = Metrics::new(1);
    let figures = |state: &str| {
        let mut node = node(state, 0, 9);
        node.containers[0].since_unix_ms = 10_000;
        node.gpus.push(Gpu { uuid: "GPU-1".into(), index: 1, ..Gpu::default() });
        let text = metrics.text_at(&node, DeliveryCounts::default(), 102_500).unwrap();
        [
            "container_queue_wait_seconds{",
            "gpu_queue_depth{UUID=\"GPU-0\"",
            "gpu_queue_depth{UUID=\"GPU-1\"",
        ]
        .map(|name| {
            let line = text.lines().find(|l| l.starts_with(&format!("affinode_{name}")));
            line.unwrap().rsplit(' ').next().unwrap().parse::<f64>().unwrap()
        })
    };
    assert_eq!(figures("Queued"), [92.5, 1.0, 0.0]);
    assert_eq!(figures("Offloaded"), [0.0; 3]);
}

#[test]
fn gpu_time_is_right_on_mixed_gpus() {
    let metrics = Metrics::new(1);
    let gpu = |uuid: &str, vram_total_bytes| Gpu {
        uuid: uuid.into(),
        vram_total_bytes,
        ..Gpu::default()
    };
    let on = |uuid: &str, bytes| DeviceBytes { uuid: uuid.into(), bytes };
    let mut node = node("Active", 8, 0);
    node.gpus = vec![gpu("small", 8), gpu("large", 16)];
    node.containers[0].processes[0].vram = vec![on("small", 4), on("large", 4), on("gone", 9)];
    metrics.observe(&node, 1_000);
    metrics.observe(&node, 5_000);
    let text = metrics.text(&node, DeliveryCounts::default()).unwrap();
    // Half of one GPU and a quarter of the other GPU, for 4 s.
    assert!(text.contains("state=\"used\"} 3.0\n"), "{text}");
}

#[test]
fn a_container_has_one_series_with_its_reason() {
    let metrics = lived();
    let mut node = node("Idle", 4, 0);
    for reason in ["no-pressure", "oversubscribed"] {
        node.containers[0].reason = reason.into();
        let text = metrics.text(&node, DeliveryCounts::default()).unwrap();
        let lines: Vec<&str> =
            text.lines().filter(|line| line.starts_with("affinode_container_reason{")).collect();
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(lines[0].contains(&format!("reason=\"{reason}\"")), "{lines:?}");
    }
}

#[test]
fn an_implausible_hook_cost_is_ignored() {
    let metrics = Metrics::new(1);
    let looks = |calls: u64, held_us: u64, at: i64| {
        let mut node = node("Active", 0, 0);
        let process = &mut node.containers[0].processes[0];
        (process.calls, process.polls, process.call_cost_ps) = (calls, 500, 3_000);
        process.held_us = held_us;
        metrics.observe(&node, at);
    };
    looks(500, 2_000_000, 1_000);
    looks(1_000_500, 2_500_000, 2_000);
    let figures = || {
        let text = metrics.text(&node("Active", 0, 0), DeliveryCounts::default()).unwrap();
        ["hook", "held_calls"].map(|name| {
            let name = format!("affinode_container_{name}_seconds_total{{");
            let line = text.lines().find(|line| line.starts_with(&name)).unwrap();
            line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()
        })
    };
    let [hook, held] = figures();
    assert!((hook - 0.003_003).abs() < 1e-9 && (held - 2.5).abs() < 1e-9, "{hook} {held}");
    looks(u64::MAX, u64::MAX, 3_000);
    assert_eq!(figures(), [hook, held], "a wait of a million years is ignored");
    looks(0, 0, 4_000);
    assert_eq!(figures(), [hook, held], "counters that decrease are ignored");
}

#[test]
fn series_of_containers_are_limited() {
    let metrics = lived();
    metrics.observe(&Node::default(), 5_000);
    assert!(
        !metrics.text(&Node::default(), DeliveryCounts::default()).unwrap().contains("\"one\"")
    );
    let mut many = Node::default();
    for number in 0..CONTAINERS + 500 {
        many.containers.push(Container {
            key: format!("{number:05}"),
            id: format!("c{number}"),
            state: "Idle".into(),
            ..Container::default()
        });
    }
    metrics.observe(&many, 6_000);
    let text = metrics.text(&many, DeliveryCounts::default()).unwrap();
    assert_eq!(text.matches("affinode_container_idle_seconds{").count(), CONTAINERS);
    assert!(text.contains("affinode_containers{state=\"Idle\"} 1500"), "every container counts");
}
