//! Defines the Prometheus metrics of a node: name, unit and help of each metric.
//!
//! The order of the families, and of the metrics in them, is the order of `/metrics`.

use std::sync::atomic::AtomicU64;

use prometheus_client::{
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::{Metric, Registry, Unit},
};

use super::{
    labels::{
        BuildLabels, ContainerLabels, DeviceLabels, GpuLabels, KindLabels, ReasonLabels,
        ReasonedLabels, ResultLabels, StateLabels, UseLabels,
    },
    late_counter::LateCounter,
};

type Sum = Counter<f64, AtomicU64>;
type Share = Gauge<f64, AtomicU64>;

/// Collects the metrics that `/metrics` prints, while they are created. Each metric starts at zero.
pub struct MetricRegistry(Registry);

impl MetricRegistry {
    /// Creates a registry that has no metrics yet.
    pub fn new() -> MetricRegistry {
        MetricRegistry(Registry::with_prefix("affinode"))
    }

    /// Returns the registry with all metrics that were added.
    pub fn into_inner(self) -> Registry {
        self.0
    }

    fn add<M: Metric + Clone + Default>(&mut self, name: &str, help: &str) -> M {
        let metric = M::default();
        self.0.register(name, help, metric.clone());
        metric
    }

    fn add_with_unit<M: Metric + Clone + Default>(
        &mut self,
        name: &str,
        unit: Unit,
        help: &str,
    ) -> M {
        let metric = M::default();
        self.0.register_with_unit(name, help, unit, metric.clone());
        metric
    }

    fn add_histogram(
        &mut self,
        name: &str,
        unit: Unit,
        help: &str,
        histogram: Histogram,
    ) -> Histogram {
        self.0.register_with_unit(name, help, unit, histogram.clone());
        histogram
    }
}

/// Creates a histogram of durations in seconds, with buckets from 10 ms to 5 min.
fn seconds() -> Histogram {
    Histogram::new([0.01, 0.03, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0])
}

/// Creates a histogram of sizes in bytes, with buckets from 16 MiB to 512 GiB.
fn sizes() -> Histogram {
    Histogram::new(exponential_buckets(16.0 * 1024.0 * 1024.0, 2.0, 16))
}

/// Metrics of the controller itself, and of the settings that apply to the whole node.
#[derive(Debug)]
pub struct ControllerMetrics {
    pub build: Family<BuildLabels, Gauge>,
    pub start_time: Share,
    pub restarts: LateCounter,
    pub unexpected_ends: LateCounter,
    pub auto_offload: Gauge,
    pub nvml_up: Gauge,
}

impl ControllerMetrics {
    pub fn new(registry: &mut MetricRegistry) -> ControllerMetrics {
        ControllerMetrics {
            build: registry.add("build_info", "Version of the running controller"),
            start_time: registry.add_with_unit(
                "controller_start_time",
                Unit::Seconds,
                "Time at which the controller started, in seconds since the Unix epoch",
            ),
            restarts: registry.add(
                "controller_restarts",
                "Number of controller restarts in the history of this node",
            ),
            unexpected_ends: registry.add(
                "controller_unexpected_ends",
                "Number of unexpected controller exits in the history of this node. An exit is \
                 expected if it was requested, or if no container was left",
            ),
            auto_offload: registry.add(
                "auto_offload_enabled",
                "Whether containers are offloaded automatically (1: yes, 0: an operator turned it \
                 off)",
            ),
            nvml_up: registry
                .add("nvml_up", "Whether NVML can read all GPUs of the node (1: yes, 0: no)"),
        }
    }
}

/// Metrics of each GPU's VRAM, and of the host memory for content that was copied from the GPU.
#[derive(Debug)]
pub struct GpuMemoryMetrics {
    pub total: Family<GpuLabels, Gauge>,
    pub used: Family<GpuLabels, Gauge>,
    pub returned: Family<GpuLabels, Gauge>,
    pub copier: Family<GpuLabels, Gauge>,
    pub shared: Family<GpuLabels, Gauge>,
    pub stored: Family<GpuLabels, Gauge>,
    pub reserved: Family<GpuLabels, Gauge>,
    pub unmovable: Family<GpuLabels, Gauge>,
}

impl GpuMemoryMetrics {
    pub fn new(registry: &mut MetricRegistry) -> GpuMemoryMetrics {
        GpuMemoryMetrics {
            total: registry.add_with_unit("gpu_vram_total", Unit::Bytes, "Total VRAM of the GPU"),
            used: registry.add_with_unit(
                "gpu_vram_used",
                Unit::Bytes,
                "VRAM of the GPU in use by all processes",
            ),
            returned: registry.add_with_unit(
                "gpu_vram_returned",
                Unit::Bytes,
                "VRAM that offloads freed and that has not been restored yet",
            ),
            copier: registry.add_with_unit(
                "gpu_memory_copier",
                Unit::Bytes,
                "VRAM used by Affinode's copier, a process that copies memory of offloaded \
                 containers",
            ),
            shared: registry.add_with_unit(
                "gpu_host_memory_shared",
                Unit::Bytes,
                "Offloaded memory whose content several processes share (dedup), counted once for \
                 each process",
            ),
            stored: registry.add_with_unit(
                "gpu_host_memory_stored",
                Unit::Bytes,
                "Host memory that stores the content shared by several processes (dedup), counted \
                 once",
            ),
            reserved: registry.add_with_unit(
                "gpu_vram_reserved",
                Unit::Bytes,
                "VRAM that the controller reserves for restores in progress",
            ),
            unmovable: registry.add_with_unit(
                "gpu_vram_unmovable",
                Unit::Bytes,
                "VRAM that no offload can free: of containers that must stay on the GPU, and of \
                 everything that is not a container of Affinode",
            ),
        }
    }

    /// Removes all series, so that no series of a removed GPU remains.
    pub fn clear(&self) {
        self.total.clear();
        self.used.clear();
        self.returned.clear();
        self.copier.clear();
        self.shared.clear();
        self.stored.clear();
        self.reserved.clear();
        self.unmovable.clear();
    }
}

/// Metrics of how busy each GPU is, how much of its VRAM its containers need together, and how many
/// of them wait for it.
#[derive(Debug)]
pub struct GpuLoadMetrics {
    pub busy: Family<GpuLabels, Share>,
    pub busy_minute: Family<GpuLabels, Share>,
    pub pressure: Family<GpuLabels, Share>,
    pub queued: Family<GpuLabels, Gauge>,
}

impl GpuLoadMetrics {
    pub fn new(registry: &mut MetricRegistry) -> GpuLoadMetrics {
        GpuLoadMetrics {
            busy: registry.add(
                "gpu_utilization_ratio",
                "Fraction of the last NVML sample period in which the GPU was busy",
            ),
            busy_minute: registry.add(
                "gpu_utilization_minute_ratio",
                "Fraction of the last minute in which the GPU was busy",
            ),
            pressure: registry.add(
                "gpu_vram_pressure_ratio",
                "VRAM that all containers of the GPU would need if all were resident, divided by \
                 the VRAM of the GPU. Above 1 they do not all fit",
            ),
            queued: registry.add(
                "gpu_queue_depth",
                "Number of containers in the queue for VRAM of the GPU. A container with memory of \
                 several GPUs counts on each of them",
            ),
        }
    }

    /// Removes all series, so that no series of a removed GPU remains.
    pub fn clear(&self) {
        self.busy.clear();
        self.busy_minute.clear();
        self.pressure.clear();
        self.queued.clear();
    }
}

/// Metrics of the current state of each container.
#[derive(Debug)]
pub struct ContainerMetrics {
    pub states: Family<StateLabels, Gauge>,
    pub held: Family<DeviceLabels, Gauge>,
    pub offloaded: Family<DeviceLabels, Gauge>,
    pub kept: Family<ContainerLabels, Gauge>,
    pub copyable: Family<ContainerLabels, Share>,
    pub idle: Family<ContainerLabels, Share>,
    pub waiting: Family<ContainerLabels, Gauge>,
    pub queue_wait: Family<ContainerLabels, Share>,
    pub processes: Family<ContainerLabels, Gauge>,
    pub reasons: Family<ReasonedLabels, Gauge>,
}

impl ContainerMetrics {
    pub fn new(registry: &mut MetricRegistry) -> ContainerMetrics {
        ContainerMetrics {
            states: registry.add("containers", "Number of GPU containers in each state"),
            held: registry.add_with_unit(
                "container_vram",
                Unit::Bytes,
                "VRAM in use by the container",
            ),
            offloaded: registry.add_with_unit(
                "container_host_memory",
                Unit::Bytes,
                "Offloaded memory of the container",
            ),
            kept: registry.add_with_unit(
                "container_host_memory_kept",
                Unit::Bytes,
                "Host memory of the copy that a resident container retains for its next offload \
                 (retain_host_copy)",
            ),
            copyable: registry.add(
                "container_copyable_ratio",
                "Fraction of the VRAM of the container that Affinode's library can copy without \
                 the driver's checkpoint",
            ),
            idle: registry.add_with_unit(
                "container_idle",
                Unit::Seconds,
                "Time since the last CUDA call of the container",
            ),
            waiting: registry.add(
                "container_waiting_calls",
                "Number of CUDA calls that wait now until the container is restored",
            ),
            queue_wait: registry.add_with_unit(
                "container_queue_wait",
                Unit::Seconds,
                "Time for which the container has waited in the queue for VRAM until now. 0: it is \
                 not in the queue",
            ),
            processes: registry
                .add("container_processes", "Number of CUDA processes of the container"),
            reasons: registry.add(
                "container_reason",
                "State, reason and settings of the container, as labels. The value is always 1",
            ),
        }
    }

    /// Removes all series, so that no series of a removed container remains.
    pub fn clear(&self) {
        self.states.clear();
        self.held.clear();
        self.offloaded.clear();
        self.kept.clear();
        self.copyable.clear();
        self.idle.clear();
        self.waiting.clear();
        self.queue_wait.clear();
        self.processes.clear();
        self.reasons.clear();
    }
}

/// Metrics of the CUDA calls of each container, and of the time that Affinode adds to them.
#[derive(Debug)]
pub struct CallMetrics {
    pub made: Family<ContainerLabels, Counter>,
    pub hook_seconds: Family<ContainerLabels, Sum>,
    pub held_seconds: Family<ContainerLabels, Sum>,
    pub call_cost: Family<ContainerLabels, Share>,
}

impl CallMetrics {
    pub fn new(registry: &mut MetricRegistry) -> CallMetrics {
        CallMetrics {
            made: registry.add("container_cuda_calls", "CUDA calls made by the container"),
            hook_seconds: registry.add_with_unit(
                "container_hook",
                Unit::Seconds,
                "Estimated time that Affinode's hook added to the CUDA calls of the container. It \
                 is the number of calls times the overhead per call, which each process measures \
                 at its start",
            ),
            held_seconds: registry.add_with_unit(
                "container_held_calls",
                Unit::Seconds,
                "Time that CUDA calls of the container waited during its offloads and restores, \
                 summed over all threads",
            ),
            call_cost: registry.add_with_unit(
                "container_hook_call_cost",
                Unit::Seconds,
                "Time that Affinode's hook adds to a CUDA call, the highest value among the \
                 processes of the container",
            ),
        }
    }
}

/// Metrics of the node's host memory for offloaded memory.
#[derive(Debug)]
pub struct HostMemoryMetrics {
    pub used: Gauge,
    pub free: Gauge,
    pub pool_size: Gauge,
    pub pool_used: Gauge,
    pub disk_content: Gauge,
    pub disk_steps: Family<ResultLabels, Counter>,
}

impl HostMemoryMetrics {
    pub fn new(registry: &mut MetricRegistry) -> HostMemoryMetrics {
        HostMemoryMetrics {
            used: registry.add_with_unit(
                "host_memory_used",
                Unit::Bytes,
                "Host memory in use for offloaded memory. Content that several processes share \
                 counts once",
            ),
            free: registry.add_with_unit(
                "host_memory_free",
                Unit::Bytes,
                "Host memory of the node that is free for further offloads",
            ),
            pool_size: registry.add_with_unit(
                "host_pool_size",
                Unit::Bytes,
                "Maximum size of the host pool (memory.host_pool_percent); 0: the node has none",
            ),
            pool_used: registry.add_with_unit(
                "host_pool_used",
                Unit::Bytes,
                "Memory of the host pool in use, in steps of 64 MiB",
            ),
            disk_content: registry.add_with_unit(
                "disk_content",
                Unit::Bytes,
                "Content of offloaded containers that is on disk and not in host memory",
            ),
            disk_steps: registry.add(
                "disk_steps",
                "Moves of an offloaded container's content from host memory to disk. Label result: \
                 stored (all content is on disk), failed",
            ),
        }
    }
}

/// Metrics of VRAM multiplied by time, for each container: VRAM in use, VRAM of the idle container,
/// and VRAM that offloads freed.
#[derive(Debug)]
pub struct UsageMetrics {
    pub used_byte_seconds: Family<ContainerLabels, Sum>,
    pub idle_byte_seconds: Family<ContainerLabels, Sum>,
    pub returned_byte_seconds: Family<ContainerLabels, Sum>,
    pub gpu_seconds: Family<UseLabels, Sum>,
}

impl UsageMetrics {
    pub fn new(registry: &mut MetricRegistry) -> UsageMetrics {
        UsageMetrics {
            used_byte_seconds: registry.add(
                "container_used_vram_byte_seconds",
                "VRAM that the container held while it was not idle, in bytes times seconds",
            ),
            idle_byte_seconds: registry.add(
                "container_idle_vram_byte_seconds",
                "VRAM that the container held while it was idle, in bytes times seconds",
            ),
            returned_byte_seconds: registry.add(
                "container_returned_vram_byte_seconds",
                "VRAM that offloads of the container freed, in bytes times seconds",
            ),
            gpu_seconds: registry.add_with_unit(
                "container_gpu",
                Unit::Seconds,
                "GPU time of the container, in GPUs times seconds. A container with half of a \
                 GPU's VRAM counts as half a GPU. Label state: used (the container was not idle), \
                 idle (the container was idle), returned (an offload freed the VRAM)",
            ),
        }
    }
}

/// Metrics of offloads and restores: durations, sizes, the queue for VRAM and refusals.
#[derive(Debug)]
pub struct MoveMetrics {
    pub offload_seconds: Histogram,
    pub offload_bytes: Histogram,
    pub restore_seconds: Histogram,
    pub restore_bytes: Histogram,
    pub wake_seconds: Histogram,
    pub queue_seconds: Histogram,
    pub queue_depth: Gauge,
    pub no_progress: Gauge,
    pub refusals: Family<ReasonLabels, Counter>,
}

impl MoveMetrics {
    pub fn new(registry: &mut MetricRegistry) -> MoveMetrics {
        MoveMetrics {
            offload_seconds: registry.add_histogram(
                "offload_duration",
                Unit::Seconds,
                "Duration of an offload",
                seconds(),
            ),
            offload_bytes: registry.add_histogram(
                "offload_size",
                Unit::Bytes,
                "VRAM freed by an offload",
                sizes(),
            ),
            restore_seconds: registry.add_histogram(
                "restore_duration",
                Unit::Seconds,
                "Duration of a restore. The wait for VRAM before the restore is not included",
                seconds(),
            ),
            restore_bytes: registry.add_histogram(
                "restore_size",
                Unit::Bytes,
                "VRAM that a restore takes",
                sizes(),
            ),
            wake_seconds: registry.add_histogram(
                "wake_latency",
                Unit::Seconds,
                "Time that the first CUDA call of an offloaded container waited for the restore",
                seconds(),
            ),
            queue_seconds: registry.add_histogram(
                "queue_wait",
                Unit::Seconds,
                "Time that a container waited in the queue for VRAM",
                seconds(),
            ),
            queue_depth: registry.add("queue_depth", "Number of containers in the queue for VRAM"),
            no_progress: registry.add(
                "containers_without_progress",
                "Number of containers that hold a GPU, or wait for one, and have made no progress \
                 for no_progress_timeout",
            ),
            refusals: registry.add(
                "refusals",
                "Number of offloads that the controller refused or abandoned, by reason",
            ),
        }
    }
}

/// Metrics of the parts that report to users: the event log, the HTTP server and the history.
#[derive(Debug)]
pub struct ReportMetrics {
    pub events: Family<KindLabels, Counter>,
    pub watchers: Gauge,
    pub missed: Counter,
    pub refused_requests: Family<ReasonLabels, Counter>,
    pub history_dropped: Counter,
}

impl ReportMetrics {
    pub fn new(registry: &mut MetricRegistry) -> ReportMetrics {
        ReportMetrics {
            events: registry.add("events", "Events recorded by the controller, by kind"),
            watchers: registry.add("http_watchers", "Number of open HTTP event streams"),
            missed: registry.add(
                "http_missed_messages",
                "Messages of HTTP event streams that were dropped because the client read too \
                 slowly",
            ),
            refused_requests: registry
                .add("http_refused_requests", "HTTP requests refused, by reason"),
            history_dropped: registry.add(
                "history_dropped_records",
                "History records that were dropped before they were written, for example because \
                 the disk is too slow",
            ),
        }
    }
}
