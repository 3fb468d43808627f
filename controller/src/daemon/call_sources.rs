//! Lists the processes whose CUDA calls can be traced.

use affinode_core::Key;

use super::actor::NodeActor;
use crate::handle::CallSource;

/// Returns those processes of these containers that are connected to the controller. If `keys` is
/// `None`, the processes of all containers are returned.
pub(super) fn sights(actor: &NodeActor, keys: Option<&[Key]>) -> Vec<CallSource> {
    let wanted = |key: &Key| keys.is_none_or(|keys| keys.contains(key));
    let mut sights = Vec::new();
    for (id, key, identity, container) in actor.node.callers(wanted) {
        if let Some(agent) = actor.agents.get(&id) {
            let (page, outbox) = agent.sight();
            let (pid, command) = (identity.pid, identity.command.clone());
            let key = key.clone();
            sights.push(CallSource { id, key, container, pid, command, page, outbox });
        }
    }
    sights
}
