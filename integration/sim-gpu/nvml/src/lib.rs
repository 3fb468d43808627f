//! The simulated GPU's management library, a replacement of NVIDIA's `libnvidia-ml.so.1`.
//!
//! Each call queries the daemon. The daemon returns device names, UUIDs, memory, utilisation over
//! the last second, and the host pids of the processes that hold VRAM. A checkpointed process is
//! not listed. Clocks, power, temperature, ECC, MIG and events are not simulated. Functions for
//! these values that tools often call return "not supported".

#![allow(
    unsafe_code,
    reason = "a C interface; the pointers are dealt with in affinode-sim-protocol"
)]
#![allow(non_snake_case, reason = "the exported names are NVIDIA's")]

mod device;
mod node;
mod system;

/// NVML's result code `nvmlReturn_t`. 0 means success.
type Return = i32;
type Outcome<T = ()> = Result<T, Return>;

const UNINITIALIZED: Return = 1;
const INVALID_ARGUMENT: Return = 2;
const NOT_SUPPORTED: Return = 3;
const NO_PERMISSION: Return = 4;
const NOT_FOUND: Return = 6;
const INSUFFICIENT_SIZE: Return = 7;
const DRIVER_NOT_LOADED: Return = 9;
const FUNCTION_NOT_FOUND: Return = 13;
const GPU_IS_LOST: Return = 15;
const ARGUMENT_VERSION_MISMATCH: Return = 25;

macro_rules! nvml_api {
    ($( fn $names:tt $arguments:tt $body:block )*) => {
        $( $crate::nvml_functions! { $names $arguments $body } )*
    };
}

macro_rules! nvml_functions {
    ([] $arguments:tt $body:block) => {};
    ([$name:ident $($more:ident)*] $arguments:tt $body:block) => {
        $crate::nvml_functions! { $name $arguments $body }
        $crate::nvml_functions! { [$($more)*] $arguments $body }
    };
    ($name:ident ( $($argument:ident: $type:ty),* $(,)? ) $body:block) => {
        /// NVML function of this name, as in NVIDIA's management interface.
        ///
        /// # Safety
        /// Each pointer is null, or valid for what the function does with it.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> $crate::Return {
            let work = || -> $crate::Outcome { $body };
            work().err().unwrap_or(0)
        }
    };
}

use {nvml_api, nvml_functions};
