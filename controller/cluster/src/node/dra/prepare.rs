//! Prepares claims for the containers of this node, and reverts their preparation.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use affinode_controller::inventory::gpu_facts::NodeGpus;
use affinode_proto::{
    annotations::{CLAIM, CLAIMED_VRAM},
    paths,
};
use futures_util::future;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::{Api, Client};
use tokio::{sync::watch, time::Instant};

use super::{
    allocation::{AllocatedGpu, AllocationError, allocated},
    cdi::{ClaimDevice, ClaimName, ClaimSpec, UidError, device_name},
    cdi_lookup::{CdiLookup, GpuNames, LookupError},
    claim_files::{ClaimFiles, FileError},
    messages::{ClaimReference, PreparedClaim, PreparedDevice, UnpreparedClaim},
    slice,
};
use crate::error_chain::{self, ApiError};

/// Time limit for reading the claims of a call. It is shorter than the kubelet's limit of 45 s for a call.
const READ_TIMEOUT: Duration = Duration::from_secs(15);

/// Reason why a claim could not be prepared, or why its preparation could not be reverted.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// The UID in the kubelet's request is not valid.
    #[error(transparent)]
    Uid(#[from] UidError),
    /// The API server did not return the claim.
    #[error("cannot read ResourceClaim {claim}")]
    Read {
        /// `namespace/name` of the claim.
        claim: String,
        /// Error of the request.
        #[source]
        source: ApiError,
    },
    /// The API server did not reply in time.
    #[error("cannot read ResourceClaim {0} within {READ_TIMEOUT:?}; the kubelet tries again")]
    Late(String),
    /// The kubelet reverted the preparation while the driver still read the claim.
    #[error(
        "claim {0}: the kubelet called NodeUnprepareResources before the preparation was complete"
    )]
    Reverted(String),
    /// The claim is not for this node, or is invalid.
    #[error(transparent)]
    Allocation(#[from] AllocationError),
    /// The node has no CDI device for the GPU.
    #[error(transparent)]
    Lookup(#[from] LookupError),
    /// A file of the claim cannot be written or removed.
    #[error(transparent)]
    File(#[from] FileError),
}

/// Prepares claims for containers of this node.
pub struct ClaimPreparer {
    client: Client,
    node: String,
    files: ClaimFiles,
    lookup: CdiLookup,
    /// The GPUs of the node, as the publisher read them last.
    gpus: watch::Receiver<NodeGpus>,
    /// Whether the VRAM of a claim's containers is limited to the memory of the claim.
    limit_memory: bool,
    /// Lock that is held while files of claims are changed.
    turn: Mutex<()>,
}

impl ClaimPreparer {
    /// Returns a preparer for the node of this name.
    #[must_use]
    pub fn new(
        client: Client,
        node: &str,
        files: ClaimFiles,
        lookup: CdiLookup,
        gpus: watch::Receiver<NodeGpus>,
        limit_memory: bool,
    ) -> Arc<ClaimPreparer> {
        let node = node.to_owned();
        let turn = Mutex::new(());
        Arc::new(ClaimPreparer { client, node, files, lookup, gpus, limit_memory, turn })
    }

    /// Prepares each claim. For a claim that is already prepared, the result is the same as before.
    pub async fn prepare(&self, claims: Vec<ClaimReference>) -> HashMap<String, PreparedClaim> {
        let deadline = Instant::now() + READ_TIMEOUT;
        let prepared = claims.into_iter().map(async |claim| {
            let result = match self.prepare_one(&claim, deadline).await {
                Ok(devices) => PreparedClaim { devices, error: String::new() },
                Err(error) => {
                    let error = error_chain::chain(&error);
                    tracing::warn!("claim {}: cannot prepare it: {error}", shown(&claim));
                    PreparedClaim { devices: Vec::new(), error }
                }
            };
            (claim.uid, result)
        });
        future::join_all(prepared).await.into_iter().collect()
    }

    async fn prepare_one(
        &self,
        claim: &ClaimReference,
        deadline: Instant,
    ) -> Result<Vec<PreparedDevice>, ClaimError> {
        let name = ClaimName {
            namespace: claim.namespace.clone(),
            name: claim.name.clone(),
            uid: claim.uid.parse()?,
        };
        self.change_files(|files| files.record_request(&name))?;
        // The API server can be slow, so the files of other claims can be changed meanwhile.
        let (read, ()) =
            future::join(self.read(&name, deadline), self.gpus_are_read(deadline)).await;
        self.change_files(|files| {
            if !files.is_requested(&name.uid) {
                return Err(ClaimError::Reverted(shown(claim)));
            }
            let spec = match read {
                Ok(found) => self.spec(&name, &found)?,
                // A container keeps its devices although the claim cannot be read now.
                Err(error) => {
                    let spec = files.spec(&name.uid).ok_or(error)?;
                    tracing::info!(
                        "claim {}: cannot be read now, so the kubelet gets the devices of the \
                         earlier preparation",
                        shown(claim)
                    );
                    spec
                }
            };
            files.write_spec(&name.uid, &spec)?;
            tracing::info!("claim {}: prepared", shown(claim));
            Ok(spec.prepared())
        })
    }

    /// Creates the CDI specification of a claim, from the claim's object as the API server returned
    /// it.
    fn spec(&self, name: &ClaimName, claim: &ResourceClaim) -> Result<ClaimSpec, ClaimError> {
        let gpus = allocated(claim, &name.uid.to_string(), &self.node)?;
        let devices = gpus.iter().enumerate().map(|(number, gpu)| self.device(name, number, gpu));
        match devices.collect::<Result<Vec<_>, _>>() {
            Ok(devices) => Ok(ClaimSpec::new(name, &devices)),
            // NVIDIA's specification can be missing for a moment, while it is made again.
            Err(error @ ClaimError::Lookup(_)) => {
                self.files.spec(&name.uid).filter(|spec| spec.is_for(&gpus)).ok_or(error)
            }
            Err(error) => Err(error),
        }
    }

    async fn read(&self, name: &ClaimName, deadline: Instant) -> Result<ResourceClaim, ClaimError> {
        let claim = format!("{}/{}", name.namespace, name.name);
        let api: Api<ResourceClaim> = Api::namespaced(self.client.clone(), &name.namespace);
        match tokio::time::timeout_at(deadline, api.get(&name.name)).await {
            Ok(Ok(found)) => Ok(found),
            Ok(Err(error)) => Err(ClaimError::Read { claim, source: ApiError(error) }),
            Err(_) => Err(ClaimError::Late(claim)),
        }
    }

    /// Waits for the first reading of the GPUs. Without the reading, the number of a GPU in NVIDIA's
    /// specification is unknown. A kubelet can ask for claims as soon as it has registered a new
    /// agent, which is before this reading.
    async fn gpus_are_read(&self, deadline: Instant) {
        let mut gpus = self.gpus.clone();
        let is_read = gpus.wait_for(|node| !node.gpus.is_empty());
        // After the deadline, the GPU can still be found by its UUID.
        let _ = tokio::time::timeout_at(deadline, is_read).await;
    }

    /// Runs a change of the files. Only one change runs at a time.
    fn change_files<T>(&self, change: impl FnOnce(&ClaimFiles) -> T) -> T {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        change(&self.files)
    }

    fn device(
        &self,
        name: &ClaimName,
        number: usize,
        allocated: &AllocatedGpu,
    ) -> Result<ClaimDevice, ClaimError> {
        let index = self.index(&allocated.device);
        let gpu = self.lookup.find(&GpuNames { device: allocated.device.clone(), index })?;
        let mut policy = allocated.policy.clone();
        if let Some(bytes) = allocated.memory_bytes.filter(|_| self.limit_memory) {
            policy.insert(CLAIMED_VRAM.to_owned(), format!("{}={bytes}", allocated.device));
        }
        // The shim trusts this file, and not the container's environment, for the claim's name.
        policy.insert(CLAIM.to_owned(), format!("{}/{}", name.namespace, name.name));
        let file = self.files.write_policy(&name.uid, number, &policy)?;
        let inside = format!("{}/{}", paths::CONTAINER_CLAIMS_DIR, device_name(&name.uid, number));
        let policy_file = Some([file.display().to_string(), inside]);
        Ok(ClaimDevice { allocated: allocated.clone(), gpu, policy_file })
    }

    /// Returns NVML's index of a GPU. `None`: the GPUs were not read yet, or the device is not
    /// among them.
    fn index(&self, device: &str) -> Option<u32> {
        let node = self.gpus.borrow();
        let found = node.gpus.iter().find(|gpu| slice::device_name(&gpu.uuid) == device);
        found.map(|gpu| gpu.index)
    }

    /// Reverts the preparation of each claim. A claim that is not prepared is not an error. The
    /// object of the claim is not read, because it may be deleted already.
    #[must_use]
    pub fn unprepare(&self, claims: Vec<ClaimReference>) -> HashMap<String, UnpreparedClaim> {
        let mut results = HashMap::new();
        for claim in claims {
            let removed = claim
                .uid
                .parse()
                .map_err(ClaimError::from)
                .and_then(|uid| Ok(self.change_files(|files| files.remove(&uid))?));
            let error = match removed {
                Ok(()) => {
                    tracing::info!("claim {}: unprepared", shown(&claim));
                    String::new()
                }
                Err(error) => {
                    let error = error_chain::chain(&error);
                    tracing::warn!("claim {}: cannot unprepare it: {error}", shown(&claim));
                    error
                }
            };
            results.insert(claim.uid, UnpreparedClaim { error });
        }
        results
    }
}

fn shown(claim: &ClaimReference) -> String {
    format!("{}/{} ({})", claim.namespace, claim.name, claim.uid)
}
