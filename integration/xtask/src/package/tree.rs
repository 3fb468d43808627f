//! A tree of files with paths and modes, from which all packages are built.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

/// An entry of the tree: a file or a symbolic link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Node {
    /// A file owned by root.
    File {
        content: Vec<u8>,
        mode: u16,
    },
    Link(PathBuf),
}

/// The tree: entries by absolute path, sorted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tree(BTreeMap<PathBuf, Node>);

impl Tree {
    /// Adds a file that every user may read.
    pub fn file(&mut self, path: impl Into<PathBuf>, content: impl Into<Vec<u8>>) {
        self.0.insert(path.into(), Node::File { content: content.into(), mode: 0o644 });
    }

    /// Adds a file that every user may execute.
    pub fn program(&mut self, path: impl Into<PathBuf>, content: impl Into<Vec<u8>>) {
        self.0.insert(path.into(), Node::File { content: content.into(), mode: 0o755 });
    }

    /// Adds a symbolic link.
    pub fn link(&mut self, path: impl Into<PathBuf>, target: impl Into<PathBuf>) {
        self.0.insert(path.into(), Node::Link(target.into()));
    }

    /// All entries, sorted by path.
    pub fn iter(&self) -> impl Iterator<Item = (&Path, &Node)> {
        self.0.iter().map(|(path, node)| (path.as_path(), node))
    }

    /// The folders that contain the entries. An outer folder is before its inner folders.
    pub fn folders(&self) -> BTreeSet<&Path> {
        let above = self.0.keys().flat_map(|path| path.ancestors().skip(1));
        above.filter(|folder| folder.parent().is_some()).collect()
    }

    /// Total size of all files in bytes.
    pub fn size_bytes(&self) -> u64 {
        let size = |node: &Node| match node {
            Node::File { content, .. } => content.len() as u64,
            Node::Link(_) => 0,
        };
        self.0.values().map(size).sum()
    }
}
