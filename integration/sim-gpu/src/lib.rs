//! The simulated GPU: what tests and the demo use where no NVIDIA driver is found. Always named as simulated.
//!
//! | package | product | plays |
//! | --- | --- | --- |
//! | `daemon/` | `affinode-sim-gpud` | the kernel driver: VRAM, processes, checkpoints |
//! | `cuda/` | `libaffinode_sim_cuda.so`, to be installed as `libcuda.so.1` | the user-mode driver |
//! | `nvml/` | `libaffinode_sim_nvml.so`, to be installed as `libnvidia-ml.so.1` | NVML |
//! | `protocol/` | - | the messages between them |
//!
//! What is simulated and what is not stands in the header of each. A container needs the two
//! libraries, libc.so.6, and the daemon's socket (`AFFINODE_SIM_SOCKET`, else `/run/affinode-sim/gpu.sock`).
//!
//! # Faithfulness
//!
//! `integration/clients/api_check` states what the driver does call by call; it passes on this
//! simulator (`tests/clients.rs`) and on an H200 with driver 580.159.04. What goes wrong with checkpoints
//! is stated by `tests/hazards.rs`, each as it was measured on that machine.
