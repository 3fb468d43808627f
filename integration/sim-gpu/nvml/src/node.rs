//! Sends requests to the daemon, and writes the replies to the caller's memory.

use std::ffi::c_char;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use affinode_sim_protocol::{
    GpuSnapshot, MemoryLimit, Operation, Out, Packet, ProcessState, Reply, Request, SOCKET,
    SOCKET_ENV, code,
};

use crate::{
    DRIVER_NOT_LOADED, GPU_IS_LOST, INSUFFICIENT_SIZE, INVALID_ARGUMENT, NO_PERMISSION, NOT_FOUND,
    NOT_SUPPORTED, Outcome, UNINITIALIZED,
};

/// Number of calls of `nvmlInit` minus those of `nvmlShutdown`.
static USERS: AtomicU32 = AtomicU32::new(0);

/// Interval at which a blocked call checks whether it may continue.
const POLL: std::time::Duration = std::time::Duration::from_millis(10);

/// NVML's handle of a device, `nvmlDevice_t`. It is the device's index plus one, so that it is
/// never null.
pub type Device = usize;

/// Environment variable that makes each request take this many milliseconds, so that a test can
/// lock the process during a request. If the process is locked during a request, this library
/// aborts the process, because it is unknown what the real driver would do.
const SLOW_ENV: &str = "AFFINODE_SIM_NVML_SLOW_MS";

/// Environment variable with the path of a folder whose files are faults. While the file `lost-N`
/// exists, the GPU with index N has fallen off the bus. While the file `blocked` exists, no call
/// returns.
const FAULTS_ENV: &str = "AFFINODE_SIM_NVML_FAULTS";

/// Simulates the function `nvmlInit`.
pub fn init() -> Outcome {
    ask()?;
    USERS.fetch_add(1, Ordering::Relaxed);
    Ok(())
}

/// Simulates the function `nvmlShutdown`.
pub fn shutdown() -> Outcome {
    if USERS.load(Ordering::Relaxed) > 0 {
        wait_until_unlocked();
    }
    let less = |users: u32| users.checked_sub(1);
    USERS
        .fetch_update(Ordering::Relaxed, Ordering::Relaxed, less)
        .map(drop)
        .map_err(|_| UNINITIALIZED)
}

/// Returns the present state of every GPU.
pub fn gpus() -> Outcome<Vec<GpuSnapshot>> {
    if USERS.load(Ordering::Relaxed) == 0 {
        return Err(UNINITIALIZED);
    }
    ask()
}

/// Returns the present state of one GPU.
pub fn gpu(device: Device) -> Outcome<GpuSnapshot> {
    let index = index(device)?;
    let gpu = gpus()?.into_iter().nth(index).ok_or(INVALID_ARGUMENT)?;
    if has_fault(&format!("lost-{index}")) { Err(GPU_IS_LOST) } else { Ok(gpu) }
}

/// Returns whether the test has set a fault.
fn has_fault(name: &str) -> bool {
    std::env::var_os(FAULTS_ENV).is_some_and(|folder| PathBuf::from(folder).join(name).exists())
}

/// Returns the index of the device to which a handle refers.
pub fn index(device: Device) -> Outcome<usize> {
    device.checked_sub(1).ok_or(INVALID_ARGUMENT)
}

/// Returns the checkpoint state of this process, if the daemon knows the process.
fn own_state() -> Option<ProcessState> {
    let pid = std::process::id() as i32;
    match put_question(&Request::Checkpoint { pid, operation: Operation::State }) {
        Ok(Reply::State(state)) => Some(state),
        _ => None,
    }
}

/// If this process is checkpointed, waits until it is unlocked. With NVIDIA's driver every call
/// blocks in the same way.
pub fn wait_until_unlocked() {
    let mut was_checkpointed = false;
    let mut is_offloaded = || {
        let state = own_state();
        was_checkpointed |=
            matches!(state, Some(ProcessState::Checkpointed | ProcessState::Failed));
        was_checkpointed && !matches!(state, Some(ProcessState::Running) | None)
    };
    while is_offloaded() {
        std::thread::sleep(POLL);
    }
}

/// Requests the present state of all GPUs from the daemon.
fn ask() -> Outcome<Vec<GpuSnapshot>> {
    wait_until_unlocked();
    while has_fault("blocked") {
        std::thread::sleep(POLL);
    }
    let slow_ms = std::env::var(SLOW_ENV).ok().and_then(|text| text.parse().ok());
    if let Some(slow_ms) = slow_ms {
        std::thread::sleep(std::time::Duration::from_millis(slow_ms));
        if !matches!(own_state(), Some(ProcessState::Running) | None) {
            std::process::abort();
        }
    }
    match put_question(&Request::Snapshot)? {
        Reply::Snapshot(gpus) => Ok(gpus),
        _ => Err(DRIVER_NOT_LOADED),
    }
}

/// Sets or removes the VRAM limit of a cgroup.
pub fn limit_memory(limit: MemoryLimit) -> Outcome {
    match put_question(&Request::LimitMemory(limit))? {
        Reply::Done => Ok(()),
        Reply::Error(code::NOT_SUPPORTED) => Err(NOT_SUPPORTED),
        Reply::Error(code::NOT_PERMITTED) => Err(NO_PERMISSION),
        Reply::Error(code::INVALID_HANDLE) => Err(NOT_FOUND),
        _ => Err(INVALID_ARGUMENT),
    }
}

/// Sends a request to the daemon on a new connection, and returns the reply. A connection that
/// stayed open would have to survive a fork and a restart of the daemon.
fn put_question(request: &Request) -> Outcome<Reply> {
    let path = std::env::var_os(SOCKET_ENV).map_or_else(|| PathBuf::from(SOCKET), PathBuf::from);
    let packet = Packet::connect(&path).map_err(|_| DRIVER_NOT_LOADED)?;
    packet.send(request, None).map_err(|_| DRIVER_NOT_LOADED)?;
    match packet.receive::<Reply>() {
        Ok(Some((reply, _))) => Ok(reply),
        _ => Err(DRIVER_NOT_LOADED),
    }
}

/// Writes a value through the caller's pointer. Returns "invalid argument" for a null pointer.
pub fn put<T>(to: Out<T>, value: T) -> Outcome {
    to.set(value).map_err(|_| INVALID_ARGUMENT)
}

/// Writes a text and its terminating zero to the caller's buffer. Returns an error if the buffer is
/// too small.
pub fn put_text(to: Out<c_char>, room: u32, text: &str) -> Outcome {
    if text.len() >= room as usize {
        return Err(INSUFFICIENT_SIZE);
    }
    let mut bytes = text.bytes().chain([0]).enumerate();
    bytes
        .try_for_each(|(index, byte)| to.set_at(index, byte as c_char))
        .map_err(|_| INVALID_ARGUMENT)
}

/// Converts a text to an array of fixed size. The text is truncated if necessary. The remaining
/// bytes are zero.
pub fn fixed_text<const N: usize>(text: &str) -> [c_char; N] {
    let mut array = [0; N];
    for (place, byte) in array.iter_mut().zip(text.bytes().take(N - 1)) {
        *place = byte as c_char;
    }
    array
}
