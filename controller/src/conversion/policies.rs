//! Converts the policies of the node and its containers to messages of the control API.

use affinode_core::{Key, Node, container::Container, explain::Value};
use affinode_proto::api::control;

/// Returns the policies of the node and its containers. If `only` is given, only this container is
/// reported.
#[must_use]
pub fn policies(node: &Node, only: Option<&Key>) -> control::PolicyResponse {
    let mine = |key: &&Key| only.is_none_or(|only| only == *key);
    control::PolicyResponse {
        node: node.policies().explain_node().iter().map(shown).collect(),
        containers: node
            .containers()
            .filter(|(key, _)| mine(key))
            .map(|(key, c)| of_container(node, key, c))
            .collect(),
        ..control::PolicyResponse::default()
    }
}

fn of_container(node: &Node, key: &Key, c: &Container) -> control::ContainerPolicy {
    control::ContainerPolicy {
        key: key.to_string(),
        container: c.display_name(),
        values: node.explain(key).iter().map(shown).collect(),
        warnings: c.warnings.clone(),
        ..control::ContainerPolicy::default()
    }
}

fn shown(value: &Value) -> control::PolicyValue {
    let (origin, detail) = value.origin.words();
    control::PolicyValue {
        name: value.name.into(),
        value: value.value.clone(),
        origin: origin.into(),
        detail: detail.into(),
        ..control::PolicyValue::default()
    }
}
