//! Memory files whose connections have ended. A process may have content in such a file, for example
//! while it is offloaded and has registered with the controller again. The host pool therefore never
//! frees its pages. But a process could keep an ended file and get another one with each connection, so
//! the pages of ended files count for all processes of their container.
//!
//! The host pool keeps only the file system of an ended file. It becomes empty when the last process
//! closes the file.

use std::{collections::BTreeMap, os::fd::OwnedFd};

use crate::memory_file;

/// Maximum number of ended files with pages that a container may have. Each takes a descriptor of the
/// host pool, and a process could keep one page in each.
const MAX_FILES: usize = 64;

/// The file systems of ended memory files, by the number of the container.
#[derive(Debug, Default)]
pub struct EndedFiles(BTreeMap<u64, Vec<OwnedFd>>);

impl EndedFiles {
    /// Adds the file system of an ended file.
    pub fn add(&mut self, container: u64, file_system: OwnedFd) {
        self.forget_empty();
        self.0.entry(container).or_default().push(file_system);
    }

    /// Whether a process of the container may get another file.
    pub fn may_add(&mut self, container: u64) -> bool {
        self.forget_empty();
        self.0.get(&container).is_none_or(|all| all.len() < MAX_FILES)
    }

    fn forget_empty(&mut self) {
        for all in self.0.values_mut() {
            all.retain(|one| memory_file::used_bytes(one).is_ok_and(|bytes| bytes > 0));
        }
        self.0.retain(|_, all| !all.is_empty());
    }

    /// Memory in the ended files of a container, in bytes.
    pub fn used_bytes(&self, container: u64) -> u64 {
        let all = self.0.get(&container).into_iter().flatten();
        all.map(|one| memory_file::used_bytes(one).unwrap_or(0)).sum()
    }
}
