//! A list in order of its keys, in memory of our own.

use crate::sys;

/// What has a key.
pub trait Keyed: Copy {
    /// It; no two of a list have the same.
    fn key(&self) -> u64;
}

/// The list. Zero is an empty one.
#[repr(C)]
pub struct Sorted<T> {
    first: *mut T,
    len: usize,
    capacity: usize,
}

const FIRST_BYTES: usize = 64 * 1024;

impl<T: Keyed> Sorted<T> {
    /// Without any.
    pub const fn empty() -> Sorted<T> {
        Sorted { first: core::ptr::null_mut(), len: 0, capacity: 0 }
    }

    /// All of them.
    pub fn all(&mut self) -> &mut [T] {
        if self.first.is_null() {
            return &mut [];
        }
        // SAFETY: `len` of them were written here, in memory that is ours alone.
        unsafe { core::slice::from_raw_parts_mut(self.first, self.len) }
    }

    fn index(&mut self, key: u64) -> Result<usize, usize> {
        self.all().binary_search_by_key(&key, T::key)
    }

    /// The one with a key.
    pub fn at(&mut self, key: u64) -> Option<&mut T> {
        let index = self.index(key).ok()?;
        self.all().get_mut(index)
    }

    /// The one with the key, or else the last before it.
    pub fn up_to(&mut self, key: u64) -> Option<&mut T> {
        let index = match self.index(key) {
            Ok(index) => index,
            Err(after) => after.checked_sub(1)?,
        };
        self.all().get_mut(index)
    }

    /// Those from a key on.
    pub fn from(&mut self, key: u64) -> &mut [T] {
        let (Ok(index) | Err(index)) = self.index(key);
        self.all().get_mut(index..).unwrap_or_default()
    }

    /// Takes one in. False: its key is there, or there is no memory to note it.
    pub fn insert(&mut self, one: T) -> bool {
        let Err(index) = self.index(one.key()) else {
            return false;
        };
        if self.len == self.capacity && !self.grow() {
            return false;
        }
        // SAFETY: there is room for one more, and `index` is at most `len`.
        unsafe {
            let at = self.first.add(index);
            core::ptr::copy(at, at.add(1), self.len - index);
            at.write(one);
        }
        self.len += 1;
        true
    }

    /// Takes out the first that `which` picks.
    pub fn remove(&mut self, which: impl Fn(&T) -> bool) -> Option<T> {
        let index = self.all().iter().position(which)?;
        self.remove_index(index)
    }

    /// Takes out the one with a key.
    pub fn remove_at(&mut self, key: u64) -> Option<T> {
        let index = self.index(key).ok()?;
        self.remove_index(index)
    }

    fn remove_index(&mut self, index: usize) -> Option<T> {
        let found = *self.all().get(index)?;
        self.len -= 1;
        // SAFETY: `index` was inside, so as many as move lie behind it.
        unsafe {
            let at = self.first.add(index);
            core::ptr::copy(at.add(1), at, self.len - index);
        }
        Some(found)
    }

    /// Gives the memory back: an empty list.
    pub fn discard(&mut self) {
        if !self.first.is_null() {
            let bytes = self.capacity * size_of::<T>();
            // SAFETY: mapped in `grow` with that size, up to whole pages, and not used again.
            unsafe { sys::unmap_private(self.first.cast(), bytes) };
        }
        *self = Sorted::empty();
    }

    fn grow(&mut self) -> bool {
        let before_bytes = self.capacity * size_of::<T>();
        let bytes = (2 * before_bytes).max(FIRST_BYTES);
        let Ok(fresh) = sys::map_private(bytes) else {
            return false;
        };
        let fresh = fresh.cast::<T>();
        if !self.first.is_null() {
            // SAFETY: `len` of them from the old memory to the new, larger one; the old one
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

    impl Keyed for u64 {
        fn key(&self) -> u64 {
            *self
        }
    }

    #[test]
    fn they_are_found_by_key_and_in_order() {
        let mut sorted = Sorted::empty();
        assert!(sorted.at(0).is_none() && sorted.up_to(5).is_none() && sorted.from(0).is_empty());
        for n in [5, 1, 9, 3] {
            assert!(sorted.insert(n));
        }
        assert!(!sorted.insert(3), "a key is there once");
        assert_eq!(sorted.all(), [1, 3, 5, 9]);
        assert_eq!(sorted.at(3), Some(&mut 3));
        assert_eq!(sorted.at(4), None);
        assert_eq!(sorted.up_to(4), Some(&mut 3));
        assert_eq!(sorted.up_to(0), None);
        assert_eq!(sorted.from(4), [5, 9]);
        assert!(sorted.from(10).is_empty());
        assert_eq!(sorted.remove_at(3), Some(3));
        assert_eq!(sorted.remove(|n| *n > 5), Some(9));
        assert_eq!(sorted.all(), [1, 5]);
    }

    #[test]
    fn it_grows_and_forgets_nothing() {
        let mut sorted = Sorted::empty();
        let many = 3 * (FIRST_BYTES / size_of::<u64>()) as u64;
        for n in (1..=many).rev() {
            assert!(sorted.insert(n));
        }
        assert!((1..=many).all(|n| sorted.at(n) == Some(&mut { n })));
        for n in 1..=many {
            assert_eq!(sorted.remove_at(n), Some(n));
        }
        assert!(sorted.all().is_empty());
    }
}
