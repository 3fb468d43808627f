//! The table of hooked functions. Each function has one entry and one stub, the code that callers
//! call instead of the function.
//!
//! The entry of an exported function is a static next to the exported symbol (`exports`). A
//! function that the application gets as an address has an entry in a pool. The entry is found by
//! the function's address, so that repeated look-ups return the same stub. The pool is a hash
//! table. Entries are added without a lock and never removed. So every entry stays consistent, even
//! if a thread stops or the process forks while an entry is added.

use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};

use affinode_cuda_sys::hook::{self, Class};
use affinode_proto::wire::counters::slot;

/// Entry of one hooked function. The thunk depends on this layout.
#[repr(C, align(16))]
pub struct HookEntry {
    /// Address of the real function. 0 if it is not known yet.
    real: AtomicUsize,
    /// Properties of the hook, packed into one word. Bits 0..32: number of the hook. Bits 32..48:
    /// offset, within a thread's slot, of the counter for its calls. Bits 48..56: 1 if its calls
    /// always take the slow path. Bits 56..64: class of the function.
    meta: AtomicU64,
}

/// Offsets within a [`HookEntry`], and its size, for the thunk's assembly code.
pub mod layout {
    /// Offset of `HookEntry::real`, usize.
    pub const REAL: usize = 0;
    /// Offset of the hook's number, u32.
    pub const NUMBER: usize = 8;
    /// Offset of a u16. Its value is again an offset: that of the counter within a thread's slot.
    pub const COUNTER: usize = 12;
    /// Offset of a u8, which is 1 if calls of the function always take the slow path.
    pub const THOROUGH: usize = 14;
    /// Size of an entry in bytes. A stub has the same size.
    pub const STRIDE: usize = 16;
}

const THOROUGH_BIT: u64 = 1 << 48;

const fn meta(number: u32, class: Class, thorough: bool) -> u64 {
    let counter = match class {
        Class::Poll | Class::Pointer | Class::Constant => slot::POLLS,
        _ => slot::CALLS,
    };
    number as u64
        | (counter as u64) << 32
        | if thorough { THOROUGH_BIT } else { 0 }
        | (class as u64) << 56
}

impl HookEntry {
    const fn empty() -> HookEntry {
        HookEntry { real: AtomicUsize::new(0), meta: AtomicU64::new(0) }
    }

    /// Creates the entry of an exported function. The real function is looked up at the first call.
    pub const fn exported(number: u32, class: Class) -> HookEntry {
        HookEntry { real: AtomicUsize::new(0), meta: AtomicU64::new(meta(number, class, true)) }
    }

    /// The number that identifies the hook.
    pub fn number(&self) -> u32 {
        self.meta.load(Ordering::Relaxed) as u32
    }

    /// The class of the hooked function.
    pub fn class(&self) -> Class {
        Class::from_u8((self.meta.load(Ordering::Relaxed) >> 56) as u8)
    }

    /// Address of the real function. 0 if it is not known yet.
    pub fn real(&self) -> usize {
        self.real.load(Ordering::Acquire)
    }

    /// Adds this entry to [`EXPORTED_WAITS`], the table of exported functions that wait for GPU
    /// work. Returns false if the table is full.
    fn is_noted(&'static self) -> bool {
        let own = core::ptr::from_ref(self).cast_mut();
        EXPORTED_WAITS.iter().any(|place| {
            let (order, none) = (Ordering::SeqCst, core::ptr::null_mut());
            let owner = place.compare_exchange(none, own, order, order);
            owner.is_ok() || owner == Err(own)
        })
    }

    /// If the function waits for GPU work, makes its calls take the slow path from now on.
    fn see_wait(&self) {
        // An incomplete entry has no class yet. The thread that completes the entry calls this
        // function afterwards.
        if (self.meta.load(Ordering::SeqCst) >> 56) as u8 == Class::Sync as u8 {
            self.meta.fetch_or(THOROUGH_BIT, Ordering::SeqCst);
        }
    }

    /// Returns the address of the real function. If it is not known yet, looks it up with `find`.
    pub fn resolve(&'static self, find: impl FnOnce(&[u8]) -> Option<usize>) -> Option<usize> {
        let known = self.real.load(Ordering::Acquire);
        if known != 0 {
            return Some(known);
        }
        let real = find(hook::name(self.number())?.as_bytes())?;
        self.real.store(real, Ordering::Release);
        // `see_waits` must be able to find each function that waits for work.
        if !self.class().is_thorough() && (self.class() != Class::Sync || self.is_noted()) {
            self.meta.fetch_and(!THOROUGH_BIT, Ordering::SeqCst);
            if SEES_WAITS.load(Ordering::SeqCst) {
                self.see_wait();
            }
        }
        Some(real)
    }
}

/// Number of entries in the pool. libcuda of CUDA 13 exports about 700 functions with all variants.
pub const POOL: usize = 1024;

/// The pool of entries for functions that the application gets as addresses, in the order of their
/// stubs.
pub static ENTRIES: [HookEntry; POOL] = [const { HookEntry::empty() }; POOL];

/// True once calls of [`Class::Sync`], which wait for GPU work, take the slow path. There the
/// library acts on such a wait, for example frees unused memory after it. Until then, these calls
/// take the fast path, like other calls.
static SEES_WAITS: AtomicBool = AtomicBool::new(false);

/// Entries of the exported functions that wait for GPU work.
static EXPORTED_WAITS: [AtomicPtr<HookEntry>; 8] =
    [const { AtomicPtr::new(core::ptr::null_mut()) }; 8];

/// Makes all calls that wait for GPU work take the slow path from now on. Until the first call of
/// this function, they take the fast path and have no extra cost.
pub fn see_waits() {
    if !SEES_WAITS.load(Ordering::Relaxed) && !SEES_WAITS.swap(true, Ordering::SeqCst) {
        ENTRIES.iter().for_each(HookEntry::see_wait);
        for place in &EXPORTED_WAITS {
            // SAFETY: null, or a static entry that `is_noted` wrote.
            if let Some(entry) = unsafe { place.load(Ordering::SeqCst).as_ref() } {
                entry.see_wait();
            }
        }
    }
}

/// Returns the index of the pool's entry for a real function, and adds the entry if it is new.
/// Returns `None` if the pool is full.
pub fn index_of(real: usize, number: u32, class: Class) -> Option<usize> {
    find_or_add(&ENTRIES, real, number, class)
}

fn find_or_add(entries: &[HookEntry], real: usize, number: u32, class: Class) -> Option<usize> {
    // Functions begin at multiples of 16, so the lowest four bits are always zero.
    let start = (real >> 4).wrapping_mul(0x9e37_79b9_7f4a_7c15_u64 as usize) >> 40;
    for step in 0..entries.len() {
        let index = (start + step) % entries.len();
        let entry = entries.get(index)?;
        let owner = entry
            .real
            .compare_exchange(0, real, Ordering::AcqRel, Ordering::Acquire)
            .unwrap_or_else(|owner| owner);
        if owner == 0 || owner == real {
            // Each thread that finds an incomplete entry completes it with the same values before
            // it returns the stub. So no thread waits for another thread.
            if entry.meta.load(Ordering::Acquire) == 0 {
                // The function's arguments may need a translation, see `swap::translate`.
                let thorough = class.is_thorough() || number == hook::UNLISTED;
                let meta = meta(number, class, thorough);
                entry.meta.store(meta, Ordering::SeqCst);
                if SEES_WAITS.load(Ordering::SeqCst) {
                    entry.see_wait();
                }
            }
            return Some(index);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_entry_per_function_until_the_pool_is_full() {
        let entries: Vec<HookEntry> = (0..64).map(|_| HookEntry::empty()).collect();
        let add = |real| find_or_add(&entries, real, 5, Class::Alloc);
        let mut indices: Vec<usize> = (1..=64).map(|n| add(n * 16).unwrap()).collect();
        assert_eq!(add(16), indices.first().copied());
        assert_eq!(add(65 * 16), None);
        indices.sort_unstable();
        indices.dedup();
        assert_eq!(indices.len(), 64);
        assert_eq!(entries[0].class(), Class::Alloc);
        assert_eq!(entries[0].number(), 5);
    }

    #[test]
    fn resolved_export_takes_the_fast_path() {
        let number = hook::find(b"cuStreamWaitEvent").unwrap().0;
        let entry: &HookEntry = Box::leak(Box::new(HookEntry::exported(number, Class::Work)));
        assert_eq!(entry.resolve(|_| None), None);
        assert_ne!(entry.meta.load(Ordering::Relaxed) & THOROUGH_BIT, 0);
        let found = entry.resolve(|name| (name == b"cuStreamWaitEvent").then_some(77));
        assert_eq!(found, Some(77));
        assert_eq!(entry.meta.load(Ordering::Relaxed) & THOROUGH_BIT, 0);
        assert_eq!(entry.resolve(|_| None), Some(77));
    }

    #[test]
    fn calls_that_wait_are_seen_once_they_are_to_be() {
        let entries: Vec<HookEntry> = (0..4).map(|_| HookEntry::empty()).collect();
        let add = |real, class| {
            let index = find_or_add(&entries, real, 5, class).unwrap();
            &entries[index]
        };
        let is_seen = |entry: &HookEntry| entry.meta.load(Ordering::Relaxed) & THOROUGH_BIT != 0;
        let (before, work) = (add(16, Class::Sync), add(32, Class::Work));
        assert!(SEES_WAITS.load(Ordering::Relaxed) || !is_seen(before));
        see_waits();
        entries.iter().for_each(HookEntry::see_wait);
        assert!(is_seen(before) && !is_seen(work) && is_seen(add(48, Class::Sync)));
    }

    #[test]
    fn an_exported_call_that_waits_is_seen_too() {
        let number = hook::find(b"cuCtxSynchronize").unwrap().0;
        let exported: &HookEntry = Box::leak(Box::new(HookEntry::exported(number, Class::Sync)));
        let is_seen = || exported.meta.load(Ordering::Relaxed) & THOROUGH_BIT != 0;
        assert_eq!(exported.resolve(|_| Some(77)), Some(77));
        assert!(
            SEES_WAITS.load(Ordering::Relaxed) || !is_seen(),
            "waits take the slow path too early"
        );
        see_waits();
        // Another test may have called `see_waits` before, without completing it.
        EXPORTED_WAITS.iter().for_each(|place| {
            // SAFETY: null, or a static entry that `is_noted` wrote.
            unsafe { place.load(Ordering::SeqCst).as_ref() }
                .into_iter()
                .for_each(HookEntry::see_wait);
        });
        assert!(is_seen());
    }
}
