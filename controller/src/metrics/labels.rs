//! Labels of the Prometheus metrics. Values that come from containers are cut to a maximum length.

use prometheus_client::encoding::EncodeLabelSet;

use crate::schema::{Container, Gpu};

const MAX_LABEL_CHARS: usize = 120;

fn cut(text: &str) -> String {
    text.chars().take(MAX_LABEL_CHARS).collect()
}

/// Labels of a GPU's metrics, with the same names as in dcgm-exporter.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
#[allow(non_snake_case)] // The names are dcgm-exporter's.
pub struct GpuLabels {
    UUID: String,
    gpu: String,
    model: String,
}

impl GpuLabels {
    pub fn of(gpu: &Gpu) -> GpuLabels {
        GpuLabels { UUID: cut(&gpu.uuid), gpu: gpu.index.to_string(), model: cut(&gpu.name) }
    }
}

/// Labels of a container's metrics.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ContainerLabels {
    namespace: String,
    pod: String,
    container: String,
}

impl ContainerLabels {
    pub fn of(c: &Container) -> ContainerLabels {
        let pod = !c.pod.is_empty();
        ContainerLabels {
            namespace: cut(if pod { &c.pod_namespace } else { &c.namespace }),
            pod: cut(&c.pod),
            container: cut(if pod { &c.container } else { &c.id }),
        }
    }
}

/// Labels of a container, and of how it used its GPU: used, idle or returned.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct UseLabels {
    namespace: String,
    pod: String,
    container: String,
    state: &'static str,
}

impl UseLabels {
    pub const USED: &'static str = "used";
    pub const IDLE: &'static str = "idle";
    pub const RETURNED: &'static str = "returned";

    pub fn of(labels: &ContainerLabels, state: &'static str) -> UseLabels {
        let ContainerLabels { namespace, pod, container } = labels.clone();
        UseLabels { namespace, pod, container, state }
    }
}

/// Labels of a container with its settings and the reason for its state.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ReasonedLabels {
    namespace: String,
    pod: String,
    container: String,
    state: String,
    reason: String,
    mode: String,
    engine: String,
    pinned: String,
}

impl ReasonedLabels {
    pub fn of(c: &Container) -> ReasonedLabels {
        let ContainerLabels { namespace, pod, container } = ContainerLabels::of(c);
        let (state, reason) = (c.state.clone(), c.reason.clone());
        let (mode, engine, pinned) = (c.mode.clone(), c.engine.clone(), c.pinned.to_string());
        ReasonedLabels { namespace, pod, container, state, reason, mode, engine, pinned }
    }
}

/// Labels of a container and one of its GPUs.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
#[allow(non_snake_case)] // The names are dcgm-exporter's.
pub struct DeviceLabels {
    UUID: String,
    gpu: String,
    namespace: String,
    pod: String,
    container: String,
}

impl DeviceLabels {
    pub fn of(c: &Container, uuid: &str, known: Option<&Gpu>) -> DeviceLabels {
        let ContainerLabels { namespace, pod, container } = ContainerLabels::of(c);
        let gpu = known.map(|gpu| gpu.index.to_string()).unwrap_or_default();
        DeviceLabels { UUID: cut(uuid), gpu, namespace, pod, container }
    }
}

/// Label with the state of a container.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct StateLabels {
    pub state: String,
}

/// Label with the word for a reason.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ReasonLabels {
    pub reason: String,
}

/// Label with the result of an action.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ResultLabels {
    pub result: &'static str,
}

/// Label with the kind of an event.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct KindLabels {
    pub kind: String,
}

/// Label with the running version of Affinode.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct BuildLabels {
    pub version: String,
}
