//! Finds NVML among the loaded objects, and the function of each stub.

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use affinode_cuda_sys::nvml::{self, COUNT, Class};

use super::thunk::{SPARE, STUBS, stub};
use crate::elf::{self, LoadedObject};
use crate::{libc, lookup, process};

/// Address of the real function of each stub; 0: not known.
static REAL: [AtomicUsize; STUBS] = [const { AtomicUsize::new(0) }; STUBS];
/// Function of each spare stub, as its index plus one; 0: an unlisted function.
static SPARE_INDEX: [AtomicU32; SPARE] = [const { AtomicU32::new(0) }; SPARE];
/// Begin and end of NVML's code. They are those of the copy of NVML that was found first. Once a
/// copy is kept loaded, they are those of that copy.
static CODE: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];
/// Whether the copy of NVML in [`CODE`] is kept loaded for the life of the process.
static IS_HELD: AtomicBool = AtomicBool::new(false);

fn is_nvml(object: &LoadedObject<'_>) -> bool {
    const STEM: &[u8] = b"libnvidia-ml.so";
    let file = object.name.rsplit(|byte| *byte == b'/').next();
    let by_path = file.is_some_and(|file| file.starts_with(STEM));
    let Some(dynamic) = object.dynamic() else {
        return false;
    };
    let by_soname = dynamic.soname().is_some_and(|name| name.starts_with(STEM));
    (by_path || by_soname) && dynamic.function(b"nvmlInit_v2").is_some()
}

/// The address of a function that NVML exports. `None` also if NVML is not loaded.
pub fn function(name: &[u8]) -> Option<usize> {
    elf::find(|object| {
        if !is_nvml(object) {
            return None;
        }
        let found = object.function(name);
        if found.is_some() {
            know_code(object);
        }
        found
    })
}

/// Whether the address is in the code of a loaded copy of NVML.
pub fn owns(address: usize) -> bool {
    is_inside(address)
        || elf::find(|object| {
            let owned = object.contains_code(address) && is_nvml(object);
            owned.then(|| know_code(object))
        })
        .is_some()
}

fn know_code(object: &LoadedObject<'_>) {
    let [start, end] = &CODE;
    if let Some(range) = object.code()
        && start.load(Ordering::Relaxed) == 0
    {
        end.store(range.end, Ordering::Relaxed);
        start.store(range.start, Ordering::Release);
    }
}

/// Keeps the NVML library that was just initialised loaded for the life of the process. If it were
/// unloaded, the counts that this library keeps for NVML could become wrong. Must be called on the
/// application's thread, because it takes the loader's lock.
pub fn hold_loaded() {
    if IS_HELD.load(Ordering::Acquire) {
        return;
    }
    let Some(map) = libc::keep_loaded(c"libnvidia-ml.so.1") else { return };
    let section = map.dynamic as usize;
    let range = elf::find(|object| if object.contains(section) { object.code() } else { None });
    if let Some(range) = range {
        let [start, end] = &CODE;
        if start.load(Ordering::Relaxed) != range.start {
            start.store(0, Ordering::Release);
            end.store(range.end, Ordering::Relaxed);
            start.store(range.start, Ordering::Release);
        }
        IS_HELD.store(true, Ordering::Release);
    }
}

/// Whether the function of this stub is in the NVML library that is kept loaded.
pub fn is_held(place: u64) -> bool {
    IS_HELD.load(Ordering::Acquire) && real(place).is_some_and(is_inside)
}

/// Whether the address is in [`CODE`]. A call from such an address is a call by NVML itself, of a
/// name that this library also defines.
pub fn is_inside(address: usize) -> bool {
    let [start, end] = &CODE;
    let first = start.load(Ordering::Acquire);
    first != 0 && (first..end.load(Ordering::Relaxed)).contains(&address)
}

/// The address that the application gets for a function that a look-up has found.
pub fn hooked(name: &[u8], real: usize) -> usize {
    if process::is_disabled() || !owns(real) {
        return real;
    }
    let index = nvml::find(name);
    let own = index.and_then(|index| Some((index, REAL.get(index)?)));
    match own {
        Some((index, place)) if is_taken(place, real) => stub(index),
        _ => spare(index, real).map_or_else(
            || {
                lookup::leak();
                real
            },
            stub,
        ),
    }
}

fn is_taken(place: &AtomicUsize, real: usize) -> bool {
    let owner = place.compare_exchange(0, real, Ordering::AcqRel, Ordering::Acquire);
    owner.is_ok() || owner == Err(real)
}

/// Returns a spare stub for a function that has no stub: an unlisted function, or one of a second
/// copy of NVML.
fn spare(index: Option<usize>, real: usize) -> Option<usize> {
    let spares = REAL.get(COUNT..)?.iter().zip(&SPARE_INDEX);
    for (number, (place, known)) in spares.enumerate() {
        if is_taken(place, real) {
            known.store(index.map_or(0, |index| index as u32 + 1), Ordering::Release);
            return Some(COUNT + number);
        }
    }
    None
}

/// The real function behind a stub.
pub fn real(place: u64) -> Option<usize> {
    let known = REAL.get(place as usize)?;
    let address = known.load(Ordering::Acquire);
    if address != 0 {
        return Some(address);
    }
    // The program is linked to this name and calls it directly.
    let name = nvml::name(place as usize)?.as_bytes();
    let found = function(name).or_else(|| elf::find_function(name))?;
    let owner = known.compare_exchange(0, found, Ordering::AcqRel, Ordering::Acquire);
    Some(owner.err().unwrap_or(found))
}

/// The index of a stub's function in the list; `None`: unlisted.
pub fn index(place: u64) -> Option<usize> {
    let place = place as usize;
    match place.checked_sub(COUNT) {
        None => Some(place),
        Some(number) => (SPARE_INDEX.get(number)?.load(Ordering::Acquire) as usize).checked_sub(1),
    }
}

/// The class of a stub's function; unlisted functions are held.
pub fn class(place: u64) -> Class {
    index(place).map_or(Class::Held, nvml::class)
}
