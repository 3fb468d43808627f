//! A device plugin of the kubelet, for clusters without Dynamic Resource Allocation (DRA). It
//! offers each GPU several times, as *seats*. A seat is the right to use a whole GPU. The number of
//! seats is computed from the memory capacity that the DRA driver would offer for the GPU
//! ([`capacity`](super::dra::capacity)). The scheduler counts the seats. A seat does not limit the
//! VRAM of a container.
//!
//! ```text
//! GPUs, full GPUs ──`watcher`──> list of `seats` ──┐
//!                      ^                           ├──`service`──> kubelet
//! NVIDIA's CDI spec ───┼──device of a GPU──────────┘                  │
//!                      └──────────taken seats──`pod_resources`────────┘
//! ```
//!
//! While a GPU is full of VRAM that no offload can free, its free seats are not offered. The seats
//! that pods have stay offered: a kubelet that restarts refuses a pod with a device that is not healthy,
//! if the container of the pod does not run at that moment.
//!
//! The module `kubelet` registers the plugin at the kubelet, which then calls `service`.
//!
//! The plugin keeps no state: the kubelet records which container has which seat. If the agent ends,
//! running containers are not affected.

pub mod allocation;
#[cfg(test)]
mod fake_kubelet;
pub mod kubelet;
pub mod messages;
pub mod pod_resources;
pub mod preference;
pub mod resource;
pub mod seats;
pub mod service;
pub mod watcher;

use std::path::PathBuf;

use clap::{ArgAction, Args};
use tokio::sync::watch;

use self::{
    kubelet::{KubeletLink, LinkPace},
    pod_resources::PodResourcesLister,
    resource::ResourceName,
    seats::SeatList,
    watcher::{ReadPace, SeatOffer, SeatWatcher},
};
use super::{
    dra::{DraOptions, capacity::OversubscriptionFactor, cdi_lookup::CdiLookup},
    gpu_conditions::GpuConditions,
    gpu_reader::GpuReader,
    host::HostPaths,
};

/// Options of the device plugin. It also uses the options of the DRA driver for CDI and the
/// oversubscription.
#[derive(Args, Clone, Debug)]
pub struct DevicePluginOptions {
    /// Whether the agent is a device plugin: it offers the node's GPUs as an extended resource. It
    /// excludes --dra.
    #[arg(long, value_name = "BOOL", default_value_t = false, action = ArgAction::Set)]
    device_plugin: bool,
    /// Name of the resource that pods request.
    #[arg(long = "device-plugin-resource", value_name = "NAME", default_value = "affinode.io/gpu")]
    resource: ResourceName,
    /// Number of seats of each GPU, from 1 to 16. If 0: --dra-oversubscription, rounded down. The
    /// node's host memory limits it further.
    #[arg(
        long = "device-plugin-seats",
        value_name = "COUNT",
        default_value_t = 0,
        value_parser = clap::value_parser!(u8).range(0..=16)
    )]
    seats: u8,
    /// Folder of the kubelet's sockets for device plugins. It must not be a symbolic link.
    #[arg(
        long = "device-plugin-dir",
        value_name = "DIR",
        default_value = "/var/lib/kubelet/device-plugins"
    )]
    dir: PathBuf,
}

/// Reason why the plugin does not start.
#[derive(Debug, thiserror::Error)]
pub enum DevicePluginError {
    /// The options enable the DRA driver and the device plugin, so the scheduler would assign each
    /// GPU twice.
    #[error("--dra and --device-plugin would offer each GPU twice; turn one of them off")]
    Both,
}

/// Handle by which the node agent offers the seats or withdraws them.
pub struct SeatControl(watch::Sender<SeatOffer>);

impl SeatControl {
    /// Offers the seats to the kubelet if `served` is true, and otherwise withdraws them.
    /// Containers that have seats keep them.
    pub fn offer(&self, served: bool) {
        let offer = if served { SeatOffer::Offered } else { SeatOffer::Withdrawn };
        self.0.send_if_modified(|known| std::mem::replace(known, offer) != offer);
    }
}

/// The plugin, which reads the GPUs and serves the kubelet.
pub struct DevicePlugin {
    places: HostPaths,
    lookup: CdiLookup,
    factor: OversubscriptionFactor,
    offer: watch::Receiver<SeatOffer>,
    conditions: watch::Receiver<Option<GpuConditions>>,
    lister: PodResourcesLister,
    link: KubeletLink,
}

impl DevicePlugin {
    /// Prepares the plugin. `None`: the options do not enable it.
    ///
    /// # Errors
    /// [`DevicePluginError`]: the options contradict each other.
    pub fn start(
        options: &DevicePluginOptions,
        dra: &DraOptions,
        places: &HostPaths,
        conditions: watch::Receiver<Option<GpuConditions>>,
    ) -> Result<Option<(DevicePlugin, SeatControl)>, DevicePluginError> {
        if !options.device_plugin {
            return Ok(None);
        }
        if dra.dra {
            return Err(DevicePluginError::Both);
        }
        let folder = places.on_host(&options.dir);
        let (control, offer) = watch::channel(SeatOffer::default());
        let lookup = dra.lookup(places);
        let lister = PodResourcesLister {
            folder: folder.with_file_name(pod_resources::FOLDER),
            resource: options.resource.clone(),
        };
        let link = KubeletLink {
            folder,
            resource: options.resource.clone(),
            seats: watch::Sender::new(SeatList::default()),
            lookup: lookup.clone(),
            pace: LinkPace::default(),
        };
        let factor = match options.seats {
            0 => dra.factor,
            seats => OversubscriptionFactor::of_seats(seats),
        };
        let plugin = DevicePlugin {
            places: places.clone(),
            lookup,
            factor,
            offer,
            conditions,
            lister,
            link,
        };
        Ok(Some((plugin, SeatControl(control))))
    }

    /// Serves the kubelet until the future is dropped, which removes the plugin's socket.
    pub async fn run(self) {
        let mut reader = GpuReader::new(self.places);
        let watcher = SeatWatcher {
            read: async || reader.read().await,
            taken: async || self.lister.taken_seats().await,
            lookup: self.lookup,
            factor: self.factor,
            offer: self.offer,
            conditions: self.conditions,
            seats: self.link.seats.clone(),
            pace: ReadPace::default(),
        };
        tokio::join!(watcher.run(), self.link.run());
    }
}
