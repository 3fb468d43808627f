//! Computes the CDI devices and the environment variables by which a container can use the GPUs of
//! its seats.

use std::collections::{BTreeSet, HashMap};

use super::{
    messages::{CdiDevice, ContainerAllocateResponse},
    seats::{GpuFault, SeatList},
};
use crate::node::dra::cdi_lookup::{CdiLookup, LookupError};

/// Maximum number of unknown seats that an error names.
const NAMED: usize = 8;
/// Maximum length of each named seat, in characters.
const NAME_CHARS: usize = 64;
/// Environment variable and the value with which NVIDIA's container runtime adds no GPU to a
/// container. The value is needed because many images set the variable to request all GPUs. A CDI
/// specification that sets the variable replaces this value.
const VISIBLE_DEVICES: (&str, &str) = ("NVIDIA_VISIBLE_DEVICES", "void");

/// Reason why a container does not get its seats.
#[derive(Debug, thiserror::Error)]
pub enum AllocationError {
    /// The request names no seat.
    #[error("the kubelet's request names no device")]
    Empty,
    /// The request names seats that the node does not have.
    #[error(
        "this node does not have {count} of the requested devices, for example {names}; delete the \
         pod, so that its replacement gets other devices"
    )]
    Unknown {
        /// Identities of the unknown seats in the request, separated by commas. If there are more
        /// than `NAMED`, only the first `NAMED` are listed.
        names: String,
        /// Number of unknown seats in the request.
        count: usize,
    },
    /// The GPU of a seat cannot be used.
    #[error("GPU {uuid} cannot be used")]
    Unhealthy {
        /// UUID of the GPU.
        uuid: String,
        /// Reason why the seats of this GPU are not offered.
        #[source]
        fault: GpuFault,
    },
    /// The node has no CDI device for the GPU.
    #[error(transparent)]
    Lookup(#[from] LookupError),
}

/// Returns the CDI devices and the environment variables for a container that gets these seats.
/// Several seats of the same GPU result in one CDI device.
///
/// # Errors
/// [`AllocationError`]: a seat is unknown, or its GPU cannot be used.
pub fn allocate(
    seats: &SeatList,
    lookup: &CdiLookup,
    ids: &[String],
) -> Result<ContainerAllocateResponse, AllocationError> {
    if ids.is_empty() {
        return Err(AllocationError::Empty);
    }
    let unknown: Vec<&String> = ids.iter().filter(|id| seats.find(id).is_none()).collect();
    if !unknown.is_empty() {
        let named = unknown.iter().take(NAMED).map(|id| shown(id)).collect::<Vec<_>>();
        return Err(AllocationError::Unknown { names: named.join(", "), count: unknown.len() });
    }
    let gpus: BTreeSet<usize> = ids.iter().filter_map(|id| Some(seats.find(id)?.0)).collect();
    let mut cdi_devices = Vec::with_capacity(gpus.len());
    for gpu in gpus.into_iter().map(|at| &seats.gpus[at]) {
        if let Some(fault) = gpu.fault.clone() {
            return Err(AllocationError::Unhealthy { uuid: gpu.uuid.clone(), fault });
        }
        cdi_devices.push(CdiDevice { name: lookup.find(&gpu.names())? });
    }
    let (name, value) = VISIBLE_DEVICES;
    Ok(ContainerAllocateResponse {
        envs: HashMap::from([(name.into(), value.into())]),
        cdi_devices,
    })
}

fn shown(id: &str) -> String {
    let short: String = id.chars().take(NAME_CHARS).collect();
    format!("{short:?}")
}
