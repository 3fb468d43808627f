//! The statistics page, in which this process records how long its kernels ran. The daemon computes
//! utilisation from it.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use affinode_sim_protocol::{MAX_GPUS, STATS_BYTES};
use std::os::fd::AsFd;

use crate::abi::Outcome;
use crate::pages::Pages;

/// The statistics page, and the number of kernels that run on each GPU now.
#[derive(Debug)]
pub struct Stats {
    page: Pages,
    running: Mutex<[u32; MAX_GPUS]>,
}

/// A kernel in progress. It counts as ended when this value is dropped.
pub struct Busy<'a> {
    stats: &'a Stats,
    gpu: usize,
}

impl Stats {
    /// Maps the statistics page that the daemon has created.
    pub fn new(page: &OwnedFd) -> Outcome<Self> {
        Ok(Self {
            page: Pages::window(page.as_fd(), STATS_BYTES)?,
            running: Mutex::new([0; MAX_GPUS]),
        })
    }

    pub fn kernel(&self, gpu: usize) -> Busy<'_> {
        let gpu = gpu.min(MAX_GPUS - 1);
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        running[gpu] += 1;
        if running[gpu] == 1 {
            self.word(gpu * 2 + 1).store(now_ns(), Ordering::Relaxed);
        }
        Busy { stats: self, gpu }
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        // SAFETY: `gpu < MAX_GPUS`, so the word lies inside the mapped page of STATS_BYTES, is
        // aligned, lives as long as self, and is only ever accessed atomically here.
        unsafe { AtomicU64::from_ptr((self.page.start() as *mut u64).add(index)) }
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        let mut running = self.stats.running.lock().unwrap_or_else(PoisonError::into_inner);
        running[self.gpu] -= 1;
        if running[self.gpu] == 0 {
            let since = self.stats.word(self.gpu * 2 + 1).swap(0, Ordering::Relaxed);
            self.stats
                .word(self.gpu * 2)
                .fetch_add(now_ns().saturating_sub(since), Ordering::Relaxed);
        }
    }
}

pub fn now_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one timespec, a local variable that outlives the call.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    (now.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec as u64).max(1)
}
