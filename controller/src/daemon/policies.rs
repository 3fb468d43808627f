//! Queries and changes of policies through the APIs.

use affinode_core::{Input, view::FindError};
use affinode_proto::api::control::{PolicyResponse, PolicyValue};

use super::actor::NodeActor;
use crate::{
    config::{self, Config, ReloadedConfig},
    conversion,
    handle::CommandError,
};

impl NodeActor {
    /// Reads the configuration again.
    pub(super) fn reload(&mut self) -> Result<ReloadedConfig, CommandError> {
        let read = Config::load(&Config::path())?;
        let taken = self.config.take(read);
        if taken.changed {
            self.feed(Input::Reconfigured(Box::new(self.config.settings())));
        }
        Ok(taken)
    }

    /// The policy of the container with this name. Empty name: of all containers.
    pub(super) fn policy(&self, name: &str) -> Result<PolicyResponse, FindError> {
        if name.is_empty() {
            return Ok(conversion::policies(&self.node, None));
        }
        self.node.find(name).map(|key| conversion::policies(&self.node, Some(&key)))
    }

    /// Changes values of the node's policy permanently, and returns their effective values.
    pub(super) fn set_policy(
        &mut self,
        changes: &[(String, String)],
    ) -> Result<Vec<PolicyValue>, CommandError> {
        config::set(&Config::path(), changes)?;
        self.reload()?;
        let shown: Vec<String> = changes
            .iter()
            .map(|(name, value)| match value.as_str() {
                "" => format!("{name} removed"),
                value => format!("{name} = {value}"),
            })
            .collect();
        self.note(
            None,
            String::new(),
            format!("the node's policy was changed: {}", shown.join(", ")),
        );
        let mut values = conversion::policies(&self.node, None).node;
        values.retain(|value| changes.iter().any(|(name, _)| *name == value.name));
        Ok(values)
    }
}
