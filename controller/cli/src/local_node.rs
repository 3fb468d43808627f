//! Shows a node on which no controller runs and no container needs a controller. On such a node,
//! `affinode ps` and `affinode top` read the GPUs themselves.

use std::{fs, io, os::unix::net::UnixStream, path::Path};

use affinode_controller::conversion;
use affinode_controller::{
    clock::{monotonic_ms, unix_ms},
    config::Config,
    driver_library::DriverLibrary,
    error_chain, host_pool,
    inventory::{memory, nvml::NvmlDevices},
    schema,
};
use affinode_core::{Input, Node};
use affinode_proto::paths;

/// Text that is printed for a node that has neither a controller nor containers.
pub const NOTHING_RUNS: &str = "no GPU container of runtime affinode runs, and no controller runs: \
                                a shim starts the controller with the first container";

/// Reads the GPUs of a node on which no controller runs.
pub struct LocalNode {
    config: Config,
    devices: NvmlDevices,
}

impl LocalNode {
    /// Prepares to read the GPUs without a controller. `None`: a controller may run, or the run
    /// directory has a folder of a container or job. In both cases, only a controller knows the
    /// state of the node.
    pub fn of_empty(run_dir: &Path) -> Option<LocalNode> {
        if !is_empty(run_dir) {
            return None;
        }
        let config = Config::load(&Config::path()).unwrap_or_else(|error| {
            tracing::debug!(
                "configuration: the defaults apply, because the configuration cannot be read: {}",
                error_chain::chain(&error)
            );
            Config::default()
        });
        let devices = NvmlDevices::new(DriverLibrary::nvml(&config));
        Some(LocalNode { config, devices })
    }

    /// Reads the GPUs of the node. The result has the controller's process id 0, which means that
    /// no controller runs.
    pub fn read(&mut self) -> schema::Node {
        let mut node = Node::new(self.config.settings());
        // The input also has effects, which only a controller carries out. They are dropped here.
        let _ = node.handle(monotonic_ms(), Input::Gpus(self.devices.read(true)));
        let mut list = conversion::list(&node, monotonic_ms(), unix_ms());
        list.node = nix::unistd::gethostname()
            .map(|name| name.to_string_lossy().into_owned())
            .unwrap_or_default();
        list.version = env!("CARGO_PKG_VERSION").into();
        list.host_free_bytes = memory::room_bytes(self.config.memory.node_reserve_bytes());
        (list.host_pool_bytes, list.host_pool_used_bytes) =
            host_pool::size_and_use(&self.config.memory);
        schema::Node::from(list)
    }
}

/// Returns whether the node has no controller, no container and no job. This is true if the control
/// socket has no listener, and the run directory has no folder of a container or job.
fn is_empty(run_dir: &Path) -> bool {
    let absent = match UnixStream::connect(run_dir.join(paths::CONTROL_SOCKET)) {
        Ok(_) => false,
        Err(error) => {
            matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
        }
    };
    absent
        && match fs::read_dir(run_dir.join(paths::CONTAINERS_DIR)) {
            Ok(mut folders) => folders.next().is_none(),
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_known_container_is_not_an_empty_node() {
        let run_dir = tempfile::tempdir().unwrap();
        assert!(is_empty(&run_dir.path().join("absent")) && is_empty(run_dir.path()));
        let containers = run_dir.path().join(paths::CONTAINERS_DIR);
        fs::create_dir(&containers).unwrap();
        assert!(is_empty(run_dir.path()));
        fs::create_dir(containers.join("0".repeat(32))).unwrap();
        assert!(!is_empty(run_dir.path()), "its controller may be about to start");
    }

    #[test]
    fn a_socket_that_is_served_is_a_controller() {
        let run_dir = tempfile::tempdir().unwrap();
        let socket = UnixListener::bind(run_dir.path().join(paths::CONTROL_SOCKET)).unwrap();
        assert!(!is_empty(run_dir.path()));
        drop(socket);
        assert!(is_empty(run_dir.path()), "a controller that died left it");
    }

    #[test]
    fn without_nvml_the_reason_is_shown() {
        let mut config = Config::default();
        config.nvml.library = "/nonexistent.so".into();
        let devices = NvmlDevices::new(DriverLibrary::nvml(&config));
        let node = LocalNode { config, devices }.read();
        assert_eq!((node.controller_pid, node.containers.len(), node.auto_offload), (0, 0, true));
        assert!(node.gpu_error.unwrap().contains("/nonexistent.so"));
    }
}
