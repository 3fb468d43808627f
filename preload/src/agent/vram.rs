//! Proof of free device memory for a return without a controller, from NVML.
//!
//! NVML is loaded before the gate closes: a thread that is held may be one that the
//! loader's lock waits for (it runs the constructor of a library). After that, only
//! its functions are looked up, without that lock.

use core::ffi::c_void;

use crate::{elf, libc};

const FILE: &core::ffi::CStr = c"libnvidia-ml.so.1";

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Default)]
struct Memory {
    total_bytes: u64,
    free_bytes: u64,
    used_bytes: u64,
}

type Plain = unsafe extern "C" fn() -> u32;
type Count = unsafe extern "C" fn(*mut u32) -> u32;
type ByIndex = unsafe extern "C" fn(u32, *mut *mut c_void) -> u32;
type MemoryInfo = unsafe extern "C" fn(*mut c_void, *mut Memory) -> u32;

struct Nvml {
    shutdown: Plain,
    count: Count,
    by_index: ByIndex,
    memory: MemoryInfo,
}

/// Loads NVML, if the container has it. Nobody may be held at the gate meanwhile.
pub fn prepare() {
    if function(b"nvmlInit_v2").is_none() {
        let _ = libc::dlopen(FILE);
    }
}

fn function(name: &[u8]) -> Option<usize> {
    elf::find(|object| {
        let dynamic = object.dynamic()?;
        if dynamic.soname()?.starts_with(b"libnvidia-ml.so") {
            dynamic.function(name)
        } else {
            None
        }
    })
}

/// Whether so many bytes are free on every device that the process can see: on which it
/// held its memory, only the driver knows. True when NVML cannot be asked.
pub fn has_room(vram_bytes: u64) -> bool {
    let Some(nvml) = Nvml::start() else {
        return true;
    };
    nvml.least_free_bytes().is_none_or(|free_bytes| free_bytes >= vram_bytes)
}

impl Drop for Nvml {
    fn drop(&mut self) {
        // SAFETY: initialised by `start`; NVML counts.
        let _ = unsafe { (self.shutdown)() };
    }
}

impl Nvml {
    fn start() -> Option<Nvml> {
        // SAFETY: NVML's documented signatures of these functions.
        let (init, nvml) = unsafe {
            use core::mem::transmute;
            let nvml = Nvml {
                shutdown: transmute::<usize, Plain>(function(b"nvmlShutdown")?),
                count: transmute::<usize, Count>(function(b"nvmlDeviceGetCount_v2")?),
                by_index: transmute::<usize, ByIndex>(function(b"nvmlDeviceGetHandleByIndex_v2")?),
                memory: transmute::<usize, MemoryInfo>(function(b"nvmlDeviceGetMemoryInfo")?),
            };
            (transmute::<usize, Plain>(function(b"nvmlInit_v2")?), nvml)
        };
        // SAFETY: may be called at any time, any number of times.
        if unsafe { init() } != 0 {
            core::mem::forget(nvml);
            return None;
        }
        Some(nvml)
    }

    fn least_free_bytes(&self) -> Option<u64> {
        let mut devices = 0;
        // SAFETY: room for one count.
        if unsafe { (self.count)(&raw mut devices) } != 0 {
            return None;
        }
        let mut least = None;
        for index in 0..devices {
            let mut device = core::ptr::null_mut();
            let mut memory = Memory::default();
            // SAFETY: room for one handle; then a handle that NVML has just given.
            let code = unsafe {
                match (self.by_index)(index, &raw mut device) {
                    0 => (self.memory)(device, &raw mut memory),
                    code => code,
                }
            };
            if code == 0 {
                let free_bytes = memory.free_bytes;
                least = Some(least.map_or(free_bytes, |least: u64| least.min(free_bytes)));
            }
        }
        least
    }
}
