//! Reads the node's GPUs by running the installed program `affinode`.

use std::{io, process::Output};

use affinode_controller::inventory::gpu_facts::NodeGpus;
use tokio::task::JoinHandle;

use super::host::{self, HostError, HostPaths};

/// Reads the node's GPUs in a child process. A process that hangs in the driver cannot always be
/// ended, so no second process is started while one runs.
pub struct GpuReader {
    places: HostPaths,
    running: Option<JoinHandle<io::Result<Output>>>,
}

impl GpuReader {
    /// Returns a reader for this node.
    #[must_use]
    pub fn new(places: HostPaths) -> GpuReader {
        GpuReader { places, running: None }
    }

    /// Reads the GPUs. If the future is dropped while the child process runs, the next call waits
    /// for this child process.
    ///
    /// # Errors
    /// [`HostError`]: the command failed or exceeded its time limit, or the driver cannot be read.
    pub async fn read(&mut self) -> Result<NodeGpus, HostError> {
        let places = &self.places;
        let running = match &mut self.running {
            Some(running) => running,
            none => {
                let mut command = places.gpus_command()?;
                none.insert(tokio::spawn(async move { command.output().await }))
            }
        };
        let ended = tokio::time::timeout(host::GPUS_TIMEOUT, running).await;
        let ended = ended.map_err(|_| HostError::Late("gpus"))?;
        self.running = None;
        let output = ended.map_err(io::Error::other).and_then(|output| output);
        host::parse("gpus", &host::succeeded(output.map_err(HostError::Run)?)?)
    }
}
