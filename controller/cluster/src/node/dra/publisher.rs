//! Publishes the node's GPUs in a ResourceSlice, and keeps the slice up to date.
//!
//! ```text
//!             ┌── the slice was changed or deleted (the kubelet deletes it when it starts)
//! wait <──────┤── the node agent serves the runtime, or removes it
//!  │          ├── a GPU is full of unmovable VRAM or no longer full, or its class of load changes
//!  │          └── 60 s
//!  └──> read the GPUs ──> read the slices ──> keep, create, replace or delete
//! ```

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use affinode_controller::inventory::gpu_facts::NodeGpus;
use futures_util::StreamExt;
use k8s_openapi::api::{
    core::v1::Node,
    resource::v1::{Device, ResourceSlice},
};
use k8s_openapi::jiff::Timestamp;
use kube::{
    Api, Client, ResourceExt,
    api::{DeleteParams, ListParams, PostParams},
    runtime::{WatchStreamExt, watcher},
};
use tokio::sync::{Notify, watch};

use super::{
    DRIVER,
    capacity::OversubscriptionFactor,
    health::HealthRecord,
    services::Registration,
    slice::{self, SliceChange, SliceOwner},
};
use crate::{
    error_chain::{self, ApiError},
    node::{gpu_conditions::GpuConditions, gpu_reader::GpuReader, host::HostError},
};

/// Interval between two readings of the GPUs.
const READ_INTERVAL: Duration = Duration::from_secs(60);
/// Minimum pause between two comparisons of the slice with the node's GPUs.
const MIN_INTERVAL: Duration = Duration::from_secs(1);
/// Pause after an error.
const RETRY_INTERVAL: Duration = Duration::from_secs(10);
/// Pause after an error while the slice must be deleted. The pause is short, because the removal of
/// Affinode waits for the deletion.
const WITHDRAWAL_RETRY: Duration = Duration::from_secs(2);
/// Time limit for all requests to the API server in one comparison.
const REQUESTS_TIMEOUT: Duration = Duration::from_secs(10);
/// Number of failed readings of the GPUs in a row after which the slice is deleted. The number is
/// above 1 because a single reading can fail while Affinode's programs are replaced.
const FAILURES: u32 = 3;

/// Whether the node's GPUs are offered to claims.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SliceDemand {
    /// The node agent has not checked the node yet. An existing slice is not changed.
    #[default]
    Undecided,
    /// The node serves the runtime.
    Publish,
    /// Affinode is not installed on the node, or is being removed from it.
    Withdraw,
}

/// Reason why the slice is not up to date.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// The GPUs of the node cannot be read.
    #[error("cannot read the GPUs of the node")]
    Gpus(#[from] HostError),
    /// A request to the API server failed.
    #[error(
        "a request for ResourceSlices failed; check that the API server serves resource.k8s.io/v1"
    )]
    Cluster(#[from] ApiError),
    /// The API server does not answer.
    #[error(
        "the API server did not answer requests for ResourceSlices within {REQUESTS_TIMEOUT:?}"
    )]
    Late,
}

impl From<kube::Error> for PublishError {
    fn from(error: kube::Error) -> PublishError {
        PublishError::Cluster(ApiError(error))
    }
}

/// Publishes the GPUs of one node.
pub struct SlicePublisher {
    /// Client of the API server.
    pub client: Client,
    /// Name of the node object.
    pub node: String,
    /// Reads the GPUs of the node.
    pub reader: GpuReader,
    /// Factor by which the capacity may exceed the VRAM.
    pub factor: OversubscriptionFactor,
    /// Whether the node's GPUs are offered to claims.
    pub demand: watch::Receiver<SliceDemand>,
    /// Whether the kubelet uses the driver.
    pub registration: watch::Receiver<Registration>,
    /// Channel to which the GPUs are sent after each reading.
    pub gpus: watch::Sender<NodeGpus>,
    /// Channel to which the health of the devices is sent after each reading.
    pub health: watch::Sender<HealthRecord>,
    /// Conditions of the GPUs that the slice shows. `None`: they are unknown, so the slice keeps those
    /// that it shows.
    pub conditions: watch::Receiver<Option<GpuConditions>>,
    /// Whether the slice has been deleted after a request to withdraw the GPUs. The value becomes
    /// false again when the GPUs are to be published.
    pub withdrawn: watch::Sender<bool>,
    /// The sent devices and the stored devices, if the API server stored the slice with other
    /// devices than it received. `None`: both are the same.
    pub altered: Option<[Vec<Device>; 2]>,
    /// Largest number of GPUs in any reading.
    pub gpu_count: usize,
    /// Number of failed readings in a row.
    pub failures: u32,
}

impl SlicePublisher {
    /// Keeps the slice up to date until the future is dropped.
    pub async fn run(mut self) {
        let changed = Arc::new(Notify::new());
        let watching = watch_slices(self.slices(), self.selector(), Arc::clone(&changed));
        let publishing = async {
            loop {
                let rest = match self.publish().await {
                    Ok(()) if self.failures == 0 => READ_INTERVAL,
                    Ok(()) => RETRY_INTERVAL,
                    Err(error) => {
                        tracing::warn!(
                            "ResourceSlice: cannot update it: {}",
                            error_chain::chain(&error)
                        );
                        match *self.demand.borrow() {
                            SliceDemand::Withdraw => WITHDRAWAL_RETRY,
                            _ => RETRY_INTERVAL,
                        }
                    }
                };
                tokio::select! {
                    () = tokio::time::sleep(rest) => {}
                    () = changed.notified() => {}
                    _ = self.demand.changed() => {}
                    _ = self.registration.changed() => {}
                    Ok(()) = self.conditions.changed() => {}
                }
                // Bounds the writes if another program changes the slice as well.
                tokio::time::sleep(MIN_INTERVAL).await;
            }
        };
        tokio::join!(watching, publishing);
    }

    async fn publish(&mut self) -> Result<(), PublishError> {
        let demand = *self.demand.borrow_and_update();
        let registered = *self.registration.borrow_and_update() == Registration::Registered;
        let wanted = match demand {
            SliceDemand::Undecided => return Ok(()),
            // Without a registered driver, the kubelet could not start the pods of these claims.
            SliceDemand::Publish if !registered => return Ok(()),
            SliceDemand::Publish => {
                self.withdrawn.send_replace(false);
                // A driver that hangs must not delay a withdrawal.
                let mut demanded = self.demand.clone();
                tokio::select! {
                    devices = self.read_devices() => devices?,
                    _ = demanded.changed() => return Ok(()),
                }
            }
            SliceDemand::Withdraw => None,
        };
        let mut demanded = self.demand.clone();
        tokio::select! {
            brought = tokio::time::timeout(REQUESTS_TIMEOUT, self.bring_to(wanted)) => {
                brought.map_err(|_| PublishError::Late)??;
            }
            // The requests are for what is no longer wanted. The next comparison begins with a list.
            _ = demanded.changed() => return Ok(()),
        }
        if demand == SliceDemand::Withdraw {
            self.withdrawn.send_replace(true);
        }
        Ok(())
    }

    /// Reads the GPUs of the node as devices. `None`: [`FAILURES`] or more readings in a row have
    /// failed, so no GPU is offered.
    async fn read_devices(&mut self) -> Result<Option<Vec<Device>>, PublishError> {
        let mut node = match self.reader.read().await {
            Ok(node) => node,
            Err(error) => {
                self.failures += 1;
                if self.failures < FAILURES {
                    return Err(error.into());
                }
                let why = error_chain::chain(&error);
                self.report_health(&BTreeSet::new(), &format!("no GPU can be read: {why}"));
                if self.failures == FAILURES {
                    tracing::error!(
                        "ResourceSlice: deleted, because the GPUs cannot be read: {why}"
                    );
                }
                return Ok(None);
            }
        };
        self.failures = 0;
        self.gpu_count = count_gone(&mut node, self.gpu_count);
        let conditions = self.conditions.borrow_and_update().clone().unwrap_or_default();
        let devices = slice::devices(&node, self.factor, &conditions);
        let names = devices.iter().map(|device| device.name.clone()).collect();
        self.report_health(&names, &lost_text(&node));
        self.know(node);
        Ok(Some(devices))
    }

    /// Sends the health of the devices to the kubelet. `why`: why devices of earlier readings are
    /// missing in `readable`.
    fn report_health(&self, readable: &BTreeSet<String>, why: &str) {
        let now_seconds = Timestamp::now().as_second();
        self.health.send_modify(|record| record.record(readable, why, now_seconds));
    }

    /// Sends a reading of the GPUs to the receivers. Logs each GPU that has become unreadable since
    /// the previous reading. Such a GPU is offered to no claim.
    fn know(&self, node: NodeGpus) {
        let known = self.gpus.send_replace(node);
        let node = self.gpus.borrow();
        for why in node.unreadable.iter().filter(|why| !known.unreadable.contains(why)) {
            tracing::error!("ResourceSlice: a GPU is left out, because NVML cannot read it: {why}");
        }
    }

    /// Compares the node's slices with the wanted devices, and makes the next change that brings
    /// the slices to this state. If `wanted` is `None`, the slices are deleted.
    async fn bring_to(&mut self, mut wanted: Option<Vec<Device>>) -> Result<(), PublishError> {
        let api = self.slices();
        let found = api.list(&ListParams::default().fields(&self.selector())).await?.items;
        if let Some(devices) = wanted.as_mut().filter(|_| self.conditions.borrow().is_none()) {
            if found.is_empty() {
                // A GPU may be full, so no GPU is offered before the conditions are known.
                return Ok(());
            }
            slice::keep_conditions(devices, &found);
        }
        let wanted = wanted.as_deref();
        if self.is_altered_form(&found, wanted) {
            return Ok(());
        }
        if wanted.is_none() && found.is_empty() {
            return Ok(());
        }
        match slice::change(&found, wanted, &self.owner().await?) {
            SliceChange::Keep => {}
            SliceChange::Create(slice) => {
                let stored = api.create(&PostParams::default(), &slice).await?;
                self.record(&slice, &stored);
            }
            SliceChange::Replace(slice) => {
                let name = slice.name_any();
                let stored = api.replace(&name, &PostParams::default(), &slice).await?;
                self.record(&slice, &stored);
            }
            SliceChange::Delete(names) => {
                for name in names {
                    match api.delete(&name, &DeleteParams::default()).await {
                        Ok(_) => tracing::info!("ResourceSlice {name}: deleted"),
                        Err(kube::Error::Api(status)) if status.code == 404 => {}
                        Err(error) => return Err(error.into()),
                    }
                }
            }
        }
        Ok(())
    }

    /// Returns whether the API server has stored the wanted devices in another form, and the slice
    /// still has this form. Sending the devices again would then change nothing.
    fn is_altered_form(&self, found: &[ResourceSlice], wanted: Option<&[Device]>) -> bool {
        let (Some([sent, stored]), [one]) = (&self.altered, found) else { return false };
        let found = one.spec.devices.as_deref().map(slice::without_times);
        wanted == Some(sent) && found.as_ref() == Some(stored)
    }

    fn record(&mut self, sent: &ResourceSlice, stored: &ResourceSlice) {
        let devices = |slice: &ResourceSlice| {
            slice::without_times(slice.spec.devices.as_deref().unwrap_or_default())
        };
        let (sent, found) = (devices(sent), devices(stored));
        let (name, count) = (stored.name_any(), found.len());
        let generation = stored.spec.pool.generation;
        tracing::info!(
            "ResourceSlice {name} is published with {count} GPUs, generation {generation}"
        );
        self.altered = (sent != found).then(|| {
            match slice::without_taints(&sent) == found {
                true => tracing::warn!(
                    "ResourceSlice {name}: the API server removed taints, so the scheduler may \
                     assign full GPUs: turn on the feature gate DRADeviceTaints (default since \
                     Kubernetes 1.36)"
                ),
                false => tracing::error!(
                    "ResourceSlice {name}: the API server removed fields, so no GPU can be \
                     shared: turn on the feature gate DRAConsumableCapacity (default since \
                     Kubernetes 1.36)"
                ),
            }
            [sent, found]
        });
    }

    async fn owner(&self) -> Result<SliceOwner, PublishError> {
        let node = Api::<Node>::all(self.client.clone()).get_metadata(&self.node).await?;
        Ok(SliceOwner { node: self.node.clone(), node_uid: node.uid().unwrap_or_default() })
    }

    fn slices(&self) -> Api<ResourceSlice> {
        Api::all(self.client.clone())
    }

    /// Returns the field selector for the slices of this driver and node.
    fn selector(&self) -> String {
        format!("spec.driver={DRIVER},spec.nodeName={}", self.node)
    }
}

/// Why a GPU that was read earlier is not offered now.
fn lost_text(node: &NodeGpus) -> String {
    match node.unreadable.is_empty() {
        true => "the GPU is gone or in MIG mode".to_owned(),
        false => format!("the GPU is gone, or NVML cannot read it: {}", node.unreadable.join("; ")),
    }
}

/// Adds an unreadable GPU for each GPU that NVML counted in an earlier reading but does not count
/// now. These GPUs thereby keep their share of the host memory. `known` is the largest number of
/// GPUs in earlier readings. Returns the largest number including this reading.
fn count_gone(node: &mut NodeGpus, known: usize) -> usize {
    let count = node.gpus.len() + node.unreadable.len();
    let gone = |number| format!("GPU {} of {known} is no longer in NVML's list", number + 1);
    node.unreadable.extend((count..known).map(gone));
    known.max(count)
}

/// Notifies `changed` of each change of the node's slices.
async fn watch_slices(api: Api<ResourceSlice>, selector: String, changed: Arc<Notify>) {
    let events = watcher(api, watcher::Config::default().fields(&selector)).default_backoff();
    events
        .for_each(|event| {
            match event {
                Ok(_) => changed.notify_one(),
                Err(error) => tracing::warn!(
                    "ResourceSlice: the watch failed, and is started again: {}",
                    error_chain::chain(&error)
                ),
            }
            std::future::ready(())
        })
        .await;
}

#[cfg(test)]
mod tests {
    use affinode_controller::inventory::gpu_facts::GpuFacts;

    use super::*;

    #[test]
    fn gpu_that_is_gone_counts_as_unreadable() {
        let reading =
            |count| NodeGpus { gpus: vec![GpuFacts::default(); count], ..NodeGpus::default() };
        let mut two = reading(2);
        assert_eq!((count_gone(&mut two, 0), two.unreadable.len()), (2, 0));
        let mut one = reading(1);
        assert_eq!((count_gone(&mut one, 2), one.unreadable.len()), (2, 1));
    }
}
