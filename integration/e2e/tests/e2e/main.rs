//! The end-to-end suite: real containerd, real runc, the built shim, controller
//! and preload library, a simulated GPU. Each test has a testbed of its own.
//!
//! `cargo xtask test --e2e` builds these programs first.

mod call_trace;
mod chaos;
mod checksum;
mod controller_unit;
mod copier;
mod dedup;
mod docker;
mod docker_install;
mod doctor;
mod driver_root;
mod engines;
mod faults;
mod gpu_migration;
mod gpu_pods;
mod hazards;
mod hints;
mod host_memory;
mod hostile;
mod in_part;
mod install;
mod installed_folders;
mod interception;
mod ipc;
mod jobs;
mod libc;
mod lifecycle;
mod loader_lock;
mod local_memory;
mod matrix;
mod nvidia_toolkit;
mod nvml;
mod offload;
mod on_oom;
mod podman;
mod podman_install;
mod pods;
mod policy;
mod prefault;
mod preload_chain;
mod pressure;
mod prewake;
mod rancher;
mod recovery;
mod restore_policy;
mod retain_host_copy;
mod scrub;
mod spec;
mod state_file;
mod systemd_unit;
mod tools;
mod user_namespaces;
mod view_group;
mod zeros;
