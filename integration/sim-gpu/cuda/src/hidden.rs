//! A function of the driver without a name of NVIDIA's API, so that no hook finds it.

use crate::abi::{CUresult, status};
use crate::driver::driver;
use crate::gate::Class;

/// Returns success when the process is not locked. If the process is checkpointed, that is after
/// its restore.
#[unsafe(no_mangle)]
pub extern "C" fn affinode_sim_hidden_call() -> CUresult {
    status(driver().and_then(|driver| driver.gate.enter(Class::Work).map(drop)))
}
