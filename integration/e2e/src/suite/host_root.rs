//! Root filesystem for containers that need the machine's installed software. It is the machine's
//! own root below a writable overlay layer, whose contents are discarded.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::{containerd, supervisor::STORE, testbed::Testbed};

/// Types of filesystems that can contain installed programs. Filesystems of other types belong to
/// the kernel or are temporary.
const HOLD_FILES: [&str; 7] = ["ext4", "xfs", "btrfs", "squashfs", "erofs", "overlay", "virtiofs"];
/// Folders that the container runtime provides. The container does not get the machine's mounts in
/// these folders.
const NOT_THESE: [&str; 5] = ["/proc", "/sys", "/dev", "/run", "/tmp"];

/// Mounts the machine's root below a writable overlay layer, and returns the mount point. The mount
/// exists only in the testbed's mount namespace.
pub fn mount(world: &Testbed) -> Result<PathBuf> {
    let folder = world.dir().join(STORE).join("host");
    let path = folder.display();
    let script = format!(
        "mkdir -p {path}/upper {path}/work {path}/root && \
         mount -t overlay overlay -o lowerdir=/,upperdir={path}/upper,workdir={path}/work {path}/root"
    );
    containerd::run(world.keeper().command(Path::new("/bin/sh")).args(["-c", &script]))
        .context("cannot mount a layer over the machine's root")?;
    Ok(folder.join("root"))
}

/// Lists the machine's mounts below its root, as source and destination. They must be mounted in
/// the container as well, because an overlay shows only their empty mount points.
pub fn other_mounts(world: &Testbed) -> Result<Vec<(PathBuf, PathBuf)>> {
    let table =
        std::fs::read_to_string("/proc/self/mountinfo").context("cannot read the mount table")?;
    let mut found = Vec::new();
    for line in table.lines() {
        let Some((fields, kind)) = line.split_once(" - ") else {
            continue;
        };
        let kind = kind.split(' ').next().unwrap_or_default();
        let Some(point) = fields.split(' ').nth(4).map(PathBuf::from) else {
            continue;
        };
        let passing = NOT_THESE.iter().any(|place| point.starts_with(place))
            || point.starts_with(world.dir());
        if HOLD_FILES.contains(&kind) && point != Path::new("/") && !passing {
            found.push((point.clone(), point));
        }
    }
    Ok(found)
}
