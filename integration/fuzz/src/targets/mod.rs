//! The targets, by whose bytes they read.

pub mod agent;
pub mod files;
pub mod image;
pub mod node;
pub mod shim;
