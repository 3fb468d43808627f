//! Layers of container images. A layer is a tar in memory. It contains files of the machine or of
//! an unpacked package.

use std::path::Path;

use anyhow::{Context, Result};

/// A tar that is being written. Every file belongs to root.
pub struct Layer {
    tar: tar::Builder<Vec<u8>>,
}

impl Default for Layer {
    fn default() -> Self {
        Self { tar: tar::Builder::new(Vec::new()) }
    }
}

impl Layer {
    /// Creates a layer with the folders and users that every image contains.
    ///
    /// # Errors
    /// When memory is short.
    pub fn base() -> Result<Self> {
        let passwd = "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/tmp:/bin/sh\n";
        Self::with_users(passwd, "root:x:0:\nuser:x:1000:\n")
    }

    /// Like [`Layer::base`], but with these contents of `/etc/passwd` and `/etc/group`.
    ///
    /// # Errors
    /// When memory is short.
    pub fn with_users(passwd: &str, group: &str) -> Result<Self> {
        let mut layer = Self::default();
        for (folder, mode) in [
            ("tmp", 0o1777),
            ("proc", 0o755),
            ("sys", 0o755),
            ("dev", 0o755),
            ("run", 0o755),
            ("root", 0o700),
        ] {
            layer.folder(folder, mode)?;
        }
        layer.file("etc/passwd", 0o644, passwd.as_bytes())?;
        layer.file("etc/group", 0o644, group.as_bytes())?;
        Ok(layer)
    }

    /// Adds a folder.
    ///
    /// # Errors
    /// When the path is too long for a tar.
    pub fn folder(&mut self, path: impl AsRef<Path>, mode: u32) -> Result<()> {
        let path = path.as_ref();
        let mut header = header(tar::EntryType::Directory, mode);
        let inside = path.strip_prefix("/").unwrap_or(path);
        Ok(self.tar.append_data(&mut header, inside, std::io::empty())?)
    }

    /// Adds a file with this content.
    ///
    /// # Errors
    /// When the path is too long for a tar.
    pub fn file(&mut self, path: impl AsRef<Path>, mode: u32, content: &[u8]) -> Result<()> {
        let mut header = header(tar::EntryType::Regular, mode);
        header.set_size(content.len() as u64);
        Ok(self.tar.append_data(&mut header, path, content)?)
    }

    /// Copies the machine's file `host` to the path `inside` of the layer. Symbolic links are
    /// followed.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn copy(&mut self, host: &Path, inside: &Path) -> Result<()> {
        let content =
            std::fs::read(host).with_context(|| format!("cannot read {}", host.display()))?;
        self.file(inside.strip_prefix("/").unwrap_or(inside), 0o755, &content)
    }

    /// Adds a symbolic link at the path `inside`.
    ///
    /// # Errors
    /// When a path is too long for a tar.
    pub fn link(&mut self, inside: &Path, target: &Path) -> Result<()> {
        let mut header = header(tar::EntryType::Symlink, 0o777);
        Ok(self.tar.append_link(&mut header, inside.strip_prefix("/").unwrap_or(inside), target)?)
    }

    /// Finishes the tar and returns its bytes.
    ///
    /// # Errors
    /// When memory is short.
    pub fn finish(self) -> Result<Vec<u8>> {
        Ok(self.tar.into_inner()?)
    }
}

fn header(kind: tar::EntryType, mode: u32) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(0);
    header
}
