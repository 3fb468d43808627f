//! The trait [`Host`]: the operations that the order machine executes on its process.
//! `agent/host.rs` implements it for the real process.

use affinode_proto::wire::Phase;
use affinode_proto::wire::counters::Gate;
use affinode_proto::wire::message::CopyOptions;

use crate::swap::pending_work::GpuWork;

/// Set of calls for whose end the order machine waits. It continues only when none of them is
/// inside the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallAdmission {
    /// Calls of every class.
    All,
    /// Calls that may take device memory.
    Allocating,
}

/// A call of the driver's checkpoint interface, for the agent's own process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriverCall {
    /// Lock, waiting at most this many milliseconds for running work.
    Lock(u32),
    /// Move device memory to host memory.
    Checkpoint,
    /// Move the device memory back to the same device.
    Restore,
    /// Restore the device memory with two GPUs exchanged. The values are indices into the
    /// controller's list of GPUs.
    RestoreOn(u8, u8),
    /// Let the process use the device again after a lock.
    Unlock,
}

/// The operations that the order machine executes on its process.
pub trait Host {
    /// Sets the gate, at which CUDA calls wait. If the process is damaged, sets [`Gate::Damaged`]
    /// in place of an open gate.
    fn set_gate(&mut self, gate: Gate);
    /// Publishes the phase in the counters, which the controller reads.
    fn set_phase(&mut self, phase: Phase);
    /// Increments the generation, which is the number of times that the gate was closed.
    fn next_generation(&mut self);
    /// Executes a memory barrier on all threads. It makes the gate's value visible to the threads,
    /// and the counts of the threads visible to the agent. `false`: the barrier failed.
    fn fence(&mut self) -> bool;
    /// Sets whether the gate is sealed. A sealed gate also holds nested calls, which are made while
    /// another call of the same thread is in progress.
    fn set_sealed(&mut self, sealed: bool);
    /// Whether no call of this set is inside the driver.
    fn drained(&mut self, calls: CallAdmission) -> bool;
    /// Whether a caller waits at the gate.
    fn has_waiters(&mut self) -> bool;
    /// Sleeps for `us` microseconds.
    fn sleep_us(&mut self, us: u64);
    /// Monotonic time in microseconds.
    fn now_us(&mut self) -> u64;
    /// Whether the process can be moved. It can be moved if it has no hazard that prevents a move.
    fn is_eligible(&mut self) -> bool;
    /// Whether the driver must not checkpoint the process, because the process has managed or
    /// shared memory, or has loaded a tool or a video library. Call it only while the gate is
    /// closed: then no such memory or library can be added before the checkpoint.
    fn keeps_context(&mut self) -> bool;
    /// Records the places at which the threads sleep, before the driver locks the process.
    fn note_threads(&mut self);
    /// Whether the driver in this process has shut down, although the process still runs. The
    /// driver then returns DEINITIALIZED.
    fn has_driver_ended(&mut self) -> bool;
    /// Makes a call of the driver's checkpoint interface. `None`: the driver has no such function.
    fn call(&mut self, call: DriverCall) -> Option<u32>;
    /// The process state that the driver reports; `None`: it reports none.
    fn state(&mut self) -> Option<u32>;
    /// Waits, without the driver's checkpoint interface, until the GPU has ended its work in every
    /// context. Stops at `end_us`, or when a caller arrives at the gate.
    fn await_work(&mut self, end_us: u64) -> GpuWork;
    /// Copies swappable memory to host memory and frees the device memory. `vram_bytes` is the VRAM
    /// that the process uses on its device. If a checkpoint follows, a copier may copy the memory
    /// during the checkpoint. On failure, returns the driver's code and leaves the memory as
    /// before, except for memory that was freed early.
    fn copy_out(&mut self, how: CopyOptions, vram_bytes: u64) -> Result<(), u32>;
    /// Waits until the copier has copied the exported memory, if there is any. `false`: the copier
    /// has failed, and the content is still on the device.
    fn settle(&mut self) -> bool;
    /// Number of bytes that were exported to the copier but not copied. They are still on the
    /// device.
    fn exported_bytes(&mut self) -> u64;
    /// Number of bytes of device memory that were freed and are needed to copy all content in again.
    fn copied_out_bytes(&mut self) -> u64;
    /// Copies in all copied-out content. If VRAM is short, waits for it until this time, in
    /// microseconds. `None`: does not wait. On failure, returns the driver's code, and the content
    /// stays copied out.
    fn copy_in(&mut self, awaits_vram_until_us: Option<u64>) -> Result<(), u32>;
    /// Whether any content of the process is copied out.
    fn is_parked(&mut self) -> bool;
    /// Unregisters the staging buffer from the driver of this process, so that a copier can
    /// register the buffer in its own process. `vram_bytes` is the VRAM that the process uses on
    /// its device when it is resident.
    fn release_copied(&mut self, vram_bytes: u64);
    /// Tells the copier that the driver has checkpointed the process.
    fn announce_offloaded(&mut self);
    /// Tells the copier that the driver begins to restore the process.
    fn announce_restore(&mut self);
    /// Closes the connection to the copier, if there is one.
    fn leave_copier(&mut self);
    /// Whether the process has imported device memory of another process. The driver would
    /// checkpoint such a process, and then fail to restore it.
    fn holds_imported(&mut self) -> bool;
    /// Whether the process can be restored with two GPUs exchanged. The values are indices into the
    /// controller's list of GPUs.
    fn can_move(&mut self, from: u8, to: u8) -> bool;
    /// Whether the process has lost its context. The driver then still runs, but returns `code` for
    /// every call.
    fn is_broken(&mut self, code: u32) -> bool;
    /// Records that the content of memory is lost. When the gate opens, it then returns an error
    /// for every call.
    fn set_damaged(&mut self);
    /// Begins a restore without a controller. True: this many bytes of VRAM are proven free on the
    /// devices, and no other process that restores itself takes them before [`Host::end_return`].
    fn begin_return(&mut self, vram_bytes: u64) -> bool;
    /// Ends a restore without a controller, whether or not [`Host::begin_return`] succeeded.
    fn end_return(&mut self);
}
