//! Tests of the core with simulated agents and GPUs: chosen cases, and random sequences of steps.

mod capabilities;
mod connections;
mod copied_out;
mod copiers;
mod domain;
mod exits;
mod figures;
mod hidden;
mod holds;
mod host_memory;
mod host_pool;
mod immediate;
mod in_part;
mod migration;
mod nvml;
mod offload_level;
mod orders;
mod prefault;
mod random;
mod returns;
mod room;
mod thrash;
mod tools;
mod vram_limit;
mod witness;
mod world;
