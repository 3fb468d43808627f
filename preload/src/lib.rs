//! `libaffinode_preload.so`: the part of Affinode inside each CUDA process of a container. It
//! counts the calls into the driver, holds them while the process is offloaded, and executes the
//! controller's orders on its own process.
//!
//! ```text
//! application ──dlsym, cuGetProcAddress──> lookup ──┐ (returns a stub)
//!             ──linked name──────────────> exports ─┤
//!                                                   v
//!                                     stub ──> thunk ──> libcuda
//!                                                │ not registered, gate closed, special call
//!                                                v
//!                                process <──── gate ────> counters <──── agent ──> controller
//! ```
//!
//! | module | content |
//! | --- | --- |
//! | `exports`, `lookup`, `hook_table` | how a call reaches this library, and its target in the driver |
//! | `thunk`, `gate` | the fast path and the slow path of a call |
//! | `overhead`, `call_recorder` | what the hook adds to a call; recorded calls |
//! | `exit` | releases that exit handlers make while the process is offloaded |
//! | `process`, `counters`, `hazard` | registration; shared counters; detection of hazards |
//! | `fds`, `child` | descriptors of this library; programs that it runs |
//! | `tools` | detection of profilers, debuggers and video libraries |
//! | `constants` | cached results that do not change, for calls during an offload |
//! | `oom_wait` | allocations that wait for memory instead of failing |
//! | `vram_limit` | the limit of the container's VRAM |
//! | `swap` | device memory that the agent copies by itself |
//! | `nvml` | calls into NVML, which would block while the context is checkpointed |
//! | `agent` | the thread that serves the controller and calls the checkpoint interface |
//! | `sys`, `libc`, `elf`, `libcuda`, `rt` | interfaces to kernel, libc, loader and driver |
//!
//! The library is loaded into every process of a container, so it must be harmless in processes that
//! do not need it. It has no dependency, no constructor and no strong undefined symbol. It never
//! prints, panics, exits or aborts. If anything that it needs is missing, calls pass.
//!
//! The crate is an ordinary library for checks and unit tests. The product is built with
//! `cargo rustc -p affinode-preload --profile preload --lib --crate-type cdylib`.

#![cfg_attr(not(test), no_std)]
// This library is between an application and its driver, so it needs unsafe code.
#![allow(unsafe_code)]
// In builds without the exports, no code calls the rest of the library.
#![cfg_attr(any(test, not(panic = "abort")), allow(dead_code))]

mod agent;
mod call_recorder;
mod child;
mod constants;
mod counters;
mod elf;
mod exit;
mod fds;
mod gate;
mod hazard;
mod hook_table;
mod libc;
mod libcuda;
mod lookup;
mod nvml;
mod oom_wait;
mod overhead;
mod process;
mod swap;
mod sys;
mod thunk;
mod tools;
mod vram_limit;

#[cfg(all(not(test), panic = "abort"))]
mod exports;
#[cfg(all(not(test), panic = "abort"))]
mod rt;
