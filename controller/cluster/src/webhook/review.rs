//! The API server's question and our answer, `admission.k8s.io/v1`.
//!
//! Every question that can be read is answered with `allowed`: nothing here is a reason why a pod
//! should not be created.

use k8s_openapi::api::{core::v1::Pod, node::v1::RuntimeClass};
use kube::core::admission::{AdmissionRequest, AdmissionResponse, AdmissionReview, Operation};

use super::{
    decide::{AdmissionDecision, ClaimName, Claims, LeftAlone, decide},
    rules::NamespaceRules,
};

/// Characters of a warning that the API server shows whole.
const WARNING_CHARS: usize = 250;

/// Why a question is not answered.
#[derive(Debug, thiserror::Error)]
pub enum ReviewError {
    /// Not what an API server sends.
    #[error(
        "this is no AdmissionReview of a pod; the rules of the MutatingWebhookConfiguration must name the operation CREATE of pods, version v1, alone"
    )]
    Unreadable(#[source] serde_json::Error),
    /// A review that is an answer, or of a version that has no v1.
    #[error(
        "the AdmissionReview has no request of admission.k8s.io/v1; set admissionReviewVersions: [\"v1\"] in the MutatingWebhookConfiguration"
    )]
    NoRequest,
    /// Answers are always JSON: this does not happen.
    #[error("the answer cannot be written")]
    Unwritable(#[source] serde_json::Error),
}

/// A question.
#[derive(Debug)]
pub struct AdmissionQuestion(AdmissionRequest<Pod>);

impl AdmissionQuestion {
    /// Reads a body.
    ///
    /// # Errors
    /// [`ReviewError`].
    pub fn read(body: &[u8]) -> Result<AdmissionQuestion, ReviewError> {
        let review: AdmissionReview<Pod> =
            serde_json::from_slice(body).map_err(ReviewError::Unreadable)?;
        if review.types.api_version != "admission.k8s.io/v1" {
            return Err(ReviewError::NoRequest);
        }
        review.try_into().map(AdmissionQuestion).map_err(|_| ReviewError::NoRequest)
    }

    /// The namespace that the pod is created in.
    #[must_use]
    pub fn namespace(&self) -> &str {
        self.0.namespace.as_deref().unwrap_or_default()
    }

    /// What a person calls the pod.
    #[must_use]
    pub fn pod(&self) -> String {
        let meta = self.0.object.as_ref().map(|pod| &pod.metadata);
        let name = meta.and_then(|m| m.name.clone()).filter(|name| !name.is_empty());
        let beginning = || meta.and_then(|m| m.generate_name.as_ref()).map(|g| format!("{g}*"));
        format!("{}/{}", self.namespace(), name.or_else(beginning).unwrap_or_default())
    }

    /// What becomes of it.
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

    /// The answer, as JSON. Claims that are still to be read count as unreadable.
    ///
    /// # Errors
    /// [`ReviewError::Unwritable`].
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
                    "affinode: the pod does not get the runtime class {}: {left}",
                    rules.runtime_class
                );
                response.warnings = Some(vec![text.chars().take(WARNING_CHARS).collect()]);
            }
        }
        serde_json::to_vec(&response.into_review()).map_err(ReviewError::Unwritable)
    }
}

/// What is to be read before a decision.
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
        fn brackets_without_end_are_an_error_and_no_overflow(depth in 1_usize..200_000, object: bool) {
            let bracket = if object { "{\"a\":" } else { "[" };
            let body = format!(
                r#"{{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{}"#,
                bracket.repeat(depth)
            );
            prop_assert!(AdmissionQuestion::read(body.as_bytes()).is_err());
        }
    }
}
