//! NVML's function `nvmlDeviceSetMemoryLimits_v1`, which driver 615 and newer have. The crate
//! nvml-wrapper has no binding for it.

use std::{
    ffi::{CStr, c_char, c_void},
    path::Path,
};

use libloading::{Library, Symbol};
use nvml_wrapper::{
    Device,
    error::{NvmlError, nvml_try},
};

/// Value of NVML's `NVML_DEVICE_MEMORY_LIMIT_MAX`, with which a hard limit is removed.
const NO_LIMIT: u64 = u64::MAX;

/// NVML's C type `nvmlSetMemoryLimits_v1_t`: nvml.h of CUDA 13.4. It has no version field.
#[repr(C)]
struct SetMemoryLimits {
    /// Absolute path of a leaf folder of cgroup v2.
    name_space: *const c_char,
    soft_limit: u64,
    hard_limit: u64,
}

type Function = unsafe extern "C" fn(*mut c_void, *mut SetMemoryLimits) -> u32;

/// The function, and the library that contains it.
#[derive(Debug)]
pub struct MemoryLimits {
    library: Library,
}

impl MemoryLimits {
    /// Finds the function in NVML's library. Returns `None` if the library lacks the function, or
    /// cannot be opened.
    #[must_use]
    pub fn find(nvml: &Path) -> Option<MemoryLimits> {
        // SAFETY: the crate nvml-wrapper has opened this library already, so no constructor runs.
        let library = unsafe { Library::new(nvml) }.ok()?;
        let limits = MemoryLimits { library };
        limits.function().is_some().then_some(limits)
    }

    fn function(&self) -> Option<Symbol<'_, Function>> {
        // SAFETY: the type is that of NVML's function of this name. The function cannot outlive
        // the library, because it borrows it.
        unsafe { self.library.get(c"nvmlDeviceSetMemoryLimits_v1".to_bytes_with_nul()) }.ok()
    }

    /// Sets the maximum VRAM of a cgroup on a GPU, in bytes. `None` removes the limit. No VRAM is
    /// guaranteed to the cgroup (soft limit 0).
    ///
    /// # Errors
    /// [`NvmlError`]: the driver refuses the limit.
    pub fn set(
        &self,
        device: &Device<'_>,
        cgroup: &CStr,
        hard_limit_bytes: Option<u64>,
    ) -> Result<(), NvmlError> {
        let function = self.function().ok_or(NvmlError::FunctionNotFound)?;
        let mut limits = SetMemoryLimits {
            name_space: cgroup.as_ptr(),
            soft_limit: 0,
            hard_limit: hard_limit_bytes.unwrap_or(NO_LIMIT),
        };
        // SAFETY: the handle belongs to the same library, which NVML has initialised while `device`
        // exists. The structure and its text are valid during the call.
        nvml_try(unsafe { function(device.handle().cast(), &raw mut limits) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn library_without_the_function_is_told() {
        assert!(MemoryLimits::find(Path::new("libc.so.6")).is_none());
        assert!(MemoryLimits::find(Path::new("/nonexistent.so")).is_none());
    }

    #[test]
    fn structure_has_the_size_of_nvmls() {
        assert_eq!(size_of::<SetMemoryLimits>(), 24);
    }
}
