//! Executes the effects (decisions of the core) that concern the host pool.

use std::io;

use affinode_core::{Input, ProcessId};
use affinode_proto::wire::message::ControllerMessage;

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

/// Permits the process a disk file of this size, and orders it to move its content to the file. If
/// the permission fails, the process gets no order, and the core ends the step as failed.
pub(super) fn store_on_disk(actor: &mut NodeActor, process: ProcessId, bytes: u64) {
    match allow_disk(actor, process, bytes) {
        Ok(()) => {
            if let Some(agent) = actor.agents.get_mut(&process) {
                agent.send(ControllerMessage::StoreOnDisk);
            }
        }
        Err(error) => tracing::warn!(
            process = process.0, %error,
            "process {}: cannot permit the move of its content to disk", process.0
        ),
    }
}

/// Permits no further content in the disk file of a process.
pub(super) fn stop_disk(actor: &mut NodeActor, process: ProcessId) {
    if let Err(error) = allow_disk(actor, process, 0) {
        // Without the host pool, nothing is written.
        tracing::debug!(process = process.0, %error, "process {}: disk not stopped", process.0);
    }
}

/// Sets the maximum size of the disk file of a connected process.
fn allow_disk(actor: &mut NodeActor, process: ProcessId, bytes: u64) -> io::Result<()> {
    if !actor.in_host_pool.contains(&process) {
        return Err(io::Error::other("the process is not connected to the host pool"));
    }
    actor.host_pool.allow_disk(process, bytes)
}

/// Connects a process to the host pool, and sends the process its end of the connection.
fn connect(actor: &mut NodeActor, process: ProcessId) -> io::Result<()> {
    let agent = actor.agents.get_mut(&process);
    let (Some(agent), Some(key)) = (agent, actor.node.key_of(process)) else {
        return Err(io::Error::other("the process is not connected to the controller"));
    };
    let socket = actor.host_pool.attach(process, key.number())?;
    if !agent.send_host_pool(socket) {
        return Err(io::Error::other("the process does not read the controller's messages"));
    }
    actor.in_host_pool.insert(process);
    actor.later.push_back(Input::HostPoolConnected(process));
    Ok(())
}
