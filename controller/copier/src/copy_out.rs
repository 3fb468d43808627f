//! Copies out the pieces of GPU memory that a process has exported to the copier for its
//! checkpoint.

use std::{os::fd::OwnedFd, rc::Rc, time::Instant};

use crate::{
    clock,
    sys::{CopyDirection, CopyStream, CudaDriver, CudaError, DeviceBlock, HostRegion},
};

/// Pieces of GPU memory that a process has exported to the copier so far, and the copies of these
/// pieces. Fields are dropped in the order of their declaration, so that copies end before the
/// memory that they use is freed.
#[derive(Debug)]
pub struct CopyOutBatch {
    copies: CopyStream,
    blocks: Vec<DeviceBlock>,
    /// Offset in the process's memory file at which the next piece is written.
    offset: usize,
    since: Instant,
    /// Time at which the most recently received piece arrived.
    last: Instant,
}

impl CopyOutBatch {
    /// Creates a batch that has no pieces yet.
    ///
    /// # Errors
    /// [`CudaError`]: the driver cannot create a stream.
    pub fn begin(cuda: &Rc<CudaDriver>) -> Result<CopyOutBatch, CudaError> {
        let copies = CopyStream::begin(cuda)?;
        let since = clock::now();
        Ok(CopyOutBatch { copies, blocks: Vec::new(), offset: 0, since, last: since })
    }

    /// Starts to copy the next piece into `region`, the process's memory file. The file must have
    /// space for the piece. `shared`: the descriptor with which the process exported the piece.
    ///
    /// # Errors
    /// [`CudaError`]: the driver refused to import or copy the piece.
    pub fn take(
        &mut self,
        cuda: &Rc<CudaDriver>,
        region: &HostRegion,
        shared: &OwnedFd,
        bytes: u64,
    ) -> Result<(), CudaError> {
        let block = DeviceBlock::import(cuda, shared, bytes)?;
        let copied =
            region.copy(CopyDirection::Out, self.offset, &block, bytes as usize, &mut self.copies);
        // Keep the block even if this copy failed: other copies of the piece may still run and need
        // the block's memory.
        self.blocks.push(block);
        self.offset += bytes as usize;
        self.last = clock::now();
        copied
    }

    /// Returns the number of pieces that have arrived.
    pub fn many(&self) -> usize {
        self.blocks.len()
    }

    /// Returns the time at which the first piece arrived.
    pub fn since(&self) -> Instant {
        self.since
    }

    /// Returns the time at which the most recently received piece arrived.
    pub fn last(&self) -> Instant {
        self.last
    }

    /// Returns whether every piece received so far is copied into the process's memory file.
    ///
    /// # Errors
    /// [`CudaError`]: a copy has failed.
    pub fn is_over(&self) -> Result<bool, CudaError> {
        self.blocks.last().map_or(Ok(true), DeviceBlock::is_copied)
    }
}
