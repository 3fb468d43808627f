//! The webhook's access to the cluster. It watches the RuntimeClass, and reads a resource claim
//! only if a pod names the claim.

use std::{sync::Arc, time::Duration};

use futures_util::{FutureExt, StreamExt};
use k8s_openapi::api::{
    node::v1::RuntimeClass,
    resource::v1::{DeviceClaim, ResourceClaim, ResourceClaimTemplate},
};
use kube::{
    Api, Client,
    runtime::{
        WatchStreamExt,
        reflector::{self, ObjectRef, Store},
        watcher,
    },
};

use tokio::time::Instant;

use super::decide::{ClaimName, Claims};
use crate::error_chain::{self, ApiError};

/// Maximum number of claims that are read for one pod. The Kubernetes API has the same limit.
const CLAIMS: usize = 32;
/// Time limit for reading all claims of a pod. The API server waits during this time. It is below the
/// `timeoutSeconds` of the MutatingWebhookConfiguration, so that the reply still arrives in time.
const TIME: Duration = Duration::from_millis(1750);
/// Time for which a claim or template that does not exist is read again. A manifest can have it
/// after the pod.
const APPEARANCE_TIMEOUT: Duration = Duration::from_millis(1500);
/// Pause before a claim or template that does not exist is read again.
const REREAD_INTERVAL: Duration = Duration::from_millis(150);

/// What the webhook knows of the cluster. It watches the RuntimeClass and requests claims one by
/// one.
#[derive(Clone)]
pub struct ClusterState {
    client: Client,
    name: String,
    class: Store<RuntimeClass>,
}

impl ClusterState {
    /// Starts to watch the RuntimeClass of this name. The watch runs until the async runtime ends.
    #[must_use]
    pub fn watch(client: Client, name: &str) -> ClusterState {
        let (class, writer) = reflector::store();
        let only = watcher::Config::default().fields(&format!("metadata.name={name}"));
        let events = watcher(Api::all(client.clone()), only).default_backoff();
        tokio::spawn(reflector::reflector(writer, events).for_each(|event| async {
            if let Err(error) = event {
                tracing::warn!(
                    "RuntimeClass: the watch failed, and is started again: {}",
                    error_chain::chain(&error)
                );
            }
        }));
        ClusterState { client, name: name.to_owned(), class }
    }

    /// Returns whether the watch has received its first list, so that the RuntimeClass is known.
    #[must_use]
    pub fn is_known(&self) -> bool {
        self.class.wait_until_ready().now_or_never().is_some_and(|known| known.is_ok())
    }

    /// Returns the RuntimeClass as the watch received it last. `None`: the class does not exist.
    #[must_use]
    pub fn class(&self) -> Option<Arc<RuntimeClass>> {
        self.class.get(&ObjectRef::new(&self.name))
    }

    /// Reads these claims and returns the device classes of each. Waits a short time for those that do
    /// not exist yet.
    pub async fn claims(&self, namespace: &str, names: Vec<ClaimName>) -> Claims {
        let mut claims: Claims = names.iter().map(|name| (name.clone(), None)).collect();
        let read = async {
            let began = Instant::now();
            let mut left: Vec<ClaimName> = names.into_iter().take(CLAIMS).collect();
            loop {
                let mut missing = Vec::new();
                for name in left {
                    match self.claim(namespace, &name).await {
                        Ok(devices) => {
                            claims.insert(name, Some(classes(devices)));
                        }
                        Err(kube::Error::Api(status))
                            if status.code == 404 && began.elapsed() < APPEARANCE_TIMEOUT =>
                        {
                            missing.push(name);
                        }
                        Err(error) => {
                            let error = ApiError(error);
                            tracing::warn!(
                                "{name} of namespace {namespace}: cannot read this object: {error}"
                            );
                        }
                    }
                }
                if missing.is_empty() {
                    break;
                }
                left = missing;
                tokio::time::sleep(REREAD_INTERVAL).await;
            }
        };
        if tokio::time::timeout(TIME, read).await.is_err() {
            tracing::warn!(
                "namespace {namespace}: cannot read ResourceClaims and templates within {TIME:?}"
            );
        }
        claims
    }

    async fn claim(
        &self,
        namespace: &str,
        name: &ClaimName,
    ) -> Result<Option<DeviceClaim>, kube::Error> {
        Ok(match name {
            ClaimName::Claim(name) => {
                let api: Api<ResourceClaim> = Api::namespaced(self.client.clone(), namespace);
                api.get(name).await?.spec.and_then(|spec| spec.devices)
            }
            ClaimName::Template(name) => {
                let api: Api<ResourceClaimTemplate> =
                    Api::namespaced(self.client.clone(), namespace);
                let template = api.get(name).await?.spec;
                template.and_then(|template| template.spec).and_then(|spec| spec.devices)
            }
        })
    }
}

/// Returns the device classes that can fulfil a claim. A request with admin access is left out,
/// because it only monitors a device of other claims and has no memory that could be offloaded.
fn classes(devices: Option<DeviceClaim>) -> Vec<String> {
    let requests = devices.into_iter().flat_map(|devices| devices.requests).flatten();
    requests
        .flat_map(|request| {
            let exactly = request.exactly.filter(|exactly| exactly.admin_access != Some(true));
            let any = request.first_available.into_iter().flatten();
            let any = any.map(|request| request.device_class_name);
            any.chain(exactly.map(|exactly| exactly.device_class_name)).collect::<Vec<_>>()
        })
        .collect()
}

#[cfg(test)]
mod tests;
