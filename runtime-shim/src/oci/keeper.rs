//! The keeper keeps a controller alive while containers without a shim exist, and announces them to
//! the controller.
//!
//! The keeper is one process per node. A container that has a shim needs no keeper, because the
//! shim does the same. If systemd runs the controller, the keeper connects to that controller.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::time::Duration;

use affinode_proto::api::control::Announcement;
use tracing::{info, warn};

use crate::announce::{back_off, ended, spread};
use crate::launch::Launcher;
use crate::paths::ShimPaths;
use crate::report;
use crate::rpc::RpcCaller;

/// File below the run directory that the keeper locks while it runs.
const LOCK: &str = "keeper.lock";

/// Announces a container to the controller, if one runs.
pub async fn announce(paths: &ShimPaths, announcement: Announcement) {
    let (socket, id) = (paths.control_socket(), announcement.id.clone());
    let call = move || RpcCaller::control(&socket)?.announce(announcement);
    match tokio::task::spawn_blocking(call).await {
        Ok(Ok(warnings)) => {
            for warning in warnings {
                warn!("container {id}: {warning}");
            }
        }
        Ok(Err(error)) => {
            warn!("container {id}: cannot announce it to the controller: {}", report(&error));
        }
        Err(error) => warn!("container {id}: cannot announce it to the controller: {error}"),
    }
}

/// Runs the keeper until no container's folder has an announcement. Returns at once if another
/// keeper runs.
pub async fn keep(launcher: &Launcher) {
    // An announcement can be added after the last check in `watch`. The keeper that was started for
    // that announcement ends, because this keeper still holds the lock. So this loop checks again
    // after the lock is released.
    while launcher.paths.keeps_any() {
        match lock(&launcher.paths) {
            Ok(Some(_lock)) => watch(launcher).await,
            Ok(None) => return,
            Err(error) => {
                return warn!(
                    "keeper: cannot take its lock, so the controller may exit while containers \
                     run: {error}"
                );
            }
        }
    }
}

fn lock(paths: &ShimPaths) -> io::Result<Option<std::fs::File>> {
    let path = paths.run_dir.join(LOCK);
    let file =
        OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(path)?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(std::fs::TryLockError::WouldBlock) => Ok(None),
        Err(std::fs::TryLockError::Error(error)) => Err(error),
    }
}

async fn watch(launcher: &Launcher) {
    let mut failures = 0;
    while launcher.paths.keeps_any() {
        let pause = match launcher.connect().await {
            Ok(stream) => {
                failures = 0;
                ended(&mut Some(stream)).await;
                info!(
                    "keeper: the connection to the controller ended, so the keeper connects again"
                );
                Duration::ZERO
            }
            Err(error) => {
                if failures == 0 {
                    warn!(
                        "keeper: cannot connect to the controller, and tries again: {}",
                        report(&error)
                    );
                }
                failures += 1;
                back_off(failures - 1)
            }
        };
        tokio::time::sleep(pause + spread()).await;
    }
}
