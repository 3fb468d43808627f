//! The call ring: the part of the shared counters into which a process records a sample of its CUDA
//! calls. It is empty while no calls are sampled.
//!
//! ```text
//! page header
//!   68   sample_every  0: no sampling. n: about one call in n is recorded
//!   192  claimed       number of records begun so far
//!   200  limit         number of the first record that may not be begun: the reader has not yet
//!                      read the older record in its place
//!   208  dropped       calls that found the ring full
//!   256  record 0 … record 119
//! ```
//!
//! `sample_every` is next to the gate, so each call reads both with one comparison. A thread that
//! records a call increments `claimed`, fills the record of that number and writes the number last.
//! It never waits: at the limit it only increments `dropped`. With each
//! [`super::message::ControllerMessage::SampleCalls`] the reader sends the number of the first
//! record that it has not read, and the library moves the limit. Therefore no record is overwritten
//! before it is read.
//!
//! A record counts its own call and the calls of its thread since the previous record. Sums are
//! therefore exact up to the last record, at any sampling rate.
//!
//! The container can write all of this part. Whatever it writes, one reading yields at most
//! [`RECORDS`] records, and none of them twice.

use super::counters::{PAGE_BYTES, SLOTS_OFFSET, u32_at, u64_at};

/// Offset of a u32 in the page header, next to the gate: about one CUDA call in this many is
/// recorded. 0 means that no call is recorded.
pub const SAMPLE_EVERY: usize = 68;
/// Offset of a u64 in the page header: number of records begun so far.
pub const CLAIMED: usize = 192;
/// Offset of a u64 in the page header: number of the first record that a thread must not begin yet.
pub const LIMIT: usize = 200;
/// Offset of a u64 in the page header: number of calls that were not recorded because the ring was
/// full.
pub const DROPPED: usize = 208;
/// Offset of the ring's first record in the page, in bytes.
pub const RING_OFFSET: usize = 256;
/// Size of one call record in bytes.
pub const RECORD_BYTES: usize = 32;
/// Number of call records in the ring.
pub const RECORDS: usize = (SLOTS_OFFSET - RING_OFFSET) / RECORD_BYTES;

/// Offsets of the fields of a record in bytes, from the record's start.
pub mod record {
    /// Offset of a u32: number of the record plus one, cut to 32 bits. The writer stores it last.
    pub const SEQUENCE: usize = 0;
    /// Offset of a u16: index of the called hook in the table of names.
    pub const HOOK: usize = 4;
    /// Offset of a u16: result code that the driver returned.
    pub const RESULT: usize = 6;
    /// Offset of a u32: number of calls of the thread since its last record, including this call.
    pub const STANDS_FOR: usize = 8;
    /// Offset of a u32: thread id of the caller in its pid namespace.
    pub const THREAD: usize = 12;
    /// Offset of a u64: duration of the driver's call, in nanoseconds.
    pub const DURATION_NS: usize = 16;
    /// Offset of a u64: number of bytes that the call copies, sets or allocates. 0 means none.
    pub const BYTES: usize = 24;
}

/// One recorded CUDA call. The container controls all fields, so they can have any value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallRecord {
    /// Index of the called hook in the table of names.
    pub hook: u16,
    /// Result code that the driver returned.
    pub result: u16,
    /// Number of calls that the record stands for, including the recorded call.
    pub stands_for: u32,
    /// Thread id of the caller in the pid namespace of the process.
    pub thread: u32,
    /// Duration of the driver call, in nanoseconds.
    pub duration_ns: u64,
    /// Number of bytes that the call copies, sets or allocates.
    pub bytes: u64,
}

/// Reader of a call ring: stores which records it has already read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallRingReader {
    /// Number of the first record that the reader has not read yet.
    read: u64,
    /// Value of the page's `dropped` counter when [`CallRingReader::take`] last read it.
    dropped: u64,
    /// Whether [`CallRingReader::take`] ended before the record with the number `read`, because a
    /// thread was still writing this record.
    stuck: bool,
}

/// How many calls and records the reader missed between two readings of the ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallBatch {
    /// Number of calls since the last reading that were not recorded because the ring was full.
    pub dropped: u64,
    /// Number of records that the reader skipped, because they were never finished, or were
    /// overwritten against the protocol.
    pub torn: u64,
}

impl CallRingReader {
    /// Creates a reader that skips all records that were begun before the call.
    #[must_use]
    pub fn at_present(page: &[u8; PAGE_BYTES]) -> CallRingReader {
        CallRingReader { read: u64_at(page, CLAIMED), dropped: u64_at(page, DROPPED), stuck: false }
    }

    /// Returns the number of the next record to read. The controller sends it to the library as the
    /// new limit.
    #[must_use]
    pub fn read(&self) -> u64 {
        self.read
    }

    /// Reads the new records, at most [`RECORDS`], and passes each to `each`. Returns how many
    /// calls and records were lost.
    pub fn take(&mut self, page: &[u8; PAGE_BYTES], mut each: impl FnMut(CallRecord)) -> CallBatch {
        let claimed = u64_at(page, CLAIMED);
        let dropped = u64_at(page, DROPPED);
        let mut news = CallBatch { dropped: dropped.wrapping_sub(self.dropped), torn: 0 };
        self.dropped = dropped;
        if claimed.wrapping_sub(self.read) > RECORDS as u64 {
            // No library writes such a number. Skip all records up to this number, and continue
            // from there.
            *self = CallRingReader { read: claimed, dropped, stuck: false };
            news.torn = RECORDS as u64;
            return news;
        }
        while self.read != claimed {
            let at = RING_OFFSET + (self.read % RECORDS as u64) as usize * RECORD_BYTES;
            if u32_at(page, at + record::SEQUENCE) != self.read.wrapping_add(1) as u32 {
                if !self.stuck {
                    // A thread is writing this record now.
                    self.stuck = true;
                    return news;
                }
                news.torn += 1;
            } else {
                let hook_and_result = u32_at(page, at + record::HOOK);
                each(CallRecord {
                    hook: hook_and_result as u16,
                    result: (hook_and_result >> 16) as u16,
                    stands_for: u32_at(page, at + record::STANDS_FOR),
                    thread: u32_at(page, at + record::THREAD),
                    duration_ns: u64_at(page, at + record::DURATION_NS),
                    bytes: u64_at(page, at + record::BYTES),
                });
            }
            self.stuck = false;
            self.read = self.read.wrapping_add(1);
        }
        news
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn put(page: &mut [u8], at: usize, bytes: &[u8]) {
        page[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Returns a page with `claimed` records. The field `bytes` of each record is the record's
    /// number.
    fn page(claimed: u64) -> Box<[u8; PAGE_BYTES]> {
        let mut page = Box::new([0; PAGE_BYTES]);
        put(&mut *page, CLAIMED, &claimed.to_ne_bytes());
        for number in claimed.saturating_sub(RECORDS as u64)..claimed {
            let at = RING_OFFSET + (number % RECORDS as u64) as usize * RECORD_BYTES;
            put(&mut *page, at + record::SEQUENCE, &(number as u32 + 1).to_ne_bytes());
            put(&mut *page, at + record::BYTES, &number.to_ne_bytes());
        }
        page
    }

    fn numbers(reader: &mut CallRingReader, page: &[u8; PAGE_BYTES]) -> Vec<u64> {
        let mut taken = Vec::new();
        reader.take(page, |record| taken.push(record.bytes));
        taken
    }

    #[test]
    fn records_come_once_and_in_order() {
        let mut reader = CallRingReader::at_present(&page(300));
        assert_eq!(numbers(&mut reader, &page(303)), [300, 301, 302]);
        assert_eq!(numbers(&mut reader, &page(303)), [0_u64; 0]);
        assert_eq!(numbers(&mut reader, &page(423)).len(), RECORDS);
        assert_eq!(reader.read(), 423);
    }

    #[test]
    fn one_that_is_not_finished_is_waited_for_once() {
        let mut reader = CallRingReader::at_present(&page(10));
        let mut later = page(13);
        let at = RING_OFFSET + 11 * RECORD_BYTES;
        put(&mut *later, at + record::SEQUENCE, &0_u32.to_ne_bytes());
        assert_eq!(numbers(&mut reader, &later), [10]);
        let mut taken = Vec::new();
        let news = reader.take(&later, |record| taken.push(record.bytes));
        assert_eq!((taken, news.torn), (vec![12], 1));
    }

    #[test]
    fn calls_without_a_free_record_are_counted() {
        let mut reader = CallRingReader::at_present(&page(5));
        let mut later = page(5);
        put(&mut *later, DROPPED, &77_u64.to_ne_bytes());
        assert_eq!(reader.take(&later, |_| ()).dropped, 77);
        assert_eq!(reader.take(&later, |_| ()).dropped, 0);
    }

    proptest! {
        #[test]
        fn whatever_is_written_is_read_in_bounds(
            noise in proptest::collection::vec(any::<u8>(), SLOTS_OFFSET),
            claimed in proptest::collection::vec(any::<u64>(), 1..8),
            start in any::<u64>(),
        ) {
            let mut page = page(start);
            let mut reader = CallRingReader::at_present(&page);
            page[..SLOTS_OFFSET].copy_from_slice(&noise);
            for claimed in claimed {
                put(&mut *page, CLAIMED, &claimed.to_ne_bytes());
                let mut taken = 0;
                reader.take(&page, |_| taken += 1);
                prop_assert!(taken <= RECORDS);
            }
        }
    }
}
