//! What is carried by age, the oldest first: that is how it lies in the pool. What a program has
//! from its beginning, the weights of a model, keeps its place there when something comes or goes.
//!
//! Allocations come before the application's own blocks, whose names count up.

use super::sorted::{Keyed, Sorted};
use super::table::{Id, Piece, Tables};
use super::tables;

/// More are taken by address: each takes its place among all before it.
const MOST_BY_AGE: usize = 8_192;
/// Beyond every moment that an allocation was noted at.
const BLOCKS: u64 = 1 << 63;

#[derive(Clone, Copy)]
struct Entry {
    key: u64,
    id: Id,
}

impl Keyed for Entry {
    fn key(&self) -> u64 {
        self.key
    }
}

/// The names of some pieces, in that order.
pub struct Order(Sorted<Entry>);

impl Order {
    /// Those that `which` picks. `None`: there is no memory for them.
    pub fn of(which: impl Fn(&Piece) -> bool) -> Option<Order> {
        tables(|tables| Order::within(tables, which))
    }

    /// The same, of tables that are locked already.
    pub fn within(tables: &mut Tables, which: impl Fn(&Piece) -> bool) -> Option<Order> {
        Order::among(tables, which, MOST_BY_AGE)
    }

    fn among(tables: &mut Tables, which: impl Fn(&Piece) -> bool, most: usize) -> Option<Order> {
        let mut order = Order(Sorted::empty());
        let by_age = tables.allocations.iter().filter(|a| which(&a.piece)).count() <= most;
        let (mut from, mut number) = (Id::FIRST, 0);
        while let Some((id, piece)) = tables.next(from, &which) {
            (from, number) = (id.next(), number + 1);
            let key = match id {
                Id::Allocation(_) if by_age => piece.since,
                Id::Allocation(_) => number,
                Id::Block(name) => BLOCKS | name,
            };
            if !order.0.insert(Entry { key, id }) {
                return None;
            }
        }
        Some(order)
    }

    /// The name at a place.
    pub fn id(&mut self, place: usize) -> Option<Id> {
        self.0.nth(place).map(|entry| entry.id)
    }

    /// What is at a place; `None` at the end, or where it is not known any more.
    pub fn piece(&mut self, place: usize) -> Option<(Id, Piece)> {
        let id = self.id(place)?;
        tables(|tables| tables.piece(id).map(|piece| (id, *piece)))
    }
}

impl Drop for Order {
    fn drop(&mut self) {
        self.0.discard();
    }
}

#[cfg(test)]
mod tests {
    use affinode_cuda_sys::MemAllocationProp;

    use super::super::table::Allocation;
    use super::*;

    fn ids(tables: &mut Tables, most: usize) -> Vec<Id> {
        let mut order = Order::among(tables, Piece::leaves, most).unwrap();
        (0..).map_while(|place| order.id(place)).collect()
    }

    #[test]
    fn the_oldest_comes_first_whatever_its_address() {
        let mut tables = Tables::empty();
        let piece = |address| Piece { address, bytes: 60, context: 1, ..Piece::default() };
        let blocks: Vec<u64> = (1..=2)
            .map(|n| {
                let name = tables.blocks.insert(n, MemAllocationProp::default(), 60).unwrap();
                *tables.piece(Id::Block(name)).unwrap() = piece(9_000 - n * 100);
                name
            })
            .collect();
        for address in [500, 900, 300, 700] {
            tables.insert(Allocation { piece: piece(address), ..Allocation::default() });
        }
        tables.piece(Id::Allocation(900)).unwrap().stays = true;
        let blocks = [Id::Block(blocks[0]), Id::Block(blocks[1])];
        let expect = |addresses: &[u64]| {
            let allocations = addresses.iter().map(|address| Id::Allocation(*address));
            allocations.chain(blocks).collect::<Vec<_>>()
        };
        assert_eq!(ids(&mut tables, 3), expect(&[500, 300, 700]));
        assert_eq!(ids(&mut tables, 2), expect(&[300, 500, 700]), "too many: by address");
        tables.allocations.remove_at(300);
        assert_eq!(ids(&mut tables, 3), expect(&[500, 700]));
    }
}
