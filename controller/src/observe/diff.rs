//! Finds the changes between two observations of the node. The passing of time is not a change,
//! because watchers compute durations themselves.

use std::collections::HashMap;

use serde::Serialize;

use crate::schema::{Container, Node};

/// Changes of the node since the last observation.
#[derive(Debug, Serialize)]
pub struct ViewChange {
    /// The node without its containers. `None` if its values are unchanged.
    pub node: Option<Node>,
    /// New and changed containers, each with all of its values.
    pub containers: Vec<Container>,
    /// Keys of containers that no longer exist.
    pub gone: Vec<String>,
}

impl ViewChange {
    /// Returns the changes from one observation to the next, or `None` if there are none.
    #[must_use]
    pub fn between(before: &Node, after: &Node) -> Option<ViewChange> {
        let old: HashMap<&str, &Container> =
            before.containers.iter().map(|c| (c.key.as_str(), c)).collect();
        let containers: Vec<Container> = after
            .containers
            .iter()
            .filter(|c| old.get(c.key.as_str()).is_none_or(|old| differs(old, c)))
            .cloned()
            .collect();
        let kept: std::collections::HashSet<&str> =
            after.containers.iter().map(|c| c.key.as_str()).collect();
        let gone: Vec<String> = before
            .containers
            .iter()
            .filter(|c| !kept.contains(c.key.as_str()))
            .map(|c| c.key.clone())
            .collect();
        let node = Some(header(after)).filter(|head| *head != header(before));
        let nothing = node.is_none() && containers.is_empty() && gone.is_empty();
        (!nothing).then_some(ViewChange { node, containers, gone })
    }
}

fn header(node: &Node) -> Node {
    Node {
        node: node.node.clone(),
        version: node.version.clone(),
        controller_pid: node.controller_pid,
        started_unix_ms: node.started_unix_ms,
        dashboard: node.dashboard.clone(),
        gpu_error: node.gpu_error.clone(),
        auto_offload: node.auto_offload,
        host_used_bytes: node.host_used_bytes,
        host_free_bytes: node.host_free_bytes,
        host_pool_bytes: node.host_pool_bytes,
        host_pool_used_bytes: node.host_pool_used_bytes,
        gpus: node.gpus.clone(),
        containers: Vec::new(),
    }
}

/// Maximum difference of `since_unix_ms` that does not count as a change, in milliseconds. The time
/// is computed from two clocks that are read one after the other.
const JITTER_MS: i64 = 50;

fn differs(old: &Container, new: &Container) -> bool {
    if (old.since_unix_ms - new.since_unix_ms).abs() > JITTER_MS {
        return true;
    }
    // A shorter idle time means that the container was used in between.
    if new.idle_ms < old.idle_ms {
        return true;
    }
    let timeless =
        Container { since_unix_ms: old.since_unix_ms, idle_ms: old.idle_ms, ..new.clone() };
    timeless != *old
}

#[cfg(test)]
mod tests {
    use super::*;

    fn container(key: &str, idle_ms: u64) -> Container {
        Container { key: key.into(), idle_ms, ..Container::default() }
    }

    fn node(containers: Vec<Container>) -> Node {
        Node { containers, ..Node::default() }
    }

    #[test]
    fn time_that_passes_is_no_change() {
        let before = node(vec![container("a", 10)]);
        assert!(ViewChange::between(&before, &node(vec![container("a", 900)])).is_none());
        let used = ViewChange::between(&before, &node(vec![container("a", 1)])).unwrap();
        assert_eq!(used.containers[0].key, "a");
    }

    #[test]
    fn only_changes_are_sent() {
        let before = node(vec![container("a", 0), container("b", 0), container("c", 0)]);
        let changed = Container { vram_bytes: 7, ..container("b", 0) };
        let after = node(vec![container("a", 5), changed, container("d", 0)]);
        let change = ViewChange::between(&before, &after).unwrap();
        let keys: Vec<&str> = change.containers.iter().map(|c| c.key.as_str()).collect();
        assert_eq!((keys, change.gone), (vec!["b", "d"], vec!["c".to_owned()]));
        assert!(change.node.is_none());
    }

    #[test]
    fn a_gpu_change_sends_no_container() {
        let mut after = node(vec![container("a", 0)]);
        after.gpus.push(crate::schema::Gpu::default());
        let change = ViewChange::between(&node(vec![container("a", 0)]), &after).unwrap();
        assert!(change.containers.is_empty());
        assert!(change.node.unwrap().containers.is_empty());
    }
}
