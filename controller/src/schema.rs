//! Defines the JSON of `affinode -o json` and of the HTTP API. Names are stable, and sizes and
//! times are numbers in bytes and milliseconds. `config/openapi.yaml` describes this JSON for
//! clients.

mod host;

use affinode_proto::api::control;
use serde::{Deserialize, Serialize};

use crate::conversion;

/// JSON object of `affinode ps -o json`: the node with its GPUs and containers.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(default)]
pub struct Node {
    /// Host name of the node.
    pub node: String,
    /// Version of the running controller.
    pub version: String,
    /// Pid of the controller.
    pub controller_pid: u32,
    /// Time at which the controller started, in milliseconds since 1970.
    pub started_unix_ms: i64,
    /// Reason why NVML, or one of the GPUs, cannot be read. `None` if all GPUs can be read.
    pub gpu_error: Option<String>,
    /// Address of the dashboard. `None` if the dashboard is off.
    pub dashboard: Option<String>,
    /// Whether the controller offloads containers automatically.
    pub auto_offload: bool,
    /// Host memory in use for offloaded VRAM, in bytes. Deduplicated memory counts once.
    pub host_used_bytes: u64,
    /// Host memory that is free for further offloads, in bytes, rounded to steps of 256 MiB.
    pub host_free_bytes: u64,
    /// Maximum size of the host pool, in bytes. 0: the node has no host pool.
    pub host_pool_bytes: u64,
    /// Memory of the host pool in use, in bytes, rounded to steps of 64 MiB.
    pub host_pool_used_bytes: u64,
    /// The GPUs of the node.
    pub gpus: Vec<Gpu>,
    /// The containers that use a GPU.
    pub containers: Vec<Container>,
}

/// A GPU of the node, and its copier.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(default)]
#[allow(missing_docs)] // Each field is described in control.proto.
pub struct Gpu {
    pub index: u32,
    pub uuid: String,
    pub name: String,
    pub simulated: bool,
    pub vram_total_bytes: u64,
    pub vram_used_bytes: u64,
    pub vram_reclaimed_bytes: u64,
    pub vram_reserved_bytes: u64,
    pub vram_unmovable_bytes: u64,
    pub utilization_percent: u32,
    pub utilization_minute_percent: u32,
    pub copier_pid: u32,
    pub copier_vram_bytes: u64,
    pub copier_restores: u64,
    pub copier_registered: u32,
    pub copier_registering: u32,
    pub copier_prefaulted: u32,
    pub copier_offloads: u64,
    pub copier_shared_bytes: u64,
    pub copier_stored_bytes: u64,
}

/// A container with its state and its effective policy.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(default)]
#[allow(missing_docs)] // Each field is described in control.proto.
pub struct Container {
    pub name: String,
    pub key: String,
    pub namespace: String,
    pub id: String,
    pub sandbox_id: String,
    pub pod_namespace: String,
    pub pod: String,
    pub container: String,
    pub image: String,
    pub state: String,
    pub since_unix_ms: i64,
    pub idle_ms: u64,
    pub reason: String,
    pub reason_text: String,
    pub vram_bytes: u64,
    pub offloaded_bytes: u64,
    pub disk_bytes: u64,
    pub offloads: u64,
    pub restores: u64,
    pub last_offload_ms: u64,
    pub last_wake_ms: u64,
    pub wake_p99_ms: u64,
    pub last_restore_ms: u64,
    pub mode: String,
    pub idle_timeout_ms: u64,
    pub idle_after_ms: u64,
    pub priority: i32,
    pub pinned: bool,
    pub engine: String,
    /// Fraction of the container's VRAM, resident or offloaded, that Affinode's library can copy.
    /// `None` if the engine is `checkpoint`.
    pub copyable_share: Option<f64>,
    pub staying_bytes: u64,
    pub no_progress_ms: u64,
    pub staying_reasons: Vec<String>,
    pub vram_limit_bytes: u64,
    pub vram_limit_enforced_by: String,
    pub claim: String,
    pub warnings: Vec<String>,
    pub processes: Vec<Process>,
}

/// A CUDA process of a container.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(default)]
#[allow(missing_docs)] // Each field is described in control.proto.
pub struct Process {
    pub pid: u32,
    pub command: String,
    pub phase: String,
    pub vram_bytes: u64,
    pub offloaded_bytes: u64,
    pub calls: u64,
    pub inflight: u64,
    pub waiters: u32,
    pub hazards: Vec<String>,
    pub last_call: String,
    pub swappable_bytes: u64,
    pub copied_out_bytes: u64,
    pub polls: u64,
    pub call_cost_ps: u32,
    pub held_us: u64,
    pub kept_bytes: u64,
    pub unchanged_bytes: u64,
    pub zero_bytes: u64,
    pub utilization_percent: Option<u32>,
    pub vram: Vec<DeviceBytes>,
    pub offloaded: Vec<DeviceBytes>,
}

/// A number of bytes on one GPU.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(default)]
#[allow(missing_docs)] // Each field is described in control.proto.
pub struct DeviceBytes {
    pub uuid: String,
    pub bytes: u64,
}

/// JSON object of `affinode policy show -o json`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Policies {
    /// The policy values of the node.
    pub node: Vec<PolicyValue>,
    /// The effective policy of each container.
    pub containers: Vec<ContainerPolicy>,
}

/// The effective policy of a container.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[allow(missing_docs)] // Each field is described in control.proto.
pub struct ContainerPolicy {
    pub name: String,
    pub key: String,
    pub values: Vec<PolicyValue>,
    pub warnings: Vec<String>,
}

/// A policy value of the node or a container, and where it was set.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[allow(missing_docs)] // Each field is described in control.proto.
pub struct PolicyValue {
    pub name: String,
    pub value: String,
    pub origin: String,
    pub detail: String,
}

/// An event of the controller: one line of `affinode events -o json`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[allow(missing_docs)] // Each field is described in control.proto.
pub struct Event {
    pub sequence: u64,
    pub unix_ms: i64,
    pub kind: String,
    pub key: String,
    pub container: String,
    pub from: String,
    pub to: String,
    pub reason: String,
    pub text: String,
    pub bytes: u64,
    pub elapsed_ms: u64,
}

impl From<control::ListResponse> for Node {
    fn from(list: control::ListResponse) -> Node {
        Node {
            host_used_bytes: host::used_bytes(&list),
            node: list.node,
            version: list.version,
            controller_pid: list.controller_pid,
            started_unix_ms: list.started_unix_ms,
            dashboard: Some(list.dashboard).filter(|place| !place.is_empty()),
            gpu_error: Some(list.gpu_error).filter(|error| !error.is_empty()),
            auto_offload: list.auto_offload,
            host_free_bytes: list.host_free_bytes,
            host_pool_bytes: list.host_pool_bytes,
            host_pool_used_bytes: list.host_pool_used_bytes,
            gpus: list.gpus.into_iter().map(Gpu::from).collect(),
            containers: list.containers.into_iter().map(Container::from).collect(),
        }
    }
}

impl From<control::PolicyResponse> for Policies {
    fn from(response: control::PolicyResponse) -> Policies {
        let values = |values: Vec<control::PolicyValue>| {
            values.into_iter().map(PolicyValue::from).collect::<Vec<_>>()
        };
        let container = |c: control::ContainerPolicy| ContainerPolicy {
            name: c.container,
            key: c.key,
            values: values(c.values),
            warnings: c.warnings,
        };
        Policies {
            node: values(response.node),
            containers: response.containers.into_iter().map(container).collect(),
        }
    }
}

impl From<control::PolicyValue> for PolicyValue {
    fn from(value: control::PolicyValue) -> PolicyValue {
        let control::PolicyValue { name, value, origin, detail, .. } = value;
        PolicyValue { name, value, origin, detail }
    }
}

impl From<control::Gpu> for Gpu {
    fn from(gpu: control::Gpu) -> Gpu {
        Gpu {
            index: gpu.index,
            uuid: gpu.uuid,
            name: gpu.name,
            simulated: gpu.simulated,
            vram_total_bytes: gpu.vram_total_bytes,
            vram_used_bytes: gpu.vram_used_bytes,
            vram_reclaimed_bytes: gpu.vram_reclaimed_bytes,
            vram_reserved_bytes: gpu.vram_reserved_bytes,
            vram_unmovable_bytes: gpu.vram_unmovable_bytes,
            utilization_percent: gpu.utilization_percent,
            utilization_minute_percent: gpu.utilization_minute_percent,
            copier_pid: gpu.copier_pid,
            copier_vram_bytes: gpu.copier_vram_bytes,
            copier_restores: gpu.copier_restores,
            copier_registered: gpu.copier_registered,
            copier_registering: gpu.copier_registering,
            copier_prefaulted: gpu.copier_prefaulted,
            copier_offloads: gpu.copier_offloads,
            copier_shared_bytes: gpu.copier_shared_bytes,
            copier_stored_bytes: gpu.copier_stored_bytes,
        }
    }
}

impl From<control::Container> for Container {
    fn from(c: control::Container) -> Container {
        let a = c.announcement.into_option().unwrap_or_default();
        Container {
            name: conversion::spec_of(a.clone()).display_name(),
            key: a.key,
            namespace: a.namespace,
            id: a.id,
            sandbox_id: a.sandbox_id,
            pod_namespace: a.pod_namespace,
            pod: a.pod,
            container: a.container,
            image: a.image,
            state: c.state,
            since_unix_ms: c.since_unix_ms,
            idle_ms: c.idle_ms,
            reason: c.reason,
            reason_text: c.reason_text,
            vram_bytes: c.vram_bytes,
            offloaded_bytes: c.offloaded_bytes,
            disk_bytes: c.disk_bytes,
            offloads: c.offloads,
            restores: c.restores,
            last_offload_ms: c.last_offload_ms,
            last_wake_ms: c.last_wake_ms,
            wake_p99_ms: c.wake_p99_ms,
            last_restore_ms: c.last_restore_ms,
            mode: c.mode,
            idle_timeout_ms: c.idle_timeout_ms,
            idle_after_ms: c.idle_after_ms,
            priority: c.priority,
            pinned: c.pinned,
            copyable_share: copyable_share(&c.engine, &c.processes),
            engine: c.engine,
            staying_bytes: c.staying_bytes,
            no_progress_ms: c.no_progress_ms,
            vram_limit_bytes: c.vram_limit_bytes,
            vram_limit_enforced_by: c.vram_limit_enforced_by,
            claim: c.claim,
            staying_reasons: c.staying_reasons,
            warnings: c.warnings,
            processes: c.processes.into_iter().map(Process::from).collect(),
        }
    }
}

impl From<control::Process> for Process {
    fn from(p: control::Process) -> Process {
        let offloaded: Vec<DeviceBytes> = p.offloaded.into_iter().map(DeviceBytes::from).collect();
        Process {
            pid: p.pid,
            command: p.command,
            phase: p.phase,
            vram_bytes: p.vram_bytes,
            offloaded_bytes: offloaded.iter().map(|d| d.bytes).sum(),
            calls: p.calls,
            inflight: p.inflight,
            waiters: p.waiters,
            hazards: p.hazards,
            last_call: p.last_call,
            swappable_bytes: p.swappable_bytes,
            copied_out_bytes: p.copied_out_bytes,
            polls: p.polls,
            call_cost_ps: p.call_cost_ps,
            held_us: p.held_us,
            kept_bytes: p.kept_bytes,
            unchanged_bytes: p.unchanged_bytes,
            zero_bytes: p.zero_bytes,
            utilization_percent: p.utilization_percent,
            vram: p.vram.into_iter().map(DeviceBytes::from).collect(),
            offloaded,
        }
    }
}

#[allow(clippy::cast_precision_loss)] // A share, for people.
fn copyable_share(engine: &str, processes: &[control::Process]) -> Option<f64> {
    let sum = |bytes: &dyn Fn(&control::Process) -> u64| {
        processes.iter().map(bytes).fold(0, u64::saturating_add)
    };
    let offloaded =
        |p: &control::Process| p.offloaded.iter().map(|d| d.bytes).fold(0, u64::saturating_add);
    let all = sum(&|p| p.vram_bytes.saturating_add(offloaded(p)));
    let swappable = sum(&|p| p.swappable_bytes);
    (engine != "checkpoint" && all > 0).then(|| (swappable as f64 / all as f64).min(1.0))
}

impl From<control::DeviceBytes> for DeviceBytes {
    fn from(d: control::DeviceBytes) -> DeviceBytes {
        DeviceBytes { uuid: d.uuid, bytes: d.bytes }
    }
}

impl From<control::Event> for Event {
    fn from(e: control::Event) -> Event {
        Event {
            sequence: e.sequence,
            unix_ms: e.unix_ms,
            kind: e.kind,
            key: e.key,
            container: e.container,
            from: e.from,
            to: e.to,
            reason: e.reason,
            text: e.text,
            bytes: e.bytes,
            elapsed_ms: e.elapsed_ms,
        }
    }
}

/// The result of a request to move a container.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(default)]
#[allow(missing_docs)] // Each field is described in control.proto.
pub struct Action {
    pub done: bool,
    pub state: String,
    pub reason: String,
    pub reason_text: String,
    pub bytes: u64,
    pub elapsed_ms: u64,
    pub pinned: bool,
}

impl From<control::ActionResponse> for Action {
    fn from(a: control::ActionResponse) -> Action {
        Action {
            done: a.done,
            state: a.state,
            reason: a.reason,
            reason_text: a.reason_text,
            bytes: a.bytes,
            elapsed_ms: a.elapsed_ms,
            pinned: a.pinned,
        }
    }
}

/// JSON object of the report on the use of the GPUs in a time range.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(default)]
pub struct Report {
    /// Start of the time range, in milliseconds since 1970.
    pub since_unix_ms: i64,
    /// End of the time range, in milliseconds since 1970.
    pub until_unix_ms: i64,
    /// Start of the oldest recorded span that overlaps the time range, in milliseconds since 1970.
    /// `None` if there is no such span.
    pub oldest_unix_ms: Option<i64>,
    /// Price of a GPU for an hour. 0 means that no price is configured.
    pub price_per_gpu_hour: f64,
    /// Currency of the prices in the report.
    pub currency: String,
    /// One row for each container.
    pub rows: Vec<ReportRow>,
}

/// A container's use of the GPUs in a report. A GPU second is the VRAM of a whole GPU for one
/// second.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(default)]
#[allow(missing_docs)] // Each field is described in control.proto.
pub struct ReportRow {
    pub namespace: String,
    pub pod: String,
    pub container: String,
    pub used_gpu_seconds: f64,
    pub idle_gpu_seconds: f64,
    pub returned_gpu_seconds: f64,
    pub offloads: u64,
    pub calls: u64,
    pub claim: String,
    pub requested_gpu_seconds: f64,
    /// Sum of `used_gpu_seconds` and `idle_gpu_seconds`.
    pub resident_gpu_seconds: f64,
}

impl ReportRow {
    /// Adds the figures of another row to this row.
    pub fn add(&mut self, other: &ReportRow) {
        self.used_gpu_seconds += other.used_gpu_seconds;
        self.idle_gpu_seconds += other.idle_gpu_seconds;
        self.returned_gpu_seconds += other.returned_gpu_seconds;
        self.offloads = self.offloads.saturating_add(other.offloads);
        self.calls = self.calls.saturating_add(other.calls);
        self.requested_gpu_seconds += other.requested_gpu_seconds;
        self.resident_gpu_seconds += other.resident_gpu_seconds;
    }
}

impl From<Report> for control::ReportResponse {
    fn from(report: Report) -> control::ReportResponse {
        let row = |row: ReportRow| control::ReportRow {
            namespace: row.namespace,
            pod: row.pod,
            container: row.container,
            used_gpu_seconds: row.used_gpu_seconds,
            idle_gpu_seconds: row.idle_gpu_seconds,
            returned_gpu_seconds: row.returned_gpu_seconds,
            offloads: row.offloads,
            calls: row.calls,
            claim: row.claim,
            requested_gpu_seconds: row.requested_gpu_seconds,
            ..control::ReportRow::default()
        };
        control::ReportResponse {
            rows: report.rows.into_iter().map(row).collect(),
            price_per_gpu_hour: report.price_per_gpu_hour,
            currency: report.currency,
            oldest_unix_ms: report.oldest_unix_ms.unwrap_or(0),
            ..control::ReportResponse::default()
        }
    }
}

impl From<control::ReportResponse> for Report {
    fn from(report: control::ReportResponse) -> Report {
        let row = |row: control::ReportRow| ReportRow {
            namespace: row.namespace,
            pod: row.pod,
            container: row.container,
            used_gpu_seconds: row.used_gpu_seconds,
            idle_gpu_seconds: row.idle_gpu_seconds,
            returned_gpu_seconds: row.returned_gpu_seconds,
            offloads: row.offloads,
            calls: row.calls,
            claim: row.claim,
            requested_gpu_seconds: row.requested_gpu_seconds,
            resident_gpu_seconds: row.used_gpu_seconds + row.idle_gpu_seconds,
        };
        Report {
            rows: report.rows.into_iter().map(row).collect(),
            price_per_gpu_hour: report.price_per_gpu_hour,
            currency: report.currency,
            oldest_unix_ms: Some(report.oldest_unix_ms).filter(|ms| *ms > 0),
            ..Report::default()
        }
    }
}
