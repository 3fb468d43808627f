//! What a process has handed over to be copied out, while it is checkpointed.

use std::{os::fd::OwnedFd, rc::Rc, time::Instant};

use crate::{
    clock,
    sys::{CopyDirection, CopyStream, CudaDriver, CudaError, DeviceBlock, HostRegion},
};

/// The pieces that have come so far. Fields are dropped in this order: copies before what they
/// copy.
#[derive(Debug)]
pub struct CopyOutBatch {
    copies: CopyStream,
    blocks: Vec<DeviceBlock>,
    /// Where in the region the next one begins.
    offset: usize,
    since: Instant,
    /// When the last one came.
    last: Instant,
}

impl CopyOutBatch {
    /// None yet.
    ///
    /// # Errors
    /// [`CudaError`]
    pub fn begin(cuda: &Rc<CudaDriver>) -> Result<CopyOutBatch, CudaError> {
        let copies = CopyStream::begin(cuda)?;
        let since = clock::now();
        Ok(CopyOutBatch { copies, blocks: Vec::new(), offset: 0, since, last: since })
    }

    /// Begins to copy the next one into the region, which must have room for it.
    ///
    /// # Errors
    /// [`CudaError`]
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
        // Also where one has failed: others of it may have begun.
        self.blocks.push(block);
        self.offset += bytes as usize;
        self.last = clock::now();
        copied
    }

    /// How many have come.
    pub fn many(&self) -> usize {
        self.blocks.len()
    }

    /// When the first came.
    pub fn since(&self) -> Instant {
        self.since
    }

    /// When the last came.
    pub fn last(&self) -> Instant {
        self.last
    }

    /// Whether all that have come are in the region.
    ///
    /// # Errors
    /// [`CudaError`]: a copy has failed.
    pub fn is_over(&self) -> Result<bool, CudaError> {
        self.blocks.last().map_or(Ok(true), DeviceBlock::is_copied)
    }
}
