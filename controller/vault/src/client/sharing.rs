//! What a process has in common with others: held once, in a segment, while it is away.
//!
//! ```text
//! chunk:  not looked at ──> looked at ──Same──> offered ──Mapped──> elsewhere
//!                                                  └──not taken──> looked at
//! ```

use std::{collections::BTreeMap, io, rc::Rc};

use affinode_proto::wire::vault::FromVault;

use super::{Client, ClientError};
use crate::sys::{CHUNK_BYTES, Region, Segment};

/// A process that does not answer is offered no more.
const MOST_OFFERED: usize = 2;

/// How far that is for one process.
#[derive(Debug, Default)]
pub struct Sharing {
    /// Who may have something in common; 0: this one with nobody.
    domain: u64,
    /// Whether it may be offered anything now.
    open: bool,
    /// The first chunk that was not looked at.
    next: usize,
    offered: BTreeMap<usize, Rc<Segment>>,
    told_bytes: usize,
}

impl Sharing {
    /// Nothing was looked at yet.
    pub fn of(domain: u64) -> Sharing {
        Sharing { domain, ..Sharing::default() }
    }

    /// Who may have something in common with it.
    pub fn domain(&self) -> u64 {
        self.domain
    }

    /// It is away, and all of its memory is held.
    pub fn open(&mut self) {
        self.open = self.domain != 0;
    }

    /// It comes home. What it has not answered it does not answer any more.
    pub fn close(&mut self) {
        self.open = false;
        self.offered.clear();
    }

    /// Whether it may be offered something for a chunk.
    pub fn may_offer(&self, chunk: usize) -> bool {
        self.open && !self.offered.contains_key(&chunk)
    }

    /// The next chunk of so many to look at.
    pub fn next(&mut self, chunks: usize) -> Option<usize> {
        let waits = self.offered.len() >= MOST_OFFERED;
        if !self.open || waits || self.next >= chunks {
            return None;
        }
        self.next += 1;
        Some(self.next - 1)
    }

    /// It was told of a segment.
    pub fn offer(&mut self, chunk: usize, segment: Rc<Segment>) {
        self.offered.insert(chunk, segment);
    }

    /// It has answered.
    pub fn answered(&mut self, chunk: usize) -> Option<Rc<Segment>> {
        self.offered.remove(&chunk)
    }

    /// How much is elsewhere, if that was not reported.
    pub fn report(&mut self, elsewhere_bytes: usize) -> Option<u64> {
        let told = std::mem::replace(&mut self.told_bytes, elsewhere_bytes);
        (told != elsewhere_bytes).then_some(elsewhere_bytes as u64)
    }
}

impl Client {
    /// It has answered what it was offered for a chunk.
    pub(super) fn mapped(&mut self, chunk: usize, taken: bool) -> Result<(), ClientError> {
        let segment = self.sharing.answered(chunk).ok_or(ClientError::Order)?;
        match &mut self.region {
            Some(region) if taken => Ok(region.put_elsewhere(chunk, segment)?),
            _ => Ok(()),
        }
    }

    /// With whom it may share.
    pub fn domain(&self) -> u64 {
        self.sharing.domain()
    }

    /// The next chunk of what it holds alone that was not looked at.
    pub fn next_chunk(&mut self) -> Option<usize> {
        let chunks = usize::try_from(self.parked_bytes).unwrap_or(0) / CHUNK_BYTES;
        self.sharing.next(chunks)
    }

    /// Whether it may be offered a segment for a chunk.
    pub fn may_offer(&self, chunk: usize) -> bool {
        let held_alone = |region: &Region| !region.is_elsewhere(chunk);
        self.sharing.may_offer(chunk) && self.region.as_ref().is_some_and(held_alone)
    }

    /// Reads what it has parked.
    ///
    /// # Errors
    /// The system's word.
    pub fn read(&self, offset: usize, to: &mut [u8]) -> io::Result<()> {
        let region = self.region.as_ref().ok_or(io::ErrorKind::NotFound)?;
        region.read(offset, to)
    }

    /// Offers it a segment that holds what a chunk of its own does. Who does not read is not
    /// waited for.
    pub fn offer(&mut self, chunk: usize, segment: &Rc<Segment>) {
        let Ok(index) = u32::try_from(chunk) else { return };
        if matches!(self.tell(FromVault::Same { chunk: index }, segment.file()), Ok(true)) {
            self.sharing.offer(chunk, Rc::clone(segment));
        }
    }

    /// How much of it is in segments, if that has changed.
    pub fn shared_bytes(&mut self) -> Option<u64> {
        self.sharing.report(self.region.as_ref().map_or(0, Region::elsewhere_bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_who_is_away_and_of_a_domain_is_looked_at_each_chunk_once() {
        let mut none = Sharing::of(0);
        none.open();
        assert!(none.next(3).is_none() && !none.may_offer(0));
        let mut sharing = Sharing::of(7);
        assert!(sharing.next(2).is_none() && !sharing.may_offer(0), "not away yet");
        sharing.open();
        assert_eq!([sharing.next(2), sharing.next(2), sharing.next(2)], [Some(0), Some(1), None]);
        assert!(sharing.may_offer(1));
        sharing.close();
        assert!(!sharing.may_offer(1) && sharing.next(9).is_none());
    }

    #[test]
    fn what_was_reported_is_not_again() {
        let mut sharing = Sharing::of(7);
        assert_eq!(sharing.report(0), None);
        assert_eq!([sharing.report(5), sharing.report(5)], [Some(5), None]);
        assert_eq!(sharing.report(0), Some(0));
    }
}
