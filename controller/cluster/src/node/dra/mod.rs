//! A driver for Dynamic Resource Allocation (DRA), `resource.k8s.io/v1`. It offers each GPU to
//! several claims. Each claim gets a share of the GPU's memory capacity, which may exceed the VRAM.
//! The scheduler accounts for the capacity. Affinode's library limits each container to the amount of
//! its claim.
//!
//! ```text
//! GPUs ──[`slice`]──> ResourceSlice ──> scheduler ──> status of a ResourceClaim
//!                                                          │ kubelet: NodePrepareResources
//!                            [`services`] ──> [`prepare`] <┘ [`allocation`], [`policy`]
//!                                                │
//!                      CDI specification [`cdi`] + GPU in NVIDIA's specification [`cdi_lookup`]
//! ```
//!
//! A claim is prepared as long as its file exists ([`claim_files`]), so no state is lost when the
//! agent ends. The slice is published while the node serves the runtime ([`publisher`]).

pub mod allocation;
mod authority;
pub mod capacity;
pub mod cdi;
pub mod cdi_lookup;
pub mod claim_files;
mod driver_sockets;
pub mod health;
pub mod messages;
pub mod policy;
pub mod prepare;
pub mod publisher;
pub mod services;
pub mod slice;
pub mod sockets;

use std::{path::PathBuf, time::Duration};

use affinode_controller::inventory::gpu_facts::NodeGpus;
use affinode_proto::paths;
use clap::{ArgAction, Args};
use kube::Client;
use tokio::sync::watch;

use self::{
    capacity::OversubscriptionFactor,
    cdi_lookup::CdiLookup,
    claim_files::{ClaimFiles, FileError},
    driver_sockets::DriverSockets,
    health::HealthRecord,
    prepare::ClaimPreparer,
    publisher::{SliceDemand, SlicePublisher},
    services::{HealthSource, PluginService, Registration},
};
use super::{gpu_conditions::GpuConditions, gpu_reader::GpuReader, host::HostPaths};
use crate::error_chain;

/// Name of the driver. Devices, attributes and configurations refer to it.
pub const DRIVER: &str = "gpu.affinode.io";
/// Name of the capacity of a GPU from which claims request an amount.
const MEMORY: &str = "memory";
/// Folder in which CDI specifications are searched, in addition to the folder of `--dra-cdi-dir`.
const STATIC_CDI_DIR: &str = "/etc/cdi";
/// Maximum time to wait until a ResourceSlice that is being withdrawn is deleted.
const WITHDRAWAL_TIMEOUT: Duration = Duration::from_secs(30);
/// Pause before the driver starts again after an error.
const RESTART_INTERVAL: Duration = Duration::from_secs(10);

/// Options of the DRA driver.
#[derive(Args, Clone, Debug)]
pub struct DraOptions {
    /// Whether the agent is a DRA driver, which offers the node's GPUs to resource claims.
    #[arg(long, value_name = "BOOL", default_value_t = false, action = ArgAction::Set)]
    pub dra: bool,
    /// Oversubscription factor, from 1 to 16: the claims of a GPU may request at most this multiple
    /// of the GPU's VRAM in total. The node's host memory limits it further.
    #[arg(long = "dra-oversubscription", value_name = "FACTOR", default_value = "2.0")]
    pub(super) factor: OversubscriptionFactor,
    /// Whether the VRAM of a claim's containers is limited to the memory that the scheduler
    /// allocated to the claim. If false, only the scheduler takes this amount into account.
    #[arg(long = "dra-limit-memory", value_name = "BOOL", default_value_t = true, action = ArgAction::Set)]
    limit_memory: bool,
    /// Folder of the kubelet on the node. It must not be a symbolic link.
    #[arg(long = "dra-kubelet-dir", value_name = "DIR", default_value = "/var/lib/kubelet")]
    kubelet_dir: PathBuf,
    /// Folder on the node for the CDI specifications of claims. The path must not contain a
    /// symbolic link: pass /run/cdi, not /var/run/cdi.
    #[arg(long = "dra-cdi-dir", value_name = "DIR", default_value = "/run/cdi")]
    cdi_dir: PathBuf,
    /// Kind of the GPUs in the CDI specifications of NVIDIA's container toolkit.
    #[arg(long = "dra-cdi-kind", value_name = "KIND", default_value = "nvidia.com/gpu")]
    cdi_kind: String,
}

impl DraOptions {
    /// Returns the look-up of GPUs in the CDI specifications of NVIDIA's container toolkit.
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
    /// Resource claims are in use. Without the driver, the kubelet could not end their pods.
    #[error(
        "{count} resource claims of driver {DRIVER} are in use on this node: delete the pods that \
         use {names}"
    )]
    Claims {
        /// Number of claims in use.
        count: usize,
        /// `namespace/name` of the first claims.
        names: String,
    },
    /// The node's ResourceSlice is not deleted yet, so the scheduler may still assign GPUs to pods.
    #[error(
        "the ResourceSlice of this node is not deleted yet, so the scheduler may still assign GPUs \
         of the node; try again"
    )]
    Offered,
    /// The files of the claims cannot be read, so it is unknown whether claims are in use.
    #[error(transparent)]
    Files(#[from] FileError),
}

/// Maximum number of claims that an error names.
const MAX_NAMED: usize = 5;

/// Handle by which the node agent controls the DRA driver.
pub struct DraControl {
    files: ClaimFiles,
    demand: watch::Sender<SliceDemand>,
    withdrawn: watch::Receiver<bool>,
    problem: watch::Receiver<Option<String>>,
}

impl DraControl {
    /// Sets whether the driver offers the node's GPUs to the scheduler or withdraws them.
    pub fn demand(&self, demand: SliceDemand) {
        self.demand.send_if_modified(|known| std::mem::replace(known, demand) != demand);
    }

    /// Returns the reason why the kubelet does not use the driver. `None`: the kubelet uses it, or
    /// this is not known yet.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        self.problem.borrow().clone()
    }

    /// Checks that the driver can be removed from the node: no claim is in use, and the
    /// ResourceSlice is withdrawn. Waits for the withdrawal for at most `WITHDRAWAL_TIMEOUT`. After
    /// a success, the scheduler places no more pods on this node because of a claim.
    ///
    /// # Errors
    /// [`InUseError`]: a claim is in use, the ResourceSlice is not deleted yet, or the files of the
    /// claims cannot be read.
    pub async fn may_go(&self) -> Result<(), InUseError> {
        self.no_claim_is_held()?;
        let mut withdrawn = self.withdrawn.clone();
        let waited = tokio::time::timeout(WITHDRAWAL_TIMEOUT, withdrawn.wait_for(|gone| *gone));
        if !matches!(waited.await, Ok(Ok(_))) {
            return Err(InUseError::Offered);
        }
        // A pod that was placed before the withdrawal can have started meanwhile.
        self.no_claim_is_held()
    }

    fn no_claim_is_held(&self) -> Result<(), InUseError> {
        let held = self.files.held()?;
        if held.is_empty() {
            return Ok(());
        }
        let named: Vec<&str> = held.values().take(MAX_NAMED).map(String::as_str).collect();
        let more = if held.len() > MAX_NAMED { ", …" } else { "" };
        let names = named.join(", ") + more;
        Err(InUseError::Claims { count: held.len(), names })
    }
}

/// The driver, which serves the kubelet and publishes the slice.
pub struct DraDriver {
    publisher: SlicePublisher,
    service: PluginService,
    sockets: DriverSockets,
    registration: watch::Sender<Registration>,
    problem: watch::Sender<Option<String>>,
}

impl DraDriver {
    /// Prepares the driver. `conditions` has the conditions of the GPUs. `None`: the options do not
    /// enable the driver.
    #[must_use]
    pub fn new(
        options: &DraOptions,
        places: &HostPaths,
        client: &Client,
        node: &str,
        conditions: watch::Receiver<Option<GpuConditions>>,
    ) -> Option<(DraDriver, DraControl)> {
        if !options.dra {
            return None;
        }
        let policy_dir = places.run_dir.join(paths::CLAIMS_DIR);
        let files = ClaimFiles {
            cdi_dir: places.on_host(&options.cdi_dir),
            policy_dir: places.on_host(&policy_dir),
            policy_dir_on_node: policy_dir,
        };
        let (registration, registered) = watch::channel(Registration::default());
        let (demand, demanded) = watch::channel(SliceDemand::default());
        let (gpus, gpus_read) = watch::channel(NodeGpus::default());
        let (health, record) = watch::channel(HealthRecord::default());
        let (withdrawn_sender, withdrawn) = watch::channel(false);
        let (problem_sender, problem) = watch::channel(None);
        let lookup = options.lookup(places);
        let publisher = SlicePublisher {
            client: client.clone(),
            node: node.to_owned(),
            reader: GpuReader::new(places.clone()),
            factor: options.factor,
            demand: demanded,
            registration: registered,
            gpus,
            health,
            conditions,
            withdrawn: withdrawn_sender,
            altered: None,
            gpu_count: 0,
            failures: 0,
        };
        let driver = DraDriver {
            publisher,
            service: PluginService {
                preparer: ClaimPreparer::new(
                    client.clone(),
                    node,
                    files.clone(),
                    lookup,
                    gpus_read,
                    options.limit_memory,
                ),
                health: HealthSource { pool: node.to_owned(), record },
            },
            sockets: DriverSockets::new(&options.kubelet_dir, places),
            registration,
            problem: problem_sender,
        };
        Some((driver, DraControl { files, demand, withdrawn, problem }))
    }

    /// Serves the kubelet until the future is dropped, which removes the sockets. After an error,
    /// the driver logs the error and starts again, because the agent has other tasks and must
    /// continue.
    pub async fn run(self) {
        let serving = async {
            let mut said = None;
            loop {
                let served =
                    self.sockets.serve(&self.service, &self.registration, &self.problem).await;
                let why = match served {
                    Ok(()) => "the gRPC server at the driver's sockets ended".to_owned(),
                    Err(error) => error_chain::chain(&error),
                };
                if said.replace(why.clone()).as_ref() != Some(&why) {
                    tracing::error!("DRA driver {DRIVER}: stopped, and is started again: {why}");
                }
                self.problem.send_replace(Some(why));
                // The kubelet does not use sockets that are gone.
                self.registration.send_replace(Registration::Pending);
                tokio::time::sleep(RESTART_INTERVAL).await;
            }
        };
        tokio::join!(serving, self.publisher.run());
    }
}
