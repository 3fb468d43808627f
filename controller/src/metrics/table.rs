//! Table of all Prometheus metrics of a node. Its methods change metrics of several families
//! together.

use prometheus_client::registry::Registry;

use super::{
    VramShares,
    families::{
        CallMetrics, ContainerMetrics, ControllerMetrics, GpuLoadMetrics, GpuMemoryMetrics,
        HostMemoryMetrics, MetricRegistry, MoveMetrics, ReportMetrics, UsageMetrics,
    },
    labels::{ContainerLabels, UseLabels},
};

/// All metrics of a node, and the registry that prints them.
#[derive(Debug)]
pub struct MetricsTable {
    pub registry: Registry,
    pub controller: ControllerMetrics,
    pub gpu_memory: GpuMemoryMetrics,
    pub gpu_load: GpuLoadMetrics,
    pub container: ContainerMetrics,
    pub calls: CallMetrics,
    pub host: HostMemoryMetrics,
    pub usage: UsageMetrics,
    pub moves: MoveMetrics,
    pub reports: ReportMetrics,
}

impl MetricsTable {
    /// Creates the table with every metric at zero.
    pub fn new() -> MetricsTable {
        let mut registry = MetricRegistry::new();
        MetricsTable {
            controller: ControllerMetrics::new(&mut registry),
            gpu_memory: GpuMemoryMetrics::new(&mut registry),
            gpu_load: GpuLoadMetrics::new(&mut registry),
            container: ContainerMetrics::new(&mut registry),
            calls: CallMetrics::new(&mut registry),
            host: HostMemoryMetrics::new(&mut registry),
            usage: UsageMetrics::new(&mut registry),
            moves: MoveMetrics::new(&mut registry),
            reports: ReportMetrics::new(&mut registry),
            registry: registry.into_inner(),
        }
    }

    /// Removes all series of gauges, so that no series of a removed container or GPU remains. Each
    /// scrape then sets the current series again.
    pub fn clear_gauges(&self) {
        self.gpu_memory.clear();
        self.gpu_load.clear();
        self.container.clear();
        self.calls.call_cost.clear();
    }

    /// Adds a period of `ms` milliseconds to the usage metrics of a container. In this period, the
    /// container was in the state `state` and had the VRAM `vram`.
    pub fn pass(&self, labels: &ContainerLabels, state: &str, vram: &VramShares, ms: i64) {
        #[allow(clippy::cast_precision_loss)] // A sum of approximations.
        let seconds = ms as f64 / 1000.0;
        #[allow(clippy::cast_precision_loss)] // As above.
        let product = |bytes: u64| bytes as f64 * seconds;
        let (family, held) = if state == "Idle" {
            (&self.usage.idle_byte_seconds, UseLabels::IDLE)
        } else {
            (&self.usage.used_byte_seconds, UseLabels::USED)
        };
        family.get_or_create(labels).inc_by(product(vram.held_bytes));
        let returned = product(vram.offloaded_bytes);
        self.usage.returned_byte_seconds.get_or_create(labels).inc_by(returned);
        for (word, gpus) in [(held, vram.held_gpus), (UseLabels::RETURNED, vram.offloaded_gpus)] {
            let labels = UseLabels::of(labels, word);
            self.usage.gpu_seconds.get_or_create(&labels).inc_by(gpus * seconds);
        }
    }

    /// Removes the counter series of a removed container.
    pub fn forget(&self, labels: &ContainerLabels) {
        self.calls.made.remove(labels);
        self.calls.hook_seconds.remove(labels);
        self.calls.held_seconds.remove(labels);
        self.usage.used_byte_seconds.remove(labels);
        self.usage.idle_byte_seconds.remove(labels);
        self.usage.returned_byte_seconds.remove(labels);
        for word in [UseLabels::USED, UseLabels::IDLE, UseLabels::RETURNED] {
            self.usage.gpu_seconds.remove(&UseLabels::of(labels, word));
        }
    }
}
