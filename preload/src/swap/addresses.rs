//! Keeps the reserved address ranges of freed allocations for reuse. The next allocation of the
//! same size gets such a range, as in the driver's own allocator. This saves the time to reserve a
//! new range with its page tables: a quarter of the time of a `cuMemAlloc` of 2 MiB with its
//! `cuMemFree` (H200, driver 580.159).

use affinode_cuda_sys::result;

use super::driver::call;
use super::tables;

/// Maximum number of address ranges that are kept for reuse.
const MAX_RANGES: usize = 16;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct AddressRange {
    address: u64,
    /// Size of the range in bytes; 0: an unused entry.
    bytes: u64,
}

/// Reserved address ranges that are kept for reuse. They are freed when a context ends, because it
/// is undocumented whether reservations outlive a context. An all-zero value is an empty list.
#[repr(C)]
pub struct AddressReservations {
    kept: [AddressRange; MAX_RANGES],
    oldest: usize,
}

impl AddressReservations {
    pub const fn none() -> AddressReservations {
        AddressReservations { kept: [AddressRange { address: 0, bytes: 0 }; MAX_RANGES], oldest: 0 }
    }

    fn take(&mut self, bytes: u64) -> Option<u64> {
        let found = self.kept.iter_mut().find(|range| range.bytes == bytes)?;
        Some(core::mem::take(found).address)
    }

    fn take_any(&mut self) -> Option<AddressRange> {
        self.kept.iter_mut().find(|range| range.bytes > 0).map(core::mem::take)
    }

    /// Stores a range for reuse. If the list is full, the range replaces a stored range, which is
    /// returned.
    fn keep(&mut self, range: AddressRange) -> Option<AddressRange> {
        if let Some(free) = self.kept.iter_mut().find(|range| range.bytes == 0) {
            *free = range;
            return None;
        }
        let place = self.oldest % MAX_RANGES;
        self.oldest = place + 1;
        self.kept.get_mut(place).map(|oldest| core::mem::replace(oldest, range))
    }
}

/// Returns a reserved address range of this size, to which no memory is mapped. `None`: the driver
/// could not reserve a range.
pub fn reserve(bytes: usize) -> Option<u64> {
    if let Some(address) = tables(|tables| tables.addresses.take(bytes as u64)) {
        return Some(address);
    }
    let mut address = 0;
    let code = call!(mem_address_reserve(&raw mut address, bytes, 0, 0, 0));
    (code == result::SUCCESS).then_some(address)
}

/// Stores an unmapped address range for reuse. If the list is full, the range replaces a stored
/// range, which is freed in the driver.
pub fn free(address: u64, bytes: u64) {
    if let Some(oldest) = tables(|tables| tables.addresses.keep(AddressRange { address, bytes })) {
        call!(mem_address_free(oldest.address, oldest.bytes as usize));
    }
}

/// Frees all address ranges that are stored for reuse.
pub fn let_go() {
    while let Some(range) = tables(|tables| tables.addresses.take_any()) {
        call!(mem_address_free(range.address, range.bytes as usize));
    }
}

#[cfg(test)]
mod tests {
    use super::super::{fake_driver::Fake, prefault::tests::SHARED};
    use super::*;

    #[test]
    fn freed_addresses_are_reserved_once() {
        let _own = SHARED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let fake = Fake::new();
        let bytes = 4 << 20;
        let first = reserve(bytes).unwrap();
        free(first, bytes as u64);
        assert_eq!((reserve(bytes), fake.held().ranges), (Some(first), 1));
        let second = reserve(bytes).unwrap();
        assert_ne!(second, first);
        [first, second].into_iter().for_each(|address| free(address, bytes as u64));
        assert_eq!(fake.held().ranges, 2, "kept");
        let_go();
        assert_eq!(fake.held().ranges, 0);
    }

    fn range(n: u64) -> AddressRange {
        AddressRange { address: n << 30, bytes: 2 << 20 }
    }

    #[test]
    fn kept_addresses_serve_their_size_once() {
        let mut addresses = AddressReservations::none();
        assert_eq!(addresses.take(2 << 20), None);
        assert_eq!(addresses.keep(range(1)), None);
        assert_eq!(addresses.keep(AddressRange { bytes: 4 << 20, ..range(2) }), None);
        assert_eq!(addresses.take(6 << 20), None);
        assert_eq!(addresses.take(2 << 20), Some(1 << 30));
        assert_eq!(addresses.take(2 << 20), None, "handed out");
        assert_eq!(addresses.take(4 << 20), Some(2 << 30));
    }

    #[test]
    fn so_many_are_kept_and_none_is_forgotten() {
        let mut addresses = AddressReservations::none();
        for n in 0..MAX_RANGES as u64 {
            assert_eq!(addresses.keep(range(n)), None);
        }
        for n in 0..40 {
            assert_eq!(addresses.keep(range(n + MAX_RANGES as u64)), Some(range(n)), "the oldest");
        }
        let mut left: Vec<_> = core::iter::from_fn(|| addresses.take(2 << 20)).collect();
        left.sort_unstable();
        let last: Vec<_> = (40..40 + MAX_RANGES as u64).map(|n| n << 30).collect();
        assert_eq!(left, last);
    }
}
