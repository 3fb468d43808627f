//! The host memory and the disk of the simulated node.

use affinode_core::{
    Millis,
    host_memory::{HostNeed, HostPoolAllowance, MemoryPlace, MemoryPool, SurveyedMemory},
};
use serde::Serialize;

/// Sizes of the simulated node's host memory and disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct HostLimits {
    /// Limits of the host memory. `None`: it always suffices.
    pub memory: Option<HostMemoryLimits>,
    /// Maximum size of all disk files, in bytes. 0: the node has no folder for disk files.
    pub disk_bytes: u64,
}

/// Limits of the simulated node's host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct HostMemoryLimits {
    /// Memory that the content of offloaded processes may use, in bytes: the node's memory without
    /// the reserve.
    pub node_bytes: u64,
    /// The part of it that the host pool may use, in bytes.
    pub host_pool_bytes: u64,
    /// Memory that the driver needs for a process in addition to its VRAM, in bytes.
    pub overhead_bytes: u64,
}

/// A kind of memory to which offloaded content is copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ContentPlace {
    /// Memory of the process.
    Own,
    /// Memory of the host pool.
    HostPool,
}

/// Host memory and disk that offloaded content uses.
#[derive(Debug)]
pub(super) struct HostUse {
    limits: HostLimits,
    memory_bytes: u64,
    host_pool_bytes: u64,
    disk_bytes: u64,
    memory_peak_bytes: u64,
    disk_peak_bytes: u64,
    /// Product of used memory and time up to the time `counted_until`.
    memory_byte_ms: u128,
    counted_until: Millis,
}

impl HostUse {
    pub(super) fn new(limits: HostLimits) -> HostUse {
        HostUse {
            limits,
            memory_bytes: 0,
            host_pool_bytes: 0,
            disk_bytes: 0,
            memory_peak_bytes: 0,
            disk_peak_bytes: 0,
            memory_byte_ms: 0,
            counted_until: 0,
        }
    }

    /// Whether offloads use the host pool. Without limits and without a disk it makes no difference
    /// where the content is.
    pub(super) fn has_host_pool(&self) -> bool {
        self.has_disk() || self.limits.memory.is_some_and(|memory| memory.host_pool_bytes > 0)
    }

    /// Whether content can move to disk.
    pub(super) fn has_disk(&self) -> bool {
        self.limits.disk_bytes > 0
    }

    /// Returns the reading of the host memory for an offload of these processes, as the controller
    /// makes it on a node.
    pub(super) fn survey(&self, needs: &[HostNeed], host_pool: bool) -> SurveyedMemory {
        let sum = |bytes: &dyn Fn(&HostNeed) -> u64| needs.iter().map(bytes).sum::<u64>();
        let pool = |place, free_bytes, need_bytes| MemoryPool { place, free_bytes, need_bytes };
        let allowance = |need: &HostNeed| HostPoolAllowance {
            pid: need.pid,
            bytes: need.pooled_bytes(),
            kept_bytes: need.pooled_already_bytes(),
        };
        let allowances = needs.iter().map(allowance).collect();
        let pooled_bytes = sum(&HostNeed::pooled_bytes);
        let Some(limits) = self.limits.memory else {
            let unlimited = pool(MemoryPlace::HostPool, u64::MAX, pooled_bytes);
            let host_pool = if host_pool { vec![unlimited] } else { Vec::new() };
            return SurveyedMemory { container: Vec::new(), host_pool, allowances };
        };
        let node = |need_bytes| {
            let free_bytes = limits.node_bytes.saturating_sub(self.memory_bytes);
            pool(MemoryPlace::Node, free_bytes, need_bytes)
        };
        let overhead_bytes = limits.overhead_bytes;
        let container = vec![node(sum(&|need| need.own_bytes(overhead_bytes)))];
        let mut pools = Vec::new();
        if host_pool && limits.host_pool_bytes > 0 {
            let free_bytes = limits.host_pool_bytes.saturating_sub(self.host_pool_bytes);
            let beside_bytes = sum(&|need| need.own_bytes_beside_host_pool(overhead_bytes));
            pools.push(pool(MemoryPlace::HostPool, free_bytes, pooled_bytes));
            pools.push(node(pooled_bytes + beside_bytes));
        }
        SurveyedMemory { container, host_pool: pools, allowances }
    }

    /// Adds content to the host memory.
    pub(super) fn take_memory(&mut self, now: Millis, place: ContentPlace, bytes: u64) {
        self.count(now);
        self.memory_bytes += bytes;
        if place == ContentPlace::HostPool {
            self.host_pool_bytes += bytes;
        }
        self.memory_peak_bytes = self.memory_peak_bytes.max(self.memory_bytes);
    }

    /// Removes content from the host memory.
    pub(super) fn free_memory(&mut self, now: Millis, place: ContentPlace, bytes: u64) {
        self.count(now);
        self.memory_bytes -= bytes;
        if place == ContentPlace::HostPool {
            self.host_pool_bytes -= bytes;
        }
    }

    /// Takes space on the disk. Returns false if too little is left.
    pub(super) fn take_disk(&mut self, bytes: u64) -> bool {
        let has_space = self.disk_bytes + bytes <= self.limits.disk_bytes;
        if has_space {
            self.disk_bytes += bytes;
            self.disk_peak_bytes = self.disk_peak_bytes.max(self.disk_bytes);
        }
        has_space
    }

    /// Frees space on the disk.
    pub(super) fn free_disk(&mut self, bytes: u64) {
        self.disk_bytes -= bytes;
    }

    fn count(&mut self, now: Millis) {
        let passed_ms = now.saturating_sub(self.counted_until);
        self.memory_byte_ms += u128::from(self.memory_bytes) * u128::from(passed_ms);
        self.counted_until = now;
    }

    /// Returns the mean and the maximum of the used memory, and the maximum of the used disk space,
    /// all in bytes. `end`: end of the run.
    pub(super) fn figures(mut self, end: Millis) -> HostFigures {
        self.count(end);
        HostFigures {
            memory_mean_bytes: (self.memory_byte_ms / u128::from(end.max(1))) as u64,
            memory_peak_bytes: self.memory_peak_bytes,
            disk_peak_bytes: self.disk_peak_bytes,
        }
    }
}

/// Host memory and disk that a simulation used.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct HostFigures {
    pub(super) memory_mean_bytes: u64,
    pub(super) memory_peak_bytes: u64,
    pub(super) disk_peak_bytes: u64,
}

#[cfg(test)]
mod tests;
