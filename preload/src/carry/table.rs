//! What is carried: pieces of physical memory, each with its address and its content's place.

use affinode_cuda_sys::MemAllocationProp;

use super::addresses::Addresses;
use super::blocks::Blocks;
use super::ipc::{Identity, OpenedOnes};
use super::pools::{Cache, Mark};
use super::sorted::{Keyed, Sorted};
use crate::owned::Owned;

/// One piece of physical memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Piece {
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
    /// Its physical memory was made by a vault: the driver brings a process that has hold of
    /// such memory at its checkpoint back no more.
    pub imported: bool,
    /// Where its content is.
    pub place: Place,
    /// It was among what left the last time.
    pub has_left: bool,
    /// Offset of its content in the pool, while the content is there.
    pub offset: u64,
    /// What its memory is imported by, while its content is in nothing else.
    pub shared: Option<Owned>,
    /// When its context was noted, counted: another of the same number may follow one that ended.
    pub since: u64,
}

/// Where the content of a piece is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u32)]
pub enum Place {
    /// On the device.
    #[default]
    Device = 0,
    /// In the pool; nothing is mapped.
    Pool = 1,
    /// In the pool; physical memory is mapped again, and not filled yet.
    Mapped = 2,
    /// In device memory that is mapped nowhere here: a vault copies it to the pool.
    Handed = 3,
}

impl Piece {
    /// Whether it can leave the device.
    pub fn is_carried(&self) -> bool {
        !self.stays && self.address != 0 && self.context != 0
    }

    /// Whether its memory, once it is not known here any more, may still be held: it is of a
    /// vault's making, and was made to stay by a call that takes a hold of its own.
    pub fn may_stray(&self) -> bool {
        self.imported && self.stays && matches!(self.place, Place::Device | Place::Mapped)
    }

    /// Whether it leaves the device when the rest does.
    pub fn leaves(&self) -> bool {
        self.is_carried() && self.place == Place::Device
    }
}

/// What the application got from `cuMemAlloc` and its kin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Allocation {
    /// What backs it.
    pub piece: Piece,
    /// What the application asked for, in bytes.
    pub asked_bytes: u64,
    /// The number of the pool that it came from; 0: none.
    pub pool: u64,
    /// An event of ours, once it was freed in a stream.
    pub mark: Mark,
}

impl Keyed for Allocation {
    fn key(&self) -> u64 {
        self.piece.address
    }
}

/// All of them, by address.
pub type Allocations = Sorted<Allocation>;

impl Allocations {
    /// The one that an address lies in.
    pub fn around(&mut self, address: u64) -> Option<&mut Allocation> {
        let inside = |a: &&mut Allocation| address.wrapping_sub(a.piece.address) < a.piece.bytes;
        self.up_to(address).filter(inside)
    }
}

/// Names a piece. Allocations come before the application's own blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Id {
    /// The allocation at this address.
    Allocation(u64),
    /// The block of this name.
    Block(u64),
}

impl Id {
    /// The least.
    pub const FIRST: Id = Id::Allocation(0);

    /// The next after it.
    pub fn next(self) -> Id {
        match self {
            Id::Allocation(address) => Id::Allocation(address.saturating_add(1)),
            Id::Block(name) => Id::Block(name.saturating_add(1)),
        }
    }
}

/// Everything that is carried. Zero is nothing.
#[repr(C)]
pub struct Tables {
    /// What `cuMemAlloc` gave.
    pub allocations: Allocations,
    /// What `cuMemCreate` gave.
    pub blocks: Blocks,
    /// What `cuIpcOpenMemHandle` gave of other processes' memory. It is not carried.
    pub opened: OpenedOnes,
    /// Who this process is to those that open its memory.
    pub identity: Identity,
    /// What was freed.
    pub addresses: Addresses,
    /// What nobody uses any more.
    pub cache: Cache,
    noted: u64,
}

impl Tables {
    /// Nothing.
    pub const fn empty() -> Tables {
        Tables {
            allocations: Sorted::empty(),
            blocks: Blocks::empty(),
            opened: Sorted::empty(),
            identity: Identity::none(),
            addresses: Addresses::none(),
            cache: Cache::empty(),
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
    pub fn next(&mut self, from: Id, which: impl Fn(&Piece) -> bool) -> Option<(Id, &mut Piece)> {
        let block_from = match from {
            Id::Allocation(address) => {
                let found = self.allocations.find_from(address, |a| which(&a.piece));
                if let Some(found) = found {
                    return Some((Id::Allocation(found.piece.address), &mut found.piece));
                }
                0
            }
            Id::Block(name) => name,
        };
        let found = self.blocks.find_from(block_from, |b| which(&b.piece))?;
        Some((Id::Block(found.name), &mut found.piece))
    }

    /// A piece.
    pub fn piece(&mut self, id: Id) -> Option<&mut Piece> {
        match id {
            Id::Allocation(address) => Some(&mut self.allocations.at(address)?.piece),
            Id::Block(name) => Some(&mut self.blocks.at(name)?.piece),
        }
    }

    /// Bytes of all pieces that `which` picks.
    pub fn bytes(&mut self, which: impl Fn(&Piece) -> bool) -> u64 {
        let allocations = self.allocations.iter().map(|allocation| &allocation.piece);
        let pieces = allocations.chain(self.blocks.from(0).map(|block| &block.piece));
        pieces.filter(|piece| which(piece)).map(|piece| piece.bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(address: u64) -> Piece {
        Piece { address, bytes: 60, context: 1, ..Piece::default() }
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
        assert!(!Piece { stays: true, ..piece(1) }.leaves());
        assert!(!Piece { place: Place::Pool, ..piece(1) }.leaves());
        assert!(!Piece { context: 0, ..piece(1) }.leaves());
        assert!(!piece(0).leaves());
    }

    #[test]
    fn pieces_of_both_kinds_are_gone_through_once() {
        let mut tables = Tables::empty();
        let name = tables.blocks.insert(7, MemAllocationProp::default(), 60).unwrap();
        *tables.piece(Id::Block(name)).unwrap() = piece(400);
        for n in [2, 1] {
            tables.allocations.insert(allocation(n));
        }
        let mut from = Id::FIRST;
        let mut seen = Vec::new();
        while let Some((id, piece)) = tables.next(from, Piece::leaves) {
            seen.push(piece.address);
            from = id.next();
        }
        assert_eq!(seen, [100, 200, 400]);
        assert_eq!(tables.bytes(Piece::leaves), 180);
        tables.piece(Id::Allocation(100)).unwrap().place = Place::Pool;
        assert_eq!(tables.next(Id::FIRST, Piece::leaves).unwrap().0, Id::Allocation(200));
        assert_eq!(tables.bytes(|piece| piece.place == Place::Pool), 60);
    }
}
