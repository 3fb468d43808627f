//! Converts the node's GPUs and containers to messages of the control API.

use affinode_core::{
    DeviceBytes, Key, Millis, Node, container::Container, process::Process, texts::text_of,
};
use affinode_proto::{
    api::control,
    wire::{Hazards, counters::CounterSnapshot},
};

use super::announcement_of;

/// Lists the current GPUs and containers. `unix_ms` is the current wall-clock time.
#[must_use]
pub fn list(node: &Node, now: Millis, unix_ms: i64) -> control::ListResponse {
    control::ListResponse {
        gpus: list_gpus(node),
        containers: node
            .containers()
            .map(|(key, c)| list_container(node, key, c, now, unix_ms))
            .collect(),
        gpu_error: node.gpu_error().unwrap_or_default(),
        auto_offload: node.overrides().auto_offload,
        ..control::ListResponse::default()
    }
}

fn list_gpus(node: &Node) -> Vec<control::Gpu> {
    node.gpus()
        .iter()
        .map(|gpu| (gpu, node.copier_figures(&gpu.uuid)))
        .map(|(gpu, copier)| control::Gpu {
            index: gpu.index,
            uuid: gpu.uuid.clone(),
            name: gpu.name.clone(),
            vram_total_bytes: gpu.total_bytes,
            vram_used_bytes: gpu.used_bytes,
            vram_reclaimed_bytes: node.reclaimed_bytes(&gpu.uuid),
            vram_reserved_bytes: node.promised_bytes(&gpu.uuid),
            vram_unmovable_bytes: node.unmovable_bytes(&gpu.uuid),
            utilization_percent: gpu.utilization_percent,
            simulated: gpu.name.contains("Simulated"),
            copier_prefaulted: copier.prefaulted,
            copier_registering: copier.registering,
            copier_registered: copier.registered,
            copier_restores: copier.restores,
            copier_offloads: copier.offloads,
            copier_shared_bytes: copier.shared_bytes,
            copier_stored_bytes: copier.stored_bytes,
            ..control::Gpu::default()
        })
        .collect()
}

fn list_container(
    node: &Node,
    key: &Key,
    c: &Container,
    now: Millis,
    unix_ms: i64,
) -> control::Container {
    let ago = |then: Millis| i64::try_from(now.saturating_sub(then)).unwrap_or(i64::MAX);
    let (staying_bytes, staying_hazards) = node.staying(key);
    control::Container {
        announcement: Some(announcement_of(key, &c.spec)).into(),
        state: c.shown.state.to_string(),
        since_unix_ms: unix_ms.saturating_sub(ago(c.shown.since)),
        idle_ms: if node.processes(key).next().is_none() {
            0
        } else {
            now.saturating_sub(c.usage.last_use)
        },
        reason: c.shown.reason.0.to_string(),
        reason_text: text_of(c.shown.reason.0, &c.shown.reason.1),
        vram_bytes: node.vram_bytes(key),
        offloaded_bytes: node.offloaded_bytes(key),
        disk_bytes: node.disk_bytes(key),
        offloads: c.figures.offloads,
        restores: c.figures.restores,
        last_offload_ms: c.figures.last_offload_ms,
        last_wake_ms: c.figures.last_wake_ms,
        last_restore_ms: c.figures.last_restore_ms,
        wake_p99_ms: c.figures.wakes.p99_ms(),
        idle_after_ms: c.idle_after_ms(),
        mode: c.policy.mode.as_str().to_owned(),
        engine: c.policy.engine.as_str().to_owned(),
        idle_timeout_ms: c.policy.idle_timeout_ms,
        priority: c.policy.priority,
        vram_limit_bytes: c.policy.vram_limit_bytes,
        vram_limit_enforced_by: enforced_by(node, key, c.policy.vram_limit_bytes).to_owned(),
        claim: c.spec.claim().to_owned(),
        warnings: node.warnings(key),
        processes: node.processes(key).map(|p| list_process(node, p)).collect(),
        pinned: node.overrides().pinned.contains(key),
        staying_bytes,
        no_progress_ms: node.no_progress_ms(key).unwrap_or(0),
        staying_reasons: words(staying_hazards),
        ..control::Container::default()
    }
}

/// Returns what enforces the VRAM limit of a container. Empty: it has no limit.
fn enforced_by(node: &Node, key: &Key, vram_limit_bytes: u64) -> &'static str {
    match vram_limit_bytes {
        0 => "",
        _ if node.has_driver_limit(key) => "library and driver",
        _ => "library",
    }
}

fn list_process(node: &Node, p: &Process) -> control::Process {
    let device = |d: &DeviceBytes| control::DeviceBytes {
        uuid: d.uuid.clone(),
        bytes: d.bytes,
        ..control::DeviceBytes::default()
    };
    control::Process {
        pid: p.identity.pid,
        phase: format!("{:?}", p.agent.phase),
        command: p.identity.command.clone(),
        vram_bytes: p.vram_bytes(),
        vram: p.memory.vram.iter().map(device).collect(),
        last_call: p
            .activity
            .counters
            .as_ref()
            .filter(|page| page.calls > 0)
            .map_or_else(String::new, last_call),
        offloaded: if p.agent.phase.is_offloaded() {
            p.vram_to_restore().iter().flatten().map(device).collect()
        } else {
            Vec::new()
        },
        calls: p.activity.counters.as_ref().map_or(0, |page| page.calls),
        inflight: p.activity.counters.as_ref().map_or(0, |page| page.inflight),
        waiters: p.activity.counters.as_ref().map_or(0, |page| page.waiters),
        hazards: words(p.agent.hazards),
        polls: p.activity.counters.as_ref().map_or(0, |page| page.polls),
        call_cost_ps: p.activity.counters.as_ref().map_or(0, |page| page.call_cost_ps),
        held_us: p.activity.counters.as_ref().map_or(0, |page| page.held_us),
        kept_bytes: p.activity.counters.as_ref().map_or(0, |page| page.kept_bytes),
        unchanged_bytes: p.memory.swap.unchanged_bytes,
        zero_bytes: p.memory.swap.zero_bytes,
        swappable_bytes: p.memory.swap.swappable_bytes,
        copied_out_bytes: p.memory.swap.copied_out_bytes,
        utilization_percent: node.utilization_percent(p),
        ..control::Process::default()
    }
}

fn last_call(page: &CounterSnapshot) -> String {
    affinode_cuda_sys::hook::name(page.last_hook).unwrap_or_default().to_owned()
}

fn words(hazards: Hazards) -> Vec<String> {
    hazards.words().map(str::to_owned).collect()
}
