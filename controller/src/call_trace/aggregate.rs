//! Sums up the call records of one process between two readings. This module does no I/O.

use std::collections::{BTreeMap, VecDeque};

use affinode_cuda_sys::hook;
use affinode_proto::wire::call_ring::{CallRecord, RECORDS};

use super::{FunctionCalls, RecordedCall};

/// Wanted number of call records per reading. It is half of the ring's capacity, so a program can
/// double its call rate without losing records.
const WANTED: u64 = RECORDS as u64 / 2;
/// Maximum number of call records per reading that are returned individually. All others only count
/// in the sums.
const SHOWN: usize = 40;
/// Result code `CUDA_ERROR_NOT_READY`: the normal result of a query, not a failure.
const NOT_READY: u16 = 600;

/// Returns the sampling rate for a process that made `calls` calls between two readings. With a
/// result of n, one in n calls is recorded.
#[must_use]
pub fn one_in(calls: u64) -> u32 {
    u32::try_from(calls.div_ceil(WANTED)).unwrap_or(u32::MAX).max(1)
}

/// Sums of call records for each CUDA function, and the latest records.
#[derive(Debug, Default)]
pub struct CallAggregate {
    functions: BTreeMap<u16, FunctionCalls>,
    last: VecDeque<CallRecord>,
}

impl CallAggregate {
    /// Adds a record to the sums. The values of the record come from the container and may have any
    /// size, so every sum saturates.
    pub fn add(&mut self, record: CallRecord) {
        let function = self.functions.entry(record.hook).or_default();
        let times = u64::from(record.stands_for);
        function.calls = function.calls.saturating_add(times);
        function.recorded += 1;
        function.bytes = function.bytes.saturating_add(record.bytes.saturating_mul(times));
        function.failed += u64::from(record.result != 0 && record.result != NOT_READY);
        function.total_ns = function.total_ns.saturating_add(record.duration_ns);
        function.longest_ns = function.longest_ns.max(record.duration_ns);
        if self.last.len() == SHOWN {
            self.last.pop_front();
        }
        self.last.push_back(record);
    }

    /// Returns the sums for each function, the most called first, and the latest records.
    #[must_use]
    pub fn finish(self) -> (Vec<FunctionCalls>, Vec<RecordedCall>) {
        let mut functions: Vec<FunctionCalls> = self
            .functions
            .into_iter()
            .map(|(hook, function)| FunctionCalls { name: name(hook), ..function })
            .collect();
        functions.sort_by(|a, b| b.calls.cmp(&a.calls).then_with(|| a.name.cmp(&b.name)));
        let recorded = self.last.into_iter().map(|record| RecordedCall {
            name: name(record.hook),
            thread: record.thread,
            duration_ns: record.duration_ns,
            bytes: record.bytes,
            result: record.result.into(),
            stands_for: record.stands_for,
        });
        (functions, recorded.collect())
    }
}

fn name(number: u16) -> String {
    hook::name(number.into()).unwrap_or("another function").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(name: &str, duration_ns: u64) -> CallRecord {
        let hook = u16::try_from(hook::find(name.as_bytes()).unwrap().0).unwrap();
        CallRecord { hook, duration_ns, stands_for: 1, thread: 9, ..CallRecord::default() }
    }

    #[test]
    fn sums_begin_with_the_most_called() {
        let mut tally = CallAggregate::default();
        tally.add(CallRecord { bytes: 100, result: 2, ..record("cuMemAlloc_v2", 50) });
        tally.add(CallRecord { stands_for: 10, result: 600, ..record("cuStreamQuery", 7) });
        tally.add(CallRecord { bytes: 10, stands_for: 3, ..record("cuMemAlloc_v2", 70) });
        let (functions, recorded) = tally.finish();
        let query = FunctionCalls {
            name: "cuStreamQuery".into(),
            calls: 10,
            recorded: 1,
            total_ns: 7,
            longest_ns: 7,
            ..FunctionCalls::default()
        };
        let alloc = FunctionCalls {
            name: "cuMemAlloc_v2".into(),
            calls: 4,
            recorded: 2,
            bytes: 130,
            failed: 1,
            total_ns: 120,
            longest_ns: 70,
        };
        assert_eq!(functions, [query, alloc]);
        assert_eq!((recorded.len(), recorded[1].result), (3, 600));
    }

    #[test]
    fn hostile_records_saturate() {
        let mut tally = CallAggregate::default();
        for hook in 0..1_000 {
            let (bytes, duration_ns) = (u64::MAX, u64::MAX);
            let claim =
                CallRecord { hook, result: 9, stands_for: u32::MAX, thread: 0, duration_ns, bytes };
            tally.add(claim);
            tally.add(claim);
        }
        let (functions, recorded) = tally.finish();
        assert_eq!(functions[0].total_ns, u64::MAX);
        assert_eq!(recorded.len(), SHOWN);
    }

    #[test]
    fn a_higher_call_rate_lowers_the_sampling() {
        assert_eq!([0, 1, 60, 61, 60_000].map(one_in), [1, 1, 1, 2, 1_000]);
        assert_eq!(one_in(u64::MAX), u32::MAX);
    }
}
