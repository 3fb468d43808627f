//! Source of the node's state for `affinode top`. The state is read from the controller, or
//! directly from the GPUs while no controller runs.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use affinode_controller::schema;

use crate::{CliError, client::ControlClient, local_node::LocalNode};

/// Reads the state of the node for `affinode top`.
pub struct NodeSource {
    run_dir: PathBuf,
    reader: NodeReader,
}

enum NodeReader {
    Controller(Arc<ControlClient>),
    /// Reads the GPUs directly, because no controller runs and no container needs one.
    Local(Box<LocalNode>),
}

impl NodeReader {
    async fn connect(run_dir: &Path) -> Result<NodeReader, CliError> {
        match ControlClient::connect(run_dir).await {
            Ok(client) => Ok(NodeReader::Controller(Arc::new(client))),
            Err(error) => match LocalNode::of_empty(run_dir) {
                Some(local) => Ok(NodeReader::Local(Box::new(local))),
                None => Err(error),
            },
        }
    }
}

impl NodeSource {
    /// Connects to the controller. If none runs and no container needs one, prepares to read the
    /// GPUs directly.
    ///
    /// # Errors
    /// No controller answers, although a container may run.
    pub async fn open(run_dir: PathBuf) -> Result<NodeSource, CliError> {
        let reader = NodeReader::connect(&run_dir).await?;
        Ok(NodeSource { run_dir, reader })
    }

    /// Returns the client of the controller. `None`: no controller runs.
    pub fn client(&self) -> Option<&Arc<ControlClient>> {
        match &self.reader {
            NodeReader::Controller(client) => Some(client),
            NodeReader::Local(_) => None,
        }
    }

    /// Reads the state of the node. If the controller has ended, connects to the next one.
    ///
    /// # Errors
    /// The controller does not answer, or refuses the request.
    pub async fn read(&mut self) -> Result<schema::Node, CliError> {
        if self.client().is_none() {
            match NodeReader::connect(&self.run_dir).await? {
                // NVML's library is loaded once and kept for all readings.
                NodeReader::Local(_) => {}
                connected => self.reader = connected,
            }
        }
        let listed = match &mut self.reader {
            NodeReader::Local(local) => return Ok(local.read()),
            NodeReader::Controller(client) => client.list().await,
        };
        if let Err(CliError::NoController { .. } | CliError::TimedOut { .. }) = &listed {
            // The next reading connects again, or finds an empty node.
            self.reader = NodeReader::connect(&self.run_dir).await?;
        }
        listed.map(schema::Node::from)
    }
}
