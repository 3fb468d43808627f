//! The shared counters: one sealed memfd of [`PAGE_BYTES`] per process. The agent creates it at the
//! process's first CUDA call and sends it with its Hello.
//!
//! ```text
//! 0      header: magic, version, phase, gate, waiters, hazards, generation, bytes
//! 192    call ring, while calls are sampled ([`super::call_ring`])
//! 4096   slot 0   shared: threads without a slot of their own (atomic adds)
//! 4160   slot 1   owned by one thread: plain adds, no lock
//!  …
//! 16320  slot 191
//! ```
//!
//! The counters belong to the process, not to a connection: counts begin before the first
//! registration and continue when the controller is replaced. The process writes all words but
//! [`header::TURN_BACK`] and [`header::VRAM_EPOCH`], which the controller writes with `pwrite`. The controller reads the file
//! with `pread` into a buffer and decodes the buffer ([`CounterSnapshot::decode`]). A container
//! that changes the file can therefore neither crash the controller nor change a value after the
//! controller has checked it.

use super::{Hazards, Phase, ProcessFlags, WIRE_VERSION};

/// Size of the counters' memfd in bytes. The controller refuses a file of another size.
pub const PAGE_BYTES: usize = 16 * 1024;
/// Magic number in the first word of the header. It shows that the file contains counters.
pub const PAGE_MAGIC: u64 = u64::from_le_bytes(*b"AFNPAGE\0");
/// Offset of the first counter slot, in bytes.
pub const SLOTS_OFFSET: usize = 4096;
/// Size of a counter slot in bytes. A slot is one cache line, so that no two threads write to the
/// same line.
pub const SLOT_BYTES: usize = 64;
/// Number of counter slots, including the slot that threads share.
pub const SLOT_COUNT: usize = (PAGE_BYTES - SLOTS_OFFSET) / SLOT_BYTES;

/// Highest value of [`header::CALL_COST_PS`] that the controller accepts, in picoseconds (1
/// microsecond). A container writes the value, so the controller reduces a higher value to this
/// maximum.
pub const MAX_CALL_COST_PS: u32 = 1_000_000;
/// Highest value of [`header::KEPT_BYTES`] and [`header::FILLING_BYTES`] that the controller
/// accepts, in bytes (1 pebibyte). A container writes the values, so the controller reduces a
/// higher value to this maximum. Sums over thousands of processes then do not overflow.
pub const MAX_KEPT_BYTES: u64 = 1 << 50;
/// Highest value of [`header::DISK_CHUNKS`] that the controller accepts: the number of chunks of the
/// largest staging buffer. A container writes the value, so the controller reduces a higher value to
/// this maximum.
pub const MAX_DISK_CHUNKS: u32 = 16_384;

/// Bit of the word [`header::TURN_BACK`]: the offload has been given up, for example because a CUDA
/// call waits. Only a library with [`super::Capabilities::GIVES_UP_COPIES`] knows the bit.
pub const NOT_WANTED: u64 = 1 << 63;

/// Offsets of the fields in the header of the counters, in bytes.
pub mod header {
    /// Offset of a u64: the magic number, [`super::PAGE_MAGIC`].
    pub const MAGIC: usize = 0;
    /// Offset of a u32: the protocol version, [`crate::wire::WIRE_VERSION`].
    pub const VERSION: usize = 8;
    /// Offset of a u32: number of counter slots.
    pub const SLOT_COUNT: usize = 12;
    /// Offset of a u32: the current [`crate::wire::Phase`] of the process.
    pub const PHASE: usize = 16;
    /// Offset of a u32: number of chunks of offloaded content that are in a disk file and not in host
    /// memory. A chunk has [`crate::wire::copier::CHUNK_BYTES`] bytes; the last one may have less.
    pub const DISK_CHUNKS: usize = 20;
    /// Offset of a u64: host memory retained for the next copy out, in bytes. 0 while memory is
    /// copied out.
    pub const KEPT_BYTES: usize = 24;
    /// Offset of a u64: a generation. If the copy out in progress belongs to this generation, the
    /// agent must cancel it at the next step. Only the controller writes this word. It does so when
    /// host memory outside the container's own limit runs short, or, with the additional bit
    /// [`super::NOT_WANTED`], when the offload has been given up. The word needs no reset, because a
    /// copy out of another generation ignores it.
    pub const TURN_BACK: usize = 32;
    /// Offset of a u64: host memory that the copy out in progress will still touch, in bytes.
    pub const FILLING_BYTES: usize = 40;
    /// Offset of a u64: number of the last recall of VRAM allowances. Only the controller writes
    /// this word. A new number makes all earlier allowances of the process invalid.
    pub const VRAM_EPOCH: usize = 48;
    /// Offset of a u64: total size of the allocations whose driver calls are in progress under a
    /// VRAM limit, in bytes. A thread adds its allocation before it reads [`VRAM_EPOCH`].
    pub const VRAM_PENDING: usize = 56;
    /// Offset of a u32: a [`super::Gate`] value. Waiting calls sleep on this word (futex). It has a
    /// cache line of its own.
    pub const GATE: usize = 64;
    /// Offset of a u32: number of CUDA calls that wait at the gate now.
    pub const WAITERS: usize = 128;
    /// Offset of a u32: bits of [`crate::wire::Hazards`] found so far.
    pub const HAZARDS: usize = 132;
    /// Offset of a u64: the generation, which grows by one each time the gate closes.
    pub const GENERATION: usize = 136;
    /// Offset of a u64: device memory allocated and not yet freed, in bytes, as counted by the
    /// hooks.
    pub const ALLOCATED_BYTES: usize = 144;
    /// Offset of a u64: number of device allocations not yet freed, as counted by the hooks.
    pub const ALLOCATIONS: usize = 152;
    /// Offset of a u64: GPU memory that the agent can copy, in bytes.
    pub const SWAPPABLE_BYTES: usize = 160;
    /// Offset of a u64: the part of the memory in [`SWAPPABLE_BYTES`] that is now copied out to
    /// host memory, in bytes.
    pub const COPIED_OUT_BYTES: usize = 168;
    /// Offset of a u32: the current bits of [`crate::wire::ProcessFlags`].
    pub const NOTES: usize = 176;
    /// Offset of a u32: time that the hook adds to a call, in picoseconds, measured once. 0 means
    /// unknown.
    pub const CALL_COST_PS: usize = 180;
    /// Offset of a u64: total time that calls waited at the gate, in microseconds.
    pub const HELD_US: usize = 184;
}

/// Offsets of the fields in a counter slot, in bytes from the slot's start.
pub mod slot {
    /// Offset of a u32: number of calls of this slot's threads that are now inside the driver.
    pub const INFLIGHT: usize = 0;
    /// Offset of a u32: number of the hook that was entered last, an index into the table of names.
    pub const LAST_HOOK: usize = 4;
    /// Offset of a u64: number of calls, without polls.
    pub const CALLS: usize = 8;
    /// Offset of a u64: number of poll calls (`cuEventQuery`, `cuStreamQuery`), which do not count
    /// as activity.
    pub const POLLS: usize = 16;
    /// Offset of a u32: thread id of the slot's owner in its pid namespace. 0 means that the slot
    /// is free.
    pub const OWNER_TID: usize = 24;
}

super::wire_enum! {
    /// Values of the gate word, which determines whether CUDA calls reach the driver.
    pub enum Gate {
        /// CUDA calls are passed to the driver.
        Open = 0,
        /// CUDA calls wait at the gate.
        Closed = 1,
        /// CUDA calls that may allocate VRAM wait. Other calls are passed to the driver.
        AllocationsHeld = 2,
        /// CUDA calls return an error, because the process's memory was damaged.
        Damaged = 3,
    }
}

/// Decoded counters of a process at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CounterSnapshot {
    /// Phase of the process, as the agent reports it.
    pub phase: Phase,
    /// Number of CUDA calls that wait at the gate now.
    pub waiters: u32,
    /// Facts about the process that make a checkpoint unsafe.
    pub hazards: Hazards,
    /// Number of times that the gate has closed.
    pub generation: u64,
    /// Device memory allocated and not yet freed, as the hooks counted it, in bytes. The container
    /// can write any value.
    pub allocated_bytes: u64,
    /// Number of device allocations not yet freed, as the hooks counted them. The container can
    /// write any value.
    pub allocations: u64,
    /// GPU memory that the agent can copy, in bytes. The container can write any value.
    pub swappable_bytes: u64,
    /// The part of `swappable_bytes` that is copied out, in bytes. The container can write any
    /// value.
    pub copied_out_bytes: u64,
    /// Facts that affect how the process can be offloaded and restored.
    pub notes: ProcessFlags,
    /// Time that the hook adds to a call, in picoseconds. 0 means unknown. The container can write
    /// any value. A value above [`MAX_CALL_COST_PS`] is reduced to it.
    pub call_cost_ps: u32,
    /// Total time that calls waited at the gate, in microseconds. The container can write any
    /// value.
    pub held_us: u64,
    /// Host memory retained for the next copy out, in bytes. The container can write any value. A
    /// value above [`MAX_KEPT_BYTES`] is reduced to it.
    pub kept_bytes: u64,
    /// Host memory that the copy out in progress will still touch, in bytes. The container can
    /// write any value. A value above [`MAX_KEPT_BYTES`] is reduced to it.
    pub filling_bytes: u64,
    /// Number of chunks of offloaded content that are in a disk file. The container can write any
    /// value. A value above [`MAX_DISK_CHUNKS`] is reduced to it.
    pub disk_chunks: u32,
    /// Number of CUDA calls of the process, without polls. It is the sum over the slots, which
    /// wraps at 2^64.
    pub calls: u64,
    /// Number of poll calls (`cuEventQuery`, `cuStreamQuery`). It is the sum over the slots, which
    /// wraps at 2^64.
    pub polls: u64,
    /// Number of CUDA calls inside the driver now.
    pub inflight: u64,
    /// Number of the hook that a call entered last. It is read from the first slot with a call in
    /// progress, or else from the first slot with any call. 0 means that there was no call.
    pub last_hook: u32,
}

/// Reason why a reading of the counters is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CounterError {
    /// The buffer is not [`PAGE_BYTES`] long. Contains its length.
    Size(usize),
    /// The first word is not [`PAGE_MAGIC`]. Contains the word.
    Magic(u64),
    /// The counters have a version other than [`WIRE_VERSION`]. Contains their version.
    Version(u32),
    /// A field has a value that the protocol does not define. Contains the field's name and the
    /// value.
    Value(&'static str, u64),
}

impl core::fmt::Display for CounterError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            CounterError::Size(n) => {
                write!(f, "the counters have {n} bytes, expected {PAGE_BYTES}")
            }
            CounterError::Magic(m) => {
                write!(f, "the counters begin with {m:#x}, not with the magic word")
            }
            CounterError::Version(v) => {
                write!(f, "the counters have version {v}, expected {WIRE_VERSION}")
            }
            CounterError::Value(field, v) => {
                write!(f, "field {field} of the counters has the invalid value {v}")
            }
        }
    }
}

impl core::error::Error for CounterError {}

pub(super) fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[offset..offset + 4]);
    u32::from_ne_bytes(word)
}

pub(super) fn u64_at(bytes: &[u8], offset: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[offset..offset + 8]);
    u64::from_ne_bytes(word)
}

impl CounterSnapshot {
    /// Decodes a copy of a process's counters. Values are checked, except in fields in which any
    /// value is harmless.
    ///
    /// # Errors
    /// [`CounterError`] names the invalid field.
    pub fn decode(bytes: &[u8]) -> Result<CounterSnapshot, CounterError> {
        if bytes.len() != PAGE_BYTES {
            return Err(CounterError::Size(bytes.len()));
        }
        let magic = u64_at(bytes, header::MAGIC);
        if magic != PAGE_MAGIC {
            return Err(CounterError::Magic(magic));
        }
        let version = u32_at(bytes, header::VERSION);
        if version != WIRE_VERSION {
            return Err(CounterError::Version(version));
        }
        let count = u32_at(bytes, header::SLOT_COUNT);
        if count as usize != SLOT_COUNT {
            return Err(CounterError::Value("slot count", u64::from(count)));
        }
        let phase = u32_at(bytes, header::PHASE);
        let phase = Phase::from_u32(phase).ok_or(CounterError::Value("phase", u64::from(phase)))?;
        let mut page = CounterSnapshot {
            phase,
            waiters: u32_at(bytes, header::WAITERS),
            hazards: Hazards(u32_at(bytes, header::HAZARDS)),
            generation: u64_at(bytes, header::GENERATION),
            allocated_bytes: u64_at(bytes, header::ALLOCATED_BYTES),
            allocations: u64_at(bytes, header::ALLOCATIONS),
            swappable_bytes: u64_at(bytes, header::SWAPPABLE_BYTES),
            copied_out_bytes: u64_at(bytes, header::COPIED_OUT_BYTES),
            notes: ProcessFlags(u32_at(bytes, header::NOTES)),
            call_cost_ps: u32_at(bytes, header::CALL_COST_PS).min(MAX_CALL_COST_PS),
            held_us: u64_at(bytes, header::HELD_US),
            kept_bytes: u64_at(bytes, header::KEPT_BYTES).min(MAX_KEPT_BYTES),
            filling_bytes: u64_at(bytes, header::FILLING_BYTES).min(MAX_KEPT_BYTES),
            disk_chunks: u32_at(bytes, header::DISK_CHUNKS).min(MAX_DISK_CHUNKS),
            ..CounterSnapshot::default()
        };
        for slot_bytes in bytes[SLOTS_OFFSET..].chunks_exact(SLOT_BYTES) {
            let inflight = u32_at(slot_bytes, slot::INFLIGHT);
            let hook = u32_at(slot_bytes, slot::LAST_HOOK);
            if hook != 0 && (page.last_hook == 0 || (inflight > 0 && page.inflight == 0)) {
                page.last_hook = hook;
            }
            page.inflight += u64::from(inflight);
            page.calls = page.calls.wrapping_add(u64_at(slot_bytes, slot::CALLS));
            page.polls = page.polls.wrapping_add(u64_at(slot_bytes, slot::POLLS));
        }
        Ok(page)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn page() -> Vec<u8> {
        let mut bytes = vec![0; PAGE_BYTES];
        bytes[header::MAGIC..][..8].copy_from_slice(&PAGE_MAGIC.to_ne_bytes());
        bytes[header::VERSION..][..4].copy_from_slice(&WIRE_VERSION.to_ne_bytes());
        bytes[header::SLOT_COUNT..][..4].copy_from_slice(&(SLOT_COUNT as u32).to_ne_bytes());
        bytes
    }

    #[test]
    fn sums_over_all_slots() {
        let mut bytes = page();
        for index in [0, 1, SLOT_COUNT - 1] {
            let base = SLOTS_OFFSET + index * SLOT_BYTES;
            bytes[base + slot::INFLIGHT] = 1;
            bytes[base + slot::CALLS] = 10;
            bytes[base + slot::POLLS] = 2;
        }
        let got = CounterSnapshot::decode(&bytes).unwrap();
        assert_eq!((got.inflight, got.calls, got.polls), (3, 30, 6));
    }

    #[test]
    fn claimed_call_cost_is_bounded() {
        let mut bytes = page();
        bytes[header::CALL_COST_PS..][..4].copy_from_slice(&u32::MAX.to_ne_bytes());
        bytes[header::HELD_US..][..8].copy_from_slice(&7_u64.to_ne_bytes());
        bytes[header::KEPT_BYTES..][..8].copy_from_slice(&u64::MAX.to_ne_bytes());
        bytes[header::FILLING_BYTES..][..8].copy_from_slice(&u64::MAX.to_ne_bytes());
        bytes[header::DISK_CHUNKS..][..4].copy_from_slice(&u32::MAX.to_ne_bytes());
        let got = CounterSnapshot::decode(&bytes).unwrap();
        assert_eq!((got.call_cost_ps, got.held_us), (MAX_CALL_COST_PS, 7));
        assert_eq!(got.disk_chunks, MAX_DISK_CHUNKS);
        assert_eq!((got.kept_bytes, got.filling_bytes), (MAX_KEPT_BYTES, MAX_KEPT_BYTES));
    }

    #[test]
    fn invalid_counters_are_named() {
        assert_eq!(CounterSnapshot::decode(&[0; 3]), Err(CounterError::Size(3)));
        assert_eq!(CounterSnapshot::decode(&vec![0; PAGE_BYTES]), Err(CounterError::Magic(0)));
        let mut bytes = page();
        bytes[header::VERSION] = 99;
        assert_eq!(CounterSnapshot::decode(&bytes), Err(CounterError::Version(99)));
        let mut bytes = page();
        bytes[header::PHASE] = 99;
        assert_eq!(CounterSnapshot::decode(&bytes), Err(CounterError::Value("phase", 99)));
    }

    proptest! {
        #[test]
        fn any_counter_content_is_decoded(noise in proptest::collection::vec(any::<u8>(), PAGE_BYTES - 20)) {
            let mut bytes = page();
            bytes[20..].copy_from_slice(&noise);
            prop_assert!(CounterSnapshot::decode(&bytes).is_ok());
        }
    }
}
