//! The simulated GPU's user-mode driver, a replacement of NVIDIA's `libcuda.so.1`.
//!
//! # What is simulated
//!
//! - Memory: VRAM with a fixed capacity that all processes of the node share, real addresses, real
//!   contents. The application can access it only by copies and kernels.
//! - Streams, events, the legacy and the per-thread default stream. A thread per stream executes
//!   the work, which takes time. A few kernels run, found by their names in any module image; see
//!   [`kernels`].
//! - VMM (reserve, create, map, export by descriptor, import), memory pools, legacy IPC, managed
//!   memory (in host memory), peer access, pinned memory.
//! - The checkpoint calls with their states and failures; see [`gate`].
//! - `cuGetProcAddress` of both signatures, per-thread default stream variants (`_ptds`, `_ptsz`).
//! - The driver's private tables for the runtime and for tools; see [`tables`].
//! - A faulty bus: the asynchronous copies of 1 MiB and more to the device are counted from 1. The
//!   copy with the number in `AFFINODE_SIM_SPOIL_COPY` writes wrong contents, without an error.
//! - A slow bus: the asynchronous copies of 1 MiB and more to the host are counted from 1. With
//!   `AFFINODE_SIM_HOLD_COPY=<number>:<path>`, the copy with this number waits until the file exists.
//! - A process with `AFFINODE_SIM_NO_CHECKPOINT` in its environment is aborted when it calls a
//!   checkpoint function that locks, checkpoints, restores or unlocks a process.
//!
//! # What is not simulated
//!
//! Other kernels, graphs (only the capture of a stream is simulated), textures, arrays, 2D and 3D
//! copies, export of memory pools, MPS, MIG, ECC, clocks, speeds. Most private tables of the
//! CUDA runtime library are missing too, so this library does not run on the simulated GPU. The
//! simulation assumes that a process is lost if it is checkpointed with memory opened by legacy
//! IPC, like a process with imported VMM memory.
//!
//! # Structure
//!
//! ```text
//!  application ──> api ──> gate ──> contexts, memory, streams ──> client ──> affinode-sim-gpud
//!                                        ^                                          │
//!                                        └─────────── checkpoint thread <───────────┘
//! ```
//!
//! | module | content |
//! | --- | --- |
//! | [`api`] | the exported functions, each with its class, in one list per subject |
//! | [`gate`] | behaviour of a call while the process is locked or checkpointed |
//! | [`hidden`] | a function that no hook finds |
//! | [`driver`] | the one instance per process, `cuInit`, fork |
//! | [`contexts`], [`memory`], [`host`], [`streams`], [`modules`] | state of the application's objects |
//! | [`pages`], [`chunks`], [`kernels`] | mappings, and the work done on them |
//! | [`client`], [`checkpoint_thread`] | requests to the daemon, and orders from it |

#![allow(
    unsafe_code,
    reason = "a C interface over memory mappings; each block says why it is sound"
)]
#![allow(non_snake_case, reason = "the exported names are NVIDIA's")]

mod abi;
mod api;
mod checkpoint_thread;
mod chunks;
mod client;
mod contexts;
mod digest;
mod driver;
mod gate;
mod hidden;
mod host;
mod kernels;
mod memory;
mod modules;
mod pages;
mod pools;
mod stats;
mod streams;
mod tables;
