//! The driver's private tables of functions, which `cuGetExportTable` returns. The functions have
//! no public names.
//!
//! | table | requested by | functions |
//! | --- | --- | --- |
//! | [`RUNTIME`] | the CUDA runtime | `check` (checks a hash of the process id and of addresses in the table), `storage`, `settle` |
//! | [`VIDEO`] | the video library | `settle` |
//! | any other | tools | `attach`, `detach`, `look` |
//!
//! `settle` and `look` need the context. If the context is checkpointed, a call of them ends the
//! application. A tool that attaches while the context is checkpointed, or during a checkpoint,
//! hangs. Afterwards every restore of that process fails (measured with torch.profiler, H200,
//! driver 580.159). The simulation assumes the same result if a process is checkpointed while a
//! tool is attached to it.

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use affinode_sim_protocol::code;

use crate::abi::{CUresult, INVALID_VALUE, Outcome, Uuid, status};
use crate::driver::{Driver, driver};
use crate::gate::Class;

const RUNTIME: Uuid = 0x6bd5_fb6c_5bf4_e74a_8987_d939_12fd_9df9_u128.to_be_bytes();
const VIDEO: Uuid = 0x9af0_707b_8e2d_d84c_8e4e_b994_c82d_dc35_u128.to_be_bytes();

/// State of the tools (such as profilers) in this process.
#[derive(Debug, Default)]
pub struct Tools {
    /// Number of tools that are attached or being attached.
    attached: AtomicI32,
    /// Number of checkpoints of this process.
    saves: AtomicU64,
    /// Whether a tool was active during a checkpoint, so that the process cannot be restored.
    is_broken: AtomicBool,
}

impl Tools {
    /// Records that the context is checkpointed. Returns the error code of later restores, or 0 if
    /// restores can succeed.
    pub fn save(&self) -> i32 {
        self.saves.fetch_add(1, Ordering::SeqCst);
        if self.attached.load(Ordering::SeqCst) > 0 { code::UNKNOWN } else { 0 }
    }

    /// Records that the context is about to be restored.
    pub fn resume(&self) -> Outcome {
        if self.is_broken.load(Ordering::SeqCst) { Err(code::UNKNOWN) } else { Ok(()) }
    }

    fn attach(&self, driver: &Driver, takes: Duration) {
        let saves = self.saves.load(Ordering::SeqCst);
        self.attached.fetch_add(1, Ordering::SeqCst);
        thread::sleep(takes);
        if driver.gate.is_offloaded() || self.saves.load(Ordering::SeqCst) != saves {
            self.is_broken.store(true, Ordering::SeqCst);
            loop {
                thread::park();
            }
        }
    }
}

/// A private table in memory: first its size in bytes, then its functions.
#[repr(C)]
pub struct Table {
    bytes: usize,
    functions: [Function; 3],
}

/// Type of all functions in the private tables. Each function gets two numbers, and may ignore
/// these arguments.
type Function = unsafe extern "C" fn(u64, u64) -> CUresult;

const fn table(functions: [Function; 3]) -> Table {
    Table { bytes: size_of::<Table>(), functions }
}

static OF_RUNTIME: Table = table([check, storage, settle]);
static OF_VIDEO: Table = table([settle, settle, settle]);
static OF_TOOLS: Table = table([attach, detach, look]);

/// Returns the private table with this id. Every unknown id returns the table for tools.
pub fn find(id: &Uuid) -> &'static Table {
    match id {
        id if *id == RUNTIME => &OF_RUNTIME,
        id if *id == VIDEO => &OF_VIDEO,
        _ => &OF_TOOLS,
    }
}

/// Table function of the CUDA runtime. Returns an error if the caller's hash does not belong to the
/// driver's own table in this process.
unsafe extern "C" fn check(hash: u64, _: u64) -> CUresult {
    status(if hash == expected_hash(std::process::id()) { Ok(()) } else { Err(INVALID_VALUE) })
}

fn expected_hash(pid: u32) -> u64 {
    let functions = OF_RUNTIME.functions.map(|function| function as usize as u64);
    let seen = [u64::from(pid), &raw const OF_RUNTIME as u64].into_iter().chain(functions);
    seen.fold(0xcbf2_9ce4_8422_2325, |hash, word| (hash ^ word).wrapping_mul(0x0100_0000_01b3))
}

/// Table function of the CUDA runtime. Simulates the query of the storage that the runtime attached
/// to a context. It succeeds in every checkpoint state.
unsafe extern "C" fn storage(_: u64, _: u64) -> CUresult {
    with(Class::Instant)
}

unsafe extern "C" fn settle(_: u64, _: u64) -> CUresult {
    with(Class::Sync)
}

/// Table function that attaches a tool. This takes `takes_ms` milliseconds, during which no public
/// function is called.
unsafe extern "C" fn attach(takes_ms: u64, _: u64) -> CUresult {
    let attach = |driver: &Driver| driver.tools.attach(driver, Duration::from_millis(takes_ms));
    status(driver().map(attach))
}

unsafe extern "C" fn detach(_: u64, _: u64) -> CUresult {
    status(driver().map(|driver| {
        driver.tools.attached.fetch_sub(1, Ordering::SeqCst);
    }))
}

unsafe extern "C" fn look(_: u64, _: u64) -> CUresult {
    status(driver().map(|driver| driver.gate.look()))
}

fn with(class: Class) -> CUresult {
    status(driver().and_then(|driver| driver.gate.enter(class).map(drop)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_is_chosen_by_its_whole_id() {
        let mut near = RUNTIME;
        near[15] ^= 1;
        let found = [RUNTIME, VIDEO, near].map(|id| &raw const *find(&id));
        assert_eq!(found, [&raw const OF_RUNTIME, &raw const OF_VIDEO, &raw const OF_TOOLS]);
        assert_ne!(expected_hash(1), expected_hash(2), "another process's is wrong");
    }

    #[test]
    fn attached_tool_bars_every_restore() {
        let tools = Tools::default();
        assert_eq!((tools.save(), tools.resume()), (0, Ok(())));
        tools.attached.store(1, Ordering::SeqCst);
        assert_eq!(tools.save(), code::UNKNOWN);
        tools.is_broken.store(true, Ordering::SeqCst);
        assert_eq!(tools.resume(), Err(code::UNKNOWN));
    }
}
