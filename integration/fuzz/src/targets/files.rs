//! What people and pods write: configuration, annotations, queries, traces.

use std::collections::BTreeMap;

use affinode_controller::{
    config::Config,
    core::policy::Policies,
    http::query,
    simulate::trace::{Assumed, Trace},
};

/// A configuration file: taken whole or refused with a reason.
pub fn config(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    match Config::from_toml(text) {
        Ok(config) => drop(config.settings()),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// A pod's annotations, `name=value` a line: each is understood or named in a warning, and
/// what comes out is a policy that the node can keep.
pub fn annotations(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let pairs = text.lines().filter_map(|line| line.split_once('='));
    let pairs: BTreeMap<String, String> =
        pairs.map(|(name, value)| (format!("affinode.io/{name}"), value.to_owned())).collect();
    let (policy, warnings) = Policies::default().resolve("pods", &pairs);
    assert!(warnings.len() <= pairs.len());
    assert!((-1000..=1000).contains(&policy.priority));
    assert!((1..=366 * 86_400_000).contains(&policy.idle_timeout_ms));
}

/// The query of an HTTP request: a value is a part of it, a number never negative, and refused only
/// where there is a value.
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

/// A trace for `affinode simulate`: what is read is in order and can be added up.
pub fn trace(data: &[u8]) {
    let assumed = Assumed { vram_bytes: 1 << 30, service_ms: 10, seed: 1 };
    let Ok(trace) = Trace::parse(data, "fuzz", assumed) else { return };
    assert!(trace.requests() > 0);
    let (_, end_ms) = (trace.vram_bytes(), trace.end_ms());
    for load in &trace.loads {
        assert!(load.arrivals_ms.is_sorted() && u64::from(load.arrivals_ms[0]) <= end_ms);
    }
}
