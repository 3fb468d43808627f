//! The OCI runtime of Affinode, for container engines that do not use shims: Podman and CRI-O.
//!
//! ```text
//! podman ── conmon ── affinode-runtime create ── edits config.json ─── becomes crun or runc
//!                            └─ follow: waits for the end of `create`, keeps the announcement
//! podman ──────────── affinode-runtime start ────────────────────────── becomes crun or runc
//!                            └─ follow: announces, starts the controller, keeps it alive
//! podman ──────────── affinode-runtime kill, delete, exec, … ────────── becomes crun or runc
//! ```
//!
//! No process of Affinode stays with the container. The container's folder has its announcement,
//! which the next controller reads. The announcement names the container's first process, and the
//! container ends with that process.
//!
//! | module | content |
//! | --- | --- |
//! | [`cli`] | the command line, as far as it matters here |
//! | [`runtime`] | the runtime that this process becomes |
//! | [`follow`], [`keeper`] | the processes that announce a container and keep the controller alive |
//! | [`names`] | namespace and name of a container |
//! | [`log`] | messages, in the place where the container engine reads those of a runtime |
//!
//! If any part of Affinode fails, the container starts as without Affinode.

pub mod cli;
pub mod follow;
pub mod keeper;
pub mod log;
pub mod names;
pub mod runtime;

use std::ffi::OsString;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use affinode_proto::api::control::Announcement;
use containerd_shim_protos::api::CreateTaskRequest;
use tracing::{error, warn};

use crate::bundle::Bundle;
use crate::create;
use crate::paths::{ShimPaths, container_key};
use crate::{StartSettingsOf, report, spec};
use cli::{NewContainer, OciCommand, OciInvocation};
use follow::{FollowOrder, FollowedStep};
use runtime::OciRuntime;

/// The name of the binary.
pub const BINARY: &str = "affinode-runtime";

/// Function that returns the runtime which the node's configuration names. The path is empty if the
/// configuration names none.
pub type RuntimeOf = fn(&Path) -> PathBuf;

/// Runs the command that the arguments name. The first of `args` is the program's name. If the
/// command creates a container, edits the container's config.json first. Then replaces this process
/// by the runtime, and returns only if that fails.
pub fn run(
    args: impl Iterator<Item = OsString>,
    start_settings_of: StartSettingsOf,
    runtime_of: RuntimeOf,
) -> ExitCode {
    let argv: Vec<OsString> = args.skip(1).collect();
    if let Some(code) = follow::main(&argv) {
        return code;
    }
    let invocation = OciInvocation::parse(&argv);
    log::init(&invocation.log);
    let paths = ShimPaths::own();
    let runtime = match OciRuntime::find(&runtime_of(&paths.config), &invocation) {
        Ok(runtime) => runtime,
        Err(error) => {
            error!("{}", report(&error));
            return crate::fail_as(BINARY, &report(&error));
        }
    };
    let found = match &invocation.command {
        // The runtime refuses an id that is in use. The container with that id keeps its folder.
        OciCommand::Create(_) | OciCommand::Run(_) if runtime.has(&invocation) => None,
        OciCommand::Create(container) => prepare(&paths, container, start_settings_of)
            .map(|key| (key, container.id.as_str(), FollowedStep::Create)),
        OciCommand::Run(container) => prepare(&paths, container, start_settings_of)
            .map(|key| (key, container.id.as_str(), FollowedStep::Run)),
        OciCommand::Start { id } => {
            known(&paths, id).map(|key| (key, id.as_str(), FollowedStep::Start))
        }
        OciCommand::Other => None,
    };
    if let Some((key, id, step)) = found {
        let root = invocation.root.clone();
        let order = FollowOrder { key, id: id.to_owned(), runtime: runtime.clone(), root, step };
        if let Err(error) = follow::spawn(&paths, &order) {
            warn!("container {id}: runs unmanaged: cannot announce it: {error}");
        }
    }
    let error = runtime.replace(&argv);
    error!("cannot run {}: {error}", runtime.path.display());
    crate::fail_as(BINARY, &format!("cannot run {}: {error}", runtime.path.display()))
}

/// Edits a container that will be created, and stores its announcement. Returns the container's key
/// if the container is managed.
fn prepare(
    paths: &ShimPaths,
    container: &NewContainer,
    start_settings_of: StartSettingsOf,
) -> Option<String> {
    let id = &container.id;
    let bundle = container.bundle.clone().or_else(|| std::env::current_dir().ok())?;
    let mut request = CreateTaskRequest::new();
    request.id.clone_from(id);
    bundle.to_str()?.clone_into(&mut request.bundle);
    // The runtime reports a spec that cannot be read.
    let spec = Bundle::new(&bundle).read_spec().ok()?;
    let namespace = names::namespace(&spec);
    if is_rootless() {
        if spec::decide(&spec).manage {
            warn!(
                "container {id}: runs unmanaged: its container engine is rootless; run the engine \
                 as root to manage it"
            );
        }
        return None;
    }
    let preparing = paths.clone();
    // A panic in the edit must not make the container fail, so the edit runs in its own thread.
    let prepared = std::thread::spawn(move || {
        create::prepare(&preparing, namespace, &request, start_settings_of).container
    });
    let Ok(announcement) = prepared.join() else {
        warn!(
            "container {id}: runs unmanaged: the edit of the container's spec panicked, which is a \
             bug: please report it"
        );
        return None;
    };
    let mut announcement = announcement?;
    name(&mut announcement);
    match paths.container(&announcement.key).keep(&announcement) {
        Ok(_) => Some(announcement.key),
        Err(error) => {
            warn!("container {id}: runs unmanaged: cannot store its announcement: {error}");
            None
        }
    }
}

/// Whether the container engine runs without root privileges on the host. In a user namespace, the
/// process may be root, but then `/` does not belong to the root user of that namespace.
fn is_rootless() -> bool {
    let root = rustix::process::geteuid().is_root();
    !root || std::fs::metadata("/").is_ok_and(|folder| folder.uid() != 0)
}

/// Replaces the container's id in the announcement by the name that the container engine has given
/// the container.
fn name(announcement: &mut Announcement) {
    if announcement.container == announcement.id
        && let Some(name) = names::given(std::os::unix::process::parent_id())
    {
        announcement.container = name;
    }
}

/// Returns the key of the container with this id, if Affinode edited it when it was created.
fn known(paths: &ShimPaths, id: &str) -> Option<String> {
    let keys = names::NAMESPACES.iter().map(|namespace| container_key(namespace, id));
    keys.into_iter().find(|key| paths.container(key).is_kept())
}
