//! Physical memory that the application created itself (`cuMemCreate`), and its mappings.
//!
//! A block is the physical memory of one `cuMemCreate`. As the handle of a block, the application
//! gets a name from this library. The name stays the same when the driver's handle changes.
//!
//! The library copies only swappable blocks. A block is swappable while the whole block is mapped
//! exactly once, and only its own device may read and write it at that address. For example, torch
//! with `expandable_segments` maps blocks in this way, to let its segments grow. Any other block
//! leaves the device only in the driver's checkpoint.
//!
//! ```text
//! cuMemCreate ──> named ──cuMemMap──> mapped ──cuMemSetAccess──> swappable
//!                   ^                  │ ^  a second mapping, less access, │
//!                   └────cuMemUnmap────┘ └────────the context's end────────┘
//! ```

use affinode_cuda_sys::{ACCESS_READ_WRITE, LOCATION_DEVICE, MemAccessDesc, MemAllocationProp};

use super::allocations::AllocationPiece;
use super::chunked_map::{ChunkedMap, HasKey};

/// The highest bits of every name. A name is the value that the application gets in place of the
/// driver's handle. No handle, address or size has these bits.
const NAMES: u64 = 0xAFF1_0000_0000_0000;
const NAMES_MASK: u64 = 0xFFFF_0000_0000_0000;

/// Whether a handle that the application passed is a name, which this library has given out in
/// place of the driver's handle.
pub fn is_name(number: u64) -> bool {
    number & NAMES_MASK == NAMES
}

/// A block: physical memory that the application created with `cuMemCreate`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VmmHandle {
    /// Name of the block, which the application uses as its handle.
    pub name: u64,
    pub piece: AllocationPiece,
    /// Number of references to the block that the application holds by its name.
    references: u32,
    mappings: u32,
}

impl HasKey for VmmHandle {
    fn key(&self) -> u64 {
        self.name
    }
}

/// A mapping of a block, or of a part of it, at an address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct VmmMapping {
    address: u64,
    bytes: u64,
    offset: u64,
    block: u64,
}

impl HasKey for VmmMapping {
    fn key(&self) -> u64 {
        self.address
    }
}

/// Context, device and time of a driver call that changes the access to mapped memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MappingPart {
    /// The current context; 0: no context is current.
    pub context: usize,
    /// Ordinal of the context's device.
    pub device: i32,
    /// The time, from [`AllocationTables::now`](super::allocations::AllocationTables::now).
    pub now: u64,
}

/// Meaning of a handle that the application passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handle {
    /// The application passed the driver's own handle.
    Drivers,
    /// The application passed a name of this library. The value is the driver's handle of the named
    /// block.
    Named(u64),
    /// The application passed a name of this library, but has released all references to the named
    /// block.
    Stale,
}

/// What the caller must do after a reference to a block was released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandleRelease {
    /// Nothing, because the block is still referenced.
    Lives,
    /// Release this handle in the driver, because the last reference was released.
    Last(u64),
    /// Release this handle in the driver. The process imported the memory, for example from a
    /// copier. Another reference, for example an exported handle, may keep the memory allocated.
    Strays(u64),
}

/// Table of all blocks (memory that the application created with `cuMemCreate`) and their mappings.
/// The all-zero value is an empty table.
#[repr(C)]
pub struct VmmHandleTable {
    blocks: ChunkedMap<VmmHandle>,
    mappings: ChunkedMap<VmmMapping>,
    names_given: u64,
    swappable_bytes: u64,
}

impl VmmHandleTable {
    pub const fn empty() -> VmmHandleTable {
        VmmHandleTable {
            blocks: ChunkedMap::empty(),
            mappings: ChunkedMap::empty(),
            names_given: 0,
            swappable_bytes: 0,
        }
    }

    /// Total size of the blocks that are swappable now, in bytes.
    pub fn swappable_bytes(&self) -> u64 {
        self.swappable_bytes
    }

    /// Returns the block with this name. `None`: it does not exist.
    pub fn at(&mut self, name: u64) -> Option<&mut VmmHandle> {
        self.blocks.at(name)
    }

    /// Returns all blocks whose name is at least `name`, in the order of their names.
    pub fn from(&self, name: u64) -> impl Iterator<Item = &VmmHandle> {
        self.blocks.from(name)
    }

    /// Returns the first block whose name is at least `name` and for which `which` is true.
    pub fn find_from(
        &mut self,
        name: u64,
        which: impl Fn(&VmmHandle) -> bool,
    ) -> Option<&mut VmmHandle> {
        self.blocks.find_from(name, which)
    }

    /// Runs `body` on a block, and updates the sum of swappable bytes. `None`: no block has this
    /// name.
    fn change<R>(&mut self, name: u64, body: impl FnOnce(&mut VmmHandle) -> R) -> Option<R> {
        let block = self.blocks.at(name)?;
        let swappable =
            |piece: &AllocationPiece| if piece.is_swappable() { piece.bytes } else { 0 };
        let before = swappable(&block.piece);
        let result = body(block);
        self.swappable_bytes = self.swappable_bytes - before + swappable(&block.piece);
        Some(result)
    }

    /// Adds a new block and returns its name. `None`: no memory or no name is left.
    pub fn insert(&mut self, handle: u64, property: MemAllocationProp, bytes: u64) -> Option<u64> {
        let name = NAMES | (self.names_given + 1);
        let piece = AllocationPiece { handle, property, bytes, ..AllocationPiece::default() };
        let block = VmmHandle { name, piece, references: 1, mappings: 0 };
        if !is_name(name) || !self.blocks.insert(block) {
            return None;
        }
        self.names_given += 1;
        Some(name)
    }

    /// Resolves a handle that the application passed, which may be the driver's handle or a name.
    pub fn handle(&mut self, given: u64) -> Handle {
        if !is_name(given) {
            return Handle::Drivers;
        }
        match self.blocks.at(given).filter(|block| block.references > 0) {
            Some(block) => Handle::Named(block.piece.handle),
            None => Handle::Stale,
        }
    }

    /// Releases one reference of the application to the block with this name. The block must exist:
    /// [`Self::handle`] returns [`Handle::Named`] for its name.
    pub fn release(&mut self, name: u64) -> HandleRelease {
        self.change(name, |block| block.references = block.references.saturating_sub(1));
        self.bury(name)
    }

    /// Removes a block if it has no references and no mappings. Returns what the caller must do
    /// with its handle.
    fn bury(&mut self, name: u64) -> HandleRelease {
        let dead = |block: &&mut VmmHandle| block.references == 0 && block.mappings == 0;
        match self.blocks.at(name).filter(dead).map(|block| block.piece) {
            Some(piece) => {
                self.change(name, |block| block.piece.address = 0);
                self.blocks.remove_at(name);
                let strays = piece.may_stray();
                if strays {
                    HandleRelease::Strays(piece.handle)
                } else {
                    HandleRelease::Last(piece.handle)
                }
            }
            None => HandleRelease::Lives,
        }
    }

    /// Adds a reference to the block that is mapped at an address, and returns its name. `None`: no
    /// block is mapped there.
    pub fn retain(&mut self, address: u64) -> Option<u64> {
        let name = self.around(address)?.block;
        self.change(name, |block| block.references += 1)?;
        Some(name)
    }

    fn around(&mut self, address: u64) -> Option<VmmMapping> {
        let found = *self.mappings.up_to(address)?;
        (address.wrapping_sub(found.address) < found.bytes).then_some(found)
    }

    /// Marks a block as not swappable: every later copy out leaves it on the device.
    pub fn stay(&mut self, name: u64) {
        self.change(name, |block| block.piece.stays = true);
    }

    /// Marks all blocks that are mapped in a range as not swappable.
    pub fn stay_in(&mut self, address: u64, bytes: u64) {
        let mut next = address;
        while let Some(mapping) = self.touching(next, address.saturating_add(bytes)) {
            self.stay(mapping.block);
            next = mapping.address.saturating_add(mapping.bytes);
        }
    }

    /// The first mapping that overlaps a range.
    fn touching(&mut self, address: u64, end: u64) -> Option<VmmMapping> {
        if let Some(inside) = self.around(address).filter(|_| address < end) {
            return Some(inside);
        }
        self.mappings.from(address).next().copied().filter(|mapping| mapping.address < end)
    }

    /// Records that a block, or a part of it, was mapped at an address.
    pub fn map(&mut self, name: u64, address: u64, bytes: u64, offset: u64) {
        let noted =
            bytes > 0 && self.mappings.insert(VmmMapping { address, bytes, offset, block: name });
        self.change(name, |block| {
            block.mappings += u32::from(noted);
            // The application can read the memory only after cuMemSetAccess, so it is not swappable
            // yet.
            block.piece.address = 0;
            block.piece.stays |= !noted;
        });
    }

    /// Removes one mapping of a range that was unmapped, and returns what the caller must do for
    /// the mapping's block. `None`: the range has no mapping left. The caller repeats the call
    /// until then.
    pub fn unmap(&mut self, address: u64, bytes: u64) -> Option<HandleRelease> {
        let end = address.saturating_add(bytes);
        let first = self.mappings.from(address).next().copied();
        let mapping = first.filter(|mapping| mapping.address < end)?;
        self.mappings.remove_at(mapping.address);
        self.change(mapping.block, |block| {
            block.mappings = block.mappings.saturating_sub(1);
            block.piece.address = 0;
        });
        Some(self.bury(mapping.block))
    }

    /// Records which devices may access a range. The new access can make a block in the range
    /// swappable, or no longer swappable.
    pub fn set_access(
        &mut self,
        address: u64,
        bytes: u64,
        access: &[MemAccessDesc],
        MappingPart { context, device, now }: MappingPart,
    ) {
        let end = address.saturating_add(bytes);
        let mut next = address;
        while let Some(mapping) = self.touching(next, end) {
            next = mapping.address.saturating_add(mapping.bytes);
            let all = mapping.address >= address && next <= end;
            self.change(mapping.block, |block| {
                let piece = &mut block.piece;
                let own = piece.property.location_id;
                for one in access {
                    let is_own = one.location_type == LOCATION_DEVICE && one.location_id == own;
                    let usable = one.flags == ACCESS_READ_WRITE
                        && (mapping.offset, mapping.bytes) == (0, piece.bytes)
                        && block.mappings == 1;
                    if is_own && usable {
                        piece.address = mapping.address;
                        piece.context = if device == own { context } else { 0 };
                        piece.since = now;
                    } else if is_own {
                        piece.address = 0;
                    } else {
                        piece.stays |= one.flags != 0;
                    }
                }
                piece.stays |= !all;
            });
        }
    }

    /// Records that a context has ended. `before` is the time of its end. A block that got its
    /// access in this context before that time is no longer swappable, because no context is left
    /// in which the block could be copied.
    pub fn context_ends(&mut self, context: usize, before: u64) {
        let mut next = 0;
        while let Some(name) = self.name_from(next, context, before) {
            self.change(name, |block| block.piece.context = 0);
            next = name + 1;
        }
    }

    fn name_from(&mut self, name: u64, context: usize, before: u64) -> Option<u64> {
        let of_it = |piece: &AllocationPiece| piece.context == context && piece.since < before;
        self.blocks.from(name).find(|block| of_it(&block.piece)).map(|block| block.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const OWN: MemAccessDesc =
        MemAccessDesc { location_type: LOCATION_DEVICE, location_id: 0, flags: ACCESS_READ_WRITE };
    const HERE: MappingPart = MappingPart { context: 77, device: 0, now: 1 };

    fn one() -> (VmmHandleTable, u64) {
        let mut blocks = VmmHandleTable::empty();
        let name = blocks.insert(5, MemAllocationProp::default(), 2 * MIB).unwrap();
        (blocks, name)
    }

    /// A table with one block that is mapped and accessible, and its name.
    fn swappable() -> (VmmHandleTable, u64) {
        let (mut blocks, name) = one();
        blocks.map(name, 8 * MIB, 2 * MIB, 0);
        blocks.set_access(8 * MIB, 2 * MIB, &[OWN], HERE);
        assert_eq!(blocks.swappable_bytes(), 2 * MIB);
        (blocks, name)
    }

    #[test]
    fn block_is_swappable_while_mapped_with_access() {
        let (mut blocks, name) = one();
        assert_eq!(blocks.handle(name), Handle::Named(5));
        blocks.map(name, 8 * MIB, 2 * MIB, 0);
        assert_eq!(blocks.swappable_bytes(), 0, "a mapping without access rights is not swappable");
        blocks.set_access(8 * MIB, 2 * MIB, &[OWN], HERE);
        let piece = blocks.at(name).unwrap().piece;
        assert_eq!((piece.address, piece.context, piece.leaves()), (8 * MIB, 77, true));
        assert_eq!(blocks.unmap(8 * MIB, 2 * MIB), Some(HandleRelease::Lives));
        assert_eq!(blocks.unmap(8 * MIB, 2 * MIB), None);
        assert_eq!(blocks.swappable_bytes(), 0);
        assert_eq!(blocks.release(name), HandleRelease::Last(5));
        assert_eq!(blocks.handle(name), Handle::Stale);
        assert_eq!(blocks.handle(5), Handle::Drivers);
    }

    #[test]
    fn released_name_lives_on_in_its_mapping() {
        let (mut blocks, name) = swappable();
        assert_eq!(blocks.release(name), HandleRelease::Lives);
        assert_eq!(blocks.handle(name), Handle::Stale);
        assert_eq!(blocks.swappable_bytes(), 2 * MIB);
        assert_eq!(blocks.retain(9 * MIB), Some(name));
        assert_eq!(blocks.retain(10 * MIB), None);
        assert_eq!(blocks.handle(name), Handle::Named(5));
        assert_eq!(blocks.release(name), HandleRelease::Lives);
        assert_eq!(blocks.unmap(8 * MIB, 2 * MIB), Some(HandleRelease::Last(5)));
        assert_eq!(blocks.swappable_bytes(), 0);
    }

    #[test]
    fn partly_or_twice_mapped_block_is_the_drivers() {
        let (mut blocks, name) = swappable();
        blocks.map(name, 16 * MIB, 2 * MIB, 0);
        blocks.set_access(16 * MIB, 2 * MIB, &[OWN], HERE);
        assert_eq!(blocks.swappable_bytes(), 0, "a block at two addresses is not swappable");
        assert_eq!(blocks.unmap(16 * MIB, 2 * MIB), Some(HandleRelease::Lives));
        assert_eq!(blocks.swappable_bytes(), 0);
        blocks.set_access(8 * MIB, 2 * MIB, &[OWN], HERE);
        assert_eq!(blocks.swappable_bytes(), 2 * MIB);

        let part = blocks.insert(6, MemAllocationProp::default(), 4 * MIB).unwrap();
        blocks.map(part, 32 * MIB, 2 * MIB, 2 * MIB);
        blocks.set_access(32 * MIB, 2 * MIB, &[OWN], HERE);
        assert_eq!(blocks.swappable_bytes(), 2 * MIB, "only the first block is swappable");
    }

    #[test]
    fn block_that_others_reach_stays() {
        let other = MemAccessDesc { location_id: 1, ..OWN };
        for access in [&[OWN, other][..], &[other], &[MemAccessDesc { location_type: 3, ..OWN }]] {
            let (mut blocks, name) = swappable();
            blocks.set_access(8 * MIB, 2 * MIB, access, HERE);
            assert_eq!(blocks.swappable_bytes(), 0, "{access:?}");
            assert!(blocks.at(name).unwrap().piece.stays);
        }
        let (mut blocks, _) = swappable();
        blocks.set_access(8 * MIB, 2 * MIB, &[MemAccessDesc { flags: 0, ..other }], HERE);
        assert_eq!(blocks.swappable_bytes(), 2 * MIB, "access of another device revoked");
        blocks.set_access(8 * MIB, 2 * MIB, &[MemAccessDesc { flags: 1, ..OWN }], HERE);
        assert_eq!(blocks.swappable_bytes(), 0, "memory with read access only is not swappable");
        blocks.set_access(8 * MIB, 2 * MIB, &[OWN], MappingPart { context: 78, device: 1, now: 1 });
        assert_eq!(blocks.swappable_bytes(), 0, "no context could copy the block in");

        let (mut blocks, name) = swappable();
        blocks.stay_in(9 * MIB, 1);
        assert!(blocks.at(name).unwrap().piece.stays);
        let (mut blocks, name) = swappable();
        blocks.stay_in(10 * MIB, MIB);
        assert!(!blocks.at(name).unwrap().piece.stays);
    }

    /// If a block was imported and is marked to stay on the device, the release of its last
    /// reference must be reported as [`HandleRelease::Strays`], because other references may still
    /// keep the memory allocated.
    #[test]
    fn pinned_import_is_reported_when_released() {
        for (imported, stays) in [(true, true), (true, false), (false, true)] {
            let (mut blocks, name) = swappable();
            blocks.at(name).unwrap().piece.imported = imported;
            if stays {
                blocks.stay(name);
            }
            assert_eq!(blocks.release(name), HandleRelease::Lives);
            let last =
                if imported && stays { HandleRelease::Strays(5) } else { HandleRelease::Last(5) };
            assert_eq!(blocks.unmap(8 * MIB, 2 * MIB), Some(last));
        }
    }

    #[test]
    fn context_end_leaves_blocks_to_the_driver() {
        let (mut blocks, _) = swappable();
        blocks.context_ends(78, 2);
        blocks.context_ends(77, 1);
        assert_eq!(
            blocks.swappable_bytes(),
            2 * MIB,
            "another context or a later context has ended"
        );
        blocks.context_ends(77, 2);
        assert_eq!(blocks.swappable_bytes(), 0);
    }

    #[test]
    fn access_is_set_over_many_at_once() {
        let mut blocks = VmmHandleTable::empty();
        for n in 1..=4 {
            let name = blocks.insert(n, MemAllocationProp::default(), 2 * MIB).unwrap();
            blocks.map(name, n * 2 * MIB, 2 * MIB, 0);
        }
        blocks.set_access(2 * MIB, 6 * MIB, &[OWN], HERE);
        assert_eq!(blocks.swappable_bytes(), 6 * MIB);
        let mut ended = 0;
        while blocks.unmap(2 * MIB, 8 * MIB).is_some() {
            ended += 1;
        }
        assert_eq!((ended, blocks.swappable_bytes()), (4, 0));
    }
}
