//! Reads the node's GPUs at intervals, and keeps the list of seats up to date.

use std::{collections::BTreeSet, time::Duration};

use affinode_controller::inventory::gpu_facts::NodeGpus;
use tokio::{sync::watch, time::Instant};

use super::{
    pod_resources::SeatUseError,
    seats::{KnownGpus, SeatList, SeatedGpu},
};
use crate::{
    error_chain,
    node::{
        dra::{capacity::OversubscriptionFactor, cdi_lookup::CdiLookup},
        gpu_conditions::GpuConditions,
        host::HostError,
    },
};

/// Number of failed readings in a row after which all GPUs are reported as gone. The number is
/// above 1 because a single reading can fail while Affinode's programs are replaced.
const FAILURES: u32 = 3;

/// Whether the seats are offered to the kubelet. The node agent decides this.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SeatOffer {
    /// The node agent has not checked the node yet.
    #[default]
    Undecided,
    /// The node serves the runtime.
    Offered,
    /// The node does not serve the runtime, or Affinode is being removed from it.
    Withdrawn,
}

/// Pauses between two readings.
#[derive(Clone, Copy, Debug)]
pub struct ReadPace {
    /// Pause while all GPUs can be used.
    pub usual: Duration,
    /// Pause after an error, while a GPU cannot be used, and between two questions to the kubelet
    /// while a GPU is full.
    pub retry: Duration,
}

impl Default for ReadPace {
    fn default() -> ReadPace {
        ReadPace { usual: Duration::from_secs(60), retry: Duration::from_secs(10) }
    }
}

/// Reads the GPUs of a node at intervals, and updates the list of seats. `R` is the function that
/// reads the GPUs. `T` is the function that returns the identities of the seats that pods have.
pub struct SeatWatcher<R, T> {
    /// Reads the GPUs of the node.
    pub read: R,
    /// Asks the kubelet which seats pods have.
    pub taken: T,
    /// Finds the CDI devices of the GPUs.
    pub lookup: CdiLookup,
    /// Oversubscription of a GPU, which determines its number of seats. The node's host memory may
    /// reduce that number.
    pub factor: OversubscriptionFactor,
    /// Whether the seats are offered to the kubelet.
    pub offer: watch::Receiver<SeatOffer>,
    /// Conditions of the GPUs. Free seats of full GPUs are not offered. `None`: the conditions are
    /// unknown, so no free seat is offered.
    pub conditions: watch::Receiver<Option<GpuConditions>>,
    /// Channel to which the list of seats is sent after each change.
    pub seats: watch::Sender<SeatList>,
    /// Pauses between two readings.
    pub pace: ReadPace,
}

/// What the watcher knows from its readings.
#[derive(Default)]
struct SeatReadings {
    known: KnownGpus,
    /// Number of failed readings of the GPUs in a row.
    failures: u32,
    /// Start of the last reading of the GPUs. `None`: they must be read at the next occasion.
    gpus_read: Option<Instant>,
    /// Identities of the seats that pods have. Empty while no GPU is full.
    taken: BTreeSet<String>,
}

impl<R, T> SeatWatcher<R, T>
where
    R: AsyncFnMut() -> Result<NodeGpus, HostError>,
    T: AsyncFnMut() -> Result<BTreeSet<String>, SeatUseError>,
{
    /// Reads the GPUs at intervals. Returns when the node agent drops its `SeatControl`. Dropping
    /// the future also ends the readings.
    pub async fn run(mut self) {
        let mut readings = SeatReadings::default();
        loop {
            let offer = *self.offer.borrow_and_update();
            let full = full_gpus(self.conditions.borrow().as_ref());
            if offer == SeatOffer::Offered {
                // A driver that hangs must not delay a withdrawal.
                let mut changes = self.offer.clone();
                tokio::select! {
                    () = self.read(full.as_ref(), &mut readings) => {}
                    changed = changes.changed() => if changed.is_err() { return } else { continue },
                }
            }
            let served = offer == SeatOffer::Offered;
            let mut fresh = readings.known.seats(self.factor, served, |gpu| self.lookup.find(gpu));
            match &full {
                Some(full) => fresh.close(|uuid| full.contains(uuid), &readings.taken),
                None => fresh.close(|_| true, &readings.taken),
            }
            let sound = readings.failures == 0 && fresh.gpus.iter().all(|gpu| gpu.fault.is_none());
            if !sound {
                readings.gpus_read = None;
            }
            let settled = sound && fresh.gpus.iter().all(|gpu| gpu.kept_seats.is_none());
            self.publish(fresh, full.is_some());
            let rest = if settled || !served { self.pace.usual } else { self.pace.retry };
            tokio::select! {
                () = tokio::time::sleep(rest) => {}
                changed = self.offer.changed() => if changed.is_err() { return },
                () = changes_from(&mut self.conditions, full.as_ref()) => {}
            }
        }
    }

    /// Reads the GPUs if that is due and, if a GPU is full or may be full, the seats that pods have.
    async fn read(&mut self, full: Option<&BTreeSet<String>>, readings: &mut SeatReadings) {
        if readings.gpus_read.is_none_or(|at| at.elapsed() >= self.pace.usual) {
            self.read_gpus(readings).await;
        }
        if full.is_some_and(BTreeSet::is_empty) {
            readings.taken.clear();
            return;
        }
        match (self.taken)().await {
            Ok(taken) => readings.taken = taken,
            // The seats of the last answer stay offered.
            Err(error) => tracing::warn!(
                "device plugin: it is unknown which seats of full GPUs are free: {}",
                error_chain::chain(&error)
            ),
        }
    }

    async fn read_gpus(&mut self, readings: &mut SeatReadings) {
        let began = Instant::now();
        match (self.read)().await {
            Ok(reading) => {
                readings.known.add(reading);
                readings.failures = 0;
                readings.gpus_read = Some(began);
            }
            Err(error) => {
                let why = error_chain::chain(&error);
                tracing::warn!("device plugin: cannot read the GPUs of the node: {why}");
                readings.failures += 1;
                if readings.failures >= FAILURES {
                    readings.known.lose_all();
                }
            }
        }
    }

    /// Sends the list of seats if it has changed. `is_known`: whether it is known which GPUs are full.
    fn publish(&self, fresh: SeatList, is_known: bool) {
        self.seats.send_if_modified(|known| {
            if *known == fresh {
                return false;
            }
            let seats: u32 = fresh.gpus.iter().map(|gpu| gpu.seats).sum();
            tracing::info!(
                "device plugin: the list for the kubelet has {} GPUs with {seats} seats in total",
                fresh.gpus.len()
            );
            for gpu in &fresh.gpus {
                report(known.gpus.iter().find(|earlier| earlier.uuid == gpu.uuid), gpu, is_known);
            }
            *known = fresh;
            true
        });
    }
}

/// Returns the UUIDs of the GPUs that are full. `None`: they are unknown.
fn full_gpus(conditions: Option<&GpuConditions>) -> Option<BTreeSet<String>> {
    conditions.map(|conditions| conditions.full.clone())
}

/// Waits until other GPUs are full than those in `full`.
async fn changes_from(
    conditions: &mut watch::Receiver<Option<GpuConditions>>,
    full: Option<&BTreeSet<String>>,
) {
    let is_other = |now: &Option<GpuConditions>| now.as_ref().map(|now| &now.full) != full;
    if conditions.wait_for(is_other).await.is_err() {
        // The node agent ends.
        std::future::pending().await
    }
}

/// Logs a change of what is offered of a GPU. `earlier` is the GPU in the list before. `is_known`:
/// whether it is known which GPUs are full.
fn report(earlier: Option<&SeatedGpu>, gpu: &SeatedGpu, is_known: bool) {
    let uuid = &gpu.uuid;
    match &gpu.fault {
        Some(fault) if earlier.is_none_or(|it| it.fault.as_ref() != Some(fault)) => {
            tracing::warn!("device plugin: the seats of GPU {uuid} are not offered: {fault}");
        }
        None if earlier.is_some_and(|it| it.fault.is_some()) => {
            tracing::info!("device plugin: the seats of GPU {uuid} are offered again");
        }
        _ => {}
    }
    match (earlier.is_some_and(|it| it.kept_seats.is_some()), gpu.kept_seats.is_some()) {
        (false, true) if !is_known => tracing::info!(
            "device plugin: the free seats of GPU {uuid} are not offered yet, because the controller \
             has not reported yet whether the GPU is full"
        ),
        (false, true) => tracing::warn!(
            "device plugin: the free seats of GPU {uuid} are not offered, because the GPU is full of \
             VRAM that no offload can free"
        ),
        (true, false) => {
            tracing::info!(
                "device plugin: the free seats of GPU {uuid} are offered, because it is not full"
            );
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests;
