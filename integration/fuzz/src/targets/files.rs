//! Fuzz targets for input from users and pods: configuration, annotations, queries, traces, hints
//! and journal records.

use std::collections::BTreeMap;

use affinode_controller::{config::Config, http::query, journal::Journal};
use affinode_core::{
    Key, Record,
    hints::Hint,
    policy::{Mode, Policies, Policy, Restore},
};
use affinode_simulate::trace::{TraceDefaults, WorkloadTrace};
use tempfile::TempDir;

/// Parses a configuration file. It must be accepted as a whole, or refused with a reason.
pub fn config(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    match Config::from_toml(text) {
        Ok(config) => drop(config.settings()),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// Parses a pod's annotations, one `name=value` per line. Each annotation must be accepted or named
/// in a warning. The priority and the idle timeout of the resulting policy must be within their
/// permitted ranges.
pub fn annotations(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let pairs = text.lines().filter_map(|line| line.split_once('='));
    let pairs: BTreeMap<String, String> =
        pairs.map(|(name, value)| (format!("affinode.io/{name}"), value.to_owned())).collect();
    let (policy, warnings) = Policies::default().resolve("pods", &pairs);
    assert!(warnings.len() <= pairs.len());
    assert!((-1000..=1000).contains(&policy.priority));
    assert!((1..=366 * 86_400_000).contains(&policy.idle_timeout_ms));
    assert_within_the_operators_limits(&pairs);
}

/// Asserts that a pod can turn on two settings only if the operator permits them: the restore
/// policy that ends other containers' processes, and dedup, which stores memory on the node. Also
/// asserts that `latency-sensitive` turns offloads off.
fn assert_within_the_operators_limits(pairs: &BTreeMap<String, String>) {
    for restore in [Restore::Queue, Restore::ByAnnotation, Restore::Immediate] {
        for dedup in [false, true] {
            let node = Policy { restore, dedup, ..Policy::default() };
            let (policy, _) = Policies { node, ..Policies::default() }.resolve("pods", pairs);
            assert_ne!(policy.restore, Restore::ByAnnotation, "no restore policy");
            if restore == Restore::Queue {
                assert_eq!(policy.restore, Restore::Queue, "a pod may end processes of others");
            }
            assert!(dedup || !policy.dedup, "a pod stores memory of the node");
            if pairs.get("affinode.io/latency-sensitive").is_some_and(|value| value == "true") {
                assert_eq!(policy.mode, Mode::Off, "it opted out");
            }
        }
    }
}

/// Parses the query string of an HTTP request. Every value that the parser returns must be a part
/// of the query. A number must not be negative. The parser may refuse a parameter only if the query
/// contains a value of the parameter.
pub fn query(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let (name, query_text) = text.split_once('\n').unwrap_or(("watch", text));
    if let Some(value) = query::value(Some(query_text), name) {
        assert!(query_text.contains(value) && !value.contains('&'));
    }
    match query::number(Some(query_text), name) {
        Ok(number) => assert!(number.is_none_or(|number| number >= 0)),
        Err(_) => assert!(query::value(Some(query_text), name).is_some()),
    }
}

/// Parses a trace file for `affinode simulate`. In an accepted trace, the calls of each process
/// must be in order of time. The sum of the processes' VRAM must not overflow.
pub fn trace(data: &[u8]) {
    let assumed = TraceDefaults { vram_bytes: 1 << 30, service_ms: 10, seed: 1 };
    let Ok(trace) = WorkloadTrace::parse(data, "fuzz", assumed) else { return };
    assert!(trace.requests() > 0);
    let (_, end_ms) = (trace.vram_bytes(), trace.end_ms());
    for load in &trace.loads {
        assert!(load.arrivals_ms.is_sorted() && u64::from(load.arrivals_ms[0]) <= end_ms);
    }
}

/// Parses lines that a container writes into its hint pipe. The last line that is complete and
/// valid must count.
pub fn hint(data: &[u8]) {
    let Some(hint) = Hint::last(data) else { return };
    let mut written = data.to_vec();
    written.extend_from_slice(format!("\n{}\n", hint.as_str()).as_bytes());
    assert_eq!(Hint::last(&written), Some(hint), "the hint changes when it is written again");
}

/// Reads the input as a record of the journal (the controller's files about offloaded containers).
/// The controller must read the record, or reject it with a reason. If the input is valid except
/// perhaps its checksum, the record is also written with a matching checksum and read again. Both
/// records must be equal.
pub fn journal(data: &[u8]) {
    thread_local! {
        static FOLDER: Option<TempDir> = tempfile::tempdir().ok();
    }
    FOLDER.with(|folder| {
        let Some(folder) = folder else { return };
        let (Ok(journal), Ok(key)) = (Journal::open(folder.path()), Key::parse(&"a".repeat(32)))
        else {
            return;
        };
        let file = folder.path().join(key.as_str());
        let read = || {
            journal
                .read_all()
                .unwrap_or_else(|error| panic!("cannot read the journal's folder: {error}"))
        };
        if std::fs::write(&file, data).is_err() {
            return;
        }
        let (good, bad) = read();
        assert_eq!(good.len() + bad.len(), 1, "a file is read as one record or reported as bad");
        let Ok(record) = serde_json::from_slice::<Record>(data) else { return };
        assert!(journal.write(&key, &record).is_ok());
        let (good, bad) = read();
        assert!(bad.is_empty(), "{bad:?}");
        let again = serde_json::to_string(&good[0].1).unwrap_or_default();
        assert_eq!(Some(again), serde_json::to_string(&record).ok());
    });
}
