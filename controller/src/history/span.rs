//! A record of the history: one container's stay in one state.

use serde::{Deserialize, Serialize};

/// A container's stay in one state: its start and end, and the memory that the container held.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StateSpan {
    /// Key of the container.
    pub key: String,
    /// Namespace of Kubernetes, or of containerd outside Kubernetes.
    pub namespace: String,
    /// Name of the pod. Empty outside Kubernetes.
    pub pod: String,
    /// Name of the container, or containerd's id outside Kubernetes.
    pub container: String,
    /// State of the container, as one word.
    pub state: String,
    /// Reason for the container's state, as one word. If the reason changed during the span, it is
    /// the reason at the span's end.
    pub reason: String,
    /// Start of the span, in milliseconds since 1970.
    pub from_ms: i64,
    /// End of the span, in milliseconds since 1970.
    pub to_ms: i64,
    /// VRAM that the container held, in GPU seconds (the VRAM of a whole GPU for one second).
    pub held_gpu_seconds: f64,
    /// VRAM of the container that was offloaded, in GPU seconds (the VRAM of a whole GPU for one
    /// second).
    pub offloaded_gpu_seconds: f64,
    /// VRAM that the container held at the end of the span, in bytes.
    pub vram_bytes: u64,
    /// Offloaded VRAM at the end of the span, in bytes.
    pub offloaded_bytes: u64,
    /// Number of CUDA calls that the container made in the span.
    pub calls: u64,
    /// Duration of the wake (restore for a waiting call) that began the span, in milliseconds. 0 if
    /// no wake began it.
    pub wake_ms: u64,
    /// Periods in which the container was in use: start and end, in milliseconds after `from_ms`.
    /// They are only as precise as the interval between observations, which is a few seconds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub uses: Vec<(u32, u32)>,
    /// ResourceClaims of the container, as `namespace/name`, separated by commas. Empty: it has
    /// none. Records of older controllers do not have this field.
    #[serde(default)]
    pub claim: String,
    /// VRAM that the container could use at most under its limit, in GPU seconds. 0 without a
    /// limit. Records of older controllers do not have this field.
    #[serde(default)]
    pub requested_gpu_seconds: f64,
}

impl StateSpan {
    /// Returns whether a part of the span is inside a time range.
    #[must_use]
    pub fn overlaps(&self, since_ms: i64, until_ms: i64) -> bool {
        self.from_ms < until_ms && self.to_ms >= since_ms
    }

    /// Returns the fraction of the span that is inside a time range, from 0 to 1.
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
