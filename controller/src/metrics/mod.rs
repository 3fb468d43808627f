//! The Prometheus metrics `affinode_…`, in base units.
//!
//! The observer ([`crate::observe`]) updates counters and histograms. Gauges are filled at each
//! scrape from the current list of GPUs and containers. GPUs and containers have the labels of
//! dcgm-exporter (`UUID`, `gpu`, `namespace`, `pod`, `container`), so that the metrics of both
//! exporters can be joined on `UUID`. The number of series with container labels is limited: only
//! the first [`CONTAINERS`] containers, in order of their keys, have such series.

mod durations;
mod families;
mod labels;
mod late_counter;
mod reference;
mod table;
mod text_format;

use std::{
    collections::HashMap,
    fmt,
    sync::{Mutex, MutexGuard, PoisonError},
};

use affinode_proto::{event::EventKind, state::State};

use durations::MoveDurations;
use labels::{
    ContainerLabels, DeviceLabels, GpuLabels, KindLabels, ReasonLabels, ReasonedLabels,
    ResultLabels, StateLabels,
};
pub use reference::{MetricReference, metrics as metrics_reference};
use table::MetricsTable;
pub use text_format::classic;

use crate::{clock::unix_ms, history::ControllerRuns, schema};

/// Maximum number of containers that have series of their own.
pub const CONTAINERS: usize = 1000;
/// Maximum time between two observations, in milliseconds, for which usage metrics grow. If two
/// observations are further apart, the use of VRAM between them is unknown and does not count.
const STALE_AFTER_MS: i64 = 60_000;

/// Prometheus metrics of this controller.
#[derive(Debug)]
pub struct Metrics {
    table: MetricsTable,
    inner: Mutex<MetricsState>,
}

/// Current counts of the dashboard's watchers, of messages that they missed, and of spans that the
/// history dropped. The caller passes these counts at each scrape.
#[derive(Clone, Copy, Debug, Default)]
pub struct DeliveryCounts {
    /// Number of current watchers of the dashboard.
    pub watchers: usize,
    /// Number of messages that slow watchers missed so far.
    pub missed: u64,
    /// Number of spans that the history dropped so far.
    pub history_dropped: u64,
}

#[derive(Debug, Default)]
struct MetricsState {
    moves: MoveDurations,
    looked_ms: i64,
    seen: HashMap<String, SeenCounters>,
}

/// Values of a container's counters at the last observation.
#[derive(Debug)]
struct SeenCounters {
    labels: ContainerLabels,
    state: String,
    calls: u64,
    hook: HookCost,
    vram: VramShares,
}

/// VRAM of a container: the resident part and the offloaded part.
#[derive(Clone, Copy, Debug, Default)]
struct VramShares {
    held_bytes: u64,
    offloaded_bytes: u64,
    /// Sum, over the GPUs, of the fraction of the GPU's VRAM that the container holds.
    held_gpus: f64,
    offloaded_gpus: f64,
}

impl VramShares {
    fn of(container: &schema::Container, gpus: &[schema::Gpu]) -> VramShares {
        #[allow(clippy::cast_precision_loss)] // A share.
        let share = |on: &schema::DeviceBytes| {
            let gpu = gpus.iter().find(|gpu| gpu.uuid == on.uuid && gpu.vram_total_bytes > 0);
            gpu.map_or(0.0, |gpu| on.bytes as f64 / gpu.vram_total_bytes as f64)
        };
        let processes = &container.processes;
        VramShares {
            held_bytes: container.vram_bytes,
            offloaded_bytes: container.offloaded_bytes,
            held_gpus: processes.iter().flat_map(|p| &p.vram).map(share).sum(),
            offloaded_gpus: processes.iter().flat_map(|p| &p.offloaded).map(share).sum(),
        }
    }
}

/// Times that the current processes of a container report: the time that Affinode's hooks added to
/// their CUDA calls, and the time that calls waited during offloads and restores.
#[derive(Clone, Copy, Debug, Default)]
struct HookCost {
    added_s: f64,
    held_s: f64,
}

/// Maximum increase of a time in [`HookCost`] between two observations, in seconds. A larger
/// increase is ignored, because a container can report any value.
const MAX_HOOK_S: f64 = 86_400.0;

impl HookCost {
    #[allow(clippy::cast_precision_loss)] // Sums of approximations.
    fn of(container: &schema::Container) -> HookCost {
        let sum = |of: &dyn Fn(&schema::Process) -> f64| container.processes.iter().map(of).sum();
        HookCost {
            added_s: sum(&|p| {
                p.calls.saturating_add(p.polls) as f64 * f64::from(p.call_cost_ps) / 1e12
            }),
            held_s: sum(&|p| p.held_us as f64 / 1e6),
        }
    }

    /// Returns the increase of both times since the earlier value `before`. If a process has ended
    /// since then, a time can be lower than before. Its increase then counts as 0.
    fn since(self, before: HookCost) -> HookCost {
        let more =
            |now: f64, before: f64| Some(now - before).filter(|s| (0.0..MAX_HOOK_S).contains(s));
        HookCost {
            added_s: more(self.added_s, before.added_s).unwrap_or(0.0),
            held_s: more(self.held_s, before.held_s).unwrap_or(0.0),
        }
    }
}

impl Metrics {
    /// Creates the metrics of a controller. `starts` is the number of controller starts in the
    /// history, including this start (1 without a history).
    #[must_use]
    pub fn new(starts: u64) -> Metrics {
        let metrics = Metrics::before_history();
        metrics.set_runs(ControllerRuns { starts, unexpected_ends: 0 });
        metrics
    }

    /// Creates the metrics of a controller whose history is not open yet. The numbers of restarts
    /// and of unexpected ends have no series until [`Metrics::set_runs`].
    #[must_use]
    pub fn before_history() -> Metrics {
        Metrics { table: MetricsTable::new(), inner: Mutex::default() }
    }

    /// Sets the numbers of controller starts and of unexpected ends, which come from the history.
    pub fn set_runs(&self, runs: ControllerRuns) {
        self.table.controller.restarts.set(runs.starts.saturating_sub(1));
        self.table.controller.unexpected_ends.set(runs.unexpected_ends);
    }

    /// Counts an event in the metrics. If the event ends a move or a wait, also adds its duration.
    pub fn event(&self, event: &schema::Event) {
        self.table.reports.events.get_or_create(&KindLabels { kind: event.kind.clone() }).inc();
        if event.kind == EventKind::Refused.as_str() {
            let reason = ReasonLabels { reason: event.reason.clone() };
            self.table.moves.refusals.get_or_create(&reason).inc();
        }
        for (kind, result) in
            [(EventKind::StoredOnDisk, "stored"), (EventKind::DiskFailed, "failed")]
        {
            if event.kind == kind.as_str() {
                self.table.host.disk_steps.get_or_create(&ResultLabels { result }).inc();
            }
        }
        if event.kind == EventKind::State.as_str() {
            self.inner().moves.event(event, &self.table);
        }
    }

    /// Adds the time since the last observation to the usage metrics. In this time, the containers
    /// count with the VRAM and host memory that they held at the last observation.
    pub fn observe(&self, node: &schema::Node, now_ms: i64) {
        let mut inner = self.inner();
        let passed_ms = now_ms - inner.looked_ms;
        inner.looked_ms = now_ms;
        if (1..=STALE_AFTER_MS).contains(&passed_ms) {
            for seen in inner.seen.values() {
                self.table.pass(&seen.labels, &seen.state, &seen.vram, passed_ms);
            }
        }
        let mut known = std::mem::take(&mut inner.seen);
        for container in node.containers.iter().take(CONTAINERS) {
            let calls =
                container.processes.iter().fold(0_u64, |sum, p| sum.saturating_add(p.calls));
            let labels = ContainerLabels::of(container);
            let before = known.remove(&container.key);
            let more = calls.saturating_sub(before.as_ref().map_or(0, |seen| seen.calls));
            self.table.calls.made.get_or_create(&labels).inc_by(more);
            let hook = HookCost::of(container);
            let news = hook.since(before.map_or(HookCost::default(), |seen| seen.hook));
            self.table.calls.hook_seconds.get_or_create(&labels).inc_by(news.added_s);
            self.table.calls.held_seconds.get_or_create(&labels).inc_by(news.held_s);
            let seen = SeenCounters {
                labels,
                state: container.state.clone(),
                calls,
                hook,
                vram: VramShares::of(container, &node.gpus),
            };
            inner.seen.insert(container.key.clone(), seen);
        }
        for gone in known.into_values() {
            // The series stays if another container has the same labels now.
            if !inner.seen.values().any(|seen| seen.labels == gone.labels) {
                self.table.forget(&gone.labels);
            }
        }
    }

    /// Counts a refused HTTP request. `reason` is the label of the reason.
    pub fn refused_request(&self, reason: &'static str) {
        let reason = reason.to_owned();
        self.table.reports.refused_requests.get_or_create(&ReasonLabels { reason }).inc();
    }

    /// Returns all metrics as OpenMetrics text.
    ///
    /// # Errors
    /// The text cannot be formatted.
    pub fn text(&self, node: &schema::Node, counts: DeliveryCounts) -> Result<String, fmt::Error> {
        self.text_at(node, counts, unix_ms())
    }

    /// Returns the metrics as [`Self::text`] does, at the time `now_ms` since 1970.
    fn text_at(
        &self,
        node: &schema::Node,
        counts: DeliveryCounts,
        now_ms: i64,
    ) -> Result<String, fmt::Error> {
        // One scrape at a time: a scrape clears all gauges and fills them again.
        let _inner = self.inner();
        self.fill(node, now_ms);
        self.table.reports.watchers.set(i64::try_from(counts.watchers).unwrap_or(i64::MAX));
        raise(&self.table.reports.missed, counts.missed);
        raise(&self.table.reports.history_dropped, counts.history_dropped);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.table.registry)?;
        Ok(text)
    }

    fn fill(&self, node: &schema::Node, now_ms: i64) {
        let table = &self.table;
        table.clear_gauges();
        #[allow(clippy::cast_precision_loss)] // Moments of this century are exact in f64.
        table.controller.start_time.set(node.started_unix_ms as f64 / 1000.0);
        table.controller.nvml_up.set(i64::from(node.gpu_error.is_none() && !node.gpus.is_empty()));
        table.controller.auto_offload.set(i64::from(node.auto_offload));
        let build = labels::BuildLabels { version: node.version.clone() };
        table.controller.build.get_or_create(&build).set(1);
        for state in State::ALL {
            let state = StateLabels { state: state.as_str().into() };
            table.container.states.get_or_create(&state).set(0);
        }
        node.gpus.iter().for_each(|gpu| self.fill_gpu(gpu));
        let (mut queued, mut without_progress) = (0, 0);
        for (position, container) in node.containers.iter().enumerate() {
            let state = StateLabels { state: container.state.clone() };
            table.container.states.get_or_create(&state).inc();
            if is_queued(container) {
                queued += 1;
                self.fill_queue(container, node);
            }
            without_progress += i64::from(container.no_progress_ms > 0);
            if position < CONTAINERS {
                self.fill_container(container, node, now_ms);
            }
        }
        table.moves.queue_depth.set(queued);
        table.moves.no_progress.set(without_progress);
        table.host.used.set(whole(node.host_used_bytes));
        table.host.free.set(whole(node.host_free_bytes));
        table.host.pool_size.set(whole(node.host_pool_bytes));
        table.host.pool_used.set(whole(node.host_pool_used_bytes));
        let on_disk = node.containers.iter().map(|c| c.disk_bytes).fold(0, u64::saturating_add);
        table.host.disk_content.set(whole(on_disk));
    }

    fn fill_gpu(&self, gpu: &schema::Gpu) {
        let labels = GpuLabels::of(gpu);
        let memory = &self.table.gpu_memory;
        memory.total.get_or_create(&labels).set(whole(gpu.vram_total_bytes));
        memory.used.get_or_create(&labels).set(whole(gpu.vram_used_bytes));
        memory.returned.get_or_create(&labels).set(whole(gpu.vram_reclaimed_bytes));
        memory.reserved.get_or_create(&labels).set(whole(gpu.vram_reserved_bytes));
        memory.unmovable.get_or_create(&labels).set(whole(gpu.vram_unmovable_bytes));
        memory.copier.get_or_create(&labels).set(whole(gpu.copier_vram_bytes));
        memory.shared.get_or_create(&labels).set(whole(gpu.copier_shared_bytes));
        memory.stored.get_or_create(&labels).set(whole(gpu.copier_stored_bytes));
        let load = &self.table.gpu_load;
        load.busy.get_or_create(&labels).set(f64::from(gpu.utilization_percent) / 100.0);
        let minute = f64::from(gpu.utilization_minute_percent) / 100.0;
        load.busy_minute.get_or_create(&labels).set(minute);
        let wanted = gpu.vram_used_bytes.saturating_add(gpu.vram_reclaimed_bytes);
        #[allow(clippy::cast_precision_loss)] // A share.
        let pressure = wanted as f64 / gpu.vram_total_bytes.max(1) as f64;
        load.pressure.get_or_create(&labels).set(pressure);
        load.queued.get_or_create(&labels).set(0);
    }

    /// Counts a container of the queue on each GPU whose VRAM it waits for.
    fn fill_queue(&self, container: &schema::Container, node: &schema::Node) {
        let waits_for = |gpu: &&schema::Gpu| {
            let mut offloaded = container.processes.iter().flat_map(|p| &p.offloaded);
            offloaded.any(|on| on.uuid == gpu.uuid && on.bytes > 0)
        };
        for gpu in node.gpus.iter().filter(waits_for) {
            self.table.gpu_load.queued.get_or_create(&GpuLabels::of(gpu)).inc();
        }
    }

    fn fill_container(&self, container: &schema::Container, node: &schema::Node, now_ms: i64) {
        let table = &self.table;
        let labels = ContainerLabels::of(container);
        #[allow(clippy::cast_precision_loss)] // Idle for years is exact in f64.
        table.container.idle.get_or_create(&labels).set(container.idle_ms as f64 / 1000.0);
        let reason = ReasonedLabels::of(container);
        table.container.reasons.get_or_create(&reason).set(1);
        let waiting: u64 = container.processes.iter().map(|p| u64::from(p.waiters)).sum();
        table.container.waiting.get_or_create(&labels).set(whole(waiting));
        let wait_ms = if is_queued(container) { now_ms - container.since_unix_ms } else { 0 };
        #[allow(clippy::cast_precision_loss)] // As above.
        table.container.queue_wait.get_or_create(&labels).set(wait_ms.max(0) as f64 / 1000.0);
        let processes = whole(container.processes.len() as u64);
        table.container.processes.get_or_create(&labels).set(processes);
        let kept: u64 = container.processes.iter().map(|p| p.kept_bytes).sum();
        table.container.kept.get_or_create(&labels).set(whole(kept));
        if let Some(share) = container.copyable_share {
            table.container.copyable.get_or_create(&labels).set(share);
        }
        let dearest = container.processes.iter().map(|p| p.call_cost_ps).max().unwrap_or(0);
        if dearest > 0 {
            table.calls.call_cost.get_or_create(&labels).set(f64::from(dearest) / 1e12);
        }
        for process in &container.processes {
            for (family, devices) in [
                (&table.container.held, &process.vram),
                (&table.container.offloaded, &process.offloaded),
            ] {
                for device in devices {
                    let known = node.gpus.iter().find(|gpu| gpu.uuid == device.uuid);
                    let labels = DeviceLabels::of(container, &device.uuid, known);
                    family.get_or_create(&labels).inc_by(whole(device.bytes));
                }
            }
        }
    }

    fn inner(&self) -> MutexGuard<'_, MetricsState> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns whether the container is in the queue for VRAM.
fn is_queued(container: &schema::Container) -> bool {
    container.state == State::Queued.as_str()
}

fn raise(counter: &prometheus_client::metrics::counter::Counter, to: u64) {
    counter.inc_by(to.saturating_sub(counter.get()));
}

fn whole(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests;
