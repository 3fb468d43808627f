//! The controller of a node.
//!
//! | module | what it does |
//! | --- | --- |
//! | [`core`] | every decision, without I/O |
//! | [`agents`] | sockets of containers, connections of processes, their papers |
//! | [`inventory`] | what NVML, cgroups and /proc say |
//! | [`journal`] | what was written before a destructive step |
//! | [`daemon`] | the task that drives the core and carries out its effects; the control API |
//! | [`config`] | the configuration file |
//! | [`cli`] | the command `affinode` |
//!
//! The crate never touches the CUDA driver: each process moves itself, told by the
//! controller. It holds no state that it cannot rebuild from shims, agents and journal.

pub mod agents;
pub mod cli;
pub mod config;
pub mod core;
pub mod daemon;
pub mod inventory;
pub mod journal;
mod report;
mod sys;

pub use daemon::run;
