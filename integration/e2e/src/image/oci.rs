//! Writes OCI archives. An archive is one tar with layers, configurations and manifests, which are
//! named by their digests.

use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::layer::Layer;

const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// An OCI archive that is being written.
#[derive(Default)]
pub struct Archive {
    blobs: Vec<(String, Vec<u8>)>,
    manifests: Vec<Value>,
}

impl Archive {
    /// Media type of an image's manifest.
    pub const MANIFEST: &str = MANIFEST;

    /// Returns the digest of the manifest of the image with this name. The digest begins with the
    /// name of its algorithm.
    #[must_use]
    pub fn named(&self, name: &str) -> Option<&str> {
        let is_it = |m: &&Value| m["annotations"]["io.containerd.image.name"] == name;
        self.manifests.iter().find(is_it)?["digest"].as_str()
    }

    /// Returns the blob with this SHA-256 digest.
    #[must_use]
    pub fn blob(&self, digest: &str) -> Option<&[u8]> {
        let found = self.blobs.iter().find(|(known, _)| known == digest);
        found.map(|(_, content)| content.as_slice())
    }

    /// Adds an image that consists of one layer. `process` becomes the field `config` in the
    /// image's configuration.
    ///
    /// # Errors
    /// When memory is short.
    pub fn image(&mut self, name: &str, layer: &[u8], process: &Value) -> Result<()> {
        let layer = self.store(layer.to_vec(), LAYER);
        let config = json!({
            "architecture": architecture(), "os": "linux", "config": process,
            "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]},
        });
        let config = self.store(serde_json::to_vec(&config)?, CONFIG);
        let manifest = json!({
            "schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": [layer],
        });
        let mut manifest = self.store(serde_json::to_vec(&manifest)?, MANIFEST);
        manifest["annotations"] = json!({"io.containerd.image.name": name});
        self.manifests.push(manifest);
        Ok(())
    }

    /// Writes the archive to a file.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(self, path: &Path) -> Result<()> {
        let bytes = self.into_bytes()?;
        std::fs::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Finishes the archive and returns its bytes.
    ///
    /// # Errors
    /// When memory is short.
    pub fn into_bytes(self) -> Result<Vec<u8>> {
        let mut tar = Layer::default();
        tar.file("oci-layout", 0o644, br#"{"imageLayoutVersion":"1.0.0"}"#)?;
        for (digest, content) in &self.blobs {
            tar.file(format!("blobs/sha256/{digest}"), 0o644, content)?;
        }
        let index = json!({"schemaVersion": 2, "manifests": self.manifests});
        tar.file("index.json", 0o644, &serde_json::to_vec(&index)?)?;
        tar.finish()
    }

    /// Adds a blob and returns its OCI descriptor. Blobs with equal contents are stored once.
    fn store(&mut self, content: Vec<u8>, media_type: &str) -> Value {
        let digest: String =
            Sha256::digest(&content).iter().map(|byte| format!("{byte:02x}")).collect();
        let descriptor = json!({
            "mediaType": media_type, "digest": format!("sha256:{digest}"), "size": content.len(),
        });
        if self.blobs.iter().all(|(known, _)| *known != digest) {
            self.blobs.push((digest, content));
        }
        descriptor
    }
}

fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}
