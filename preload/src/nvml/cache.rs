//! Cache of NVML results, for calls that are made while NVML must not be called.
//!
//! Entries are only added and renewed, without a lock. Each entry has a version. An odd version
//! means that a thread is writing the entry, and readers ignore it. If a thread stops forever while
//! it writes an entry, all readers ignore that entry from then on. A call that needs the entry then
//! causes a restore.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use crate::sys;

/// Maximum number of result bytes that are cached: the length of NVML's longest name.
pub const BYTES: usize = 96;
const WORDS: usize = BYTES / 8;
/// Number of entries. Monitoring programs call about 30 functions, for each of up to 8 devices.
const ENTRIES: usize = 256;

struct CachedAnswer {
    /// Key of a function and its arguments. 0 if the entry is free.
    key: AtomicU64,
    version: AtomicU32,
    result: AtomicU32,
    at_us: AtomicU64,
    words: [AtomicU64; WORDS],
}

static CACHE: [CachedAnswer; ENTRIES] = [const {
    CachedAnswer {
        key: AtomicU64::new(0),
        version: AtomicU32::new(0),
        result: AtomicU32::new(0),
        at_us: AtomicU64::new(0),
        words: [const { AtomicU64::new(0) }; WORDS],
    }
}; ENTRIES];

/// Cached result of one NVML call.
#[derive(Clone, Copy)]
pub struct AnswerKey {
    /// Result code of the call, an `nvmlReturn_t`.
    pub result: u32,
    /// Time of the call, on the monotonic clock.
    pub at_us: u64,
    /// The bytes that the call wrote.
    pub bytes: [u8; BYTES],
}

/// Computes the cache key of a function with these arguments, by FNV-1a. The key is never 0,
/// because 0 marks a free entry.
pub fn key(function: usize, arguments: &[u64], text: &[u8]) -> u64 {
    let words = arguments.iter().flat_map(|word| word.to_le_bytes());
    let function = (function as u64).to_le_bytes();
    let bytes = function.into_iter().chain(words).chain(text.iter().copied());
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    });
    hash.max(1)
}

/// Stores the result of a call in the cache. Does nothing if the cache is full, or another thread
/// is writing the entry.
pub fn store(key: u64, result: u32, bytes: &[u8; BYTES]) {
    let entry = CACHE.iter().find(|entry| {
        let owner = entry.key.compare_exchange(0, key, Ordering::AcqRel, Ordering::Acquire);
        owner.is_ok() || owner == Err(key)
    });
    let Some(entry) = entry else { return };
    let before = entry.version.load(Ordering::Relaxed);
    let odd = before | 1;
    if before == odd
        || entry
            .version
            .compare_exchange(before, odd, Ordering::Acquire, Ordering::Relaxed)
            .is_err()
    {
        return;
    }
    fence(Ordering::Release);
    entry.result.store(result, Ordering::Relaxed);
    entry.at_us.store(sys::now_us(), Ordering::Relaxed);
    for (word, chunk) in entry.words.iter().zip(bytes.as_chunks().0) {
        word.store(u64::from_ne_bytes(*chunk), Ordering::Relaxed);
    }
    entry.version.store(odd.wrapping_add(1), Ordering::Release);
}

/// Returns the last cached result of a call with this key.
pub fn find(key: u64) -> Option<AnswerKey> {
    let entry = CACHE.iter().find(|entry| entry.key.load(Ordering::Acquire) == key)?;
    let before = entry.version.load(Ordering::Acquire);
    let mut known = AnswerKey {
        result: entry.result.load(Ordering::Relaxed),
        at_us: entry.at_us.load(Ordering::Relaxed),
        bytes: [0; BYTES],
    };
    for (word, chunk) in entry.words.iter().zip(known.bytes.as_chunks_mut().0) {
        *chunk = word.load(Ordering::Relaxed).to_ne_bytes();
    }
    fence(Ordering::Acquire);
    let is_whole = before != 0 && before & 1 == 0;
    (is_whole && entry.version.load(Ordering::Relaxed) == before).then_some(known)
}
