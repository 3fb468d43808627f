//! The driver functions of the checkpoint interface. They lock, checkpoint, restore or unlock a
//! process, which is another process or the caller itself. Other driver calls wait at the gate
//! while their process is locked or checkpointed. These functions do not pass the gate. Otherwise a
//! process could not restore or unlock itself. Each call sends a request to the daemon, which sends
//! orders to the checkpoint thread of the process.

use affinode_sim_protocol::{Operation, Reply};

use crate::abi::{INVALID_VALUE, In, Out, Outcome, UNKNOWN, Uuid};
use crate::api::cuda_api;
use crate::client;

const MAX_PAIRS: usize = 64;

/// The driver's C type `CUcheckpointLockArgs`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct LockArgs {
    timeout_ms: u32,
    reserved0: u32,
    reserved1: [u64; 7],
}

/// The driver's C type `CUcheckpointGpuPair`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct GpuPair {
    old: Uuid,
    new: Uuid,
}

/// The driver's C type `CUcheckpointRestoreArgs`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct RestoreArgs {
    pairs: In<GpuPair>,
    count: u32,
    reserved: [u8; 44],
    reserved1: u64,
}

type PlainArgs = [u64; 8];

/// Aborts this process if `AFFINODE_SIM_NO_CHECKPOINT` is set in its environment. Every call that
/// locks, checkpoints, restores or unlocks a process begins with this function.
fn end_if_barred() {
    if std::env::var_os("AFFINODE_SIM_NO_CHECKPOINT").is_some() {
        std::process::abort();
    }
}

cuda_api! {
    Always 12080 fn cuCheckpointProcessLock(pid: i32, arguments: In<LockArgs>) |_d, _z| {
        end_if_barred();
        let timeout_ms = match arguments.get() {
            Some(arguments) if arguments.reserved0 != 0 || arguments.reserved1 != [0; 7] => return Err(INVALID_VALUE),
            Some(arguments) => arguments.timeout_ms,
            None => 0,
        };
        done(pid, Operation::Lock { timeout_ms })
    }
    Always 12080 fn cuCheckpointProcessCheckpoint(pid: i32, arguments: In<PlainArgs>) |_d, _z| {
        end_if_barred();
        check_plain(arguments)?;
        done(pid, Operation::Save)
    }
    Always 12080 fn cuCheckpointProcessRestore(pid: i32, arguments: In<RestoreArgs>) |_d, _z| {
        end_if_barred();
        let gpu_pairs = match arguments.get() {
            Some(arguments) => pairs(&arguments)?,
            None => Vec::new(),
        };
        done(pid, Operation::Restore { gpu_pairs })
    }
    Always 12080 fn cuCheckpointProcessUnlock(pid: i32, arguments: In<PlainArgs>) |_d, _z| {
        end_if_barred();
        check_plain(arguments)?;
        done(pid, Operation::Unlock)
    }
    Always 12080 fn cuCheckpointProcessGetState(pid: i32, state: Out<u32>) |_d, _z| {
        match client::checkpoint(pid, Operation::State)? {
            Reply::State(found) => state.set(found as u32),
            _ => Err(UNKNOWN),
        }
    }
    Always 12080 fn cuCheckpointProcessGetRestoreThreadId(pid: i32, tid: Out<i32>) |_d, _z| {
        match client::checkpoint(pid, Operation::RestoreThread)? {
            Reply::Thread(found) => tid.set(found),
            _ => Err(UNKNOWN),
        }
    }
}

fn done(pid: i32, operation: Operation) -> Outcome {
    match client::checkpoint(pid, operation)? {
        Reply::Done => Ok(()),
        _ => Err(UNKNOWN),
    }
}

fn check_plain(arguments: In<PlainArgs>) -> Outcome {
    if arguments.get().is_none_or(|reserved| reserved == [0; 8]) {
        Ok(())
    } else {
        Err(INVALID_VALUE)
    }
}

fn pairs(arguments: &RestoreArgs) -> Outcome<Vec<(Uuid, Uuid)>> {
    let count = arguments.count as usize;
    if arguments.reserved != [0; 44] || arguments.reserved1 != 0 || count > MAX_PAIRS {
        return Err(INVALID_VALUE);
    }
    let pair =
        |index| arguments.pairs.at(index).map(|pair| (pair.old, pair.new)).ok_or(INVALID_VALUE);
    (0..count).map(pair).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_have_64_bytes() {
        assert_eq!(
            (size_of::<LockArgs>(), size_of::<RestoreArgs>(), size_of::<PlainArgs>()),
            (64, 64, 64)
        );
    }
}
