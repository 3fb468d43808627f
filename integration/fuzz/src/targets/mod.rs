//! The fuzz targets, grouped by the source of their input.

pub mod agent;
pub mod files;
pub mod image;
pub mod node;
pub mod shim;
