//! Memory that the application has freed in a stream: what waits for which work, and what is next
//! to be given back. No driver in here.
//!
//! ```text
//! freed ──> waits ── its mark has happened ──> ended ──> given back
//! ```

use super::super::sorted::{Keyed, Sorted};
use super::super::table::Piece;

/// A point in a stream's work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mark {
    /// The driver's event; 0: there is none.
    pub event: usize,
    /// What it was made in.
    pub context: usize,
}

/// A piece of memory that nobody uses, or will not once the work before its mark has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unused {
    /// When it was freed, counted.
    pub since: u64,
    /// The memory.
    pub piece: Piece,
    /// Id of the stream that it was freed in.
    pub stream: u64,
    /// Its place among that stream's work.
    pub mark: Mark,
    /// All work before that has ended.
    pub ended: bool,
}

impl Keyed for Unused {
    fn key(&self) -> u64 {
        self.since
    }
}

/// Streams that were found to be busy.
#[derive(Default)]
pub struct Busy {
    streams: [u64; 8],
    many: usize,
}

impl Busy {
    /// One more. Of those for which there is no room each piece is asked about.
    pub fn add(&mut self, stream: u64) {
        if let Some(place) = self.streams.get_mut(self.many) {
            *place = stream;
            self.many += 1;
        }
    }

    fn has(&self, stream: u64) -> bool {
        self.streams.iter().take(self.many).any(|busy| *busy == stream)
    }
}

/// All of them, in the order in which they were freed. Zero is none.
#[repr(C)]
pub struct Cache {
    unused: Sorted<Unused>,
}

impl Cache {
    /// None.
    pub const fn empty() -> Cache {
        Cache { unused: Sorted::empty() }
    }

    /// Takes one in. False: there is no memory to note it.
    pub fn put(&mut self, unused: Unused) -> bool {
        self.unused.insert(unused)
    }

    /// The first from a moment on that waits for a stream that is not known to be busy: of a busy
    /// one no later work has ended either.
    pub fn waiting(&mut self, from: u64, busy: &Busy) -> Option<Unused> {
        let waits = |one: &&Unused| !one.ended && !busy.has(one.stream);
        self.unused.from(from).iter().find(waits).copied()
    }

    /// Whether any waits.
    pub fn waits(&mut self) -> bool {
        self.waiting(0, &Busy::default()).is_some()
    }

    /// Nobody uses it any more, unless it has been taken out meanwhile.
    pub fn has_ended(&mut self, since: u64) {
        if let Some(one) = self.unused.at(since) {
            one.ended = true;
        }
    }

    /// Takes out the oldest that nobody uses any more.
    pub fn take_ended(&mut self) -> Option<Unused> {
        self.unused.remove(|one| one.ended)
    }

    /// Takes out the oldest, whatever it waits for.
    pub fn take_any(&mut self) -> Option<Unused> {
        self.unused.remove(|_| true)
    }

    /// A context has ended, and with it all work in it before that moment, and its events.
    pub fn context_ends(&mut self, context: usize, before: u64) {
        for one in self.unused.all().iter_mut().filter(|one| one.since < before) {
            if one.mark.context == context {
                (one.mark, one.ended) = (Mark::default(), true);
            }
        }
    }

    /// Takes out the oldest of a context that has ended at that moment.
    pub fn take_of_context(&mut self, context: usize, before: u64) -> Option<Unused> {
        self.unused.remove(|one| one.piece.context == context && one.since < before)
    }

    /// Whether any is of a vault's making.
    pub fn holds_imported(&mut self) -> bool {
        self.unused.all().iter().any(|one| one.piece.imported)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(since: u64, stream: u64) -> Unused {
        let piece = Piece { address: since << 21, bytes: 2 << 20, context: 7, ..Piece::default() };
        let mark = Mark { event: since as usize, context: 7 };
        Unused { since, piece, stream, mark, ended: false }
    }

    fn cache() -> Cache {
        let mut cache = Cache::empty();
        for (since, stream) in [(1, 10), (2, 20), (3, 10), (4, 20)] {
            assert!(cache.put(one(since, stream)));
        }
        cache
    }

    #[test]
    fn nothing_of_a_busy_stream_is_asked_about() {
        let mut cache = cache();
        let mut busy = Busy::default();
        assert_eq!(cache.waiting(0, &busy), Some(one(1, 10)));
        busy.add(10);
        assert_eq!(cache.waiting(2, &busy), Some(one(2, 20)));
        assert_eq!(cache.waiting(3, &busy), Some(one(4, 20)));
        busy.add(20);
        assert_eq!(cache.waiting(0, &busy), None);
    }

    #[test]
    fn what_has_ended_goes_first_freed_first() {
        let mut cache = cache();
        assert_eq!(cache.take_ended(), None);
        cache.has_ended(3);
        cache.has_ended(2);
        cache.has_ended(9);
        let mut taken = || cache.take_ended().map(|one| one.since);
        assert_eq!([taken(), taken(), taken()], [Some(2), Some(3), None]);
        assert!(cache.waits());
        assert_eq!([cache.take_any(), cache.take_any()], [Some(one(1, 10)), Some(one(4, 20))]);
        assert!(cache.take_any().is_none() && !cache.waits());
    }

    #[test]
    fn a_context_ends_its_own_and_the_work_in_it() {
        let mut cache = cache();
        let other = Mark { event: 9, context: 8 };
        let elsewhere = Unused { mark: other, ..one(5, 10) };
        let of_other = Unused { piece: Piece { context: 8, ..Piece::default() }, ..one(6, 10) };
        assert!(cache.put(elsewhere) && cache.put(of_other) && cache.put(one(8, 10)));
        cache.context_ends(7, 8);
        assert_eq!(cache.waiting(0, &Busy::default()).map(|one| one.since), Some(5));
        let mut taken = || cache.take_of_context(7, 8).map(|one| (one.since, one.mark.event));
        for expected in [(1, 0), (2, 0), (3, 0), (4, 0), (5, 9)] {
            assert_eq!(taken(), Some(expected));
        }
        assert_eq!(taken(), None, "a later one is another context's of the same number");
        assert_eq!(cache.take_ended().map(|one| one.since), Some(6));
    }
}
