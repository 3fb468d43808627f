//! A driver for Dynamic Resource Allocation (DRA), `resource.k8s.io/v1`. It hands each GPU out to
//! several claims, in shares of an oversubscribed capacity of memory. The capacity is accounted by
//! the scheduler. Nothing enforces it in a container.
//!
//! ```text
//! GPUs ──[`slice`]──> ResourceSlice ──> scheduler ──> status of a ResourceClaim
//!                                                          │ kubelet: NodePrepareResources
//!                            [`services`] ──> [`prepare`] <┘ [`allocation`], [`policy`]
//!                                                │
//!                      CDI specification [`cdi`] + GPU in NVIDIA's specification [`cdi_lookup`]
//! ```
//!
//! A claim is prepared as long as its file exists ([`claim_files`]), so an agent that ends loses
//! nothing. The slice is published while the node serves the runtime ([`publisher`]).

pub mod allocation;
mod authority;
pub mod capacity;
pub mod cdi;
pub mod cdi_lookup;
pub mod claim_files;
pub mod messages;
pub mod policy;
pub mod prepare;
pub mod publisher;
pub mod services;
pub mod slice;
pub mod sockets;

use std::path::PathBuf;

use affinode_controller::inventory::gpu_facts::NodeGpus;
use affinode_proto::paths;
use clap::{ArgAction, Args};
use kube::Client;
use tokio::{net::UnixListener, sync::watch};

use self::{
    capacity::OversubscriptionFactor,
    cdi_lookup::CdiLookup,
    claim_files::{ClaimFiles, FileError},
    prepare::ClaimPreparer,
    publisher::{SliceDemand, SlicePublisher},
    services::{PluginService, Registration, RegistrationService},
    sockets::{NodeSocket, SocketError},
};
use super::host::HostPaths;
use crate::error_chain;

/// Name of the driver. Devices, attributes and configurations refer to it.
pub const DRIVER: &str = "gpu.affinode.io";
/// The folder, beside the chosen one, in which CDI specifications are looked up.
const STATIC_CDI_DIR: &str = "/etc/cdi";

/// Options of the DRA driver.
#[derive(Args, Clone, Debug)]
pub struct DraOptions {
    /// Whether the agent is a DRA driver: it offers the node's GPUs to resource claims.
    #[arg(long, value_name = "BOOL", default_value_t = false, action = ArgAction::Set)]
    pub dra: bool,
    /// Maximum ratio of the memory that claims of a GPU may request in total to the GPU's VRAM, from
    /// 1 to 16. The node's host memory limits it further.
    #[arg(long = "dra-oversubscription", value_name = "FACTOR", default_value = "2.0")]
    pub(super) factor: OversubscriptionFactor,
    /// Folder of the kubelet on the node. It must be no symbolic link.
    #[arg(long = "dra-kubelet-dir", value_name = "DIR", default_value = "/var/lib/kubelet")]
    kubelet_dir: PathBuf,
    /// Folder on the node for the CDI specifications of claims. It must be no symbolic link, so name
    /// /run/cdi for /var/run/cdi.
    #[arg(long = "dra-cdi-dir", value_name = "DIR", default_value = "/run/cdi")]
    cdi_dir: PathBuf,
    /// Kind of the GPUs in the CDI specifications of NVIDIA's container toolkit.
    #[arg(long = "dra-cdi-kind", value_name = "KIND", default_value = "nvidia.com/gpu")]
    cdi_kind: String,
}

impl DraOptions {
    /// The search for GPUs in the CDI specifications of NVIDIA's container toolkit.
    #[must_use]
    pub fn lookup(&self, places: &HostPaths) -> CdiLookup {
        let folders = [self.cdi_dir.as_path(), STATIC_CDI_DIR.as_ref()];
        let folders = folders.map(|folder| places.on_host(folder)).into();
        CdiLookup { folders, kind: self.cdi_kind.clone() }
    }
}

/// Reason why Affinode cannot be removed from the node.
#[derive(Debug, thiserror::Error)]
pub enum InUseError {
    /// Without the driver, the kubelet could not end the pods of these claims.
    #[error(
        "{0} resource claims of driver {DRIVER} are prepared on this node: delete their pods first"
    )]
    Prepared(usize),
    /// It is unknown whether claims are prepared.
    #[error(transparent)]
    Files(#[from] FileError),
}

/// The driver's part that the node agent controls.
pub struct DraControl {
    files: ClaimFiles,
    demand: watch::Sender<SliceDemand>,
}

impl DraControl {
    /// Offers the node's GPUs, or withdraws them.
    pub fn demand(&self, demand: SliceDemand) {
        self.demand.send_if_modified(|known| std::mem::replace(known, demand) != demand);
    }

    /// Checks that no claim is prepared.
    ///
    /// # Errors
    /// [`InUseError`]: claims are prepared, or that is unknown.
    pub fn may_go(&self) -> Result<(), InUseError> {
        match self.files.prepared()?.len() {
            0 => Ok(()),
            count => Err(InUseError::Prepared(count)),
        }
    }
}

/// The driver, which serves the kubelet and publishes the slice.
pub struct DraDriver {
    publisher: SlicePublisher,
    registration: (UnixListener, NodeSocket, RegistrationService),
    plugin: (UnixListener, NodeSocket, PluginService),
}

impl DraDriver {
    /// Opens the driver's sockets. `None`: the driver is off.
    ///
    /// # Errors
    /// [`SocketError`]: a socket cannot be created.
    pub fn start(
        options: &DraOptions,
        places: &HostPaths,
        client: &Client,
        node: &str,
    ) -> Result<Option<(DraDriver, DraControl)>, SocketError> {
        if !options.dra {
            return Ok(None);
        }
        // A socket in another folder would never be found.
        sockets::check_folder(&places.on_host(&options.kubelet_dir))?;
        let policy_dir = places.run_dir.join(paths::CLAIMS_DIR);
        let files = ClaimFiles {
            cdi_dir: places.on_host(&options.cdi_dir),
            policy_dir: places.on_host(&policy_dir),
            policy_dir_on_node: policy_dir,
        };
        let lookup = options.lookup(places);
        let (state, registered) = watch::channel(Registration::default());
        let (demand, demanded) = watch::channel(SliceDemand::default());
        let (gpus, gpus_read) = watch::channel(NodeGpus::default());
        let preparer = ClaimPreparer::new(client.clone(), node, files.clone(), lookup, gpus_read);
        let endpoint = options.kubelet_dir.join("plugins").join(DRIVER).join("dra.sock");
        let found = options.kubelet_dir.join(format!("plugins_registry/{DRIVER}-reg.sock"));
        // The kubelet calls the endpoint as soon as the registration socket exists.
        let (listener, socket) = NodeSocket::bind(&places.on_host(&endpoint))?;
        let plugin = (listener, socket, PluginService(preparer));
        let (listener, socket) = NodeSocket::bind(&places.on_host(&found))?;
        let endpoint = endpoint.display().to_string();
        let registration = (listener, socket, RegistrationService { endpoint, state });
        let publisher = SlicePublisher {
            client: client.clone(),
            node: node.to_owned(),
            places: places.clone(),
            factor: options.factor,
            demand: demanded,
            registration: registered,
            gpus,
            altered: None,
        };
        let driver = DraDriver { publisher, registration, plugin };
        Ok(Some((driver, DraControl { files, demand })))
    }

    /// Serves the kubelet until the future is dropped. The sockets are removed then.
    pub async fn run(self) {
        // Values are dropped in the opposite order: the kubelet is to find no registration socket
        // without an endpoint.
        let (plugin, _plugin_socket, preparing) = self.plugin;
        let (registration, _registration_socket, registering) = self.registration;
        let ended = tokio::select! {
            ended = services::serve(plugin, move |request| preparing.clone().answer(request)) => ended,
            ended = services::serve(registration, move |request| registering.clone().answer(request)) => ended,
            () = self.publisher.run() => Ok(()),
        };
        if let Err(error) = ended {
            tracing::error!("DRA driver {DRIVER}: a server ended: {}", error_chain::chain(&error));
        }
    }
}
