//! One record of the history: a container in a state for a while.

use serde::{Deserialize, Serialize};

/// Start and end of a container's stay in a state, and the memory that it held in that time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StateSpan {
    /// Key of the container.
    pub key: String,
    /// Namespace: of Kubernetes, or of containerd outside Kubernetes.
    pub namespace: String,
    /// Name of the pod. Empty outside Kubernetes.
    pub pod: String,
    /// Name of the container, or containerd's id outside Kubernetes.
    pub container: String,
    /// The state, as one word.
    pub state: String,
    /// The reason word at the end of the span.
    pub reason: String,
    /// Start, milliseconds since 1970.
    pub from_ms: i64,
    /// End, milliseconds since 1970.
    pub to_ms: i64,
    /// VRAM in use, in GPU seconds (the VRAM of a whole GPU for one second).
    pub held_gpu_seconds: f64,
    /// Offloaded VRAM, in GPU seconds.
    pub offloaded_gpu_seconds: f64,
    /// VRAM in use at the end, in bytes.
    pub vram_bytes: u64,
    /// Offloaded VRAM at the end, in bytes.
    pub offloaded_bytes: u64,
    /// CUDA calls made in the span.
    pub calls: u64,
    /// Duration of the wake that began the span. 0: no wake.
    pub wake_ms: u64,
    /// Times of use: start and end, in milliseconds after `from_ms`. They are only as precise as
    /// the interval between observations, which is a few seconds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub uses: Vec<(u32, u32)>,
}

impl StateSpan {
    /// Whether a part of the span is inside a time range.
    #[must_use]
    pub fn overlaps(&self, since_ms: i64, until_ms: i64) -> bool {
        self.from_ms < until_ms && self.to_ms >= since_ms
    }

    /// The part of the span that is inside a time range, from 0 to 1.
    #[must_use]
    pub fn share(&self, since_ms: i64, until_ms: i64) -> f64 {
        let length = self.to_ms - self.from_ms;
        if length <= 0 {
            return if self.overlaps(since_ms, until_ms) { 1.0 } else { 0.0 };
        }
        let inside = self.to_ms.min(until_ms) - self.from_ms.max(since_ms);
        #[allow(clippy::cast_precision_loss)] // Milliseconds of decades are exact in f64.
        let share = inside.max(0) as f64 / length as f64;
        share
    }
}
