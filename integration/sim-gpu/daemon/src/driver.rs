//! The daemon's state of the node (processes, GPUs, memory), and the effect of each request on it.
//!
//! One mutex guards this state. A thread holds it only briefly, and never while the thread fills
//! memory, waits or sleeps. The checkpoint state of each process has its own mutex, which is held
//! during a whole checkpoint operation.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use affinode_sim_protocol::{
    GpuSnapshot, MemoryLimit, ObjectId, Packet, ProcessUse, Reply, STATS_BYTES, THREADS, code,
};

use crate::checkpoint::Stage;
use crate::config::Config;
use crate::ledger::{ClientId, Ledger};
use crate::limits::Limits;
use crate::usage::Usage;
use crate::{memory, node};

/// Maximum number of memory objects. The daemon has an open descriptor for each object, and a
/// container must not be able to use up the daemon's descriptors.
const MAX_OBJECTS: usize = 16 * 1024;
const MAX_EXPORTS: usize = 256;
const MAX_TOKENS: usize = 4096;
/// Maximum number of processes in a snapshot, so that it fits into a packet.
const MAX_LISTED_PROCESSES: usize = 64;

/// Result of a request. On success: the reply, and a descriptor if the reply needs one. On failure:
/// the error code, as a `CUresult`.
pub type Answer = Result<(Reply, Option<Arc<OwnedFd>>), i32>;

#[derive(Debug)]
pub struct Process {
    pub id: ClientId,
    pub pid: u32,
    /// User id of the process. This user and root may checkpoint the process.
    pub uid: u32,
    /// The statistics page, in which the process records the times of its kernels.
    pub stats: File,
    /// Checkpoint state of the process. The mutex is locked while a checkpoint operation runs.
    pub stage: Mutex<Stage>,
    /// Connection to the checkpoint thread of the process, and the id of that thread.
    pub control: Mutex<Option<(Arc<Packet>, i32)>>,
}

#[derive(Debug)]
pub struct State {
    pub ledger: Ledger,
    pub limits: Limits,
    /// The memory file of each object.
    pub memories: HashMap<ObjectId, Arc<OwnedFd>>,
    processes: HashMap<ClientId, Arc<Process>>,
    tokens: HashMap<String, ObjectId>,
    usage: Usage,
    next_client: u64,
}

/// The simulated kernel driver of the node.
#[derive(Debug)]
pub struct Driver {
    pub config: Config,
    state: Mutex<State>,
}

/// Locks a mutex, even if a thread has panicked while it held the mutex. This is safe because the
/// ledger is consistent after each statement.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Driver {
    pub fn new(config: Config) -> Self {
        let capacities = config.gpu_infos().iter().map(|gpu| gpu.vram_bytes).collect();
        let ledger = Ledger::new(
            capacities,
            config.context_bytes(),
            u64::from(config.multiprocessors()) * u64::from(THREADS),
        );
        let state = State {
            ledger,
            limits: Limits::default(),
            memories: HashMap::new(),
            processes: HashMap::new(),
            tokens: HashMap::new(),
            usage: Usage::default(),
            next_client: 1,
        };
        Self { config, state: Mutex::new(state) }
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Registers a CUDA process. Returns the process, and the descriptor of its new statistics
    /// page.
    pub fn attach(&self, pid: u32, uid: u32) -> io::Result<(Arc<Process>, Arc<OwnedFd>)> {
        let page = memory::create("affinode-sim-stats", STATS_BYTES as u64)?;
        let stats = File::from(page.try_clone()?);
        let cgroup = self.config.memory_limits.then(|| node::cgroup(pid)).flatten();
        let mut state = self.state();
        let id = ClientId(state.next_client);
        state.next_client += 1;
        let (stage, control) = (Mutex::new(Stage::Running), Mutex::new(None));
        let process = Arc::new(Process { id, pid, uid, stats, stage, control });
        state.processes.insert(id, Arc::clone(&process));
        if let Some(cgroup) = cgroup {
            state.limits.attach(id, cgroup);
        }
        Ok((process, Arc::new(page)))
    }

    /// Removes a process that has ended, with all its memory and contexts.
    pub fn detach(&self, process: &Process) {
        let mut state = self.state();
        state.processes.remove(&process.id);
        state.limits.detach(process.id);
        for object in state.ledger.remove(process.id) {
            state.bury(object);
        }
        drop(state);
        if let Some((control, _)) = lock(&process.control).take() {
            control.hang_up();
        }
    }

    /// Returns the CUDA process with this pid, or `None` if there is none. If a pid was reused,
    /// returns the process that attached most recently.
    pub fn process(&self, pid: u32) -> Option<Arc<Process>> {
        let state = self.state();
        state
            .processes
            .values()
            .filter(|process| process.pid == pid)
            .max_by_key(|process| process.id)
            .cloned()
    }

    /// Creates a context, for `cuCtxCreate` and similar calls.
    pub fn create_context(&self, client: ClientId, gpu: usize) -> Answer {
        self.check_gpu(gpu)?;
        let mut state = self.state();
        let bytes = state.ledger.next_context_bytes(client, gpu);
        state.check_limit(client, gpu, bytes)?;
        state.ledger.create_context(client, gpu).map_err(|_| code::OUT_OF_MEMORY)?;
        Ok((Reply::Done, None))
    }

    pub fn set_stack_limit(&self, client: ClientId, gpu: usize, bytes: u64) -> Answer {
        self.check_gpu(gpu)?;
        let mut state = self.state();
        state.ledger.set_stack_limit(client, gpu, bytes).map_err(|_| code::OUT_OF_MEMORY)?;
        Ok((Reply::Done, None))
    }

    pub fn allocate(&self, client: ClientId, gpu: usize, bytes: u64) -> Answer {
        self.check_gpu(gpu)?;
        if bytes == 0 {
            return Err(code::INVALID_VALUE);
        }
        let object = {
            let mut state = self.state();
            if state.ledger.object_count() >= MAX_OBJECTS {
                return Err(code::OUT_OF_MEMORY);
            }
            state.check_limit(client, gpu, bytes)?;
            state.ledger.allocate(client, gpu, bytes).map_err(|_| code::OUT_OF_MEMORY)?
        };
        let memory = memory::create("affinode-sim-vram", bytes);
        let mut state = self.state();
        match memory {
            Ok(memory) if state.ledger.holds(client, object) => {
                let memory = Arc::new(memory);
                state.memories.insert(object, Arc::clone(&memory));
                Ok((Reply::Object { object, gpu, bytes }, Some(memory)))
            }
            // Host memory to simulate VRAM is missing, or the process has ended meanwhile.
            _ => {
                state.ledger.release(client, object);
                Err(code::OUT_OF_MEMORY)
            }
        }
    }

    pub fn free(&self, client: ClientId, object: ObjectId) -> Answer {
        let mut state = self.state();
        if !state.ledger.holds(client, object) {
            return Err(code::INVALID_VALUE);
        }
        if let Some(gone) = state.ledger.release(client, object) {
            state.bury(gone);
        }
        Ok((Reply::Done, None))
    }

    /// Registers a descriptor to which a client has exported an object. `name` is the number that
    /// identifies the descriptor.
    pub fn export(&self, client: ClientId, object: ObjectId, name: u64) -> Result<(), i32> {
        let mut state = self.state();
        if !state.ledger.holds(client, object) {
            return Err(code::INVALID_VALUE);
        }
        if state.ledger.export_count() >= MAX_EXPORTS {
            return Err(code::OUT_OF_MEMORY);
        }
        let object = state.ledger.meant(client, object);
        state.ledger.export(name, object);
        Ok(())
    }

    /// Removes an exported descriptor. Called after the last copy of the descriptor was closed.
    pub fn close_export(&self, name: u64) {
        let mut state = self.state();
        if let Some(object) = state.ledger.close_export(name) {
            state.bury(object);
        }
    }

    /// Simulates the function `cuMemImportFromShareableHandle`.
    pub fn import(&self, client: ClientId, name: u64) -> Answer {
        let mut state = self.state();
        let object = state.ledger.exported(name).ok_or(code::INVALID_VALUE)?;
        state.open(client, object)
    }

    /// Simulates the function `cuIpcGetMemHandle`.
    pub fn ipc_export(&self, client: ClientId, object: ObjectId) -> Answer {
        let mut state = self.state();
        if !state.ledger.holds(client, object) {
            return Err(code::INVALID_VALUE);
        }
        let object = state.ledger.meant(client, object);
        if let Some((token, _)) = state.tokens.iter().find(|(_, named)| **named == object) {
            return Ok((Reply::Token(token.clone()), None));
        }
        if state.tokens.len() >= MAX_TOKENS {
            return Err(code::OUT_OF_MEMORY);
        }
        // The token is a random UUID of the kernel, so that other processes cannot guess it.
        let token = std::fs::read_to_string("/proc/sys/kernel/random/uuid")
            .map_err(|_| code::OPERATING_SYSTEM)?;
        let token = token.trim().replace('-', "");
        state.tokens.insert(token.clone(), object);
        Ok((Reply::Token(token), None))
    }

    /// Simulates the function `cuIpcOpenMemHandle`.
    pub fn ipc_open(&self, client: ClientId, token: &str) -> Answer {
        let mut state = self.state();
        let object = *state.tokens.get(token).ok_or(code::INVALID_VALUE)?;
        state.open(client, object)
    }

    /// Simulates the function `cuMemGetInfo`. A limit of the client's cgroup reduces both results.
    pub fn memory(&self, client: Option<ClientId>, gpu: usize) -> Answer {
        self.check_gpu(gpu)?;
        let state = self.state();
        let free_bytes = state.ledger.free_bytes(gpu);
        let total_bytes = self.config.gpu_infos()[gpu].vram_bytes;
        let limit = client.and_then(|client| state.limits.of_client(&state.ledger, gpu, client));
        let (hard_bytes, used_bytes) = limit.unwrap_or((u64::MAX, 0));
        let memory = Reply::Memory {
            free_bytes: free_bytes.min(hard_bytes.saturating_sub(used_bytes)),
            total_bytes: total_bytes.min(hard_bytes),
        };
        Ok((memory, None))
    }

    /// Simulates the function `nvmlDeviceSetMemoryLimits_v1`, which only root may call. Its cgroup
    /// must be a leaf. MIG is not supported.
    pub fn limit_memory(&self, uid: u32, limit: MemoryLimit) -> Answer {
        self.check_gpu(limit.gpu)?;
        if !self.config.memory_limits || self.config.gpu_infos()[limit.gpu].mig {
            return Err(code::NOT_SUPPORTED);
        }
        if uid != 0 {
            return Err(code::NOT_PERMITTED);
        }
        if !node::is_leaf_cgroup(&limit.cgroup) {
            return Err(code::INVALID_HANDLE);
        }
        self.state().limits.set(limit);
        Ok((Reply::Done, None))
    }

    /// Returns the limits that are set. The end of a cgroup removes its limits.
    pub fn limits(&self) -> Reply {
        let mut state = self.state();
        for limit in state.limits.list().iter().filter(|limit| !limit.cgroup.exists()) {
            state.limits.forget(&limit.cgroup);
        }
        Reply::Limits(state.limits.list())
    }

    /// Reads the statistics pages of all processes, to compute utilisation.
    pub fn sample(&self, now_ns: u64) {
        let mut guard = self.state();
        let state = &mut *guard;
        let pages = state.processes.values().map(|process| (process.id, &process.stats));
        state.usage.sample(now_ns, usize::from(self.config.gpus), pages);
    }

    /// Returns the data that NVML returns to the process `caller`. A limit of its cgroup reduces
    /// the size of the GPU, and only the VRAM of this cgroup counts as used.
    pub fn snapshot(&self, caller: u32) -> Reply {
        let cgroup = self.config.memory_limits.then(|| node::cgroup(caller)).flatten();
        let infos = self.config.gpu_infos();
        let state = self.state();
        let mut processes: Vec<&Arc<Process>> = state.processes.values().collect();
        processes.sort_by_key(|process| process.id);
        let gpus = infos.into_iter().enumerate().map(|(gpu, mut info)| {
            let limit = cgroup.as_deref();
            let limit = limit.and_then(|it| state.limits.of_cgroup(&state.ledger, gpu, it));
            let used_bytes = limit.map_or(state.ledger.used_bytes(gpu), |(_, used)| used);
            info.vram_bytes = limit.map_or(info.vram_bytes, |(hard, _)| info.vram_bytes.min(hard));
            let uses = processes.iter().map(|process| ProcessUse {
                pid: process.pid,
                used_bytes: state.ledger.client_bytes(process.id, gpu),
                busy_percent: state.usage.busy_percent(process.id, gpu),
            });
            let uses: Vec<_> =
                uses.filter(|process| process.used_bytes > 0).take(MAX_LISTED_PROCESSES).collect();
            let busy_percent =
                uses.iter().map(|process| process.busy_percent).sum::<u32>().min(100);
            GpuSnapshot {
                info,
                used_bytes,
                unnoted_bytes: state.ledger.unnoted_bytes(gpu),
                busy_percent,
                processes: uses,
            }
        });
        Reply::Snapshot(gpus.collect())
    }

    fn check_gpu(&self, gpu: usize) -> Result<(), i32> {
        if gpu < usize::from(self.config.gpus) { Ok(()) } else { Err(code::INVALID_DEVICE) }
    }
}

impl State {
    /// Checks whether the limit of a client's cgroup permits that the client takes further bytes of
    /// a GPU.
    pub fn check_limit(&self, client: ClientId, gpu: usize, bytes: u64) -> Result<(), i32> {
        let permitted = self.limits.permit(&self.ledger, gpu, client, bytes);
        if permitted { Ok(()) } else { Err(code::OUT_OF_MEMORY) }
    }

    /// Frees the memory of an object that the ledger has released, and invalidates the object's IPC
    /// handles.
    pub fn bury(&mut self, object: ObjectId) {
        self.memories.remove(&object);
        self.tokens.retain(|_, named| *named != object);
    }

    fn open(&mut self, client: ClientId, object: ObjectId) -> Answer {
        let memory = Arc::clone(self.memories.get(&object).ok_or(code::INVALID_HANDLE)?);
        let (gpu, bytes) = self.ledger.hold(client, object).ok_or(code::INVALID_HANDLE)?;
        Ok((Reply::Object { object, gpu, bytes }, Some(memory)))
    }
}
