//! The simulated GPU, for tests and the demo on machines without an NVIDIA driver. The name of the
//! GPU always states that it is simulated.
//!
//! | package | output | content |
//! | --- | --- | --- |
//! | `daemon/` | `affinode-sim-gpud` | the kernel driver: VRAM, processes, checkpoints |
//! | `cuda/` | `libaffinode_sim_cuda.so`, to be installed as `libcuda.so.1` | the user-mode driver |
//! | `nvml/` | `libaffinode_sim_nvml.so`, to be installed as `libnvidia-ml.so.1` | NVML |
//! | `protocol/` | - | the messages between them |
//!
//! The header of each package lists what is simulated and what is not. A container needs the two
//! libraries, libc.so.6, and the daemon's socket (`AFFINODE_SIM_SOCKET`, by default
//! `/run/affinode-sim/gpu.sock`).
//!
//! # Faithfulness
//!
//! `integration/clients/api_check` checks the driver's behaviour call by call. It passes on this
//! simulator (`tests/clients.rs`) and on an H200 with driver 580.159.04. `tests/hazards.rs` checks
//! the failures of checkpoints, as measured on that machine.
