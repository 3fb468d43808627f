//! The seats of a node's GPUs. A seat is the right of a container to use a GPU and to fill its
//! memory. A GPU has several seats, which the kubelet hands out as devices.

use std::collections::BTreeSet;

use affinode_controller::inventory::gpu_facts::{GpuFacts, NodeGpus};

use super::messages::{Device, ListAndWatchResponse};
use crate::node::dra::{
    capacity::{self, OversubscriptionFactor},
    cdi_lookup::{GpuNames, LookupError},
    slice::device_name,
};

/// Maximum number of GPUs that are offered.
const MAX_GPUS: usize = 128;
/// Maximum length of a GPU's UUID, in characters. It keeps the identity of a seat, which contains
/// the UUID, below the kubelet's limit of 63 characters.
const MAX_UUID: usize = 58;
/// Separator in the identity of a seat. It is between the UUID of the GPU and the number of the
/// seat.
const SEPARATOR: &str = "::";
const HEALTHY: &str = "Healthy";
const UNHEALTHY: &str = "Unhealthy";

/// Reason why the seats of a GPU are not offered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GpuFault {
    /// The node does not serve the runtime, so containers would run without Affinode. Or an operator
    /// left the GPUs to another program.
    #[error(
        "containerd on the node does not serve Affinode's runtime, Affinode is being removed from the node, or the node has the label affinode.io/offer-gpus=false, so no seat is offered"
    )]
    NotServed,
    /// The driver no longer reports the GPU, or the GPU is in MIG mode.
    #[error("NVML does not see the GPU any more, or it is in MIG mode; run nvidia-smi on the node")]
    Gone,
    /// The GPU has no CDI device, so a container would get neither device nodes nor libraries. The
    /// text is the error message of the search for the device.
    #[error("{0}")]
    NoCdiDevice(String),
}

/// A GPU with its seats.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeatedGpu {
    /// UUID of the GPU.
    pub uuid: String,
    /// NVML's index of the GPU.
    pub index: u32,
    /// Number of seats of this GPU.
    pub seats: u32,
    /// Reason why the seats are not offered. `None`: they are offered.
    pub fault: Option<GpuFault>,
    /// Numbers of the seats that stay offered although the GPU is full, or may be full, of VRAM that no
    /// offload can free: the seats that pods have. `None`: the GPU is not full, so all seats are
    /// offered.
    pub kept_seats: Option<BTreeSet<u32>>,
}

impl SeatedGpu {
    /// Returns the names by which this GPU is searched for in CDI specifications.
    #[must_use]
    pub fn names(&self) -> GpuNames {
        GpuNames { device: device_name(&self.uuid), index: Some(self.index) }
    }

    /// Returns the identity of the seat with this number: the GPU's UUID, a separator and the
    /// number.
    #[must_use]
    pub fn seat_id(&self, number: u32) -> String {
        format!("{}{SEPARATOR}{number}", self.uuid)
    }

    /// Returns whether the kubelet may give the seat with this number to a pod, or lets the pod
    /// that has the seat keep it.
    fn is_healthy(&self, number: u32) -> bool {
        self.fault.is_none() && self.kept_seats.as_ref().is_none_or(|kept| kept.contains(&number))
    }
}

/// The GPUs of the node with their seats, in order of their index.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SeatList {
    /// The GPUs of the node with their seats.
    pub gpus: Vec<SeatedGpu>,
}

impl SeatList {
    /// Finds a seat by its identity. Returns the position of the seat's GPU in the list, and the
    /// number of the seat. `None`: no GPU has this seat.
    #[must_use]
    pub fn find(&self, id: &str) -> Option<(usize, u32)> {
        let (uuid, number) = id.split_once(SEPARATOR)?;
        let at = self.gpus.iter().position(|gpu| gpu.uuid == uuid)?;
        let number = number.parse().ok().filter(|number| *number < self.gpus[at].seats)?;
        // A number has other forms, such as 01, which are no identities.
        (self.gpus[at].seat_id(number) == id).then_some((at, number))
    }

    /// Withdraws the free seats of the GPUs that are full, or may be full. `is_full` gets the UUID of a
    /// GPU. `taken` contains the identities of the seats that pods have.
    pub fn close(&mut self, is_full: impl Fn(&str) -> bool, taken: &BTreeSet<String>) {
        let seats = taken.iter().filter_map(|id| self.find(id)).collect::<Vec<_>>();
        for (at, gpu) in self.gpus.iter_mut().enumerate().filter(|(_, gpu)| is_full(&gpu.uuid)) {
            let own = seats.iter().filter(|(of, _)| *of == at).map(|(_, number)| *number);
            gpu.kept_seats = Some(own.collect());
        }
    }

    /// Returns the message that lists all seats and their health for the kubelet.
    #[must_use]
    pub fn devices(&self) -> ListAndWatchResponse {
        let seats = self.gpus.iter().flat_map(|gpu| {
            (0..gpu.seats).map(|number| {
                let health = if gpu.is_healthy(number) { HEALTHY } else { UNHEALTHY };
                Device { id: gpu.seat_id(number), health: health.into() }
            })
        });
        ListAndWatchResponse { devices: seats.collect() }
    }
}

/// The GPUs that the node has or had, collected from all readings of the driver.
#[derive(Clone, Debug, Default)]
pub struct KnownGpus {
    /// The GPUs of all readings so far. A GPU that is missing in the latest reading keeps its
    /// seats, so that the other GPUs also keep their numbers of seats.
    all: NodeGpus,
    /// UUIDs of the GPUs in the latest reading.
    seen: Vec<String>,
}

impl KnownGpus {
    /// Adds a reading of the node's GPUs. GPUs in MIG mode are ignored, because Affinode does not
    /// move containers on MIG instances.
    pub fn add(&mut self, reading: NodeGpus) {
        let whole = reading.gpus.into_iter().filter(|gpu| !gpu.mig && is_identity(&gpu.uuid));
        let mut gpus: Vec<GpuFacts> = whole.take(MAX_GPUS).collect();
        self.seen = gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
        let earlier = std::mem::take(&mut self.all.gpus).into_iter();
        let lost: Vec<GpuFacts> =
            earlier.filter(|gpu| !self.seen.contains(&gpu.uuid)).take(MAX_GPUS).collect();
        // The GPUs that were seen earlier keep their share of the host memory anyway.
        let unreadable = reading.unreadable.into_iter().skip(lost.len()).collect();
        gpus.extend(lost);
        gpus.truncate(MAX_GPUS);
        gpus.sort_by(|a, b| (a.index, &a.uuid).cmp(&(b.index, &b.uuid)));
        self.all = NodeGpus { gpus, unreadable, ..reading };
    }

    /// Records that the driver reports no GPU.
    pub fn lose_all(&mut self) {
        self.seen.clear();
    }

    /// Returns all known GPUs with their seats. `served` states whether the node serves the
    /// runtime. `look_up` returns the CDI device of a GPU.
    pub fn seats(
        &self,
        factor: OversubscriptionFactor,
        served: bool,
        look_up: impl Fn(&GpuNames) -> Result<String, LookupError>,
    ) -> SeatList {
        let gpus = self.all.gpus.iter().map(|gpu| {
            let seats = capacity::seats(&self.all, gpu.vram_bytes, factor);
            let (uuid, index) = (gpu.uuid.clone(), gpu.index);
            let mut gpu = SeatedGpu { uuid, index, seats, fault: None, kept_seats: None };
            gpu.fault = match served {
                false => Some(GpuFault::NotServed),
                true if !self.seen.contains(&gpu.uuid) => Some(GpuFault::Gone),
                true => look_up(&gpu.names()).err().map(|e| GpuFault::NoCdiDevice(e.to_string())),
            };
            gpu
        });
        SeatList { gpus: gpus.collect() }
    }
}

fn is_identity(uuid: &str) -> bool {
    (1..=MAX_UUID).contains(&uuid.len())
        && uuid.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
}

#[cfg(test)]
mod tests;
