//! Host memory that the driver has recorded: pinned, registered and managed memory.

use std::collections::BTreeMap;

use crate::abi::{
    HOST_MEMORY_ALREADY_REGISTERED, HOST_MEMORY_NOT_REGISTERED, HostAddress, INVALID_VALUE, Outcome,
};
use crate::pages::Pages;

/// Call by which a block of host memory became known to the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostKind {
    /// Memory that `cuMemHostAlloc` has allocated.
    Pinned,
    /// Memory that `cuMemHostRegister` has registered.
    Registered,
    /// Memory that `cuMemAllocManaged` has allocated.
    Managed,
}

#[derive(Debug)]
struct HostBlock {
    bytes: usize,
    kind: HostKind,
    _pages: Option<Pages>,
}

/// Blocks of host memory that are known to the driver, by address.
#[derive(Debug, Default)]
pub struct HostMemory {
    blocks: BTreeMap<HostAddress, HostBlock>,
}

impl HostMemory {
    /// Adds a block of host memory. `None` as address: the driver allocates the block.
    pub fn add(
        &mut self,
        address: Option<HostAddress>,
        bytes: usize,
        kind: HostKind,
    ) -> Outcome<HostAddress> {
        if bytes == 0 {
            return Err(INVALID_VALUE);
        }
        let pages = if address.is_none() { Some(Pages::host(bytes)?) } else { None };
        let start = address.or(pages.as_ref().map(Pages::start)).ok_or(INVALID_VALUE)?;
        let end = start.checked_add(bytes).ok_or(INVALID_VALUE)?;
        if self
            .blocks
            .range(..end)
            .next_back()
            .is_some_and(|(base, block)| base + block.bytes > start)
        {
            return Err(HOST_MEMORY_ALREADY_REGISTERED);
        }
        self.blocks.insert(start, HostBlock { bytes, kind, _pages: pages });
        Ok(start)
    }

    /// Removes the block at this address, if it is of one of these kinds.
    pub fn remove(&mut self, address: HostAddress, kinds: &[HostKind]) -> Outcome {
        match self.blocks.get(&address) {
            Some(block) if kinds.contains(&block.kind) => {
                self.blocks.remove(&address);
                Ok(())
            }
            _ if kinds.contains(&HostKind::Registered) => Err(HOST_MEMORY_NOT_REGISTERED),
            _ => Err(INVALID_VALUE),
        }
    }

    /// Start, size and kind of the block at an address, if the driver knows one.
    pub fn describe(&self, address: HostAddress) -> Option<(HostAddress, usize, HostKind)> {
        let (base, block) = self.blocks.range(..=address).next_back()?;
        (address - base < block.bytes).then_some((*base, block.bytes, block.kind))
    }

    /// Whether any memory is managed, which a checkpoint does not support.
    pub fn has_managed(&self) -> bool {
        self.blocks.values().any(|block| block.kind == HostKind::Managed)
    }
}
