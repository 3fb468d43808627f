//! `libaffinode_preload.so`: the part of Affinode inside each CUDA process of a
//! container. It counts the calls into the driver, holds them while the process's GPU
//! state is away, and carries out the controller's orders on its own process.
//!
//! ```text
//! application ──dlsym, cuGetProcAddress──> lookup ──┐ (returns a stub)
//!             ──linked name──────────────> exports ─┤
//!                                                   v
//!                                     stub ──> thunk ──> libcuda
//!                                                │ not registered, gate closed, special call
//!                                                v
//!                                process <──── gate ────> page <──── agent ──> controller
//! ```
//!
//! | module | what |
//! | --- | --- |
//! | `exports`, `lookup`, `table` | how a call comes here, and where it goes |
//! | `thunk`, `gate` | what happens to it on the way |
//! | `cost` | what that adds to a call |
//! | `exit` | what is released while the process is away and ends |
//! | `process`, `page`, `hazard` | registration; the counters; what is unsafe |
//! | `tools` | profilers, debuggers, video: ways to the driver past its public functions |
//! | `constants` | answers that do not change, for calls that come while the process is away |
//! | `room` | allocations that wait for memory instead of failing |
//! | `carry` | device memory that the agent moves by itself |
//! | `nvml` | calls into NVML, which would block while the context is checkpointed |
//! | `agent` | the thread that talks to the controller and to the checkpoint interface |
//! | `sys`, `libc`, `elf`, `libcuda`, `start` | the edge: kernel, libc, loader, driver |
//!
//! The library is loaded into every process of a container, so it must be able to do
//! nothing at all: it has no dependency, no constructor, no strong undefined symbol, and
//! never prints, panics, exits or aborts. Where anything is missing, calls pass.
//!
//! The crate is an ordinary library for checks and unit tests. The product is built with
//! `cargo rustc -p affinode-preload --profile preload --lib --crate-type cdylib`.

#![cfg_attr(not(test), no_std)]
// The code between an application and its driver: unsafe is its trade.
#![allow(unsafe_code)]
// Without its exports, nothing calls the rest.
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

#[cfg(all(not(test), panic = "abort"))]
mod exports;
#[cfg(all(not(test), panic = "abort"))]
mod rt;
