//! The call trace: a live view of the CUDA calls of processes. It runs while a watcher requests it.
//!
//! ```text
//!  watcher ──after()──> CallTraceHub ──watched()──> CallSampler ──SampleCalls──> agent: call ring
//!     ^                    ^                         │  ^                            │
//!     └───── batches ──────┘<── CallTraceBatch ──────┘  └────────── pread ─────────┘
//! ```
//!
//! Each process records a sample of its CUDA calls in a ring ([`affinode_proto::wire::call_ring`]).
//! The [`CallSampler`] reads the rings five times a second. It also sends each agent the sampling
//! rate that the process must use. The sampler runs on the thread of the dashboard and the history.
//! The subscription of a watcher expires two seconds after the time limit of its last request. When
//! no subscription is left, the sampler orders the agents to stop the recording.

mod aggregate;
mod batch;
mod hub;
mod sampler;

pub use batch::{CallTraceBatch, FunctionCalls, ProcessCalls, RecordedCall};
pub use hub::{CallTraceHub, Scope};
pub use sampler::CallSampler;
