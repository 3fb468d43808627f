//! Checks after a restore that the content of memory equals the content that was copied out. If the
//! controller has ordered the check, the device computes the digests (128-bit checksums) of the
//! restored content, and the agent compares them with the digests of the copy out.
//!
//! ```text
//! restored ──the digests of the copy-out?──> intact
//!   │ no: those slots are copied again from the pool
//!   └──> again? ──yes──> intact
//!         │ no
//!         └──> damaged: every call returns an error from then on
//! ```
//!
//! Content can change for two reasons. The staging pool is memory of the application's own process,
//! so a stray write can change it. The content also crosses the bus twice. A difference is reported
//! as an uncorrectable error, as faulty device memory would be. So the application computes no
//! result from wrong content.

use core::sync::atomic::Ordering;

use affinode_cuda_sys::result;
use affinode_proto::wire::Hazards;

use super::allocations::{AllocationPiece, MemoryPlace};
use super::copy::{CopyStreams, each};
use super::copy_in::fill_from_host;
use super::digest::{self, Digest, DigestTable, SLOT_BYTES};
use super::staging::StagingPool;
use super::{SWAP, with_pool};
use crate::process;

/// Sets whether restores verify the content of memory, from now until the next call of this
/// function.
pub(super) fn set(on: bool) {
    SWAP.checks.store(u32::from(on), Ordering::Relaxed);
}

/// Verifies the restored content if the controller has ordered the check. If content differs, adds
/// the hazard `DAMAGED_MEMORY` to the process's counters.
pub(super) fn look() {
    if is_damaged()
        && let Some(page) = process::page()
    {
        page.add_hazards(Hazards::DAMAGED_MEMORY);
    }
}

/// Whether the controller has ordered the check, and content differs also after it was copied once
/// more.
pub(super) fn is_damaged() -> bool {
    SWAP.checks.load(Ordering::Relaxed) == 1 && !is_intact()
}

/// Compares the restored content with the digests of the copy out, and copies differing content
/// once more. Returns whether the content is equal afterwards. Content without a known digest
/// counts as equal.
fn is_intact() -> bool {
    with_pool(|pool| match compare(pool) {
        ChecksumResult::Same | ChecksumResult::Unknown => true,
        // A copier may be writing to the pool.
        ChecksumResult::Other(_) if pool.is_tainted() => false,
        ChecksumResult::Other(slots) => {
            copy_again(pool, slots.all());
            // If the second comparison is impossible, the result of the first comparison applies:
            // the content differed.
            matches!(compare(pool), ChecksumResult::Same)
        }
    })
}

/// Result of the comparison of restored content.
enum ChecksumResult {
    /// The content is the same as at the copy out, in all slots with a known digest.
    Same,
    /// The result is unknown, because the device cannot compute digests now.
    Unknown,
    /// The content differs in those slots for which this table has a digest.
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

/// Whether both digests are known and differ.
fn is_other(known: Digest, found: Digest) -> bool {
    let is_zero = |digest| [Digest::ZERO, Digest::LEFT_OUT].contains(&digest);
    let are_known = known != Digest::UNKNOWN && found != Digest::UNKNOWN;
    are_known && known != found && !(is_zero(known) && is_zero(found))
}

/// Copies the slots with differing content again from the staging pool, and no other slots. Slots
/// whose content is on disk stay as they are, because the pool has no content for them. Errors are
/// ignored, because the next comparison detects them.
fn copy_again(pool: &mut StagingPool, wrong: &[Digest]) {
    let mut copies = CopyStreams::new();
    each(has_returned, |_, piece| {
        let first = piece.offset as usize / SLOT_BYTES;
        let slots = wrong.get(first..first + piece.bytes as usize / SLOT_BYTES);
        let of_piece = slots.into_iter().flatten().zip((0..).step_by(SLOT_BYTES));
        of_piece.filter(|(slot, _)| **slot != Digest::UNKNOWN).fold(
            result::SUCCESS,
            |code, (_, at)| match code {
                result::SUCCESS => fill_from_host(pool, &mut copies, &slot_at(piece, at)),
                code => code,
            },
        )
    });
    let _ = copies.finish();
}

/// The part of a piece that is one slot, `at` bytes after the piece's start.
fn slot_at(piece: &AllocationPiece, at: u64) -> AllocationPiece {
    let (address, offset) = (piece.address + at, piece.offset + at);
    AllocationPiece { address, offset, bytes: SLOT_BYTES as u64, ..*piece }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_digest_is_no_difference() {
        let [one, other] = [1, 2].map(Digest::of_address);
        assert!(is_other(one, other) && is_other(one, Digest::ZERO));
        assert!(is_other(Digest::LEFT_OUT, one) && is_other(Digest::ZERO, one));
        assert!(!is_other(one, one) && !is_other(Digest::LEFT_OUT, Digest::ZERO));
        assert!(!is_other(Digest::UNKNOWN, one) && !is_other(one, Digest::UNKNOWN));
    }
}
