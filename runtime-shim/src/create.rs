//! Prepares a container with a GPU when containerd sends its Create request.
//!
//! ```text
//! read config.json ─┬─ unreadable ───────────────> nothing
//!                   ├─ no GPU ───────────────────> options translated
//!                   └─ GPU ─ library installed? rootfs readable? no volume covers a mount?
//!                              ├─ no ────────────> options translated, reason logged
//!                              └─ yes ───────────> folder made, config.json replaced, announced
//! ```
//!
//! No failure here makes a Create fail: at worst the container runs as with the stock runc. An exec
//! needs no edit, because every process of the container sees the mounted `/etc/ld.so.preload`.

use std::path::Path;

use affinode_proto::api::control::Announcement;
use affinode_proto::paths::{CONTAINER_LIB_DIR, CONTAINER_RUN_DIR};
use affinode_proto::wire::StartSettings;
use containerd_shim_protos::api::CreateTaskRequest;
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use serde_json::Value;
use tracing::{info, warn};

use crate::bundle::{Bundle, BundleError};
use crate::claim_policy;
use crate::ld_so_preload;
use crate::metadata;
use crate::options;
use crate::paths::{ContainerDir, ShimPaths};
use crate::rootfs::{ResolvedPath, RootfsError, RootfsLayers};
use crate::spec::{self, BindMount, EditError};
use crate::{StartSettingsOf, report};

/// Result of [`prepare`]: changes to a Create request, and the container to announce.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PreparedContainer {
    /// Options that replace those of the request. `None` if the request's options stay.
    pub options: Option<Any>,
    /// The container to announce to the controller. `None` if it runs unmanaged.
    pub container: Option<Announcement>,
}

/// Reason why a container with a GPU runs unmanaged (without Affinode's library).
#[derive(Debug, thiserror::Error)]
pub enum NotManaged {
    /// The library is not installed on this node.
    #[error("the preload library {0} is missing; install Affinode on this node")]
    NoLibrary(std::path::PathBuf),
    /// The image's own /etc/ld.so.preload cannot be read.
    #[error("cannot read {file} of the image", file = ld_so_preload::FILE)]
    Rootfs(#[from] RootfsError),
    /// The image has a folder, device, socket or link at the path of the preload list.
    #[error("{file} of the image is {0}, not a file", file = ld_so_preload::FILE)]
    NotAFile(&'static str),
    /// A file of the host is mounted over the image's preload list, and cannot be merged.
    #[error("cannot read {path:?}, which is mounted over {file}", file = ld_so_preload::FILE)]
    HostFile {
        /// Path of the mounted file on the host.
        path: std::path::PathBuf,
        /// Reason why the mounted file is not merged.
        source: ld_so_preload::HostFileError,
    },
    /// The rootfs is read-only, so mount points cannot be created.
    #[error("the root filesystem is mounted read-only, so mount points cannot be added to it")]
    ReadOnly,
    /// A volume of the container, or the form of the spec, prevents the addition of the mounts.
    #[error("cannot add mounts to the container")]
    Edit(#[from] EditError),
    /// The container's folder below the run directory could not be created.
    #[error("cannot create the container's folder on the host")]
    Folder(#[source] std::io::Error),
    /// config.json could not be replaced in the bundle.
    #[error("cannot write the container's spec")]
    Bundle(#[from] BundleError),
}

/// Prepares a container for its creation. If it has a GPU, edits its config.json and creates its
/// folder. Reads and writes files, so it may block.
#[must_use]
pub fn prepare(
    paths: &ShimPaths,
    namespace: &str,
    request: &CreateTaskRequest,
    start_settings_of: StartSettingsOf,
) -> PreparedContainer {
    let (options, spec) = read(request);
    let container =
        spec.and_then(|spec| manage(paths, namespace, request, spec, start_settings_of));
    PreparedContainer { options, container }
}

/// Reads the spec of a container, and translates the options of its Create request. Returns options
/// that replace those of the request, and the spec. It does not edit anything, so that a fault of
/// [`manage`] leaves the options as the stock shim needs them.
#[must_use]
pub fn read(request: &CreateTaskRequest) -> (Option<Any>, Option<Value>) {
    let id = request.id.as_str();
    let spec = match Bundle::new(&request.bundle).read_spec() {
        Ok(spec) => Some(spec),
        Err(error) => {
            warn!("container {id}: runs unmanaged: {}", report(&error));
            None
        }
    };
    let cgroups_path = spec.as_ref().and_then(spec::cgroups_path);
    let options = options::translate(request.options.as_ref(), cgroups_path)
        .inspect_err(|error| {
            warn!("container {id}: the runtime options cannot be read, and are passed to the stock shim unchanged: {}", report(error));
        })
        .unwrap_or_default();
    (options, spec)
}

/// Adds Affinode to a container with a GPU. Returns the announcement of the container. `None`: the
/// container runs unmanaged. Reads and writes files, so it may block.
#[must_use]
pub fn manage(
    paths: &ShimPaths,
    namespace: &str,
    request: &CreateTaskRequest,
    mut spec: Value,
    start_settings_of: StartSettingsOf,
) -> Option<Announcement> {
    let id = request.id.as_str();
    let spec = &mut spec;
    let decision = spec::decide(spec);
    if let Some(warning) = decision.warning {
        warn!("container {id}: {warning}");
    }
    if !decision.manage {
        return None;
    }
    let mut announcement = metadata::announcement(namespace, request, spec);
    announcement.generation = generation();
    claim_policy::add(&paths.run_dir, spec, &mut announcement);
    let folder = paths.container(&announcement.key);
    let settings = start_settings_of(&paths.config, &announcement);
    let bundle = Bundle::new(&request.bundle);
    match edit(paths, &folder, &announcement, settings, request, &bundle, spec) {
        Ok(()) => {
            info!(key = announcement.key, "container {id}: managed by Affinode");
            Some(announcement)
        }
        Err(error) => {
            warn!("container {id}: runs unmanaged: {}", report(&error));
            if let Err(error) = folder.remove(Some(announcement.generation)) {
                warn!("container {id}: cannot remove its folder in the run directory: {error}");
            }
            None
        }
    }
}

/// Returns a number that differs between containers, even if they have the same id. It is the time
/// in nanoseconds since 1970.
fn generation() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.ok().and_then(|now| u64::try_from(now.as_nanos()).ok()).unwrap_or(1)
}

fn edit(
    paths: &ShimPaths,
    folder: &ContainerDir,
    announcement: &Announcement,
    settings: StartSettings,
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
    // An earlier Create may have added a mount of the shim's own file here. If that file no longer
    // exists, the mount is ignored, and the list is built from the image again.
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
    // A process may look up driver functions, and allocate, before a controller has accepted it.
    // With these files the library chooses the wrappers that the engine needs, and obeys the limit.
    folder.write_settings(settings).map_err(NotManaged::Folder)?;
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
