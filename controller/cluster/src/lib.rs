//! The programs that Affinode runs in a Kubernetes cluster, in addition to the controllers of its
//! nodes.
//!
//! | module | what it does |
//! | --- | --- |
//! | [`node`] | manages a GPU node: installs Affinode, serves its controller's API, reports to its pods |
//! | [`https`] | the HTTPS server of the node agent and the webhook |
//! | [`kubectl`] | the plugin `kubectl affinode` |
//! | [`webhook`] | sets the runtime class of GPU pods while they are created |
//! | [`check`] | checks from a GPU pod whether its container is managed |
//! | [`cli`] | the command `affinode-cluster` |
//!
//! These programs have a crate of their own, so that the shim and the controller do not include a
//! Kubernetes client. Containers run and are restored without the programs of this crate. If these
//! programs are missing, a cluster creates pods without the runtime class, and pods with the class
//! continue to run.

// A function that fits on one screen can be read at once.
#![cfg_attr(not(test), deny(clippy::too_many_lines))]

mod api_client;
pub mod check;
pub mod cli;
mod error_chain;
pub mod https;
pub mod kubectl;
pub mod node;
mod service;
pub mod webhook;

pub use cli::main;
