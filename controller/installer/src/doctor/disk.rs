//! Check of the folder for content of containers that are offloaded for long.

use std::path::{Path, PathBuf};

use affinode_controller::config::{DiskFolder, MemorySection};
use rustix::{
    fs::{AtFlags, Mode, OFlags, fstatvfs, open, openat, unlinkat},
    io::Errno,
};

use super::{CheckGroup, DoctorCheck};

/// The part of the file system that the host pool leaves free, as a divisor of its size.
const FREE_PART: u64 = 20;

/// What the check of the folder for disk files examines.
#[derive(Clone, Debug)]
pub struct DiskFacts {
    /// Path of the folder.
    pub path: PathBuf,
    /// Maximum size of all disk files, in bytes.
    pub max_bytes: u64,
    /// Space for disk files in bytes, or the reason why the folder cannot be used.
    pub free_bytes: Result<u64, String>,
}

impl DiskFacts {
    /// Creates and deletes an empty file in the configured folder, and reads the free space. `None`:
    /// no folder is configured.
    #[must_use]
    pub fn gather(rules: &MemorySection) -> Option<DiskFacts> {
        let DiskFolder { path, max_bytes } = rules.disk()?;
        let free_bytes = free_bytes(&path);
        Some(DiskFacts { path, max_bytes, free_bytes })
    }
}

/// Returns the space for disk files in a folder, in bytes. `Err`: the step that failed, and the error
/// of the system call.
fn free_bytes(folder: &Path) -> Result<u64, String> {
    let failed = |step: &'static str| move |errno: Errno| format!("cannot {step}: {errno}");
    let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = open(folder, flags, Mode::empty()).map_err(failed("open the folder"))?;
    let name = format!("affinode-doctor-{}", std::process::id());
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::DIRECT | OFlags::CLOEXEC;
    let created = openat(&folder, &name, flags, Mode::RUSR | Mode::WUSR);
    // Without direct I/O, the kernel can create the file although it cannot open it.
    let _ = unlinkat(&folder, &name, AtFlags::empty());
    created.map_err(failed("create a file for direct I/O (O_DIRECT)"))?;
    let found = fstatvfs(&folder).map_err(failed("read the free space"))?;
    let blocks = found.f_bavail.saturating_sub(found.f_blocks / FREE_PART);
    Ok(blocks.saturating_mul(found.f_frsize))
}

/// Returns the check of the folder for disk files. No check: no folder is configured.
#[must_use]
pub fn judge(facts: Option<&DiskFacts>) -> Vec<DoctorCheck> {
    let Some(facts) = facts else { return Vec::new() };
    let mut group = CheckGroup::new("memory");
    let (path, max_mib) = (facts.path.display(), facts.max_bytes >> 20);
    match &facts.free_bytes {
        Err(why) => group.warning(
            "disk folder",
            format!("{path}: {why}"),
            "the content of offloaded containers stays in host memory: create the folder on a local \
             file system that supports O_DIRECT, or name another one with memory.disk_folder",
        ),
        Ok(free) if *free < facts.max_bytes => group.warning(
            "disk folder",
            format!("{path}: {} MiB free for at most {max_mib} MiB of content", free >> 20),
            "when the disk is full, the content of further containers stays in host memory: free \
             space, or lower memory.disk_max_mib",
        ),
        Ok(free) => group.good(
            "disk folder",
            format!("{path}: {} MiB free for at most {max_mib} MiB of content", free >> 20),
        ),
    }
    group.checks
}

#[cfg(test)]
mod tests {
    use super::{super::CheckVerdict, *};

    #[test]
    fn free_space_is_compared_with_the_maximum() {
        use CheckVerdict::{Good, Warning};
        for (free_bytes, verdict) in
            [(Ok(9), Good), (Ok(8), Warning), (Err("cannot open".to_owned()), Warning)]
        {
            let facts = DiskFacts { path: "/disk".into(), max_bytes: 9, free_bytes };
            assert_eq!(judge(Some(&facts))[0].verdict, verdict, "{facts:?}");
        }
        assert_eq!(judge(None), []);
        assert!(DiskFacts::gather(&MemorySection::default()).is_none());
    }

    #[test]
    fn folder_that_cannot_be_used_is_reported() {
        let root = tempfile::tempdir().unwrap();
        let of = |path: &Path| {
            let rules = MemorySection { disk_folder: path.into(), ..MemorySection::default() };
            DiskFacts::gather(&rules).unwrap().free_bytes
        };
        assert!(of(&root.path().join("none")).unwrap_err().contains("open the folder"));
        std::fs::write(root.path().join("file"), "").unwrap();
        assert!(of(&root.path().join("file")).unwrap_err().contains("open the folder"));
        // The temporary folder may be on a file system without direct I/O.
        let found = of(root.path());
        assert!(found.as_ref().map_or_else(|why| why.contains("O_DIRECT"), |free| *free > 0));
        assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 1, "the file is deleted");
    }
}
