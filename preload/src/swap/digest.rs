//! Computes digests of device memory, which show what content the staging pool already contains.
//! The device computes them at the speed of its memory, about a hundred times faster than a copy to
//! the host.
//!
//! ```text
//! slot of the pool (2 MiB):  not known ──copied, with its digest──> known
//!                                ^                                    │ the same digest on the
//!                                └── about to be copied to, freed     │ device: not copied again
//!                                                                     └──> known
//! ```
//!
//! A digest has 128 bits and is not cryptographic: a process that crafts different content with the
//! same digest only damages its own memory.

use core::ffi::{c_char, c_void};

use affinode_cuda_sys::result;

use super::allocations::{AllocationId, AllocationPiece};
use super::contexts::in_context;
use super::driver::call;
use super::{loader_lock, tables};
use crate::{libc, sys};

/// Number of bytes that one digest covers.
pub const SLOT_BYTES: usize = 2 << 20;
const THREADS: u32 = 256;
const NAME: *const c_char = c"affinode_digest".as_ptr();
const IMAGE: &str = concat!(include_str!("digest.ptx"), "\0");

/// 128-bit checksum of the content of one slot. An all-zero value means that the content is
/// unknown.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Digest {
    low: u64,
    high: u64,
}

impl Digest {
    pub const UNKNOWN: Digest = Digest { low: 0, high: 0 };
    /// The digest of memory that is all zero; no other content has it.
    pub const ZERO: Digest = Digest { low: 0, high: u64::MAX };
    /// Marks a slot whose content is zero and is not stored. The mark replaces [`Self::ZERO`]. See
    /// the module `zeros`.
    pub const LEFT_OUT: Digest = Digest { low: 0, high: u64::MAX - 1 };

    /// Returns an entry that contains a memory address, as input of the digest kernel. The kernel
    /// replaces the entry by the digest of the memory at that address.
    pub(super) fn of_address(address: u64) -> Digest {
        Digest { low: address, high: 0 }
    }
}

/// Table with one digest for each slot of a staging pool. A forked child does not have the table's
/// memory. An all-zero value is an empty table.
#[repr(C)]
pub struct DigestTable {
    start: usize,
    many: usize,
}

impl DigestTable {
    pub const fn none() -> DigestTable {
        DigestTable { start: 0, many: 0 }
    }

    /// Returns a table of this many slots, all unknown. `None`: out of memory.
    pub fn unknown(many: usize) -> Option<DigestTable> {
        let start = sys::map_private(many.checked_mul(size_of::<Digest>())?).ok()?;
        Some(DigestTable { start: start as usize, many })
    }

    pub fn all(&self) -> &[Digest] {
        match self.start {
            0 => &[],
            // SAFETY: mapped with this length until this is dropped; any bytes are digests.
            start => unsafe { core::slice::from_raw_parts(start as *const Digest, self.many) },
        }
    }

    pub fn all_mut(&mut self) -> &mut [Digest] {
        match self.start {
            0 => &mut [],
            // SAFETY: mapped with this length until this is dropped, and `self` is borrowed
            // exclusively.
            start => unsafe { core::slice::from_raw_parts_mut(start as *mut Digest, self.many) },
        }
    }
}

impl Drop for DigestTable {
    fn drop(&mut self) {
        if self.start != 0 {
            // SAFETY: `unknown` has mapped the table, and no slice of the table is left.
            unsafe { sys::unmap_private(self.start as *mut u8, self.many * size_of::<Digest>()) };
        }
    }
}

/// Computes the digests of the pieces for which `which` is true. Returns them in a table for a
/// staging pool of `bytes` bytes. `None`: the device cannot compute digests now, or the size of a
/// piece is not a multiple of [`SLOT_BYTES`]. Digests of single pieces may stay unknown.
pub fn of(bytes: usize, which: fn(&AllocationPiece) -> bool) -> Option<DigestTable> {
    if !libc::are_stacks_large() || !loader_lock::is_loaded() {
        return None;
    }
    let odd =
        |piece: &AllocationPiece| which(piece) && !piece.bytes.is_multiple_of(SLOT_BYTES as u64);
    if tables(|tables| tables.next(AllocationId::FIRST, odd).is_some()) {
        return None;
    }
    let mut found = DigestTable::unknown(bytes / SLOT_BYTES)?;
    let mut context = 0;
    while let Some(next) = context_after(context, which) {
        context = next;
        of_context(context, which, found.all_mut())?;
    }
    Some(found)
}

/// Returns the lowest context above `context` that has a piece for which `which` is true. `None`:
/// there is no such context.
fn context_after(context: usize, which: fn(&AllocationPiece) -> bool) -> Option<usize> {
    let (mut from, mut least) = (AllocationId::FIRST, None);
    let later = |piece: &AllocationPiece| which(piece) && piece.context > context;
    tables(|tables| {
        while let Some((id, piece)) = tables.next(from, later) {
            from = id.next();
            least = Some(least.map_or(piece.context, |known: usize| known.min(piece.context)));
        }
    });
    least
}

fn of_context(
    context: usize,
    which: fn(&AllocationPiece) -> bool,
    found: &mut [Digest],
) -> Option<()> {
    let mut work = DigestTable::unknown(found.len())?;
    let mut device = -1;
    (in_context(context, || call!(ctx_get_device(&raw mut device))) == result::SUCCESS)
        .then_some(())?;
    // It is unknown whether a kernel of this context can read memory of another device.
    let here = |piece: &AllocationPiece| {
        which(piece) && piece.context == context && piece.property.location_id == device
    };
    tables(|tables| {
        let mut from = AllocationId::FIRST;
        while let Some((id, piece)) = tables.next(from, here) {
            from = id.next();
            let first = piece.offset as usize / SLOT_BYTES;
            let slots = work.all_mut().get_mut(first..first + piece.bytes as usize / SLOT_BYTES)?;
            for (slot, address) in slots.iter_mut().zip((piece.address..).step_by(SLOT_BYTES)) {
                *slot = Digest::of_address(address);
            }
        }
        Some(())
    })?;
    let code = in_context(context, || with_kernel(|kernel| run(kernel, work.all_mut())));
    (code == result::SUCCESS).then_some(())?;
    let made = work.all().iter().zip(found).filter(|(made, _)| **made != Digest::UNKNOWN);
    made.for_each(|(made, found)| *found = *made);
    Some(())
}

/// Loads and unloads the digest kernel once, without running it. Returns the driver's code.
pub fn load_once(context: usize) -> u32 {
    if !libc::are_stacks_large() {
        return result::NOT_SUPPORTED;
    }
    in_context(context, || with_kernel(|_| result::SUCCESS))
}

/// Loads the digest kernel, calls `run` with it, and unloads it, so that the context contains
/// nothing of the kernel when the driver moves it. The driver compiles the kernel on the calling
/// thread, which needs a large stack. This takes 0.25 ms, but longer for the first time in a
/// process.
fn with_kernel(run: impl FnOnce(usize) -> u32) -> u32 {
    let (mut module, mut kernel) = (0, 0);
    match call!(module_load_data(&raw mut module, IMAGE.as_ptr().cast::<c_void>())) {
        result::SUCCESS => {}
        code => return code,
    }
    let code = match call!(module_get_function(&raw mut kernel, module, NAME)) {
        result::SUCCESS => run(kernel),
        code => code,
    };
    call!(module_unload(module));
    code
}

fn run(kernel: usize, work: &mut [Digest]) -> u32 {
    const NON_BLOCKING: u32 = 1;
    let (mut table, mut stream) = (0, core::ptr::null_mut());
    match call!(mem_alloc(&raw mut table, size_of_val(work))) {
        result::SUCCESS => {}
        code => return code,
    }
    let code = match call!(stream_create(&raw mut stream, NON_BLOCKING)) {
        result::SUCCESS => {
            let code = run_on(kernel, table, work, stream);
            // Synchronise also after a failure: the device must not use the table after it is
            // freed.
            let finished = call!(stream_synchronize(stream));
            call!(stream_destroy(stream));
            if code == result::SUCCESS { finished } else { code }
        }
        code => code,
    };
    call!(mem_free(table));
    code
}

fn run_on(kernel: usize, mut table: u64, work: &mut [Digest], stream: *mut c_void) -> u32 {
    let (bytes, mut many) = (size_of_val(work), work.len() as u32);
    match call!(copy_in(table, work.as_ptr().cast(), bytes, stream)) {
        result::SUCCESS => {}
        code => return code,
    }
    let mut arguments = [
        (&raw mut table).cast::<c_void>(),
        (&raw mut many).cast::<c_void>(),
        core::ptr::null_mut(),
    ];
    let arguments = arguments.as_mut_ptr();
    let none = core::ptr::null_mut();
    match call!(launch_kernel(kernel, many, 1, 1, THREADS, 1, 1, 0, stream, arguments, none)) {
        result::SUCCESS => call!(copy_out(work.as_mut_ptr().cast(), table, bytes, stream)),
        code => code,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_digests_are_unknown() {
        let mut digests = DigestTable::unknown(3).unwrap();
        assert_eq!(digests.all(), [Digest::UNKNOWN; 3]);
        digests.all_mut()[1] = Digest::of_address(7);
        assert_eq!(digests.all()[1], Digest { low: 7, high: 0 });
        assert!(DigestTable::none().all().is_empty());
    }

    #[test]
    fn image_ends_with_zero_and_has_the_kernel() {
        assert!(IMAGE.ends_with('\0') && !IMAGE.trim_end_matches('\0').contains('\0'));
        assert!(IMAGE.contains(".entry affinode_digest("));
    }
}
