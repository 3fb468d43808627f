//! The call trace shows the CUDA calls of processes live while a watcher requests them.
//!
//! ```text
//!  watcher ──after()──> CallTraceHub ──watched()──> CallSampler ──SampleCalls──> agent: call ring
//!     ^                    ^                         │  ^                            │
//!     └───── batches ──────┘<── CallTraceBatch ──────┘  └────────── pread ─────────┘
//! ```
//!
//! Processes record a sample of their calls in a ring ([`affinode_proto::wire::call_ring`]). The
//! [`CallSampler`] reads the ring five times a second and sends each agent the wanted sampling
//! rate. The sampler runs on the frontend's thread. Two seconds after the last request, it orders
//! the agents to stop.

mod aggregate;
mod batch;
mod hub;
mod sampler;

pub use batch::{CallTraceBatch, FunctionCalls, ProcessCalls, RecordedCall};
pub use hub::{CallTraceHub, Scope};
pub use sampler::CallSampler;
