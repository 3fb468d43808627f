//! Contains all unsafe code of this crate: calls of driver functions and mappings of files.
#![allow(unsafe_code)]

mod cuda;
#[cfg(any(test, feature = "testing"))]
pub mod fake;
mod region;
mod segment;

pub use cuda::{CopyStream, CudaDriver, CudaError, DeviceBlock};
pub use region::{CHUNK_BYTES, CopyDirection, HostRegion, RegionError};
pub use segment::{SegmentDraft, SharedSegment};

use std::{io, os::fd::AsFd};

/// Fills the buffer `to` with the content of a file, beginning at `offset`.
fn read_exact_at(file: impl AsFd, offset: usize, to: &mut [u8]) -> io::Result<()> {
    let (mut done, all) = (0, to.len());
    while done < all {
        let left = to.get_mut(done..).unwrap_or_default();
        match rustix::io::pread(&file, left, (offset + done) as u64)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            bytes => done += bytes,
        }
    }
    Ok(())
}
