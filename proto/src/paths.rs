//! Paths of files, folders and sockets. All host paths of runtime state are below one run
//! directory, so that several private installations (tests, the demo) can run on one machine.

/// Environment variable that names the run directory, for shim, controller and CLI.
pub const RUN_DIR_ENV: &str = "AFFINODE_RUN_DIR";
/// The run directory when [`RUN_DIR_ENV`] is not set.
pub const RUN_DIR: &str = "/run/affinode";
/// Environment variable that names the folder of the preload library on the host.
pub const LIB_DIR_ENV: &str = "AFFINODE_LIB_DIR";
/// The folder of the preload library on the host when [`LIB_DIR_ENV`] is not set.
pub const LIB_DIR: &str = "/usr/local/lib/affinode";
/// File name of the preload library in [`LIB_DIR`]: a link to a versioned file, or a copy of the
/// versioned file.
pub const LIB_FILE: &str = "libaffinode_preload.so";
/// Environment variable that names the configuration file.
pub const CONFIG_ENV: &str = "AFFINODE_CONFIG";
/// The configuration file when [`CONFIG_ENV`] is not set.
pub const CONFIG_FILE: &str = "/etc/affinode/config.toml";

/// File name below the run directory: the controller's ttrpc socket, to which only root can
/// connect.
pub const CONTROL_SOCKET: &str = "control.sock";
/// File name below the run directory: the controller's read-only ttrpc socket. Members of the group
/// `control.view_group` can read through it, but cannot change anything.
pub const VIEW_SOCKET: &str = "view.sock";
/// File name below the run directory: the lock file. The controller locks it with `flock`, so that
/// only one controller runs on a node.
pub const CONTROLLER_LOCK: &str = "controller.lock";
/// Folder name below the run directory: the journal of offloaded containers. The controller writes
/// it before each destructive step.
pub const JOURNAL_DIR: &str = "journal";
/// Folder name below the run directory: it has one folder for each container, named by the
/// container's key.
pub const CONTAINERS_DIR: &str = "containers";
/// Folder name below the run directory: it has one file for each prepared device of a Kubernetes
/// ResourceClaim. The file contains the policy of the containers that use the device.
pub const CLAIMS_DIR: &str = "claims";
/// Folder name in a container's folder on the host: this folder is bind-mounted into the container.
pub const MOUNT_DIR: &str = "mount";
/// File name in the mounted folder: the socket on which the controller accepts the agents of this
/// container.
pub const AGENT_SOCKET: &str = "agent.sock";
/// File name in the mounted folder: a file with the name of the engine (the method that moves GPU
/// memory). A process reads it if it calls the driver before the controller's Welcome message has
/// arrived.
pub const ENGINE_FILE: &str = "engine";
/// File name in the mounted folder: a file with the container's VRAM limit in bytes, as a decimal
/// number. A process obeys it until the controller's Welcome message has arrived. The file is
/// missing if the container has no limit.
pub const VRAM_LIMIT_FILE: &str = "vram-limit";
/// File name in the mounted folder: the VRAM of a container with a limit, as
/// [`crate::wire::vram_view`] describes it.
pub const VRAM_FILE: &str = "vram";
/// File name in the mounted folder: the pipe into which the container's programs write `idle` or
/// `busy`.
pub const HINT_PIPE: &str = "hint";
/// File name in the mounted folder: the file that shows the container's programs whether VRAM is
/// short on its GPUs.
pub const PRESSURE_FILE: &str = "pressure";
/// File name in the mounted folder: the file that shows the container's programs the container's
/// state.
pub const STATE_FILE: &str = "state";
/// File name in a container's folder on the host: the announcement of a container that has no shim.
/// A controller that starts later reads it.
pub const ANNOUNCEMENT_FILE: &str = "announcement";
/// File name in a container's folder on the host: the file with the generation of the container
/// that owns the folder. The generation is a number that differs between containers with the same
/// id.
pub const GENERATION_FILE: &str = "generation";
/// File name in a container's folder on the host: the `/etc/ld.so.preload` for the container,
/// merged from the image's entries and Affinode's.
pub const PRELOAD_FILE: &str = "ld.so.preload";

/// Path in the container: the folder of the preload library, mounted read-only.
pub const CONTAINER_LIB_DIR: &str = "/.affinode/lib";
/// Path in the container: the folder with the agent socket, mounted read-only.
pub const CONTAINER_RUN_DIR: &str = "/.affinode/run";
/// Path in the container: the folder with the files from the host's [`CLAIMS_DIR`] that apply to
/// the container.
pub const CONTAINER_CLAIMS_DIR: &str = "/.affinode/claims";
/// Path in the container: the preload library, as written into `/etc/ld.so.preload`.
pub const CONTAINER_LIB: &str = "/.affinode/lib/libaffinode_preload.so";
/// Path in the container: the socket that the agent connects to.
pub const CONTAINER_AGENT_SOCKET: &str = "/.affinode/run/agent.sock";
/// Environment variable with the path of the agent socket. It replaces [`CONTAINER_AGENT_SOCKET`]
/// for processes outside containers.
pub const AGENT_SOCKET_ENV: &str = "AFFINODE_SOCKET";
/// Environment variable that disables the preload library if its value is `1`.
pub const DISABLE_ENV: &str = "AFFINODE_DISABLE";
