//! The mounts of a testbed. They are created in a private mount namespace, so other processes of
//! the machine do not see them.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, unshare},
};

use super::{STORE, Scope};

/// Folders that containerd, runc and crun always use, whatever their configuration contains. Each
/// testbed gets private folders at these paths.
const SHARED_STATE: [&str; 3] = ["/run/containerd", "/run/runc", "/run/crun"];

/// Folders that a kubelet and the CNI plugins always use, whatever their configuration contains.
/// The testbed of a node gets private folders at these paths.
const KUBELET_STATE: [&str; 4] =
    ["/var/lib/kubelet", "/var/log/pods", "/var/log/containers", "/var/lib/cni"];

/// Folders in which containerd always looks for CDI specifications.
const CDI_SPECS: [&str; 2] = ["/etc/cdi", "/run/cdi"];

/// Folders that dockerd always uses, whatever its configuration contains.
const DOCKER_STATE: [&str; 1] = ["/run/docker"];

/// Moves this process into a private mount namespace. If the testbed is a node, also moves it into
/// a private network namespace.
pub(super) fn make_private(world: &Path, scope: Scope) -> Result<()> {
    unshare(CloneFlags::CLONE_NEWNS).context("cannot make a mount namespace: run as root")?;
    let mut folders: Vec<&Path> = SHARED_STATE.iter().map(Path::new).collect();
    if scope == Scope::Node {
        unshare(CloneFlags::CLONE_NEWNET).context("cannot make a network namespace")?;
        let of_node = KUBELET_STATE.iter().chain(&CDI_SPECS).chain(&DOCKER_STATE);
        folders.extend(of_node.map(Path::new));
    }
    let none: Option<&str> = None;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)
        .context("cannot make mounts private")?;
    let store = world.join(STORE);
    for folder in folders.into_iter().chain([store.as_path()]) {
        std::fs::create_dir_all(folder)
            .with_context(|| format!("cannot make {}", folder.display()))?;
        mount(Some("tmpfs"), folder, Some("tmpfs"), MsFlags::empty(), Some("mode=0711"))
            .with_context(|| format!("cannot mount a tmpfs on {}", folder.display()))?;
    }
    Ok(())
}

/// Detaches every mount below the testbed's folder, the innermost first.
pub(super) fn unmount_below(world: &Path) -> Result<()> {
    let table =
        std::fs::read_to_string("/proc/self/mountinfo").context("cannot read the mount table")?;
    let mut points: Vec<PathBuf> = table
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        .map(PathBuf::from)
        .filter(|point| point.starts_with(world))
        .collect();
    points.reverse();
    for point in points {
        // This mount may already have been removed together with a mount above it.
        let _ = umount2(&point, MntFlags::MNT_DETACH);
    }
    Ok(())
}
