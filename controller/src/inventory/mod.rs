//! What the machine says: devices ([`nvml`]), processes ([`process`]), memory
//! ([`memory`]). One thread asks ([`Inventory`]), so that a slow driver never holds up
//! the task that decides; another asks what runs on the devices ([`process_utilization`]).

pub mod host_levels;
pub mod memory;
pub mod network;
pub mod nvml;
pub mod process;
pub mod process_utilization;
pub mod utilization;

use std::sync::mpsc;

use affinode_proto::reason::Reason;

use crate::core::{
    GpuSample, Key, Survey, copy_watch::Levels, host_memory::MemoryPool, input::Work,
};
use memory::MemoryRules;

/// A question.
#[derive(Debug)]
pub enum InventoryQuery {
    /// Everything about every device.
    Gpus,
    /// Memory of every device, for a restore of this container; the number comes back.
    Prove(Key, u64),
    /// Devices and host memory, for an offload of a container.
    Survey {
        /// Which.
        key: Key,
        /// Its processes, and what each has.
        processes: Vec<(u32, u64)>,
        /// Everybody on a device who is managed, and copiers: they may share its cgroup.
        known: Vec<u32>,
    },
}

/// An answer.
#[derive(Debug)]
pub enum InventoryResult {
    /// To [`InventoryQuery::Gpus`].
    Gpus(Result<Vec<GpuSample>, String>),
    /// Who had work running on a device, by [`process_utilization`].
    Worked(Vec<Work>),
    /// To [`InventoryQuery::Prove`].
    Proven(Key, u64, Result<Vec<GpuSample>, String>),
    /// To [`InventoryQuery::Survey`].
    Surveyed(Key, Survey),
    /// What is left of host memory for copies in progress, by [`host_levels`].
    HostLevels(Vec<Levels>),
}

/// The thread that asks.
#[derive(Debug)]
pub struct Inventory {
    questions: mpsc::Sender<InventoryQuery>,
}

impl Inventory {
    /// Starts the thread. `tell` is called with each answer, in order.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(
        library: String,
        rules: MemoryRules,
        tell: impl Fn(InventoryResult) + Send + 'static,
    ) -> std::io::Result<Inventory> {
        let (questions, asked) = mpsc::channel();
        std::thread::Builder::new().name("inventory".into()).spawn(move || {
            let mut nvml = nvml::NvmlDevices::new(library);
            for question in asked {
                tell(answer(&mut nvml, rules, question));
            }
        })?;
        Ok(Inventory { questions })
    }

    /// Asks; the answer comes later.
    pub fn ask(&self, question: InventoryQuery) {
        // The thread ends with the last sender alone, so this cannot fail while we live.
        let _ = self.questions.send(question);
    }
}

fn answer(
    nvml: &mut nvml::NvmlDevices,
    rules: MemoryRules,
    question: InventoryQuery,
) -> InventoryResult {
    match question {
        InventoryQuery::Gpus => InventoryResult::Gpus(nvml.read(true)),
        InventoryQuery::Prove(key, number) => {
            InventoryResult::Proven(key, number, nvml.read(false))
        }
        InventoryQuery::Survey { key, processes, known } => {
            let gpus = nvml.read(true);
            let host = host_pools(rules, &processes, &known, gpus.as_deref().unwrap_or_default());
            InventoryResult::Surveyed(key, Survey { gpus, host })
        }
    }
}

fn host_pools(
    rules: MemoryRules,
    processes: &[(u32, u64)],
    known: &[u32],
    gpus: &[GpuSample],
) -> Result<Vec<MemoryPool>, (Reason, String)> {
    let ours: Vec<u32> = processes.iter().map(|(pid, _)| *pid).collect();
    let on_gpu: Vec<u32> =
        gpus.iter().flat_map(|gpu| gpu.processes.iter().map(|(pid, _)| *pid)).collect();
    if let Some(stranger) = process::stranger(&ours, known, &on_gpu) {
        return Err((Reason::UnmanagedProcess, format!("process {stranger}")));
    }
    // What NVML says now counts more than what was known when the question was asked.
    let sizes: Vec<(u32, u64)> = processes
        .iter()
        .map(|(pid, known)| {
            let now: u64 = gpus
                .iter()
                .flat_map(|g| &g.processes)
                .filter(|(p, _)| p == pid)
                .map(|(_, bytes)| bytes)
                .sum();
            (*pid, now.max(*known))
        })
        .collect();
    memory::pools(rules, &sizes)
}
