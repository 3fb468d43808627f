//! Memory that the application has freed in a stream, and its pools: which of it an
//! allocation may have, what waits for which work, what to free next. Calls no driver.
//!
//! ```text
//!         cuMemAllocAsync                        cuMemFreeAsync
//! ┌────── of the same stream, or ended ──────┐        │
//! v                                          │        v
//! in use (table of allocations) ───────────> unused: waits ── its mark has happened ──> ended
//!                                                     │                                   │
//!                                                     └── context ends, all is cleared ──> freed
//!                                                             above the pool's threshold ┘
//! ```

use super::super::allocations::{Allocation, AllocationPiece};
use super::super::chunked_map::{ChunkedMap, HasKey};

/// A point in a stream's work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CompletionMark {
    /// The driver's event; 0: none.
    pub event: usize,
    /// The context of the event.
    pub context: usize,
}

/// A piece of memory that is unused, or will be once the work before its mark has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FreePiece {
    /// When it was freed, in `AllocationTables::now`.
    pub since: u64,
    pub piece: AllocationPiece,
    /// The number of its pool; 0: none, so it is freed as soon as possible.
    pub pool: u64,
    /// Id of the stream that it was freed in.
    pub stream: u64,
    /// The point in that stream's work after which it is unused.
    pub mark: CompletionMark,
    /// All work before the mark has ended.
    pub ended: bool,
}

impl HasKey for FreePiece {
    fn key(&self) -> u64 {
        self.since
    }
}

/// A pool whose allocations are swappable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamPool {
    /// The application's handle of it.
    pub handle: usize,
    /// This library's number, unique where a handle is reused.
    pub number: u64,
    /// The device of its memory.
    pub device: i32,
    /// New allocations come from the driver.
    pub left: bool,
    /// Bytes in use, as requested.
    pub used: SizeClass,
    /// Bytes of physical memory.
    pub reserved: SizeClass,
}

impl HasKey for StreamPool {
    fn key(&self) -> u64 {
        self.handle as u64
    }
}

/// A number of bytes, and its highest value since the last reset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SizeClass {
    pub bytes: u64,
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

/// The requirements of an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PieceRequest {
    pub pool: u64,
    /// The id of its stream.
    pub stream: u64,
    /// The stream's context: ids of two contexts may be the same.
    pub context: usize,
    /// Size in whole granules.
    pub bytes: u64,
    /// Pieces of other streams are allowed, once their work has ended.
    pub of_others: bool,
}

impl PieceRequest {
    /// How well a piece fits: less is better; `None`: it does not.
    fn fit(&self, one: &FreePiece) -> Option<(bool, u64)> {
        let is_own = (one.stream, one.mark.context) == (self.stream, self.context);
        let may = one.pool == self.pool && (is_own || (one.ended && self.of_others));
        let too_much = one.piece.bytes.checked_sub(self.bytes)?;
        (may && too_much <= one.piece.bytes / 4).then_some((!is_own, too_much))
    }
}

/// No stream's id: a thread's default stream has none, so pieces with it may be of different streams.
pub const NO_STREAM: u64 = u64::MAX;

/// Streams that were found to be busy, each with its context.
#[derive(Default)]
pub struct PendingFree {
    streams: [(u64, usize); 8],
    many: usize,
}

impl PendingFree {
    /// Adds a stream. Beyond the limit, each piece of a stream is queried by itself.
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

/// All unused pieces, in the order in which they were freed, and all pools. Zeroes are empty.
#[repr(C)]
pub struct PoolCache {
    unused: ChunkedMap<FreePiece>,
    pools: ChunkedMap<StreamPool>,
}

impl PoolCache {
    pub const fn empty() -> PoolCache {
        PoolCache { unused: ChunkedMap::empty(), pools: ChunkedMap::empty() }
    }

    pub fn pool(&mut self, handle: usize) -> Option<StreamPool> {
        self.pools.at(handle as u64).copied()
    }

    /// The first pool whose handle is at least this.
    pub fn pool_from(&mut self, handle: usize) -> Option<StreamPool> {
        self.pools.from(handle as u64).next().copied()
    }

    /// Makes allocations of a pool swappable from now on, and forgets an earlier pool of that handle.
    /// False: out of memory.
    pub fn add_pool(&mut self, pool: StreamPool) -> bool {
        self.remove_pool(pool.handle);
        self.pools.insert(pool)
    }

    /// The same, unless the pool is known already: another thread may have been first.
    pub fn learn_pool(&mut self, pool: StreamPool) -> bool {
        self.pools.at(pool.handle as u64).is_some() || self.pools.insert(pool)
    }

    /// Whether new allocations of a pool are still swappable.
    pub fn can_copy(&mut self, number: u64) -> bool {
        self.numbered(number).is_some_and(|pool| !pool.left)
    }

    /// Forgets a pool; its allocations are the driver's from now on.
    pub fn remove_pool(&mut self, handle: usize) -> Option<StreamPool> {
        self.pools.remove_at(handle as u64)
    }

    /// Leaves new allocations of a pool to the driver from now on. Returns the pool's number: `number`, if
    /// it had none yet. `None`: out of memory.
    pub fn leave(&mut self, handle: usize, number: u64) -> Option<u64> {
        if let Some(pool) = self.pools.at(handle as u64) {
            pool.left = true;
            return Some(pool.number);
        }
        let pool = StreamPool { handle, number, left: true, ..StreamPool::default() };
        self.pools.insert(pool).then_some(number)
    }

    /// Resets a highest value to the current one.
    pub fn forget_highs(&mut self, handle: usize, of: impl Fn(&mut StreamPool) -> &mut SizeClass) {
        if let Some(pool) = self.pools.at(handle as u64) {
            let level = of(pool);
            level.high = level.bytes;
        }
    }

    fn numbered(&mut self, number: u64) -> Option<&mut StreamPool> {
        self.pools.iter_mut().find(|pool| number != 0 && pool.number == number)
    }

    /// The application's handle of a pool; 0: destroyed.
    pub fn handle_of(&mut self, number: u64) -> usize {
        self.numbered(number).map_or(0, |pool| pool.handle)
    }

    /// Counts a new piece of a pool as in use.
    pub fn made(&mut self, allocation: &Allocation) {
        if let Some(pool) = self.numbered(allocation.pool) {
            pool.used.rise(allocation.asked_bytes);
            pool.reserved.rise(allocation.piece.bytes);
        }
    }

    /// Counts a piece of a pool, and its memory, as gone.
    fn ends(&mut self, allocation: &Allocation) {
        if let Some(pool) = self.numbered(allocation.pool) {
            pool.used.fall(allocation.asked_bytes);
            pool.reserved.fall(allocation.piece.bytes);
        }
    }

    /// Stores a piece that was in use. False: out of memory.
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

    /// Takes out the piece that fits best, for an allocation of `asked_bytes`.
    pub fn take(&mut self, want: &PieceRequest, asked_bytes: u64) -> Option<FreePiece> {
        if !self.can_copy(want.pool) {
            return None;
        }
        let mut best: Option<((bool, u64), u64)> = None;
        // A loop usually allocates next what it has freed last.
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

    /// Whether a pool has unused pieces.
    pub fn has_of(&mut self, number: u64) -> bool {
        self.unused.iter().any(|one| one.pool == number)
    }

    /// The first piece from a moment on that waits for a stream that is not known to be busy: in a busy
    /// stream no later work has ended either.
    pub fn waiting(&mut self, from: u64, busy: &PendingFree) -> Option<FreePiece> {
        let waits = |one: &&FreePiece| !one.ended && !busy.has(one);
        self.unused.from(from).find(waits).copied()
    }

    /// Whether any piece waits for work.
    pub fn waits(&mut self) -> bool {
        self.waiting(0, &PendingFree::default()).is_some()
    }

    /// Whether there is no unused piece.
    pub fn is_empty(&mut self) -> bool {
        self.unused.is_empty()
    }

    /// Marks a piece as ended, unless it has been taken out since.
    pub fn has_ended(&mut self, since: u64) {
        if let Some(one) = self.unused.at(since) {
            one.ended = true;
        }
    }

    /// Takes out the oldest ended piece.
    pub fn take_ended(&mut self) -> Option<FreePiece> {
        self.take_out(|one| one.ended)
    }

    /// The same, among the pieces without a pool or of a destroyed pool.
    pub fn take_loose(&mut self) -> Option<FreePiece> {
        let pools = &self.pools;
        let loose = |one: &FreePiece| one.ended && !pools.iter().any(|p| p.number == one.pool);
        self.unused.remove(loose)
    }

    /// The same, of a pool with more physical memory than it is to keep.
    pub fn take_surplus(&mut self, number: u64, keep_bytes: u64) -> Option<FreePiece> {
        self.numbered(number).filter(|pool| pool.reserved.bytes > keep_bytes)?;
        self.take_out(|one| one.ended && one.pool == number)
    }

    /// Takes out the oldest piece, whatever it waits for.
    pub fn take_any(&mut self) -> Option<FreePiece> {
        self.take_out(|_| true)
    }

    /// A context has ended, and with it all its work before that moment, and its events.
    pub fn context_ends(&mut self, context: usize, before: u64) {
        for one in self.unused.iter_mut().filter(|one| one.since < before) {
            if one.mark.context == context {
                (one.mark, one.ended) = (CompletionMark::default(), true);
            }
        }
    }

    /// Takes out the oldest piece of a context that ended at that moment. Not a piece that waits for work of
    /// another context, which may still use it.
    pub fn take_of_context(&mut self, context: usize, before: u64) -> Option<FreePiece> {
        self.take_out(|one| one.ended && one.piece.context == context && one.since < before)
    }

    /// Whether any piece is imported from a copier.
    pub fn holds_imported(&mut self) -> bool {
        self.unused.iter().any(|one| one.piece.imported)
    }

    /// Takes a piece out for good: its bytes leave the pool's sizes.
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
