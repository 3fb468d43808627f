//! Memory that the application has freed in a stream, and the pools that it is of: what of it an
//! allocation may have, what waits for which work, what is next to be given back. No driver in here.
//!
//! ```text
//!            cuMemAllocAsync                     cuMemFreeAsync
//!    ┌────── of the same stream, or ended ──────┐    │
//!    v                                          │    v
//! in use (table of allocations) ───────────> unused: waits ── its mark has happened ──> ended
//!                                               │                                         │
//!                                               └── context ends, all is cleared ──> given back
//!                                                              above the pool's threshold ┘
//! ```

use super::super::allocations::{Allocation, AllocationPiece};
use super::super::chunked_map::{ChunkedMap, HasKey};

/// A point in a stream's work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CompletionMark {
    /// The driver's event; 0: there is none.
    pub event: usize,
    /// What it was made in.
    pub context: usize,
}

/// A piece of memory that nobody uses, or will not once the work before its mark has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FreePiece {
    /// When it was freed, counted.
    pub since: u64,
    /// The memory.
    pub piece: AllocationPiece,
    /// The number of its pool; 0: it is of none, and goes as soon as it may.
    pub pool: u64,
    /// Id of the stream that it was freed in.
    pub stream: u64,
    /// Its place among that stream's work.
    pub mark: CompletionMark,
    /// All work before that has ended.
    pub ended: bool,
}

impl HasKey for FreePiece {
    fn key(&self) -> u64 {
        self.since
    }
}

/// A pool whose allocations are carried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamPool {
    /// What the application calls it.
    pub handle: usize,
    /// Ours. Another pool of the same handle may follow it.
    pub number: u64,
    /// Where its memory is.
    pub device: i32,
    /// New allocations are the driver's.
    pub left: bool,
    /// What is in use, as asked for.
    pub used: SizeClass,
    /// Physical memory.
    pub reserved: SizeClass,
}

impl HasKey for StreamPool {
    fn key(&self) -> u64 {
        self.handle as u64
    }
}

/// Bytes, and the most of them that there have been.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SizeClass {
    /// Now.
    pub bytes: u64,
    /// The most.
    pub high: u64,
}

impl SizeClass {
    fn rise(&mut self, bytes: u64) {
        self.bytes += bytes;
        self.high = self.high.max(self.bytes);
    }

    fn fall(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_sub(bytes);
    }
}

/// What an allocation is looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PieceRequest {
    /// The number of its pool.
    pub pool: u64,
    /// Id of its stream.
    pub stream: u64,
    /// The stream's context: nobody says that ids of two are not the same.
    pub context: usize,
    /// In whole granules.
    pub bytes: u64,
    /// It may have what other streams have used, once they do not any more.
    pub of_others: bool,
}

impl PieceRequest {
    /// How well something fits: less is better.
    fn fit(&self, one: &FreePiece) -> Option<(bool, u64)> {
        let is_own = (one.stream, one.mark.context) == (self.stream, self.context);
        let may = one.pool == self.pool && (is_own || (one.ended && self.of_others));
        let too_much = one.piece.bytes.checked_sub(self.bytes)?;
        (may && too_much <= one.piece.bytes / 4).then_some((!is_own, too_much))
    }
}

/// No stream's id, as a thread's default stream has none: what was freed in such is of any number of them.
pub const NO_STREAM: u64 = u64::MAX;

/// Streams that were found to be busy, each with its context.
#[derive(Default)]
pub struct PendingFree {
    streams: [(u64, usize); 8],
    many: usize,
}

impl PendingFree {
    /// One more. Of those for which there is no room each piece is asked about.
    pub fn add(&mut self, of: &FreePiece) {
        if of.stream != NO_STREAM
            && let Some(place) = self.streams.get_mut(self.many)
        {
            *place = (of.stream, of.mark.context);
            self.many += 1;
        }
    }

    fn has(&self, of: &FreePiece) -> bool {
        let stream = (of.stream, of.mark.context);
        self.streams.iter().take(self.many).any(|busy| *busy == stream)
    }
}

/// All of them, what is unused in the order in which it was freed. Zero is none.
#[repr(C)]
pub struct PoolCache {
    unused: ChunkedMap<FreePiece>,
    pools: ChunkedMap<StreamPool>,
}

impl PoolCache {
    /// None.
    pub const fn empty() -> PoolCache {
        PoolCache { unused: ChunkedMap::empty(), pools: ChunkedMap::empty() }
    }

    /// The pool of a handle.
    pub fn pool(&mut self, handle: usize) -> Option<StreamPool> {
        self.pools.at(handle as u64).copied()
    }

    /// The pools from a handle on.
    pub fn pool_from(&mut self, handle: usize) -> Option<StreamPool> {
        self.pools.from(handle as u64).next().copied()
    }

    /// Allocations of a pool are carried from now on; of one of that handle before they are not.
    /// False: there is no memory to note it.
    pub fn add_pool(&mut self, pool: StreamPool) -> bool {
        self.remove_pool(pool.handle);
        self.pools.insert(pool)
    }

    /// The same, unless it is known already: another thread may have been first.
    pub fn learn_pool(&mut self, pool: StreamPool) -> bool {
        self.pools.at(pool.handle as u64).is_some() || self.pools.insert(pool)
    }

    /// Whether new allocations of a pool are carried still.
    pub fn carries(&mut self, number: u64) -> bool {
        self.numbered(number).is_some_and(|pool| !pool.left)
    }

    /// Allocations of a pool are not carried any more.
    pub fn remove_pool(&mut self, handle: usize) -> Option<StreamPool> {
        self.pools.remove_at(handle as u64)
    }

    /// New allocations of a pool are the driver's from now on, also where none was carried yet and it
    /// has no number but the one that it is given: its number. `None`: there is no memory to note it.
    pub fn leave(&mut self, handle: usize, number: u64) -> Option<u64> {
        if let Some(pool) = self.pools.at(handle as u64) {
            pool.left = true;
            return Some(pool.number);
        }
        let pool = StreamPool { handle, number, left: true, ..StreamPool::default() };
        self.pools.insert(pool).then_some(number)
    }

    /// The most that a pool has had is what it has now.
    pub fn forget_highs(&mut self, handle: usize, of: impl Fn(&mut StreamPool) -> &mut SizeClass) {
        if let Some(pool) = self.pools.at(handle as u64) {
            let level = of(pool);
            level.high = level.bytes;
        }
    }

    fn numbered(&mut self, number: u64) -> Option<&mut StreamPool> {
        self.pools.iter_mut().find(|pool| number != 0 && pool.number == number)
    }

    /// What the application calls the pool of a number; 0: it is no more.
    pub fn handle_of(&mut self, number: u64) -> usize {
        self.numbered(number).map_or(0, |pool| pool.handle)
    }

    /// A new piece of a pool is in use.
    pub fn made(&mut self, allocation: &Allocation) {
        if let Some(pool) = self.numbered(allocation.pool) {
            pool.used.rise(allocation.asked_bytes);
            pool.reserved.rise(allocation.piece.bytes);
        }
    }

    /// Something of a pool that is in use ends, its memory as well.
    fn ends(&mut self, allocation: &Allocation) {
        if let Some(pool) = self.numbered(allocation.pool) {
            pool.used.fall(allocation.asked_bytes);
            pool.reserved.fall(allocation.piece.bytes);
        }
    }

    /// Takes in what was in use until now. False: there is no memory to note it.
    pub fn put(&mut self, allocation: &Allocation, unused: FreePiece) -> bool {
        if !self.unused.insert(unused) {
            self.ends(allocation);
            return false;
        }
        match self.numbered(unused.pool) {
            Some(pool) => pool.used.fall(allocation.asked_bytes),
            None => self.ends(allocation),
        }
        true
    }

    /// Takes out what fits an allocation best, for so many bytes that were asked for.
    pub fn take(&mut self, want: &PieceRequest, asked_bytes: u64) -> Option<FreePiece> {
        if !self.carries(want.pool) {
            return None;
        }
        let mut best: Option<((bool, u64), u64)> = None;
        // What was freed last is what a loop allocates next.
        for one in self.unused.iter().rev() {
            let Some(fit) = want.fit(one) else { continue };
            if best.is_none_or(|best| fit < best.0) {
                best = Some((fit, one.since));
            }
            if fit == (false, 0) {
                break;
            }
        }
        let taken = self.unused.remove_at(best?.1)?;
        if let Some(pool) = self.numbered(taken.pool) {
            pool.used.rise(asked_bytes);
        }
        Some(taken)
    }

    /// Whether a pool has anything unused.
    pub fn has_of(&mut self, number: u64) -> bool {
        self.unused.iter().any(|one| one.pool == number)
    }

    /// The first from a moment on that waits for a stream that is not known to be busy: of a busy
    /// one no later work has ended either.
    pub fn waiting(&mut self, from: u64, busy: &PendingFree) -> Option<FreePiece> {
        let waits = |one: &&FreePiece| !one.ended && !busy.has(one);
        self.unused.from(from).find(waits).copied()
    }

    /// Whether any waits.
    pub fn waits(&mut self) -> bool {
        self.waiting(0, &PendingFree::default()).is_some()
    }

    /// Whether there is any.
    pub fn is_empty(&mut self) -> bool {
        self.unused.is_empty()
    }

    /// Nobody uses it any more, unless it has been taken out meanwhile.
    pub fn has_ended(&mut self, since: u64) {
        if let Some(one) = self.unused.at(since) {
            one.ended = true;
        }
    }

    /// Takes out the oldest that nobody uses any more.
    pub fn take_ended(&mut self) -> Option<FreePiece> {
        self.take_out(|one| one.ended)
    }

    /// The same, of those that are of no pool, or of one that is no more.
    pub fn take_loose(&mut self) -> Option<FreePiece> {
        let pools = &self.pools;
        let loose = |one: &FreePiece| one.ended && !pools.iter().any(|p| p.number == one.pool);
        self.unused.remove(loose)
    }

    /// The same, of a pool that has more physical memory than it is to keep.
    pub fn take_surplus(&mut self, number: u64, keep_bytes: u64) -> Option<FreePiece> {
        self.numbered(number).filter(|pool| pool.reserved.bytes > keep_bytes)?;
        self.take_out(|one| one.ended && one.pool == number)
    }

    /// Takes out the oldest, whatever it waits for.
    pub fn take_any(&mut self) -> Option<FreePiece> {
        self.take_out(|_| true)
    }

    /// A context has ended, and with it all work in it before that moment, and its events.
    pub fn context_ends(&mut self, context: usize, before: u64) {
        for one in self.unused.iter_mut().filter(|one| one.since < before) {
            if one.mark.context == context {
                (one.mark, one.ended) = (CompletionMark::default(), true);
            }
        }
    }

    /// Takes out the oldest of a context that has ended at that moment. Not what waits for work of
    /// another one, which may use it still.
    pub fn take_of_context(&mut self, context: usize, before: u64) -> Option<FreePiece> {
        self.take_out(|one| one.ended && one.piece.context == context && one.since < before)
    }

    /// Whether any is of a copier's making.
    pub fn holds_imported(&mut self) -> bool {
        self.unused.iter().any(|one| one.piece.imported)
    }

    /// Out for good: the pool has so much less.
    fn take_out(&mut self, which: impl Fn(&FreePiece) -> bool) -> Option<FreePiece> {
        let taken = self.unused.remove(which)?;
        if let Some(pool) = self.numbered(taken.pool) {
            pool.reserved.fall(taken.piece.bytes);
        }
        Some(taken)
    }
}

#[cfg(test)]
mod tests;
