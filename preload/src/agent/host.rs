//! The machine's hands: the page, the threads and the driver of this process.

use core::ffi::CStr;
use core::sync::atomic::Ordering;

use affinode_cuda_sys::{
    CheckpointArgs, CheckpointFn, CheckpointGetStateFn, CheckpointLockArgs, CheckpointLockFn,
    CheckpointRestoreArgs, CheckpointRestoreFn, DriverGetVersionFn,
};
use affinode_proto::wire::message::How;
use affinode_proto::wire::page::Gate;
use affinode_proto::wire::{Hazards, Phase};

use super::gpus::{self, Gpus};
use super::machine::{Calls, DriverCall, Host};
use super::vram;
use crate::page::Page;
use crate::{carry, libcuda, lookup, process, sys};

/// This process.
pub struct Own {
    /// Its page.
    pub page: &'static Page,
    /// Those of the node.
    pub gpus: Gpus,
    /// Held while it comes back without a controller.
    pub turn: Option<sys::FolderLock>,
}

/// The library's folder: every container of the node has the same one.
const FOLDER: &CStr = c"/.affinode/lib";

/// The folder's lock, for which others that leave are waited for, but nobody who comes back.
fn soon_locked() -> Option<sys::FolderLock> {
    const WITHIN_US: u64 = 1_000_000;
    const PAUSE_US: u64 = 1_000;
    let end_us = sys::now_us() + WITHIN_US;
    loop {
        match sys::lock_folder(FOLDER) {
            None if sys::now_us() < end_us => sys::sleep_us(PAUSE_US),
            taken => return taken,
        }
    }
}

fn own_pid() -> i32 {
    sys::getpid() as i32
}

/// `cuDriverGetVersion`, 0 when it cannot be had.
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

impl Host for Own {
    fn set_gate(&mut self, gate: Gate) {
        let damaged = self.page.hazards().contains(Hazards::DAMAGED_MEMORY);
        let opens = gate != Gate::Closed;
        self.page.set_gate(if opens && damaged { Gate::Damaged } else { gate });
    }

    fn set_phase(&mut self, phase: Phase) {
        self.page.set_phase(phase);
    }

    fn next_generation(&mut self) {
        self.page.generation.fetch_add(1, Ordering::SeqCst);
    }

    fn fence(&mut self) -> bool {
        // Unfenced threads count with sequentially consistent operations.
        !process::is_fenced() || sys::barrier().is_ok()
    }

    fn drained(&mut self, calls: Calls) -> bool {
        match calls {
            Calls::All => self.page.drained(|slot| &slot.inflight),
            Calls::Allocating => self.page.drained(|slot| &slot.allocating),
        }
    }

    fn has_waiters(&mut self) -> bool {
        self.page.waiters.load(Ordering::SeqCst) > 0
    }

    fn sleep_us(&mut self, us: u64) {
        sys::sleep_us(us);
    }

    fn now_us(&mut self) -> u64 {
        sys::now_us()
    }

    fn is_eligible(&mut self) -> bool {
        if carry::is_reached() {
            self.page.add_hazards(Hazards::SHARED_MEMORY);
        }
        self.page.hazards().is_empty() && lookup::is_tight()
    }

    fn call(&mut self, call: DriverCall) -> Option<u32> {
        let name: &[u8] = match call {
            DriverCall::Lock(_) => b"cuCheckpointProcessLock",
            DriverCall::Checkpoint => b"cuCheckpointProcessCheckpoint",
            DriverCall::Restore | DriverCall::RestoreOn(..) => b"cuCheckpointProcessRestore",
            DriverCall::Unlock => b"cuCheckpointProcessUnlock",
        };
        let function = libcuda::function(name)?;
        // SAFETY: the signatures of these functions since they exist (570), and with pairs as of
        // the version that was asked for; the gate is closed and drained, so no other thread is
        // inside the driver.
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
        let function = libcuda::function(b"cuCheckpointProcessGetState")?;
        let mut state = 0;
        // SAFETY: the signature of cuCheckpointProcessGetState since it exists.
        let code = unsafe {
            let get: CheckpointGetStateFn = core::mem::transmute(function);
            get(own_pid(), &raw mut state)
        };
        (code == 0).then_some(state)
    }

    fn park(&mut self, how: How, vram_bytes: u64) -> Result<(), u32> {
        // Who comes back without a controller takes no device memory beside what that copies there.
        let hands_over = how.then_checkpoint && carry::is_prepared();
        let turn = hands_over.then(soon_locked).flatten();
        carry::park(how.keep, how.check, turn.as_ref().map(|_| vram_bytes))
    }

    fn settle(&mut self) -> bool {
        carry::settle()
    }

    fn handed_bytes(&mut self) -> u64 {
        carry::handed_bytes()
    }

    fn unpark(&mut self) -> Result<(), u32> {
        carry::unpark()
    }

    fn is_parked(&mut self) -> bool {
        carry::is_parked()
    }

    fn let_go_of_parked(&mut self, vram_bytes: u64) {
        carry::let_go_of_parked(vram_bytes);
    }

    fn announce_away(&mut self) {
        carry::vault::announce_away();
    }

    fn announce_restore(&mut self) {
        carry::vault::announce_restore();
    }

    fn leave_vault(&mut self) {
        carry::vault::hang_up();
    }

    fn holds_imported(&mut self) -> bool {
        carry::holds_imported()
    }

    fn can_move(&mut self, from: u8, to: u8) -> bool {
        gpus::driver_can() && self.gpus.exchanged(from, to).is_some() && self.gpus.are_reachable()
    }

    fn begin_return(&mut self, vram_bytes: u64) -> bool {
        // What is free for one is free for all who ask: one at a time on the whole node.
        self.turn = sys::lock_folder(FOLDER);
        self.turn.is_some() && vram::has_room(vram_bytes)
    }

    fn end_return(&mut self) {
        self.turn = None;
    }
}
