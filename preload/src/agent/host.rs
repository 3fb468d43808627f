//! Implements the trait [`Host`] for the real process, with the process's counters, threads and
//! CUDA driver.

use core::ffi::CStr;
use core::sync::atomic::Ordering;

use affinode_cuda_sys::{
    CheckpointArgs, CheckpointFn, CheckpointLockArgs, CheckpointLockFn, CheckpointRestoreArgs,
    CheckpointRestoreFn, DriverGetVersionFn, result,
};
use affinode_proto::wire::counters::Gate;
use affinode_proto::wire::message::{BUSY_LOADER, BUSY_NVML, CopyOptions};
use affinode_proto::wire::{Hazards, Phase};

use super::blocked::BlockedThreadWatch;
use super::gpus::{self, GpuMap};
use super::machine::{CallAdmission, DriverCall, Host};
use super::vram;
use crate::counters::CounterPage;
use crate::swap::pending_work::GpuWork;
use crate::{constants, hazard, hook_table, libcuda, lookup, nvml, process, swap, sys, tools};

/// Implementation of [`Host`] for the process into which this library is loaded. The order machine
/// executes its operations.
pub struct DriverHost {
    /// The process's shared counters.
    pub page: &'static CounterPage,
    /// The node's GPUs, as the controller lists them.
    pub gpus: GpuMap,
    /// Detects threads that block in calls to the driver without a hook.
    pub watch: BlockedThreadWatch,
    /// The node's lock, which this process holds while it restores itself. `None`: it does not hold
    /// the lock.
    pub turn: Option<sys::FolderLock>,
    /// Limits how long a copy out through the copier waits for the node's lock.
    pub patience: WaitBudget,
}

/// Path of the library's folder, which a process locks while it restores itself. The folder is the
/// same file in every container of the node, so only one process of the node can hold the lock.
const FOLDER: &CStr = c"/.affinode/lib";

/// Limits the waits for the node's lock, because any container can keep that lock for any time. A
/// wait tries the lock up to [`Self::MAX_TRIES`] times, a millisecond apart. After a failed wait,
/// each wait makes only one try, until one of them gets the lock. `refused` is true if the last
/// wait failed.
#[derive(Debug, Default)]
pub struct WaitBudget {
    refused: bool,
}

impl WaitBudget {
    const MAX_TRIES: u32 = 1_000;

    /// Takes the lock by `try_lock`. Between two tries, `pause` waits for other processes to
    /// release it. `None`: all tries have failed.
    fn take<T>(&mut self, mut try_lock: impl FnMut() -> Option<T>, pause: impl Fn()) -> Option<T> {
        let tries = if self.refused { 1 } else { Self::MAX_TRIES };
        let mut taken = try_lock();
        for _ in 1..tries {
            if taken.is_some() {
                break;
            }
            pause();
            taken = try_lock();
        }
        self.refused = taken.is_none();
        taken
    }
}

/// Maximum time, in milliseconds, that the agent waits for the end of calls inside NVML. The wait
/// precedes `cuCheckpointProcessLock`, which is not called if calls are still inside NVML.
const MAX_NVML_MS: u32 = 2_000;

fn own_pid() -> i32 {
    sys::getpid() as i32
}

/// The result of `cuDriverGetVersion`; 0: the function is missing or failed.
pub fn driver_version() -> u32 {
    let mut version = 0_i32;
    if let Some(get) = libcuda::function(b"cuDriverGetVersion") {
        // SAFETY: the signature of cuDriverGetVersion, which needs no initialised driver.
        unsafe {
            let get: DriverGetVersionFn = core::mem::transmute(get);
            let _ = get(&raw mut version);
        }
    }
    u32::try_from(version).unwrap_or(0)
}

/// Whether the process has not called `cuInit` yet, so that it can have no work on a GPU. The driver
/// cannot lock such a process.
fn is_uninitialised() -> bool {
    type CtxGetCurrentFn = unsafe extern "C" fn(*mut usize) -> u32;
    let mut context = 0;
    libcuda::function(b"cuCtxGetCurrent").is_some_and(|get| {
        // SAFETY: the signature of cuCtxGetCurrent, which writes to its argument alone.
        let code = unsafe {
            let get: CtxGetCurrentFn = core::mem::transmute(get);
            get(&raw mut context)
        };
        code == result::NOT_INITIALIZED
    })
}

/// Whether the driver shows this process exactly one GPU. False before `cuInit`, which determines
/// what the driver shows.
pub fn sees_one_gpu() -> bool {
    type DeviceGetCountFn = unsafe extern "C" fn(*mut i32) -> u32;
    let mut count = 0_i32;
    let Some(get) = libcuda::function(b"cuDeviceGetCount") else { return false };
    // SAFETY: the signature of cuDeviceGetCount, which writes to its argument alone.
    let code = unsafe {
        let get: DeviceGetCountFn = core::mem::transmute(get);
        get(&raw mut count)
    };
    code == result::SUCCESS && count == 1
}

impl DriverHost {
    /// Adds the hazards of tools in this process, such as profilers, to the counters. If a hazard
    /// is new, calls that wait for GPU work take the slow path from then on. There they count as
    /// polls and not as activity, because a profiler's thread waits for work even if the program is
    /// idle.
    fn note_tools(&self) {
        if self.page.add_hazards(tools::found()) {
            hook_table::see_waits();
        }
    }
}

impl Host for DriverHost {
    fn set_gate(&mut self, gate: Gate) {
        let damaged = self.page.hazards().intersects(Hazards::DAMAGED_MEMORY);
        let opens = gate != Gate::Closed;
        self.page.set_gate(match gate {
            _ if hazard::is_mps_program() => Gate::Open,
            _ if opens && damaged => Gate::Damaged,
            gate => gate,
        });
    }

    fn set_sealed(&mut self, sealed: bool) {
        self.page.set_sealed(sealed);
    }

    fn set_phase(&mut self, phase: Phase) {
        self.page.set_phase(phase);
        nvml::set_phase(phase);
    }

    fn next_generation(&mut self) {
        self.page.generation.fetch_add(1, Ordering::SeqCst);
    }

    fn fence(&mut self) -> bool {
        // If the process is not fenced, its threads count with sequentially consistent operations
        // and need no barrier.
        !process::is_fenced() || sys::barrier().is_ok()
    }

    fn drained(&mut self, calls: CallAdmission) -> bool {
        match calls {
            CallAdmission::All => self.page.drained(|slot| &slot.inflight),
            CallAdmission::Allocating => self.page.drained(|slot| &slot.allocating),
        }
    }

    fn has_waiters(&mut self) -> bool {
        self.page.has_waiters()
    }

    fn sleep_us(&mut self, us: u64) {
        sys::sleep_us(us);
    }

    fn now_us(&mut self) -> u64 {
        sys::now_us()
    }

    fn is_eligible(&mut self) -> bool {
        if swap::is_reached() {
            self.page.add_hazards(Hazards::DIRECT_ACCESS);
        }
        // The hazard is added before the result of this order is reported, because the controller
        // plans with it.
        self.note_tools();
        let hazards = self.page.hazards().without(Hazards::KEEPS_CONTEXT);
        hazards.is_empty() && lookup::is_tight()
    }

    fn keeps_context(&mut self) -> bool {
        self.note_tools();
        self.page.hazards().intersects(Hazards::KEEPS_CONTEXT)
    }

    fn call(&mut self, call: DriverCall) -> Option<u32> {
        if matches!(call, DriverCall::Lock(_)) && swap::loader_lock::is_awaited() {
            // A thread that holds the loader's lock may be inside the driver. Until it releases the
            // lock, no function of the driver may be called.
            return Some(BUSY_LOADER);
        }
        if let DriverCall::Lock(timeout_ms) = call
            && !nvml::drain(timeout_ms.min(MAX_NVML_MS))
        {
            return Some(BUSY_NVML);
        }
        let name: &[u8] = match call {
            DriverCall::Lock(_) => b"cuCheckpointProcessLock",
            DriverCall::Checkpoint => b"cuCheckpointProcessCheckpoint",
            DriverCall::Restore | DriverCall::RestoreOn(..) => b"cuCheckpointProcessRestore",
            DriverCall::Unlock => b"cuCheckpointProcessUnlock",
        };
        let function = libcuda::function(name)?;
        // SAFETY: the functions have had these signatures since they exist (570), and with pairs
        // since the version that was checked. The gate is closed and drained. So the only other
        // call inside the driver is that of a thread in `exit` that queries this process's state.
        // That call waits for a step in progress (seen from another process).
        let code = unsafe {
            match call {
                DriverCall::Lock(timeout_ms) => {
                    let mut arguments =
                        CheckpointLockArgs { timeout_ms, ..CheckpointLockArgs::default() };
                    let lock: CheckpointLockFn = core::mem::transmute(function);
                    lock(own_pid(), &raw mut arguments)
                }
                DriverCall::RestoreOn(from, to) => {
                    let pairs = self.gpus.exchanged(from, to)?;
                    // After this restore the driver shows the other GPU to the process.
                    constants::forget();
                    let all = pairs.all();
                    let mut arguments = CheckpointRestoreArgs {
                        pairs: all.as_ptr(),
                        many: all.len() as u32,
                        reserved0: [0; 11],
                        reserved1: 0,
                    };
                    let restore: CheckpointRestoreFn = core::mem::transmute(function);
                    restore(own_pid(), &raw mut arguments)
                }
                DriverCall::Checkpoint | DriverCall::Restore | DriverCall::Unlock => {
                    let mut arguments = CheckpointArgs::default();
                    let step: CheckpointFn = core::mem::transmute(function);
                    step(own_pid(), &raw mut arguments)
                }
            }
        };
        Some(code)
    }

    fn state(&mut self) -> Option<u32> {
        let (code, state) = libcuda::checkpoint_state()?;
        (code == 0).then_some(state)
    }

    fn note_threads(&mut self) {
        // True if a thread that was blocked has continued since the process became resident again.
        if self.watch.settle_now() {
            self.page.add_hazards(Hazards::HIDDEN_WAY);
        }
        self.watch.note();
    }

    fn has_driver_ended(&mut self) -> bool {
        libcuda::checkpoint_state().is_some_and(|(code, _)| code == result::DEINITIALIZED)
    }

    fn await_work(&mut self, end_us: u64) -> GpuWork {
        if !swap::is_in_use() {
            // The lists of contexts and captures are incomplete, so events cannot show the work.
            // The wait is needed even though no memory is copied: after it, calls at the gate that
            // wait for work return SUCCESS. A program of MPS makes no such calls, and the driver
            // locks neither it nor a client of MPS. Such a client is busy, which is no failure.
            let may_end = self.page.hazards().intersects(Hazards::MPS);
            return match is_uninitialised() || hazard::is_mps_program() {
                true => GpuWork::Done,
                false => GpuWork::Unseen { may_end },
            };
        }
        let page = self.page;
        let mut pause_us = 20;
        swap::pending_work::wait(|| {
            sys::sleep_us(pause_us);
            pause_us = (2 * pause_us).min(2_000);
            sys::now_us() >= end_us || page.has_waiters()
        })
    }

    fn copy_out(&mut self, how: CopyOptions, vram_bytes: u64) -> Result<(), u32> {
        // Takes the lock of self-restores: while the copier still copies, no process that restores
        // itself may take VRAM.
        let hands_over = how.then_checkpoint && swap::is_prepared();
        let try_lock = || sys::lock_folder(FOLDER);
        let mut take = || self.patience.take(try_lock, || sys::sleep_us(1_000));
        let turn = if hands_over { take() } else { None };
        swap::copy_out(how, turn.as_ref().map(|_| vram_bytes))
    }

    fn settle(&mut self) -> bool {
        swap::settle()
    }

    fn exported_bytes(&mut self) -> u64 {
        swap::exported_bytes()
    }

    fn copied_out_bytes(&mut self) -> u64 {
        let content = self.page.copied_out_bytes.load(Ordering::Relaxed);
        content.saturating_add(swap::released_local_bytes())
    }

    fn copy_in(&mut self, awaits_vram_until_us: Option<u64>) -> Result<(), u32> {
        swap::copy_in(awaits_vram_until_us)
    }

    fn is_parked(&mut self) -> bool {
        swap::is_copied_out()
    }

    fn release_copied(&mut self, vram_bytes: u64) {
        swap::release_copied_out(vram_bytes);
    }

    fn announce_offloaded(&mut self) {
        swap::copier_restore::announce_offloaded();
    }

    fn announce_restore(&mut self) {
        swap::copier_restore::announce_restore();
    }

    fn leave_copier(&mut self) {
        swap::copier_restore::hang_up();
    }

    fn holds_imported(&mut self) -> bool {
        swap::holds_imported()
    }

    fn can_move(&mut self, from: u8, to: u8) -> bool {
        gpus::driver_can() && self.gpus.exchanged(from, to).is_some() && self.gpus.are_reachable()
    }

    fn is_broken(&mut self, code: u32) -> bool {
        swap::is_broken(code)
    }

    fn set_damaged(&mut self) {
        self.page.add_hazards(Hazards::DAMAGED_MEMORY);
    }

    fn begin_return(&mut self, vram_bytes: u64) -> bool {
        // If several processes restored themselves at once, each would find the same VRAM free. So
        // at most one process of the node may restore itself at a time.
        self.turn = sys::lock_folder(FOLDER);
        self.turn.is_some() && vram::has_room(vram_bytes)
    }

    fn end_return(&mut self) {
        self.turn = None;
    }
}

#[cfg(test)]
mod tests;
