//! Parses the API server's request and creates the webhook's reply, `admission.k8s.io/v1`.
//!
//! Each request that can be parsed gets the reply `allowed`: the webhook never prevents the
//! creation of a pod.

use k8s_openapi::api::{core::v1::Pod, node::v1::RuntimeClass};
use kube::core::admission::{AdmissionRequest, AdmissionResponse, AdmissionReview, Operation};

use super::{
    decide::{AdmissionDecision, ClaimName, Claims, LeftAlone, decide},
    rules::NamespaceRules,
};

/// Maximum length of a warning, in characters. The API server truncates longer warnings.
const WARNING_CHARS: usize = 250;

/// Reason why a request cannot be reviewed.
#[derive(Debug, thiserror::Error)]
pub enum ReviewError {
    /// The body is not an AdmissionReview of a pod.
    #[error(
        "cannot parse the request as an AdmissionReview of a pod; the rules of the \
         MutatingWebhookConfiguration must contain only the operation CREATE on pods of version v1"
    )]
    Unreadable(#[source] serde_json::Error),
    /// The review contains no request, or has a version before v1.
    #[error(
        "the AdmissionReview has no request of admission.k8s.io/v1; set admissionReviewVersions: [\"v1\"] in the MutatingWebhookConfiguration"
    )]
    NoRequest,
    /// The reply could not be encoded as JSON. This does not occur in practice.
    #[error("cannot encode the reply")]
    Unwritable(#[source] serde_json::Error),
}

/// A request of the API server to review a pod.
#[derive(Debug)]
pub struct AdmissionQuestion(AdmissionRequest<Pod>);

impl AdmissionQuestion {
    /// Parses the body of a request.
    ///
    /// # Errors
    /// [`ReviewError`]: the body is not a review of a pod.
    pub fn read(body: &[u8]) -> Result<AdmissionQuestion, ReviewError> {
        let review: AdmissionReview<Pod> =
            serde_json::from_slice(body).map_err(ReviewError::Unreadable)?;
        if review.types.api_version != "admission.k8s.io/v1" {
            return Err(ReviewError::NoRequest);
        }
        review.try_into().map(AdmissionQuestion).map_err(|_| ReviewError::NoRequest)
    }

    /// Returns the namespace in which the pod is created.
    #[must_use]
    pub fn namespace(&self) -> &str {
        self.0.namespace.as_deref().unwrap_or_default()
    }

    /// Returns the namespace and name of the pod, or the prefix of its generated name.
    #[must_use]
    pub fn pod(&self) -> String {
        let meta = self.0.object.as_ref().map(|pod| &pod.metadata);
        let name = meta.and_then(|m| m.name.clone()).filter(|name| !name.is_empty());
        let beginning = || meta.and_then(|m| m.generate_name.as_ref()).map(|g| format!("{g}*"));
        format!("{}/{}", self.namespace(), name.or_else(beginning).unwrap_or_default())
    }

    /// Decides whether the pod gets the runtime class.
    #[must_use]
    pub fn decide(
        &self,
        rules: &NamespaceRules,
        class: Option<&RuntimeClass>,
        claims: &Claims,
    ) -> AdmissionDecision {
        let about_pods = self.0.resource.group.is_empty() && self.0.resource.resource == "pods";
        let whole = self.0.sub_resource.as_deref().unwrap_or_default().is_empty();
        let creates = self.0.operation == Operation::Create && about_pods && whole;
        match self.0.object.as_ref().filter(|_| creates) {
            Some(pod) => decide(pod, self.namespace(), rules, class, claims),
            None => AdmissionDecision::Leave(LeftAlone::NotACreation),
        }
    }

    /// Returns the reply to the API server as JSON. If the decision names claims that must still be
    /// read, the claims count as unreadable and the pod is not changed.
    ///
    /// # Errors
    /// [`ReviewError::Unwritable`]: the reply could not be encoded.
    pub fn answer(
        &self,
        decision: AdmissionDecision,
        rules: &NamespaceRules,
    ) -> Result<Vec<u8>, ReviewError> {
        let mut response = AdmissionResponse::from(&self.0);
        let left = match decision {
            AdmissionDecision::Inject { patch, because } => {
                response.audit_annotations.insert("decision".into(), "injected".into());
                response.audit_annotations.insert("because".into(), because);
                response = response
                    .with_patch(patch)
                    .map_err(|e| ReviewError::Unwritable(serde::ser::Error::custom(e)))?;
                None
            }
            AdmissionDecision::Leave(left) => Some(left),
            AdmissionDecision::Ask(claims) => claims.into_iter().next().map(LeftAlone::Claim),
        };
        if let Some(left) = left {
            response.audit_annotations.insert("decision".into(), left.word().into());
            if left.warns() {
                let text = format!(
                    "affinode: the pod is created without the runtime class {}: {left}",
                    rules.runtime_class
                );
                response.warnings = Some(vec![text.chars().take(WARNING_CHARS).collect()]);
            }
        }
        serde_json::to_vec(&response.into_review()).map_err(ReviewError::Unwritable)
    }
}

/// Returns the claims that must be read before a decision.
pub fn asked(decision: &AdmissionDecision) -> impl Iterator<Item = &ClaimName> {
    match decision {
        AdmissionDecision::Ask(claims) => Some(claims),
        _ => None,
    }
    .into_iter()
    .flatten()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn bytes_of_any_kind_are_an_error_and_no_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            prop_assert!(AdmissionQuestion::read(&bytes).is_err());
        }

        #[test]
        fn endless_brackets_are_an_error(depth in 1_usize..200_000, object: bool) {
            let bracket = if object { "{\"a\":" } else { "[" };
            let body = format!(
                r#"{{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{}"#,
                bracket.repeat(depth)
            );
            prop_assert!(AdmissionQuestion::read(body.as_bytes()).is_err());
        }
    }
}
