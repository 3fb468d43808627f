//! Finds libcuda (the driver's library) among the loaded objects, and functions in it.
//!
//! Until [`keep`] has run, libcuda is found in the loader's list of objects. While a thread walks
//! that list, glibc holds a lock that it does not reset in a forked child. A child that is forked
//! during the walk would hang at its next `dlopen`. So after [`keep`], functions of the driver are
//! found without the list.

use core::sync::atomic::{AtomicUsize, Ordering};

use affinode_cuda_sys::CheckpointGetStateFn;

use crate::elf::{self, DynamicSection, LoadedObject};
use crate::{libc, sys};

/// Base address of the libcuda that [`keep`] keeps loaded, and the address of its dynamic section.
/// Both are 0 before that. They are also valid in a forked child, which has libcuda at the same
/// addresses.
static KEPT: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];

/// Keeps libcuda loaded for the life of the process. Takes the loader's lock.
pub fn keep() {
    let Some(map) = libc::keep_loaded(c"libcuda.so.1") else { return };
    // SAFETY: the loader describes a library that is never unloaded.
    let Some(dynamic) = (unsafe { DynamicSection::read(map.base, map.dynamic) }) else { return };
    if dynamic.function(b"cuInit").is_some() {
        let [base, section] = &KEPT;
        base.store(map.base, Ordering::Relaxed);
        section.store(map.dynamic as usize, Ordering::Release);
    }
}

/// Whether libcuda is kept loaded by [`keep`].
pub fn is_kept() -> bool {
    let [_, section] = &KEPT;
    section.load(Ordering::Acquire) != 0
}

fn kept() -> Option<DynamicSection> {
    let [base, section] = &KEPT;
    let entry = section.load(Ordering::Acquire) as *const [usize; 2];
    // SAFETY: both are of a library that is never unloaded.
    is_kept().then(|| unsafe { DynamicSection::read(base.load(Ordering::Relaxed), entry) })?
}

fn is_libcuda(object: &LoadedObject<'_>) -> bool {
    const STEM: &[u8] = b"libcuda.so";
    let file = object.name.rsplit(|byte| *byte == b'/').next();
    let by_path = file.is_some_and(|file| file.starts_with(STEM));
    let Some(dynamic) = object.dynamic() else {
        return false;
    };
    let by_soname = dynamic.soname().is_some_and(|name| name.starts_with(STEM));
    (by_path || by_soname) && dynamic.function(b"cuInit").is_some()
}

/// Returns the address of a function that libcuda exports. Returns `None` if there is no such
/// function, or no libcuda is loaded.
pub fn function(name: &[u8]) -> Option<usize> {
    #[cfg(test)]
    if let Some(fake) = crate::swap::fake_driver::function(name) {
        return Some(fake);
    }
    match kept() {
        Some(dynamic) => dynamic.function(name),
        None => elf::find(|object| if is_libcuda(object) { object.function(name) } else { None }),
    }
}

/// A function of libcuda whose address is looked up once, for calls that an allocation makes.
pub struct CachedFunction {
    name: &'static [u8],
    /// 0: not looked up yet.
    address: AtomicUsize,
}

impl CachedFunction {
    pub const fn new(name: &'static [u8]) -> CachedFunction {
        CachedFunction { name, address: AtomicUsize::new(0) }
    }

    /// Returns the address of the function, as [`function`] does. The address is stored only while
    /// libcuda cannot be unloaded.
    pub fn address(&self) -> Option<usize> {
        match self.address.load(Ordering::Relaxed) {
            0 => {
                let found = function(self.name)?;
                if is_kept() {
                    self.address.store(found, Ordering::Relaxed);
                }
                Some(found)
            }
            address => Some(address),
        }
    }
}

/// Calls `cuCheckpointProcessGetState` for this process, and returns its result code and the state.
/// Returns `None` if the driver lacks the function. The call works in every state. It waits for a
/// checkpoint step in progress.
pub fn checkpoint_state() -> Option<(u32, u32)> {
    let function = function(b"cuCheckpointProcessGetState")?;
    let mut state = 0;
    // SAFETY: the signature of cuCheckpointProcessGetState since it exists.
    let code = unsafe {
        let get: CheckpointGetStateFn = core::mem::transmute(function);
        get(sys::getpid() as i32, &raw mut state)
    };
    Some((code, state))
}

/// Whether an address is in the code of libcuda.
pub fn owns(address: usize) -> bool {
    // Pages that are known to be libcuda's code. Their number suffices to avoid the walk for most
    // of the hundreds of addresses that libcudart looks up.
    static KNOWN_PAGES: [AtomicUsize; 64] = [const { AtomicUsize::new(0) }; 64];
    const PAGE_BYTES: usize = 4096;
    let page = address / PAGE_BYTES;
    let known = KNOWN_PAGES.get(page % KNOWN_PAGES.len());
    if known.is_some_and(|known| known.load(Ordering::Relaxed) == page) {
        return true;
    }
    let owned =
        elf::find(|object| (object.contains_code(address) && is_libcuda(object)).then_some(()))
            .is_some();
    if owned && let Some(known) = known {
        known.store(page, Ordering::Relaxed);
    }
    owned
}
