//! The controller of a node.
//!
//! | module | what it does |
//! | --- | --- |
//! | [`core`] | every decision, without I/O |
//! | [`agents`] | sockets of containers, connections of processes, their papers |
//! | [`inventory`] | what NVML, cgroups and /proc say |
//! | [`copier`] | the processes that fill the memory of who comes home |
//! | [`journal`], [`overrides`] | what was written before a destructive step, what operators chose |
//! | [`daemon`] | the task that drives the core and carries out its effects; the control API |
//! | [`observe`] | the task that watches the node for people: changes, metrics, history |
//! | [`metrics`], [`history`] | what is counted, what stays on disk |
//! | [`http`] | dashboard, HTTP API, `/metrics` |
//! | [`call_trace`] | the calls of processes, while somebody watches |
//! | [`config`] | the configuration file |
//! | [`doctor`] | whether the machine is ready |
//! | [`cli`] | the command `affinode` |
//!
//! The crate never touches the CUDA driver: each process moves itself, told by the
//! controller, and copiers are processes of their own. It holds no state that it cannot rebuild from shims, agents and journal.

pub mod agents;
pub mod call_trace;
pub mod cli;
mod clock;
pub mod config;
pub mod copier;
pub mod core;
pub mod daemon;
pub mod doctor;
pub mod error_chain;
pub mod history;
pub mod http;
mod install;
pub mod inventory;
mod isolated_runtime;
pub mod jobs;
pub mod journal;
pub mod metrics;
pub mod observe;
pub mod overrides;
pub mod reference;
pub mod schema;
pub mod simulate;
pub mod socket_activation;
mod sys;

pub use config::engine_of;
pub use daemon::run;
