//! Executes the commands that come from the control API and the HTTP API.

use affinode_proto::api::control::ListResponse;

use super::{actor::NodeActor, call_sources, containers, hints, jobs, moves, overrides, policies};
use crate::{
    clock::unix_ms, conversion, error_chain, handle::Command, host_pool, inventory::memory,
    jobs::JobReply,
};

/// Executes a command. If the caller has stopped waiting, the response is dropped.
pub(super) fn call(actor: &mut NodeActor, command: Command) {
    match command {
        Command::Announce(announcement, answer) => {
            let _ = answer.send(containers::announced(actor, *announcement));
        }
        Command::Withdraw(key, generation) => containers::withdrawn(actor, &key, generation),
        Command::Ping(answer) => {
            let _ = answer.send(());
        }
        Command::List(answer) => {
            let _ = answer.send(list(actor));
        }
        Command::Sights(keys, answer) => {
            let _ = answer.send(call_sources::sights(actor, keys.as_deref()));
        }
        Command::Find(name, answer) => {
            let _ = answer.send(actor.node.find(&name));
        }
        Command::Act(name, request, answer) => moves::act(actor, &name, request, answer),
        Command::Pin(name, pinned, who, answer) => {
            overrides::pin(actor, &name, pinned, &who, answer);
        }
        Command::AutoOffload(on, who, answer) => {
            let _ = answer.send(overrides::auto_offload(actor, on, &who));
        }
        Command::Reload(config, answer) => {
            let _ = answer.send(policies::reload(actor, *config));
        }
        Command::Hint(name, hint, who, answer) => {
            let _ = answer.send(hints::hint(actor, &name, hint, &who));
        }
        Command::Policy(name, answer) => {
            let _ = answer.send(policies::policy(actor, &name));
        }
        Command::SetPolicy(config, changes, answer) => {
            let _ = answer.send(policies::set_policy(actor, *config, &changes));
        }
        Command::Job(request, user, answer) => {
            let _ = answer.send(match jobs::job(actor, request, &user) {
                Ok(granted) => granted,
                Err(error) => JobReply::Refused(error_chain::chain(&error)),
            });
        }
    }
}

/// Returns the node with its GPUs and containers, in the form of the control API.
fn list(actor: &NodeActor) -> ListResponse {
    let mut list = conversion::list(&actor.node, actor.now(), unix_ms());
    list.node =
        nix::unistd::gethostname().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    list.version = env!("CARGO_PKG_VERSION").into();
    list.controller_pid = std::process::id();
    list.started_unix_ms = actor.started_unix_ms;
    for gpu in &mut list.gpus {
        gpu.utilization_minute_percent = actor.busy.percent(&gpu.uuid);
        actor.copiers.show(gpu);
    }
    list.dashboard.clone_from(&actor.dashboard);
    list.host_free_bytes = memory::room_bytes(actor.config.memory.node_reserve_bytes());
    (list.host_pool_bytes, list.host_pool_used_bytes) =
        host_pool::size_and_use(&actor.config.memory);
    list
}
