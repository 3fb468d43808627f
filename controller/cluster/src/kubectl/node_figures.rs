//! Figures of a node, such as its VRAM in use and the number of offloaded containers. They are
//! computed from the controller's reply to `/api/v1/node`. This module does no I/O.

use affinode_proto::state::State;
use serde::{Deserialize, Serialize};

/// Maximum length of each text that is copied from a node's reply, in characters.
const TEXT_CHARS: usize = 200;

/// Figures of a node: its GPUs, its VRAM and host memory, and counts of its containers.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct NodeFigures {
    /// Version of the controller.
    pub version: String,
    /// Start time of the controller, in milliseconds since 1970.
    pub started_unix_ms: i64,
    /// Reason why the GPUs of the node cannot be read. `None`: they can be read.
    pub gpu_error: Option<String>,
    /// Whether the node offloads idle containers without a request.
    pub auto_offload: bool,
    /// Number of the node's GPUs.
    pub gpus: usize,
    /// Model of the first GPU. Usually all GPUs of a node have the same model.
    pub gpu_name: String,
    /// Whether at least one GPU is simulated.
    pub simulated: bool,
    /// VRAM of all GPUs of the node.
    pub vram_total_bytes: u64,
    /// VRAM in use on all GPUs, by any process.
    pub vram_used_bytes: u64,
    /// VRAM of idle containers that could be offloaded now.
    pub vram_reclaimable_bytes: u64,
    /// VRAM that the node's containers use.
    pub resident_bytes: u64,
    /// Number of containers that hold VRAM.
    pub resident: usize,
    /// Host memory that offloaded containers use.
    pub offloaded_bytes: u64,
    /// Number of containers that are offloaded, or being restored.
    pub offloaded: usize,
    /// Number of containers whose calls wait for VRAM.
    pub waiting: usize,
    /// Number of containers in the state lost.
    pub lost: usize,
    /// Host memory that is free for more offloads, in bytes.
    pub host_free_bytes: u64,
}

/// The fields of the controller's reply that this module reads.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct NodeSummary {
    version: String,
    started_unix_ms: i64,
    gpu_error: Option<String>,
    auto_offload: bool,
    host_free_bytes: u64,
    gpus: Vec<GpuSummary>,
    containers: Vec<ContainerSummary>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct GpuSummary {
    name: String,
    simulated: bool,
    vram_total_bytes: u64,
    vram_used_bytes: u64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ContainerSummary {
    state: String,
    mode: String,
    pinned: bool,
    vram_bytes: u64,
    offloaded_bytes: u64,
}

/// Parses the reply to `/api/v1/node`.
///
/// # Errors
/// If the bytes are not valid JSON of such a reply.
pub fn read(json: &[u8]) -> Result<NodeFigures, serde_json::Error> {
    let node: NodeSummary = serde_json::from_slice(json)?;
    let text = |text: &str| text.chars().take(TEXT_CHARS).collect::<String>();
    let sum = |bytes: &dyn Fn(&ContainerSummary) -> u64| {
        node.containers.iter().map(bytes).fold(0, u64::saturating_add)
    };
    let count = |states: &[State]| {
        let is =
            |c: &&ContainerSummary| State::parse(&c.state).is_some_and(|s| states.contains(&s));
        node.containers.iter().filter(is).count()
    };
    let could_leave = |c: &ContainerSummary| {
        let idle = c.state == State::Idle.as_str() && !c.pinned && c.mode != "off";
        if idle { c.vram_bytes } else { 0 }
    };
    let gpus =
        |bytes: fn(&GpuSummary) -> u64| node.gpus.iter().map(bytes).fold(0, u64::saturating_add);
    Ok(NodeFigures {
        version: text(&node.version),
        started_unix_ms: node.started_unix_ms,
        gpu_error: node.gpu_error.as_deref().map(text),
        auto_offload: node.auto_offload,
        gpus: node.gpus.len(),
        gpu_name: text(node.gpus.first().map_or("", |gpu| &gpu.name)),
        simulated: node.gpus.iter().any(|gpu| gpu.simulated),
        vram_total_bytes: gpus(|gpu| gpu.vram_total_bytes),
        vram_used_bytes: gpus(|gpu| gpu.vram_used_bytes),
        vram_reclaimable_bytes: sum(&could_leave),
        resident_bytes: sum(&|c| c.vram_bytes),
        resident: node.containers.iter().filter(|c| c.vram_bytes > 0).count(),
        offloaded_bytes: sum(&|c| c.offloaded_bytes),
        offloaded: count(&[State::Offloaded, State::Queued, State::Restoring]),
        waiting: count(&[State::Queued]),
        lost: count(&[State::Lost]),
        host_free_bytes: node.host_free_bytes,
    })
}

#[cfg(test)]
mod tests {
    use affinode_controller::schema;

    use super::*;

    fn container(state: State, vram_bytes: u64, offloaded_bytes: u64) -> schema::Container {
        let (state, mode) = (state.as_str().to_owned(), "eager".to_owned());
        schema::Container { state, mode, vram_bytes, offloaded_bytes, ..Default::default() }
    }

    #[test]
    fn controller_figures_are_summed() {
        let gpu = |name: &str, total, used| schema::Gpu {
            name: name.into(),
            vram_total_bytes: total,
            vram_used_bytes: used,
            ..Default::default()
        };
        let pinned = schema::Container { pinned: true, ..container(State::Idle, 16, 0) };
        let node = schema::Node {
            version: "0.1.0".into(),
            gpus: vec![gpu("H200", 100, 40), gpu("H200", 100, 2)],
            containers: vec![
                container(State::Active, 1, 0),
                container(State::Idle, 2, 0),
                pinned,
                container(State::Offloaded, 0, 4),
                container(State::Queued, 0, 8),
                container(State::Lost, 0, 0),
            ],
            ..Default::default()
        };
        let figures = read(&serde_json::to_vec(&node).unwrap()).unwrap();
        let expected = NodeFigures {
            version: "0.1.0".into(),
            gpus: 2,
            gpu_name: "H200".into(),
            vram_total_bytes: 200,
            vram_used_bytes: 42,
            vram_reclaimable_bytes: 2,
            resident_bytes: 19,
            resident: 3,
            offloaded_bytes: 12,
            offloaded: 2,
            waiting: 1,
            lost: 1,
            ..NodeFigures::default()
        };
        assert_eq!(figures, expected);
    }

    #[test]
    fn oversized_or_foreign_reply_is_harmless() {
        let most =
            format!("{{\"containers\":[{0},{0}]}}", r#"{"vram_bytes":18446744073709551615}"#);
        assert_eq!(read(most.as_bytes()).unwrap().resident_bytes, u64::MAX);
        let long = format!("{{\"version\":\"{}\"}}", "x".repeat(10_000));
        assert_eq!(read(long.as_bytes()).unwrap().version.len(), TEXT_CHARS);
        for wrong in ["", "[]x", "{\"gpus\":7}", "<html>"] {
            assert!(read(wrong.as_bytes()).is_err(), "{wrong}");
        }
    }
}
