//! The allocations that are carried, by address.

use crate::sys;

/// One allocation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Allocation {
    /// Where it begins.
    pub address: u64,
    /// What the application asked for, in bytes.
    pub asked_bytes: u64,
    /// What is reserved and mapped, in bytes.
    pub bytes: u64,
    /// The driver's handle of the physical memory.
    pub handle: u64,
    /// The context that was current.
    pub context: usize,
    /// Ordinal of the device.
    pub device: i32,
    /// 1 when it must stay: the application holds the physical memory by another way.
    pub stays: u32,
    /// Where it is.
    pub place: Place,
    /// Offset of its content in the pool, while the content is there.
    pub offset: u64,
}

/// Where the content of an allocation is.
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
}

impl Allocation {
    /// Whether it leaves the device when the rest does.
    pub fn leaves(&self) -> bool {
        self.stays == 0 && self.place == Place::Device
    }

    /// Whether an address lies inside.
    fn holds(&self, address: u64) -> bool {
        address.wrapping_sub(self.address) < self.bytes
    }
}

/// All of them in order of address, in memory of our own. Zero is an empty one.
#[repr(C)]
pub struct Table {
    first: *mut Allocation,
    len: usize,
    capacity: usize,
}

const FIRST_BYTES: usize = 64 * 1024;

impl Table {
    /// Without any.
    pub const fn empty() -> Table {
        Table { first: core::ptr::null_mut(), len: 0, capacity: 0 }
    }

    /// All of them.
    pub fn all(&mut self) -> &mut [Allocation] {
        if self.first.is_null() {
            return &mut [];
        }
        // SAFETY: `len` allocations were written here, in memory that is ours alone.
        unsafe { core::slice::from_raw_parts_mut(self.first, self.len) }
    }

    fn index(&mut self, address: u64) -> Result<usize, usize> {
        self.all().binary_search_by_key(&address, |a| a.address)
    }

    /// The one that begins at an address.
    pub fn at(&mut self, address: u64) -> Option<&mut Allocation> {
        let index = self.index(address).ok()?;
        self.all().get_mut(index)
    }

    /// The one that an address lies in.
    pub fn around(&mut self, address: u64) -> Option<&mut Allocation> {
        let index = match self.index(address) {
            Ok(index) => index,
            Err(after) => after.checked_sub(1)?,
        };
        self.all().get_mut(index).filter(|a| a.holds(address))
    }

    /// Takes one in. False: there is no memory to note it.
    pub fn insert(&mut self, allocation: Allocation) -> bool {
        let Err(index) = self.index(allocation.address) else {
            return false;
        };
        if self.len == self.capacity && !self.grow() {
            return false;
        }
        // SAFETY: there is room for one more, and `index` is at most `len`.
        unsafe {
            let at = self.first.add(index);
            core::ptr::copy(at, at.add(1), self.len - index);
            at.write(allocation);
        }
        self.len += 1;
        true
    }

    /// Takes out the first that `which` picks.
    pub fn remove(&mut self, which: impl Fn(&Allocation) -> bool) -> Option<Allocation> {
        let index = self.all().iter().position(which)?;
        self.remove_index(index)
    }

    /// Takes out the one that begins at an address.
    pub fn remove_at(&mut self, address: u64) -> Option<Allocation> {
        let index = self.index(address).ok()?;
        self.remove_index(index)
    }

    fn remove_index(&mut self, index: usize) -> Option<Allocation> {
        let found = *self.all().get(index)?;
        self.len -= 1;
        // SAFETY: `index` was inside, so as many as move lie behind it.
        unsafe {
            let at = self.first.add(index);
            core::ptr::copy(at.add(1), at, self.len - index);
        }
        Some(found)
    }

    fn grow(&mut self) -> bool {
        let before_bytes = self.capacity * size_of::<Allocation>();
        let bytes = (2 * before_bytes).max(FIRST_BYTES);
        let Ok(fresh) = sys::map_private(bytes) else {
            return false;
        };
        let fresh = fresh.cast::<Allocation>();
        if !self.first.is_null() {
            // SAFETY: `len` allocations from the old memory to the new, larger one; the old
            // one was mapped here and is not used again.
            unsafe {
                core::ptr::copy_nonoverlapping(self.first, fresh, self.len);
                sys::unmap_private(self.first.cast(), before_bytes);
            }
        }
        self.first = fresh;
        self.capacity = bytes / size_of::<Allocation>();
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allocation(n: u64) -> Allocation {
        Allocation { address: n * 100, asked_bytes: 50, bytes: 60, ..Allocation::default() }
    }

    #[test]
    fn allocations_are_found_by_any_address_inside() {
        let mut table = Table::empty();
        assert!(table.at(0).is_none() && table.around(5).is_none());
        for n in [5, 1, 9, 3] {
            assert!(table.insert(allocation(n)));
        }
        assert!(!table.insert(allocation(3)), "an address has one allocation");
        assert_eq!(table.all().iter().map(|a| a.address / 100).collect::<Vec<_>>(), [1, 3, 5, 9]);
        assert_eq!(table.at(300), Some(&mut allocation(3)));
        assert!(table.at(301).is_none());
        assert_eq!(table.around(359), Some(&mut allocation(3)));
        assert!(table.around(360).is_none() && table.around(99).is_none());
        assert_eq!(table.remove_at(300), Some(allocation(3)));
        assert!(table.around(310).is_none());
        assert_eq!(table.remove(|a| a.address > 500), Some(allocation(9)));
        assert_eq!(table.all().len(), 2);
    }

    #[test]
    fn it_grows_and_forgets_nothing() {
        let mut table = Table::empty();
        let many = 3 * (FIRST_BYTES / size_of::<Allocation>()) as u64;
        for n in (1..=many).rev() {
            assert!(table.insert(allocation(n)));
        }
        assert!((1..=many).all(|n| table.at(n * 100) == Some(&mut allocation(n))));
        for n in 1..=many {
            assert_eq!(table.remove_at(n * 100), Some(allocation(n)));
        }
        assert!(table.all().is_empty());
    }

    #[test]
    fn what_must_stay_does_not_leave() {
        assert!(allocation(1).leaves());
        assert!(!Allocation { stays: 1, ..allocation(1) }.leaves());
        assert!(!Allocation { place: Place::Pool, ..allocation(1) }.leaves());
    }
}
