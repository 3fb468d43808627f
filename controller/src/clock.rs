//! Reads the clocks: wall-clock time for display and records, monotonic time for decisions. Agents
//! use the same monotonic clock.

use std::time::{SystemTime, UNIX_EPOCH};

/// Returns the time of `CLOCK_MONOTONIC` in milliseconds.
#[must_use]
pub fn monotonic_ms() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let (seconds, nanoseconds) = (time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs());
    seconds.saturating_mul(1_000).saturating_add(nanoseconds / 1_000_000)
}

/// Returns the wall-clock time in milliseconds since 1970.
#[must_use]
pub fn unix_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}
