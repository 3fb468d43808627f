//! Proof of free device memory for a return without a controller, from NVML. Loaded
//! only in that emergency.

use core::ffi::{CStr, c_void};

use crate::{libc, lookup};

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Default)]
struct Memory {
    total_bytes: u64,
    free_bytes: u64,
    used_bytes: u64,
}

type Init = unsafe extern "C" fn() -> u32;
type Count = unsafe extern "C" fn(*mut u32) -> u32;
type ByIndex = unsafe extern "C" fn(u32, *mut *mut c_void) -> u32;
type MemoryInfo = unsafe extern "C" fn(*mut c_void, *mut Memory) -> u32;

struct Nvml {
    count: Count,
    by_index: ByIndex,
    memory: MemoryInfo,
}

/// Whether so many bytes are free on every device that the process can see: on which it
/// held its memory, only the driver knows. True when NVML cannot be asked.
pub fn has_room(vram_bytes: u64) -> bool {
    let Some(nvml) = Nvml::load() else {
        return true;
    };
    nvml.least_free_bytes().is_none_or(|free_bytes| free_bytes >= vram_bytes)
}

impl Nvml {
    fn load() -> Option<Nvml> {
        let handle = libc::dlopen(c"libnvidia-ml.so.1")?;
        let dlsym = lookup::real_dlsym()?;
        let symbol = |name: &CStr| {
            // SAFETY: a live handle and a valid name.
            let address = unsafe { dlsym(handle, name.as_ptr()) };
            (address != 0).then_some(address)
        };
        // SAFETY: NVML's documented signatures; initialising is counted and idempotent.
        unsafe {
            let init: Init = core::mem::transmute(symbol(c"nvmlInit_v2")?);
            if init() != 0 {
                return None;
            }
            Some(Nvml {
                count: core::mem::transmute::<usize, Count>(symbol(c"nvmlDeviceGetCount_v2")?),
                by_index: core::mem::transmute::<usize, ByIndex>(symbol(
                    c"nvmlDeviceGetHandleByIndex_v2",
                )?),
                memory: core::mem::transmute::<usize, MemoryInfo>(symbol(
                    c"nvmlDeviceGetMemoryInfo",
                )?),
            })
        }
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
