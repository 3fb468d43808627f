//! Jobs: programs that run under the controller without a container, started by
//! `affinode run` from a shell, systemd or a batch system.
//!
//! ```text
//! affinode run ──jobs.sock: who, what──> allowed? ──> folder made, announced like a container
//!      │  <──────── folder ─────────────────────────────┘
//!      └─ holds the job's lock, becomes the program (exec); its children inherit the lock
//! the last of them ends ──> the kernel lets the lock go ──> withdrawn, folder removed
//! ```
//!
//! The lock outlives every controller and needs no process that waits: nothing that is
//! killed leaves a job behind, and no death of a controller loses one. What a job is called is
//! in its folder, for the next controller.
//!
//! Who asks is known from the kernel. Others than root get what concerns themselves alone:
//! a namespace of their own, and no annotation that takes from others.

mod folder;
mod socket;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use folder::{JobFolder, LOCK_FILE, kept, running, unused};
pub use socket::{SOCKET, serve};

/// Jobs of one user at a time.
pub const MAX_JOBS: usize = 256;
/// Annotations of a job.
const MAX_ANNOTATIONS: usize = 16;
/// The longest name, namespace or value.
const MAX_TEXT_BYTES: usize = 128;
/// Before the names of annotations, which may be left out.
const PREFIX: &str = "affinode.io/";
/// What a user may ask for his own jobs: nothing of it takes from others.
const HARMLESS: [&str; 5] = ["offload", "idle-timeout", "engine", "on-oom", "on-oom-timeout"];

/// What `affinode run` asks for.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobRequest {
    /// What the job is called.
    pub name: String,
    /// Its namespace for rules; empty: the user's own.
    #[serde(default)]
    pub namespace: String,
    /// As of a container, with or without `affinode.io/`.
    #[serde(default)]
    pub annotations: BTreeMap<String, String>,
}

/// What it gets.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobReply {
    /// The job is known.
    Granted {
        /// The folder with its socket, for its processes.
        folder: String,
        /// The file whose lock is its life.
        lock: String,
        /// Annotations that were not understood.
        warnings: Vec<String>,
    },
    /// It is not, and why.
    Refused(String),
}

/// Who asks, by the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobUser {
    /// Its number.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// Its name, or the number where it has none.
    pub name: String,
}

/// Whether the user may have this job, and what it is then: the namespace is filled in and
/// annotations have their full names.
///
/// # Errors
/// Why not, for people.
pub fn permit(
    request: JobRequest,
    user: &JobUser,
    allowed: &[String],
) -> Result<JobRequest, String> {
    let root = user.uid == 0;
    let listed = |name: &String| *name == "*" || *name == user.name;
    if !root && !allowed.iter().any(listed) {
        return Err(format!(
            "user {} may not run jobs under Affinode on this node; an administrator allows it \
             with jobs.users in the configuration",
            user.name
        ));
    }
    let plain = |word: &str| {
        let fine = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
        !word.is_empty() && word.len() <= MAX_TEXT_BYTES && word.bytes().all(fine)
    };
    if !plain(&request.name) {
        return Err(format!(
            "a job's name has letters, digits, '.', '_' and '-', {MAX_TEXT_BYTES} at most: {:?} is none",
            request.name
        ));
    }
    let own = if root { "jobs".to_owned() } else { format!("user-{}", user.name) };
    let namespace = match request.namespace {
        namespace if namespace.is_empty() || namespace == own => own,
        namespace if !root => {
            return Err(format!(
                "jobs of user {} are in namespace {own}; {namespace:?} is for root to choose",
                user.name
            ));
        }
        namespace if plain(&namespace) => namespace,
        namespace => return Err(format!("{namespace:?} is no namespace")),
    };
    if request.annotations.len() > MAX_ANNOTATIONS {
        return Err(format!("a job has {MAX_ANNOTATIONS} annotations at most"));
    }
    let mut annotations = BTreeMap::new();
    for (name, value) in request.annotations {
        let short = name.strip_prefix(PREFIX).unwrap_or(&name);
        if !root && !HARMLESS.contains(&short) {
            return Err(format!(
                "annotation {short} is for root to choose; others may set {}",
                HARMLESS.join(", ")
            ));
        }
        if !plain(short) || value.len() > MAX_TEXT_BYTES {
            return Err(format!("annotation {short:?} is too long, or no name"));
        }
        annotations.insert(format!("{PREFIX}{short}"), value);
    }
    Ok(JobRequest { name: request.name, namespace, annotations })
}

#[cfg(test)]
mod tests;
