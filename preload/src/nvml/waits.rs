//! Counts the threads that wait for events inside NVML. Such a wait is long, and its thread may be
//! cancelled during it. If the wait of a cancelled thread stayed counted, the process could never
//! be offloaded, so waits of dead threads are not counted. This is safe, because NVML holds no lock
//! during a wait for events: other threads call NVML meanwhile. A thread that ends inside any other
//! call may have held a lock, so its call stays counted.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::sys;

/// Maximum number of threads whose waits for events this table counts. Waits of further threads are
/// counted like other calls into NVML.
const MAX_THREADS: usize = 32;

/// Table of the threads that wait for events inside NVML. An entry contains the thread id in the
/// lower half, and the number of the thread's waits in the upper half. A thread can have several
/// waits, because a signal handler may wait as well. An entry of 0 is free. All entries are 0 in a
/// forked child.
pub struct EventWaits([AtomicU64; MAX_THREADS]);

const ONE: u64 = 1 << 32;

impl EventWaits {
    pub const fn new() -> EventWaits {
        EventWaits([const { AtomicU64::new(0) }; MAX_THREADS])
    }

    /// Counts one more wait of this thread. Returns false if no entry is free.
    pub fn count(&self, tid: u32) -> bool {
        self.change(tid, |entry| entry.saturating_add(ONE))
            || self.0.iter().any(|entry| replace(entry, 0, ONE | u64::from(tid)))
    }

    /// Subtracts one wait of this thread from the table. Returns false if the table counts no wait
    /// of this thread.
    pub fn uncount(&self, tid: u32) -> bool {
        self.change(tid, |entry| if entry < 2 * ONE { 0 } else { entry - ONE })
    }

    /// Changes the entry of a thread. No other thread changes that entry while the thread exists.
    /// Returns false if the thread has no entry.
    fn change(&self, tid: u32, to: impl Fn(u64) -> u64) -> bool {
        let own = |entry: u64| (entry as u32 == tid).then(|| to(entry));
        let order = Ordering::SeqCst;
        self.0.iter().any(|entry| entry.fetch_update(order, order, own).is_ok())
    }

    /// Whether any living thread waits for events. Frees the entries of threads that have ended.
    pub fn has_any(&self) -> bool {
        self.0.iter().any(|entry| {
            let seen = entry.load(Ordering::SeqCst);
            seen != 0 && (sys::thread_lives(seen as u32) || !replace(entry, seen, 0))
        })
    }
}

fn replace(entry: &AtomicU64, from: u64, to: u64) -> bool {
    entry.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok()
}
