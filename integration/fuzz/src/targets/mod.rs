//! The targets, by whose bytes they read.

pub mod agent;
pub mod files;
pub mod node;
pub mod shim;
