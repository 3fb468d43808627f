//! Paths of files, folders and sockets. Host paths are below one run directory, so that several
//! private installations (tests, the demo) can be on one machine.

/// Environment variable that names the run directory, for shim, controller and CLI.
pub const RUN_DIR_ENV: &str = "AFFINODE_RUN_DIR";
/// The run directory when [`RUN_DIR_ENV`] is not set.
pub const RUN_DIR: &str = "/run/affinode";
/// Environment variable that names the folder of the preload library on the host.
pub const LIB_DIR_ENV: &str = "AFFINODE_LIB_DIR";
/// The folder of the preload library on the host when [`LIB_DIR_ENV`] is not set.
pub const LIB_DIR: &str = "/usr/local/lib/affinode";
/// File name of the preload library in that folder. It is a link to a versioned file, or its copy.
pub const LIB_FILE: &str = "libaffinode_preload.so";
/// Environment variable that names the configuration file.
pub const CONFIG_ENV: &str = "AFFINODE_CONFIG";
/// The configuration file when [`CONFIG_ENV`] is not set.
pub const CONFIG_FILE: &str = "/etc/affinode/config.toml";

/// Below the run directory: the controller's ttrpc socket, root only.
pub const CONTROL_SOCKET: &str = "control.sock";
/// Below the run directory: the controller's ttrpc socket for the members of `control.view_group`,
/// which may look and change nothing.
pub const VIEW_SOCKET: &str = "view.sock";
/// Below the run directory: the lock file of the node's only controller, held with `flock`.
pub const CONTROLLER_LOCK: &str = "controller.lock";
/// Below the run directory: the journal. The controller writes it before each destructive step.
pub const JOURNAL_DIR: &str = "journal";
/// Below the run directory: one folder per container, named by its key.
pub const CONTAINERS_DIR: &str = "containers";
/// In a container's folder: the folder that is bind-mounted into the container.
pub const MOUNT_DIR: &str = "mount";
/// In the mounted folder: the socket on which the controller accepts this container's agents.
pub const AGENT_SOCKET: &str = "agent.sock";
/// In the mounted folder, next to the socket: the name of the engine. Processes read it if they
/// look up driver functions before they have the controller's Welcome.
pub const ENGINE_FILE: &str = "engine";
/// In the mounted folder: a pipe that takes the words `idle` and `busy` from the container.
pub const HINT_PIPE: &str = "hint";
/// In the mounted folder: whether VRAM is short on the container's GPUs, for the container to read.
pub const PRESSURE_FILE: &str = "pressure";
/// In the mounted folder: the container's own state, for its programs to read.
pub const STATE_FILE: &str = "state";
/// In a container's folder: its announcement, if no shim announces it again to a later controller.
pub const ANNOUNCEMENT_FILE: &str = "announcement";
/// In a container's folder: the generation of the container that owns the folder.
pub const GENERATION_FILE: &str = "generation";
/// In a container's folder: the merged `/etc/ld.so.preload`.
pub const PRELOAD_FILE: &str = "ld.so.preload";

/// In the container: the library folder, read-only.
pub const CONTAINER_LIB_DIR: &str = "/.affinode/lib";
/// In the container: the folder with the agent socket, read-only.
pub const CONTAINER_RUN_DIR: &str = "/.affinode/run";
/// In the container: the line that `/etc/ld.so.preload` gets.
pub const CONTAINER_LIB: &str = "/.affinode/lib/libaffinode_preload.so";
/// In the container: the socket that the agent connects to.
pub const CONTAINER_AGENT_SOCKET: &str = "/.affinode/run/agent.sock";
/// Environment variable that names another agent socket, for processes without a container.
pub const AGENT_SOCKET_ENV: &str = "AFFINODE_SOCKET";
/// Environment variable that disables the preload library when it is `1`.
pub const DISABLE_ENV: &str = "AFFINODE_DISABLE";
