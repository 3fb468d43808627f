//! What is counted: decisions by their word, and the time that API servers waited for us.

use std::{fmt, time::Duration};

use prometheus_client::{
    encoding::{EncodeLabelSet, text::encode},
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Registry, Unit},
};

use super::decide::AdmissionDecision;

/// Seconds up to which answers are counted together.
const BUCKETS: [f64; 8] = [0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0, 2.5];

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct DecisionLabels {
    decision: &'static str,
}

/// The figures of this replica.
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
        let help = "Pods that were looked at, by what came of it";
        registry.register("decisions", help, decisions.clone());
        let help = "Requests that were no review that can be answered";
        registry.register("refused_requests", help, refused.clone());
        let help = "How long API servers waited for an answer";
        registry.register_with_unit("answer", help, Unit::Seconds, took.clone());
        let help = "When the certificate ends that is shown, in Unix time";
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
    /// A pod was looked at.
    pub fn decided(&self, outcome: &DecisionOutcome) {
        self.decisions.get_or_create(&DecisionLabels { decision: outcome.word }).inc();
    }

    /// A request was turned away.
    pub fn refused(&self) {
        self.refused.inc();
    }

    /// A request was answered.
    pub fn took(&self, time: Duration) {
        self.took.observe(time.as_secs_f64());
    }

    /// All of it, as OpenMetrics.
    ///
    /// # Errors
    /// Never: it is written to memory.
    pub fn text(&self, not_after_seconds: Option<i64>) -> Result<String, fmt::Error> {
        self.not_after.set(not_after_seconds.unwrap_or_default());
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

/// What came of a question.
#[derive(Clone, Debug)]
pub struct DecisionOutcome {
    word: &'static str,
    text: String,
}

impl DecisionOutcome {
    /// Of a decision.
    #[must_use]
    pub fn of(decision: &AdmissionDecision) -> DecisionOutcome {
        match decision {
            AdmissionDecision::Inject { because, .. } => {
                DecisionOutcome { word: "injected", text: format!("it asks for {because}") }
            }
            AdmissionDecision::Leave(left) => {
                DecisionOutcome { word: left.word(), text: left.to_string() }
            }
            AdmissionDecision::Ask(_) => {
                DecisionOutcome { word: "claim-unknown", text: "its claims are not read".into() }
            }
        }
    }

    /// A word: `injected`, or why not.
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
