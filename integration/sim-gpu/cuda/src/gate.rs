//! The gate of the simulated driver, at which calls wait while the checkpoint API has locked or
//! checkpointed the process.
//!
//! ```text
//!            close (waits for calls inside, then streams)     save           restore     open
//!  Running ──────────────────────────────────────────> Closed ──> Checkpointed ──> Closed ──────> Running
//!     ^                time is up                         │
//!     └───────────────────────────────────────────────────┘
//! ```
//!
//! | [`Class`] | in Closed | in Checkpointed |
//! | --- | --- | --- |
//! | `Work`: launches, copies, memory, stream create, event record | waits for Running | waits for Running |
//! | `Sync`: the five functions that synchronise or query a stream, an event or the context | waits for Running | **SIGSEGV**, as the real driver does |
//! | `MemInfo`: `cuMemGetInfo`, `cuDeviceGetName` | waits for Running | error 304 |
//! | `Instant`: attributes, current context | returns | returns |

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::abi::{CUresult, OPERATING_SYSTEM};

/// Class of a driver function. It determines what a call does at the gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// The function needs `cuInit` but no GPU. (Functions of class `Always` in the lists work even
    /// before `cuInit`.)
    Instant,
    Work,
    /// The function reads GPU state. This state does not exist while the process is checkpointed.
    Sync,
    MemInfo,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Running,
    Closed,
    Checkpointed,
}

#[derive(Debug)]
struct Inner {
    phase: Phase,
    inside: usize,
}

/// Counts the calls in progress inside the driver, and makes new calls wait while it is closed.
#[derive(Debug)]
pub struct Gate {
    inner: Mutex<Inner>,
    changed: Condvar,
}

/// A call in progress inside the driver. It ends when this value is dropped.
pub struct Inside<'a>(Option<&'a Gate>);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        if let Some(gate) = self.0 {
            gate.lock().inside -= 1;
            gate.changed.notify_all();
        }
    }
}

impl Gate {
    pub fn new() -> Self {
        Self {
            inner: Mutex::new(Inner { phase: Phase::Running, inside: 0 }),
            changed: Condvar::new(),
        }
    }

    /// Admits a call into the driver. Depending on the state and the class, the call waits, fails,
    /// or ends the process.
    pub fn enter(&self, class: Class) -> Result<Inside<'_>, CUresult> {
        if class == Class::Instant {
            return Ok(Inside(None));
        }
        let mut inner = self.lock();
        if inner.phase == Phase::Checkpointed {
            match class {
                Class::Sync => segfault(),
                Class::MemInfo => return Err(OPERATING_SYSTEM),
                _ => {}
            }
        }
        while inner.phase != Phase::Running {
            inner = self.changed.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
        inner.inside += 1;
        Ok(Inside(Some(self)))
    }

    /// Closes the gate, then waits until no call is inside the driver. If calls remain at the
    /// deadline, opens the gate again and returns false.
    pub fn close(&self, deadline: Option<Instant>) -> bool {
        let mut inner = self.lock();
        inner.phase = Phase::Closed;
        while inner.inside > 0 {
            match wait_until(&self.changed, inner, deadline) {
                Some(woken) => inner = woken,
                None => {
                    self.open();
                    return false;
                }
            }
        }
        true
    }

    /// Records that the process is checkpointed: the contents of VRAM are no longer on the GPU.
    pub fn leave(&self) {
        self.lock().phase = Phase::Checkpointed;
    }

    /// Simulates a read of the context without a wait at the gate. If the context is checkpointed,
    /// the read ends the process with SIGSEGV.
    pub fn look(&self) {
        if self.is_offloaded() {
            segfault();
        }
    }

    /// Whether the contents of VRAM are in host memory instead of on the GPU.
    pub fn is_offloaded(&self) -> bool {
        self.lock().phase == Phase::Checkpointed
    }

    /// Records that the contents of VRAM are on the GPU again. The gate stays closed.
    pub fn back(&self) {
        self.lock().phase = Phase::Closed;
    }

    /// Opens the gate. Waiting calls then enter the driver.
    pub fn open(&self) {
        self.lock().phase = Phase::Running;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Waits until the condition variable `changed` is notified or the deadline is reached. Returns
/// `None` if the deadline had passed before the call.
pub fn wait_until<'a, T>(
    changed: &Condvar,
    guard: MutexGuard<'a, T>,
    deadline: Option<Instant>,
) -> Option<MutexGuard<'a, T>> {
    let Some(deadline) = deadline else {
        return Some(changed.wait(guard).unwrap_or_else(PoisonError::into_inner));
    };
    let left = deadline.checked_duration_since(Instant::now())?;
    Some(changed.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0)
}

/// Ends the process with SIGSEGV, by a read through a null pointer as in the real driver.
fn segfault() -> ! {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: this read is deliberately invalid, to cause the crash that the real driver causes. A
    // read of address 0 faults and changes no memory.
    unsafe {
        std::arch::asm!("mov {0}, qword ptr [{0}]", inout(reg) 0usize => _, options(nostack));
    }
    // Reached on another architecture, or if the application's SIGSEGV handler continues.
    std::process::abort()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::time::Duration;

    #[test]
    fn close_waits_for_calls_until_timeout() {
        let gate = Gate::new();
        let inside = gate.enter(Class::Work).unwrap();
        assert!(!gate.close(Some(Instant::now())));
        drop(inside);
        assert!(gate.close(Some(Instant::now() + Duration::from_secs(60))));
    }

    #[test]
    fn work_waits_until_the_gate_opens() {
        let gate = Arc::new(Gate::new());
        assert!(gate.close(None));
        gate.leave();
        assert_eq!(gate.enter(Class::MemInfo).err(), Some(OPERATING_SYSTEM));
        assert!(gate.enter(Class::Instant).is_ok());
        let waiting = Arc::clone(&gate);
        let caller = std::thread::spawn(move || waiting.enter(Class::Work).is_ok());
        gate.back();
        assert!(!caller.is_finished());
        gate.open();
        assert!(caller.join().unwrap());
    }
}
