//! The conditions of a node's GPUs that change with their use, for the scheduler.

use std::collections::{BTreeMap, BTreeSet};

pub use super::gpu_load::GpuLoad;

/// The conditions of all GPUs of a node, by UUID.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuConditions {
    /// UUIDs of the GPUs that are full of VRAM that no offload can free.
    pub full: BTreeSet<String>,
    /// Classes of load. A GPU without a class is idle: without a controller, a node has no GPU
    /// containers.
    pub loads: BTreeMap<String, GpuLoad>,
}
