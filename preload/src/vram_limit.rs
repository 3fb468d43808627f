//! The limit of the container's VRAM.
//!
//! ```text
//! caller                                            agent
//!   adds its bytes to the pending bytes
//!   allowance valid and large enough?  yes ──> call ──> subtracts its bytes
//!     no: subtracts its bytes, leaves the gate, ─────> AskVram
//!         sleeps                            <───────── VramAllowance
//!         begins again                      ─────────> VramTaken
//! ```
//!
//! The controller reads from NVML how much VRAM the container uses, and divides the rest of the
//! limit between the container's processes. Each process gets an allowance: a number of bytes that
//! it may still allocate on a GPU. The reading of NVML includes contexts and freed memory, so this
//! module counts neither.
//!
//! An allowance is valid while the counters have the epoch with which the allowance was given. To
//! recall an allowance, the controller writes a new epoch and then reads the pending bytes. A
//! caller adds its bytes to the pending bytes before it reads the epoch. If the caller still reads
//! the old epoch, the controller therefore sees the caller's bytes.
//!
//! The limit is cooperative: it does not stop a program that calls the driver directly. If no
//! controller replies within [`ANSWER_MS`], allocations are not limited until a controller replies
//! or accepts the process, because a missing controller must not make a program fail.

use core::ffi::CStr;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use affinode_proto::wire::counters::Gate;
use affinode_proto::wire::message::{AgentMessage, UNLIMITED_VRAM_BYTES};

use crate::counters::CounterPage;
use crate::oom_wait::AllocRequest;
use crate::{process, sys};

/// Maximum number of GPUs on which the VRAM of one process can be limited.
const GPUS: usize = 16;
/// Maximum time that an allocation waits for an allowance, in milliseconds.
const ANSWER_MS: u64 = 10_000;
/// Maximum time that a waiting caller sleeps, in milliseconds. The caller then checks again whether
/// a reply has arrived or the gate has closed.
const LOOK_AGAIN_MS: u64 = 100;
/// Maximum number of requests that one allocation makes while each reply states that enough VRAM is
/// free. One request may not suffice, because other threads can use up the allowance first. After
/// the last request, the allocation is admitted without an allowance.
const MAX_ASKS: u32 = 20;
/// Unit in which the driver takes VRAM, in bytes. The size of an allocation of at least one unit is
/// rounded up to whole units.
const PIECE_BYTES: u64 = 2 << 20;

/// The limit and the process's allowances. All zero in a forked child.
pub struct VramLimit {
    /// Limit of the container on each GPU, in bytes; 0: there is none.
    limit_bytes: AtomicU64,
    /// 1 after a request got no reply in time. It becomes 0 when a controller accepts the process
    /// or sends a reply.
    is_unanswered: AtomicU32,
    /// Number of replies that calls have used and that the agent has not yet reported to the
    /// controller.
    taken: AtomicU32,
    gpus: [GpuAllowance; GPUS],
}

/// The allowance of the process on one GPU.
struct GpuAllowance {
    /// The two halves of the GPU's UUID. 0: the entry is free.
    uuid: [AtomicU64; 2],
    /// Bytes that the process may still allocate under the allowance.
    left_bytes: AtomicU64,
    /// Epoch of the allowance, which is valid while the counters have the same epoch. 0: the
    /// allowance is not valid.
    epoch: AtomicU64,
    /// Bytes that the container could still allocate at the time of the last reply.
    free_bytes: AtomicU64,
    /// Size of the largest allocation that waits for a reply.
    wanted_bytes: AtomicU64,
    /// Number of requests so far. The reply to a request also answers all requests with lower
    /// numbers.
    asked: AtomicU32,
    /// Number of the last request that was sent on this connection.
    sent: AtomicU32,
    /// Number of the last request that has a reply. Callers that wait for a reply sleep on this
    /// word (futex).
    answered: AtomicU32,
}

/// Counts the requests for an allowance that one call has made so far.
#[derive(Default)]
pub struct LimitAttempts {
    asked: u32,
    /// Whether the last request got a reply.
    is_answered: bool,
}

impl LimitAttempts {
    /// Whether the call has made no request yet.
    pub fn is_first(&self) -> bool {
        self.asked == 0
    }
}

/// Whether a call may reach the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// The call may reach the driver. The value is the number of its bytes that are pending until
    /// [`VramLimit::end`]; 0: none.
    Admitted(u64),
    /// The allowance is too small. The caller must leave the gate, request another allowance with
    /// [`VramLimit::ask`], and begin again.
    Ask,
    /// The limit does not leave enough VRAM. The call must fail, unless memory of the process can
    /// be freed.
    Exceeded,
}

/// VRAM that an allocation of this size takes, in bytes. The driver puts several small allocations
/// into one piece ([`PIECE_BYTES`]), so a small allocation takes an equal share of a piece.
fn rounded(bytes: u64) -> u64 {
    match PIECE_BYTES.checked_div(bytes) {
        None => 0,
        Some(0) => bytes.checked_next_multiple_of(PIECE_BYTES).unwrap_or(bytes),
        // A piece has room for a whole number of them, and the rest of it stays unused.
        Some(in_a_piece) => PIECE_BYTES.checked_div(in_a_piece).unwrap_or(bytes),
    }
}

/// Whether the gate is closed, because the process is being offloaded or restored, or is offloaded.
fn is_moving(page: &CounterPage) -> bool {
    page.gate.load(Ordering::SeqCst) == Gate::Closed as u32
}

/// Parses a decimal number. `None`: the text is empty, has another character, or is too large.
fn decimal(text: &[u8]) -> Option<u64> {
    let add = |sum: u64, byte: &u8| {
        let digit = byte.checked_sub(b'0').filter(|digit| *digit < 10)?;
        sum.checked_mul(10)?.checked_add(digit.into())
    };
    text.iter().try_fold(0, add).filter(|_| !text.is_empty())
}

fn halves(uuid: &[u8; 16]) -> [u64; 2] {
    let whole = u128::from_le_bytes(*uuid);
    [whole as u64, (whole >> 64) as u64]
}

impl GpuAllowance {
    const fn new() -> GpuAllowance {
        GpuAllowance {
            uuid: [const { AtomicU64::new(0) }; 2],
            left_bytes: AtomicU64::new(0),
            epoch: AtomicU64::new(0),
            free_bytes: AtomicU64::new(0),
            wanted_bytes: AtomicU64::new(0),
            asked: AtomicU32::new(0),
            sent: AtomicU32::new(0),
            answered: AtomicU32::new(0),
        }
    }

    fn is_of(&self, halves: [u64; 2]) -> bool {
        self.uuid.each_ref().map(|half| half.load(Ordering::Acquire)) == halves
    }

    /// Takes bytes from the allowance, and adds them to the pending bytes. False: the allowance is
    /// invalid or too small, and nothing was taken.
    fn take(&self, page: &CounterPage, bytes: u64) -> bool {
        let order = Ordering::SeqCst;
        page.vram_pending.fetch_add(bytes, order);
        let epoch = self.epoch.load(order);
        let is_valid = epoch != 0 && page.vram_epoch.load(order) == epoch;
        let less = |left: u64| left.checked_sub(bytes);
        let took = is_valid && self.left_bytes.fetch_update(order, order, less).is_ok();
        if !took {
            page.vram_pending.fetch_sub(bytes, order);
        }
        took
    }

    fn has_answer(&self, ticket: u32) -> bool {
        self.answered.load(Ordering::Acquire).wrapping_sub(ticket).cast_signed() >= 0
    }
}

impl VramLimit {
    pub const fn new() -> VramLimit {
        VramLimit {
            limit_bytes: AtomicU64::new(0),
            is_unanswered: AtomicU32::new(0),
            taken: AtomicU32::new(0),
            gpus: [const { GpuAllowance::new() }; GPUS],
        }
    }

    /// The limit on each GPU, in bytes; `None`: the container has no limit.
    pub fn bytes(&self) -> Option<u64> {
        let limit_bytes = self.limit_bytes.load(Ordering::Acquire);
        (limit_bytes != 0).then_some(limit_bytes)
    }

    /// Stores the limit from the file that the shim wrote when the container was created. The limit
    /// thereby holds although no controller has accepted the process yet. Without a file, or with
    /// an invalid one, there is no limit until then.
    pub fn set_by_file(&self, file: &CStr) {
        let mut buffer = [0; 20];
        let text = sys::read_file(file, &mut buffer);
        if let Some(limit_bytes) = text.and_then(decimal) {
            self.set_bytes(limit_bytes);
        }
    }

    /// Stores the limit, in bytes, from the message (Welcome) with which a controller accepts the
    /// process. 0: there is no limit. Drops all allowances. The agent then repeats the requests that
    /// have no reply.
    pub fn set_bytes(&self, limit_bytes: u64) {
        self.limit_bytes.store(limit_bytes, Ordering::Release);
        self.is_unanswered.store(0, Ordering::Release);
        // The allowances of an earlier controller do not include what other processes got since.
        self.drop_allowances();
        for gpu in &self.gpus {
            gpu.sent.store(gpu.answered.load(Ordering::Relaxed), Ordering::Relaxed);
            if limit_bytes == 0 {
                sys::futex_wake_all(&gpu.answered);
            }
        }
    }

    /// The entry of a GPU. `None`: the process uses more than [`GPUS`] GPUs.
    fn gpu(&self, uuid: &[u8; 16]) -> Option<&GpuAllowance> {
        let halves = halves(uuid);
        if let Some(known) = self.gpus.iter().find(|gpu| gpu.is_of(halves)) {
            return Some(known);
        }
        // Another thread may claim a second entry for the same GPU now. Both are then used, and each
        // request makes the allowance of the other entry invalid.
        let [low, high] = halves;
        let free = |gpu: &&GpuAllowance| {
            let claimed = gpu.uuid[0].compare_exchange(0, low, Ordering::AcqRel, Ordering::Relaxed);
            claimed.is_ok()
        };
        let gpu = self.gpus.iter().find(free)?;
        gpu.uuid[1].store(high, Ordering::Release);
        Some(gpu)
    }

    /// Decides whether an allocation may reach the driver. `attempts` counts the requests that the
    /// same call has made.
    pub fn admit(
        &self,
        page: &CounterPage,
        want: &AllocRequest,
        attempts: &mut LimitAttempts,
    ) -> Admission {
        let bytes = rounded(want.bytes);
        let Some(gpu) = self.gpu(&want.uuid).filter(|_| self.bytes().is_some() && bytes > 0) else {
            return Admission::Admitted(0);
        };
        if gpu.take(page, bytes) {
            self.end_attempts(attempts);
            return Admission::Admitted(bytes);
        }
        if self.is_unanswered.load(Ordering::Acquire) == 1 {
            return Admission::Admitted(0);
        }
        let is_short = gpu.free_bytes.load(Ordering::Acquire) < bytes;
        match attempts.asked {
            0 => Admission::Ask,
            _ if is_short && attempts.is_answered => Admission::Exceeded,
            MAX_ASKS.. => {
                // The size was free each time. The call must not fail because others were faster.
                page.vram_pending.fetch_add(bytes, Ordering::SeqCst);
                self.end_attempts(attempts);
                Admission::Admitted(bytes)
            }
            _ => Admission::Ask,
        }
    }

    /// Requests an allowance from the controller and sleeps until the reply. The caller must be
    /// outside the gate and not counted as a call in progress, so that the process can be offloaded
    /// meanwhile. If `want.bytes` is 0, the request only updates the values of [`VramLimit::view`].
    ///
    /// Returns without a reply if the gate closes. The caller must then wait at the gate, because
    /// only callers at the gate cause a restore.
    pub fn ask(&self, want: &AllocRequest, attempts: &mut LimitAttempts) {
        let Some(gpu) = self.gpu(&want.uuid) else { return };
        (attempts.asked, attempts.is_answered) = (attempts.asked.saturating_add(1), false);
        gpu.wanted_bytes.fetch_max(rounded(want.bytes), Ordering::AcqRel);
        let ticket = gpu.asked.fetch_add(1, Ordering::AcqRel).wrapping_add(1);
        process::poke_agent();
        if self.is_unanswered.load(Ordering::Acquire) == 1 {
            return;
        }
        let end_us = sys::now_us() + ANSWER_MS * 1_000;
        while !gpu.has_answer(ticket) && self.bytes().is_some() {
            if process::page().is_some_and(is_moving) {
                return;
            }
            let left_us = end_us.saturating_sub(sys::now_us());
            if left_us == 0 {
                self.is_unanswered.store(1, Ordering::Release);
                return;
            }
            let seen = gpu.answered.load(Ordering::Acquire);
            if !gpu.has_answer(ticket) {
                sys::futex_wait(&gpu.answered, seen, (left_us / 1_000 + 1).min(LOOK_AGAIN_MS));
            }
        }
        attempts.is_answered = gpu.has_answer(ticket);
    }

    /// Informs the controller that a call has used the reply to its last request. Does nothing if
    /// the call has made no request.
    pub fn end_attempts(&self, attempts: &mut LimitAttempts) {
        if core::mem::take(&mut attempts.asked) > 0 {
            self.taken.fetch_add(1, Ordering::AcqRel);
            process::poke_agent();
        }
    }

    /// Ends a call that was admitted with pending bytes. `failed` is true if the call has allocated
    /// nothing.
    pub fn end(&self, page: &CounterPage, uuid: &[u8; 16], bytes: u64, failed: bool) {
        if failed && let Some(gpu) = self.gpu(uuid) {
            gpu.left_bytes.fetch_add(bytes, Ordering::SeqCst);
        }
        // The counters of a child that was forked in the call do not have the bytes.
        let less = |pending: u64| Some(pending.saturating_sub(bytes));
        let _ = page.vram_pending.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
    }

    /// Drops all allowances after a call that has taken an unknown amount of VRAM. The next
    /// allocation asks for a new one.
    pub fn drop_allowances(&self) {
        self.gpus.iter().for_each(|gpu| gpu.epoch.store(0, Ordering::SeqCst));
    }

    /// The limit on a GPU, and the amount that the container could still allocate there at the time
    /// of the last reply, both in bytes. `None`: there is no limit, or there was no reply.
    pub fn view(&self, uuid: &[u8; 16]) -> Option<(u64, u64)> {
        let known = self.gpu(uuid).filter(|gpu| gpu.answered.load(Ordering::Acquire) > 0)?;
        let free_bytes = known.free_bytes.load(Ordering::Acquire);
        let limit_bytes = self.bytes().filter(|_| free_bytes < UNLIMITED_VRAM_BYTES)?;
        Some((limit_bytes, free_bytes))
    }

    /// Same as [`VramLimit::view`], but asks the controller first. Must be called outside the gate.
    pub fn fresh_view(&self, uuid: &[u8; 16]) -> Option<(u64, u64)> {
        self.bytes()?;
        // While the process is being moved, its agent reads no messages.
        if !process::page().is_some_and(is_moving) {
            self.ask(&AllocRequest { bytes: 0, uuid: *uuid }, &mut LimitAttempts::default());
        }
        self.view(uuid)
    }

    /// Stores the controller's reply.
    pub fn answer(&self, ticket: u32, uuid: &[u8; 16], bytes: u64, free_bytes: u64, epoch: u64) {
        let halves = halves(uuid);
        self.is_unanswered.store(0, Ordering::Release);
        for gpu in self.gpus.iter().filter(|gpu| gpu.is_of(halves)) {
            let order = Ordering::SeqCst;
            // In this order, no caller takes bytes of the old allowance with the new epoch.
            gpu.left_bytes.store(0, order);
            gpu.epoch.store(epoch, order);
            gpu.free_bytes.store(free_bytes, order);
            gpu.left_bytes.store(bytes, order);
            gpu.wanted_bytes.store(0, order);
            if !gpu.has_answer(ticket) {
                gpu.answered.store(ticket, order);
            }
            sys::futex_wake_all(&gpu.answered);
        }
    }

    /// Returns the next request that the agent must send, and counts it as sent. `None`: no request
    /// is left to send.
    pub fn next_request(&self) -> Option<AgentMessage> {
        self.bytes()?;
        let gpu = self.gpus.iter().find(|gpu| {
            let asked = gpu.asked.load(Ordering::Acquire);
            !gpu.has_answer(asked) && gpu.sent.load(Ordering::Relaxed) != asked
        })?;
        let ticket = gpu.asked.load(Ordering::Acquire);
        gpu.sent.store(ticket, Ordering::Relaxed);
        let [low, high] = gpu.uuid.each_ref().map(|half| half.load(Ordering::Acquire));
        let uuid = (u128::from(high) << 64 | u128::from(low)).to_le_bytes();
        let bytes = gpu.wanted_bytes.load(Ordering::Acquire);
        Some(AgentMessage::AskVram { ticket, bytes, uuid })
    }

    /// Whether a reply was used since the last call of this function.
    pub fn was_taken(&self) -> bool {
        self.taken.swap(0, Ordering::AcqRel) > 0
    }
}

#[cfg(test)]
mod tests {
    use affinode_proto::wire::counters::PAGE_BYTES;

    use super::*;

    const WANT: AllocRequest = AllocRequest { bytes: 5 * PIECE_BYTES, uuid: [9; 16] };

    /// Returns zeroed counters for one test. Their memory is never freed.
    fn page() -> &'static CounterPage {
        let layout = std::alloc::Layout::from_size_align(PAGE_BYTES, 4096).unwrap();
        // SAFETY: zeroed memory of the size and alignment of the counters, all of atomics.
        unsafe { &*std::alloc::alloc_zeroed(layout).cast::<CounterPage>() }
    }

    fn limit() -> VramLimit {
        let limit = VramLimit::new();
        limit.set_bytes(1 << 30);
        limit
    }

    fn allow(limit: &VramLimit, page: &CounterPage, bytes: u64, epoch: u64) {
        limit.gpu(&WANT.uuid).unwrap();
        page.vram_epoch.store(epoch, Ordering::SeqCst);
        limit.answer(1, &WANT.uuid, bytes, bytes, epoch);
    }

    #[test]
    fn limit_of_the_file_is_a_decimal_number() {
        assert_eq!(decimal(b"21474836480"), Some(20 << 30));
        assert_eq!(decimal(b"18446744073709551615"), Some(u64::MAX));
        for invalid in [&b""[..], b"18446744073709551616", b"-1", b"20Gi", b"1\n"] {
            assert_eq!(decimal(invalid), None, "{invalid:?}");
        }
    }

    #[test]
    fn allowance_is_used_up_once() {
        let (limit, page) = (limit(), page());
        assert_eq!(limit.admit(page, &WANT, &mut LimitAttempts::default()), Admission::Ask);
        allow(&limit, page, 2 * WANT.bytes, 7);
        for _ in 0..2 {
            let admitted = limit.admit(page, &WANT, &mut LimitAttempts::default());
            assert_eq!(admitted, Admission::Admitted(WANT.bytes));
        }
        assert_eq!(page.vram_pending.load(Ordering::SeqCst), 2 * WANT.bytes);
        assert_eq!(limit.admit(page, &WANT, &mut LimitAttempts::default()), Admission::Ask);
        limit.end(page, &WANT.uuid, WANT.bytes, false);
        limit.end(page, &WANT.uuid, WANT.bytes, true);
        assert_eq!(page.vram_pending.load(Ordering::SeqCst), 0);
        let admitted = limit.admit(page, &WANT, &mut LimitAttempts::default());
        assert_eq!(admitted, Admission::Admitted(WANT.bytes), "the failed call has used nothing");
    }

    #[test]
    fn size_includes_what_the_driver_cannot_use() {
        let mib = 1 << 20;
        for (bytes, charged) in [
            (0, 0),
            (4096, 4096),
            (mib, mib),
            (mib + 1, 2 * mib),
            (700 << 10, mib),
            (2 * mib, 2 * mib),
            (3 * mib, 4 * mib),
            (u64::MAX, u64::MAX),
        ] {
            assert_eq!(rounded(bytes), charged, "{bytes}");
        }
    }

    #[test]
    fn recalled_allowance_admits_nothing() {
        let (limit, page) = (limit(), page());
        allow(&limit, page, 2 * WANT.bytes, 7);
        page.vram_epoch.store(8, Ordering::SeqCst);
        assert_eq!(limit.admit(page, &WANT, &mut LimitAttempts::default()), Admission::Ask);
        assert_eq!(page.vram_pending.load(Ordering::SeqCst), 0);
        page.vram_epoch.store(7, Ordering::SeqCst);
        limit.drop_allowances();
        assert_eq!(limit.admit(page, &WANT, &mut LimitAttempts::default()), Admission::Ask);
    }

    #[test]
    fn too_small_a_reply_ends_the_attempts() {
        let (limit, page) = (limit(), page());
        allow(&limit, page, WANT.bytes - 1, 7);
        let mut attempts = LimitAttempts { asked: 1, is_answered: false };
        assert_eq!(limit.admit(page, &WANT, &mut attempts), Admission::Ask, "it got no reply");
        attempts.is_answered = true;
        assert_eq!(limit.admit(page, &WANT, &mut attempts), Admission::Exceeded);
        // The size was free, but other threads took it.
        limit.answer(1, &WANT.uuid, 0, WANT.bytes, 7);
        assert_eq!(limit.admit(page, &WANT, &mut attempts), Admission::Ask);
        attempts.asked = MAX_ASKS;
        let admitted = limit.admit(page, &WANT, &mut attempts);
        assert_eq!(admitted, Admission::Admitted(WANT.bytes), "the size was free each time");
        attempts.asked = 1;
        limit.end_attempts(&mut attempts);
        assert!(limit.was_taken() && !limit.was_taken());
    }

    #[test]
    fn concurrent_callers_never_exceed_the_allowance() {
        let (limit, page) = (limit(), page());
        allow(&limit, page, 1_000 * WANT.bytes, 7);
        let admitted: u64 = std::thread::scope(|scope| {
            let work = || {
                (0..400)
                    .map(|_| match limit.admit(page, &WANT, &mut LimitAttempts::default()) {
                        Admission::Admitted(bytes) => bytes,
                        _ => 0,
                    })
                    .sum::<u64>()
            };
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(work)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!(admitted, 1_000 * WANT.bytes);
        assert_eq!(page.vram_pending.load(Ordering::SeqCst), admitted);
    }

    #[test]
    fn request_is_sent_once_per_connection() {
        let limit = limit();
        let gpu = limit.gpu(&WANT.uuid).unwrap();
        assert_eq!(limit.next_request(), None);
        gpu.asked.store(2, Ordering::SeqCst);
        gpu.wanted_bytes.store(5, Ordering::SeqCst);
        let request = Some(AgentMessage::AskVram { ticket: 2, bytes: 5, uuid: WANT.uuid });
        assert_eq!(limit.next_request(), request);
        assert_eq!(limit.next_request(), None);
        limit.set_bytes(1 << 30);
        assert_eq!(limit.next_request(), request, "the next controller gets it too");
        limit.answer(2, &WANT.uuid, 0, 0, 7);
        limit.set_bytes(1 << 30);
        assert_eq!(limit.next_request(), None);
    }
}
