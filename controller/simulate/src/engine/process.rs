//! A simulated process, and its calls.
//!
//! ```text
//! quiet ──call──> busy (gate open) ──last call ends──> quiet
//!   └──call, gate closed──> waits, Wake ──Open──> busy
//! ```

use affinode_core::{CommandId, Input, Key, Millis, Request, history::PAUSE_MS, policy::Engine};
use affinode_proto::wire::{Phase, counters::CounterSnapshot, message::AgentMessage};

use super::{SimulatedNode, SimulationEvent, content::OffloadedContent, names::id, orders};
use crate::{
    SimulationError,
    baselines::CallForesight,
    memory::{OffloadLevel, ProcessMemory},
    summary::ContainerTotals,
    trace::TraceLoad,
};

/// Time after the end of a process at which the node is queried about the other processes of the
/// GPU. It is the interval at which the node updates its list of oversubscribed GPUs.
const NEIGHBOURS_MS: Millis = 10_000;

pub(super) struct SimulatedProcess<'a> {
    pub(super) load: &'a TraceLoad,
    pub(super) key: Key,
    /// Number of the process's GPU.
    pub(super) gpu: usize,
    pub(super) phase: Phase,
    pub(super) memory: ProcessMemory,
    /// The engine (method of moving GPU memory) in the process's policy.
    pub(super) engine: Engine,
    /// Level of the offload that the most recent restore has ended. It states which part of the
    /// process's memory was off the GPU. It is reset when the waiting calls continue.
    pub(super) restored_from: OffloadLevel,
    pub(super) phase_after_restore: Phase,
    /// Where the process's offloaded memory is.
    pub(super) content: OffloadedContent,
    /// `disk_after` of the process's policy, in milliseconds.
    pub(super) disk_after_ms: Millis,
    pub(super) busy_until: Option<Millis>,
    pub(super) next: usize,
    pub(super) waiting: Vec<u32>,
    pub(super) calls: u64,
    pub(super) lived: ContainerTotals,
    pub(super) due: Option<Millis>,
    /// Product of freed VRAM and time, summed over the process's offloads between its first and
    /// last call, in bytes times milliseconds. It is counted up to the time `freed_until`.
    pub(super) freed_byte_ms: u128,
    pub(super) freed_until: Millis,
    pub(super) used_ms: Millis,
    pub(super) went: Option<Millis>,
    pub(super) has_exited: bool,
    /// Number of the order that the process executes. It executes one order at a time.
    pub(super) order: u64,
    /// When the copy out in progress ends. `None`: there is none.
    pub(super) copy_ends: Option<Millis>,
    /// End of a copy out that was cancelled. The event planned for this time is ignored.
    pub(super) cancelled_end: Option<Millis>,
}

impl SimulatedProcess<'_> {
    pub(super) fn next_call(&self) -> Option<Millis> {
        self.load.arrivals_ms.get(self.next).map(|at| Millis::from(*at))
    }

    pub(super) fn first(&self) -> Millis {
        self.load.arrivals_ms.first().map_or(0, |at| Millis::from(*at))
    }

    pub(super) fn last(&self) -> Millis {
        self.load.arrivals_ms.last().map_or(0, |at| Millis::from(*at))
    }

    /// Adds the product of freed VRAM and time up to now. Must be called before the amount of freed
    /// VRAM changes.
    pub(super) fn count_freed(&mut self, now: Millis) {
        let (from, to) = (self.freed_until.max(self.first()), now.min(self.last()));
        let bytes = u128::from(self.memory.gone_bytes());
        self.freed_byte_ms += bytes * u128::from(to.saturating_sub(from));
        self.freed_until = now;
    }
}

/// Plans the next call of a process.
pub(super) fn arrival(world: &mut SimulatedNode<'_>, n: usize) {
    if let Some(at) = world.processes[n].next_call() {
        world.at(at.max(world.now), SimulationEvent::Arrival(n as u32));
    }
}

/// Returns the present counters of a process.
pub(super) fn page(world: &SimulatedNode<'_>, n: usize) -> CounterSnapshot {
    let p = &world.processes[n];
    let swap = p.memory.swap();
    let (disk_chunks, notes) = p.content.shown(world.now);
    CounterSnapshot {
        phase: p.phase,
        generation: 1,
        allocated_bytes: p.memory.copyable_bytes(),
        allocations: 1,
        swappable_bytes: swap.swappable_bytes,
        copied_out_bytes: swap.copied_out_bytes,
        calls: p.calls,
        inflight: u64::from(p.busy_until.is_some()),
        notes,
        disk_chunks,
        ..CounterSnapshot::default()
    }
}

/// Makes the next CUDA call of a process. The call waits if the gate is closed.
pub(super) fn called(world: &mut SimulatedNode<'_>, n: usize) -> Result<(), SimulationError> {
    let now = world.now;
    let p = &mut world.processes[n];
    if p.busy_until.is_some() || p.next_call() != Some(now) {
        return Ok(()); // The call belongs to the use in progress.
    }
    if p.phase == Phase::Open {
        let page = use_begins(world, n);
        return world.tell(page);
    }
    let starts_now = p.next == 0 && p.load.starts_late();
    p.next += 1;
    p.waiting.push(u32::try_from(now).unwrap_or(u32::MAX));
    let first = p.waiting.len() == 1;
    let copies = p.copy_ends.is_some();
    if starts_now {
        world.register(n);
        world.drain()?;
    }
    arrival(world, n);
    if first {
        world.wakes += 1;
        if world.host.has_disk() {
            // The counters show where the content is. The controller reads them twenty times a second.
            let page = Input::Page(id(n), page(world, n));
            world.tell(page)?;
        }
        let wake = AgentMessage::Wake { generation: 1, waiters: 1, hook: 1 };
        world.tell(Input::Message(id(n), wake))?;
        if copies {
            // The controller reads the counters again and again during a copy out.
            world.tell(Input::HostLevels(Vec::new()))?;
        }
    }
    Ok(())
}

/// Begins a period of use of a process, and returns the counters that show it. Calls without a
/// pause between them form one period.
pub(super) fn use_begins(world: &mut SimulatedNode<'_>, n: usize) -> Input {
    let now = world.now;
    let p = &mut world.processes[n];
    let service = Millis::from(p.load.service_ms);
    let mut until = if p.waiting.is_empty() { now } else { now + service };
    while let Some(at) = p.next_call().filter(|at| *at < until.max(now + 1) + PAUSE_MS) {
        until = until.max(at + service);
        p.next += 1;
    }
    let until = until.max(now + 1);
    p.busy_until = Some(until);
    p.calls += 1;
    p.used_ms += until - now;
    world.at(until, SimulationEvent::UseEnds(n as u32));
    Input::Page(id(n), page(world, n))
}

/// Ends a process after its last call: frees its VRAM and deletes its container.
fn exits(world: &mut SimulatedNode<'_>, n: usize) -> Result<(), SimulationError> {
    let now = world.now;
    let p = &mut world.processes[n];
    p.count_freed(now);
    p.has_exited = true;
    let bytes = p.memory.held_bytes();
    world.used_bytes[p.gpu] -= bytes;
    world.resident_bytes -= bytes;
    let withdrawn = Input::Withdrawn(p.key.clone());
    world.tell(withdrawn)?;
    let reading = orders::gpu_reading(world, n);
    world.tell(reading)?;
    query_neighbours(world, n);
    Ok(())
}

/// Plans queries of the node after process `n` has ended: one for each idle process on the same
/// GPU. If the GPU is no longer oversubscribed, the mode `auto` offloads idle containers even if no
/// container waits for VRAM.
fn query_neighbours(world: &mut SimulatedNode<'_>, n: usize) {
    let at = world.now + NEIGHBOURS_MS;
    for m in world.by_gpu[world.processes[n].gpu].clone() {
        let p = &mut world.processes[m];
        let is_idle = p.phase == Phase::Open && p.busy_until.is_none() && !p.has_exited;
        if is_idle && p.due.is_none() {
            p.due = Some(at);
            world.at(at, SimulationEvent::Due(m as u32));
        }
    }
}

/// Ends a period of use of a process, and plans its next call.
pub(super) fn use_ends(world: &mut SimulatedNode<'_>, n: usize) -> Result<(), SimulationError> {
    let now = world.now;
    let p = &mut world.processes[n];
    p.busy_until = None;
    p.calls += 1;
    let (next, key) = (p.next_call(), p.key.clone());
    if next.is_none() && p.load.exit_ms(world.trace_end_ms).is_some() {
        return exits(world, n);
    }
    if world.foresight != CallForesight::None {
        world.tell(Input::Foreseen(key.clone(), Some(next.unwrap_or(Millis::MAX))))?;
    }
    arrival(world, n);
    world.tell(Input::Page(id(n), page(world, n)))?;
    let p = &world.processes[n];
    let move_ms = world.costs.cycle_ms(p.engine, p.memory.copyable_bytes());
    let worth = world.wake_cost_ms + move_ms;
    if world.foresight == CallForesight::Pauses && next.is_none_or(|at| at > now + worth) {
        world.tell(Input::Command(CommandId(0), key, Request::Offload))?;
    }
    Ok(())
}
