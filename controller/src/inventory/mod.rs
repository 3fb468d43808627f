//! Reads the state of the machine: GPUs ([`nvml`]), processes ([`process`]), host memory
//! ([`memory`]). A thread reads GPUs and host memory ([`Inventory`]), so that a slow driver never
//! blocks the actor. Two further threads read the utilization of processes
//! ([`process_utilization`]), and the host memory that is left during copies out ([`host_levels`]).
//! The threads send each result as an input of the core. The command `affinode gpus` reads what does
//! not change ([`gpu_facts`]).

pub mod driver_limits;
pub mod gpu_facts;
pub mod host_levels;
pub mod memory;
pub mod network;
pub mod nvml;
pub mod own_cgroup;
pub mod process;
pub mod process_utilization;
mod queries;
pub mod utilization;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use affinode_core::{
    GpuSample, Input, Key, ProcessId, Survey,
    driver_limit::DriverLimitOrder,
    host_memory::{HostNeed, SurveyedMemory},
};
use affinode_proto::reason::Reason;

use crate::driver_library::DriverLibrary;
use driver_limits::DriverLimits;
use memory::MemoryRules;
use queries::QueryQueue;

/// Time after which a query in progress shows that NVML does not respond.
const UNANSWERED: Duration = Duration::from_secs(5);

/// A request to the thread that reads GPUs and host memory.
#[derive(Debug)]
pub enum InventoryQuery {
    /// Requests all GPUs with their processes and utilization.
    Gpus,
    /// Requests the memory of all GPUs, to prove that enough VRAM is free for a restore of the
    /// container with this key. The response repeats the key and the number.
    Prove {
        /// The container with the grant.
        key: Key,
        /// Number of the request.
        number: u64,
        /// Whether the VRAM of each process is needed.
        with_processes: bool,
    },
    /// Requests all GPUs with their processes. The core needs them to decide how much a container
    /// with a VRAM limit may allocate. The response repeats the fields of the request.
    Vram {
        /// The container with a VRAM limit.
        key: Key,
        /// Number of the recall that preceded this reading. A recall withdraws the VRAM allowances
        /// of the container's processes.
        epoch: u64,
        /// Pending bytes of each process of the container: allocations that were allowed before the
        /// recall and may be missing in NVML's reading.
        pending: Vec<(ProcessId, u64)>,
    },
    /// Sets, lifts or removes the limit of a container's VRAM that the driver enforces.
    LimitInDriver(DriverLimitOrder),
    /// Requests the GPUs and the host memory, before an offload of a container.
    Survey {
        /// Key of the container that will be offloaded.
        key: Key,
        /// Host memory that the container's processes need.
        processes: Vec<HostNeed>,
        /// Whether the content may be copied to the host pool.
        host_pool: bool,
        /// Pids of all managed processes and of all copiers. If another process in the container's
        /// cgroup uses a GPU, it is unmanaged, and the container is not offloaded.
        known: Vec<u32>,
    },
}

/// Handle of the thread that reads GPUs and host memory. The thread ends when it is dropped.
#[derive(Debug)]
pub struct Inventory {
    queries: Arc<QueryQueue>,
}

impl Inventory {
    /// Starts the thread that reads GPUs and host memory. The thread calls `tell` with the result
    /// of each request, in the order of the requests. If several proofs of one container wait, only
    /// the last one has a result.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(
        library: DriverLibrary,
        rules: MemoryRules,
        pool_cgroup: PathBuf,
        run_dir: &Path,
        tell: impl Fn(Input) + Send + 'static,
    ) -> std::io::Result<Inventory> {
        let mut limits = DriverLimits::new(run_dir);
        let mut nvml = nvml::NvmlDevices::new(library);
        Inventory::start_with(
            move |query| answer(&mut nvml, &mut limits, rules, &pool_cgroup, query),
            tell,
        )
    }

    /// Starts the thread with the function that answers a query.
    fn start_with(
        mut answer: impl FnMut(InventoryQuery) -> Input + Send + 'static,
        tell: impl Fn(Input) + Send + 'static,
    ) -> std::io::Result<Inventory> {
        let queries = Arc::new(QueryQueue::default());
        let asked = Arc::clone(&queries);
        std::thread::Builder::new().name("inventory".into()).spawn(move || {
            while let Some(query) = asked.next(Instant::now) {
                let input = answer(query);
                asked.answered();
                tell(input);
            }
        })?;
        Ok(Inventory { queries })
    }

    /// Sends a request to the thread. The thread passes the result to the function `tell`.
    pub fn ask(&self, query: InventoryQuery) {
        self.queries.push(query);
    }

    /// Returns an error for the core if the request in progress has had no answer for 5 s, because
    /// a call of NVML blocks or is very slow. Returns it once for each request. The next answer
    /// shows that NVML responds again.
    pub fn stall(&self) -> Option<String> {
        let waited = self.queries.overdue(UNANSWERED, Instant::now())?;
        let seconds = waited.as_secs();
        Some(format!(
            "NVML has not answered for {seconds} s; check whether nvidia-smi answers on this node"
        ))
    }
}

impl Drop for Inventory {
    fn drop(&mut self) {
        self.queries.close();
    }
}

fn answer(
    nvml: &mut nvml::NvmlDevices,
    limits: &mut DriverLimits,
    rules: MemoryRules,
    pool_cgroup: &Path,
    query: InventoryQuery,
) -> Input {
    match query {
        InventoryQuery::Gpus => Input::Gpus(nvml.read(true)),
        InventoryQuery::Prove { key, number, with_processes } => {
            Input::Proven(key, number, nvml.read(with_processes))
        }
        InventoryQuery::Vram { key, epoch, pending } => {
            Input::VramRead { key, epoch, pending, gpus: nvml.read(true) }
        }
        InventoryQuery::LimitInDriver(order) => {
            let outcome = limits.execute(nvml, &order);
            Input::DriverLimited(order.key, outcome)
        }
        InventoryQuery::Survey { key, processes, host_pool, known } => {
            let gpus = nvml.read(true);
            let on_gpus = gpus.as_deref().unwrap_or_default();
            let used_bytes = host_pool.then(|| host_pool_used_bytes(rules, pool_cgroup)).flatten();
            let host = host_pools(rules, processes, used_bytes, &known, on_gpus);
            Input::Surveyed(key, Survey { gpus, host })
        }
    }
}

/// Returns the memory of the host pool that is in use, in bytes. `None`: the node has no host pool,
/// or its use cannot be read.
fn host_pool_used_bytes(rules: MemoryRules, cgroup: &Path) -> Option<u64> {
    if rules.host_pool_bytes == 0 {
        return None;
    }
    match affinode_host_pool::used_bytes(cgroup) {
        Ok(bytes) => Some(bytes),
        // The pool has not been used yet since the node was booted.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Some(0),
        Err(error) => {
            tracing::debug!(
                %error,
                "host pool: cannot read how much of it is in use, so this offload does not use it"
            );
            None
        }
    }
}

fn host_pools(
    rules: MemoryRules,
    mut processes: Vec<HostNeed>,
    host_pool_used_bytes: Option<u64>,
    known: &[u32],
    gpus: &[GpuSample],
) -> Result<SurveyedMemory, (Reason, String)> {
    let ours: Vec<u32> = processes.iter().map(|need| need.pid).collect();
    let on_gpu: Vec<u32> =
        gpus.iter().flat_map(|gpu| gpu.processes.iter().map(|(pid, _)| *pid)).collect();
    if let Some(stranger) = process::stranger(&ours, known, &on_gpu) {
        return Err((Reason::UnmanagedProcess, format!("process {stranger}")));
    }
    // NVML may report more VRAM now than the core knew when it sent the request.
    for need in &mut processes {
        let held = gpus.iter().flat_map(|g| &g.processes).filter(|(pid, _)| *pid == need.pid);
        let held_bytes: u64 = held.map(|(_, bytes)| bytes).sum();
        let more_bytes = held_bytes.saturating_sub(need.vram_bytes);
        if need.copied_bytes > 0 {
            // The process reports what its library copies, and is not trusted.
            let vram_bytes = held_bytes.max(need.vram_bytes);
            need.copied_bytes = need.copied_bytes.saturating_add(more_bytes).min(vram_bytes);
            need.kept_bytes = need.kept_bytes.min(need.copied_bytes);
        }
        need.bytes = need.bytes.saturating_add(more_bytes);
    }
    memory::pools(rules, &processes, host_pool_used_bytes)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use affinode_core::host_memory::{HostPoolAllowance, MemoryPlace};
    use affinode_proto::wire::copier::CHUNK_BYTES;

    use super::*;

    /// A call that blocks stands in for NVML. The queue must not grow meanwhile, and no proof that
    /// is out of date may be read afterwards.
    #[test]
    fn blocked_nvml_is_noticed() {
        let (release, released) = mpsc::channel();
        let (found, findings) = mpsc::channel();
        let answer = move |query| {
            released.recv().unwrap();
            match query {
                InventoryQuery::Prove { key, number, .. } => Input::Proven(key, number, Ok(vec![])),
                _ => Input::Gpus(Ok(vec![])),
            }
        };
        let tell = move |input| found.send(input).unwrap();
        let inventory = Inventory::start_with(answer, tell).unwrap();
        inventory.ask(InventoryQuery::Gpus);
        for number in 0..1_000 {
            let key = Key::parse(&"a".repeat(32)).unwrap();
            inventory.ask(InventoryQuery::Prove { key, number, with_processes: false });
        }
        let overdue = || inventory.queries.overdue(Duration::ZERO, Instant::now());
        // The thread takes the first query soon.
        while overdue().is_none() {
            std::thread::yield_now();
        }
        assert_eq!(overdue(), None, "it is reported once");
        release.send(()).unwrap();
        assert!(matches!(findings.recv(), Ok(Input::Gpus(Ok(_)))));
        release.send(()).unwrap();
        assert!(matches!(findings.recv(), Ok(Input::Proven(_, 999, Ok(_)))));
        drop(inventory);
        assert!(findings.recv().is_err(), "the thread has ended");
    }

    /// What a process has allocated since the core's last reading must be added to its need. What
    /// it had before must not be added again, although a retained copy makes its need smaller.
    #[test]
    fn growth_since_the_last_reading_is_needed() {
        let pid = std::process::id();
        let rules = MemoryRules {
            overhead_bytes: 0,
            node_reserve_bytes: Some(0),
            host_pool_bytes: 1 << 40,
        };
        let need = HostNeed {
            pid,
            vram_bytes: 1_000,
            bytes: 300,
            copied_bytes: 800,
            kept_bytes: 0,
            driver_moves: false,
        };
        let allowance = |bytes| HostPoolAllowance { pid, bytes, kept_bytes: 0 };
        // The core has not seen the process's VRAM yet. The process reports too much.
        let new = HostNeed { vram_bytes: 0, bytes: 0, copied_bytes: 1 << 50, ..need };
        let gpu = GpuSample { processes: vec![(pid, 900)], ..GpuSample::default() };
        let memory = host_pools(rules, vec![new], Some(0), &[], &[gpu]).unwrap();
        assert_eq!(memory.allowances, [allowance(900 + CHUNK_BYTES)]);
        let liar = HostNeed { kept_bytes: 1 << 50, ..new };
        let gpu = GpuSample { processes: vec![(pid, 900)], ..GpuSample::default() };
        let memory = host_pools(rules, vec![liar], Some(0), &[], &[gpu]).unwrap();
        let allowed = HostPoolAllowance { kept_bytes: 900, ..allowance(900 + CHUNK_BYTES) };
        assert_eq!(memory.allowances, [allowed]);
        for (held_bytes, more_bytes) in [(1_000, 0), (900, 0), (1_250, 250)] {
            let gpu = GpuSample { processes: vec![(pid, held_bytes)], ..GpuSample::default() };
            let memory = host_pools(rules, vec![need], Some(0), &[], &[gpu]).unwrap();
            let node = memory.container.iter().find(|pool| pool.place == MemoryPlace::Node);
            assert_eq!(node.unwrap().need_bytes, 300 + more_bytes);
            assert_eq!(memory.allowances, [allowance(800 + more_bytes + CHUNK_BYTES)]);
        }
    }
}
