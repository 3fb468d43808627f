//! System calls that need unsafe code. No other module of this crate contains unsafe code.
#![allow(unsafe_code)]

/// Returns whether the kernel wipes marked memory in a forked child (MADV_WIPEONFORK).
#[must_use]
pub fn wipe_on_fork_works() -> bool {
    use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous, munmap};
    const BYTES: std::num::NonZeroUsize = std::num::NonZeroUsize::new(4096).expect("not zero");
    // SAFETY: a new private mapping at an address of the kernel's choice, which no other code
    // touches, and which is unmapped below.
    let page = unsafe { mmap_anonymous(None, BYTES, ProtFlags::PROT_READ, MapFlags::MAP_PRIVATE) };
    let Ok(page) = page else {
        return false;
    };
    // SAFETY: the whole mapping from above; the advice only changes what a child would see.
    let advised = unsafe { madvise(page, BYTES.get(), MmapAdvise::MADV_WIPEONFORK) };
    // SAFETY: the mapping from above, to which no reference exists.
    let _ = unsafe { munmap(page, BYTES.get()) };
    advised.is_ok()
}
