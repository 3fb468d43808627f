//! The functions that the simulated libcuda exports, in one list per subject. The macro `cuda_api`
//! defines a list:
//!
//! ```text
//! cuda_api! {
//!     Work 3020 fn [cuMemcpyHtoD_v2 cuMemcpyHtoD_v2_ptds] (to: CUdeviceptr, ...) |d, zero| { ... }
//! }    |    |       |               |                                            |   └ what stream 0 means
//!      |    |       |               └ variant for per-thread default streams     └ the driver
//!      |    |       └ exported name
//!      |    └ first CUDA version that has the function, for cuGetProcAddress
//!      └ class of the function, which determines what a call does at the gate
//! ```

mod allocation;
mod checkpoint;
mod context;
mod copy;
mod device;
mod entry;
mod event;
mod ipc;
mod module;
mod pointer;
mod pool;
mod stream;
mod vmm;

use std::ffi::c_void;

use crate::abi::{Outcome, status};
use crate::contexts::Default0;
use crate::driver::{Driver, driver};
use crate::gate::Class;

/// One exported function, as `cuGetProcAddress` finds it.
pub struct Symbol {
    pub name: &'static str,
    pub since: i32,
    pub address: Address,
}

/// Address of an exported function.
#[derive(Clone, Copy)]
pub struct Address(pub *const c_void);

// SAFETY: the pointer is the address of a function. It never changes, and nothing is written
// through it.
unsafe impl Sync for Address {}

/// Returns the functions of all lists.
pub fn symbols() -> impl Iterator<Item = &'static Symbol> {
    let lists = [
        allocation::SYMBOLS,
        checkpoint::SYMBOLS,
        context::SYMBOLS,
        copy::SYMBOLS,
        device::SYMBOLS,
        entry::SYMBOLS,
        event::SYMBOLS,
        ipc::SYMBOLS,
        module::SYMBOLS,
        pointer::SYMBOLS,
        pool::SYMBOLS,
        stream::SYMBOLS,
        vmm::SYMBOLS,
    ];
    lists.into_iter().flatten().copied().flatten()
}

/// Runs one driver function that needs `cuInit`. Returns an error if the driver is not initialised,
/// or if this process was forked after `cuInit`. Otherwise passes the gate, and calls the function.
fn call(
    class: Class,
    zero: Default0,
    work: impl FnOnce(&'static Driver, Default0) -> Outcome,
) -> i32 {
    let outcome = driver().and_then(|driver| {
        let _inside = driver.gate.enter(class)?;
        if class != Class::Instant {
            driver.streams.check()?;
        }
        work(driver, zero)
    });
    status(outcome)
}

macro_rules! cuda_api {
    ($( $class:ident $since:literal fn $names:tt $arguments:tt |$d:ident, $zero:ident| $body:block )*) => {
        $( $crate::api::cuda_function! { $class $names $arguments |$d, $zero| $body } )*
        /// The driver functions that this list exports.
        pub const SYMBOLS: &[&[$crate::api::Symbol]] = &[ $( $crate::api::cuda_symbols!($names, $since), )* ];
    };
}

macro_rules! cuda_function {
    ($class:ident [$name:ident $per_thread:ident] $arguments:tt |$d:ident, $zero:ident| $body:block) => {
        $crate::api::cuda_function! { $class $name Legacy $arguments |$d, $zero| $body }
        $crate::api::cuda_function! { $class $per_thread PerThread $arguments |$d, $zero| $body }
    };
    ($class:ident $name:ident ( $($argument:tt)* ) |$d:ident, $zero:ident| $body:block) => {
        $crate::api::cuda_function! { $class $name Legacy ( $($argument)* ) |$d, $zero| $body }
    };
    (Always $name:ident $means:ident ( $($argument:ident: $type:ty),* $(,)? ) |$d:ident, $zero:ident| $body:block) => {
        /// Driver function of this name, as in NVIDIA's driver interface.
        ///
        /// # Safety
        /// Each pointer is null, or valid for what the function does with it.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> $crate::abi::CUresult {
            let work = || -> $crate::abi::Outcome { $body };
            $crate::abi::status(work())
        }
    };
    ($class:ident $name:ident $means:ident ( $($argument:ident: $type:ty),* $(,)? ) |$d:ident, $zero:ident| $body:block) => {
        /// Driver function of this name, as in NVIDIA's driver interface.
        ///
        /// # Safety
        /// Each pointer is null, or valid for what the function does with it.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> $crate::abi::CUresult {
            let zero = $crate::contexts::Default0::$means;
            $crate::api::call($crate::gate::Class::$class, zero, |$d, $zero| $body)
        }
    };
}

macro_rules! cuda_symbols {
    ([$($name:ident)*], $since:literal) => {
        &[$( $crate::api::Symbol {
            name: stringify!($name),
            since: $since,
            address: $crate::api::Address($name as *const std::ffi::c_void),
        } ),*]
    };
    ($name:ident, $since:literal) => {
        $crate::api::cuda_symbols!([$name], $since)
    };
}

use {cuda_api, cuda_function, cuda_symbols};
