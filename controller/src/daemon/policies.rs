//! Handles API requests that read or change policies.

use affinode_core::{Input, view::FindError};
use affinode_proto::api::control::{PolicyResponse, PolicyValue};

use super::{actor::NodeActor, effects};
use crate::{
    config::{Config, ReloadedConfig},
    conversion,
};

/// Applies those values of a configuration that can change while the controller runs.
pub(super) fn reload(actor: &mut NodeActor, read: Config) -> ReloadedConfig {
    let taken = actor.config.take(read);
    if taken.changed {
        actor.allowed_users.send_replace(actor.config.jobs.users.clone());
        effects::feed(actor, Input::Reconfigured(Box::new(actor.config.settings())));
    }
    taken
}

/// Returns the policy of the container with this name, or of all containers if the name is empty.
pub(super) fn policy(actor: &NodeActor, name: &str) -> Result<PolicyResponse, FindError> {
    if name.is_empty() {
        return Ok(conversion::policies(&actor.node, None));
    }
    actor.node.find(name).map(|key| conversion::policies(&actor.node, Some(&key)))
}

/// Applies a configuration in which values of the node's policy were changed, and returns these
/// values.
pub(super) fn set_policy(
    actor: &mut NodeActor,
    read: Config,
    changes: &[(String, String)],
) -> Vec<PolicyValue> {
    reload(actor, read);
    let shown: Vec<String> = changes
        .iter()
        .map(|(name, value)| match value.as_str() {
            "" => format!("{name} removed"),
            value => format!("{name} = {value}"),
        })
        .collect();
    actor.note(None, String::new(), format!("the node's policy was changed: {}", shown.join(", ")));
    let mut values = conversion::policies(&actor.node, None).node;
    values.retain(|value| changes.iter().any(|(name, _)| *name == value.name));
    values
}
