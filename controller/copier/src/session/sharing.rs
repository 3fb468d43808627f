//! Shares content of a process with other processes. While the process is offloaded, the content is
//! stored once, in a segment (a sealed file of the copier).
//!
//! ```text
//! chunk:  not examined ──> examined ──Same──> offered ──Mapped──> elsewhere
//!                                              │  └──not taken──> examined
//!                                              └──no reply in time──> no more offers
//! ```
//!
//! `Same` is the copier's offer of a segment, and `Mapped` is the process's reply. In the state
//! `elsewhere`, the process uses the segment in place of the chunk.

use std::{
    collections::BTreeMap,
    io,
    rc::Rc,
    time::{Duration, Instant},
};

use affinode_proto::wire::copier::FromCopier;

use super::{ProcessSession, SessionError};
use crate::{
    clock,
    dedup::ChunkHolder,
    sys::{CHUNK_BYTES, CudaError, HostRegion, SharedSegment},
};

/// Maximum number of offers to one process that have no reply yet.
const MAX_OFFERED: usize = 2;
/// Time limit for a process's reply to an offer. Without the limit, a stopped process would delay
/// the deduplication of other processes.
const ANSWERS: Duration = Duration::from_secs(5);

/// Deduplication state of one process: its offers, and which of its chunks are examined.
#[derive(Debug)]
pub struct ContentSharing<S> {
    /// Dedup domain of the process. 0 means that the process shares no content.
    domain: u64,
    /// Whether the copier may offer segments to the process now.
    open: bool,
    /// Number of the first chunk that is not examined yet.
    next: usize,
    offered: BTreeMap<usize, (Instant, Rc<S>)>,
    reported_bytes: usize,
}

impl<S> ContentSharing<S> {
    /// Creates the deduplication state of a process whose chunks must all still be examined.
    pub fn of(domain: u64) -> Self {
        ContentSharing { domain, open: false, next: 0, offered: BTreeMap::new(), reported_bytes: 0 }
    }

    /// Allows offers to the process, because it is offloaded and all of its memory is registered.
    pub fn open(&mut self) {
        self.open = self.domain != 0;
    }

    /// Ends the offers to the process, because it will be restored. Replies are still accepted.
    pub fn end(&mut self) {
        self.open = false;
    }

    /// Drops the offers that have no reply yet, because the process is being restored and will not
    /// reply.
    pub fn close(&mut self) {
        self.open = false;
        self.offered.clear();
    }

    /// Ends the offers to the process if its reply to an earlier offer is overdue.
    fn expire(&mut self, now: Instant) {
        self.open &= self.offered.values().all(|(since, _)| now - *since < ANSWERS);
    }

    /// Returns whether the copier may offer the process a segment in place of this chunk. The
    /// process must also have room for an offer ([`Self::has_room`]).
    fn may_offer(&self, chunk: usize) -> bool {
        self.open && !self.offered.contains_key(&chunk)
    }

    fn has_room(&self) -> bool {
        self.offered.len() < MAX_OFFERED
    }

    /// Returns the number of the next chunk to examine. `chunks`: number of the process's chunks.
    /// Returns `None` if all chunks are examined, if the process gets no offers now, or if it must
    /// first reply to an offer.
    fn next(&self, chunks: usize) -> Option<usize> {
        (self.open && self.has_room() && self.next < chunks).then_some(self.next)
    }

    fn offer(&mut self, chunk: usize, segment: Rc<S>) {
        self.offered.insert(chunk, (clock::now(), segment));
    }

    fn answered(&mut self, chunk: usize) -> Option<Rc<S>> {
        self.offered.remove(&chunk).map(|(_, segment)| segment)
    }

    /// Returns the number of the process's bytes that are stored in segments, if it has changed
    /// since the last report.
    fn report(&mut self, elsewhere_bytes: usize) -> Option<u64> {
        let told = std::mem::replace(&mut self.reported_bytes, elsewhere_bytes);
        (told != elsewhere_bytes).then_some(elsewhere_bytes as u64)
    }
}

impl ProcessSession {
    /// Handles the process's reply to the offer of a segment for a chunk. `taken`: whether the
    /// process uses the segment in place of the chunk.
    pub(super) fn mapped(&mut self, chunk: usize, taken: bool) -> Result<(), SessionError> {
        let segment = self.sharing.answered(chunk).ok_or(SessionError::Order)?;
        match &mut self.region {
            Some(region) if taken => Ok(region.put_elsewhere(chunk, segment)?),
            _ => Ok(()),
        }
    }

    /// Unregisters the memory of one chunk that the process has freed, because it uses a segment in
    /// place of the chunk. Returns false if there is no such chunk.
    ///
    /// # Errors
    /// [`CudaError`]: the context may be unusable.
    pub fn let_go_next(&mut self) -> Result<bool, CudaError> {
        self.region.as_mut().map_or(Ok(false), HostRegion::let_go_next)
    }

    /// Returns the number of the process's bytes that are stored in segments, if it has changed
    /// since the last report.
    pub fn shared_bytes(&mut self) -> Option<u64> {
        self.sharing.report(self.region.as_ref().map_or(0, HostRegion::elsewhere_bytes))
    }
}

impl ChunkHolder for ProcessSession {
    type Segment = SharedSegment;

    fn process(&self) -> u64 {
        self.process
    }

    fn domain(&self) -> u64 {
        self.sharing.domain
    }

    fn is_asked(&mut self) -> bool {
        self.sharing.expire(clock::now());
        self.sharing.open && !self.sharing.offered.is_empty()
    }

    fn next_chunk(&self) -> Option<usize> {
        let chunks = usize::try_from(self.copied_out_bytes).unwrap_or(0) / CHUNK_BYTES;
        self.sharing.next(chunks)
    }

    fn has_looked(&mut self) {
        self.sharing.next += 1;
    }

    fn may_offer(&self, chunk: usize) -> bool {
        let held_alone = |region: &HostRegion| !region.is_elsewhere(chunk);
        self.sharing.may_offer(chunk) && self.region.as_ref().is_some_and(held_alone)
    }

    fn has_room(&self) -> bool {
        self.sharing.has_room()
    }

    fn read(&self, offset: usize, to: &mut [u8]) -> io::Result<()> {
        let region = self.region.as_ref().ok_or(io::ErrorKind::NotFound)?;
        region.read(offset, to)
    }

    fn offer(&mut self, chunk: usize, segment: &Rc<SharedSegment>) {
        let Ok(index) = u32::try_from(chunk) else { return };
        if let Ok(own) = segment.to_read()
            && matches!(self.tell(FromCopier::Same { chunk: index }, Some(&own)), Ok(true))
        {
            self.sharing.offer(chunk, Rc::clone(segment));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_offloaded_in_a_domain_is_examined() {
        let mut none = ContentSharing::<u8>::of(0);
        none.open();
        assert!(none.next(3).is_none() && !none.may_offer(0));
        let mut sharing = ContentSharing::<u8>::of(7);
        assert!(sharing.next(2).is_none() && !sharing.may_offer(0), "not offloaded yet");
        sharing.open();
        assert!(sharing.next(2) == Some(0) && sharing.may_offer(1));
        sharing.next = 2;
        assert_eq!(sharing.next(2), None, "all were");
        sharing.end();
        assert!(sharing.next(9).is_none() && !sharing.may_offer(1), "it is to be restored");
    }

    #[test]
    fn two_open_offers_await_replies_in_time() {
        let mut sharing = ContentSharing::of(7);
        sharing.open();
        sharing.offer(3, Rc::new(1));
        assert!(sharing.next(9) == Some(0) && !sharing.may_offer(3));
        sharing.offer(4, Rc::new(2));
        assert!(sharing.next(9).is_none() && !sharing.has_room());
        assert_eq!([sharing.answered(5), sharing.answered(4)], [None, Some(Rc::new(2))]);
        assert!(sharing.next(9).is_some() && sharing.may_offer(4));
        let now = Instant::now();
        sharing.expire(now);
        assert!(sharing.next(9).is_some());
        sharing.expire(now + ANSWERS);
        assert!(sharing.next(9).is_none(), "it is asked no more");
    }

    /// Checks that the copier accepts a process's reply to an offer until the process sends
    /// Restoring, and refuses later replies.
    #[test]
    fn replies_are_accepted_until_restore_begins() {
        let mut sharing = ContentSharing::of(7);
        sharing.open();
        sharing.offer(3, Rc::new(1));
        sharing.offer(4, Rc::new(2));
        sharing.end();
        assert_eq!(sharing.answered(3), Some(Rc::new(1)));
        sharing.close();
        assert_eq!(sharing.answered(4), None);
    }

    #[test]
    fn unchanged_bytes_are_reported_once() {
        let mut sharing = ContentSharing::<u8>::of(7);
        assert_eq!(sharing.report(0), None);
        assert_eq!([sharing.report(5), sharing.report(5)], [Some(5), None]);
        assert_eq!(sharing.report(0), Some(0));
    }
}
