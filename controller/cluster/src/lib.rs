//! What Affinode runs in a Kubernetes cluster, beside the controllers of its nodes.
//!
//! | module | what it does |
//! | --- | --- |
//! | [`node`] | looks after a GPU node: installs it, shows its controller, tells its pods |
//! | [`fleet`] | shows all nodes on one page, and the way to each |
//! | [`https`] | the door of all three |
//! | [`webhook`] | gives GPU pods the runtime class while they are created |
//! | [`cli`] | the command `affinode-cluster` |
//!
//! It is a crate of its own, so that no program on the path of a container carries a Kubernetes
//! client. Nothing here is needed for a container to run or to come home: a cluster in which all
//! of it is gone creates pods without the runtime class, and those that have it go on.

pub mod cli;
mod error_chain;
pub mod fleet;
pub mod https;
pub mod node;
mod service;
pub mod webhook;

pub use cli::main;
