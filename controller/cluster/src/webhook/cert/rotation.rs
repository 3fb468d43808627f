//! Rotates the webhook's certificate in rounds. Each round reads the Secret and the
//! MutatingWebhookConfiguration, and executes the steps that are due.

use std::{future::Future, sync::Arc, time::Duration};

use clap::Args;
use k8s_openapi::{
    ByteString,
    api::{admissionregistration::v1::MutatingWebhookConfiguration, core::v1::Secret},
};
use kube::{
    Api, Client,
    api::{ObjectMeta, PostParams},
};
use time::OffsetDateTime;

use super::{
    ca::{IssueError, IssuedCertificate},
    plan::{RotationStep, next},
};
use crate::{
    error_chain::{self, ApiError},
    https::tls::{ServedCertificate, TlsError},
};

/// Interval between two rounds of the rotation. Each round makes two small read requests.
const ROUND: Duration = Duration::from_secs(30);
/// Pause after an error, or after a write was rejected because another replica wrote first.
const AGAIN: Duration = Duration::from_secs(3);
/// Maximum number of steps in one round. A step is repeated if another replica wrote first, so this
/// limit is higher than the number of different steps.
const STEPS: usize = 6;

/// Names of the objects for the webhook's own certificate: the Service, the Secret, and the
/// MutatingWebhookConfiguration into which the authority is written.
#[derive(Args, Clone, Debug)]
pub struct CertificatePaths {
    /// Without --tls-cert-file: the Service by whose name API servers call the webhook.
    #[arg(long, value_name = "NAME", default_value = "affinode-webhook", env = "AFFINODE_SERVICE")]
    pub service: String,
    /// Without --tls-cert-file: the Secret that stores the certificate.
    #[arg(
        long,
        value_name = "NAME",
        default_value = "affinode-webhook-tls",
        env = "AFFINODE_SECRET"
    )]
    pub secret: String,
    /// Without --tls-cert-file: the MutatingWebhookConfiguration into which the authority is
    /// written.
    #[arg(
        long,
        value_name = "NAME",
        default_value = "affinode-webhook",
        env = "AFFINODE_WEBHOOK_CONFIGURATION"
    )]
    pub webhook_configuration: String,
    /// Without --tls-cert-file: the namespace of the Service and the Secret. Default: the pod's own
    /// namespace.
    #[arg(long, value_name = "NAME", env = "AFFINODE_NAMESPACE")]
    pub namespace: Option<String>,
}

/// Reason why a round of the certificate's rotation failed.
#[derive(Debug, thiserror::Error)]
pub enum RotationError {
    /// A request for the Secret failed.
    #[error(
        "cannot {action} Secret {name} of namespace {namespace}; the service account needs the \
         verbs get and update for it, and create if it does not exist"
    )]
    Secret {
        /// Verb of the failed request.
        action: &'static str,
        /// Name of the Secret.
        name: String,
        /// Namespace of the Secret.
        namespace: String,
        /// Error of the API server.
        #[source]
        source: Box<ApiError>,
    },
    /// A request for the MutatingWebhookConfiguration failed.
    #[error(
        "cannot {action} MutatingWebhookConfiguration {name}; it must exist, and the service \
         account needs the verbs get and update for it"
    )]
    Configuration {
        /// Verb of the failed request.
        action: &'static str,
        /// Name of the MutatingWebhookConfiguration.
        name: String,
        /// Error of the API server.
        #[source]
        source: Box<ApiError>,
    },
    /// A key or certificate could not be created.
    #[error(transparent)]
    Issue(#[from] IssueError),
    /// The server could not present the new certificate with its key.
    #[error(transparent)]
    Show(#[from] TlsError),
    /// Another program wrote first in each attempt, so the certificate could not be stored.
    #[error(
        "cannot store the webhook's certificate: other programs changed the Secret or the MutatingWebhookConfiguration during each of {STEPS} attempts"
    )]
    Contended,
}

/// Rotates the certificate of one webhook.
pub struct CertificateRotation {
    secrets: Api<Secret>,
    configurations: Api<MutatingWebhookConfiguration>,
    places: CertificatePaths,
    namespace: String,
    names: Vec<String>,
    shown: Arc<ServedCertificate>,
}

impl CertificateRotation {
    /// Creates the rotation of a certificate. Its rounds make `shown` present the certificate that
    /// is stored in the Secret.
    #[must_use]
    pub fn new(
        client: Client,
        places: CertificatePaths,
        shown: Arc<ServedCertificate>,
    ) -> CertificateRotation {
        let namespace =
            places.namespace.clone().unwrap_or_else(|| client.default_namespace().to_owned());
        let host = format!("{}.{namespace}.svc", places.service);
        let names = vec![host.clone(), format!("{host}.cluster.local")];
        let secrets = Api::namespaced(client.clone(), &namespace);
        CertificateRotation {
            secrets,
            configurations: Api::all(client),
            places,
            namespace,
            names,
            shown,
        }
    }

    /// Runs rounds of the rotation until the async runtime ends.
    pub async fn keep(self) {
        loop {
            let pause = match self.round(OffsetDateTime::now_utc()).await {
                Ok(()) => ROUND,
                Err(error) => {
                    tracing::warn!("{}", error_chain::chain(&error));
                    AGAIN
                }
            };
            tokio::time::sleep(pause).await;
        }
    }

    /// Executes steps of the rotation until no step is due.
    ///
    /// # Errors
    /// [`RotationError`]: a step failed. The server keeps the earlier certificate.
    pub async fn round(&self, now: OffsetDateTime) -> Result<(), RotationError> {
        for _ in 0..STEPS {
            let secret = self.secrets.get_opt(&self.places.secret).await;
            let secret = secret.map_err(|e| self.secret("read", e))?;
            let papers = secret.as_ref().and_then(|s| IssuedCertificate::read(s.data.as_ref()?));
            let stored = papers.as_ref().and_then(|papers| papers.stored(&self.names));
            // The certificate is presented as soon as it is stored, because its authority may be
            // published already.
            if let Some(papers) =
                papers.as_ref().filter(|_| stored.is_some_and(|s| s.leaf_ends.is_some()))
                && self.shown.show(&papers.pair())?
            {
                tracing::info!(
                    "certificate: serving the certificate of Secret {}",
                    self.places.secret
                );
            }
            let configuration = match &papers {
                Some(_) => {
                    let read = self.configurations.get(&self.places.webhook_configuration).await;
                    Some(read.map_err(|e| self.configuration("read", e))?)
                }
                None => None,
            };
            let bundle = papers.as_ref().map(IssuedCertificate::bundle).unwrap_or_default();
            let published = configuration.as_ref().is_some_and(|c| has_bundle(c, &bundle));
            let step = next(stored.as_ref(), published, now);
            let fresh = match (step, papers) {
                (RotationStep::Rest, _) => return Ok(()),
                (RotationStep::Publish, _) => {
                    if let Some(configuration) = configuration {
                        self.publish(configuration, &bundle).await?;
                    }
                    continue;
                }
                (RotationStep::RenewAuthority, Some(papers)) => papers.with_new_authority(now)?,
                (RotationStep::RenewLeaf, Some(papers)) => {
                    papers.with_new_leaf(&self.names, now)?
                }
                (RotationStep::Make, _) | (_, None) => IssuedCertificate::make(&self.names, now)?,
            };
            self.store(secret, &fresh, step).await?;
        }
        Err(RotationError::Contended)
    }

    /// Writes the authorities and the certificate to the Secret. If another program has written the
    /// Secret first, the Secret stays as it is.
    async fn store(
        &self,
        before: Option<Secret>,
        papers: &IssuedCertificate,
        step: RotationStep,
    ) -> Result<(), RotationError> {
        let params = PostParams::default();
        let done = match before {
            Some(mut secret) => {
                secret.data = Some(papers.data());
                let written = self.secrets.replace(&self.places.secret, &params, &secret);
                taken(written).await.map_err(|e| self.secret("update", e))?
            }
            None => {
                let metadata = ObjectMeta {
                    name: Some(self.places.secret.clone()),
                    labels: Some([("app.kubernetes.io/name".into(), "affinode".into())].into()),
                    ..ObjectMeta::default()
                };
                let data = Some(papers.data());
                let secret = Secret { metadata, data, ..Secret::default() };
                let written = self.secrets.create(&params, &secret);
                taken(written).await.map_err(|e| self.secret("create", e))?
            }
        };
        if done {
            tracing::info!(
                ?step,
                "Secret {}: the webhook's certificate was written",
                self.places.secret
            );
        }
        Ok(())
    }

    /// Writes the authorities into each webhook of the configuration, unless another program wrote
    /// the configuration first.
    async fn publish(
        &self,
        mut configuration: MutatingWebhookConfiguration,
        bundle: &[u8],
    ) -> Result<(), RotationError> {
        for webhook in configuration.webhooks.iter_mut().flatten() {
            webhook.client_config.ca_bundle = Some(ByteString(bundle.to_vec()));
        }
        let (name, params) = (&self.places.webhook_configuration, PostParams::default());
        let written = self.configurations.replace(name, &params, &configuration);
        if taken(written).await.map_err(|e| self.configuration("update", e))? {
            tracing::info!(
                "MutatingWebhookConfiguration {name}: CA certificates written to caBundle"
            );
        }
        Ok(())
    }

    fn secret(&self, action: &'static str, source: kube::Error) -> RotationError {
        let (name, namespace) = (self.places.secret.clone(), self.namespace.clone());
        RotationError::Secret { action, name, namespace, source: Box::new(ApiError(source)) }
    }

    fn configuration(&self, action: &'static str, source: kube::Error) -> RotationError {
        let name = self.places.webhook_configuration.clone();
        RotationError::Configuration { action, name, source: Box::new(ApiError(source)) }
    }
}

/// Waits for a write and returns whether the API server accepted it. The result is false if another
/// program wrote first.
async fn taken<T>(
    write: impl Future<Output = Result<T, kube::Error>>,
) -> Result<bool, kube::Error> {
    match write.await {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
        Err(error) => Err(error),
    }
}

fn has_bundle(configuration: &MutatingWebhookConfiguration, bundle: &[u8]) -> bool {
    let mut webhooks = configuration.webhooks.iter().flatten();
    webhooks.all(|w| w.client_config.ca_bundle.as_ref().is_some_and(|held| held.0 == bundle))
}

#[cfg(test)]
mod tests;
