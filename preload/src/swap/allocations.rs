//! Tables of swappable memory, which is device memory that this library can copy to host memory.
//! Each piece of physical memory has an entry with its address and the location of its content.

use affinode_cuda_sys::MemAllocationProp;

use super::addresses::AddressReservations;
use super::chunked_map::{ChunkedMap, HasKey};
use super::ipc::{ExportIdentity, OpenedOnes};
use super::stream_pools::{CompletionMark, PoolCache};
use super::vmm_handles::VmmHandleTable;
use crate::fds::TrackedFd;

/// One piece of physical device memory: the memory of one call of `cuMemCreate`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AllocationPiece {
    /// Address at which the whole piece is mapped. 0: no such mapping is known, so the library
    /// cannot copy the piece now.
    pub address: u64,
    /// Size of the memory and of its mapping, in bytes.
    pub bytes: u64,
    /// Properties with which the memory is created, at first and at each restore.
    pub property: MemAllocationProp,
    /// The driver's handle of the physical memory. It is invalid while the content is in the
    /// staging pool, because no physical memory exists then.
    pub handle: u64,
    /// CUDA context in which the piece is copied. It is the context that was current when the piece
    /// was created or, for a block, when `cuMemSetAccess` was called. 0: no context is known, so
    /// the piece is not copied.
    pub context: usize,
    /// True if offloads must leave the piece on the device, because anything besides its mapping
    /// refers to the physical memory, for example an exported handle.
    pub stays: bool,
    /// True if this process imported the physical memory, for example from a copier (a process that
    /// fills the memory of other processes). The driver cannot restore a process that held such
    /// memory at its checkpoint.
    pub imported: bool,
    /// Location of the piece's content: in VRAM, in the staging pool, or in exported memory.
    pub place: MemoryPlace,
    /// True if the last copy out, or the last prefault for one, included the piece.
    pub has_left: bool,
    /// Offset of the content in the staging pool, while the content is in the pool.
    pub offset: u64,
    /// File descriptor of the exported physical memory, while the content exists only in that
    /// memory.
    pub shared: Option<TrackedFd>,
    /// Logical time at which the piece was created. The driver can give a new context the handle
    /// value of an ended context. The time shows to which of the two contexts the piece belongs.
    pub since: u64,
}

/// Location of the content of a piece of device memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u32)]
pub enum MemoryPlace {
    /// In VRAM, mapped at its address.
    #[default]
    Device = 0,
    /// In the staging pool in host memory. Nothing is mapped at the piece's address.
    Pool = 1,
    /// In the staging pool in host memory. New physical memory is mapped at the piece's address,
    /// but the content is not copied to it yet.
    Mapped = 2,
    /// In exported device memory that is not mapped in this process. A copier process copies the
    /// content to the staging pool.
    Handed = 3,
}

impl AllocationPiece {
    /// Whether the library can copy the piece to host memory.
    pub fn is_swappable(&self) -> bool {
        !self.stays && self.address != 0 && self.context != 0
    }

    /// Whether imported memory may stay allocated after the piece was removed from the tables,
    /// because something else refers to the memory. This is possible if the memory is on the device
    /// and marked to stay there.
    pub fn may_stray(&self) -> bool {
        self.imported
            && self.stays
            && matches!(self.place, MemoryPlace::Device | MemoryPlace::Mapped)
    }

    /// Whether the next copy out removes the piece from the device.
    pub fn leaves(&self) -> bool {
        self.is_swappable() && self.place == MemoryPlace::Device
    }
}

/// An allocation of `cuMemAlloc` or a similar function.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Allocation {
    /// Physical memory and address of the allocation.
    pub piece: AllocationPiece,
    /// The size that the application requested, in bytes.
    pub asked_bytes: u64,
    /// This library's number of the CUDA memory pool from which the application allocated the
    /// memory. 0: it was not allocated from a pool.
    pub pool: u64,
    /// Mark with the event that the last `cuMemFreeAsync` of this memory has recorded. If the
    /// memory is allocated again, the mark is kept, so that the next `cuMemFreeAsync` reuses the
    /// event. An empty mark: there is no event to reuse.
    pub mark: CompletionMark,
}

impl HasKey for Allocation {
    fn key(&self) -> u64 {
        self.piece.address
    }
}

/// All allocations of the process, ordered by address.
pub type Allocations = ChunkedMap<Allocation>;

impl Allocations {
    /// The allocation that contains an address.
    pub fn around(&mut self, address: u64) -> Option<&mut Allocation> {
        let inside = |a: &&mut Allocation| address.wrapping_sub(a.piece.address) < a.piece.bytes;
        self.up_to(address).filter(inside)
    }
}

/// Id of a piece of device memory in the tables. In the order of ids, allocations come before
/// blocks, which are memory that the application created with `cuMemCreate`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum AllocationId {
    /// The allocation at this address.
    Allocation(u64),
    /// The block with this id. A block is physical memory of `cuMemCreate`.
    Block(u64),
}

impl AllocationId {
    /// The lowest possible id, at which a search through all pieces begins.
    pub const FIRST: AllocationId = AllocationId::Allocation(0);

    /// Returns the lowest id that is higher than this one.
    pub fn next(self) -> AllocationId {
        match self {
            AllocationId::Allocation(address) => {
                AllocationId::Allocation(address.saturating_add(1))
            }
            AllocationId::Block(name) => AllocationId::Block(name.saturating_add(1)),
        }
    }
}

/// Tables of the device memory that this library has created or opened for the application. An
/// all-zero value is a set of empty tables.
#[repr(C)]
pub struct AllocationTables {
    /// Allocations of `cuMemAlloc` and similar functions.
    pub allocations: Allocations,
    /// Blocks: physical memory that the application created with `cuMemCreate`.
    pub blocks: VmmHandleTable,
    /// Memory of other processes, opened by `cuIpcOpenMemHandle`. It is not swappable.
    pub opened: OpenedOnes,
    /// Identity of this process, which it puts into handles so that other processes can request its
    /// memory.
    pub identity: ExportIdentity,
    /// Reserved addresses of freed allocations, kept for reuse.
    pub addresses: AddressReservations,
    /// Freed stream-ordered memory that is kept for reuse, and the memory pools of the application.
    pub cache: PoolCache,
    noted: u64,
}

impl AllocationTables {
    pub const fn empty() -> AllocationTables {
        AllocationTables {
            allocations: ChunkedMap::empty(),
            blocks: VmmHandleTable::empty(),
            opened: ChunkedMap::empty(),
            identity: ExportIdentity::none(),
            addresses: AddressReservations::none(),
            cache: PoolCache::empty(),
            noted: 0,
        }
    }

    /// Returns the logical time: a number that is higher than all numbers returned before.
    pub fn now(&mut self) -> u64 {
        self.noted += 1;
        self.noted
    }

    /// Adds an allocation and sets its time of creation. False: out of memory.
    pub fn insert(&mut self, mut allocation: Allocation) -> bool {
        allocation.piece.since = self.now();
        self.allocations.insert(allocation)
    }

    /// Returns the first piece whose id is at least `from` and for which `which` is true.
    pub fn next(
        &mut self,
        from: AllocationId,
        which: impl Fn(&AllocationPiece) -> bool,
    ) -> Option<(AllocationId, &mut AllocationPiece)> {
        let block_from = match from {
            AllocationId::Allocation(address) => {
                let found = self.allocations.find_from(address, |a| which(&a.piece));
                if let Some(found) = found {
                    return Some((AllocationId::Allocation(found.piece.address), &mut found.piece));
                }
                0
            }
            AllocationId::Block(name) => name,
        };
        let found = self.blocks.find_from(block_from, |b| which(&b.piece))?;
        Some((AllocationId::Block(found.name), &mut found.piece))
    }

    pub fn piece(&mut self, id: AllocationId) -> Option<&mut AllocationPiece> {
        match id {
            AllocationId::Allocation(address) => Some(&mut self.allocations.at(address)?.piece),
            AllocationId::Block(name) => Some(&mut self.blocks.at(name)?.piece),
        }
    }

    /// Total bytes of the pieces for which `which` is true.
    pub fn bytes(&mut self, which: impl Fn(&AllocationPiece) -> bool) -> u64 {
        let allocations = self.allocations.iter().map(|allocation| &allocation.piece);
        let pieces = allocations.chain(self.blocks.from(0).map(|block| &block.piece));
        pieces.filter(|piece| which(piece)).map(|piece| piece.bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(address: u64) -> AllocationPiece {
        AllocationPiece { address, bytes: 60, context: 1, ..AllocationPiece::default() }
    }

    fn allocation(n: u64) -> Allocation {
        Allocation { piece: piece(n * 100), asked_bytes: 50, ..Allocation::default() }
    }

    #[test]
    fn an_allocation_is_found_by_any_address_inside() {
        let mut table = Allocations::empty();
        for n in [5, 1, 9, 3] {
            assert!(table.insert(allocation(n)));
        }
        assert_eq!(table.around(359), Some(&mut allocation(3)));
        assert!(table.around(360).is_none() && table.around(99).is_none());
        table.remove_at(300);
        assert!(table.around(310).is_none());
    }

    #[test]
    fn pinned_memory_is_not_copied_out() {
        assert!(piece(1).leaves());
        assert!(!AllocationPiece { stays: true, ..piece(1) }.leaves());
        assert!(!AllocationPiece { place: MemoryPlace::Pool, ..piece(1) }.leaves());
        assert!(!AllocationPiece { context: 0, ..piece(1) }.leaves());
        assert!(!piece(0).leaves());
    }

    #[test]
    fn pieces_of_both_kinds_are_gone_through_once() {
        let mut tables = AllocationTables::empty();
        let name = tables.blocks.insert(7, MemAllocationProp::default(), 60).unwrap();
        *tables.piece(AllocationId::Block(name)).unwrap() = piece(400);
        for n in [2, 1] {
            tables.allocations.insert(allocation(n));
        }
        let mut from = AllocationId::FIRST;
        let mut seen = Vec::new();
        while let Some((id, piece)) = tables.next(from, AllocationPiece::leaves) {
            seen.push(piece.address);
            from = id.next();
        }
        assert_eq!(seen, [100, 200, 400]);
        assert_eq!(tables.bytes(AllocationPiece::leaves), 180);
        tables.piece(AllocationId::Allocation(100)).unwrap().place = MemoryPlace::Pool;
        assert_eq!(
            tables.next(AllocationId::FIRST, AllocationPiece::leaves).unwrap().0,
            AllocationId::Allocation(200)
        );
        assert_eq!(tables.bytes(|piece| piece.place == MemoryPlace::Pool), 60);
    }
}
