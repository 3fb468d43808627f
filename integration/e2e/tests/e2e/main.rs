//! The end-to-end suite: real containerd, real runc, the built shim, controller
//! and preload library, a simulated GPU. Each test has a world of its own.
//!
//! `cargo xtask test --e2e` builds all of it first.

mod beside;
mod calls;
mod chaos;
mod checksum;
mod dedup;
mod doctor;
mod engines;
mod faults;
mod gpu_pods;
mod hazards;
mod hints;
mod host_memory;
mod hostile;
mod install;
mod ipc;
mod jobs;
mod keep_copy;
mod libc;
mod lifecycle;
mod matrix;
mod nvml;
mod offload;
mod on_oom;
mod other_gpu;
mod pods;
mod policy;
mod prepare;
mod pressure;
mod prewake;
mod rancher;
mod recovery;
mod released;
mod restore_policy;
mod spec;
mod tools;
mod unit;
mod user_namespaces;
mod vault;
mod ways;
mod zeros;
