//! NVML functions that concern the library and the node, not a device.

use std::ffi::{CStr, c_char};

use affinode_sim_protocol::{CUDA_VERSION, DRIVER_VERSION, LIMITS_DRIVER_VERSION, Out};

use crate::node::{gpus, init, put, put_text, shutdown, wait_until_unlocked};
use crate::{Return, nvml_api};

nvml_api! {
    fn [nvmlInit nvmlInit_v2] () { init() }
    fn nvmlInitWithFlags(_flags: u32) { init() }
    fn nvmlShutdown() { shutdown() }
    fn nvmlSystemGetDriverVersion(version: Out<c_char>, room: u32) {
        let has_limits = gpus()?.iter().any(|gpu| gpu.info.memory_limits);
        put_text(version, room, if has_limits { LIMITS_DRIVER_VERSION } else { DRIVER_VERSION })
    }
    fn nvmlSystemGetNVMLVersion(version: Out<c_char>, room: u32) { put_text(version, room, "13.580.0-simulated") }
    fn [nvmlSystemGetCudaDriverVersion nvmlSystemGetCudaDriverVersion_v2] (version: Out<i32>) {
        wait_until_unlocked();
        put(version, CUDA_VERSION)
    }
    fn [nvmlDeviceGetCount nvmlDeviceGetCount_v2] (count: Out<u32>) { put(count, gpus()?.len() as u32) }
}

/// Simulates the function `nvmlErrorString`, which returns the text of a result code.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlErrorString(result: Return) -> *const c_char {
    let text: &CStr = match result {
        0 => c"The operation was successful",
        crate::UNINITIALIZED => c"Uninitialized",
        crate::INVALID_ARGUMENT => c"Invalid Argument",
        crate::NOT_SUPPORTED => c"Not Supported",
        crate::NO_PERMISSION => c"Insufficient Permissions",
        crate::NOT_FOUND => c"Not Found",
        crate::INSUFFICIENT_SIZE => c"Insufficient Size",
        crate::DRIVER_NOT_LOADED => c"Driver Not Loaded",
        crate::FUNCTION_NOT_FOUND => c"Function Not Found",
        crate::GPU_IS_LOST => c"GPU is lost",
        crate::ARGUMENT_VERSION_MISMATCH => c"Argument version mismatch",
        _ => c"Unknown Error",
    };
    text.as_ptr()
}
