//! What was called in a fifth of a second, as watchers get it: the same in JSON and on
//! the control socket.

use affinode_proto::api::control;
use serde::Serialize;

/// Everything that was watched, between two readings.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CallTraceBatch {
    /// Grows by one with each batch of a controller.
    pub sequence: u64,
    /// When the reading was made, milliseconds since 1970.
    pub unix_ms: i64,
    /// Since the reading before.
    pub elapsed_ms: u64,
    /// Processes that made calls, those that made most first.
    pub processes: Vec<ProcessCalls>,
    /// Further processes that made calls and have no place here.
    pub left_out: u64,
}

/// One process.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ProcessCalls {
    /// Key of its container.
    pub key: String,
    /// Name of its container.
    pub container: String,
    /// Its pid on the node.
    pub pid: u32,
    /// Its program.
    pub command: String,
    /// Calls made, counted one by one.
    pub calls: u64,
    /// About one call in so many was recorded; 0: its library is too old to record any.
    pub one_in: u32,
    /// Calls that nothing is known of: the ring was full.
    pub dropped: u64,
    /// By function, the most called first.
    pub functions: Vec<FunctionCalls>,
    /// The last calls that were recorded, oldest first.
    pub recorded: Vec<RecordedCall>,
}

/// One function of a process.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct FunctionCalls {
    /// Its name.
    pub name: String,
    /// Calls, reckoned from those that were recorded; exact where each one was.
    pub calls: u64,
    /// Calls that were recorded.
    pub recorded: u64,
    /// Bytes that the calls moved, filled or asked for, reckoned likewise.
    pub bytes: u64,
    /// Recorded calls that failed.
    pub failed: u64,
    /// Time that the recorded calls took, together.
    pub total_ns: u64,
    /// The longest of them.
    pub longest_ns: u64,
}

/// One call.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct RecordedCall {
    /// The function's name.
    pub name: String,
    /// Thread id, in the process's own namespace.
    pub thread: u32,
    /// From the call of the driver to its return.
    pub duration_ns: u64,
    /// Bytes that its arguments name.
    pub bytes: u64,
    /// What the driver returned: a `CUresult`.
    pub result: u32,
    /// Calls of the thread since the one recorded before, this one included.
    pub stands_for: u32,
}

impl CallTraceBatch {
    /// What concerns one container.
    #[must_use]
    pub fn of(&self, key: &str) -> CallTraceBatch {
        let processes = self.processes.iter().filter(|p| p.key == key).cloned().collect();
        CallTraceBatch { processes, ..*self }
    }
}

/// The same fields on the control socket, in both directions; those in brackets are lists.
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
