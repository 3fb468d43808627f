//! What a Create leads to.
//!
//! ```text
//! read config.json ─┬─ unreadable ───────────────> nothing
//!                   ├─ no GPU ───────────────────> options translated
//!                   └─ GPU ─ library there? rootfs understood? no volume in the way?
//!                              ├─ no ────────────> options translated; the reason is logged
//!                              └─ yes ───────────> folder made, config.json replaced, announced
//! ```
//!
//! Nothing here fails a Create: the worst outcome is the container that stock
//! runc would have run. An exec in the container needs no edit of its own: it
//! sees the mounted `/etc/ld.so.preload` like every process.

use std::path::Path;

use affinode_proto::api::control::Announcement;
use affinode_proto::paths::{CONTAINER_LIB_DIR, CONTAINER_RUN_DIR};
use containerd_shim_protos::api::CreateTaskRequest;
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use serde_json::Value;
use tracing::{info, warn};

use crate::bundle::{Bundle, BundleError};
use crate::ld_so_preload;
use crate::metadata;
use crate::options;
use crate::paths::{ContainerDir, ShimPaths};
use crate::rootfs::{ResolvedPath, RootfsError, RootfsLayers};
use crate::spec::{self, BindMount, EditError};
use crate::{EngineOf, report};

/// What goes on with a Create.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PreparedContainer {
    /// Options in place of those of the request.
    pub options: Option<Any>,
    /// The container, if it is to be managed.
    pub container: Option<Announcement>,
}

/// A container with a GPU that runs unedited.
#[derive(Debug, thiserror::Error)]
pub enum NotManaged {
    /// The library is not installed.
    #[error("the preload library {0} is missing; install Affinode on this node")]
    NoLibrary(std::path::PathBuf),
    /// The image's own preload file cannot be seen.
    #[error("cannot tell what the image preloads")]
    Rootfs(#[from] RootfsError),
    /// The image has something else in the file's place.
    #[error("{file} of the image is {0}, not a file", file = ld_so_preload::FILE)]
    NotAFile(&'static str),
    /// A list of the host's cannot be read.
    #[error("cannot read {path:?}, which is mounted over {file}", file = ld_so_preload::FILE)]
    HostFile {
        /// On the host.
        path: std::path::PathBuf,
        /// Why.
        source: ld_so_preload::HostFileError,
    },
    /// Mount points cannot be made.
    #[error("the root filesystem is mounted read-only, so mount points cannot be added to it")]
    ReadOnly,
    /// The spec cannot take the mounts.
    #[error("cannot add mounts to the container")]
    Edit(#[from] EditError),
    /// The container's folder could not be made.
    #[error("cannot make the container's folder on the host")]
    Folder(#[source] std::io::Error),
    /// config.json could not be replaced.
    #[error("cannot write the container's spec")]
    Bundle(#[from] BundleError),
}

/// Prepares a container for its creation. Blocks on files.
#[must_use]
pub fn prepare(
    paths: &ShimPaths,
    namespace: &str,
    request: &CreateTaskRequest,
    engine_of: EngineOf,
) -> PreparedContainer {
    let id = request.id.as_str();
    let bundle = Bundle::new(&request.bundle);
    let mut spec = match bundle.read_spec() {
        Ok(spec) => Some(spec),
        Err(error) => {
            warn!(id, "container runs unmanaged: {}", report(&error));
            None
        }
    };
    let cgroups_path = spec.as_ref().and_then(spec::cgroups_path);
    let options = options::translate(request.options.as_ref(), cgroups_path)
        .inspect_err(|error| warn!(id, "options are passed on as they are: {}", report(error)))
        .unwrap_or_default();
    let container =
        spec.as_mut().and_then(|spec| manage(paths, namespace, request, &bundle, spec, engine_of));
    PreparedContainer { options, container }
}

fn manage(
    paths: &ShimPaths,
    namespace: &str,
    request: &CreateTaskRequest,
    bundle: &Bundle,
    spec: &mut Value,
    engine_of: EngineOf,
) -> Option<Announcement> {
    let id = request.id.as_str();
    let decision = spec::decide(spec);
    if let Some(warning) = decision.warning {
        warn!(id, "{warning}");
    }
    if !decision.manage {
        return None;
    }
    let mut announcement = metadata::announcement(namespace, request, spec);
    announcement.generation = generation();
    let folder = paths.container(&announcement.key);
    let engine = engine_of(&paths.config, &announcement);
    match edit(paths, &folder, &announcement, engine, request, bundle, spec) {
        Ok(()) => {
            info!(id, key = announcement.key, "container is managed");
            Some(announcement)
        }
        Err(error) => {
            warn!(id, "container runs unmanaged: {}", report(&error));
            if let Err(error) = folder.remove(Some(announcement.generation)) {
                warn!(id, "cannot remove the container's folder: {error}");
            }
            None
        }
    }
}

/// Another one for each container, also of the same id.
fn generation() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.ok().and_then(|now| u64::try_from(now.as_nanos()).ok()).unwrap_or(1)
}

fn edit(
    paths: &ShimPaths,
    folder: &ContainerDir,
    announcement: &Announcement,
    engine: &str,
    request: &CreateTaskRequest,
    bundle: &Bundle,
    spec: &mut Value,
) -> Result<(), NotManaged> {
    if !paths.library().is_file() {
        return Err(NotManaged::NoLibrary(paths.library()));
    }
    let rootfs =
        RootfsLayers::new(&request.rootfs, spec::root_path(spec), Path::new(&request.bundle))?;
    if !rootfs.writable() {
        return Err(NotManaged::ReadOnly);
    }
    // Our own file of an earlier Create, if it is gone: begun again from the image.
    let list = spec::take_file_mount(spec, ld_so_preload::FILE)
        .filter(|path| *path != folder.preload() || path.exists());
    let theirs = match list {
        Some(path) => ld_so_preload::read_host(&path)
            .map_err(|source| NotManaged::HostFile { path, source })?,
        None => match rootfs.find(ld_so_preload::FILE, ld_so_preload::MAX_BYTES)? {
            ResolvedPath::Missing => Vec::new(),
            ResolvedPath::Regular(own) => own,
            ResolvedPath::Other(kind) => return Err(NotManaged::NotAFile(kind)),
        },
    };
    spec::add_mounts(spec, &mounts(paths, folder))?;
    folder
        .make(announcement.generation, &ld_so_preload::merge(&theirs))
        .map_err(NotManaged::Folder)?;
    // What looks for the driver's functions before the controller has named the engine gets them
    // as that one needs them.
    folder.write_engine(engine).map_err(NotManaged::Folder)?;
    bundle.write_spec(spec)?;
    Ok(())
}

fn mounts(paths: &ShimPaths, folder: &ContainerDir) -> [BindMount; 3] {
    [
        BindMount {
            source: paths.lib_dir.clone(),
            destination: CONTAINER_LIB_DIR,
            options: &["bind", "ro", "nosuid", "nodev"],
        },
        BindMount {
            source: folder.mount(),
            destination: CONTAINER_RUN_DIR,
            options: &["bind", "ro", "nosuid", "nodev", "noexec"],
        },
        BindMount {
            source: folder.preload(),
            destination: ld_so_preload::FILE,
            options: &["bind", "ro", "nosuid", "nodev", "noexec"],
        },
    ]
}

#[cfg(test)]
mod tests;
