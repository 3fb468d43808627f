//! All Prometheus metrics of a node: name, unit and help.

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

use super::{
    VramShares,
    labels::{
        BuildLabels, ContainerLabels, DeviceLabels, GpuLabels, KindLabels, ReasonLabels,
        ReasonedLabels, StateLabels, UseLabels,
    },
};

type Sum = Counter<f64, AtomicU64>;
type Share = Gauge<f64, AtomicU64>;

/// The metrics, and the registry that prints them.
#[derive(Debug)]
#[allow(missing_docs)] // The help of each is in `MetricsTable::new`.
pub struct MetricsTable {
    pub registry: Registry,
    pub build: Family<BuildLabels, Gauge>,
    pub start_time: Share,
    pub restarts: Counter,
    pub unexpected_ends: Counter,
    pub auto_offload: Gauge,
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
    pub offloaded: Family<DeviceLabels, Gauge>,
    pub copyable: Family<ContainerLabels, Share>,
    pub kept: Family<ContainerLabels, Gauge>,
    pub idle: Family<ContainerLabels, Share>,
    pub waiting: Family<ContainerLabels, Gauge>,
    pub processes: Family<ContainerLabels, Gauge>,
    pub reasons: Family<ReasonedLabels, Gauge>,
    pub calls: Family<ContainerLabels, Counter>,
    pub hook_seconds: Family<ContainerLabels, Sum>,
    pub held_seconds: Family<ContainerLabels, Sum>,
    pub call_cost: Family<ContainerLabels, Share>,
    pub host_used: Gauge,
    pub host_free: Gauge,
    pub used_byte_seconds: Family<ContainerLabels, Sum>,
    pub idle_byte_seconds: Family<ContainerLabels, Sum>,
    pub returned_byte_seconds: Family<ContainerLabels, Sum>,
    pub gpu_seconds: Family<UseLabels, Sum>,
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

/// A histogram of durations in seconds, with buckets from 10 ms to 5 min.
fn seconds() -> Histogram {
    Histogram::new([0.01, 0.03, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0])
}

/// A histogram of sizes in bytes, with buckets from 16 MiB to 512 GiB.
fn sizes() -> Histogram {
    Histogram::new(exponential_buckets(16.0 * 1024.0 * 1024.0, 2.0, 16))
}

impl MetricsTable {
    /// A registry with every metric at zero.
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
            build: add!("build_info", "Version of the running controller", Family::default()),
            start_time: add!(
                "controller_start_time",
                Seconds,
                "Time at which the controller started, in seconds since the Unix epoch",
                Share::default()
            ),
            restarts: add!(
                "controller_restarts",
                "Number of restarts of the controller that the history of this node records",
                Counter::default()
            ),
            unexpected_ends: add!(
                "controller_unexpected_ends",
                "Number of unexpected exits of the controller that the history of this node \
                 records. An exit is expected if it was requested, or if no container was left",
                Counter::default()
            ),
            auto_offload: add!(
                "auto_offload_enabled",
                "Whether containers are offloaded automatically (1: yes, 0: an operator turned it \
                 off)",
                Gauge::default()
            ),
            nvml_up: add!(
                "nvml_up",
                "Whether NVML can read the GPUs of the node (1: yes, 0: no)",
                Gauge::default()
            ),
            gpu_total: add!("gpu_vram_total", Bytes, "Total VRAM of the GPU", Family::default()),
            gpu_used: add!(
                "gpu_vram_used",
                Bytes,
                "VRAM of the GPU in use by all processes",
                Family::default()
            ),
            gpu_returned: add!(
                "gpu_vram_returned",
                Bytes,
                "VRAM that offloads freed and that has not been restored yet",
                Family::default()
            ),
            gpu_copier: add!(
                "gpu_memory_copier",
                Bytes,
                "VRAM used by Affinode's copier, a process that copies memory of offloaded \
                 containers",
                Family::default()
            ),
            gpu_shared: add!(
                "gpu_host_memory_shared",
                Bytes,
                "Size of offloaded memory whose content is stored once for several processes \
                 (dedup). Each process counts in full",
                Family::default()
            ),
            gpu_stored: add!(
                "gpu_host_memory_stored",
                Bytes,
                "Host memory that content shared by several processes takes, counted once (dedup)",
                Family::default()
            ),
            gpu_reserved: add!(
                "gpu_vram_reserved",
                Bytes,
                "VRAM that the controller reserves for restores in progress",
                Family::default()
            ),
            gpu_busy: add!(
                "gpu_utilization_ratio",
                "Fraction of the last NVML sample period in which the GPU was busy",
                Family::default()
            ),
            gpu_busy_minute: add!(
                "gpu_utilization_minute_ratio",
                "Fraction of the last minute in which the GPU was busy",
                Family::default()
            ),
            gpu_pressure: add!(
                "gpu_vram_pressure_ratio",
                "VRAM that all containers of the GPU would need if all were resident, divided by \
                 the VRAM of the GPU. Above 1 they do not all fit",
                Family::default()
            ),
            containers: add!(
                "containers",
                "Number of GPU containers in each state",
                Family::default()
            ),
            held: add!("container_vram", Bytes, "VRAM in use by the container", Family::default()),
            offloaded: add!(
                "container_host_memory",
                Bytes,
                "Offloaded memory of the container",
                Family::default()
            ),
            kept: add!(
                "container_host_memory_kept",
                Bytes,
                "Host memory with the copy that a resident container keeps for its next offload \
                 (retain_host_copy)",
                Family::default()
            ),
            copyable: add!(
                "container_copyable_ratio",
                "Fraction of the VRAM of the container that Affinode's library can copy without \
                 the driver's checkpoint",
                Family::default()
            ),
            idle: add!(
                "container_idle",
                Seconds,
                "Time since the last CUDA call of the container",
                Family::default()
            ),
            waiting: add!(
                "container_waiting_calls",
                "Number of CUDA calls that wait now until the container is restored",
                Family::default()
            ),
            processes: add!(
                "container_processes",
                "Number of CUDA processes of the container",
                Family::default()
            ),
            reasons: add!(
                "container_reason",
                "State, reason and settings of the container, as labels. The value is always 1",
                Family::default()
            ),
            calls: add!(
                "container_cuda_calls",
                "CUDA calls made by the container",
                Family::default()
            ),
            hook_seconds: add!(
                "container_hook",
                Seconds,
                "Estimated time that Affinode's hook added to the CUDA calls of the container. It \
                 is the number of calls times the overhead per call, which each process measures \
                 at its start",
                Family::default()
            ),
            held_seconds: add!(
                "container_held_calls",
                Seconds,
                "Time that CUDA calls of the container waited during its offloads and restores, \
                 summed over all threads",
                Family::default()
            ),
            call_cost: add!(
                "container_hook_call_cost",
                Seconds,
                "Time that Affinode's hook adds to a CUDA call, the highest value among the \
                 processes of the container",
                Family::default()
            ),
            host_used: add!(
                "host_memory_used",
                Bytes,
                "Host memory in use for offloaded memory. Content that several processes share \
                 counts once",
                Gauge::default()
            ),
            host_free: add!(
                "host_memory_free",
                Bytes,
                "Host memory of the node that is free for further offloads",
                Gauge::default()
            ),
            used_byte_seconds: add!(
                "container_used_vram_byte_seconds",
                "VRAM that the container held while it was not idle, in bytes times seconds",
                Family::default()
            ),
            idle_byte_seconds: add!(
                "container_idle_vram_byte_seconds",
                "VRAM that the container held while it was idle, in bytes times seconds",
                Family::default()
            ),
            returned_byte_seconds: add!(
                "container_returned_vram_byte_seconds",
                "VRAM of the container that was free because of offloads, in bytes times seconds",
                Family::default()
            ),
            gpu_seconds: add!(
                "container_gpu",
                Seconds,
                "GPU time of the container in GPUs times seconds. A container with half of a GPU's \
                 VRAM counts as half a GPU. The label state is used, idle or returned: its VRAM \
                 was in use, held idle, or freed by an offload",
                Family::default()
            ),
            offload_seconds: add!("offload_duration", Seconds, "Duration of an offload", seconds()),
            offload_bytes: add!("offload_size", Bytes, "VRAM freed by an offload", sizes()),
            restore_seconds: add!(
                "restore_duration",
                Seconds,
                "Duration of a restore. The wait for VRAM before the restore is not included",
                seconds()
            ),
            restore_bytes: add!("restore_size", Bytes, "VRAM that a restore takes", sizes()),
            wake_seconds: add!(
                "wake_latency",
                Seconds,
                "Time that the first CUDA call of an offloaded container waited for the restore",
                seconds()
            ),
            queue_seconds: add!(
                "queue_wait",
                Seconds,
                "Time that a container waited in the queue for VRAM",
                seconds()
            ),
            queue_depth: add!(
                "queue_depth",
                "Number of containers in the queue for VRAM",
                Gauge::default()
            ),
            refusals: add!(
                "refusals",
                "Number of offloads that the controller refused or abandoned, by reason",
                Family::default()
            ),
            events: add!("events", "Events recorded by the controller, by kind", Family::default()),
            watchers: add!("http_watchers", "Number of open HTTP event streams", Gauge::default()),
            missed: add!(
                "http_missed_messages",
                "Messages of HTTP event streams that were dropped because the client read too \
                 slowly",
                Counter::default()
            ),
            refused_requests: add!(
                "http_refused_requests",
                "HTTP requests refused, by reason",
                Family::default()
            ),
            history_dropped: add!(
                "history_dropped_records",
                "History records that were dropped before they were written, for example because \
                 the disk is too slow",
                Counter::default()
            ),
            registry,
        }
    }

    /// Removes all series of gauges, so that no series of a removed container or GPU stays. Each
    /// scrape then sets the present series again.
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
        self.offloaded.clear();
        self.copyable.clear();
        self.kept.clear();
        self.call_cost.clear();
        self.idle.clear();
        self.waiting.clear();
        self.processes.clear();
        self.reasons.clear();
    }

    /// Adds a span of `ms` milliseconds in which a container in `state` had this VRAM.
    pub fn pass(&self, labels: &ContainerLabels, state: &str, vram: &VramShares, ms: i64) {
        #[allow(clippy::cast_precision_loss)] // A sum of approximations.
        let seconds = ms as f64 / 1000.0;
        #[allow(clippy::cast_precision_loss)] // As above.
        let product = |bytes: u64| bytes as f64 * seconds;
        let (family, held) = if state == "Idle" {
            (&self.idle_byte_seconds, UseLabels::IDLE)
        } else {
            (&self.used_byte_seconds, UseLabels::USED)
        };
        family.get_or_create(labels).inc_by(product(vram.held_bytes));
        self.returned_byte_seconds.get_or_create(labels).inc_by(product(vram.offloaded_bytes));
        for (word, gpus) in [(held, vram.held_gpus), (UseLabels::RETURNED, vram.offloaded_gpus)] {
            let labels = UseLabels::of(labels, word);
            self.gpu_seconds.get_or_create(&labels).inc_by(gpus * seconds);
        }
    }

    /// Ends the counter series of a removed container.
    pub fn forget(&self, labels: &ContainerLabels) {
        self.calls.remove(labels);
        self.hook_seconds.remove(labels);
        self.held_seconds.remove(labels);
        self.used_byte_seconds.remove(labels);
        self.idle_byte_seconds.remove(labels);
        self.returned_byte_seconds.remove(labels);
        for word in [UseLabels::USED, UseLabels::IDLE, UseLabels::RETURNED] {
            self.gpu_seconds.remove(&UseLabels::of(labels, word));
        }
    }
}
