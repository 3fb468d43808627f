//! Host memory that the simulated driver knows: pinned, registered and managed memory.

use std::collections::BTreeMap;

use crate::abi::{
    HOST_MEMORY_ALREADY_REGISTERED, HOST_MEMORY_NOT_REGISTERED, HostAddress, INVALID_VALUE, Outcome,
};
use crate::pages::Pages;

/// Kind of a block of host memory. It depends on the call by which the driver learned of the block.
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

/// All blocks of host memory that the driver knows, by address.
#[derive(Debug, Default)]
pub struct HostMemory {
    blocks: BTreeMap<HostAddress, HostBlock>,
}

impl HostMemory {
    /// Adds a block of host memory. If the address is `None`, the driver allocates the block.
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

    /// Returns start, size and kind of the block that contains an address, if the driver knows one.
    pub fn describe(&self, address: HostAddress) -> Option<(HostAddress, usize, HostKind)> {
        let (base, block) = self.blocks.range(..=address).next_back()?;
        (address - base < block.bytes).then_some((*base, block.bytes, block.kind))
    }

    /// Whether any of the memory is managed. A checkpoint does not support managed memory.
    pub fn has_managed(&self) -> bool {
        self.blocks.values().any(|block| block.kind == HostKind::Managed)
    }
}
