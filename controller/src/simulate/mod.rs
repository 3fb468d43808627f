//! What policies would do to a trace, in virtual time and by the code that runs live.
//!
//! ```text
//!  trace ──> engine: agents, devices, a clock ──Input──> core::Node ──Effect──> engine ──> figures
//! ```
//!
//! [`engine`] plays everything around [`crate::core::Node`]: processes that call, agents
//! that carry out orders in the time that [`calibration`] says, devices that answer. Every
//! decision is the node's. Nothing happens between events, so two weeks take seconds.
//!
//! Simulated: arrivals, idleness, keep-alive, victims, queue, ledger, returns ahead of
//! calls. Not simulated: failures, growth of a process, holding of allocations (a simulated
//! process never allocates), processes on several devices.

pub mod baselines;
pub mod calibration;
#[cfg(test)]
mod claims;
pub mod engine;
#[cfg(test)]
mod live;
mod no_offload;
pub mod plot;
pub mod random;
pub mod recorded;
pub mod summary;
pub mod synthetic;
#[cfg(test)]
mod tests;
pub mod trace;

pub use baselines::Baseline;
pub use calibration::Calibration;
pub use summary::SimulationSummary;
pub use trace::{TraceLoad, WorkloadTrace};

/// What stops a simulation.
#[derive(Debug, thiserror::Error)]
pub enum SimulationError {
    /// A file cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// Which.
        path: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A line of a trace is not understood.
    #[error("{path}, line {line}: {what}")]
    Line {
        /// The file.
        path: String,
        /// Counted from 1.
        line: usize,
        /// What is wrong.
        what: String,
    },
    /// The calibration is not understood.
    #[error("{path}: {what}")]
    Calibration {
        /// The file.
        path: String,
        /// What is wrong.
        what: String,
    },
    /// The trace has no request.
    #[error("the trace holds no request")]
    Empty,
    /// A process alone is larger than the device.
    #[error(
        "a process of {process_bytes} bytes never fits into {total_bytes} bytes of VRAM: --vram \
         gives more, --process-vram is for those whose trace does not tell"
    )]
    TooLarge {
        /// Its size.
        process_bytes: u64,
        /// The device.
        total_bytes: u64,
    },
    /// The node ordered what the driver does not survive.
    #[error("the policy restored a process without room: this is a bug, please report it")]
    Overcommitted,
    /// Somebody waits for ever.
    #[error(
        "a process waits for VRAM for ever: does the policy let nobody make room (mode manual or off)? \
         If not, this is a bug, please report it"
    )]
    Stuck,
}

/// The device and the host that a trace runs on.
#[derive(Clone, Copy, Debug)]
pub struct SimulatedMachine {
    /// Devices; process n is on device n modulo this.
    pub gpus: usize,
    /// VRAM of each for managed processes.
    pub vram_bytes: u64,
    /// Costs of moves.
    pub calibration: Calibration,
}

/// Runs every contender over the trace, on as many threads as there are processors.
///
/// # Errors
/// The first that failed.
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
