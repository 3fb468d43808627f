//! Detects threads that block inside the driver while the process is offloaded, because their calls
//! bypassed the hooks.
//!
//! A call that reaches a driver library without a hook waits there until the process is resident.
//! The hooks do not see this call, so no hook makes the agent send a Wake (the request for a
//! restore). The call would wait without end. Therefore the agent samples the threads of its
//! process:
//!
//! ```text
//! before the driver's lock: record the place of each thread
//! while Checkpointed, every 0.9 s (pauses while no thread runs): look at each thread
//!   other place than at the last look ──> record the new place
//!   same place, thread has not run ─────> is this place inside the driver, and was the thread
//!                                         at another place before the lock?
//!                                         └─ yes: the thread counts as a waiting caller
//! Open again: look at the thread that counted as a waiting caller
//!   other place ──> its call bypassed the hooks: the process gets the hazard HIDDEN_WAY, and
//!                   later offloads keep the context on the GPU
//!   same place ───> it waits for something else, so this place is never counted again
//! ```
//!
//! A place is the system call, the stack pointer and the program counter of
//! `/proc/self/task/TID/syscall`. To decide whether a place is inside the driver, the agent finds
//! the first return address on the stack that is not in libc. The place is inside the driver if
//! this address is in the code of a driver library. The driver's own threads sleep at such places,
//! too. The agent recognises them by their names, or because they were at the same place before the
//! lock.

use core::ffi::CStr;

use crate::sys;

/// Maximum number of threads that the agent watches. In a process with more threads, the oldest are
/// watched.
const MAX_THREADS: usize = 256;
/// Maximum number of places at which a thread is known to wait for something other than the
/// restore. A place is a system call, a stack pointer and a program counter. A new place replaces
/// the oldest.
const MAX_EXCUSED: usize = 16;
/// Number of false alarms after which the process is no longer watched. A false alarm is a restore
/// after which the suspect thread does not continue.
const MAX_FALSE_ALARMS: u32 = 3;
const INTERVAL_US: u64 = 900_000;
/// Maximum time, in microseconds, that a thread which was blocked inside the driver takes to
/// continue after the restore. A thread that takes longer was waiting for something else.
const GOES_ON_WITHIN_US: u64 = 2_000_000;
/// Number of words of a thread's stack that are searched for the first return address outside libc.
const STACK_WORDS: usize = 128;

/// Place at which a thread sleeps in the kernel: its system call, stack pointer and program
/// counter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct ThreadLocation {
    call: u64,
    stack: usize,
    code: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct ThreadSample {
    tid: u32,
    place: ThreadLocation,
    /// Number of the thread's voluntary context switches, read at the last sample. It is read only
    /// if the sample before has found the thread at the same place. `None`: only one sample has
    /// found the thread at this place.
    switches: Option<u64>,
    /// Place of the thread before the driver locked the process. `None`: the thread did not exist,
    /// or it was running.
    before: Option<ThreadLocation>,
    /// True once it is decided whether the thread blocks inside the driver at this place.
    is_judged: bool,
}

/// Samples of the threads of this process, by which the agent finds threads that block inside the
/// driver.
pub struct BlockedThreadWatch {
    threads: [ThreadSample; MAX_THREADS],
    count: usize,
    excused: [(u32, ThreadLocation); MAX_EXCUSED],
    excused_count: usize,
    /// The suspect: the thread that seems to block inside the driver, so that the process is
    /// restored. Contains its id, its place, and the time in microseconds of the first check after
    /// the restore (`None` until this check).
    suspect: Option<(u32, ThreadLocation, Option<u64>)>,
    false_alarms: u32,
    due_us: u64,
    /// Sum of the context switches of all threads except the agent's thread at the last sample. The
    /// field `quiet_looks` counts the consecutive samples with this sum.
    switches: u64,
    quiet_looks: u32,
}

impl BlockedThreadWatch {
    pub const fn new() -> BlockedThreadWatch {
        const PLACE: ThreadLocation = ThreadLocation { call: 0, stack: 0, code: 0 };
        const NO_THREAD: ThreadSample =
            ThreadSample { tid: 0, place: PLACE, switches: None, before: None, is_judged: false };
        BlockedThreadWatch {
            threads: [NO_THREAD; MAX_THREADS],
            count: 0,
            excused: [(0, PLACE); MAX_EXCUSED],
            excused_count: 0,
            suspect: None,
            false_alarms: 0,
            due_us: 0,
            switches: 0,
            quiet_looks: 0,
        }
    }

    /// Whether a thread was found that blocks inside the driver until the process is restored.
    pub fn has_blocked(&self) -> bool {
        matches!(self.suspect, Some((_, _, None)))
    }

    /// Whether [`BlockedThreadWatch::settle`] must still check a thread that seemed to block inside
    /// the driver.
    pub fn is_settling(&self) -> bool {
        self.suspect.is_some()
    }

    /// Samples all threads before the driver locks the process, while the gate is closed.
    pub fn note(&mut self) {
        self.count = 0;
        (self.due_us, self.quiet_looks) = (0, 0);
        let own = sys::gettid();
        each_thread(|tid| {
            if let Some(entry) = self.threads.get_mut(self.count).filter(|_| tid != own)
                && let Some(place) = place_of(tid)
            {
                *entry =
                    ThreadSample { tid, place, before: Some(place), ..ThreadSample::default() };
                self.count += 1;
            }
        });
    }

    /// Samples all threads of a checkpointed process. True: a thread blocks inside the driver.
    pub fn look(&mut self, now_us: u64) -> bool {
        if self.has_blocked() {
            return true;
        }
        if now_us < self.due_us || self.false_alarms >= MAX_FALSE_ALARMS {
            return false;
        }
        self.due_us = now_us + INTERVAL_US;
        // A blocked thread is detected at the third sample after it has run.
        const LOOKS: u32 = 3;
        let switches = sys::switches_of_others();
        self.quiet_looks = if switches == self.switches { self.quiet_looks + 1 } else { 0 };
        self.switches = switches;
        if self.quiet_looks > LOOKS {
            return false;
        }
        let own = sys::gettid();
        each_thread(|tid| {
            if tid != own && !self.has_blocked() && self.is_blocked(tid) {
                let place = self.threads.iter().find(|known| known.tid == tid);
                self.suspect = place.map(|known| (tid, known.place, None));
            }
        });
        self.has_blocked()
    }

    /// Checks, once the process is resident, whether the suspect thread has continued. True: it
    /// has, so it was blocked inside the driver.
    pub fn settle(&mut self, now_us: u64) -> bool {
        let Some((tid, place, resident_us)) = self.suspect else { return false };
        if place_of(tid) != Some(place) {
            self.suspect = None;
            return true;
        }
        let resident_us = resident_us.unwrap_or(now_us);
        self.suspect = Some((tid, place, Some(resident_us)));
        if now_us.saturating_sub(resident_us) >= GOES_ON_WITHIN_US {
            self.excuse(tid, place);
        }
        false
    }

    /// Same as [`BlockedThreadWatch::settle`], but decides at once, because the next offload
    /// begins.
    pub fn settle_now(&mut self) -> bool {
        let Some((tid, place, _)) = self.suspect else { return false };
        let has_gone_on = place_of(tid) != Some(place);
        if has_gone_on {
            self.suspect = None;
        } else {
            self.excuse(tid, place);
        }
        has_gone_on
    }

    fn excuse(&mut self, tid: u32, place: ThreadLocation) {
        if let Some(entry) = self.excused.get_mut(self.excused_count % MAX_EXCUSED) {
            *entry = (tid, place);
        }
        self.excused_count += 1;
        self.false_alarms += 1;
        self.suspect = None;
    }

    fn is_blocked(&mut self, tid: u32) -> bool {
        let place = place_of(tid);
        let known = self.threads.iter().take(self.count).position(|known| known.tid == tid);
        let entry = match known {
            Some(index) => self.threads.get_mut(index),
            None => {
                let entry = self.threads.get_mut(self.count);
                self.count += usize::from(entry.is_some());
                entry
            }
        };
        let Some(entry) = entry else { return false };
        // A thread without a place is running.
        let before = if known.is_some() { entry.before } else { None };
        let Some(place) = place else {
            *entry = ThreadSample { tid, before, ..ThreadSample::default() };
            return false;
        };
        if known.is_none() || entry.place != place {
            *entry = ThreadSample { tid, place, before, ..ThreadSample::default() };
            return false;
        }
        if entry.is_judged || before == Some(place) {
            return false;
        }
        let switches = switches_of(tid);
        if entry.switches.is_none() || entry.switches != switches {
            entry.switches = switches;
            return false;
        }
        entry.is_judged = true;
        !self.excused.contains(&(tid, place)) && !is_drivers_own(tid) && is_inside_driver(place)
    }
}

/// A path below `/proc/self/task`, with a terminating zero.
struct ProcPath([u8; 48]);

impl ProcPath {
    fn of(tid: u32, file: &[u8]) -> ProcPath {
        const DIGITS: usize = 10;
        let mut digits = [b'0'; DIGITS];
        let mut rest = tid;
        for digit in digits.iter_mut().rev() {
            *digit = b'0' + (rest % 10) as u8;
            rest /= 10;
        }
        let leading = digits.iter().take_while(|digit| **digit == b'0').count();
        let parts: [&[u8]; 4] =
            [b"/proc/self/task/", digits.get(leading..).unwrap_or(&[]), b"/", file];
        let mut path = ProcPath([0; 48]);
        // The last byte stays zero, as the end of the string.
        let room = path.0.iter_mut().take(47);
        room.zip(parts.into_iter().flatten()).for_each(|(to, from)| *to = *from);
        path
    }

    fn read<'a>(&self, buffer: &'a mut [u8]) -> Option<&'a [u8]> {
        sys::read_file(CStr::from_bytes_until_nul(&self.0).ok()?, buffer)
    }
}

fn each_thread(mut visit: impl FnMut(u32)) {
    let _ = sys::folder::has(c"/proc/self/task", |name| {
        if let Some(tid) = number(name, 10) {
            visit(tid as u32);
        }
        false
    });
}

fn number(text: &[u8], base: u64) -> Option<u64> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(u64::from(byte - b'0')),
        b'a'..=b'f' if base == 16 => Some(u64::from(byte - b'a') + 10),
        _ => None,
    };
    let add = |sum: u64, byte: &u8| sum.checked_mul(base)?.checked_add(digit(*byte)?);
    if text.is_empty() { None } else { text.iter().try_fold(0, add) }
}

fn hexadecimal(text: &[u8]) -> Option<usize> {
    number(text.strip_prefix(b"0x").unwrap_or(text), 16).map(|value| value as usize)
}

/// Returns the place at which a thread sleeps. `None`: it runs, has ended or cannot be read.
fn place_of(tid: u32) -> Option<ThreadLocation> {
    let mut buffer = [0; 256];
    place_in(ProcPath::of(tid, b"syscall").read(&mut buffer)?)
}

/// Parses the content of `/proc/self/task/TID/syscall`: the call's number, six arguments, stack
/// pointer and program counter. `None`: the content has another form. For a thread that runs, it is
/// the word `running`.
fn place_in(text: &[u8]) -> Option<ThreadLocation> {
    let mut words = text.trim_ascii_end().split(|byte| *byte == b' ');
    let call = number(words.next()?, 10)?;
    let stack = hexadecimal(words.nth(6)?)?;
    Some(ThreadLocation { call, stack, code: hexadecimal(words.next()?)? })
}

/// Voluntary context switches of a thread.
fn switches_of(tid: u32) -> Option<u64> {
    let mut buffer = [0; 4096];
    let text = ProcPath::of(tid, b"status").read(&mut buffer)?;
    let mut lines = text.split(|byte| *byte == b'\n');
    let line = lines.find_map(|line| line.strip_prefix(b"voluntary_ctxt_switches:"))?;
    number(line.trim_ascii(), 10)
}

/// Whether a thread belongs to the driver itself, as its name shows.
fn is_drivers_own(tid: u32) -> bool {
    let mut buffer = [0; 32];
    ProcPath::of(tid, b"comm").read(&mut buffer).is_some_and(|name| name.starts_with(b"cuda"))
}

/// The owner of the code at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Code {
    Driver,
    Libc,
    Other,
}

impl Code {
    /// Determines the owner of code by the path of the mapped file.
    fn of(path: &[u8]) -> Code {
        // Each list is one string, because a table of references would cost every process a
        // relocation per name.
        const DRIVER: &[u8] = b"libcuda.so libnvidia- libcupti libnvcuvid libnvoptix \
            libcudadebugger libEGL_nvidia libGLX_nvidia";
        const LIBC: &[u8] = b"libc.so libc- libc.musl libpthread ld-";
        let file = path.rsplit(|byte| *byte == b'/').next().unwrap_or(path);
        let is = |prefixes: &[u8]| {
            let mut prefixes = prefixes.split(|byte| *byte == b' ');
            prefixes.any(|prefix| !prefix.is_empty() && file.starts_with(prefix))
        };
        match () {
            () if is(DRIVER) => Code::Driver,
            () if is(LIBC) || path == b"[vdso]" => Code::Libc,
            () => Code::Other,
        }
    }
}

/// The program counter of a thread, followed by the words on its stack. Each word is used as an
/// address, and stored with the owner of the code at that address. `None`: there is no code.
type Words = [(usize, Option<Code>); STACK_WORDS + 1];

/// Whether the system call in which a thread sleeps at this place was made by a driver library,
/// directly or through libc.
fn is_inside_driver(place: ThreadLocation) -> bool {
    const CHUNK: usize = 32;
    let mut words: Words = [(0, None); STACK_WORDS + 1];
    let mut chunk = [0; CHUNK];
    let stack = place.stack & !(size_of::<usize>() - 1);
    let [(first, _), rest @ ..] = &mut words;
    *first = place.code;
    for (index, group) in rest.chunks_mut(CHUNK).enumerate() {
        if !sys::read_own_memory(stack + index * size_of_val(&chunk), &mut chunk) {
            break;
        }
        group.iter_mut().zip(chunk).for_each(|((word, _), read)| *word = read);
    }
    if !attribute(&mut words) {
        return false;
    }
    let [(_, at), rest @ ..] = &words;
    match at {
        Some(Code::Driver) => return true,
        Some(Code::Libc) => {}
        _ => return false,
    }
    let callers = rest.iter().filter(|(word, code)| code.is_some() && follows_a_call(*word));
    let first = callers.map(|(_, code)| *code).find(|code| *code != Some(Code::Libc));
    first == Some(Some(Code::Driver))
}

/// Sets the owner of the code at each address. False: the memory map cannot be read.
fn attribute(words: &mut Words) -> bool {
    const BUFFER_BYTES: usize = 4096;
    let mut buffer = [0_u8; BUFFER_BYTES];
    let Some(file) = sys::open_to_read(c"/proc/self/maps") else { return false };
    let mut filled = 0;
    loop {
        let Some(room) = buffer.get_mut(filled..) else { return false };
        let Ok(bytes) = sys::task::read(file.number(), room) else { return false };
        filled += bytes;
        let Some(text) = buffer.get(..filled) else { return false };
        let mut used = 0;
        for line in text.split_inclusive(|byte| *byte == b'\n') {
            if !line.ends_with(b"\n") {
                break;
            }
            used += line.len();
            attribute_line(line, words);
        }
        if bytes == 0 {
            return true;
        }
        // A line that exceeds the buffer is dropped, because no driver library has such a long
        // path.
        let used = if used == 0 && filled == BUFFER_BYTES { filled } else { used };
        let mut line = [0_u8; BUFFER_BYTES];
        let rest = buffer.get(used..filled).unwrap_or(&[]);
        line.iter_mut().zip(rest).for_each(|(to, from)| *to = *from);
        filled = rest.len();
        buffer = line;
    }
}

/// Sets the owner of the addresses in one line of `/proc/self/maps`, which has the form `begin-end
/// rwxp offset device inode path`.
fn attribute_line(line: &[u8], words: &mut Words) {
    let mut fields = line.trim_ascii_end().split(|byte| *byte == b' ');
    let Some(range) = fields.next() else { return };
    if fields.next().is_none_or(|rights| rights.get(2) != Some(&b'x')) {
        return;
    }
    let mut ends = range.split(|byte| *byte == b'-').map(hexadecimal);
    let (Some(Some(begin)), Some(Some(end))) = (ends.next(), ends.next()) else { return };
    let path = fields.skip(3).find(|field| !field.is_empty()).unwrap_or(b"");
    for (_, code) in words.iter_mut().filter(|(word, _)| (begin..end).contains(word)) {
        *code = Some(Code::of(path));
    }
}

/// Whether a call instruction ends directly before this address, so that it may be a return
/// address.
fn follows_a_call(address: usize) -> bool {
    let mut before = [0_usize; 2];
    if !sys::read_own_memory(address.wrapping_sub(16), &mut before) {
        return false;
    }
    let [low, high] = before.map(usize::to_ne_bytes);
    let byte = |back: usize| {
        if back <= 8 { high.get(8 - back) } else { low.get(16 - back) }.copied().unwrap_or(0)
    };
    // Tests for `call rel32`, and for a call through a register or memory with its operands.
    byte(5) == 0xe8
        || [2, 3, 4, 6, 7].iter().any(|back| byte(*back) == 0xff && byte(*back - 1) & 0x38 == 0x10)
}

#[cfg(test)]
mod tests;
