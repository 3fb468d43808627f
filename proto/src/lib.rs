//! Defines the data that crosses a process boundary in Affinode.
//!
//! | module | between | form |
//! | --- | --- | --- |
//! | [`wire::counters`] | preload library → controller | fixed layout in a shared memfd, read with `pread` |
//! | [`wire::message`] | agent ↔ controller | 128-byte frames on a Unix stream socket |
//! | [`api`] (feature `api`) | shim, CLI, dashboard → controller | ttrpc, generated from `control.proto` |
//! | [`installation`] (feature `api`) | installer → shim, CLI, controller | lines in a file below the prefix |
//! | [`annotations`] | shim, controller, node agent | names of a container's annotations |
//! | [`paths`] | all | paths of sockets, locks and files, on the host and in a container |
//! | [`state`], [`reason`], [`event`] | all | states of a container, their reasons and kinds of events, the same words in every output |
//!
//! Without the feature `api` the crate is `no_std`, allocates nothing and has no dependency, so
//! that the preload library can use it inside any process.

#![cfg_attr(not(any(feature = "api", test)), no_std)]
#![forbid(unsafe_code)]
// A function that fits on one screen can be read at once.
#![cfg_attr(not(test), deny(clippy::too_many_lines))]

pub mod annotations;
#[cfg(feature = "api")]
pub mod api;
pub mod event;
#[cfg(feature = "api")]
pub mod installation;
pub mod paths;
pub mod reason;
#[cfg(feature = "api")]
mod reason_help;
pub mod state;
pub mod wire;

#[cfg(feature = "api")]
pub use reason_help::ReasonHelp;
