//! What is carried: pieces of physical memory, each with its address and its content's place.

use affinode_cuda_sys::MemAllocationProp;

use super::addresses::AddressReservations;
use super::chunked_map::{ChunkedMap, HasKey};
use super::ipc::{ExportIdentity, OpenedOnes};
use super::stream_pools::{CompletionMark, PoolCache};
use super::vmm_handles::VmmHandleTable;
use crate::fds::TrackedFd;

/// One piece of physical memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AllocationPiece {
    /// Where all of it is mapped; 0: it is not carried now.
    pub address: u64,
    /// Its size, which is what is mapped.
    pub bytes: u64,
    /// What it is made as, each time.
    pub property: MemAllocationProp,
    /// The driver's handle of it; of no meaning while it is in the pool.
    pub handle: u64,
    /// The context that was current; 0: none is known.
    pub context: usize,
    /// It must stay: the application, or another, has hold of it in a way that we cannot move.
    pub stays: bool,
    /// Its physical memory was made by a copier: the driver brings a process that has hold of
    /// such memory at its checkpoint back no more.
    pub imported: bool,
    /// Where its content is.
    pub place: MemoryPlace,
    /// It was among what left the last time.
    pub has_left: bool,
    /// Offset of its content in the pool, while the content is there.
    pub offset: u64,
    /// What its memory is imported by, while its content is in nothing else.
    pub shared: Option<TrackedFd>,
    /// When its context was noted, counted: another of the same number may follow one that ended.
    pub since: u64,
}

/// Where the content of a piece is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u32)]
pub enum MemoryPlace {
    /// On the device.
    #[default]
    Device = 0,
    /// In the pool; nothing is mapped.
    Pool = 1,
    /// In the pool; physical memory is mapped again, and not filled yet.
    Mapped = 2,
    /// In device memory that is mapped nowhere here: a copier copies it to the pool.
    Handed = 3,
}

impl AllocationPiece {
    /// Whether it can leave the device.
    pub fn is_carried(&self) -> bool {
        !self.stays && self.address != 0 && self.context != 0
    }

    /// Whether its memory, once it is not known here any more, may still be held: it is of a
    /// copier's making, and was made to stay by a call that takes a hold of its own.
    pub fn may_stray(&self) -> bool {
        self.imported
            && self.stays
            && matches!(self.place, MemoryPlace::Device | MemoryPlace::Mapped)
    }

    /// Whether it leaves the device when the rest does.
    pub fn leaves(&self) -> bool {
        self.is_carried() && self.place == MemoryPlace::Device
    }
}

/// What the application got from `cuMemAlloc` and its kin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Allocation {
    /// What backs it.
    pub piece: AllocationPiece,
    /// What the application asked for, in bytes.
    pub asked_bytes: u64,
    /// The number of the pool that it came from; 0: none.
    pub pool: u64,
    /// An event of ours, once it was freed in a stream.
    pub mark: CompletionMark,
}

impl HasKey for Allocation {
    fn key(&self) -> u64 {
        self.piece.address
    }
}

/// All of them, by address.
pub type Allocations = ChunkedMap<Allocation>;

impl Allocations {
    /// The one that an address lies in.
    pub fn around(&mut self, address: u64) -> Option<&mut Allocation> {
        let inside = |a: &&mut Allocation| address.wrapping_sub(a.piece.address) < a.piece.bytes;
        self.up_to(address).filter(inside)
    }
}

/// Names a piece. Allocations come before the application's own blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum AllocationId {
    /// The allocation at this address.
    Allocation(u64),
    /// The block of this name.
    Block(u64),
}

impl AllocationId {
    /// The least.
    pub const FIRST: AllocationId = AllocationId::Allocation(0);

    /// The next after it.
    pub fn next(self) -> AllocationId {
        match self {
            AllocationId::Allocation(address) => {
                AllocationId::Allocation(address.saturating_add(1))
            }
            AllocationId::Block(name) => AllocationId::Block(name.saturating_add(1)),
        }
    }
}

/// Everything that is carried. Zero is nothing.
#[repr(C)]
pub struct AllocationTables {
    /// What `cuMemAlloc` gave.
    pub allocations: Allocations,
    /// What `cuMemCreate` gave.
    pub blocks: VmmHandleTable,
    /// What `cuIpcOpenMemHandle` gave of other processes' memory. It is not carried.
    pub opened: OpenedOnes,
    /// Who this process is to those that open its memory.
    pub identity: ExportIdentity,
    /// What was freed.
    pub addresses: AddressReservations,
    /// What nobody uses any more.
    pub cache: PoolCache,
    noted: u64,
}

impl AllocationTables {
    /// Nothing.
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

    /// A moment after all that was noted before.
    pub fn now(&mut self) -> u64 {
        self.noted += 1;
        self.noted
    }

    /// Takes an allocation in. False: there is no memory to note it.
    pub fn insert(&mut self, mut allocation: Allocation) -> bool {
        allocation.piece.since = self.now();
        self.allocations.insert(allocation)
    }

    /// The first piece from one on that `which` picks.
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

    /// A piece.
    pub fn piece(&mut self, id: AllocationId) -> Option<&mut AllocationPiece> {
        match id {
            AllocationId::Allocation(address) => Some(&mut self.allocations.at(address)?.piece),
            AllocationId::Block(name) => Some(&mut self.blocks.at(name)?.piece),
        }
    }

    /// Bytes of all pieces that `which` picks.
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
    fn what_must_stay_does_not_leave() {
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
