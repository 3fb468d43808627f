//! Manages the memory that the application has freed in a stream, and the application's memory
//! pools. This module decides which piece an allocation gets, which work a piece waits for, and
//! which piece is freed next. It makes no call into the driver.
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

/// A point in a stream's work, at which this library has recorded an event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CompletionMark {
    /// The driver's event; 0: no event.
    pub event: usize,
    /// The context of the event.
    pub context: usize,
}

impl CompletionMark {
    /// Whether the mark has an event in this context.
    pub fn is_in(&self, context: usize) -> bool {
        self.event != 0 && self.context == context
    }
}

/// A piece of memory that the application has freed in a stream. The GPU no longer uses the piece
/// once the stream's work before the mark has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FreePiece {
    /// Time of the free, from `AllocationTables::now`.
    pub since: u64,
    pub piece: AllocationPiece,
    /// Library's number of the pool from which the piece was allocated. 0: no pool, so the piece is
    /// freed as soon as possible.
    pub pool: u64,
    /// Id of the stream in which the piece was freed.
    pub stream: u64,
    /// Point in the work of `stream` after which the GPU no longer uses the piece.
    pub mark: CompletionMark,
    /// True once all work before the mark has ended.
    pub ended: bool,
}

impl HasKey for FreePiece {
    fn key(&self) -> u64 {
        self.since
    }
}

/// A memory pool of the application. This library allocates the pool's memory in place of the
/// driver, so that it can copy the memory. If `left` is true, the driver makes the new allocations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamPool {
    /// The application's handle of the pool.
    pub handle: usize,
    /// This library's number of the pool. It stays unique even if the driver reuses the pool's
    /// handle.
    pub number: u64,
    /// Ordinal of the device that contains the pool's memory.
    pub device: i32,
    /// True if new allocations of the pool are left to the driver.
    pub left: bool,
    /// Bytes that are in use, counted as the application requested them.
    pub used: SizeClass,
    /// Bytes of physical memory that this library holds for the pool.
    pub reserved: SizeClass,
}

impl HasKey for StreamPool {
    fn key(&self) -> u64 {
        self.handle as u64
    }
}

/// Byte counter of a pool: the current number, and the highest number since the last reset.
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

/// Requirements that an unused piece must meet to serve an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PieceRequest {
    pub pool: u64,
    /// The id of the allocation's stream.
    pub stream: u64,
    /// The stream's context, because streams of two contexts may have the same id.
    pub context: usize,
    /// Size in bytes, rounded up to whole granules.
    pub bytes: u64,
    /// True if a piece of another stream may be used, once that stream's work before the piece's
    /// mark has ended.
    pub of_others: bool,
}

impl PieceRequest {
    /// How well a piece fits: a lower value is better. `None`: it does not fit.
    fn fit(&self, one: &FreePiece) -> Option<(bool, u64)> {
        let is_own = (one.stream, one.mark.context) == (self.stream, self.context);
        let may = one.pool == self.pool && (is_own || (one.ended && self.of_others));
        let too_much = one.piece.bytes.checked_sub(self.bytes)?;
        (may && too_much <= one.piece.bytes / 4).then_some((!is_own, too_much))
    }
}

/// Value that replaces the id of a stream without an id, such as a thread's default stream. No real
/// stream has this id. Two pieces with this value may belong to different streams.
pub const NO_STREAM: u64 = u64::MAX;

/// List of streams that have unfinished work, as a query of an event has shown. Each stream is
/// stored with its context.
#[derive(Default)]
pub struct PendingFree {
    streams: [(u64, usize); 8],
    many: usize,
}

impl PendingFree {
    /// Adds the stream of a piece as busy. If the list is full, the stream is not added, and the
    /// event of each of its pieces is queried separately.
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

/// All unused pieces, in the order in which they were freed, and all memory pools of the
/// application. An all-zero value is empty.
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

    /// Returns the first pool whose handle is at least this number.
    pub fn pool_from(&mut self, handle: usize) -> Option<StreamPool> {
        self.pools.from(handle as u64).next().copied()
    }

    /// Adds a pool, whose new allocations are swappable from then on. Removes an earlier pool with
    /// the same handle. False: out of memory.
    pub fn add_pool(&mut self, pool: StreamPool) -> bool {
        self.remove_pool(pool.handle);
        self.pools.insert(pool)
    }

    /// Same as [`Self::add_pool`], but changes nothing if the pool is in the table already.
    pub fn learn_pool(&mut self, pool: StreamPool) -> bool {
        self.pools.at(pool.handle as u64).is_some() || self.pools.insert(pool)
    }

    /// Whether this library still makes new allocations of a pool itself, so that it can copy them.
    pub fn can_copy(&mut self, number: u64) -> bool {
        self.numbered(number).is_some_and(|pool| !pool.left)
    }

    /// Removes a pool from the table and returns it. From now on the driver makes the pool's new
    /// allocations.
    pub fn remove_pool(&mut self, handle: usize) -> Option<StreamPool> {
        self.pools.remove_at(handle as u64)
    }

    /// Lets the driver make new allocations of a pool from now on. Returns the pool's number. A
    /// pool that was not in the table gets the number `number`. `None`: out of memory.
    pub fn leave(&mut self, handle: usize, number: u64) -> Option<u64> {
        if let Some(pool) = self.pools.at(handle as u64) {
            pool.left = true;
            return Some(pool.number);
        }
        let pool = StreamPool { handle, number, left: true, ..StreamPool::default() };
        self.pools.insert(pool).then_some(number)
    }

    /// Sets the highest number of one byte counter of a pool to the counter's current number. `of`
    /// selects the counter.
    pub fn forget_highs(&mut self, handle: usize, of: impl Fn(&mut StreamPool) -> &mut SizeClass) {
        if let Some(pool) = self.pools.at(handle as u64) {
            let level = of(pool);
            level.high = level.bytes;
        }
    }

    fn numbered(&mut self, number: u64) -> Option<&mut StreamPool> {
        self.pools.iter_mut().find(|pool| number != 0 && pool.number == number)
    }

    /// The application's handle of a pool; 0: the pool is destroyed.
    pub fn handle_of(&mut self, number: u64) -> usize {
        self.numbered(number).map_or(0, |pool| pool.handle)
    }

    /// Adds a new allocation and its physical memory to the byte counters of its pool.
    pub fn made(&mut self, allocation: &Allocation) {
        if let Some(pool) = self.numbered(allocation.pool) {
            pool.used.rise(allocation.asked_bytes);
            pool.reserved.rise(allocation.piece.bytes);
        }
    }

    /// Subtracts an allocation and its physical memory from the byte counters of its pool.
    fn ends(&mut self, allocation: &Allocation) {
        if let Some(pool) = self.numbered(allocation.pool) {
            pool.used.fall(allocation.asked_bytes);
            pool.reserved.fall(allocation.piece.bytes);
        }
    }

    /// Stores a piece that the application has freed. False: out of memory.
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

    /// Removes and returns the unused piece that fits a request best. `asked_bytes` is the size
    /// that the application requested. `None`: no piece fits.
    pub fn take(&mut self, want: &PieceRequest, asked_bytes: u64) -> Option<FreePiece> {
        if !self.can_copy(want.pool) {
            return None;
        }
        let mut best: Option<((bool, u64), u64)> = None;
        // Search the newest piece first, because a loop usually allocates next what it has freed
        // last.
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

    /// Whether a pool has any unused pieces.
    pub fn has_of(&mut self, number: u64) -> bool {
        self.unused.iter().any(|one| one.pool == number)
    }

    /// Returns the oldest piece whose work has not ended, among the pieces freed at the time `from`
    /// or later. Skips pieces of the streams in `busy`: earlier work of these streams has not
    /// ended, so their later work has not ended either.
    pub fn waiting(&mut self, from: u64, busy: &PendingFree) -> Option<FreePiece> {
        let waits = |one: &&FreePiece| !one.ended && !busy.has(one);
        self.unused.from(from).find(waits).copied()
    }

    /// Whether any unused piece still waits for the end of GPU work.
    pub fn waits(&mut self) -> bool {
        self.waiting(0, &PendingFree::default()).is_some()
    }

    /// True if the cache contains no pieces.
    pub fn is_empty(&mut self) -> bool {
        self.unused.is_empty()
    }

    /// Records that the work of a piece has ended. Does nothing if the piece was removed meanwhile.
    pub fn has_ended(&mut self, since: u64) {
        if let Some(one) = self.unused.at(since) {
            one.ended = true;
        }
    }

    /// Removes and returns the oldest piece whose work has ended.
    pub fn take_ended(&mut self) -> Option<FreePiece> {
        self.take_out(|one| one.ended)
    }

    /// Same as [`Self::take_ended`], but only for pieces that have no pool or whose pool is
    /// destroyed.
    pub fn take_loose(&mut self) -> Option<FreePiece> {
        let pools = &self.pools;
        let loose = |one: &FreePiece| one.ended && !pools.iter().any(|p| p.number == one.pool);
        self.unused.remove(loose)
    }

    /// Same as [`Self::take_ended`], but only for pieces of a pool that holds more than
    /// `keep_bytes` of physical memory.
    pub fn take_surplus(&mut self, number: u64, keep_bytes: u64) -> Option<FreePiece> {
        self.numbered(number).filter(|pool| pool.reserved.bytes > keep_bytes)?;
        self.take_out(|one| one.ended && one.pool == number)
    }

    /// Removes and returns the oldest piece, even if its work has not ended.
    pub fn take_any(&mut self) -> Option<FreePiece> {
        self.take_out(|_| true)
    }

    /// Takes the mark of one piece whose mark is in a context, and returns it with the time at which
    /// the piece was freed. Until [`Self::has_ended`] is called, no allocation gets this piece.
    pub fn take_mark(&mut self, context: usize) -> Option<(u64, CompletionMark)> {
        let one = self.unused.iter_mut().find(|one| one.mark.is_in(context))?;
        Some((one.since, core::mem::take(&mut one.mark)))
    }

    /// Records that a context has ended. Each piece that was freed before the time `before` and has
    /// its mark in this context is recorded as ended. It loses the mark, because the mark's event
    /// no longer exists.
    pub fn context_ends(&mut self, context: usize, before: u64) {
        for one in self.unused.iter_mut().filter(|one| one.since < before) {
            if one.mark.context == context {
                (one.mark, one.ended) = (CompletionMark::default(), true);
            }
        }
    }

    /// Removes and returns the oldest piece whose memory belongs to a context that ended at the
    /// time `before`. Skips a piece that waits for work in another context, because that work may
    /// still use the piece.
    pub fn take_of_context(&mut self, context: usize, before: u64) -> Option<FreePiece> {
        self.take_out(|one| one.ended && one.piece.context == context && one.since < before)
    }

    /// Removes and returns the oldest piece whose memory or mark belongs to a context.
    pub fn take_in(&mut self, context: usize) -> Option<FreePiece> {
        self.take_out(|one| one.piece.context == context || one.mark.is_in(context))
    }

    /// Whether any unused piece was imported, for example from a copier.
    pub fn holds_imported(&mut self) -> bool {
        self.unused.iter().any(|one| one.piece.imported)
    }

    /// Removes and returns the first piece for which `which` is true. The caller frees it, so its
    /// bytes are subtracted from the pool's counter.
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
