//! The instance of the simulated driver in a process. There is only one.
//!
//! As with the real driver, a child that is forked after `cuInit` has no driver, and its calls
//! return NOT_INITIALIZED. The child closes the parent's connections immediately, so that the
//! daemon notices the parent's end. After `exit` has begun, every call returns DEINITIALIZED,
//! including the checkpoint calls.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use affinode_sim_protocol::{GpuInfo, uuid_text};

use crate::abi::{DEINITIALIZED, INVALID_DEVICE, NO_DEVICE, NOT_INITIALIZED, Outcome};
use crate::checkpoint_thread;
use crate::client::Link;
use crate::contexts::Contexts;
use crate::gate::Gate;
use crate::memory::Memory;
use crate::modules::Modules;
use crate::pools::Pools;
use crate::stats::Stats;
use crate::streams::Streams;
use crate::tables::Tools;

/// State of the driver in this process. It exists until the process ends.
pub struct Driver {
    pub gate: Gate,
    pub link: Link,
    pub streams: Streams,
    pub stats: Stats,
    /// State of the tools (such as profilers) that are attached to this process. They use the
    /// driver's private tables of functions.
    pub tools: Tools,
    gpus: Vec<GpuInfo>,
    /// Index of the GPU for each device ordinal of the process. CUDA_VISIBLE_DEVICES determines the
    /// initial indexes. Restores on other GPUs change them.
    ordinals: Mutex<Vec<usize>>,
    contexts: Mutex<Contexts>,
    memory: Mutex<Memory>,
    modules: Mutex<Modules>,
    pools: Mutex<Pools>,
}

static DRIVER: OnceLock<&'static Driver> = OnceLock::new();
static STARTING: Mutex<()> = Mutex::new(());
static FORKED: AtomicBool = AtomicBool::new(false);
static ENDING: AtomicBool = AtomicBool::new(false);
static LINK_FD: AtomicI32 = AtomicI32::new(-1);
static CONTROL_FD: AtomicI32 = AtomicI32::new(-1);

/// Returns the driver of this process. Fails before `cuInit`.
pub fn driver() -> Outcome<&'static Driver> {
    if FORKED.load(Ordering::Relaxed) {
        return Err(NOT_INITIALIZED);
    }
    check_ending()?;
    DRIVER.get().copied().ok_or(NOT_INITIALIZED)
}

/// Simulates the function `cuInit`.
pub fn init() -> Outcome<&'static Driver> {
    if FORKED.load(Ordering::Relaxed) {
        return Err(NOT_INITIALIZED);
    }
    check_ending()?;
    if let Some(driver) = DRIVER.get() {
        return Ok(driver);
    }
    let _starting = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(driver) = DRIVER.get() {
        return Ok(driver);
    }
    let (link, gpus, page) = Link::attach()?;
    let ordinals = visible(&gpus, std::env::var("CUDA_VISIBLE_DEVICES").ok().as_deref());
    if ordinals.is_empty() {
        return Err(NO_DEVICE);
    }
    let link_fd = link.fd();
    let driver: &'static Driver = Box::leak(Box::new(Driver {
        gate: Gate::new(),
        link,
        streams: Streams::new(),
        stats: Stats::new(&page)?,
        tools: Tools::default(),
        gpus,
        ordinals: Mutex::new(ordinals),
        contexts: Mutex::default(),
        memory: Mutex::default(),
        modules: Mutex::default(),
        pools: Mutex::default(),
    }));
    let control_fd = checkpoint_thread::start(driver)?;
    remember(link_fd, control_fd);
    Ok(DRIVER.get_or_init(|| driver))
}

/// Returns an error if the driver has shut down because the process is in `exit`.
pub fn check_ending() -> Outcome {
    if ENDING.load(Ordering::Relaxed) { Err(DEINITIALIZED) } else { Ok(()) }
}

extern "C" fn at_exit() {
    ENDING.store(true, Ordering::Relaxed);
}

fn remember(link: RawFd, control: RawFd) {
    LINK_FD.store(link, Ordering::Relaxed);
    CONTROL_FD.store(control, Ordering::Relaxed);
    // SAFETY: `after_fork` only stores atomics and calls close, both allowed in a forked child.
    unsafe { libc::pthread_atfork(None, None, Some(after_fork)) };
    // SAFETY: `at_exit` only stores an atomic, and this library is never unloaded.
    unsafe { libc::atexit(at_exit) };
}

extern "C" fn after_fork() {
    FORKED.store(true, Ordering::Relaxed);
    for fd in [&LINK_FD, &CONTROL_FD] {
        let fd = fd.swap(-1, Ordering::Relaxed);
        if fd >= 0 {
            // SAFETY: the descriptor belongs to this library. The child does not use it, because
            // all its driver calls are refused.
            unsafe { libc::close(fd) };
        }
    }
}

/// Returns the indexes of the GPUs that CUDA_VISIBLE_DEVICES names, up to the first invalid name.
fn visible(gpus: &[GpuInfo], names: Option<&str>) -> Vec<usize> {
    let Some(names) = names else { return (0..gpus.len()).collect() };
    let mut ordinals = Vec::new();
    for name in names.split(',').map(str::trim) {
        let by_uuid = |gpu: &GpuInfo| name.len() > 4 && uuid_text(&gpu.uuid).starts_with(name);
        let by_index = name.parse().ok().filter(|index| *index < gpus.len());
        match by_index.or_else(|| gpus.iter().position(by_uuid)) {
            Some(gpu) if !ordinals.contains(&gpu) => ordinals.push(gpu),
            _ => break,
        }
    }
    ordinals
}

impl Driver {
    /// Number of devices that the process sees.
    pub fn device_count(&self) -> usize {
        guard(&self.ordinals).len()
    }

    /// Returns the index of the GPU with this device ordinal.
    pub fn gpu(&self, device: i32) -> Outcome<usize> {
        let ordinal = usize::try_from(device).map_err(|_| INVALID_DEVICE)?;
        guard(&self.ordinals).get(ordinal).copied().ok_or(INVALID_DEVICE)
    }

    /// Number of multiprocessors of a GPU.
    pub fn multiprocessors(&self, gpu: usize) -> i32 {
        let count = self.gpus.get(gpu).map_or(0, |gpu| gpu.multiprocessors);
        // A program may divide by this number, so it is at least 1.
        i32::try_from(count).unwrap_or(i32::MAX).max(1)
    }

    /// Returns the device ordinal of a GPU, or -1 if the process does not see the GPU.
    pub fn ordinal(&self, gpu: usize) -> i32 {
        guard(&self.ordinals)
            .iter()
            .position(|other| *other == gpu)
            .map_or(-1, |ordinal| ordinal as i32)
    }

    /// Returns the daemon's data about the GPU with this device ordinal.
    pub fn info(&self, device: i32) -> Outcome<&GpuInfo> {
        self.gpus.get(self.gpu(device)?).ok_or(INVALID_DEVICE)
    }

    /// Makes the driver continue after a restore, which may have moved all memory to other GPUs.
    /// Entry n of `gpu_map` is the index of the GPU that replaces GPU n.
    pub fn resume(&self, gpu_map: &[usize]) {
        for gpu in guard(&self.ordinals).iter_mut() {
            *gpu = gpu_map.get(*gpu).copied().unwrap_or(*gpu);
        }
        self.memory().resume(gpu_map);
    }

    /// Locks the mutex of the contexts and their objects, and returns them.
    pub fn contexts(&self) -> MutexGuard<'_, Contexts> {
        guard(&self.contexts)
    }

    pub fn memory(&self) -> MutexGuard<'_, Memory> {
        guard(&self.memory)
    }

    pub fn pools(&self) -> MutexGuard<'_, Pools> {
        guard(&self.pools)
    }

    pub fn modules(&self) -> MutexGuard<'_, Modules> {
        guard(&self.modules)
    }
}

fn guard<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use affinode_sim_protocol::gpu_uuid;

    #[test]
    fn visible_devices_follow_the_driver() {
        let gpu = |index| GpuInfo {
            name: String::new(),
            uuid: gpu_uuid(index),
            vram_bytes: 1,
            mig: false,
            memory_limits: false,
            multiprocessors: 1,
        };
        let gpus = [gpu(0), gpu(1), gpu(2)];
        assert_eq!(visible(&gpus, None), [0, 1, 2]);
        assert_eq!(visible(&gpus, Some("2,0")), [2, 0]);
        assert_eq!(visible(&gpus, Some("1,7,0")), [1]);
        assert_eq!(visible(&gpus, Some(&uuid_text(&gpu_uuid(2)))), [2]);
        assert!(visible(&gpus, Some("")).is_empty());
    }
}
