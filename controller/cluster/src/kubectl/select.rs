//! Selects the containers of a cluster to which a command applies. This module does no I/O.

use affinode_controller::schema;
use affinode_proto::state::State;
use clap::{Args, builder::PossibleValuesParser};
use serde::Serialize;

/// Options that select the containers to which a command applies.
#[derive(Args, Clone, Debug, Default)]
pub struct ContainerFilter {
    /// Include pods of all namespaces, and containers without a pod.
    #[arg(short = 'A', long)]
    pub all_namespaces: bool,
    /// Only containers of this node. No request goes to other nodes.
    #[arg(long, value_name = "NAME")]
    pub node: Option<String>,
    /// Only containers with memory of this GPU, which is given by its index on the node or by the
    /// beginning of its UUID.
    #[arg(long, value_name = "GPU")]
    gpu: Option<String>,
    /// Only containers in one of these states.
    #[arg(long, value_name = "STATE", value_delimiter = ',', ignore_case = true, value_parser = PossibleValuesParser::new(State::ALL.map(State::as_str)))]
    state: Vec<String>,
}

/// A GPU container, with the name of the node on which it runs.
#[derive(Clone, Debug, Serialize)]
pub struct NodeContainer {
    /// Name of the node.
    pub node: String,
    /// The container as its controller shows it.
    #[serde(flatten)]
    pub container: schema::Container,
}

impl ContainerFilter {
    /// Returns the containers of a node that match the filter.
    pub fn of(&self, name: &str, node: schema::Node, namespace: &str) -> Vec<NodeContainer> {
        let uuids = self.gpu.as_ref().map(|gpu| uuids(&node.gpus, gpu));
        let keeps = |container: &schema::Container| {
            (self.all_namespaces || container.pod_namespace == namespace)
                && (self.state.is_empty() || self.states().any(|s| s == container.state))
                && uuids.as_ref().is_none_or(|uuids| uses(container, uuids))
        };
        let containers = node.containers.into_iter().filter(keeps);
        containers.map(|container| NodeContainer { node: name.to_owned(), container }).collect()
    }

    /// Returns the states that the user selected, in the controller's spelling.
    fn states(&self) -> impl Iterator<Item = &'static str> {
        let asked =
            |state: &State| self.state.iter().any(|s| s.eq_ignore_ascii_case(state.as_str()));
        State::ALL.into_iter().filter(asked).map(State::as_str)
    }
}

/// Returns the UUIDs of the node's GPUs that `word` selects. `word` is the index of a GPU or the
/// beginning of its UUID.
fn uuids(gpus: &[schema::Gpu], word: &str) -> Vec<String> {
    let means = |gpu: &&schema::Gpu| match word.parse::<u32>() {
        Ok(index) => gpu.index == index,
        Err(_) => gpu.uuid.starts_with(word),
    };
    gpus.iter().filter(means).map(|gpu| gpu.uuid.clone()).collect()
}

/// Returns whether a container has memory of one of these GPUs, in VRAM or offloaded.
fn uses(container: &schema::Container, uuids: &[String]) -> bool {
    let mut memory = container.processes.iter().flat_map(|p| p.vram.iter().chain(&p.offloaded));
    memory.any(|part| uuids.contains(&part.uuid))
}
