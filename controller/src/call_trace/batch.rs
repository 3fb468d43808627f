//! Batches of traced CUDA calls, which are sent to watchers. Each batch covers a fifth of a second.
//! Batches have the same fields in JSON and on the control socket.

use affinode_proto::api::control;
use serde::Serialize;

/// CUDA calls of all watched processes between two readings.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CallTraceBatch {
    /// Number of the batch, one higher than that of the previous batch.
    pub sequence: u64,
    /// Time of the reading, in milliseconds since 1970.
    pub unix_ms: i64,
    /// Time since the previous reading, in milliseconds.
    pub elapsed_ms: u64,
    /// Processes with calls, the busiest first.
    pub processes: Vec<ProcessCalls>,
    /// Number of further processes with calls, which the batch does not list.
    pub left_out: u64,
}

/// CUDA calls of one process in one batch.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ProcessCalls {
    /// Key of the process's container.
    pub key: String,
    /// Name of the process's container.
    pub container: String,
    /// Pid of the process on the node.
    pub pid: u32,
    /// Name of the process's program, from `/proc/PID/comm`.
    pub command: String,
    /// Exact number of calls of the process.
    pub calls: u64,
    /// Sampling rate: about one of this many calls was recorded. 0 means that the library is too
    /// old to record calls.
    pub one_in: u32,
    /// Number of calls without a usable record: the ring was full, or the record was never finished
    /// or was overwritten.
    pub dropped: u64,
    /// Calls summed up by function, the most called first.
    pub functions: Vec<FunctionCalls>,
    /// The latest recorded calls, the oldest first.
    pub recorded: Vec<RecordedCall>,
}

/// Calls of one CUDA function in one process.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct FunctionCalls {
    /// Name of the CUDA function.
    pub name: String,
    /// Number of calls, estimated from the recorded calls. Exact if every call was recorded.
    pub calls: u64,
    /// Number of calls that were recorded.
    pub recorded: u64,
    /// Number of bytes that the calls copied, set or allocated, estimated from the recorded calls.
    pub bytes: u64,
    /// Number of recorded calls that failed.
    pub failed: u64,
    /// Total duration of the recorded calls, in nanoseconds.
    pub total_ns: u64,
    /// Duration of the longest recorded call, in nanoseconds.
    pub longest_ns: u64,
}

/// One CUDA call, as recorded in the call ring of its process.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct RecordedCall {
    /// Name of the CUDA function.
    pub name: String,
    /// Thread id in the process's own pid namespace.
    pub thread: u32,
    /// Duration of the driver's function, in nanoseconds.
    pub duration_ns: u64,
    /// Number of bytes that the call copies, sets or allocates.
    pub bytes: u64,
    /// Result code that the driver returned (`CUresult`).
    pub result: u32,
    /// Number of calls that this record represents: the thread's calls since its previous recorded
    /// call, including this call.
    pub stands_for: u32,
}

impl CallTraceBatch {
    /// Returns the part of the batch that concerns one container.
    #[must_use]
    pub fn of(&self, key: &str) -> CallTraceBatch {
        let processes = self.processes.iter().filter(|p| p.key == key).cloned().collect();
        CallTraceBatch { processes, ..*self }
    }
}

/// Implements the conversions between a batch type and the matching message of the control socket.
/// The fields in brackets are lists.
macro_rules! as_sent {
    ($name:ident as $sent:ident: $($field:ident),*; [$($list:ident),*]) => {
        impl From<control::$sent> for $name {
            fn from(sent: control::$sent) -> $name {
                $name {
                    $($field: sent.$field,)*
                    $($list: sent.$list.into_iter().map(Into::into).collect(),)*
                }
            }
        }

        impl From<$name> for control::$sent {
            fn from(own: $name) -> control::$sent {
                control::$sent {
                    $($field: own.$field,)*
                    $($list: own.$list.into_iter().map(Into::into).collect(),)*
                    ..control::$sent::default()
                }
            }
        }
    };
}

as_sent!(CallTraceBatch as CallBatch: sequence, unix_ms, elapsed_ms, left_out; [processes]);
as_sent!(ProcessCalls as ProcessCalls: key, container, pid, command, calls, one_in, dropped; [functions, recorded]);
as_sent!(FunctionCalls as FunctionCalls: name, calls, recorded, bytes, failed, total_ns, longest_ns; []);
as_sent!(RecordedCall as RecordedCall: name, thread, duration_ns, bytes, result, stands_for; []);
