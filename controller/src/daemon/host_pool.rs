//! Executes the effects (decisions of the core) that concern the host pool.

use std::io;

use affinode_core::{Input, ProcessId};

use super::actor::NodeActor;

/// Sets how much memory of the host pool a process may use. Connects the process to the host pool
/// first, if necessary. If a step fails, the process gets no memory of the host pool, and its copy
/// out fails for lack of host memory. The core then has the content copied to the container's own
/// memory.
///
/// `kept_bytes` is the part of `bytes` that the process's file should contain already. It counted as
/// free for this process alone. The file of a new connection is empty, so that the process may use
/// only the rest of `bytes`. The core learns of the connection, and permits all after its next survey
/// if there is room.
pub(super) fn allow(actor: &mut NodeActor, process: ProcessId, bytes: u64, kept_bytes: u64) {
    if !actor.host_pool.is_running() {
        actor.in_host_pool.clear();
    }
    let is_connected = actor.in_host_pool.contains(&process);
    if bytes == 0 && !is_connected {
        return;
    }
    let allowed = match is_connected {
        true => actor.host_pool.allow(process, bytes, kept_bytes),
        false => {
            connect(actor, process).and_then(|()| actor.host_pool.allow(process, bytes, kept_bytes))
        }
    };
    if let Err(error) = allowed {
        tracing::warn!(
            process = process.0, %error,
            "process {}: cannot set how much of the host pool it may use", process.0
        );
    }
}

/// Disconnects a process from the host pool. This also ends the permission that [`allow`] gave to
/// the process.
pub(super) fn leave(actor: &mut NodeActor, process: ProcessId) {
    if actor.in_host_pool.remove(&process)
        && let Err(error) = actor.host_pool.detach(process)
    {
        // A host pool that has ended has no connections.
        tracing::debug!(process = process.0, %error, "process {}: not detached", process.0);
    }
}

/// Connects a process to the host pool, and sends the process its end of the connection.
fn connect(actor: &mut NodeActor, process: ProcessId) -> io::Result<()> {
    let Some(agent) = actor.agents.get_mut(&process) else {
        return Err(io::Error::other("the process is not connected to the controller"));
    };
    let socket = actor.host_pool.attach(process)?;
    if !agent.send_host_pool(socket) {
        return Err(io::Error::other("the process does not read the controller's messages"));
    }
    actor.in_host_pool.insert(process);
    actor.later.push_back(Input::HostPoolConnected(process));
    Ok(())
}
