//! Determines the order of content in the staging pool: by age of the memory, the oldest first.
//! Memory that a program allocates at its start, such as the weights of a model, then keeps its
//! offset when newer memory is allocated or freed.
//!
//! Allocations come before blocks, which are memory that the application created with
//! `cuMemCreate`. The ids of blocks are ascending numbers.

use super::allocations::{AllocationId, AllocationPiece, AllocationTables};
use super::chunked_map::{ChunkedMap, HasKey};
use super::tables;

/// Maximum number of allocations that are ordered by age. If there are more, they are ordered by
/// address, because each insert by age shifts other entries.
const MAX_BY_AGE: usize = 8_192;
/// Bit that is set in the keys of blocks, so that they come after all allocations. It is above the
/// creation time of every allocation.
const BLOCKS: u64 = 1 << 63;

#[derive(Clone, Copy)]
struct LayoutEntry {
    key: u64,
    id: AllocationId,
}

impl HasKey for LayoutEntry {
    fn key(&self) -> u64 {
        self.key
    }
}

/// List of the ids of selected pieces of memory, in the order of their content in the staging pool.
pub struct AllocationLayout(ChunkedMap<LayoutEntry>);

impl AllocationLayout {
    /// Returns the layout (the ids in the order of the staging pool) of the pieces for which
    /// `which` is true. `None`: out of memory.
    pub fn of(which: impl Fn(&AllocationPiece) -> bool) -> Option<AllocationLayout> {
        tables(|tables| AllocationLayout::within(tables, which))
    }

    /// Returns the layout of the pieces for which `which` is true, by their offsets in the staging
    /// pool. It differs from [`Self::of`] if the offsets were assigned among other pieces. `None`: out
    /// of memory.
    pub fn by_offset(which: impl Fn(&AllocationPiece) -> bool) -> Option<AllocationLayout> {
        tables(|tables| {
            let mut order = AllocationLayout(ChunkedMap::empty());
            let mut from = AllocationId::FIRST;
            while let Some((id, piece)) = tables.next(from, &which) {
                from = id.next();
                if !order.0.insert(LayoutEntry { key: piece.offset, id }) {
                    return None;
                }
            }
            Some(order)
        })
    }

    /// Same as [`Self::of`], with tables that are locked already.
    pub fn within(
        tables: &mut AllocationTables,
        which: impl Fn(&AllocationPiece) -> bool,
    ) -> Option<AllocationLayout> {
        AllocationLayout::among(tables, which, MAX_BY_AGE)
    }

    fn among(
        tables: &mut AllocationTables,
        which: impl Fn(&AllocationPiece) -> bool,
        most: usize,
    ) -> Option<AllocationLayout> {
        let mut order = AllocationLayout(ChunkedMap::empty());
        let by_age = tables.allocations.iter().filter(|a| which(&a.piece)).count() <= most;
        let (mut from, mut number) = (AllocationId::FIRST, 0);
        while let Some((id, piece)) = tables.next(from, &which) {
            (from, number) = (id.next(), number + 1);
            let key = match id {
                AllocationId::Allocation(_) if by_age => piece.since,
                AllocationId::Allocation(_) => number,
                AllocationId::Block(name) => BLOCKS | name,
            };
            if !order.0.insert(LayoutEntry { key, id }) {
                return None;
            }
        }
        Some(order)
    }

    /// Returns the id of the piece at a position in the layout.
    pub fn id(&mut self, place: usize) -> Option<AllocationId> {
        self.0.nth(place).map(|entry| entry.id)
    }

    /// Returns the piece at a position in the layout. `None`: the position is behind the last
    /// piece, or the piece was removed from the tables.
    pub fn piece(&mut self, place: usize) -> Option<(AllocationId, AllocationPiece)> {
        let id = self.id(place)?;
        tables(|tables| tables.piece(id).map(|piece| (id, *piece)))
    }
}

impl Drop for AllocationLayout {
    fn drop(&mut self) {
        self.0.discard();
    }
}

#[cfg(test)]
mod tests {
    use affinode_cuda_sys::MemAllocationProp;

    use super::super::allocations::Allocation;
    use super::*;

    fn ids(tables: &mut AllocationTables, most: usize) -> Vec<AllocationId> {
        let mut order = AllocationLayout::among(tables, AllocationPiece::leaves, most).unwrap();
        (0..).map_while(|place| order.id(place)).collect()
    }

    #[test]
    fn the_oldest_comes_first_whatever_its_address() {
        let mut tables = AllocationTables::empty();
        let piece = |address| AllocationPiece {
            address,
            bytes: 60,
            context: 1,
            ..AllocationPiece::default()
        };
        let blocks: Vec<u64> = (1..=2)
            .map(|n| {
                let name = tables.blocks.insert(n, MemAllocationProp::default(), 60).unwrap();
                *tables.piece(AllocationId::Block(name)).unwrap() = piece(9_000 - n * 100);
                name
            })
            .collect();
        for address in [500, 900, 300, 700] {
            tables.insert(Allocation { piece: piece(address), ..Allocation::default() });
        }
        tables.piece(AllocationId::Allocation(900)).unwrap().stays = true;
        let blocks = [AllocationId::Block(blocks[0]), AllocationId::Block(blocks[1])];
        let expect = |addresses: &[u64]| {
            let allocations = addresses.iter().map(|address| AllocationId::Allocation(*address));
            allocations.chain(blocks).collect::<Vec<_>>()
        };
        assert_eq!(ids(&mut tables, 3), expect(&[500, 300, 700]));
        assert_eq!(ids(&mut tables, 2), expect(&[300, 500, 700]), "too many: by address");
        tables.allocations.remove_at(300);
        assert_eq!(ids(&mut tables, 3), expect(&[500, 700]));
    }
}
