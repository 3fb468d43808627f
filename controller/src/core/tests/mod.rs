//! The core against a world of agents and one device: cases that were thought of, and random
//! ones.

mod agent;
mod connections;
mod depth;
mod domain;
mod elsewhere;
mod exits;
mod figures;
mod hidden;
mod holds;
mod host_memory;
mod immediate;
mod nvml;
mod orders;
mod parked;
mod prepare;
mod random;
mod returns;
mod room;
mod thrash;
mod tools;
mod witness;
mod world;
