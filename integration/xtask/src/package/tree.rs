//! Files, where they go, and with which mode: what all packages are made from.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

/// What is at a place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Node {
    /// A file, of root.
    File {
        /// Its bytes.
        content: Vec<u8>,
        /// Its mode.
        mode: u16,
    },
    /// A symbolic link.
    Link(PathBuf),
}

/// Nodes by absolute path, sorted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tree(BTreeMap<PathBuf, Node>);

impl Tree {
    /// Adds a file that everybody may read.
    pub fn file(&mut self, path: impl Into<PathBuf>, content: impl Into<Vec<u8>>) {
        self.0.insert(path.into(), Node::File { content: content.into(), mode: 0o644 });
    }

    /// Adds a file that everybody may run.
    pub fn program(&mut self, path: impl Into<PathBuf>, content: impl Into<Vec<u8>>) {
        self.0.insert(path.into(), Node::File { content: content.into(), mode: 0o755 });
    }

    /// Adds a symbolic link.
    pub fn link(&mut self, path: impl Into<PathBuf>, target: impl Into<PathBuf>) {
        self.0.insert(path.into(), Node::Link(target.into()));
    }

    /// All of it, sorted.
    pub fn iter(&self) -> impl Iterator<Item = (&Path, &Node)> {
        self.0.iter().map(|(path, node)| (path.as_path(), node))
    }

    /// The folders that it needs, outer ones first.
    pub fn folders(&self) -> BTreeSet<&Path> {
        let above = self.0.keys().flat_map(|path| path.ancestors().skip(1));
        above.filter(|folder| folder.parent().is_some()).collect()
    }

    /// The bytes of all files.
    pub fn size_bytes(&self) -> u64 {
        let size = |node: &Node| match node {
            Node::File { content, .. } => content.len() as u64,
            Node::Link(_) => 0,
        };
        self.0.values().map(size).sum()
    }
}
