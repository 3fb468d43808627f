//! Finds content that several processes have in common, and stores it once, in a shared segment.
//!
//! A chunk is a part of a process's memory file. A segment is a file of the copier with the content
//! of one chunk. In an offer, the copier proposes that a process uses a segment in place of its own
//! chunk.
//!
//! ```text
//! chunk ──fingerprint──> equals a segment's      ──bytes are equal──> segment is offered
//!                        equals another chunk's  ──bytes are equal──> new segment, offered to both
//!                        unknown, or bytes differ ──────────────────> fingerprint is recorded
//! ```
//!
//! A fingerprint is a hash of samples of a chunk. The keys of the hash are random and known only to
//! this copier. The fingerprint only selects the chunks whose bytes are compared. A chunk is
//! compared only within its dedup domain. A process gets a segment only if one of its chunks
//! already has the segment's content.

use std::{
    collections::{HashMap, hash_map::RandomState},
    hash::{BuildHasher, Hasher},
    io,
    rc::{Rc, Weak},
};

use crate::{
    host_budget::HostBudget,
    session::SessionStep,
    sys::{CHUNK_BYTES, RegionError, SegmentDraft},
};

/// Readable content of a chunk, stored once for several processes.
pub trait ChunkContent {
    /// Reads `to.len()` bytes of the content at an offset.
    ///
    /// # Errors
    /// The `errno` of the read.
    fn read(&self, offset: usize, to: &mut [u8]) -> io::Result<()>;
}

/// A process whose content may equal the content of other processes.
pub trait ChunkHolder {
    /// Type of the stored content that processes share.
    type Segment: ChunkContent;
    /// Returns the number that the controller has assigned to the process.
    fn process(&self) -> u64;
    /// Returns the process's dedup domain. Content is shared only between processes of the same
    /// domain.
    fn domain(&self) -> u64;
    /// Returns the number of the process's next chunk that must still be examined for shared
    /// content. Returns `None` if no chunk can be examined now.
    fn next_chunk(&self) -> Option<usize>;
    /// Marks the chunk of [`Self::next_chunk`] as examined.
    fn has_looked(&mut self);
    /// Returns whether the copier may offer the process a segment in place of this chunk. The
    /// process must also have room for an offer ([`Self::has_room`]).
    fn may_offer(&self, chunk: usize) -> bool;
    /// Returns whether the process may get another offer before it replies to its earlier offers.
    fn has_room(&self) -> bool;
    /// Returns whether the process has an offer to which it has not replied yet. A process that
    /// exceeds the time limit for a reply gets no more offers.
    fn is_asked(&mut self) -> bool;
    /// Reads the copied-out content of the process.
    ///
    /// # Errors
    /// The `errno` of the read.
    fn read(&self, offset: usize, to: &mut [u8]) -> io::Result<()>;
    /// Offers the process a segment with the same content as one of its chunks.
    fn offer(&mut self, chunk: usize, segment: &Rc<Self::Segment>);
}

/// Number of bytes that are compared at a time. The comparison takes some milliseconds, during
/// which the copier reads no message.
const PART_BYTES: usize = CHUNK_BYTES / 16;
const SAMPLES: usize = 64;
const SAMPLE_BYTES: usize = 4096;
/// Limit for the total size of a copier's segments, as a divisor of the node's host memory. 4 means
/// a quarter. The size is limited because no container is charged for the memory of segments.
const MAX_MEMORY_SHARE: u64 = 4;
/// Host memory that must stay free after a new segment is created, as a divisor of the node's host
/// memory: 8 means an eighth.
const MIN_FREE: u64 = 8;

/// Dedup domain and fingerprint of a chunk.
type Key = (u64, u64);

#[derive(Clone, Copy, Debug)]
struct ChunkLocation {
    process: u64,
    chunk: usize,
}

/// A comparison in progress: a chunk is compared with a segment or with a chunk of another process.
#[derive(Debug)]
struct CompareJob<S> {
    key: Key,
    place: ChunkLocation,
    done: usize,
    with: CompareTarget<S>,
}

#[derive(Debug)]
enum CompareTarget<S> {
    Segment(Rc<S>),
    /// The chunk is compared with a chunk of another process. Contains the place of that chunk, and
    /// a draft (an unfinished segment) with the bytes that were found equal so far.
    Chunk(ChunkLocation, SegmentDraft),
}

/// Index of all examined chunks and all segments of a copier.
#[derive(Debug)]
pub struct DedupIndex<S> {
    keys: RandomState,
    seen: HashMap<Key, ChunkLocation>,
    segments: HashMap<Key, Weak<S>>,
    job: Option<CompareJob<S>>,
    /// Two buffers for the parts that are compared. They are reused, because page faults in fresh
    /// memory take longer than the comparison.
    parts: [Vec<u8>; 2],
    reported_bytes: u64,
    /// Function that reads how much host memory is available.
    memory: fn() -> HostBudget,
}

impl<S: ChunkContent> DedupIndex<S> {
    /// Creates an empty index. It adds a segment only while this machine has enough free host
    /// memory.
    pub fn new() -> Self {
        DedupIndex::within(HostBudget::now)
    }

    /// Creates an empty index. It adds a segment only while `memory` returns enough free host
    /// memory.
    pub fn within(memory: fn() -> HostBudget) -> Self {
        DedupIndex {
            keys: RandomState::new(),
            seen: HashMap::new(),
            segments: HashMap::new(),
            job: None,
            parts: [Vec::new(), Vec::new()],
            reported_bytes: 0,
            memory,
        }
    }

    /// Removes the chunks of a process that has detached from the copier.
    pub fn forget(&mut self, process: u64) {
        self.seen.retain(|_, place| place.process != process);
        let is_of = |place: &ChunkLocation| place.process == process;
        let is_first = |with: &CompareTarget<S>| matches!(with, CompareTarget::Chunk(place, _) if is_of(place));
        self.job = match self.job.take() {
            Some(job) if is_of(&job.place) => None,
            Some(job) if is_first(&job.with) => {
                // This chunk is not examined again, but a later chunk of another process may have
                // the same content.
                self.seen.insert(job.key, job.place);
                None
            }
            job => job,
        };
    }

    /// Returns the total size of all segments in use, in bytes.
    fn stored_bytes(&self) -> u64 {
        let live = self.segments.values().filter(|segment| segment.strong_count() > 0);
        (live.count() * CHUNK_BYTES) as u64
    }

    /// Returns the total size of all segments in bytes, and whether it differs from the size that
    /// the previous call returned.
    pub fn report(&mut self) -> (u64, bool) {
        let stored_bytes = self.stored_bytes();
        let reported_bytes = std::mem::replace(&mut self.reported_bytes, stored_bytes);
        (stored_bytes, reported_bytes != stored_bytes)
    }

    /// Runs one step of deduplication. If a comparison is in progress, compares its next part.
    /// Otherwise examines the next chunk. `finish` turns a draft (an unfinished segment) into a
    /// segment. Returns `Later` if a process must first reply to an offer.
    ///
    /// # Errors
    /// [`RegionError`]: the driver has refused a call, and the copier's CUDA context may be
    /// unusable.
    pub fn step<H: ChunkHolder<Segment = S>>(
        &mut self,
        clients: &mut [H],
        finish: impl FnOnce(SegmentDraft) -> Result<S, RegionError>,
    ) -> Result<SessionStep, RegionError> {
        let Some(mut job) = self.job.take() else {
            let looked = self.look(clients);
            if looked != SessionStep::More {
                self.parts = [Vec::new(), Vec::new()];
            }
            return Ok(looked);
        };
        // A process that has detached, or whose chunk cannot be read, gets no offer.
        if !matches!(job.compare(clients, &mut self.parts), Ok(true)) {
            // A later chunk of another process may have the same content as this chunk.
            self.seen.insert(job.key, job.place);
            return Ok(SessionStep::More);
        }
        if job.done < CHUNK_BYTES {
            self.job = Some(job);
            return Ok(SessionStep::More);
        }
        let (segment, first) = match job.with {
            CompareTarget::Segment(segment) => (segment, None),
            CompareTarget::Chunk(first, draft) => match finish(draft) {
                Ok(segment) => (Rc::new(segment), Some(first)),
                Err(RegionError::Cuda(error)) if !error.is_passing() => return Err(error.into()),
                Err(_) => return Ok(SessionStep::More),
            },
        };
        // Sessions own the segments. Remove the entries of segments that no session uses.
        self.segments.retain(|_, segment| segment.strong_count() > 0);
        self.segments.insert(job.key, Rc::downgrade(&segment));
        for place in [Some(job.place), first].into_iter().flatten() {
            if let Some(client) = find(clients, place) {
                client.offer(place.chunk, &segment);
            }
        }
        Ok(SessionStep::More)
    }

    /// Examines one chunk that is not examined yet, of any process. If no chunk can be examined
    /// now, returns `Later` if a process must first reply to an offer, otherwise `Nothing`.
    fn look<H: ChunkHolder<Segment = S>>(&mut self, clients: &mut [H]) -> SessionStep {
        let mut waits = false;
        for client in clients.iter_mut() {
            waits |= client.is_asked();
        }
        let next = |client: &H| client.next_chunk().map(|chunk| (client.process(), chunk));
        for (process, chunk) in clients.iter().filter_map(next).collect::<Vec<_>>() {
            if self.look_at(clients, ChunkLocation { process, chunk }) {
                return SessionStep::More;
            }
            // A process that has the same content must reply first.
            waits = true;
        }
        if waits { SessionStep::Later } else { SessionStep::Nothing }
    }

    /// Looks for a segment or another chunk with the same fingerprint as this chunk, and prepares
    /// the comparison with it. Returns false if another process must first reply to an offer. The
    /// chunk is then examined again later.
    fn look_at<H: ChunkHolder<Segment = S>>(
        &mut self,
        clients: &mut [H],
        place: ChunkLocation,
    ) -> bool {
        let mut all = clients.iter_mut();
        let Some(client) = all.find(|client| client.process() == place.process) else {
            return false;
        };
        let print = self.print(client, place.chunk).ok().filter(|_| client.may_offer(place.chunk));
        let Some(print) = print else {
            client.has_looked();
            return true;
        };
        let key = (client.domain(), print);
        let of_another = self.seen.get(&key).copied().filter(|seen| seen.process != place.process);
        let other =
            of_another.and_then(|seen| find(clients, seen).map(|other| (seen, other.has_room())));
        let known = self.segments.get(&key).and_then(Weak::upgrade);
        let with = match (known, other) {
            (Some(segment), _) => Some(CompareTarget::Segment(segment)),
            // The other process must reply first. The chunk is examined again later.
            (None, Some((_, false))) => return false,
            (None, Some((seen, true))) if self.has_memory() => {
                SegmentDraft::begin().ok().map(|draft| CompareTarget::Chunk(seen, draft))
            }
            _ => None,
        };
        if let Some(client) = find(clients, place) {
            client.has_looked();
        }
        if with.is_none() {
            self.seen.insert(key, place);
        }
        self.job = with.map(|with| CompareJob { key, place, done: 0, with });
        true
    }

    /// Returns whether there is enough host memory for one more segment.
    fn has_memory(&self) -> bool {
        let (one, memory) = (CHUNK_BYTES as u64, (self.memory)());
        self.stored_bytes() + one <= memory.total_bytes / MAX_MEMORY_SHARE
            && memory.free_bytes >= one + memory.total_bytes / MIN_FREE
    }

    fn print(&self, client: &impl ChunkHolder, chunk: usize) -> io::Result<u64> {
        let mut hasher = self.keys.build_hasher();
        let mut sample = [0; SAMPLE_BYTES];
        for n in 0..SAMPLES {
            client.read(chunk * CHUNK_BYTES + n * (CHUNK_BYTES / SAMPLES), &mut sample)?;
            hasher.write(&sample);
        }
        Ok(hasher.finish())
    }
}

impl<S: ChunkContent> CompareJob<S> {
    /// Compares the next part of a chunk with the same part of the segment or chunk with which it
    /// is compared. Returns whether both parts are equal.
    fn compare(
        &mut self,
        clients: &mut [impl ChunkHolder],
        parts: &mut [Vec<u8>; 2],
    ) -> io::Result<bool> {
        let part_bytes = PART_BYTES.min(CHUNK_BYTES - self.done);
        let [one, other] = parts;
        one.resize(part_bytes, 0);
        other.resize(part_bytes, 0);
        read(clients, self.place, self.done, one)?;
        match &mut self.with {
            CompareTarget::Segment(segment) => segment.read(self.done, other)?,
            CompareTarget::Chunk(place, _) => read(clients, *place, self.done, other)?,
        }
        if one != other {
            return Ok(false);
        }
        // The draft gets exactly the bytes that were compared. Both processes can change their
        // files at any time, so they compare the sealed segment themselves before they use it.
        if let CompareTarget::Chunk(_, draft) = &mut self.with {
            draft.write(one)?;
        }
        self.done += part_bytes;
        Ok(true)
    }
}

/// Returns the process that has a chunk, if it is still attached and may be offered a segment for
/// that chunk.
fn find<H: ChunkHolder>(clients: &mut [H], place: ChunkLocation) -> Option<&mut H> {
    let mut all = clients.iter_mut();
    all.find(|client| client.process() == place.process && client.may_offer(place.chunk))
}

fn read(
    clients: &mut [impl ChunkHolder],
    place: ChunkLocation,
    offset: usize,
    to: &mut [u8],
) -> io::Result<()> {
    let client = find(clients, place).ok_or(io::ErrorKind::NotFound)?;
    client.read(place.chunk * CHUNK_BYTES + offset, to)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Test content of a chunk. Each byte before the offset `other_from` is `seed`, and each byte
    /// from there on is `seed + 1`.
    #[derive(Clone, Copy)]
    struct StoredChunk {
        seed: u8,
        other_from: usize,
    }

    const SAME: StoredChunk = StoredChunk { seed: 7, other_from: CHUNK_BYTES };
    /// Test content that differs from [`SAME`] only in its last byte, which the fingerprint does
    /// not sample.
    const ODD: StoredChunk = StoredChunk { seed: 7, other_from: CHUNK_BYTES - 1 };

    impl ChunkContent for StoredChunk {
        fn read(&self, offset: usize, to: &mut [u8]) -> io::Result<()> {
            to.fill(self.seed);
            let from = self.other_from.saturating_sub(offset).min(to.len());
            to[from..].fill(self.seed + 1);
            Ok(())
        }
    }

    struct DedupProcess {
        number: u64,
        domain: u64,
        chunks: Vec<StoredChunk>,
        looked: usize,
        room: usize,
        offered: Vec<(usize, Rc<SegmentDraft>)>,
    }

    impl ChunkContent for SegmentDraft {
        fn read(&self, _: usize, to: &mut [u8]) -> io::Result<()> {
            // The segment has the content of the tests' chunks, in which all bytes are equal.
            to.fill(SAME.seed);
            Ok(())
        }
    }

    impl ChunkHolder for DedupProcess {
        type Segment = SegmentDraft;
        fn process(&self) -> u64 {
            self.number
        }
        fn domain(&self) -> u64 {
            self.domain
        }
        fn next_chunk(&self) -> Option<usize> {
            (self.looked < self.chunks.len() && self.has_room()).then_some(self.looked)
        }
        fn has_looked(&mut self) {
            self.looked += 1;
        }
        fn may_offer(&self, chunk: usize) -> bool {
            self.offered.iter().all(|offered| offered.0 != chunk)
        }
        fn has_room(&self) -> bool {
            self.room > 0
        }
        fn is_asked(&mut self) -> bool {
            false
        }
        fn read(&self, offset: usize, to: &mut [u8]) -> io::Result<()> {
            self.chunks[offset / CHUNK_BYTES].read(offset % CHUNK_BYTES, to)
        }
        fn offer(&mut self, chunk: usize, segment: &Rc<SegmentDraft>) {
            self.room -= 1;
            self.offered.push((chunk, Rc::clone(segment)));
        }
    }

    fn process(number: u64, domain: u64, chunks: &[StoredChunk]) -> DedupProcess {
        let chunks = chunks.to_vec();
        DedupProcess { number, domain, chunks, looked: 0, room: 9, offered: Vec::new() }
    }

    /// Runs deduplication steps until no step can run at once. Returns the result of the last step,
    /// and for each process the numbers of the chunks for which it got an offer.
    fn run(
        dedup: &mut DedupIndex<SegmentDraft>,
        all: &mut [DedupProcess],
    ) -> (SessionStep, Vec<Vec<usize>>) {
        loop {
            match dedup.step(all, Ok).unwrap() {
                SessionStep::More => {}
                looked => {
                    let of = |one: &DedupProcess| one.offered.iter().map(|offer| offer.0).collect();
                    return (looked, all.iter().map(of).collect());
                }
            }
        }
    }

    #[test]
    fn equal_chunks_are_offered_within_one_domain() {
        let mut dedup = DedupIndex::new();
        let mut all = [
            process(1, 5, &[ODD, SAME]),
            process(2, 5, &[SAME]),
            process(3, 6, &[SAME]),
            process(4, 6, &[ODD]),
        ];
        let (looked, offered) = run(&mut dedup, &mut all);
        assert_eq!(looked, SessionStep::Nothing);
        assert_eq!(offered, [vec![1], vec![0], vec![], vec![]]);
        assert_eq!(dedup.report(), (CHUNK_BYTES as u64, true));
        assert_eq!(dedup.report(), (CHUNK_BYTES as u64, false));
        assert_eq!(all[0].offered[0].1.written(), CHUNK_BYTES);
        all.iter_mut().for_each(|one| one.offered.clear());
        assert_eq!(dedup.report(), (0, true), "its last user is gone");
    }

    #[test]
    fn chunks_in_another_order_are_found() {
        const OTHER: StoredChunk = StoredChunk { seed: 9, other_from: CHUNK_BYTES };
        let mut dedup = DedupIndex::new();
        let mut both = [process(1, 5, &[SAME, OTHER]), process(2, 5, &[OTHER, SAME])];
        let (_, offered) = run(&mut dedup, &mut both);
        assert_eq!(offered, [vec![1, 0], vec![0, 1]]);
    }

    #[test]
    fn third_process_gets_segment_unless_it_differs() {
        let mut dedup = DedupIndex::new();
        let mut two = vec![process(1, 5, &[SAME]), process(2, 5, &[SAME])];
        run(&mut dedup, &mut two);
        two.extend([process(3, 5, &[SAME]), process(4, 5, &[ODD])]);
        let (_, offered) = run(&mut dedup, &mut two);
        assert_eq!(offered, [vec![0], vec![0], vec![0], vec![]]);
        assert_eq!(dedup.report().0, CHUNK_BYTES as u64);
    }

    #[test]
    fn different_chunk_does_not_block_equal_ones() {
        let mut dedup = DedupIndex::new();
        let alone = process(1, 5, &[ODD, ODD]);
        let mut all = [alone, process(2, 5, &[SAME]), process(3, 5, &[SAME])];
        let (_, offered) = run(&mut dedup, &mut all);
        assert_eq!(offered, [vec![], vec![0], vec![0]]);
    }

    #[test]
    fn owed_reply_is_awaited_unless_process_left() {
        let mut dedup = DedupIndex::new();
        let mut all = vec![process(1, 5, &[SAME]), process(2, 5, &[SAME])];
        // The first process is examined. From then on it may get no offer before it replies to
        // earlier offers.
        dedup.step(&mut all[..1], Ok).unwrap();
        all[0].room = 0;
        let (looked, offered) = run(&mut dedup, &mut all);
        assert_eq!((looked, offered), (SessionStep::Later, vec![vec![], vec![]]));
        assert_eq!(all[1].looked, 0, "it has its turn");
        all.remove(0);
        dedup.forget(1);
        assert_eq!(run(&mut dedup, &mut all).0, SessionStep::Nothing);
        assert!(all[0].offered.is_empty());
    }

    #[test]
    fn comparison_ends_when_its_process_leaves() {
        let mut dedup = DedupIndex::new();
        let mut all = vec![process(1, 5, &[SAME]), process(2, 5, &[SAME])];
        for _ in 0..4 {
            dedup.step(&mut all, Ok).unwrap();
        }
        assert!(dedup.job.is_some());
        dedup.forget(1);
        assert!(dedup.job.is_none());
        // Another process with that number has different content.
        all[0] = process(1, 5, &[ODD]);
        let (_, offered) = run(&mut dedup, &mut all);
        assert_eq!(offered, [Vec::<usize>::new(), vec![]]);
    }

    #[test]
    fn chunk_is_compared_again_after_peer_left() {
        let mut dedup = DedupIndex::new();
        let mut all = vec![process(1, 5, &[SAME]), process(2, 5, &[SAME])];
        for _ in 0..4 {
            dedup.step(&mut all, Ok).unwrap();
        }
        assert!(
            matches!(&dedup.job, Some(CompareJob { with: CompareTarget::Chunk(first, _), .. }) if first.process == 1)
        );
        dedup.forget(1);
        // Attach a process with the number of the detached process: the same process or another.
        all[0] = process(1, 5, &[SAME]);
        let (_, offered) = run(&mut dedup, &mut all);
        assert_eq!(offered, [vec![0], vec![0]]);
    }
}
