//! Executes the checkpoint calls. A process makes such a call for itself or for another process.
//!
//! ```text
//!            Lock                Save                 Restore
//!  Running ───────> Locked ───────────> Checkpointed ───────────> Locked ──Unlock──> Running
//!     ^  600: busy     │ 801: managed         │ 2: no VRAM
//!     └────────────────┘ memory               │ 1: peer access, or memory opened by legacy IPC
//!           Unlock                            │ 801: memory imported from another process
//!                                             v
//!                                            Lost (reads as CHECKPOINTED; every restore 304)
//! ```
//!
//! The numbers are error codes of calls that fail, such as 600 if the process is busy. A failed
//! `Lock` or `Save` does not change the state. A failed `Restore` loses the process. Only a restore
//! with an invalid GPU map fails without a change of the state.
//!
//! The daemon completes an operation even if its caller ends. Until then, every other operation on
//! the same process waits, even a `GetState`.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use affinode_sim_protocol::{Operation, Order, Packet, ProcessState, Reply, Report, code};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::driver::{Driver, Process, lock};
use crate::ledger::Saved;
use crate::{memory, node};

/// Checkpoint state of a process.
#[derive(Debug)]
pub enum Stage {
    Running,
    Locked,
    /// The process is checkpointed: its calls wait, and its VRAM is in host memory.
    Checkpointed {
        /// Objects and contexts that a restore must allocate again.
        saved: Saved,
        /// Result that every restore of the process will have. 0 if restores can succeed.
        restore_code: i32,
    },
    /// The process is lost: no restore will ever succeed.
    Lost,
}

type GpuPairs = [([u8; 16], [u8; 16])];

/// Executes one checkpoint call for a process.
pub fn perform(
    driver: &Driver,
    caller: u32,
    caller_uid: u32,
    pid: i32,
    operation: &Operation,
) -> Result<Reply, i32> {
    let host_pid = node::resolve_pid(caller, pid).ok_or(code::OPERATING_SYSTEM)?;
    let process = driver.process(host_pid).ok_or(code::NOT_INITIALIZED)?;
    if caller_uid != 0 && caller_uid != process.uid {
        return Err(code::OPERATING_SYSTEM);
    }
    let mut stage = lock(&process.stage);
    match operation {
        Operation::Lock { timeout_ms } => take_lock(&process, &mut stage, *timeout_ms)?,
        Operation::Save => save(driver, &process, &mut stage)?,
        Operation::Restore { gpu_pairs } => restore(driver, &process, &mut stage, gpu_pairs)?,
        Operation::Unlock => unlock(&process, &mut stage)?,
        Operation::State => {
            return Ok(Reply::State(match *stage {
                Stage::Running => ProcessState::Running,
                Stage::Locked => ProcessState::Locked,
                Stage::Checkpointed { .. } | Stage::Lost => ProcessState::Checkpointed,
            }));
        }
        Operation::RestoreThread => return Ok(Reply::Thread(control(&process)?.1)),
    }
    Ok(Reply::Done)
}

fn take_lock(process: &Process, stage: &mut Stage, timeout_ms: u32) -> Result<(), i32> {
    if !matches!(stage, Stage::Running) {
        return Err(code::ILLEGAL_STATE);
    }
    check(order(process, &Order::Lock { timeout_ms }, None)?)?;
    *stage = Stage::Locked;
    Ok(())
}

fn unlock(process: &Process, stage: &mut Stage) -> Result<(), i32> {
    if !matches!(stage, Stage::Locked) {
        return Err(code::ILLEGAL_STATE);
    }
    check(order(process, &Order::Unlock, None)?)?;
    *stage = Stage::Running;
    Ok(())
}

fn save(driver: &Driver, process: &Process, stage: &mut Stage) -> Result<(), i32> {
    if !matches!(stage, Stage::Locked) {
        return Err(code::ILLEGAL_STATE);
    }
    let started = Instant::now();
    let (bytes, has_of_others) = {
        let state = driver.state();
        (state.ledger.holdings(process.id).bytes(), state.ledger.has_of_others(process.id))
    };
    let cost = driver.config.checkpoint_cost(bytes);
    let extra_bytes = driver.config.checkpoint_extra_bytes();
    if node::memory_limit_bytes(process.pid).is_some_and(|limit| limit < bytes + extra_bytes) {
        // The contents go to host memory, which is charged to the process's own cgroup. Here the
        // cgroup's limit is too low for the contents. The OOM killer therefore kills the process
        // during the copy, and the call returns an error because the process has ended.
        thread::sleep(cost / 2);
        kill_process(process.pid);
        return Err(code::OPERATING_SYSTEM);
    }
    let report = order(process, &Order::Save { extra_bytes }, None)?;
    check(report)?;
    let mut state = driver.state();
    let (saved, gone) = state.ledger.evict(process.id);
    for object in gone {
        // Only the contents are removed. The object keeps its number and its IPC handle.
        state.memories.remove(&object);
    }
    drop(state);
    let restore_code = match report.restore_code {
        0 if has_of_others => code::NOT_SUPPORTED,
        own => own,
    };
    *stage = Stage::Checkpointed { saved, restore_code };
    sleep_until(started, cost);
    Ok(())
}

fn restore(
    driver: &Driver,
    process: &Process,
    stage: &mut Stage,
    pairs: &GpuPairs,
) -> Result<(), i32> {
    let (saved, restore_code) = match stage {
        Stage::Checkpointed { saved, restore_code } => (saved.clone(), *restore_code),
        Stage::Lost => return Err(code::OPERATING_SYSTEM),
        Stage::Running | Stage::Locked => return Err(code::ILLEGAL_STATE),
    };
    let started = Instant::now();
    let gpu_map = gpu_map(driver, pairs).ok_or(code::INVALID_VALUE)?;
    // As on the real driver, every failure from here on loses the process.
    *stage = Stage::Lost;
    check(Report { code: restore_code, ..Report::default() })?;
    {
        let mut state = driver.state();
        for gpu in 0..gpu_map.len() {
            let bytes = state.ledger.saved_bytes(process.id, &saved, &gpu_map, gpu);
            state.check_limit(process.id, gpu, bytes)?;
        }
        state.ledger.readmit(process.id, &saved, &gpu_map).map_err(|_| code::OUT_OF_MEMORY)?;
    }
    if let Err(error) = refill(driver, process, &saved, gpu_map) {
        let mut state = driver.state();
        for object in state.ledger.evict(process.id).1 {
            state.bury(object);
        }
        return Err(error);
    }
    *stage = Stage::Locked;
    sleep_until(started, driver.config.restore_cost(saved.bytes()));
    Ok(())
}

fn refill(
    driver: &Driver,
    process: &Process,
    saved: &Saved,
    gpu_map: Vec<usize>,
) -> Result<(), i32> {
    for (object, _, bytes) in &saved.objects {
        let memory =
            memory::create("affinode-sim-vram", *bytes).map_err(|_| code::OUT_OF_MEMORY)?;
        let memory = Arc::new(memory);
        let mut state = driver.state();
        let meant = state.ledger.meant(process.id, *object);
        state.memories.insert(meant, Arc::clone(&memory));
        drop(state);
        check(order(process, &Order::Map { object: *object }, Some(&memory))?)?;
    }
    check(order(process, &Order::Resume { gpu_map }, None)?)
}

/// Converts the GPU pairs of a restore to a map. Entry n of the map is the index of the GPU that
/// replaces GPU n. Returns `None` if the pairs are not a permutation of all GPUs.
fn gpu_map(driver: &Driver, pairs: &GpuPairs) -> Option<Vec<usize>> {
    let gpus = driver.config.gpu_infos();
    let identity = (0..gpus.len()).collect();
    if pairs.is_empty() {
        return Some(identity);
    }
    let index = |uuid: &[u8; 16]| gpus.iter().position(|gpu| gpu.uuid == *uuid);
    let mut map = vec![None; gpus.len()];
    for (old, new) in pairs {
        let slot = &mut map[index(old)?];
        if slot.replace(index(new)?).is_some() {
            return None;
        }
    }
    let map: Vec<usize> = map.into_iter().collect::<Option<_>>()?;
    let mut targets = map.clone();
    targets.sort_unstable();
    (targets == identity).then_some(map)
}

fn control(process: &Process) -> Result<(Arc<Packet>, i32), i32> {
    lock(&process.control).clone().ok_or(code::OPERATING_SYSTEM)
}

/// Sends an order to the process. Waits until the process replies or ends.
fn order(
    process: &Process,
    order: &Order,
    memory: Option<&Arc<std::os::fd::OwnedFd>>,
) -> Result<Report, i32> {
    use std::os::fd::AsFd;
    let (control, _) = control(process)?;
    control.send(order, memory.map(|memory| memory.as_fd())).map_err(|_| code::OPERATING_SYSTEM)?;
    match control.receive::<Report>() {
        Ok(Some((report, _))) => Ok(report),
        _ => Err(code::OPERATING_SYSTEM),
    }
}

fn check(report: Report) -> Result<(), i32> {
    if report.code == code::SUCCESS { Ok(()) } else { Err(report.code) }
}

fn kill_process(pid: u32) {
    if let Ok(pid) = i32::try_from(pid) {
        let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
    }
}

fn sleep_until(started: Instant, cost: Duration) {
    thread::sleep(cost.saturating_sub(started.elapsed()));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use affinode_sim_protocol::gpu_uuid;
    use clap::Parser;

    #[test]
    fn only_a_full_permutation_moves_a_process() {
        let driver = Driver::new(Config::parse_from(["sim", "--gpus", "2"]));
        let (a, b) = (gpu_uuid(0), gpu_uuid(1));
        assert_eq!(gpu_map(&driver, &[]), Some(vec![0, 1]));
        assert_eq!(gpu_map(&driver, &[(a, b), (b, a)]), Some(vec![1, 0]));
        for bad in
            [&[(a, b)][..], &[(a, b), (b, b)], &[(a, b), (a, a)], &[(a, gpu_uuid(9)), (b, a)]]
        {
            assert_eq!(gpu_map(&driver, bad), None);
        }
    }
}
