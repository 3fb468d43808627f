//! Skips memory that is all zero, so that it costs no host memory and no copy. Memory is all zero
//! if it was not written yet, as in an arena that is allocated at once or in a cache that is not
//! full. The GPU kernel of the module `digest` detects such memory exactly.
//!
//! ```text
//! run of zeros:  short ──────────> stored and copied as any other memory
//!                16 MiB and more ─> skipped: cleared on the device at the restore
//! ```
//!
//! A copier does not know which content was skipped, so it cannot restore a process that skipped
//! any. A process with a copier therefore skips zeroes only if they are at least half of its
//! memory, or at least 16 GiB. Then the shorter copy saves more time than the copier.

use super::digest::{Digest, SLOT_BYTES};
use super::prefault::CHUNK_BYTES;

/// Minimum length of a run of zeros that is skipped, in slots of 2 MiB. Skipping shorter runs would
/// split a large copy into many small copies.
const MIN_SLOTS: usize = 8;
const CHUNK_SLOTS: usize = CHUNK_BYTES / SLOT_BYTES;
/// Number of zero bytes from which skipping saves more time than a copier saves. A copier saves the
/// time of restoring a context, about a quarter of a second. In that time the bus copies 16 GiB.
const WORTH_BYTES: usize = 16 << 30;

/// Marks the runs of zeros that a copy out skips, and returns their total number of bytes.
/// `with_copier` is true if a copier could restore the process.
pub fn skip_zero_pages(found: &mut [Digest], with_copier: bool) -> usize {
    let (mut zeros, mut at) = (0, 0);
    while let Some((begin, end)) = next_run(found, at) {
        (zeros, at) = (zeros + end - begin, end);
    }
    let bytes = zeros * SLOT_BYTES;
    if bytes == 0 || (with_copier && !is_worth_a_copier(bytes, found.len())) {
        return 0;
    }
    at = 0;
    while let Some((begin, end)) = next_run(found, at) {
        at = end;
        let run = found.get_mut(begin..end).into_iter().flatten();
        run.for_each(|slot| *slot = Digest::LEFT_OUT);
    }
    bytes
}

/// Whether skipping `bytes` zero bytes saves more time than a restore by a copier saves. `slots` is
/// the number of slots of the whole content.
pub fn is_worth_a_copier(bytes: usize, slots: usize) -> bool {
    bytes >= WORTH_BYTES || (bytes > 0 && 2 * bytes / SLOT_BYTES >= slots)
}

/// Returns the begin and the end of the next run of zeros, from the slot `from` on, that is long
/// enough to be skipped. Slots that are already marked as skipped do not count.
fn next_run(found: &[Digest], from: usize) -> Option<(usize, usize)> {
    let mut begin = from;
    loop {
        begin += found.get(begin..)?.iter().position(|slot| *slot == Digest::ZERO)?;
        let zeros = found.get(begin..)?.iter().take_while(|slot| **slot == Digest::ZERO).count();
        if zeros >= MIN_SLOTS {
            return Some((begin, begin + zeros));
        }
        begin += zeros;
    }
}

/// Returns the numbers of the chunks whose whole content is skipped. These chunks need no host
/// memory.
pub fn empty_chunks(known: &[Digest]) -> impl Iterator<Item = usize> + '_ {
    let is_out = |slot: &Digest| *slot == Digest::LEFT_OUT;
    known.chunks(CHUNK_SLOTS).enumerate().filter(move |(_, c)| c.iter().all(is_out)).map(|c| c.0)
}

/// Returns whether the content at `offset` is skipped, and how many bytes from `offset` on have the
/// same state (skipped or not). The number is at most `most`, and the bytes are in one chunk.
pub fn run_at(known: &[Digest], offset: usize, most: usize) -> (bool, usize) {
    let most = most.min(CHUNK_BYTES - offset % CHUNK_BYTES);
    let first = offset / SLOT_BYTES;
    let is_out = |slot: usize| known.get(slot) == Some(&Digest::LEFT_OUT);
    let out = is_out(first);
    let slots = (first..first + most.div_ceil(SLOT_BYTES)).take_while(|slot| is_out(*slot) == out);
    (out, most.min(slots.count() * SLOT_BYTES))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn other() -> Digest {
        Digest::of_address(7)
    }

    /// Returns slots in runs of these lengths, alternately zero and not zero. The first run is
    /// zero.
    fn slots(runs: &[usize]) -> Vec<Digest> {
        let run = |(n, many): (usize, &usize)| {
            std::iter::repeat_n(if n % 2 == 0 { Digest::ZERO } else { other() }, *many)
        };
        runs.iter().enumerate().flat_map(run).collect()
    }

    fn left_out(slots: &[Digest]) -> usize {
        slots.iter().filter(|slot| **slot == Digest::LEFT_OUT).count()
    }

    #[test]
    fn long_runs_are_left_out_and_short_ones_are_not() {
        let mut found = slots(&[MIN_SLOTS, 1, MIN_SLOTS - 1, 1, MIN_SLOTS + 3]);
        let bytes = skip_zero_pages(&mut found, false);
        assert_eq!((bytes / SLOT_BYTES, left_out(&found)), (2 * MIN_SLOTS + 3, bytes / SLOT_BYTES));
        assert_eq!(found[MIN_SLOTS + 1], Digest::ZERO, "stored as it is");
        assert_eq!(skip_zero_pages(&mut slots(&[1, 30, 7]), false), 0);
        assert_eq!(skip_zero_pages(&mut [], false), 0);
    }

    #[test]
    fn with_a_copier_only_many_zeros_are_skipped() {
        assert_eq!(skip_zero_pages(&mut slots(&[20, 21]), true), 0);
        assert_eq!(skip_zero_pages(&mut slots(&[20, 20]), true), 20 * SLOT_BYTES);
        let many = WORTH_BYTES / SLOT_BYTES;
        assert_eq!(skip_zero_pages(&mut slots(&[many, 3 * many]), true), WORTH_BYTES);
        assert_eq!(skip_zero_pages(&mut slots(&[many - 1, 3 * many]), true), 0);
    }

    #[test]
    fn only_chunks_without_anything_else_are_empty() {
        let mut known = slots(&[2 * CHUNK_SLOTS + 8, 1, CHUNK_SLOTS + 20]);
        skip_zero_pages(&mut known, false);
        // The last chunk is shorter.
        assert_eq!(empty_chunks(&known).collect::<Vec<_>>(), [0, 1, 3]);
        assert_eq!(empty_chunks(&[]).count(), 0);
    }

    #[test]
    fn runs_end_at_skipped_slots_and_at_the_chunk() {
        let mut known = slots(&[8, 2, 70]);
        skip_zero_pages(&mut known, false);
        let run = |slot: usize, most: usize| {
            let (out, bytes) = run_at(&known, slot * SLOT_BYTES, most * SLOT_BYTES);
            (out, bytes / SLOT_BYTES)
        };
        assert_eq!(run(0, 100), (true, 8));
        assert_eq!(run(3, 2), (true, 2));
        assert_eq!(run(8, 100), (false, 2));
        assert_eq!(run(10, 100), (true, CHUNK_SLOTS - 10));
        assert_eq!(run(CHUNK_SLOTS, 100), (true, 80 - CHUNK_SLOTS));
        assert_eq!(run_at(&[], 0, CHUNK_BYTES), (false, CHUNK_BYTES), "nothing is known");
    }
}
