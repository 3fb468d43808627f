//! The controller of a node.
//!
//! | module | content |
//! | --- | --- |
//! | [`agents`] | sockets of containers, connections and identities of processes |
//! | [`inventory`] | readings of NVML, cgroups and /proc |
//! | [`copier`] | the processes that copy memory for other processes, and their sockets |
//! | [`host_pool`] | the process that allocates host memory for copies out |
//! | [`driver_library`] | where the driver's libraries are |
//! | [`journal`], [`overrides`] | records written before a destructive step, operator overrides |
//! | [`daemon`] | the task that drives the core and executes its effects; the control API |
//! | [`handle`] | commands to the actor, and its events |
//! | [`observe`] | the task that observes the node for the dashboard, metrics and history |
//! | [`metrics`], [`history`] | Prometheus metrics, the history on disk |
//! | [`http`] | dashboard, HTTP API, `/metrics` |
//! | [`call_trace`] | the CUDA calls of processes, live |
//! | [`conversion`] | conversions between the core's types and the control API's types |
//! | [`config`] | the configuration file |
//!
//! Every decision is made in the crate `affinode_core`, without I/O.
//!
//! The crate never calls the CUDA driver: each process moves its own memory on orders of the
//! controller, and copiers are separate processes. The controller holds no state that it cannot
//! rebuild from shims, agents and journal.

// A function that fits on one screen can be read at once.
#![cfg_attr(not(test), deny(clippy::too_many_lines))]

pub mod agents;
pub mod call_trace;
pub mod clock;
pub mod config;
pub mod conversion;
pub mod copier;
pub mod daemon;
pub mod driver_library;
pub mod error_chain;
pub mod handle;
pub mod history;
pub mod host_pool;
pub mod http;
pub mod inventory;
mod isolated_runtime;
pub mod jobs;
pub mod journal;
pub mod metrics;
pub mod observe;
pub mod overrides;
pub mod schema;
pub mod socket_activation;
mod sys;

pub use config::{oci_runtime_of, start_settings_of};
pub use daemon::run;
