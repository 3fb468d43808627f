//! Adds bind mounts to a container's spec.

use std::path::{Path, PathBuf};

use oci_spec::runtime::MountBuilder;
use serde_json::Value;

use super::{clean, destinations};

/// A bind mount to add to a spec.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BindMount {
    /// Path on the host.
    pub source: PathBuf,
    /// Path in the container.
    pub destination: &'static str,
    /// Options of the mount.
    pub options: &'static [&'static str],
}

/// Reason why the mounts cannot be added to the spec.
#[derive(Debug, thiserror::Error)]
pub enum EditError {
    /// A volume of the container covers the destination.
    #[error(
        "the container has a volume at {volume}, which conflicts with Affinode's mount at \
         {destination}"
    )]
    Covered {
        /// Destination of the volume.
        volume: String,
        /// Destination of Affinode's mount.
        destination: &'static str,
    },
    /// The value of `mounts` is not a list.
    #[error("the spec's mounts are not a list")]
    NotAList,
    /// The source path is not UTF-8, so JSON cannot represent it.
    #[error("the host path {0:?} is not UTF-8, so no spec can contain it")]
    BadSource(PathBuf),
    /// The OCI library could not build the mount entry.
    #[error("cannot build a mount entry of the container's spec")]
    Build(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// Adds the mounts to the spec. If the spec has them already (a second Create, a restore), they are
/// not added again. Fails if one of the container's own mounts conflicts with a destination.
pub fn add_mounts(spec: &mut Value, mounts: &[BindMount]) -> Result<(), EditError> {
    if !spec.is_object() || spec.get("mounts").is_some_and(|m| !m.is_array() && !m.is_null()) {
        return Err(EditError::NotAList);
    }
    let entries = mounts.iter().map(entry).collect::<Result<Vec<_>, _>>()?;
    if let Some(list) = spec.get_mut("mounts").and_then(Value::as_array_mut) {
        list.retain(|mount| !entries.contains(mount));
    }
    for volume in destinations(spec) {
        for mount in mounts {
            if covers(&volume, mount.destination) {
                return Err(EditError::Covered { volume, destination: mount.destination });
            }
        }
    }
    match spec.get_mut("mounts").and_then(Value::as_array_mut) {
        Some(list) => list.extend(entries),
        None => spec["mounts"] = Value::Array(entries),
    }
    Ok(())
}

/// Removes a read-only bind mount at exactly this path from the spec, and returns its source, a
/// path on the host. Another kind of mount at this path stays, and [`add_mounts`] then fails.
pub fn take_file_mount(spec: &mut Value, file: &str) -> Option<PathBuf> {
    let list = spec.get_mut("mounts")?.as_array_mut()?;
    let is_over = |mount: &Value| {
        mount.get("destination").and_then(Value::as_str).is_some_and(|path| clean(path) == file)
    };
    let mut over = list.iter().enumerate().filter(|(_, mount)| is_over(mount));
    let (Some((index, mount)), None) = (over.next(), over.next()) else { return None };
    let options = mount.get("options").and_then(Value::as_array);
    let has = |word: &str| options.is_some_and(|words| words.iter().any(|said| said == word));
    let source = PathBuf::from(mount.get("source")?.as_str()?);
    if !(has("bind") || has("rbind")) || !(has("ro") || has("rro")) || !source.is_absolute() {
        return None;
    }
    list.remove(index);
    Some(source)
}

/// Whether a mount at `volume` is at, above or below `destination`. A mount at `/` does not count,
/// because it is the rootfs.
fn covers(volume: &str, destination: &str) -> bool {
    let destination = clean(destination);
    let (volume, destination) = (Path::new(volume), Path::new(&destination));
    volume != Path::new("/") && (destination.starts_with(volume) || volume.starts_with(destination))
}

fn entry(mount: &BindMount) -> Result<Value, EditError> {
    if mount.source.to_str().is_none() {
        return Err(EditError::BadSource(mount.source.clone()));
    }
    let built = MountBuilder::default()
        .destination(mount.destination)
        .typ("bind")
        .source(&mount.source)
        .options(mount.options.iter().map(ToString::to_string).collect::<Vec<_>>())
        .build()
        .map_err(|error| EditError::Build(Box::new(error)))?;
    serde_json::to_value(built).map_err(|error| EditError::Build(Box::new(error)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn ours() -> Vec<BindMount> {
        vec![
            BindMount {
                source: PathBuf::from("/usr/local/lib/affinode"),
                destination: "/.affinode/lib",
                options: &["bind", "ro", "nosuid", "nodev"],
            },
            BindMount {
                source: PathBuf::from("/run/affinode/containers/00/ld.so.preload"),
                destination: "/etc/ld.so.preload",
                options: &["bind", "ro"],
            },
        ]
    }

    /// A spec as containerd writes it, with additional fields that the types of the OCI
    /// specification do not define.
    const BEFORE: &str = r#"{"ociVersion":"1.2.0","process":{"user":{"uid":0,"gid":0},"args":["sh"],"cwd":"/","later":{"b":2,"a":1}},"root":{"path":"rootfs"},"mounts":[{"destination":"/proc","type":"proc","source":"proc"},{"destination":"/etc/hosts","type":"bind","source":"/h","options":["rbind","rw"],"uidMappings":[{"containerID":0,"hostID":1,"size":4294967295}]}],"linux":{"intelRdt":{"enableMonitoring":true},"resources":{"memory":{"limit":9223372036854775807}}},"x-unknown":[1.5,null]}"#;
    const AFTER: &str = r#"{"ociVersion":"1.2.0","process":{"user":{"uid":0,"gid":0},"args":["sh"],"cwd":"/","later":{"b":2,"a":1}},"root":{"path":"rootfs"},"mounts":[{"destination":"/proc","type":"proc","source":"proc"},{"destination":"/etc/hosts","type":"bind","source":"/h","options":["rbind","rw"],"uidMappings":[{"containerID":0,"hostID":1,"size":4294967295}]},{"destination":"/.affinode/lib","type":"bind","source":"/usr/local/lib/affinode","options":["bind","ro","nosuid","nodev"]},{"destination":"/etc/ld.so.preload","type":"bind","source":"/run/affinode/containers/00/ld.so.preload","options":["bind","ro"]}],"linux":{"intelRdt":{"enableMonitoring":true},"resources":{"memory":{"limit":9223372036854775807}}},"x-unknown":[1.5,null]}"#;

    #[test]
    fn mounts_are_added_and_nothing_else_changes() {
        let mut spec: Value = serde_json::from_str(BEFORE).unwrap();
        add_mounts(&mut spec, &ours()).unwrap();
        assert_eq!(serde_json::to_string(&spec).unwrap(), AFTER);
    }

    #[test]
    fn twice_is_once() {
        let mut spec: Value = serde_json::from_str(AFTER).unwrap();
        add_mounts(&mut spec, &ours()).unwrap();
        assert_eq!(serde_json::to_string(&spec).unwrap(), AFTER);
    }

    #[test]
    fn a_spec_without_mounts_gets_some() {
        for mut spec in [json!({}), json!({"mounts": null})] {
            add_mounts(&mut spec, &ours()).unwrap();
            assert_eq!(spec["mounts"].as_array().unwrap().len(), 2);
        }
    }

    #[test]
    fn volumes_are_never_covered() {
        for (volume, covered) in [
            ("/etc", true),
            ("/etc/", true),
            ("//etc/./ld.so.preload", true),
            ("/.affinode", true),
            ("/.affinode/lib/deeper", true),
            ("/etc/../etc", true),
            ("/", false),
            ("/etc/hosts", false),
            ("/etcetera", false),
        ] {
            let before = json!({"mounts": [{"destination": volume, "source": "/x"}]});
            let mut spec = before.clone();
            let result = add_mounts(&mut spec, &ours());
            assert_eq!(result.is_err(), covered, "{volume}");
            if covered {
                assert_eq!(spec, before, "{volume}: unchanged");
            }
        }
    }

    #[test]
    fn only_a_read_only_host_mount_is_taken() {
        let over = |options: Value, source: &str| {
            let file = "/etc/./ld.so.preload";
            json!({"destination": file, "type": "bind", "source": source, "options": options})
        };
        let proc = json!({"destination": "/proc", "type": "proc", "source": "proc"});
        let plain = over(json!(["rbind", "rprivate", "ro"]), "/host/list");
        let mut spec = json!({"mounts": [proc, plain]});
        let mut recursively = json!({"mounts": [over(json!(["rbind", "rro"]), "/host/list")]});
        assert!(take_file_mount(&mut recursively, "/etc/ld.so.preload").is_some());
        let taken = take_file_mount(&mut spec, "/etc/ld.so.preload");
        assert_eq!(taken, Some(PathBuf::from("/host/list")));
        assert_eq!(spec, json!({"mounts": [proc]}));
        for mounts in [
            json!([over(json!(["rbind"]), "/host/list")]),
            json!([over(json!(["rbind", "rw"]), "/host/list")]),
            json!([over(json!(["ro"]), "/host/list")]),
            json!([over(json!(["bind", "ro"]), "list")]),
            json!([plain, plain]),
            json!([proc]),
            json!([1, {"destination": 1}]),
            json!({}),
        ] {
            let before = json!({"mounts": mounts});
            let mut spec = before.clone();
            assert_eq!(take_file_mount(&mut spec, "/etc/ld.so.preload"), None, "{before}");
            assert_eq!(spec, before);
        }
    }

    #[test]
    fn mount_of_another_container_counts_as_volume() {
        // A nested container: its spec is a copy of the spec of another managed container, with
        // that container's mounts.
        let mut spec: Value = serde_json::from_str(&AFTER.replace("/00/", "/11/")).unwrap();
        assert!(matches!(add_mounts(&mut spec, &ours()), Err(EditError::Covered { .. })));
    }

    #[test]
    fn nonsense_is_refused() {
        for mut spec in [json!([]), json!(1), json!({"mounts": {}})] {
            assert!(matches!(add_mounts(&mut spec, &ours()), Err(EditError::NotAList)));
        }
    }
}
