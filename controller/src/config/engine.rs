//! Reads single values of the configuration for programs other than the controller: the settings of
//! a container that its processes need at their start, and the OCI runtime.

use std::path::{Path, PathBuf};

use affinode_proto::{api::control::Announcement, wire::StartSettings};

use super::Config;
use crate::conversion;

/// Returns the engine (method of offload) and the VRAM limit that the controller will choose for a
/// container with this announcement. If the configuration cannot be read, the defaults apply.
#[must_use]
pub fn start_settings_of(file: &Path, announcement: &Announcement) -> StartSettings {
    let config = Config::load(file).unwrap_or_else(|error| {
        let error: &dyn std::error::Error = &error;
        tracing::warn!(
            id = announcement.id,
            error,
            "container {}: the configuration is invalid, so its defaults are used",
            announcement.id
        );
        Config::default()
    });
    let spec = conversion::spec_of(announcement.clone());
    let policy = spec.policy(&config.settings().policies).0;
    StartSettings { engine: policy.engine, vram_limit_bytes: policy.vram_limit_bytes }
}

/// Returns the OCI runtime that the configuration in `file` names. The path is empty if the
/// configuration names no runtime or cannot be read. An unreadable configuration is reported by the
/// controller.
#[must_use]
pub fn oci_runtime_of(file: &Path) -> PathBuf {
    Config::load(file).map(|config| config.oci.runtime).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use affinode_proto::wire::Engine;

    use super::*;

    fn engine_of(file: &Path, announcement: &Announcement) -> Engine {
        start_settings_of(file, announcement).engine
    }

    #[test]
    fn annotation_namespace_and_node_in_this_order() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("config.toml");
        let mut container = Announcement { namespace: "ns".into(), ..Announcement::default() };
        assert_eq!(engine_of(&file, &container), Engine::Auto, "there is no file");
        std::fs::write(&file, "[policy]\nengine = \"auto\"\n").unwrap();
        assert_eq!(engine_of(&file, &container), Engine::Auto);
        let namespace = "[[policy.namespace]]\nname = \"ns\"\nengine = \"copy\"\n";
        std::fs::write(&file, namespace).unwrap();
        assert_eq!(engine_of(&file, &container), Engine::Copy);
        let annotation = |word: &str| [("affinode.io/engine".to_owned(), word.to_owned())].into();
        container.annotations = annotation("full");
        assert_eq!(engine_of(&file, &container), Engine::Full);
        container.annotations = annotation(&"f".repeat(400));
        assert_eq!(engine_of(&file, &container), Engine::Copy, "that means nothing");
        std::fs::write(&file, "engine = 7").unwrap();
        assert_eq!(engine_of(&file, &container), Engine::Auto, "it is managed all the same");
    }

    #[test]
    fn limit_is_that_of_the_policy() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("config.toml");
        std::fs::write(&file, "[policy]\nvram_limit = \"20Gi\"\n").unwrap();
        let mut container = Announcement::default();
        let limit = |container: &Announcement| start_settings_of(&file, container).vram_limit_bytes;
        assert_eq!(limit(&container), 20 << 30);
        container.annotations = [("affinode.io/vram-limit".to_owned(), "5Gi".to_owned())].into();
        assert_eq!(limit(&container), 5 << 30);
    }
}
