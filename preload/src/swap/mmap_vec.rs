//! A vector whose elements are in mapped pages of its own. A forked child does not have these
//! pages.

use crate::sys;

/// Size of the first mapping of a vector, in bytes.
pub const PAGE_BYTES: usize = 4096;

/// A vector in mapped memory. The memory stays mapped until the vector is
/// [discarded](MmapVec::discard). An all-zero value is an empty vector.
#[repr(C)]
pub struct MmapVec<T> {
    first: *mut T,
    len: usize,
    capacity: usize,
}

impl<T> MmapVec<T> {
    pub const fn empty() -> MmapVec<T> {
        MmapVec { first: core::ptr::null_mut(), len: 0, capacity: 0 }
    }

    pub fn all(&self) -> &[T] {
        if self.first.is_null() {
            return &[];
        }
        // SAFETY: `len` elements were written here, in memory that only this vector uses.
        unsafe { core::slice::from_raw_parts(self.first, self.len) }
    }

    pub fn all_mut(&mut self) -> &mut [T] {
        if self.first.is_null() {
            return &mut [];
        }
        // SAFETY: `len` elements were written here, and `self` is borrowed exclusively.
        unsafe { core::slice::from_raw_parts_mut(self.first, self.len) }
    }

    /// Makes space for one more element. False: out of memory.
    pub fn reserve_one(&mut self) -> bool {
        self.len < self.capacity || self.grow()
    }

    /// Inserts an element at a position. `Err`: the position is behind the end or memory ran out,
    /// and the element is returned.
    pub fn insert(&mut self, place: usize, one: T) -> Result<(), T> {
        if place > self.len || !self.reserve_one() {
            return Err(one);
        }
        // SAFETY: there is space for one more element, and `place` is at most `len`.
        unsafe {
            let at = self.first.add(place);
            core::ptr::copy(at, at.add(1), self.len - place);
            at.write(one);
        }
        self.len += 1;
        Ok(())
    }

    /// Removes the element at a position.
    pub fn remove(&mut self, place: usize) -> Option<T> {
        if place >= self.len {
            return None;
        }
        self.len -= 1;
        // SAFETY: `place` was inside, and the elements behind it move down over the one that was read.
        unsafe {
            let at = self.first.add(place);
            let found = at.read();
            core::ptr::copy(at.add(1), at, self.len - place);
            Some(found)
        }
    }

    /// Moves all elements from the position `place` on to the end of another vector. False: out of
    /// memory.
    pub fn split_into(&mut self, place: usize, other: &mut MmapVec<T>) -> bool {
        let many = self.len.saturating_sub(place);
        while other.capacity - other.len < many {
            if !other.grow() {
                return false;
            }
        }
        if many > 0 {
            // SAFETY: `many` elements lie behind `place` and fit behind the other's last; they leave
            // this vector.
            unsafe {
                let to = other.first.add(other.len);
                core::ptr::copy_nonoverlapping(self.first.add(place), to, many);
            }
            self.len -= many;
            other.len += many;
        }
        true
    }

    /// Frees the memory of the vector, which is empty afterwards.
    pub fn discard(&mut self) {
        if !self.first.is_null() {
            let bytes = self.capacity * size_of::<T>();
            // SAFETY: mapped in `grow` with that size, up to whole pages, and not used again.
            unsafe { sys::unmap_private(self.first.cast(), bytes) };
        }
        *self = MmapVec::empty();
    }

    fn grow(&mut self) -> bool {
        let before_bytes = self.capacity * size_of::<T>();
        let bytes = (2 * before_bytes).next_multiple_of(PAGE_BYTES).max(PAGE_BYTES);
        let Ok(fresh) = sys::map_private(bytes) else {
            return false;
        };
        let fresh = fresh.cast::<T>();
        if !self.first.is_null() {
            // SAFETY: `len` elements from the old memory to the new, larger one; the old one
            // was mapped here and is not used again.
            unsafe {
                core::ptr::copy_nonoverlapping(self.first, fresh, self.len);
                sys::unmap_private(self.first.cast(), before_bytes);
            }
        }
        self.first = fresh;
        self.capacity = bytes / size_of::<T>();
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_grows_and_splits_and_forgets_nothing() {
        let (mut list, mut other) = (MmapVec::empty(), MmapVec::empty());
        assert_eq!((list.insert(1, 0), list.remove(0)), (Err(0), None));
        let many = 3 * PAGE_BYTES / size_of::<usize>();
        for n in 0..many {
            list.insert(n / 2, n).unwrap();
        }
        let before = list.all().to_vec();
        assert_eq!(before.len(), many);
        assert!(other.insert(0, many).is_ok() && list.split_into(10, &mut other));
        assert_eq!((list.all(), other.remove(0)), (&before[..10], Some(many)));
        assert_eq!(other.all(), &before[10..]);
        assert_eq!((list.remove(3), list.all().len()), (Some(before[3]), 9));
        list.discard();
        other.discard();
        assert!(list.all().is_empty() && other.remove(0).is_none());
    }
}
