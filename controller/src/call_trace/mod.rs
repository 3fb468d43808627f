//! The calls that processes make, live, for as long as somebody watches.
//!
//! ```text
//!  who watches ──asks──> CallHub ──wanted──> Scout ──Watch──> agent: records into its page
//!       ^                   ^                  │  ^                       │
//!       └──── batches ──────┘<── tallies ──────┘  └─────── pread ─────────┘
//! ```
//!
//! Processes record a sample of their calls by themselves
//! ([`affinode_proto::wire::calls`]); the [`Scout`] reads it five times a second and says
//! how much of a sample it wants. It runs on the thread of what people see. When nobody
//! has asked for a moment, the processes are told to stop.

mod aggregate;
mod batch;
mod hub;
mod sampler;

pub use batch::{CallTraceBatch, FunctionCalls, ProcessCalls, RecordedCall};
pub use hub::{CallTraceHub, Scope};
pub use sampler::{CallSampler, CallSource};
