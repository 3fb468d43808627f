//! Detects hazards (uses of CUDA that make a checkpoint of the process unsafe) from the calls of a
//! process.

use core::ffi::{CStr, c_void};
use core::sync::atomic::{AtomicU32, Ordering};

use affinode_cuda_sys::hook::Class;
use affinode_cuda_sys::{
    LOCATION_DEVICE, MemAccessDesc, POINTER_ATTRIBUTE_DEVICE_ORDINAL, PointerGetAttributeFn,
};
use affinode_proto::wire::Hazards;

use crate::{libc, libcuda, sys, tools};

const NONE: Hazards = Hazards(0);

/// Returns the hazards that can be detected before the first CUDA call.
pub fn at_start() -> Hazards {
    let mut hazards = NONE;
    if libcuda::function(b"cuCheckpointProcessLock").is_none() {
        hazards.0 |= Hazards::NO_CHECKPOINT_API.0;
    }
    if uses_mps() || is_mps_program() {
        hazards.0 |= Hazards::MPS.0;
    }
    Hazards(hazards.0 | tools::in_environment().0)
}

/// Whether an MPS control daemon runs for this process. It is detected by the pipe `control` in the
/// folder in which libcuda searches for it.
fn uses_mps() -> bool {
    let folder = libc::environment(b"CUDA_MPS_PIPE_DIRECTORY").unwrap_or(b"/tmp/nvidia-mps");
    let mut path = [0; 256];
    let parts = folder.iter().chain(b"/control");
    if folder.len() + b"/control".len() >= path.len() {
        return false;
    }
    for (to, from) in path.iter_mut().zip(parts) {
        *to = *from;
    }
    CStr::from_bytes_until_nul(&path).is_ok_and(sys::exists)
}

/// Whether this process is the daemon or a server of MPS. A server works for clients in other
/// containers too, so its calls are never held, and its memory is never moved.
pub fn is_mps_program() -> bool {
    const UNKNOWN: u32 = 0;
    const NO: u32 = 1;
    const YES: u32 = 2;
    static FOUND: AtomicU32 = AtomicU32::new(UNKNOWN);
    let mut name = [0; 16];
    match FOUND.load(Ordering::Relaxed) {
        UNKNOWN => {
            // The kernel cuts the names of both programs to these 15 characters.
            let is_mps = sys::read_file(c"/proc/self/comm", &mut name)
                .is_some_and(|name| name.starts_with(b"nvidia-cuda-mps"));
            FOUND.store(if is_mps { YES } else { NO }, Ordering::Relaxed);
            is_mps
        }
        found => found == YES,
    }
}

/// Returns the hazards that a successful call adds to the process. `class` is the class of the
/// called function.
///
/// # Safety
/// `arguments` must be those of a function of this class that returned success.
pub unsafe fn of_call(class: Class, arguments: &[u64; 6]) -> Hazards {
    let [a, b, c, d, ..] = *arguments;
    match class {
        Class::Managed => Hazards::MANAGED_MEMORY,
        Class::Peer => Hazards::PEER_ACCESS,
        Class::Import => Hazards::SHARED_MEMORY,
        Class::Interop => Hazards::DIRECT_ACCESS,
        // The arguments are (address, size, descriptors, count).
        // SAFETY: the driver has read this array of descriptors without an error.
        Class::Access => unsafe { peer_access(c as *const MemAccessDesc, d, device_of(a)) },
        // The arguments are (pool, descriptors, count). The pool's own device has access from the
        // start, so such a call is about another device.
        // SAFETY: the driver has read this array of descriptors without an error.
        Class::PoolAccess => unsafe { peer_access(b as *const MemAccessDesc, c, None) },
        Class::Work
        | Class::Poll
        | Class::Alloc
        | Class::Memory
        | Class::Pointer
        | Class::Sync
        | Class::Table
        | Class::Constant
        | Class::MemoryInfo => NONE,
    }
}

/// Returns the hazard of peer access if the descriptors of a call give a device access to another
/// device's memory. `owner` is the device that contains the memory. `None`: every device in the
/// descriptors counts as another device.
///
/// # Safety
/// `descriptors` must point to `count` descriptors.
unsafe fn peer_access(
    descriptors: *const MemAccessDesc,
    count: u64,
    owner: Option<i32>,
) -> Hazards {
    if descriptors.is_null() {
        return NONE;
    }
    // SAFETY: the caller guarantees this number of descriptors.
    let descriptors = unsafe { core::slice::from_raw_parts(descriptors, count as usize) };
    let foreign = descriptors.iter().any(|descriptor| {
        descriptor.flags != 0
            && descriptor.location_type == LOCATION_DEVICE
            && owner != Some(descriptor.location_id)
    });
    if foreign { Hazards::PEER_ACCESS } else { NONE }
}

/// Returns the device on which the memory at an address is.
fn device_of(address: u64) -> Option<i32> {
    let get = libcuda::function(b"cuPointerGetAttribute")?;
    // SAFETY: this is the signature of cuPointerGetAttribute in every version.
    let get: PointerGetAttributeFn = unsafe { core::mem::transmute(get) };
    let mut ordinal = -1_i32;
    let at = (&raw mut ordinal).cast::<c_void>();
    // SAFETY: the attribute is an int, and `ordinal` is one.
    let result = unsafe { get(at, POINTER_ATTRIBUTE_DEVICE_ORDINAL, address) };
    (result == 0).then_some(ordinal)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(id: i32, flags: u32) -> MemAccessDesc {
        MemAccessDesc { location_type: LOCATION_DEVICE, location_id: id, flags }
    }

    fn of(descriptors: &[MemAccessDesc], owner: Option<i32>) -> Hazards {
        // SAFETY: a slice's own pointer and length.
        unsafe { peer_access(descriptors.as_ptr(), descriptors.len() as u64, owner) }
    }

    #[test]
    fn access_of_another_device_is_a_hazard() {
        assert_eq!(of(&[access(0, 3)], Some(0)), NONE);
        assert_eq!(of(&[access(0, 3), access(1, 3)], Some(0)), Hazards::PEER_ACCESS);
        assert_eq!(of(&[access(1, 0)], Some(0)), NONE, "access revoked");
        assert_eq!(of(&[access(0, 3)], None), Hazards::PEER_ACCESS, "unknown owner");
    }

    #[test]
    fn classes_say_what_they_mean() {
        for (class, hazards) in [
            (Class::Managed, Hazards::MANAGED_MEMORY),
            (Class::Peer, Hazards::PEER_ACCESS),
            (Class::Import, Hazards::SHARED_MEMORY),
            (Class::Interop, Hazards::DIRECT_ACCESS),
            (Class::Alloc, NONE),
        ] {
            // SAFETY: none of these looks at arguments.
            assert_eq!(unsafe { of_call(class, &[0; 6]) }, hazards);
        }
    }
}
