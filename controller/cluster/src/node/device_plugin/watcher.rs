//! Reads the node's GPUs at intervals, and keeps the list of seats up to date.

use std::time::Duration;

use affinode_controller::inventory::gpu_facts::NodeGpus;
use tokio::sync::watch;

use super::seats::{KnownGpus, SeatList};
use crate::{
    error_chain,
    node::{
        dra::{capacity::OversubscriptionFactor, cdi_lookup::CdiLookup},
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
    /// Pause after an error, and while a GPU cannot be used.
    pub retry: Duration,
}

impl Default for ReadPace {
    fn default() -> ReadPace {
        ReadPace { usual: Duration::from_secs(60), retry: Duration::from_secs(10) }
    }
}

/// Reads the GPUs of a node at intervals, and updates the list of seats. `R` is the function that
/// reads the GPUs.
pub struct SeatWatcher<R> {
    /// Reads the GPUs of the node.
    pub read: R,
    /// Finds the CDI devices of the GPUs.
    pub lookup: CdiLookup,
    /// Oversubscription of a GPU, which determines its number of seats. The node's host memory may
    /// reduce that number.
    pub factor: OversubscriptionFactor,
    /// Whether the seats are offered to the kubelet.
    pub offer: watch::Receiver<SeatOffer>,
    /// Channel to which the list of seats is sent after each change.
    pub seats: watch::Sender<SeatList>,
    /// Pauses between two readings.
    pub pace: ReadPace,
}

impl<R: AsyncFnMut() -> Result<NodeGpus, HostError>> SeatWatcher<R> {
    /// Reads the GPUs at intervals. Returns when the node agent drops its `SeatControl`. Dropping
    /// the future also ends the readings.
    pub async fn run(mut self) {
        let (mut known, mut failures) = (KnownGpus::default(), 0);
        loop {
            let offer = *self.offer.borrow_and_update();
            if offer == SeatOffer::Offered {
                // A driver that hangs must not delay a withdrawal.
                let mut changes = self.offer.clone();
                let reading = tokio::select! {
                    reading = (self.read)() => reading,
                    changed = changes.changed() => if changed.is_err() { return } else { continue },
                };
                match reading {
                    Ok(reading) => {
                        known.add(reading);
                        failures = 0;
                    }
                    Err(error) => {
                        let why = error_chain::chain(&error);
                        tracing::warn!("device plugin: cannot read the GPUs of the node: {why}");
                        failures += 1;
                        if failures >= FAILURES {
                            known.lose_all();
                        }
                    }
                }
            }
            let served = offer == SeatOffer::Offered;
            let fresh = known.seats(self.factor, served, |gpu| self.lookup.find(gpu));
            let sound = failures == 0 && fresh.gpus.iter().all(|gpu| gpu.fault.is_none());
            self.publish(fresh);
            let rest = if sound || !served { self.pace.usual } else { self.pace.retry };
            tokio::select! {
                () = tokio::time::sleep(rest) => {}
                changed = self.offer.changed() => if changed.is_err() { return },
            }
        }
    }

    fn publish(&self, fresh: SeatList) {
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
                let earlier = known.gpus.iter().find(|earlier| earlier.uuid == gpu.uuid);
                match &gpu.fault {
                    Some(fault) if earlier.is_none_or(|it| it.fault.as_ref() != Some(fault)) => {
                        tracing::warn!(
                            "device plugin: the seats of GPU {} are not offered: {fault}",
                            gpu.uuid
                        );
                    }
                    None if earlier.is_some_and(|it| it.fault.is_some()) => {
                        tracing::info!(
                            "device plugin: the seats of GPU {} are offered again",
                            gpu.uuid
                        );
                    }
                    _ => {}
                }
            }
            *known = fresh;
            true
        });
    }
}

#[cfg(test)]
mod tests;
