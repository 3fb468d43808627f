//! The end-to-end suite: real containerd, real runc, the built shim, controller
//! and preload library, a simulated GPU. Each test has a world of its own.
//!
//! `cargo xtask test --e2e` builds all of it first.

mod cri;
mod gpu_pods;
mod hazards;
mod hostile;
mod libc;
mod lifecycle;
mod matrix;
mod offload;
mod pods;
mod policy;
mod pressure;
mod recovery;
mod spec;
mod ways;
