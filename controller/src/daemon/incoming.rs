//! Passes messages and readings to the core (the module that decides about moves), as inputs. The
//! messages of agents and copiers are converted to inputs. The threads that read the node's GPUs,
//! processes and memory send inputs.

use affinode_core::{
    Input, Key, ProcessId,
    event::NodeEvent,
    input::{Identity, SwapStatus},
};
use affinode_proto::{
    event::EventKind,
    wire::{counters::PAGE_BYTES, message::AgentMessage},
};

use super::{actor::NodeActor, copiers, effects};
use crate::{
    agents::{AgentHandle, AgentMail},
    clock::unix_ms,
    conversion,
    copier::CopierMessage,
    error_chain,
    inventory::InventoryQuery,
};

/// Passes the result of a reading of GPUs, processes or host memory to the core.
pub(super) fn found(actor: &mut NodeActor, finding: Input) {
    match &finding {
        // The need of each copy is read after the levels. If the copy progresses between the two
        // readings, its need is lower than at the first reading: it can be underestimated but not
        // overestimated.
        Input::HostLevels(_) => {
            let copying = actor.node.copies_in_progress().into_iter();
            copying.flat_map(|copy| copy.processes).for_each(|(id, _)| read_page(actor, id));
        }
        Input::Gpus(gpus) => {
            // The reading may not show a change that happened during it, so another reading
            // follows.
            if actor.readings.came() {
                actor.inventory.ask(InventoryQuery::Gpus);
            }
            if let Ok(gpus) = gpus {
                actor.busy.note(actor.now(), gpus);
                actor.copiers.seen(gpus);
            }
        }
        _ => {}
    }
    effects::feed(actor, finding);
}

/// Handles what the connection to an agent reports: its start, a message, its end, the exit of the
/// process, or a refusal.
pub(super) fn agent_said(actor: &mut NodeActor, mail: AgentMail) {
    match mail {
        AgentMail::Joined { key, id, identity, hello, agent } => {
            joined(actor, (key, id, identity), hello, agent);
        }
        AgentMail::Message(id, message) => {
            // The library frees kept host memory until its gate is closed. The survey that follows
            // the report must know how much is left.
            if matches!(message, AgentMessage::Report { .. }) {
                read_page(actor, id);
            }
            effects::feed(actor, Input::Message(id, message));
        }
        AgentMail::Detached(id) => effects::feed(actor, Input::Detached(id)),
        AgentMail::Exited(id) => effects::feed(actor, Input::Exited(id)),
        AgentMail::Refused { key, why } => {
            tracing::warn!(%key, "container {key}: rejected the connection of a process: {why}");
            let event = NodeEvent { key: Some(key), ..NodeEvent::new(EventKind::Process, why) };
            actor.events.add(conversion::event_of(event), unix_ms());
        }
    }
}

/// Handles a new connection of an agent. Its Hello message describes the process.
fn joined(
    actor: &mut NodeActor,
    (key, id, identity): (Key, ProcessId, Identity),
    hello: AgentMessage,
    agent: AgentHandle,
) {
    let AgentMessage::Hello {
        phase,
        generation,
        hazards,
        abilities,
        swappable_bytes,
        copied_out_bytes,
        local_memory_bytes,
        ..
    } = hello
    else {
        return;
    };
    actor.agents.insert(id, agent);
    read_page(actor, id);
    let swap = SwapStatus {
        swappable_bytes,
        copied_out_bytes,
        unchanged_bytes: 0,
        zero_bytes: 0,
        local_memory_bytes,
    };
    let joined = Input::Joined {
        key,
        process: id,
        identity,
        phase,
        generation,
        hazards,
        capabilities: abilities,
        swap,
    };
    effects::feed(actor, joined);
}

/// Handles a report of a copier, or the end of its connection or process.
pub(super) fn copier_said(actor: &mut NodeActor, mail: CopierMessage) {
    let input = match mail {
        CopierMessage::Report(copier, report) => {
            copiers::log(actor.copiers.gpu(copier).unwrap_or_default(), report);
            Input::CopierReport(copier, report)
        }
        CopierMessage::Closed(copier) => Input::CopierEnded(copier),
        CopierMessage::Exited(copier) => {
            effects::feed(actor, Input::CopierExited(copier));
            return actor.copiers.forget(copier);
        }
    };
    effects::feed(actor, input);
}

/// Reads the counters that a process shares with the controller, and passes them to the core.
pub(super) fn read_page(actor: &mut NodeActor, id: ProcessId) {
    let mut buffer = [0; PAGE_BYTES];
    let Some(agent) = actor.agents.get(&id) else {
        return;
    };
    let input = match agent.read_page(&mut buffer) {
        Ok(page) => Input::Page(id, page),
        Err(error) => Input::BadPage(id, error_chain::chain(&error)),
    };
    effects::feed(actor, input);
}
