//! The one place of this crate with unsafe code: the driver's functions, and mappings of files.
#![allow(unsafe_code)]

mod cuda;
mod region;

pub use cuda::{Block, Copies, Cuda, CudaError};
pub use region::{Region, RegionError, Way};
