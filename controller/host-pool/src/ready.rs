//! Memory files that are kept ready: files with pages that belong to no process yet. A process that
//! is attached gets such a file, and its copy out then waits for no page.
//!
//! ```text
//! KeepReady ──> created ──filled in steps──> ready ──Attach──> file of a process
//!                                 │ memory is short, or a smaller size is wanted
//!                                 └──> freed
//! ```
//!
//! One thread fills and frees the files. It fills none while processes request pages, because both
//! would share the memory's bandwidth.

use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use affinode_proto::wire::host_pool::MAX_READY;

use crate::{
    memory_file::{MemoryFile, Populated},
    room::Room,
};

/// Memory in bytes that the thread allocates before it checks again whether memory is short, or the
/// file was taken.
const STEP_BYTES: u64 = 32 << 20;

/// Interval at which the thread checks whether memory is short.
const POLL: Duration = Duration::from_millis(100);

/// Wanted sizes of the ready files, and the limits of their memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Size of each file in bytes. 0: no file.
    pub sizes: [u64; MAX_READY],
    /// Available memory of the node, in bytes, below which no pages are kept ready.
    pub min_available_bytes: u64,
    /// Maximum size of the host pool in bytes, including the ready files.
    pub max_bytes: u64,
}

/// The ready files. A thread that runs [`ReadyFiles::keep`] fills them.
#[derive(Debug, Default)]
pub struct ReadyFiles {
    state: Mutex<State>,
    /// Notified when the wanted sizes or the files change, or when the host pool stops.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    wanted: Wanted,
    files: Vec<ReadyFile>,
    has_stopped: bool,
}

/// A file with pages, which belongs to no process yet.
#[derive(Debug)]
struct ReadyFile {
    /// The thread has a second reference while it fills the file.
    memory: Arc<MemoryFile>,
    /// Size of the pages in bytes. They are at the start of the file.
    bytes: u64,
}

/// Next change of the ready files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Nothing changes now.
    Wait,
    /// The pages of a file beyond its first `bytes` bytes are freed. 0: the file is closed.
    Free { index: usize, bytes: u64 },
    /// A file gets `bytes` more bytes of pages.
    Fill { index: usize, bytes: u64 },
    /// A file without pages is created.
    Create,
}

/// Decides the next change. `held`: sizes of the files in bytes, in descending order.
fn next_step(held: &[u64], wanted: &Wanted, room: Room) -> Step {
    let mut sizes = wanted.sizes;
    sizes.sort_unstable_by(|a, b| b.cmp(a));
    let size = |index: usize| sizes.get(index).copied().unwrap_or(0);
    let is_short =
        room.available_bytes < wanted.min_available_bytes || room.used_bytes > wanted.max_bytes;
    for (index, bytes) in held.iter().enumerate() {
        let kept_bytes = if is_short { 0 } else { size(index) };
        if *bytes > kept_bytes || size(index) == 0 {
            return Step::Free { index, bytes: kept_bytes };
        }
    }
    // A distance from the limit, so that pages are not freed again at once.
    let min_bytes = wanted.min_available_bytes.saturating_add(wanted.min_available_bytes / 8);
    let may_fill = room.available_bytes >= min_bytes.saturating_add(STEP_BYTES)
        && room.used_bytes.saturating_add(STEP_BYTES) <= wanted.max_bytes;
    if !may_fill {
        return Step::Wait;
    }
    let missing = |(index, bytes): (usize, &u64)| {
        let bytes = size(index).saturating_sub(*bytes).min(STEP_BYTES);
        (bytes > 0).then_some(Step::Fill { index, bytes })
    };
    let fill = held.iter().enumerate().find_map(missing);
    fill.unwrap_or(if size(held.len()) > 0 { Step::Create } else { Step::Wait })
}

impl ReadyFiles {
    /// Sets the wanted sizes.
    pub fn want(&self, wanted: Wanted) {
        self.lock().wanted = wanted;
        self.changed.notify_all();
    }

    /// Takes a file for a process with a content of `bytes` bytes: the smallest file with that many
    /// bytes of pages, otherwise the largest file. Pages beyond `bytes` are freed. `None`: no file
    /// has pages, or the process needs none.
    pub fn take(&self, bytes: u64) -> Option<Arc<MemoryFile>> {
        let mut state = self.lock();
        let file = loop {
            let index = state.best(bytes).filter(|_| bytes > 0)?;
            let is_being_filled =
                state.files.get(index).is_some_and(|file| Arc::strong_count(&file.memory) > 1);
            if !is_being_filled {
                break state.files.remove(index);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        };
        drop(state);
        self.changed.notify_all();
        if file.bytes > bytes {
            // An error means that the process gets more pages than it needs.
            let _ = file.memory.keep_first(bytes);
        }
        Some(file.memory)
    }

    /// Frees ready files until `bytes` bytes of other pages can be allocated.
    pub fn make_room(&self, bytes: u64, room: impl Fn() -> Option<Room>) {
        loop {
            let mut state = self.lock();
            let wanted = state.wanted;
            if state.files.iter().all(|file| file.bytes == 0) {
                return;
            }
            let suffices = |room: Room| {
                room.available_bytes >= bytes.saturating_add(wanted.min_available_bytes)
                    && room.used_bytes.saturating_add(bytes) <= wanted.max_bytes
            };
            if room().is_none_or(suffices) {
                return;
            }
            // The largest file is the first. Closing it frees its pages.
            let file = state.files.remove(0);
            drop(state);
            drop(file);
        }
    }

    /// Memory of the pages of all ready files, in bytes.
    pub fn bytes(&self) -> u64 {
        self.lock().files.iter().map(|file| file.bytes).sum()
    }

    /// Ends [`ReadyFiles::keep`], and closes all files.
    pub fn stop(&self) {
        let mut state = self.lock();
        state.has_stopped = true;
        let files = std::mem::take(&mut state.files);
        drop(state);
        drop(files);
        self.changed.notify_all();
    }

    /// Fills and frees the files until [`ReadyFiles::stop`] is called. `is_busy`: whether processes
    /// request pages. `report` gets the memory of the ready files in bytes after each change, and
    /// returns whether the report was delivered.
    pub fn keep(
        &self,
        is_busy: impl Fn() -> bool,
        room: impl Fn() -> Option<Room>,
        report: impl Fn(u64) -> bool,
    ) {
        let mut reported_bytes = Some(0);
        loop {
            let bytes = self.bytes();
            if reported_bytes != Some(bytes) {
                reported_bytes = report(bytes).then_some(bytes);
            }
            let state = self.lock();
            if state.has_stopped {
                return;
            }
            let held: Vec<u64> = state.files.iter().map(|file| file.bytes).collect();
            let step = room().map_or(Step::Wait, |room| next_step(&held, &state.wanted, room));
            match step {
                Step::Fill { .. } | Step::Create if is_busy() => self.wait(state),
                Step::Wait => self.wait(state),
                Step::Free { index, bytes } => self.free(state, index, bytes),
                Step::Fill { index, bytes } => self.fill(state, index, bytes),
                Step::Create => self.create(state),
            }
        }
    }

    /// Waits for a change. While files exist or are wanted, waits at most [`POLL`].
    fn wait(&self, state: MutexGuard<'_, State>) {
        if state.files.is_empty() && state.wanted.sizes.iter().all(|bytes| *bytes == 0) {
            drop(self.changed.wait(state));
        } else {
            drop(self.changed.wait_timeout(state, POLL));
        }
    }

    /// Frees pages of a file. The file is in no list meanwhile, so no process can get it.
    fn free(&self, mut state: MutexGuard<'_, State>, index: usize, bytes: u64) {
        let file = state.files.remove(index);
        drop(state);
        if bytes > 0 && file.memory.keep_first(bytes).is_ok() {
            self.put(ReadyFile { bytes, ..file });
        }
    }

    /// Allocates further pages of a file. If that fails, the file is closed.
    fn fill(&self, state: MutexGuard<'_, State>, index: usize, bytes: u64) {
        let Some(file) = state.files.get(index) else { return };
        let (memory, start) = (Arc::clone(&file.memory), file.bytes);
        drop(state);
        let is_filled =
            memory.allow(start + bytes).is_ok() && memory.populate(start, bytes) == Populated::Done;
        let mut state = self.lock();
        let found = state.files.iter().position(|file| Arc::ptr_eq(&file.memory, &memory));
        let file = found.map(|index| state.files.remove(index));
        drop(memory);
        if let Some(file) = file.filter(|_| is_filled && !state.has_stopped) {
            state.add(ReadyFile { bytes: start + bytes, ..file });
        } else if !is_filled {
            // Without a pause, a failure that lasts would be repeated without end.
            let (state, _) =
                self.changed.wait_timeout(state, POLL).unwrap_or_else(PoisonError::into_inner);
            drop(state);
        }
        self.changed.notify_all();
    }

    fn create(&self, state: MutexGuard<'_, State>) {
        drop(state);
        match MemoryFile::create() {
            Ok(memory) => self.put(ReadyFile { memory: Arc::new(memory), bytes: 0 }),
            Err(error) => {
                let error: &dyn std::error::Error = &error;
                tracing::warn!(error, "cannot keep host memory ready");
                self.wait(self.lock());
            }
        }
    }

    fn put(&self, file: ReadyFile) {
        let mut state = self.lock();
        if !state.has_stopped {
            state.add(file);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Adds a file. The files are in descending order of their size.
    fn add(&mut self, file: ReadyFile) {
        let index = self.files.partition_point(|other| other.bytes >= file.bytes);
        self.files.insert(index, file);
    }

    fn best(&self, bytes: u64) -> Option<usize> {
        let suffices = self.files.iter().rposition(|file| file.bytes >= bytes);
        suffices.or_else(|| self.files.first().filter(|file| file.bytes > 0).map(|_| 0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn wanted(sizes: &[u64]) -> Wanted {
        let mut all = [0; MAX_READY];
        all.iter_mut().zip(sizes).for_each(|(to, bytes)| *to = *bytes);
        Wanted { sizes: all, min_available_bytes: 8 * GIB, max_bytes: 40 * GIB }
    }

    fn step(held: &[u64], sizes: &[u64], available_bytes: u64) -> Step {
        let used_bytes = held.iter().sum();
        next_step(held, &wanted(sizes), Room { available_bytes, used_bytes })
    }

    #[test]
    fn files_are_created_and_filled_in_steps() {
        assert_eq!(step(&[], &[GIB], 100 * GIB), Step::Create);
        let fill = Step::Fill { index: 0, bytes: STEP_BYTES };
        assert_eq!(step(&[0], &[GIB], 100 * GIB), fill);
        let rest = Step::Fill { index: 0, bytes: 1 << 20 };
        assert_eq!(step(&[GIB - (1 << 20)], &[GIB], 100 * GIB), rest);
        assert_eq!(step(&[GIB], &[GIB], 100 * GIB), Step::Wait);
        assert_eq!(step(&[GIB], &[GIB, 2 * GIB], 100 * GIB), fill, "it becomes the larger one");
        assert_eq!(step(&[2 * GIB], &[GIB, 2 * GIB], 100 * GIB), Step::Create);
    }

    #[test]
    fn unwanted_pages_are_freed() {
        assert_eq!(step(&[2 * GIB], &[GIB], 100 * GIB), Step::Free { index: 0, bytes: GIB });
        assert_eq!(step(&[2 * GIB], &[], 100 * GIB), Step::Free { index: 0, bytes: 0 });
        assert_eq!(step(&[0], &[], 100 * GIB), Step::Free { index: 0, bytes: 0 });
    }

    #[test]
    fn no_page_is_kept_while_memory_is_short() {
        let short = 8 * GIB - 1;
        assert_eq!(step(&[GIB], &[GIB], short), Step::Free { index: 0, bytes: 0 });
        assert_eq!(step(&[0], &[GIB], short), Step::Wait);
        assert_eq!(step(&[GIB], &[GIB], 8 * GIB), Step::Wait);
        assert_eq!(step(&[0], &[GIB], 8 * GIB), Step::Wait, "a distance from the limit is kept");
        let full = Room { available_bytes: 100 * GIB, used_bytes: 40 * GIB };
        assert_eq!(next_step(&[0], &wanted(&[GIB]), full), Step::Wait);
        let beyond = Room { used_bytes: 41 * GIB, ..full };
        let free = Step::Free { index: 0, bytes: 0 };
        assert_eq!(next_step(&[GIB], &wanted(&[GIB]), beyond), free);
    }

    /// The steps must come to an end in the wanted state, from any state.
    #[test]
    fn steps_end_in_the_wanted_sizes() {
        let sizes = [0, 3 * STEP_BYTES, 5 * STEP_BYTES + 1, 9 * STEP_BYTES];
        for from in sizes {
            for to in sizes {
                let mut held = vec![from, from / 2];
                let mut steps = 0;
                loop {
                    held.sort_unstable_by(|a, b| b.cmp(a));
                    match step(&held, &[to, 2 * to], 100 * GIB) {
                        Step::Wait => break,
                        Step::Create => held.push(0),
                        Step::Free { index, bytes: 0 } => drop(held.remove(index)),
                        Step::Free { index, bytes } => held[index] = bytes,
                        Step::Fill { index, bytes } => held[index] += bytes,
                    }
                    steps += 1;
                    assert!(steps < 100, "{from} {to} {held:?}");
                }
                let expected = if to == 0 { vec![] } else { vec![2 * to, to] };
                assert_eq!(held, expected, "{from} {to}");
            }
        }
    }
}
