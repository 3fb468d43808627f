//! Whether what has come home is what left: its digests are made again on the device, where the
//! controller asked for that.
//!
//! ```text
//! home ──the digests of when it left?──> intact
//!            │ no: those pieces once more from the pool
//!            └──> again? ──yes──> intact
//!                    │ no
//!                    └──> damaged: the process is told so at every call from then on
//! ```
//!
//! The pool is memory of the application's own process, which a stray write of its own may reach,
//! and content crosses the bus twice. What is wrong there is told as the driver tells of wrong
//! device memory: as an uncorrectable error, and no result is made of it.

use core::sync::atomic::Ordering;

use affinode_proto::wire::Hazards;

use super::allocations::{AllocationPiece, MemoryPlace};
use super::copy::{CopyStreams, copy_to_host, each};
use super::digest::{self, Digest, DigestTable, SLOT_BYTES};
use super::staging::StagingPool;
use super::{SWAP, with_pool};
use crate::process;

/// Whether the next returns are checked, until it is said again.
pub(super) fn set(on: bool) {
    SWAP.checks.store(u32::from(on), Ordering::Relaxed);
}

/// Everything has just come home: what is not as it left is said on the page.
pub(super) fn look() {
    if SWAP.checks.load(Ordering::Relaxed) == 1
        && !is_intact()
        && let Some(page) = process::page()
    {
        page.add_hazards(Hazards::DAMAGED_MEMORY);
    }
}

/// Whether what has come home is what left, as far as that is known.
fn is_intact() -> bool {
    with_pool(|pool| match compare(pool) {
        ChecksumResult::Same | ChecksumResult::Unknown => true,
        ChecksumResult::Other(slots) => {
            copy_again(pool, slots.all());
            // What cannot be looked at any more was wrong when it was seen last.
            matches!(compare(pool), ChecksumResult::Same)
        }
    })
}

/// What has come home.
enum ChecksumResult {
    /// As it left, where that is known.
    Same,
    /// The device makes no digests of it now.
    Unknown,
    /// Other than it was in the slots that have a digest here.
    Other(DigestTable),
}

fn has_returned(piece: &AllocationPiece) -> bool {
    piece.has_left && piece.place == MemoryPlace::Device
}

fn compare(pool: &StagingPool) -> ChecksumResult {
    let known = pool.known();
    let Some(mut found) = digest::of(known.len() * SLOT_BYTES, has_returned) else {
        return ChecksumResult::Unknown;
    };
    let mut any = false;
    for (known, found) in known.iter().zip(found.all_mut()) {
        if is_other(*known, *found) {
            any = true;
        } else {
            *found = Digest::UNKNOWN;
        }
    }
    if any { ChecksumResult::Other(found) } else { ChecksumResult::Same }
}

/// Whether both are known, and of different content.
fn is_other(known: Digest, found: Digest) -> bool {
    let is_zero = |digest| [Digest::ZERO, Digest::LEFT_OUT].contains(&digest);
    let are_known = known != Digest::UNKNOWN && found != Digest::UNKNOWN;
    are_known && known != found && !(is_zero(known) && is_zero(found))
}

/// What fails here is found to be wrong again.
fn copy_again(pool: &mut StagingPool, wrong: &[Digest]) {
    let is_wrong = |piece: &AllocationPiece| {
        let first = piece.offset as usize / SLOT_BYTES;
        let slots = wrong.get(first..first + piece.bytes as usize / SLOT_BYTES);
        has_returned(piece) && slots.into_iter().flatten().any(|slot| *slot != Digest::UNKNOWN)
    };
    let mut copies = CopyStreams::new();
    each(is_wrong, |_, piece| copy_to_host(pool, &mut copies, piece));
    let _ = copies.finish();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_known_is_not_wrong_and_zeros_are_zeros() {
        let [one, other] = [1, 2].map(Digest::of_address);
        assert!(is_other(one, other) && is_other(one, Digest::ZERO));
        assert!(is_other(Digest::LEFT_OUT, one) && is_other(Digest::ZERO, one));
        assert!(!is_other(one, one) && !is_other(Digest::LEFT_OUT, Digest::ZERO));
        assert!(!is_other(Digest::UNKNOWN, one) && !is_other(one, Digest::UNKNOWN));
    }
}
