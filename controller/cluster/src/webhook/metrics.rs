//! Metrics of the webhook: the number of decisions of each kind, and the duration of replies to API
//! servers.

use std::{fmt, time::Duration};

use prometheus_client::{
    encoding::{EncodeLabelSet, text::encode},
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Registry, Unit},
};

use super::decide::AdmissionDecision;

/// Upper bounds of the histogram's buckets, in seconds.
const BUCKETS: [f64; 8] = [0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0, 2.5];

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct DecisionLabels {
    decision: &'static str,
}

/// The metrics of this replica.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    decisions: Family<DecisionLabels, Counter>,
    refused: Counter,
    took: Histogram,
    not_after: Gauge,
}

impl Default for Metrics {
    fn default() -> Metrics {
        let decisions = Family::<DecisionLabels, Counter>::default();
        let (refused, not_after) = (Counter::default(), Gauge::default());
        let took = Histogram::new(BUCKETS);
        let mut registry = Registry::with_prefix("affinode_webhook");
        let help = "Pods reviewed by the admission webhook, by decision";
        registry.register("decisions", help, decisions.clone());
        let help = "Requests rejected because they contain no valid admission review";
        registry.register("refused_requests", help, refused.clone());
        let help = "Time in seconds from an admission request to its reply";
        registry.register_with_unit("answer", help, Unit::Seconds, took.clone());
        let help = "End of the served TLS certificate's validity, in Unix time";
        registry.register_with_unit(
            "certificate_not_after_timestamp",
            help,
            Unit::Seconds,
            not_after.clone(),
        );
        Metrics { registry, decisions, refused, took, not_after }
    }
}

impl Metrics {
    /// Counts a decision about a pod.
    pub fn decided(&self, outcome: &DecisionOutcome) {
        self.decisions.get_or_create(&DecisionLabels { decision: outcome.word }).inc();
    }

    /// Counts a rejected request.
    pub fn refused(&self) {
        self.refused.inc();
    }

    /// Records how long a reply took.
    pub fn took(&self, time: Duration) {
        self.took.observe(time.as_secs_f64());
    }

    /// Returns all metrics in OpenMetrics text.
    ///
    /// # Errors
    /// In practice there is no error, because the text is written to memory.
    pub fn text(&self, not_after_seconds: Option<i64>) -> Result<String, fmt::Error> {
        self.not_after.set(not_after_seconds.unwrap_or_default());
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

/// Outcome of a review, as metrics and logs show it.
#[derive(Clone, Debug)]
pub struct DecisionOutcome {
    word: &'static str,
    text: String,
}

impl DecisionOutcome {
    /// Converts a decision to an outcome.
    #[must_use]
    pub fn of(decision: &AdmissionDecision) -> DecisionOutcome {
        match decision {
            AdmissionDecision::Inject { because, .. } => {
                DecisionOutcome { word: "injected", text: format!("the pod requests {because}") }
            }
            AdmissionDecision::Leave(left) => {
                DecisionOutcome { word: left.word(), text: left.to_string() }
            }
            AdmissionDecision::Ask(_) => DecisionOutcome {
                word: "claim-unknown",
                text: "the pod's claims have not been read yet".into(),
            },
        }
    }

    /// Returns the word of the outcome for metrics and logs. It is `injected`, or the word of the
    /// reason why the class was not set. The words do not change between versions.
    #[must_use]
    pub fn word(&self) -> &'static str {
        self.word
    }
}

impl fmt::Display for DecisionOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}
