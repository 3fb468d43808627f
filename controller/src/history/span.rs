//! One record: a container in a state for a while.

use serde::{Deserialize, Serialize};

/// From when to when a container was in a state, and what it held.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StateSpan {
    /// The container's key.
    pub key: String,
    /// Kubernetes' namespace, or containerd's outside Kubernetes.
    pub namespace: String,
    /// The pod; empty outside Kubernetes.
    pub pod: String,
    /// The container's name, or containerd's id outside Kubernetes.
    pub container: String,
    /// The word of the state.
    pub state: String,
    /// Why it was there.
    pub reason: String,
    /// Begin, milliseconds since 1970.
    pub from_ms: i64,
    /// End, milliseconds since 1970.
    pub to_ms: i64,
    /// VRAM held, as shares of a GPU's VRAM over time.
    pub held_gpu_seconds: f64,
    /// VRAM given back, in the same measure.
    pub away_gpu_seconds: f64,
    /// VRAM held last.
    pub vram_bytes: u64,
    /// VRAM given back last.
    pub offloaded_bytes: u64,
    /// CUDA calls made meanwhile.
    pub calls: u64,
    /// How long the wake took that began it, if one did.
    pub wake_ms: u64,
    /// When it was in use: begin and end, in milliseconds after `from_ms`. What a look every
    /// few seconds can tell.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub uses: Vec<(u32, u32)>,
}

impl StateSpan {
    /// Whether a part of it lies in a time.
    #[must_use]
    pub fn overlaps(&self, since_ms: i64, until_ms: i64) -> bool {
        self.from_ms < until_ms && self.to_ms >= since_ms
    }

    /// The part of it that lies in a time, from 0 to 1.
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
