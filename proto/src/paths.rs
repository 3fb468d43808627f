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

/// Below the run directory: the controller's ttrpc socket, root only.
pub const CONTROL_SOCKET: &str = "control.sock";
/// Below the run directory: the controller's ttrpc socket for members of `control.view_group`. They
/// can read, but cannot change anything.
pub const VIEW_SOCKET: &str = "view.sock";
/// Below the run directory: the file that the controller locks with `flock`, so that only one
/// controller runs on a node.
pub const CONTROLLER_LOCK: &str = "controller.lock";
/// Below the run directory: the journal. The controller writes it before each destructive step.
pub const JOURNAL_DIR: &str = "journal";
/// Below the run directory: one folder per container, named by its key.
pub const CONTAINERS_DIR: &str = "containers";
/// Below the run directory: one file per prepared device of a ResourceClaim, with the policy of the
/// containers that use it.
pub const CLAIMS_DIR: &str = "claims";
/// In a container's folder: the folder that is bind-mounted into the container.
pub const MOUNT_DIR: &str = "mount";
/// In the mounted folder: the socket on which the controller accepts this container's agents.
pub const AGENT_SOCKET: &str = "agent.sock";
/// In the mounted folder, next to the socket: a file with the name of the engine. A process reads
/// it if its first call to the driver comes before the controller's Welcome.
pub const ENGINE_FILE: &str = "engine";
/// In the mounted folder: a pipe into which the container's programs write `idle` or `busy`.
pub const HINT_PIPE: &str = "hint";
/// In the mounted folder: a file that shows the container whether VRAM is short on its GPUs.
pub const PRESSURE_FILE: &str = "pressure";
/// In the mounted folder: a file with the container's state, for the container's programs.
pub const STATE_FILE: &str = "state";
/// In a container's folder: the announcement of a container that has no shim. A later controller
/// reads it.
pub const ANNOUNCEMENT_FILE: &str = "announcement";
/// In a container's folder: a file with the generation of the container that owns the folder.
pub const GENERATION_FILE: &str = "generation";
/// In a container's folder: the merged `/etc/ld.so.preload`.
pub const PRELOAD_FILE: &str = "ld.so.preload";

/// In the container: the library folder, read-only.
pub const CONTAINER_LIB_DIR: &str = "/.affinode/lib";
/// In the container: the folder with the agent socket, read-only.
pub const CONTAINER_RUN_DIR: &str = "/.affinode/run";
/// In the container: the folder with the files of [`CLAIMS_DIR`] that apply to the container.
pub const CONTAINER_CLAIMS_DIR: &str = "/.affinode/claims";
/// In the container: path of the preload library, as written into `/etc/ld.so.preload`.
pub const CONTAINER_LIB: &str = "/.affinode/lib/libaffinode_preload.so";
/// In the container: the socket that the agent connects to.
pub const CONTAINER_AGENT_SOCKET: &str = "/.affinode/run/agent.sock";
/// Environment variable that sets another agent socket. Processes outside containers use it.
pub const AGENT_SOCKET_ENV: &str = "AFFINODE_SOCKET";
/// Environment variable that disables the preload library when it is `1`.
pub const DISABLE_ENV: &str = "AFFINODE_DISABLE";
