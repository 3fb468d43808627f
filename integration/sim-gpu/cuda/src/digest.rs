//! Simulates `affinode_digest`, a kernel of the preload library that computes digests of memory.
//! Each entry of its table is the address of 2 MiB of memory. The kernel replaces the entry by the
//! digest of that memory. The kernel for a real device is `preload/src/swap/digest.ptx`.

use crate::abi::{ILLEGAL_ADDRESS, Outcome};
use crate::chunks::each_word;
use crate::driver::Driver;

const SLOT_BYTES: usize = 2 << 20;
const THREADS: usize = 256;
/// Digest of memory that contains only zeros.
const ZERO: [u64; 2] = [0, u64::MAX];

/// Runs the simulated kernel on a table with this number of entries.
pub fn run(driver: &Driver, table: u64, many: u32) -> Outcome {
    let entries = many as usize * 2;
    let pieces = driver.memory().device(table, entries * 8)?;
    let mut words = Vec::with_capacity(entries);
    each_word::<8>(&pieces, |word| {
        words.push(u64::from_ne_bytes(word));
        word
    });
    for entry in words.chunks_exact_mut(2).filter(|entry| entry[0] != 0) {
        let mut digest = Digest::new();
        let pieces = driver.memory().device(entry[0], SLOT_BYTES)?;
        each_word::<8>(&pieces, |word| {
            digest.take(u64::from_ne_bytes(word));
            word
        });
        entry.copy_from_slice(&digest.end());
    }
    let mut words = words.into_iter();
    each_word::<8>(&pieces, |word| words.next().map_or(word, u64::to_ne_bytes));
    if words.next().is_some() { Err(ILLEGAL_ADDRESS) } else { Ok(()) }
}

/// State of the 256 threads of a GPU block, which compute one digest together.
struct Digest {
    threads: Vec<[u64; 2]>,
    words: usize,
    any: u64,
}

impl Digest {
    fn new() -> Self {
        let first = |thread: u64| {
            [thread.wrapping_mul(0x9E37_79B9_7F4A_7C15), thread.wrapping_mul(0xC2B2_AE3D_27D4_EB4F)]
        };
        Self { threads: (1..=THREADS as u64).map(first).collect(), words: 0, any: 0 }
    }

    /// Adds the next word to the digest. The first two words belong to the first thread, the next
    /// two words to the second thread, and so on.
    fn take(&mut self, word: u64) {
        let thread = self.words / 2 % THREADS;
        self.words += 1;
        self.any |= word;
        if let Some([a, b]) = self.threads.get_mut(thread) {
            *a = (*a ^ word).rotate_left(27).wrapping_mul(0x9FB2_1C65_1E98_DF25);
            *b = b.wrapping_add(word).rotate_left(31).wrapping_mul(0xD6E8_FEB8_6659_FD93);
        }
    }

    fn end(self) -> [u64; 2] {
        if self.any == 0 {
            return ZERO;
        }
        let [low, high] = self.sums();
        // The first half is never 0, because two values with this half are reserved: the digest of
        // zeros, and an empty entry.
        [if low == 0 { 1 } else { low }, high]
    }

    fn sums(&self) -> [u64; 2] {
        let sum = |sum: [u64; 2], [a, b]: &[u64; 2]| {
            [sum[0].wrapping_add(mix(*a)), sum[1].wrapping_add(mix(*b))]
        };
        self.threads.iter().fold([0; 2], sum)
    }
}

fn mix(mut word: u64) -> u64 {
    word ^= word >> 33;
    word = word.wrapping_mul(0xFF51_AFD7_ED55_8CCD);
    word ^= word >> 33;
    word = word.wrapping_mul(0xC4CE_B9FE_1A85_EC53);
    word ^ word >> 33
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(words: impl Iterator<Item = u64>) -> [u64; 2] {
        let mut digest = Digest::new();
        words.for_each(|word| digest.take(word));
        assert_eq!(digest.words * 8, SLOT_BYTES);
        digest.end()
    }

    #[test]
    fn zeros_are_told() {
        const WORDS: u64 = SLOT_BYTES as u64 / 8;
        assert_eq!(of((0..WORDS).map(|_| 0)), ZERO);
        for at in [0, 511, WORDS - 1] {
            assert_ne!(of((0..WORDS).map(|n| u64::from(n == at))), ZERO);
        }
    }

    /// Checks that the simulated digests equal those that an H200 computed with the kernel in
    /// `digest.ptx`.
    #[test]
    fn it_is_the_device_s() {
        const WORDS: usize = SLOT_BYTES / 8;
        let mut digest = Digest::new();
        (0..WORDS).for_each(|_| digest.take(0));
        assert_eq!(digest.sums(), [0x2c03_037c_855a_b103, 0x74ac_1433_d8a6_fede]);
    }

    #[test]
    fn digest_detects_bit_flip_and_word_swap() {
        const WORDS: u64 = SLOT_BYTES as u64 / 8;
        let whole = of(0..WORDS);
        for bit in [0, 31, 63] {
            for at in [0, 511, 512, WORDS - 1] {
                assert_ne!(of((0..WORDS).map(|n| if n == at { n ^ 1 << bit } else { n })), whole);
            }
        }
        let swapped = |one: u64, other: u64| {
            of((0..WORDS).map(|n| match n {
                n if n == one => other,
                n if n == other => one,
                n => n,
            }))
        };
        for (one, other) in [(0, 1), (0, 2), (0, 512), (5, WORDS - 1)] {
            assert_ne!(swapped(one, other), whole);
        }
    }
}
