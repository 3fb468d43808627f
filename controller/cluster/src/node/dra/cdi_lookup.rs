//! Finds a GPU in the CDI specifications that NVIDIA's container toolkit makes (`nvidia-ctk cdi
//! generate`). They contain the GPU's device nodes and the libraries of the installed driver. This
//! DRA driver therefore refers to them and does not repeat their content.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use serde::Deserialize;

/// Maximum size of a CDI specification, in bytes. A larger file is not read.
const MAX_BYTES: u64 = 16 << 20;
/// Maximum number of files in a folder that are examined.
const MAX_FILES: usize = 4096;

/// Finds GPUs in the CDI specifications of these folders. The GPUs are devices of the given kind.
#[derive(Clone, Debug)]
pub struct CdiLookup {
    /// Folders of CDI specifications, as this process sees them.
    pub folders: Vec<PathBuf>,
    /// Kind of the devices, such as `nvidia.com/gpu`.
    pub kind: String,
}

/// Names by which a GPU is searched for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuNames {
    /// Name of the device in the ResourceSlice: the UUID in lower case.
    pub device: String,
    /// NVML's index. `None`: unknown, so the GPU is found by its UUID only.
    pub index: Option<u32>,
}

/// Reason why a GPU was not found.
#[derive(Debug, thiserror::Error)]
pub enum LookupError {
    /// No specification has devices of this kind.
    #[error(
        "no CDI specification of kind {kind} in {folders}; run `nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml` on the node, or let the GPU operator do it"
    )]
    NoSpec {
        /// CDI kind for which the folders were searched.
        kind: String,
        /// Folders that were searched.
        folders: String,
    },
    /// The specifications do not have this GPU.
    #[error(
        "the CDI specifications of kind {kind} do not have GPU {device}, only {found}; generate them again with `nvidia-ctk cdi generate`"
    )]
    NoDevice {
        /// CDI kind for which the folders were searched.
        kind: String,
        /// Name of the device in the ResourceSlice.
        device: String,
        /// Names of the first devices that the specifications have.
        found: String,
    },
}

#[derive(Deserialize)]
struct ForeignSpec {
    kind: String,
    #[serde(default)]
    devices: Vec<ForeignDevice>,
}

#[derive(Deserialize)]
struct ForeignDevice {
    name: String,
}

impl CdiLookup {
    /// Returns the CDI device of a GPU, such as `nvidia.com/gpu=GPU-8b2e6a5c-…`.
    ///
    /// # Errors
    /// [`LookupError`]: no specification has the GPU.
    pub fn find(&self, gpu: &GpuNames) -> Result<String, LookupError> {
        let specs = self.folders.iter().flat_map(|folder| specs(folder));
        let ours: Vec<ForeignSpec> = specs.filter(|spec| spec.kind == self.kind).collect();
        if ours.is_empty() {
            let folders: Vec<_> =
                self.folders.iter().map(|dir| dir.display().to_string()).collect();
            return Err(LookupError::NoSpec {
                kind: self.kind.clone(),
                folders: folders.join(" and "),
            });
        }
        let names: Vec<&str> =
            ours.iter().flat_map(|spec| &spec.devices).map(|device| device.name.as_str()).collect();
        match choose(&names, gpu) {
            Some(name) => Ok(format!("{}={name}", self.kind)),
            None => Err(LookupError::NoDevice {
                kind: self.kind.clone(),
                device: gpu.device.clone(),
                found: names.into_iter().take(20).collect::<Vec<_>>().join(", "),
            }),
        }
    }
}

/// Chooses the name under which a specification lists a GPU. The toolkit names GPUs by UUID, by
/// index, or by both. A UUID is preferred, because an index can change when the machine starts
/// again.
fn choose<'a>(names: &[&'a str], gpu: &GpuNames) -> Option<&'a str> {
    let by_uuid = names.iter().find(|name| name.eq_ignore_ascii_case(&gpu.device));
    let index = gpu.index.map(|index| index.to_string());
    let by_index = || names.iter().find(|name| index.as_deref() == Some(**name));
    by_uuid.or_else(by_index).copied()
}

fn specs(folder: &Path) -> Vec<ForeignSpec> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().take(MAX_FILES);
    let files = entries.map(|entry| entry.path()).filter(|path| {
        path.extension().is_some_and(|ending| ["json", "yaml", "yml"].iter().any(|e| ending == *e))
    });
    // A file that is no specification is reported by containerd, and has no GPU.
    files.filter_map(|file| read(&file).ok()).collect()
}

fn read(file: &Path) -> io::Result<ForeignSpec> {
    let facts = fs::metadata(file)?;
    // To read a named pipe would wait for its writer.
    if !facts.is_file() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    if facts.len() > MAX_BYTES {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, "too large"));
    }
    // Every JSON file is valid YAML.
    serde_yaml_ng::from_str(&fs::read_to_string(file)?).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    const UUID: &str = "GPU-8b2e6a5c-0000-0000-0000-00000000000A";

    fn lookup(folder: &Path) -> CdiLookup {
        CdiLookup {
            folders: vec![folder.join("none"), folder.to_owned()],
            kind: "nvidia.com/gpu".into(),
        }
    }

    fn gpu(index: Option<u32>) -> GpuNames {
        GpuNames { device: UUID.to_ascii_lowercase(), index }
    }

    #[test]
    fn gpu_is_found_by_uuid_then_by_index() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("nvidia.yaml");
        let both = format!("kind: nvidia.com/gpu\ndevices:\n- name: \"1\"\n- name: {UUID}\n");
        fs::write(&file, both).unwrap();
        assert_eq!(
            lookup(folder.path()).find(&gpu(Some(1))).unwrap(),
            format!("nvidia.com/gpu={UUID}")
        );
        fs::write(
            &file,
            r#"{"kind": "nvidia.com/gpu", "devices": [{"name": "1"}, {"name": "all"}]}"#,
        )
        .unwrap();
        assert_eq!(lookup(folder.path()).find(&gpu(Some(1))).unwrap(), "nvidia.com/gpu=1");
        let unknown = lookup(folder.path()).find(&gpu(None)).unwrap_err().to_string();
        assert!(unknown.contains("only 1, all"), "{unknown}");
    }

    #[test]
    fn other_files_and_kinds_do_not_count() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        write("a.yaml", "kind: management.nvidia.com/gpu\ndevices: [{name: all}]\n");
        write("b.yaml", "not: [a spec\n");
        write("c.txt", &format!("kind: nvidia.com/gpu\ndevices: [{{name: {UUID}}}]\n"));
        let error = lookup(folder.path()).find(&gpu(Some(0))).unwrap_err().to_string();
        assert!(error.contains("no CDI specification") && error.contains("nvidia-ctk"), "{error}");
    }
}
