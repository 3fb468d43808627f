//! Finds what processes have in common, and makes a segment of it.
//!
//! ```text
//! chunk ──print──> of a segment's? ──the same, byte by byte──> offered
//!                  of another's?   ──the same, byte by byte, written to a draft──> segment, offered to both
//!                  of nobody's, or not the same ──> remembered
//! ```
//!
//! A print is made of samples, with keys that nobody else knows: it says where it is worth to
//! compare, nothing more. Each is looked at only beside others of its domain, and sees a segment only
//! where it has all of it already.

use std::{
    collections::{HashMap, hash_map::RandomState},
    hash::{BuildHasher, Hasher},
    io,
    rc::{Rc, Weak},
};

use crate::{
    client::Client,
    memory::Memory,
    sys::{CHUNK_BYTES, Cuda, Draft, RegionError, Segment},
};

/// So much is compared at a time: some milliseconds, in which nobody is heard.
const PART_BYTES: usize = 8 << 20;
const SAMPLES: usize = 64;
const SAMPLE_BYTES: usize = 4096;
/// Segments are no container's to pay: of host memory at most one part in so many for each vault,
const MOST_OF_MEMORY: u64 = 4;
/// and where so much stays free, whoever has the rest.
const LEAST_FREE: u64 = 8;

/// Domain and print.
type Key = (u64, u64);

#[derive(Clone, Copy, Debug)]
struct Place {
    process: u64,
    chunk: usize,
}

/// A comparison in progress.
#[derive(Debug)]
struct Job {
    key: Key,
    place: Place,
    done: usize,
    with: With,
}

#[derive(Debug)]
enum With {
    Segment(Rc<Segment>),
    /// Another's chunk, and what is the same so far.
    Chunk(Place, Draft),
}

/// What there was to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Looked {
    /// Something.
    AtOne,
    /// Nothing before somebody answers.
    Waits,
    /// Nothing.
    AtNone,
}

/// What is known of all.
#[derive(Debug)]
pub struct Dedup {
    keys: RandomState,
    seen: HashMap<Key, Place>,
    segments: HashMap<Key, Weak<Segment>>,
    job: Option<Job>,
    /// What is compared; kept, because fresh memory takes longer than to compare it.
    parts: [Vec<u8>; 2],
    told_bytes: u64,
}

impl Dedup {
    /// Nothing.
    pub fn new() -> Dedup {
        Dedup {
            keys: RandomState::new(),
            seen: HashMap::new(),
            segments: HashMap::new(),
            job: None,
            parts: [Vec::new(), Vec::new()],
            told_bytes: 0,
        }
    }

    /// A process has left.
    pub fn forget(&mut self, process: u64) {
        self.seen.retain(|_, place| place.process != process);
        let of = |place: &Place| place.process == process;
        let is_first = |with: &With| matches!(with, With::Chunk(place, _) if of(place));
        self.job = self.job.take().filter(|job| !of(&job.place) && !is_first(&job.with));
    }

    /// What all segments come to.
    fn stored_bytes(&self) -> u64 {
        let live = self.segments.values().filter(|segment| segment.strong_count() > 0);
        (live.count() * CHUNK_BYTES) as u64
    }

    /// What all segments come to, and whether that was not reported.
    pub fn report(&mut self) -> (u64, bool) {
        let stored_bytes = self.stored_bytes();
        let told_bytes = std::mem::replace(&mut self.told_bytes, stored_bytes);
        (stored_bytes, told_bytes != stored_bytes)
    }

    /// Does a little.
    ///
    /// # Errors
    /// [`RegionError`]: the driver refused in a way that may not pass.
    pub fn step(&mut self, cuda: &Rc<Cuda>, clients: &mut [Client]) -> Result<Looked, RegionError> {
        let Some(mut job) = self.job.take() else {
            let looked = self.look(clients);
            if looked != Looked::AtOne {
                self.parts = [Vec::new(), Vec::new()];
            }
            return Ok(looked);
        };
        // Who has left, or cannot be read, has nothing in common.
        if !matches!(job.compare(clients, &mut self.parts), Ok(true)) {
            // The next one may have, with this one.
            self.seen.insert(job.key, job.place);
            return Ok(Looked::AtOne);
        }
        if job.done < CHUNK_BYTES {
            self.job = Some(job);
            return Ok(Looked::AtOne);
        }
        let (segment, first) = match job.with {
            With::Segment(segment) => (segment, None),
            With::Chunk(first, draft) => match draft.finish(cuda) {
                Ok(segment) => (Rc::new(segment), Some(first)),
                Err(RegionError::Cuda(error)) if !error.is_passing() => return Err(error.into()),
                Err(_) => return Ok(Looked::AtOne),
            },
        };
        self.segments.retain(|_, segment| segment.strong_count() > 0);
        self.segments.insert(job.key, Rc::downgrade(&segment));
        for place in [Some(job.place), first].into_iter().flatten() {
            if let Some(client) = find(clients, place) {
                client.offer(place.chunk, &segment);
            }
        }
        Ok(Looked::AtOne)
    }

    /// Looks at the next chunk that nobody has looked at.
    fn look(&mut self, clients: &mut [Client]) -> Looked {
        let mut waits = false;
        for client in clients.iter_mut() {
            waits |= client.is_asked();
        }
        let next = |client: &Client| client.next_chunk().map(|chunk| (client.process(), chunk));
        for (process, chunk) in clients.iter().filter_map(next).collect::<Vec<_>>() {
            let place = Place { process, chunk };
            match self.look_at(clients, place) {
                Some(with) => {
                    self.job = with;
                    return Looked::AtOne;
                }
                // Another one has to answer first.
                None => waits = true,
            }
        }
        if waits { Looked::Waits } else { Looked::AtNone }
    }

    /// Whom a chunk is to be compared with, if there is anybody. `None`: not yet.
    fn look_at(&mut self, clients: &mut [Client], place: Place) -> Option<Option<Job>> {
        let client = clients.iter_mut().find(|client| client.process() == place.process)?;
        let print = self.print(client, place.chunk).ok().filter(|_| client.may_offer(place.chunk));
        let Some(print) = print else {
            client.has_looked();
            return Some(None);
        };
        let key = (client.domain(), print);
        let of_another = self.seen.get(&key).copied().filter(|seen| seen.process != place.process);
        let other =
            of_another.and_then(|seen| find(clients, seen).map(|other| (seen, other.has_room())));
        let known = self.segments.get(&key).and_then(Weak::upgrade);
        let with = match (known, other) {
            (Some(segment), _) => Some(With::Segment(segment)),
            (None, Some((_, false))) => return None,
            (None, Some((seen, true))) if self.has_memory() => {
                Draft::begin().ok().map(|draft| With::Chunk(seen, draft))
            }
            _ => None,
        };
        if let Some(client) = find(clients, place) {
            client.has_looked();
        }
        if with.is_none() {
            self.seen.insert(key, place);
        }
        Some(with.map(|with| Job { key, place, done: 0, with }))
    }

    /// Whether there may be one more.
    fn has_memory(&self) -> bool {
        let (one, memory) = (CHUNK_BYTES as u64, Memory::now());
        self.stored_bytes() + one <= memory.total_bytes / MOST_OF_MEMORY
            && memory.free_bytes >= one + memory.total_bytes / LEAST_FREE
    }

    fn print(&self, client: &Client, chunk: usize) -> io::Result<u64> {
        let mut hasher = self.keys.build_hasher();
        let mut sample = [0; SAMPLE_BYTES];
        for n in 0..SAMPLES {
            client.read(chunk * CHUNK_BYTES + n * (CHUNK_BYTES / SAMPLES), &mut sample)?;
            hasher.write(&sample);
        }
        Ok(hasher.finish())
    }
}

impl Job {
    /// Whether the next part is the same, too.
    fn compare(&mut self, clients: &mut [Client], parts: &mut [Vec<u8>; 2]) -> io::Result<bool> {
        let part_bytes = PART_BYTES.min(CHUNK_BYTES - self.done);
        let [one, other] = parts;
        one.resize(part_bytes, 0);
        other.resize(part_bytes, 0);
        read(clients, self.place, self.done, one)?;
        match &mut self.with {
            With::Segment(segment) => segment.read(self.done, other)?,
            With::Chunk(place, _) => read(clients, *place, self.done, other)?,
        }
        if one != other {
            return Ok(false);
        }
        if let With::Chunk(_, draft) = &mut self.with {
            draft.write(one)?;
        }
        self.done += part_bytes;
        Ok(true)
    }
}

/// Whoever is there still, and may be offered something in that place.
fn find(clients: &mut [Client], place: Place) -> Option<&mut Client> {
    let mut all = clients.iter_mut();
    all.find(|client| client.process() == place.process && client.may_offer(place.chunk))
}

fn read(clients: &mut [Client], place: Place, offset: usize, to: &mut [u8]) -> io::Result<()> {
    let client = find(clients, place).ok_or(io::ErrorKind::NotFound)?;
    client.read(place.chunk * CHUNK_BYTES + offset, to)
}
