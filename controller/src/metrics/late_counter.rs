//! A counter for a number that the controller reads after its start.

use std::{
    fmt,
    sync::{Arc, OnceLock},
};

use prometheus_client::{
    encoding::{EncodeMetric, MetricEncoder, NoLabelSet},
    metrics::MetricType,
};

/// A counter whose value becomes known some time after the start, and then stays. It has no series
/// before, because Prometheus would see a jump from 0 as that many new restarts.
#[derive(Clone, Debug, Default)]
pub struct LateCounter(Arc<OnceLock<u64>>);

impl LateCounter {
    /// Sets the value. Only the first call has an effect.
    pub fn set(&self, value: u64) {
        let _ = self.0.set(value);
    }
}

impl EncodeMetric for LateCounter {
    fn encode(&self, mut encoder: MetricEncoder) -> Result<(), fmt::Error> {
        self.0
            .get()
            .map_or(Ok(()), |value| encoder.encode_counter::<NoLabelSet, _, u64>(value, None))
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Counter
    }

    fn is_empty(&self) -> bool {
        self.0.get().is_none()
    }
}
