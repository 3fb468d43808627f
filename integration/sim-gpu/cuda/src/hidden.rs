//! A simulated driver function that has no name in NVIDIA's API. So the preload library cannot hook
//! it.

use crate::abi::{CUresult, status};
use crate::driver::driver;
use crate::gate::Class;

/// Waits while the process is locked or checkpointed, then returns success.
#[unsafe(no_mangle)]
pub extern "C" fn affinode_sim_hidden_call() -> CUresult {
    status(driver().and_then(|driver| driver.gate.enter(Class::Work).map(drop)))
}
