//! An ordered map, stored as page-sized groups. An insert or a remove shifts the entries of one
//! group at most, so its cost does not depend on the number of entries.

use super::mmap_vec::{MmapVec, PAGE_BYTES};

/// A map entry that contains its key.
pub trait HasKey: Copy {
    /// The entry's key, unique within a map.
    fn key(&self) -> u64;
}

/// An ordered map of entries. An all-zero value is an empty map.
#[repr(C)]
pub struct ChunkedMap<T> {
    /// Groups in key order, none of them empty.
    groups: MmapVec<MmapVec<T>>,
    /// Memory of the last group that became empty, for reuse as a new group.
    spare: MmapVec<T>,
}

impl<T: HasKey> ChunkedMap<T> {
    const MAX_GROUP_LEN: usize = PAGE_BYTES / size_of::<T>();

    pub const fn empty() -> ChunkedMap<T> {
        const { assert!(Self::MAX_GROUP_LEN > 1, "a group must hold at least two entries") };
        ChunkedMap { groups: MmapVec::empty(), spare: MmapVec::empty() }
    }

    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &T> {
        self.groups.all().iter().flat_map(|group| group.all())
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.groups.all_mut().iter_mut().flat_map(|group| group.all_mut())
    }

    pub fn is_empty(&self) -> bool {
        self.groups.all().is_empty()
    }

    /// The entry at a position in key order.
    pub fn nth(&self, mut place: usize) -> Option<&T> {
        for group in self.groups.all() {
            let ones = group.all();
            match ones.get(place) {
                Some(found) => return Some(found),
                None => place -= ones.len(),
            }
        }
        None
    }

    /// Index of the group that contains a key, or into which the key would be inserted.
    fn group(&self, key: u64) -> usize {
        let begins_before =
            |group: &MmapVec<T>| group.all().first().is_some_and(|one| one.key() <= key);
        self.groups.all().partition_point(begins_before).saturating_sub(1)
    }

    /// Returns the index of a key's group and the key's position in that group. `Err`: the map does
    /// not contain the key, and the value is the position at which it would be inserted.
    fn place(&self, key: u64) -> (usize, Result<usize, usize>) {
        let group = self.group(key);
        let ones = self.groups.all().get(group).map_or(&[][..], MmapVec::all);
        (group, ones.binary_search_by_key(&key, T::key))
    }

    fn get_mut(&mut self, group: usize, place: usize) -> Option<&mut T> {
        self.groups.all_mut().get_mut(group)?.all_mut().get_mut(place)
    }

    /// The entry with this key.
    pub fn at(&mut self, key: u64) -> Option<&mut T> {
        let (group, place) = self.place(key);
        self.get_mut(group, place.ok()?)
    }

    /// Returns the entry with this key or, if there is none, the entry with the next lower key.
    pub fn up_to(&mut self, key: u64) -> Option<&mut T> {
        let (group, place) = self.place(key);
        let place = place.or_else(|after| after.checked_sub(1).ok_or(())).ok()?;
        self.get_mut(group, place)
    }

    /// Returns all entries whose key is at least `key`, in the order of their keys.
    pub fn from(&self, key: u64) -> impl Iterator<Item = &T> {
        let groups = self.groups.all().get(self.group(key)..).unwrap_or_default();
        groups.iter().flat_map(MmapVec::all).skip_while(move |one| one.key() < key)
    }

    /// Returns the first entry whose key is at least `key` and for which `which` is true.
    pub fn find_from(&mut self, key: u64, which: impl Fn(&T) -> bool) -> Option<&mut T> {
        let group = self.group(key);
        let groups = self.groups.all_mut().get_mut(group..).unwrap_or_default();
        let mut from_there = groups.iter_mut().flat_map(MmapVec::all_mut);
        from_there.find(|one| one.key() >= key && which(one))
    }

    /// Adds an entry. False: the map contains the key already, or memory is exhausted.
    pub fn insert(&mut self, one: T) -> bool {
        let (mut group, Err(mut place)) = self.place(one.key()) else {
            return false;
        };
        let many = self.groups.all().get(group).map(|group| group.all().len());
        let next = self.groups.all().get(group + 1).map(|group| group.all().len());
        if many == Some(place)
            && place >= Self::MAX_GROUP_LEN
            && next.is_some_and(|next| next < Self::MAX_GROUP_LEN)
        {
            (group, place) = (group + 1, 0);
        } else if many.is_none_or(|many| many >= Self::MAX_GROUP_LEN) {
            let keeps = match many {
                // Behind the last entry, begin an empty group. So entries that are inserted in
                // ascending order leave full groups.
                Some(many) if place == many => many,
                Some(many) => many / 2,
                None => 0,
            };
            if !self.begin_group(group, keeps) {
                return false;
            }
            if many.is_some() && place >= keeps {
                (group, place) = (group + 1, place - keeps);
            }
        }
        match self.groups.all_mut().get_mut(group) {
            Some(group) => group.insert(place, one).is_ok(),
            None => false,
        }
    }

    /// Adds a group to the map. If a group with the index `after` exists, the new group is placed
    /// behind it, and the entries of that group from position `keeps` on move to the new group.
    /// Otherwise the new group becomes the first group. False: out of memory.
    fn begin_group(&mut self, after: usize, keeps: usize) -> bool {
        let mut fresh = core::mem::replace(&mut self.spare, MmapVec::empty());
        // All steps that can fail come before any entry moves.
        let has_room = fresh.reserve_one() && self.groups.reserve_one();
        let moved = has_room
            && match self.groups.all_mut().get_mut(after) {
                Some(before) => before.split_into(keeps, &mut fresh),
                None => true,
            };
        if !moved {
            self.spare = fresh;
            return false;
        }
        let place = if self.is_empty() { 0 } else { after + 1 };
        self.groups.insert(place, fresh).is_ok()
    }

    /// Removes the first entry for which `which` is true.
    pub fn remove(&mut self, which: impl Fn(&T) -> bool) -> Option<T> {
        let mut groups = self.groups.all().iter().enumerate();
        let (group, place) =
            groups.find_map(|(group, ones)| Some((group, ones.all().iter().position(&which)?)))?;
        self.take_out(group, place)
    }

    /// Removes the entry with this key.
    pub fn remove_at(&mut self, key: u64) -> Option<T> {
        let (group, place) = self.place(key);
        self.take_out(group, place.ok()?)
    }

    fn take_out(&mut self, group: usize, place: usize) -> Option<T> {
        let ones = self.groups.all_mut().get_mut(group)?;
        let found = ones.remove(place)?;
        if ones.all().is_empty()
            && let Some(empty) = self.groups.remove(group)
        {
            core::mem::replace(&mut self.spare, empty).discard();
        }
        Some(found)
    }

    /// Frees the memory of the map, which is empty afterwards.
    pub fn discard(&mut self) {
        self.groups.all_mut().iter_mut().for_each(MmapVec::discard);
        self.groups.discard();
        self.spare.discard();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    impl HasKey for u64 {
        fn key(&self) -> u64 {
            *self
        }
    }

    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Large(u64, [u64; 100]);

    impl HasKey for Large {
        fn key(&self) -> u64 {
            self.0
        }
    }

    fn all(sorted: &ChunkedMap<u64>) -> Vec<u64> {
        sorted.iter().copied().collect()
    }

    #[test]
    fn they_are_found_by_key_and_in_order() {
        let mut sorted = ChunkedMap::empty();
        assert!(sorted.at(0).is_none() && sorted.up_to(5).is_none() && sorted.is_empty());
        assert_eq!((sorted.from(0).next(), sorted.nth(0)), (None, None));
        for n in [5, 1, 9, 3] {
            assert!(sorted.insert(n));
        }
        assert!(!sorted.insert(3), "a key exists only once");
        assert_eq!(all(&sorted), [1, 3, 5, 9]);
        assert_eq!(sorted.at(3), Some(&mut 3));
        assert_eq!(sorted.nth(2), Some(&5));
        assert_eq!(sorted.at(4), None);
        assert_eq!(sorted.up_to(4), Some(&mut 3));
        assert_eq!(sorted.up_to(0), None);
        assert!(sorted.from(4).eq(&[5, 9]));
        assert_eq!(sorted.find_from(4, |n| *n != 5), Some(&mut 9));
        assert!(sorted.from(10).next().is_none());
        assert_eq!(sorted.remove_at(3), Some(3));
        assert_eq!(sorted.remove(|n| *n > 5), Some(9));
        assert_eq!(all(&sorted), [1, 5]);
    }

    /// Random operations must have the same results as on a `BTreeMap`. The entries are large, so
    /// that a group has few of them, and groups are created and removed often.
    #[test]
    fn it_is_as_a_tree_whatever_comes_and_goes() {
        let mut seed = 1_u64;
        let mut random = |below: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) % below
        };
        let (mut sorted, mut tree) = (ChunkedMap::empty(), BTreeMap::new());
        let wanted = [300, 20, 200, 0];
        for step in 0..20_000 {
            let key = random(400);
            let one = Large(key, [step; 100]);
            let grows = tree.len() < wanted[step as usize / 5_000];
            if grows == (random(4) > 0) {
                let is_new = !tree.contains_key(&key);
                assert_eq!(sorted.insert(one), is_new);
                tree.entry(key).or_insert(one);
            } else {
                assert_eq!(sorted.remove_at(key), tree.remove(&key));
            }
            let (key, place) = (random(400), random(400) as usize);
            let (before, from) = (tree.range(..=key).next_back(), tree.range(key..).next());
            assert_eq!(sorted.at(key).copied(), tree.get(&key).copied());
            assert_eq!(sorted.up_to(key).copied(), before.map(|(_, one)| *one));
            assert_eq!(sorted.from(key).next().copied(), from.map(|(_, one)| *one));
            assert_eq!(sorted.find_from(key, |_| true).copied(), from.map(|(_, one)| *one));
            assert_eq!(sorted.nth(place), tree.values().nth(place));
            assert_eq!(sorted.is_empty(), tree.is_empty());
            if step % 100 == 0 {
                assert!(sorted.iter().eq(tree.values()));
                assert!(sorted.iter().rev().eq(tree.values().rev()));
                assert!(sorted.iter_mut().map(|one| *one).eq(tree.values().copied()));
            }
        }
        sorted.discard();
        assert!(sorted.is_empty());
    }

    /// After an entry was removed, inserting it again must not need a new group. So the entry is
    /// not lost, even if no memory for a group is left.
    #[test]
    fn removed_entry_fits_again_without_a_new_group() {
        let mut sorted = ChunkedMap::empty();
        let many = 3 * ChunkedMap::<u64>::MAX_GROUP_LEN as u64;
        assert!((0..many).all(|n| sorted.insert(n)));
        for n in 0..many {
            assert_eq!(sorted.remove_at(n), Some(n));
            assert!(sorted.insert(n));
            assert_eq!(sorted.groups.all().len(), 3, "{n}");
        }
        assert!((0..many).all(|n| sorted.nth(n as usize) == Some(&n)));
        sorted.discard();
    }

    #[test]
    fn ordered_inserts_fill_their_groups() {
        let mut sorted = ChunkedMap::empty();
        let many = 10 * ChunkedMap::<u64>::MAX_GROUP_LEN as u64;
        assert!((0..many).all(|n| sorted.insert(n)));
        assert_eq!(sorted.groups.all().len(), 10);
        assert!((0..many).all(|n| sorted.nth(n as usize) == Some(&n)));
        sorted.discard();
    }
}
