//! The content of an offloaded process: in its own memory, in the host pool, or on disk.
//!
//! ```text
//! copy out ──> in memory ──StoreOnDisk──> being stored ──Stored──> on disk
//!                  └───────restore────────────┴───────────────────────┘
//! ```

use affinode_core::{Input, Millis};
use affinode_proto::wire::{ProcessFlags, copier::CHUNK_BYTES, message::Action};

use super::{SimulatedNode, SimulationEvent, names::id, process};
use crate::{SimulationError, host::ContentPlace};

/// Time after which the node is queried again about a process whose content was not moved to disk.
const RETRY_MS: Millis = 600_000;

/// Time after the end of the trace in which content still moves to disk while a container waits for
/// VRAM. It needs the host memory of that content.
const MAX_WAIT_MS: Millis = 86_400_000;

/// Where the offloaded content of a process is. An empty value means that no content is offloaded.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct OffloadedContent {
    /// Content in the process's own memory, in bytes.
    own_bytes: u64,
    /// Content that was copied to the host pool, in bytes. It is on disk if `disk` is `Stored`.
    pooled_bytes: u64,
    disk: DiskContent,
    /// When the node is queried whether the content moves to disk. `None`: no query is planned.
    pub(super) disk_due: Option<Millis>,
}

/// The part of the content in the host pool that is on disk.
#[derive(Clone, Copy, Debug, Default)]
enum DiskContent {
    #[default]
    None,
    /// The content is being written.
    Storing { since: Millis, until: Millis },
    /// All of it is on disk.
    Stored,
    /// It did not fit on the disk.
    Failed,
}

impl OffloadedContent {
    /// Returns the number of chunks on disk, and the flags that the process's counters show.
    pub(super) fn shown(&self, now: Millis) -> (u32, ProcessFlags) {
        let chunks = self.stored_chunks(now) as u32;
        let place = if self.pooled_bytes > 0 { ProcessFlags::HOST_POOL.0 } else { 0 };
        let disk = match self.disk {
            DiskContent::None | DiskContent::Stored => 0,
            DiskContent::Storing { .. } => ProcessFlags::STORING_ON_DISK.0,
            DiskContent::Failed => ProcessFlags::DISK_FAILED.0,
        };
        (chunks, ProcessFlags(place | disk))
    }

    fn stored_chunks(&self, now: Millis) -> u64 {
        let chunks = self.pooled_bytes.div_ceil(CHUNK_BYTES);
        match self.disk {
            DiskContent::None | DiskContent::Failed => 0,
            DiskContent::Storing { since, until } => {
                chunks * now.saturating_sub(since) / until.saturating_sub(since).max(1)
            }
            DiskContent::Stored => chunks,
        }
    }

    /// Space that the content takes on disk, in bytes.
    fn disk_bytes(&self) -> u64 {
        match self.disk {
            DiskContent::None | DiskContent::Failed => 0,
            DiskContent::Storing { .. } | DiskContent::Stored => {
                self.pooled_bytes.next_multiple_of(CHUNK_BYTES)
            }
        }
    }

    /// Whether content could move to disk.
    fn lacks_disk(&self) -> bool {
        self.pooled_bytes > 0 && matches!(self.disk, DiskContent::None | DiskContent::Failed)
    }
}

/// Adds content that an order has moved to host memory.
pub(super) fn add(world: &mut SimulatedNode<'_>, n: usize, action: Action, bytes: u64) {
    let content = &mut world.processes[n].content;
    let place = match action {
        Action::CopyOut { how, .. } if how.host_pool => {
            content.pooled_bytes += bytes;
            ContentPlace::HostPool
        }
        _ => {
            content.own_bytes += bytes;
            ContentPlace::Own
        }
    };
    world.host.take_memory(world.now, place, bytes);
}

/// Removes all content, because the process is being restored. Returns the time that the disk needs
/// for the part that is on disk, in milliseconds.
pub(super) fn remove(world: &mut SimulatedNode<'_>, n: usize) -> Millis {
    let now = world.now;
    let content = std::mem::take(&mut world.processes[n].content);
    let read_bytes = (content.stored_chunks(now) * CHUNK_BYTES).min(content.pooled_bytes);
    world.host.free_memory(now, ContentPlace::Own, content.own_bytes);
    if matches!(content.disk, DiskContent::Storing { .. }) {
        // The node ends the step at once, as on a machine, where it is queried twice a second.
        world.inputs.push_back(Input::Tick);
    }
    // While content is being stored, all of it counts as memory.
    if !matches!(content.disk, DiskContent::Stored) {
        world.host.free_memory(now, ContentPlace::HostPool, content.pooled_bytes);
    }
    world.host.free_disk(content.disk_bytes());
    world.figures.restores_from_disk += u64::from(read_bytes > 0);
    world.costs.disk_read_ms(read_bytes)
}

/// Plans the query of the node about moving the content of a process to disk.
pub(super) fn plan_disk(world: &mut SimulatedNode<'_>, n: usize, after_ms: Millis) {
    let at = world.now + after_ms.max(1);
    let waits = world.node.waiting() > 0;
    let end_ms = world.trace_end_ms + if waits { MAX_WAIT_MS } else { 0 };
    let p = &mut world.processes[n];
    let has_time = after_ms > 0 && at < end_ms;
    if world.host.has_disk() && has_time && p.content.lacks_disk() {
        p.content.disk_due = Some(at);
        world.at(at, SimulationEvent::DiskDue(n as u32));
    }
}

/// Queries the node about moving content to disk, and plans the next query if it does not move.
pub(super) fn disk_is_due(world: &mut SimulatedNode<'_>, n: usize) -> Result<(), SimulationError> {
    if world.processes[n].content.disk_due.take_if(|at| *at == world.now).is_some() {
        let page = Input::Page(id(n), process::page(world, n));
        world.tell(page)?;
        world.tell(Input::Tick)?;
        world.drain()?;
        plan_disk(world, n, RETRY_MS);
    }
    Ok(())
}

/// Begins to move the content of a process to disk.
pub(super) fn store(world: &mut SimulatedNode<'_>, n: usize, bytes: u64) {
    let (since, has_space) = (world.now, world.host.take_disk(bytes));
    let until = since + world.costs.disk_write_ms(bytes);
    world.processes[n].content.disk = match has_space {
        true => DiskContent::Storing { since, until },
        false => DiskContent::Failed,
    };
    if has_space {
        world.at(until, SimulationEvent::Stored(n as u32));
    }
    let page = Input::Page(id(n), process::page(world, n));
    world.inputs.push_back(page);
}

/// Ends the move of content to disk, and queries the node about the next one.
pub(super) fn is_stored(world: &mut SimulatedNode<'_>, n: usize) -> Result<(), SimulationError> {
    let content = &mut world.processes[n].content;
    let ends_now = matches!(content.disk, DiskContent::Storing { until, .. } if until == world.now);
    if ends_now {
        content.disk = DiskContent::Stored;
        let bytes = content.pooled_bytes;
        world.host.free_memory(world.now, ContentPlace::HostPool, bytes);
        world.figures.stored_on_disk += 1;
        let page = Input::Page(id(n), process::page(world, n));
        world.tell(page)?;
        world.tell(Input::Tick)?;
    }
    Ok(())
}
