//! Sends NVML readings to offloaded processes. The library answers NVML queries of such a process
//! with these readings, so that a query needs no restore.

use affinode_proto::wire::message::{ControllerMessage, GpuReading, MAX_GPUS, UNKNOWN_UTILIZATION};

use super::{
    Effect, Millis, ProcessId, gpu_uuid::uuid_bytes, input::GpuSample, node_state::NodeState,
};

/// Maximum age of a reading that is sent to a process. Older readings show that NVML does not
/// answer the controller. The process is then restored and queries NVML itself.
const STALE_AFTER_MS: Millis = 5_000;

/// Sends the last reading of each GPU to a process. Sends nothing if the readings are too old: the
/// process is then restored and queries NVML itself.
pub(super) fn send_readings(node: &mut NodeState, id: ProcessId) {
    let is_stale = node.clock.now.saturating_sub(node.gpus.read_at) > STALE_AFTER_MS;
    let connected = node.registry.processes.get(&id).is_some_and(|process| process.agent.connected);
    if !connected || node.gpus.error.is_some() || is_stale {
        return;
    }
    let readings = node.gpus.samples.iter().take(MAX_GPUS).filter_map(reading);
    let messages = readings.map(|reading| Effect::Send(id, ControllerMessage::Reading(reading)));
    node.output.effects.extend(messages);
}

fn reading(gpu: &GpuSample) -> Option<GpuReading> {
    let figures = &gpu.figures;
    Some(GpuReading {
        uuid: uuid_bytes(&gpu.uuid)?,
        total_bytes: gpu.total_bytes,
        free_bytes: gpu.total_bytes.saturating_sub(gpu.used_bytes),
        reserved_bytes: figures.reserved_bytes,
        gpu_percent: figures.gpu_percent.unwrap_or(UNKNOWN_UTILIZATION),
        memory_percent: figures.memory_percent.unwrap_or(UNKNOWN_UTILIZATION),
        temperature_c: figures.temperature_c.unwrap_or(UNKNOWN_UTILIZATION),
        power_mw: figures.power_mw.unwrap_or(UNKNOWN_UTILIZATION),
    })
}
