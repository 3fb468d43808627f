//! Finds NVML among the loaded objects, and the real NVML function for each stub.

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use affinode_cuda_sys::nvml::{self, COUNT, Class};

use super::thunk::{SPARE, STUBS, stub};
use crate::elf::{self, LoadedObject};
use crate::{libc, lookup, process};

/// Address of the real function of each stub. 0 if it is not known.
static REAL: [AtomicUsize; STUBS] = [const { AtomicUsize::new(0) }; STUBS];
/// NVML function of each spare stub: its index in this library's list of NVML functions, plus one.
/// 0 if the list does not contain the function.
static SPARE_INDEX: [AtomicU32; SPARE] = [const { AtomicU32::new(0) }; SPARE];
/// Begin and end address of NVML's code. If several copies of NVML are loaded, this is the copy
/// that is kept loaded, or else the copy that was found first.
static CODE: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];
/// Whether the copy of NVML at the address range [`CODE`] is kept loaded for the life of the
/// process.
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

/// Returns the address of a function that NVML exports. Returns `None` if there is no such
/// function, or NVML is not loaded.
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

/// Keeps the NVML library that was just initialised loaded for the life of the process. If the
/// application unloaded NVML, this library's counts of NVML's initialisations would become wrong.
/// Must be called on the application's thread, because it takes the loader's lock.
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

/// Whether this stub's function belongs to the copy of NVML that is kept loaded.
pub fn is_held(place: u64) -> bool {
    IS_HELD.load(Ordering::Acquire) && real(place).is_some_and(is_inside)
}

/// Whether the address is in the range [`CODE`]. If the caller of a stub is at such an address,
/// NVML has called its own function through this library's exported symbol.
pub fn is_inside(address: usize) -> bool {
    let [start, end] = &CODE;
    let first = start.load(Ordering::Acquire);
    first != 0 && (first..end.load(Ordering::Relaxed)).contains(&address)
}

/// Returns the address to give to the application for an NVML function that a look-up has found:
/// its stub, or the function itself if no stub is free.
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

/// Allocates a spare stub for a function that has no stub of its own. Such a function is not in
/// this library's list, or belongs to a second copy of NVML. Returns the stub's number. `None`: no
/// spare stub is free.
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

/// Returns the address of the real function behind a stub.
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

/// Returns the index of a stub's function in this library's list of NVML functions. Returns `None`
/// if the list does not contain the function.
pub fn index(place: u64) -> Option<usize> {
    let place = place as usize;
    match place.checked_sub(COUNT) {
        None => Some(place),
        Some(number) => (SPARE_INDEX.get(number)?.load(Ordering::Acquire) as usize).checked_sub(1),
    }
}

/// Returns the class of a stub's function. A function that is not in this library's list has the
/// class `Held`.
pub fn class(place: u64) -> Class {
    index(place).map_or(Class::Held, nvml::class)
}
