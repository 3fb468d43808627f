//! The targets, grouped by the source of their bytes.

pub mod agent;
pub mod files;
pub mod image;
pub mod node;
pub mod shim;
