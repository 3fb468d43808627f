//! Library for tests that run containers in private testbeds. A testbed is a containerd, a GPU and
//! a controller of its own, in one folder. The end-to-end tests, the demo, the benchmark and the
//! kit for GPU machines use it.
//!
//! | module | content |
//! | --- | --- |
//! | [`testbed`] | one containerd, one GPU and one controller in one folder; everything is removed at the end |
//! | [`supervisor`] | the process that owns all processes of a testbed |
//! | [`containerd`], [`release`] | a private containerd, and the releases to test with |
//! | [`gpu`] | the simulated GPU, or the machine's own |
//! | [`image`] | images made from the machine's own files |
//! | [`container`], [`worker`] | containers, and the CUDA program that tests send commands to |
//! | [`cri`] | pods, as a kubelet runs them |
//! | [`podman`], [`crio`] | container engines without shims |
//! | [`docker`], [`nvidia_hook`] | a dockerd, and a script that replaces NVIDIA's hook |
//! | [`installed`] | an installation in a testbed, made with `affinode install` |
//! | [`faults`], [`snapshot`] | faults during an installation, and a byte-for-byte comparison of a node's files |
//! | [`cli`] | the `affinode` command |
//! | [`language`] | counts of words that the project avoids, and their limits |
//! | [`chaos`] | random kills at random steps, and the invariants after each round |
//! | [`hazards`] | one small program per hazard, without Affinode and with it |
//! | [`suite`] | tests whose result only a real GPU can show |

#![forbid(unsafe_code)]

pub mod artifacts;
pub mod attack;
pub mod chaos;
pub mod cli;
pub mod container;
pub mod containerd;
pub mod cpu_cgroup;
pub mod cri;
pub mod crio;
pub mod docker;
pub mod engine;
pub mod faults;
pub mod gpu;
pub mod hazards;
pub mod image;
pub mod installed;
pub mod language;
pub mod liar;
mod logs;
pub mod memory_cgroup;
pub mod nvidia_hook;
pub mod oom;
pub mod own_cgroup;
pub mod podman;
pub mod processes;
pub mod rancher;
pub mod release;
pub mod shared_libs;
pub mod snapshot;
pub mod suite;
pub mod supervisor;
pub mod testbed;
pub mod unit;
pub mod wait;
pub mod worker;
