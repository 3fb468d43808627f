//! Frees device memory piece by piece during a copy out, for another process that waits for VRAM.
//! The other process can then copy its content in while this process still copies out.
//!
//! ```text
//! copies of a group of pieces, then an event ──> event reached ──> the pieces are unmapped, released
//!                                                 only after the agent has sent Releasing
//! ```
//!
//! A copy out can fail because host memory is short, or because it is cancelled. Then all memory
//! should still be on the device. So the first piece is released only when the pages of the whole
//! content are present in the staging pool, or when the node has twice the memory that is missing and
//! the copy is soon over. After that, the copy is not cancelled. If host memory becomes short
//! nevertheless, the process is partly copied out, as after an error of the driver. The controller
//! grants the VRAM that is being freed only after the message Releasing.

use affinode_cuda_sys::result;
use affinode_proto::wire::message::{AgentMessage, FRAME_BYTES};

use super::allocations::{AllocationId, AllocationPiece, MemoryPlace};
use super::backing::unback;
use super::contexts::in_context;
use super::copy::{CopyStreams, record_progress, update_counters};
use super::driver::call;
use super::pending_work::WITHOUT_TIMING;
use super::prefault::PREFAULT;
use super::{GRANULE_BYTES, tables};
use crate::{fds, sys};

/// Maximum number of groups whose copies are in progress.
const GROUPS: usize = 32;
/// Maximum size of a group, in bytes. At 55 GB/s its copy takes 5 ms.
const MAX_GROUP_BYTES: u64 = 256 << 20;

/// Time within which a copy out must be expected to end before it releases device memory while pages
/// are missing, in microseconds. The waiter waits 4.5 s for this memory.
const SOON_US: u64 = 2_000_000;

/// Progress of the release of device memory in a copy out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReleaseState {
    /// No memory is released before all of it is copied.
    Off,
    /// The copy out can still be cancelled.
    Awaited,
    /// The controller was told that memory is being freed.
    Begun,
}

/// Pieces that were copied one after the other, all in the same context.
#[derive(Clone, Copy)]
struct Group {
    /// An event that follows the copies of these pieces.
    event: usize,
    /// The context of the pieces and of the event.
    context: usize,
    /// The last piece of the group.
    last: AllocationId,
}

/// Releases the pieces of a copy out in progress, in the order of their ids.
pub(super) struct EarlyRelease {
    state: ReleaseState,
    /// Size from which a group is complete, in bytes.
    group_bytes: u64,
    /// Time at which the copy out began, in microseconds.
    began_us: u64,
    /// Bytes that are copied in all, and those whose copies were submitted.
    all_bytes: u64,
    submitted_bytes: u64,
    /// Ring of the complete groups, whose copies may be in progress.
    groups: [Group; GROUPS],
    first: usize,
    count: usize,
    /// Context, last piece and bytes of the group that is not complete yet.
    context: usize,
    last: AllocationId,
    bytes: u64,
    /// Whether no more groups are formed, because an event could not be recorded. The pieces of
    /// later groups are released when all copies have ended.
    has_stopped: bool,
    /// The first piece that is not released.
    next: AllocationId,
    has_released: bool,
}

impl EarlyRelease {
    /// Creates the state for a copy out of `bytes` bytes, of which `all_bytes` are copied. The others
    /// are zero or are in the staging pool already. `is_ordered`: whether pieces may be released before
    /// all of them are copied.
    pub(super) fn new(is_ordered: bool, bytes: u64, all_bytes: u64) -> EarlyRelease {
        EarlyRelease {
            state: if is_ordered { ReleaseState::Awaited } else { ReleaseState::Off },
            group_bytes: (bytes / 16).clamp(GRANULE_BYTES as u64, MAX_GROUP_BYTES),
            began_us: sys::now_us(),
            all_bytes,
            submitted_bytes: 0,
            groups: [Group { event: 0, context: 0, last: AllocationId::FIRST }; GROUPS],
            first: 0,
            count: 0,
            context: 0,
            last: AllocationId::FIRST,
            bytes: 0,
            has_stopped: false,
            next: AllocationId::FIRST,
            has_released: false,
        }
    }

    /// Whether memory is or may be released before all of it is copied.
    pub(super) fn is_on(&self) -> bool {
        self.state != ReleaseState::Off
    }

    /// Whether the copy out cannot be cancelled any more.
    pub(super) fn has_begun(&self) -> bool {
        self.state == ReleaseState::Begun
    }

    /// Whether any piece is released, so that a failed copy out leaves content in the staging pool.
    pub(super) fn has_released(&self) -> bool {
        self.has_released
    }

    /// Records that the copies of a piece were submitted, and releases the pieces whose copies have
    /// ended. `copied_bytes`: the part of the piece that is copied. The rest is zero or is in the
    /// staging pool already.
    pub(super) fn submitted(
        &mut self,
        copies: &mut CopyStreams,
        (id, piece): (AllocationId, &AllocationPiece),
        copied_bytes: u64,
    ) -> u32 {
        if !self.is_on() {
            return result::SUCCESS;
        }
        self.submitted_bytes += copied_bytes;
        if self.bytes > 0 && self.context != piece.context {
            self.complete_group(copies);
            self.has_stopped |= self.bytes > 0;
        }
        if !self.has_stopped {
            (self.context, self.last, self.bytes) = (piece.context, id, self.bytes + piece.bytes);
        }
        if !self.has_stopped && self.bytes >= self.group_bytes {
            self.complete_group(copies);
        }
        // The first release decides that the copy out cannot be cancelled any more.
        let may_release = self.has_begun()
            || self.count > 1
                && (PREFAULT.has_all_pages() || self.is_soon_over() && PREFAULT.commit());
        let code = match may_release {
            true => self.release_copied(self.count == GROUPS),
            false => result::SUCCESS,
        };
        if !self.has_begun() {
            PREFAULT.revoke();
        }
        code
    }

    /// Whether the copy out is expected to end soon, if it goes on as fast as before.
    fn is_soon_over(&self) -> bool {
        let passed_us = match () {
            #[cfg(test)]
            () => tests::PASSED_US.load(core::sync::atomic::Ordering::Relaxed),
            #[cfg(not(test))]
            () => sys::now_us().saturating_sub(self.began_us),
        };
        left_us(passed_us, self.submitted_bytes, self.all_bytes) <= SOON_US
    }

    /// Releases all pieces of complete groups, each as soon as its copies have ended. The copies of
    /// all pieces were submitted before.
    pub(super) fn finish(&mut self) -> u32 {
        // The rest is released when all copies have ended, which is soon.
        if self.count < 2 && !self.has_begun() {
            return result::SUCCESS;
        }
        while self.count > 0 {
            match self.release_copied(true) {
                result::SUCCESS if self.has_begun() => {}
                code => return code,
            }
        }
        result::SUCCESS
    }

    /// Reports to the controller that VRAM is being freed, as soon as the copies of the first group
    /// have ended.
    fn begin(&mut self) {
        self.state = if tell_controller() { ReleaseState::Begun } else { ReleaseState::Off };
    }

    /// Completes the present group by an event. If that fails, or if too many groups are in progress,
    /// the group continues with the next piece.
    fn complete_group(&mut self, copies: &mut CopyStreams) {
        let context = self.context;
        let mut event = 0;
        let code = in_context(context, || call!(event_create(&raw mut event, WITHOUT_TIMING)));
        let slot = self.groups.get_mut((self.first + self.count) % GROUPS);
        let Some(slot) = slot.filter(|_| code == result::SUCCESS && self.count < GROUPS) else {
            if code == result::SUCCESS {
                destroy(context, event);
            }
            return;
        };
        if copies.on_stream(context, |stream| call!(event_record(event, stream))) != result::SUCCESS
        {
            return destroy(context, event);
        }
        *slot = Group { event, context, last: self.last };
        self.count += 1;
        self.bytes = 0;
    }

    /// Releases the pieces whose copies have ended. If `waits` is true, first waits for the copies
    /// of the first group.
    fn release_copied(&mut self, mut waits: bool) -> u32 {
        while self.is_on() && self.count > 0 {
            let Some(group) = self.groups.get(self.first).copied() else { break };
            let code = in_context(group.context, || match core::mem::take(&mut waits) {
                true => call!(event_synchronize(group.event)),
                false => call!(event_query(group.event)),
            });
            match code {
                result::SUCCESS => {}
                result::NOT_READY => break,
                code => return code,
            }
            if !self.has_begun() {
                self.begin();
            }
            if !self.has_begun() {
                break;
            }
            destroy(group.context, group.event);
            (self.first, self.count) = ((self.first + 1) % GROUPS, self.count - 1);
            self.release_up_to(group.last);
        }
        result::SUCCESS
    }

    fn release_up_to(&mut self, last: AllocationId) {
        let next = |from| {
            let next = tables(|t| t.next(from, AllocationPiece::leaves).map(|(id, p)| (id, *p)));
            next.filter(|(id, _)| *id <= last)
        };
        while let Some((id, piece)) = next(self.next) {
            self.next = id.next();
            // A piece that cannot be unmapped stays on the device, with its content.
            if unback(&piece) {
                record_progress(id, 0, MemoryPlace::Pool);
                self.has_released = true;
            }
        }
        update_counters();
    }
}

/// Time that a copy of `all_bytes` bytes still takes after `done_bytes` were copied in `passed_us`
/// microseconds, if it goes on as fast, in microseconds.
fn left_us(passed_us: u64, done_bytes: u64, all_bytes: u64) -> u64 {
    let left_bytes = u128::from(all_bytes.saturating_sub(done_bytes));
    let left_us = u128::from(passed_us) * left_bytes / u128::from(done_bytes.max(1));
    u64::try_from(left_us).unwrap_or(u64::MAX)
}

impl Drop for EarlyRelease {
    fn drop(&mut self) {
        for n in 0..self.count {
            if let Some(group) = self.groups.get((self.first + n) % GROUPS) {
                destroy(group.context, group.event);
            }
        }
    }
}

fn destroy(context: usize, event: usize) {
    in_context(context, || call!(event_destroy(event)));
}

/// Reports to the controller that the copy out frees VRAM from now on. False: the message was not
/// sent.
fn tell_controller() -> bool {
    let Some(socket) = fds::SOCKET.get() else { return false };
    match sys::send(socket, &AgentMessage::Releasing.encode(), None) {
        Ok(FRAME_BYTES) => true,
        // A part of the frame was sent, so the connection cannot be used any more. The agent closes
        // it after the copy out.
        Ok(_) => {
            sys::shut_down(socket);
            false
        }
        Err(_) => false,
    }
}

#[cfg(test)]
pub mod tests {
    use core::sync::atomic::AtomicU64;

    /// Time that a copy out seems to have taken, in microseconds, so that tests do not depend on
    /// their speed.
    pub static PASSED_US: AtomicU64 = AtomicU64::new(1_000);

    #[test]
    fn rest_of_a_copy_takes_as_long_as_before() {
        use super::left_us;
        assert_eq!(left_us(1_000, 10, 40), 3_000);
        assert_eq!(left_us(1_000, 40, 40), 0);
        assert_eq!(left_us(u64::MAX, 1, u64::MAX), u64::MAX);
        assert_eq!(left_us(1_000, 0, 40), 40_000, "no copy was submitted");
    }
}
