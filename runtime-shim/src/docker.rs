//! Reads the names that Docker gives a container (container and image). containerd knows only the
//! container's id.
//!
//! dockerd keeps the names in `containers/ID/config.v2.json` below its data folder. The mounts of a
//! container show the path of that folder: the container's `/etc/hosts` and similar files are next
//! to `config.v2.json`.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use serde::Deserialize;
use serde_json::Value;

/// The containerd namespace in which Docker's containers run.
pub const NAMESPACE: &str = "moby";
/// Default data folder of dockerd, used if the configuration names no other folder.
const DATA_ROOT: &str = "/var/lib/docker";
const CONTAINERS: &str = "containers";
const FILE: &str = "config.v2.json";
/// Files that dockerd mounts from a container's folder. If a container uses the network of another
/// container, the files come from the folder of that other container.
const MOUNTED: [&str; 3] = ["/etc/hostname", "/etc/hosts", "/etc/resolv.conf"];
/// Maximum size of dockerd's file about a container. Most files have about 10 KiB. The environment,
/// the labels and the outputs of health checks can make the file larger.
const MAX_BYTES: u64 = 2 << 20;
/// Maximum length of a container's name in bytes. Docker accepts only shorter names.
const MAX_NAME_BYTES: usize = 128;
const MAX_IMAGE_BYTES: usize = 512;
/// Number of hex digits in the id of a Docker container.
const ID_DIGITS: usize = 64;
const PROJECT: &str = "com.docker.compose.project";

/// Names by which a user of Docker knows a container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DockerNames {
    /// The container's name. In a project of Docker Compose it is `PROJECT/NAME`.
    pub container: String,
    /// The image as the user named it; empty if unknown.
    pub image: String,
}

/// Reason why a container's names cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum NamesError {
    /// dockerd's file about the container cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Error of the system call.
        source: io::Error,
    },
    /// The content of the file differs from dockerd's format.
    #[error("{path} is not the configuration file of a Docker container")]
    Content {
        /// Path of the file.
        path: PathBuf,
        /// The difference from dockerd's format.
        source: ContentError,
    },
}

/// Difference of a file's content from dockerd's format.
#[derive(Debug, thiserror::Error)]
pub enum ContentError {
    /// The content is not the JSON of a container.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// The name has characters that Docker does not allow.
    #[error("the container's name is not valid")]
    Name,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ContainerFile {
    name: String,
    #[serde(default)]
    config: ContainerConfig,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct ContainerConfig {
    image: String,
    labels: Option<serde_json::Map<String, Value>>,
}

/// Reads the names of a container from dockerd's file.
pub fn names(id: &str, spec: &Value) -> Result<DockerNames, NamesError> {
    let path = containers_folder(spec).join(id).join(FILE);
    match read(&path) {
        Ok(text) => parse(&text).map_err(|source| NamesError::Content { path, source }),
        Err(source) => Err(NamesError::Read { path, source }),
    }
}

/// Parses the names from the content of a container's file.
pub fn parse(text: &[u8]) -> Result<DockerNames, ContentError> {
    let file: ContainerFile = serde_json::from_slice(text)?;
    let name = file.name.trim_start_matches('/');
    if !is_name(name) {
        return Err(ContentError::Name);
    }
    let labels = file.config.labels.unwrap_or_default();
    let project = labels.get(PROJECT).and_then(Value::as_str).filter(|project| is_name(project));
    let container = match project {
        Some(project) => format!("{project}/{name}"),
        None => name.to_owned(),
    };
    let image = file.config.image;
    let shown = image.len() <= MAX_IMAGE_BYTES && image.bytes().all(|byte| byte.is_ascii_graphic());
    Ok(DockerNames { container, image: if shown { image } else { String::new() } })
}

/// Returns the folder in which dockerd stores a folder for each container.
fn containers_folder(spec: &Value) -> PathBuf {
    let mounts = spec.get("mounts").and_then(Value::as_array);
    let source = |mount: &Value| {
        let destination = mount.get("destination")?.as_str()?;
        MOUNTED.contains(&destination).then(|| mount.get("source")?.as_str().map(PathBuf::from))?
    };
    let found = mounts.into_iter().flatten().filter_map(source).find_map(|file| {
        let (folder, containers) = (file.parent()?, file.parent()?.parent()?);
        let id = folder.file_name()?.to_str()?;
        let known = is_id(id) && containers.ends_with(CONTAINERS) && containers.is_absolute();
        known.then(|| containers.to_owned())
    });
    found.unwrap_or_else(|| Path::new(DATA_ROOT).join(CONTAINERS))
}

/// Reads a regular file up to the size limit. Fails if the path is a pipe or a link.
fn read(path: &Path) -> io::Result<Vec<u8>> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = File::options().read(true).custom_flags(flags.bits().cast_signed()).open(path)?;
    let facts = file.metadata()?;
    if !facts.is_file() || facts.len() > MAX_BYTES {
        return Err(io::Error::other("it is not a regular file, or is larger than the maximum"));
    }
    let mut text = Vec::new();
    file.take(MAX_BYTES).read_to_end(&mut text)?;
    Ok(text)
}

fn is_id(text: &str) -> bool {
    text.len() == ID_DIGITS && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Whether the name is valid for a container of Docker, or for a project of Docker Compose.
pub(crate) fn is_name(name: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
    (1..=MAX_NAME_BYTES).contains(&name.len()) && name.bytes().all(inner)
}

#[cfg(test)]
mod tests;
