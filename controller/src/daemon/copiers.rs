//! Executes the effects (decisions of the core) that concern copiers, and logs the reports of
//! copiers.

use affinode_core::{
    Input, ProcessId,
    copiers::{CopierEnd, CopierId},
};
use affinode_proto::wire::copier::{CopierOrder, CopierReport};

use super::actor::NodeActor;
use crate::copier::AttachError;

/// Starts the process of a copier. If that fails, the core is informed that the copier has ended.
pub(super) fn start(actor: &mut NodeActor, copier: CopierId, gpu: &str) {
    if let Err(error) = actor.copiers.start(copier, gpu) {
        tracing::warn!(gpu, %error, "copier {gpu}: cannot start its process");
        actor.later.extend([Input::CopierEnded(copier), Input::CopierExited(copier)]);
    }
}

/// Attaches a process to its copier, and sends the process its end of a connection to the copier.
/// If the process cannot be attached, the core is informed.
pub(super) fn attach(
    actor: &mut NodeActor,
    copier: CopierId,
    process: ProcessId,
    most_bytes: u64,
    domain: u64,
) {
    let attached = match actor.copiers.attach(copier, process, most_bytes, domain) {
        Ok(socket) => actor.agents.get_mut(&process).is_some_and(|agent| agent.send_copier(socket)),
        Err(error) => {
            tracing::debug!(process = process.0, %error, "process {}: cannot attach the process to a copier", process.0);
            if let AttachError::Order(error) = error {
                unreachable(actor, copier, &error);
            }
            false
        }
    };
    if !attached {
        actor.later.push_back(Input::NotAttached(process));
    }
}

/// Sends an order to a copier. If that fails, the core is informed that the copier has ended.
pub(super) fn order(actor: &mut NodeActor, copier: CopierId, order: CopierOrder) {
    if let Err(error) = actor.copiers.tell(copier, order) {
        unreachable(actor, copier, &error);
    }
}

fn unreachable(actor: &mut NodeActor, copier: CopierId, error: &std::io::Error) {
    let gpu = actor.copiers.gpu(copier).unwrap_or_default();
    tracing::warn!(
        gpu,
        %error,
        "copier {gpu}: the controller cannot send an order to this copier, and regards it as ended"
    );
    actor.later.push_back(Input::CopierEnded(copier));
}

/// Ends a copier, and logs the reason.
pub(super) fn end(actor: &mut NodeActor, copier: CopierId, why: CopierEnd) {
    let Some(gpu) = actor.copiers.end(copier) else { return };
    match why {
        CopierEnd::Unused => {
            tracing::info!(gpu, "copier {gpu}: ended, because no process needs it")
        }
        CopierEnd::MakesRoom => {
            tracing::info!(
                gpu,
                "copier {gpu}: ended, because a container waits for the copier's VRAM"
            );
        }
        CopierEnd::Lost => tracing::warn!(gpu, "copier {gpu}: ended unexpectedly"),
        CopierEnd::NeverReady { pause_ms } => {
            let pause_s = pause_ms / 1_000;
            tracing::warn!(
                gpu,
                pause_s,
                "copier {gpu}: failed to start. Processes are restored without a copier. The \
                 next start is tried after {pause_s} s"
            );
        }
    }
}

/// Logs the report of a copier.
pub(super) fn log(gpu: &str, report: CopierReport) {
    match report {
        CopierReport::Ready => tracing::info!(gpu, "copier {gpu}: ready"),
        CopierReport::Registered { process, bytes } => {
            tracing::debug!(
                process,
                bytes,
                "process {process}: {bytes} bytes of host memory registered by the copier"
            );
        }
        CopierReport::Prefaulted { process, bytes } => {
            tracing::debug!(
                process,
                bytes,
                "process {process}: {bytes} bytes of prefaulted host memory registered by the copier"
            );
        }
        CopierReport::Copied { process, bytes, elapsed_us } => {
            tracing::info!(
                process,
                bytes,
                elapsed_us,
                "process {process}: {bytes} bytes copied out by the copier"
            );
        }
        CopierReport::Filled { process, bytes, elapsed_us } => {
            tracing::info!(
                process,
                bytes,
                elapsed_us,
                "process {process}: {bytes} bytes copied in by the copier"
            );
        }
        CopierReport::Shared { process, bytes, stored_bytes } => {
            tracing::debug!(
                process,
                bytes,
                stored_bytes,
                "process {process}: {bytes} bytes deduplicated"
            );
        }
        CopierReport::Detached { .. } | CopierReport::Released => {}
    }
}
