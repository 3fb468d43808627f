//! Reads the call rings of processes, and sends the sampling rate to their agents.

use std::{collections::HashMap, os::unix::fs::FileExt, sync::Arc, time::Duration};

use affinode_core::{Key, ProcessId};
use affinode_proto::wire::{
    call_ring::CallRingReader,
    counters::{CounterSnapshot, PAGE_BYTES},
    message::ControllerMessage,
};
use tokio::{sync::mpsc, time::Instant};

use super::{
    CallTraceBatch, CallTraceHub, ProcessCalls,
    aggregate::{CallAggregate, one_in},
};
use crate::{
    clock,
    handle::{CallSource, ControllerHandle, ShuttingDown},
};

/// Time between two readings of the call rings.
const PERIOD: Duration = Duration::from_millis(200);
/// Time between two searches for new and ended processes.
const RESCAN_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum number of processes that one batch lists.
const SHOWN: usize = 256;

struct SampledProcess {
    sight: CallSource,
    reader: CallRingReader,
    calls: u64,
    last_sent: Option<ControllerMessage>,
}

/// Reads the call rings of processes while a watcher requests the call trace.
pub struct CallSampler {
    door: ControllerHandle,
    hub: Arc<CallTraceHub>,
    watched: HashMap<ProcessId, SampledProcess>,
    called_roll: Option<Instant>,
    read: Instant,
}

impl CallSampler {
    /// Creates a sampler. It finds the processes through `door`, and passes batches of their calls
    /// to `hub`.
    #[must_use]
    pub fn new(door: ControllerHandle, hub: Arc<CallTraceHub>) -> CallSampler {
        CallSampler { door, hub, watched: HashMap::new(), called_roll: None, read: Instant::now() }
    }

    /// Samples CUDA calls while there is a watcher, until the controller shuts down.
    pub async fn run(mut self) {
        loop {
            let scopes = self.hub.watched();
            if scopes.is_empty() {
                self.watched.values().for_each(stop);
                self.watched.clear();
                self.called_roll = None;
                self.hub.asked().await;
                continue;
            }
            if self.called_roll.is_none_or(|called| called.elapsed() >= RESCAN_INTERVAL) {
                let all = scopes.iter().any(Option::is_none);
                let keys: Vec<Key> = scopes.into_iter().flatten().collect();
                if self.call_roll((!all).then_some(keys)).await.is_err() {
                    return;
                }
            }
            tokio::time::sleep(PERIOD).await;
            let batch = self.read();
            self.hub.add(batch);
        }
    }

    /// Updates the set of sampled processes, and starts the recording of calls in new processes.
    async fn call_roll(&mut self, keys: Option<Vec<Key>>) -> Result<(), ShuttingDown> {
        let sights = self.door.sights(keys).await?;
        self.called_roll = Some(Instant::now());
        let mut before = std::mem::take(&mut self.watched);
        for sight in sights {
            let known = before.remove(&sight.id);
            let Some(watched) = known.or_else(|| begin(sight)) else { continue };
            self.watched.insert(watched.sight.id, watched);
        }
        before.values().for_each(stop);
        Ok(())
    }

    fn read(&mut self) -> CallTraceBatch {
        let elapsed = self.read.elapsed().min(PERIOD * 10);
        self.read = Instant::now();
        let mut processes = Vec::new();
        // A process that cannot be read is left out; the actor handles its failure.
        self.watched.retain(|_, watched| match watched.read() {
            Some(calls) => {
                processes.extend(Some(calls).filter(|calls| calls.calls > 0));
                true
            }
            None => false,
        });
        processes.sort_by(|a, b| b.calls.cmp(&a.calls).then(a.pid.cmp(&b.pid)));
        let left_out = processes.len().saturating_sub(SHOWN) as u64;
        processes.truncate(SHOWN);
        let elapsed_ms = u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX);
        CallTraceBatch { sequence: 0, unix_ms: clock::unix_ms(), elapsed_ms, processes, left_out }
    }
}

fn begin(sight: CallSource) -> Option<SampledProcess> {
    let page = page_of(&sight)?;
    let snapshot = CounterSnapshot::decode(&*page).ok()?;
    let mut watched = SampledProcess {
        reader: CallRingReader::at_present(&page),
        calls: snapshot.calls.wrapping_add(snapshot.polls),
        last_sent: None,
        sight,
    };
    // The call rate of a new process is not known yet, so all calls are recorded. At worst, the
    // ring is full before the next reading.
    watched.ask_for(1);
    Some(watched)
}

impl SampledProcess {
    fn read(&mut self) -> Option<ProcessCalls> {
        let page = page_of(&self.sight)?;
        let snapshot = CounterSnapshot::decode(&*page).ok()?;
        let total = snapshot.calls.wrapping_add(snapshot.polls);
        let calls = total.wrapping_sub(self.calls);
        self.calls = total;
        let mut tally = CallAggregate::default();
        let news = self.reader.take(&page, |record| tally.add(record));
        let (functions, recorded) = tally.finish();
        let one_in_now = self.last_sent.and_then(|last_sent| match last_sent {
            ControllerMessage::SampleCalls { one_in, .. } => Some(one_in),
            _ => None,
        });
        self.ask_for(one_in(calls));
        Some(ProcessCalls {
            key: self.sight.key.to_string(),
            container: self.sight.container.clone(),
            pid: self.sight.pid,
            command: self.sight.command.clone(),
            calls,
            one_in: one_in_now.unwrap_or(0),
            dropped: news.dropped.saturating_add(news.torn),
            functions,
            recorded,
        })
    }

    /// Sends the agent the sampling rate, and the number of the next record that the sampler will
    /// read. The process may overwrite all records below this number. Nothing is sent if the agent
    /// already has both values.
    fn ask_for(&mut self, one_in: u32) {
        if self.sight.outbox.is_none() {
            return;
        }
        let message = ControllerMessage::SampleCalls { one_in, read: self.reader.read() };
        if self.last_sent != Some(message) && tell(&self.sight, message) {
            self.last_sent = Some(message);
        }
    }
}

/// Queues a message about the call trace for an agent. Queues nothing and returns false if other
/// messages wait in the queue. They may be orders of the controller, which are more important.
fn tell(sight: &CallSource, message: ControllerMessage) -> bool {
    let outbox = sight.outbox.as_ref().and_then(mpsc::WeakSender::upgrade);
    outbox.is_some_and(|outbox| {
        outbox.capacity() == outbox.max_capacity() && outbox.try_send(message.into()).is_ok()
    })
}

fn stop(watched: &SampledProcess) {
    if let Some(outbox) = watched.sight.outbox.as_ref().and_then(mpsc::WeakSender::upgrade) {
        let _ = outbox.try_send(ControllerMessage::SampleCalls { one_in: 0, read: 0 }.into());
    }
}

fn page_of(sight: &CallSource) -> Option<Box<[u8; PAGE_BYTES]>> {
    let mut page = Box::new([0; PAGE_BYTES]);
    sight.page.read_exact_at(&mut *page, 0).ok()?;
    Some(page)
}
