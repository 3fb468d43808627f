//! A driver for Dynamic Resource Allocation (DRA), `resource.k8s.io/v1`. It hands each GPU out to
//! several claims, in shares of an oversubscribed capacity of memory. The capacity is accounted by
//! the scheduler. Nothing enforces it in a container.

pub mod allocation;
pub mod capacity;
pub mod cdi;
pub mod cdi_lookup;
pub mod claim_files;
pub mod messages;
pub mod policy;
pub mod slice;

/// Name of the driver. Devices, attributes and configurations refer to it.
pub const DRIVER: &str = "gpu.affinode.io";
