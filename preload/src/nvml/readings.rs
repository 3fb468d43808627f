//! Stores readings: figures of GPUs that the controller has read from NVML and sent to this
//! process. They answer the application's NVML calls while NVML must not be called.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use affinode_proto::wire::message::{GpuReading, MAX_GPUS};

use super::{ask, is_open};
use crate::sys;

/// Number of words of a stored reading: two for the UUID, one for its time of arrival, five for
/// figures.
const WORDS: usize = 8;

struct ReadingSlot {
    /// Version of the stored reading. It is odd while the agent writes the reading, and 0 if there
    /// is none.
    version: AtomicU32,
    words: [AtomicU64; WORDS],
}

static PLACES: [ReadingSlot; MAX_GPUS] = [const {
    ReadingSlot { version: AtomicU32::new(0), words: [const { AtomicU64::new(0) }; WORDS] }
}; MAX_GPUS];
/// Number of readings that have arrived. Callers wait on it as a futex.
static CAME: AtomicU32 = AtomicU32::new(0);

fn pack(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

fn halves(uuid: &[u8; 16]) -> [u64; 2] {
    let whole = u128::from_ne_bytes(*uuid);
    [whole as u64, (whole >> 64) as u64]
}

/// Stores a reading in place of the last one of the same device. Only the agent calls this
/// function.
pub fn store(reading: &GpuReading) {
    let [first, second] = halves(&reading.uuid);
    let is_of = |place: &&ReadingSlot| {
        let [a, b, ..] = &place.words;
        place.version.load(Ordering::Relaxed) == 0
            || (a.load(Ordering::Relaxed) == first && b.load(Ordering::Relaxed) == second)
    };
    if let Some(place) = PLACES.iter().find(is_of) {
        let version = place.version.load(Ordering::Relaxed);
        place.version.store(version | 1, Ordering::Relaxed);
        fence(Ordering::Release);
        let words = [
            first,
            second,
            sys::now_us(),
            reading.total_bytes,
            reading.free_bytes,
            reading.reserved_bytes,
            pack(reading.gpu_percent, reading.memory_percent),
            pack(reading.temperature_c, reading.power_mw),
        ];
        for (to, word) in place.words.iter().zip(words) {
            to.store(word, Ordering::Relaxed);
        }
        // The version must not become 0, which means an empty entry.
        place.version.store((version | 1).wrapping_add(1).max(2), Ordering::Release);
    }
    CAME.fetch_add(1, Ordering::SeqCst);
    sys::futex_wake_all(&CAME);
}

/// Returns the last reading of a device, and its age in microseconds.
fn last(uuid: &[u8; 16]) -> Option<(GpuReading, u64)> {
    let [first, second] = halves(uuid);
    PLACES.iter().find_map(|place| {
        let before = place.version.load(Ordering::Acquire);
        let words = [0, 1, 2, 3, 4, 5, 6, 7]
            .map(|index: usize| place.words.get(index).map_or(0, |w| w.load(Ordering::Relaxed)));
        fence(Ordering::Acquire);
        let is_whole = before != 0 && before & 1 == 0;
        if !is_whole || place.version.load(Ordering::Relaxed) != before {
            return None;
        }
        let [a, b, at_us, total_bytes, free_bytes, reserved_bytes, rates, rest] = words;
        let reading = GpuReading {
            uuid: *uuid,
            total_bytes,
            free_bytes,
            reserved_bytes,
            gpu_percent: rates as u32,
            memory_percent: (rates >> 32) as u32,
            temperature_c: rest as u32,
            power_mw: (rest >> 32) as u32,
        };
        ([a, b] == [first, second]).then(|| (reading, sys::now_us().saturating_sub(at_us)))
    })
}

/// Returns a recent reading of the device. `None`: there is none.
///
/// If the process is checkpointed, the reading is at most 2 s old. If necessary, this function
/// requests a reading from the controller and waits for it, for at most 1 s. While the process is
/// being moved, its agent cannot request readings. The reading may then be up to
/// [`super::answers::OLD_US`] old.
pub fn fresh(uuid: &[u8; 16], is_checkpointed: bool) -> Option<GpuReading> {
    const FRESH_US: u64 = 2_000_000;
    const WITHIN_US: u64 = 1_000_000;
    const ASK_AGAIN_MS: u64 = 250;
    let limit_us = if is_checkpointed { FRESH_US } else { super::answers::OLD_US };
    let end_us = sys::now_us() + WITHIN_US;
    loop {
        let seen = CAME.load(Ordering::SeqCst);
        if let Some((reading, age_us)) = last(uuid)
            && age_us <= limit_us
        {
            return Some(reading);
        }
        if !is_checkpointed || is_open() || sys::now_us() >= end_us {
            return None;
        }
        ask();
        sys::futex_wait(&CAME, seen, ASK_AGAIN_MS);
    }
}
