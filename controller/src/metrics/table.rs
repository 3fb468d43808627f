//! Every metric, with its name and what it means.

use std::sync::atomic::AtomicU64;

use prometheus_client::{
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::{Registry, Unit},
};

use super::labels::{
    BuildLabels, ContainerLabels, DeviceLabels, GpuLabels, KindLabels, ReasonLabels, StateLabels,
};

type Sum = Counter<f64, AtomicU64>;
type Share = Gauge<f64, AtomicU64>;

/// The metrics.
#[derive(Debug)]
#[allow(missing_docs)] // Each is described where it is registered.
pub struct MetricsTable {
    pub registry: Registry,
    pub build: Family<BuildLabels, Gauge>,
    pub start_time: Share,
    pub restarts: Counter,
    pub nvml_up: Gauge,
    pub gpu_total: Family<GpuLabels, Gauge>,
    pub gpu_used: Family<GpuLabels, Gauge>,
    pub gpu_returned: Family<GpuLabels, Gauge>,
    pub gpu_reserved: Family<GpuLabels, Gauge>,
    pub gpu_copier: Family<GpuLabels, Gauge>,
    pub gpu_shared: Family<GpuLabels, Gauge>,
    pub gpu_stored: Family<GpuLabels, Gauge>,
    pub gpu_busy: Family<GpuLabels, Share>,
    pub gpu_busy_minute: Family<GpuLabels, Share>,
    pub gpu_pressure: Family<GpuLabels, Share>,
    pub containers: Family<StateLabels, Gauge>,
    pub held: Family<DeviceLabels, Gauge>,
    pub away: Family<DeviceLabels, Gauge>,
    pub copyable: Family<ContainerLabels, Share>,
    pub kept: Family<ContainerLabels, Gauge>,
    pub idle: Family<ContainerLabels, Share>,
    pub waiting: Family<ContainerLabels, Gauge>,
    pub processes: Family<ContainerLabels, Gauge>,
    pub calls: Family<ContainerLabels, Counter>,
    pub hook_seconds: Family<ContainerLabels, Sum>,
    pub held_seconds: Family<ContainerLabels, Sum>,
    pub call_cost: Family<ContainerLabels, Share>,
    pub host_used: Gauge,
    pub host_free: Gauge,
    pub used_byte_seconds: Family<ContainerLabels, Sum>,
    pub idle_byte_seconds: Family<ContainerLabels, Sum>,
    pub returned_byte_seconds: Family<ContainerLabels, Sum>,
    pub offload_seconds: Histogram,
    pub offload_bytes: Histogram,
    pub restore_seconds: Histogram,
    pub restore_bytes: Histogram,
    pub wake_seconds: Histogram,
    pub queue_seconds: Histogram,
    pub queue_depth: Gauge,
    pub refusals: Family<ReasonLabels, Counter>,
    pub events: Family<KindLabels, Counter>,
    pub watchers: Gauge,
    pub missed: Counter,
    pub refused_requests: Family<ReasonLabels, Counter>,
    pub history_dropped: Counter,
}

/// 10 ms to 5 min.
fn seconds() -> Histogram {
    Histogram::new([0.01, 0.03, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0])
}

/// 16 MiB to 512 GiB.
fn sizes() -> Histogram {
    Histogram::new(exponential_buckets(16.0 * 1024.0 * 1024.0, 2.0, 16))
}

impl MetricsTable {
    /// All at zero.
    #[allow(clippy::too_many_lines)] // One line for each metric.
    pub fn new() -> MetricsTable {
        let mut registry = Registry::with_prefix("affinode");
        macro_rules! add {
            ($name:literal, $help:literal, $metric:expr) => {{
                let metric = $metric;
                registry.register($name, $help, metric.clone());
                metric
            }};
            ($name:literal, $unit:ident, $help:literal, $metric:expr) => {{
                let metric = $metric;
                registry.register_with_unit($name, $help, Unit::$unit, metric.clone());
                metric
            }};
        }
        MetricsTable {
            build: add!("build_info", "The controller's version", Family::default()),
            start_time: add!(
                "controller_start_time",
                Seconds,
                "When the controller started, since 1970",
                Share::default()
            ),
            restarts: add!(
                "controller_restarts",
                "Starts of a controller on this node's history after the first",
                Counter::default()
            ),
            nvml_up: add!("nvml_up", "Whether devices can be read", Gauge::default()),
            gpu_total: add!("gpu_vram_total", Bytes, "VRAM of the device", Family::default()),
            gpu_used: add!("gpu_vram_used", Bytes, "VRAM in use by anybody", Family::default()),
            gpu_returned: add!(
                "gpu_vram_returned",
                Bytes,
                "VRAM that offloaded containers gave back",
                Family::default()
            ),
            gpu_copier: add!(
                "gpu_memory_copier",
                Bytes,
                "VRAM that the copier holds itself, which fills the memory of who comes home",
                Family::default()
            ),
            gpu_shared: add!(
                "gpu_host_memory_shared",
                Bytes,
                "What processes that are away from the device hold once with others of their namespace, over all of them",
                Family::default()
            ),
            gpu_stored: add!(
                "gpu_host_memory_stored",
                Bytes,
                "The files in host memory that hold it once",
                Family::default()
            ),
            gpu_reserved: add!(
                "gpu_vram_reserved",
                Bytes,
                "VRAM promised to containers that are coming back",
                Family::default()
            ),
            gpu_busy: add!(
                "gpu_utilization_ratio",
                "Busy share of the last sample period",
                Family::default()
            ),
            gpu_busy_minute: add!(
                "gpu_utilization_minute_ratio",
                "Busy share of the last minute",
                Family::default()
            ),
            gpu_pressure: add!(
                "gpu_vram_pressure_ratio",
                "VRAM that would be in use if everybody were home, as a share of the device's; above 1 not all fit",
                Family::default()
            ),
            containers: add!("containers", "GPU containers by state", Family::default()),
            held: add!("container_vram", Bytes, "VRAM that the container holds", Family::default()),
            away: add!(
                "container_host_memory",
                Bytes,
                "VRAM of the container that is in host memory",
                Family::default()
            ),
            kept: add!(
                "container_host_memory_kept",
                Bytes,
                "Host memory that the container keeps for its next offload while its VRAM is on the device",
                Family::default()
            ),
            copyable: add!(
                "container_copyable_ratio",
                "The part of the container's VRAM that its engine copies by itself",
                Family::default()
            ),
            idle: add!(
                "container_idle",
                Seconds,
                "How long the container made no CUDA call",
                Family::default()
            ),
            waiting: add!(
                "container_waiting_calls",
                "CUDA calls that wait for the container's return",
                Family::default()
            ),
            processes: add!(
                "container_processes",
                "CUDA processes of the container",
                Family::default()
            ),
            calls: add!("container_cuda_calls", "CUDA calls of the container", Family::default()),
            hook_seconds: add!(
                "container_hook",
                Seconds,
                "Time that the hook added to the container's CUDA calls: their number times what one costs, as each process measures at its start in a loop",
                Family::default()
            ),
            held_seconds: add!(
                "container_held_calls",
                Seconds,
                "Time that CUDA calls of the container waited at its closed gate",
                Family::default()
            ),
            call_cost: add!(
                "container_hook_call_cost",
                Seconds,
                "What the hook adds to a CUDA call in the container's dearest process",
                Family::default()
            ),
            host_used: add!(
                "host_memory_used",
                Bytes,
                "VRAM of offloaded containers that is in host memory; what they hold together counts once",
                Gauge::default()
            ),
            host_free: add!(
                "host_memory_free",
                Bytes,
                "Host memory that offloads may still take on the node",
                Gauge::default()
            ),
            used_byte_seconds: add!(
                "container_used_vram_byte_seconds",
                "VRAM held while in use, over time",
                Family::default()
            ),
            idle_byte_seconds: add!(
                "container_idle_vram_byte_seconds",
                "VRAM held while idle, over time",
                Family::default()
            ),
            returned_byte_seconds: add!(
                "container_returned_vram_byte_seconds",
                "VRAM given back, over time",
                Family::default()
            ),
            offload_seconds: add!("offload_duration", Seconds, "How long offloads took", seconds()),
            offload_bytes: add!("offload_size", Bytes, "VRAM moved out by an offload", sizes()),
            restore_seconds: add!(
                "restore_duration",
                Seconds,
                "How long restores took once there was room",
                seconds()
            ),
            restore_bytes: add!("restore_size", Bytes, "VRAM moved back by a restore", sizes()),
            wake_seconds: add!(
                "wake_latency",
                Seconds,
                "How long the first call of a container that was away waited",
                seconds()
            ),
            queue_seconds: add!(
                "queue_wait",
                Seconds,
                "How long containers waited for VRAM",
                seconds()
            ),
            queue_depth: add!("queue_depth", "Containers that wait for VRAM", Gauge::default()),
            refusals: add!("refusals", "Offloads that were given up, by reason", Family::default()),
            events: add!("events", "Events by kind", Family::default()),
            watchers: add!("http_watchers", "Open event streams", Gauge::default()),
            missed: add!(
                "http_missed_messages",
                "Messages that slow streams missed",
                Counter::default()
            ),
            refused_requests: add!(
                "http_refused_requests",
                "HTTP requests that were refused, by reason",
                Family::default()
            ),
            history_dropped: add!(
                "history_dropped_records",
                "Records of the history that were not written",
                Counter::default()
            ),
            registry,
        }
    }

    /// Empties what is filled at each scrape.
    pub fn clear_gauges(&self) {
        for family in [
            &self.gpu_total,
            &self.gpu_used,
            &self.gpu_returned,
            &self.gpu_reserved,
            &self.gpu_copier,
            &self.gpu_shared,
            &self.gpu_stored,
        ] {
            family.clear();
        }
        for family in [&self.gpu_busy, &self.gpu_busy_minute, &self.gpu_pressure] {
            family.clear();
        }
        self.containers.clear();
        self.held.clear();
        self.away.clear();
        self.copyable.clear();
        self.kept.clear();
        self.call_cost.clear();
        self.idle.clear();
        self.waiting.clear();
        self.processes.clear();
    }

    /// A container held VRAM for a while.
    pub fn pass(&self, labels: &ContainerLabels, state: &str, held: u64, away: u64, ms: i64) {
        #[allow(clippy::cast_precision_loss)] // A sum of approximations.
        let product = |bytes: u64| bytes as f64 * (ms as f64 / 1000.0);
        let family =
            if state == "Idle" { &self.idle_byte_seconds } else { &self.used_byte_seconds };
        family.get_or_create(labels).inc_by(product(held));
        self.returned_byte_seconds.get_or_create(labels).inc_by(product(away));
    }

    /// A container is gone: its series end.
    pub fn forget(&self, labels: &ContainerLabels) {
        self.calls.remove(labels);
        self.hook_seconds.remove(labels);
        self.held_seconds.remove(labels);
        self.used_byte_seconds.remove(labels);
        self.idle_byte_seconds.remove(labels);
        self.returned_byte_seconds.remove(labels);
    }
}
