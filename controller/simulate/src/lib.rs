//! Simulates policies on a trace of calls, in virtual time. The decisions are made by the same code
//! as in the controller.
//!
//! ```text
//!  trace ──> engine: agents, devices, a clock ──Input──> core::Node ──Effect──> engine ──> figures
//! ```
//!
//! [`engine`] simulates the environment of [`affinode_core::Node`]: processes that call, agents
//! that execute orders in the time given by [`calibration`], and GPUs. The node makes every
//! decision. The clock jumps from event to event, so two weeks take seconds.
//!
//! Simulated: arrivals, idleness, keep-alive, victims, queue, ledger, prewakes, contexts, the copy
//! and checkpoint of each engine, host memory with the host pool, and content on disk.
//!
//! Not simulated: failures, processes whose memory grows, pauses of allocations for a proof (a
//! simulated process never allocates), processes on several GPUs, memory limits of containers, and
//! memory of the host pool that a process keeps or prefaults. Copiers are not simulated as
//! processes. Of the options of a copy (`CopyOptions`), only the host pool has an effect, so
//! a container is restored only after the copy out of another one, not during it.

pub mod baselines;
pub mod calibration;
#[cfg(test)]
mod claims;
pub mod engine;
pub mod host;
#[cfg(test)]
mod live;
mod memory;
mod no_offload;
pub mod placement;
pub mod plot;
pub mod random;
pub mod summary;
pub mod synthetic;
#[cfg(test)]
mod tests;
pub mod trace;

pub use baselines::Baseline;
pub use calibration::Calibration;
pub use host::{HostLimits, HostMemoryLimits};
pub use placement::{GpuPlacement, GpuRule};
pub use summary::SimulationSummary;
pub use trace::{TraceLoad, WorkloadTrace};

/// Reason why a simulation failed.
#[derive(Debug, thiserror::Error)]
pub enum SimulationError {
    /// A file cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// Path of the file.
        path: String,
        /// The error that the system returned.
        #[source]
        source: std::io::Error,
    },
    /// A line of a trace is invalid.
    #[error("{path}, line {line}: {what}")]
    Line {
        /// Path of the file.
        path: String,
        /// Number of the line, from 1.
        line: usize,
        /// Text that describes what is wrong with the line.
        what: String,
    },
    /// A calibration file is invalid.
    #[error("{path}: {what}")]
    Calibration {
        /// Path of the file.
        path: String,
        /// Text that describes what is wrong with the file.
        what: String,
    },
    /// The trace has no request.
    #[error("the trace has no requests")]
    Empty,
    /// One process is larger than the GPU.
    #[error(
        "a process of {process_bytes} bytes never fits into {total_bytes} bytes of VRAM: increase \
         --vram, or reduce --process-vram if the trace has no sizes"
    )]
    TooLarge {
        /// VRAM of the process, in bytes.
        process_bytes: u64,
        /// VRAM of the GPU, in bytes.
        total_bytes: u64,
    },
    /// The processes need more GPUs than the simulation supports.
    #[error(
        "the processes hold {peak_bytes} bytes of VRAM at the same time, which needs more than \
         {limit} GPUs: set --gpus, or increase --vram or --oversubscription"
    )]
    TooManyGpus {
        /// Maximum VRAM at the same time, in bytes.
        peak_bytes: u64,
        /// Maximum number of GPUs that the simulation supports.
        limit: usize,
    },
    /// The node restored a process without enough free VRAM.
    #[error(
        "the simulated controller restored a process without enough free VRAM: this is a bug, \
         please report it"
    )]
    Overcommitted,
    /// A container has waited for VRAM for a day of simulated time, in which no other event
    /// happened.
    #[error(
        "a process waits for VRAM without end: check whether the policy prevents evictions (mode \
         manual or off), whether contexts fill a GPU (with the engine copy they stay there), or \
         whether the host memory is too small for the content; otherwise this is a bug, please report it"
    )]
    Stuck,
}

/// The simulated machine: its GPUs, and the costs of offloads and restores on it.
#[derive(Clone, Copy, Debug)]
pub struct SimulatedMachine {
    /// Number of GPUs. The trace states on which GPU each process runs.
    pub gpus: usize,
    /// VRAM of each GPU that managed processes can use, in bytes.
    pub vram_bytes: u64,
    /// Costs of offloads and restores on this machine.
    pub calibration: Calibration,
    /// Host memory and disk for the content of offloaded processes.
    pub host: HostLimits,
    /// Maximum time that a call should wait, in milliseconds. The results count calls that wait
    /// longer.
    pub slo_ms: affinode_core::Millis,
}

/// Simulates every baseline (policies to compare) on the trace, on as many threads as there are
/// processors.
///
/// # Errors
/// The first error of any run.
pub fn compare(
    trace: &WorkloadTrace,
    machine: SimulatedMachine,
    baselines: &[Baseline],
) -> Result<Vec<SimulationSummary>, SimulationError> {
    let next = std::sync::atomic::AtomicUsize::new(0);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let work = || {
        let mut done = Vec::new();
        loop {
            let n = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let Some(baseline) = baselines.get(n) else { return done };
            done.push((n, engine::run(trace, machine, baseline)));
        }
    };
    let mut all = std::thread::scope(|scope| {
        let started: Vec<_> =
            (0..threads.min(baselines.len())).map(|_| scope.spawn(work)).collect();
        started.into_iter().flat_map(|t| t.join().unwrap_or_default()).collect::<Vec<_>>()
    });
    all.sort_by_key(|(n, _)| *n);
    all.into_iter().map(|(_, summary)| summary).collect()
}
