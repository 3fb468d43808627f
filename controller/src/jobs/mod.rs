//! Jobs: programs that run under the controller without a container, started by `affinode run` from
//! a shell, systemd or a batch system.
//!
//! ```text
//! affinode run ──jobs.sock: user, job──> allowed? ──> folder created, announced like a container
//!      │  <──────── folder ─────────────────────────────┘
//!      └─ holds the job's lock, becomes the program (exec); its children inherit the lock
//! the last process ends ──> the kernel releases the lock ──> withdrawn, folder removed
//! ```
//!
//! A job runs as long as one of its processes holds the job's lock. The lock stays held when a
//! controller exits, and no process has to wait for the end of the job. A job ends when its last
//! process is killed, and no job is lost when a controller exits. The next controller reads the
//! job's name from the job's folder.
//!
//! The kernel identifies the user of a request. Users other than root cannot affect others: they
//! have a namespace of their own, and may not set annotations that affect other jobs.

mod folder;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use folder::{JobFolder, LOCK_FILE, kept, running, unused};

/// Name of the socket for job requests, in the run directory.
pub const SOCKET: &str = "jobs.sock";
/// Maximum number of jobs that one user may run.
pub const MAX_JOBS: usize = 256;
/// Maximum number of annotations of a job.
const MAX_ANNOTATIONS: usize = 16;
/// Maximum length of a job's name, of a namespace or of an annotation's value, in bytes.
const MAX_TEXT_BYTES: usize = 128;
/// Prefix of annotation names, which a job request may omit.
const PREFIX: &str = "affinode.io/";
/// Annotations of jobs that any user may set, because none of them affects other jobs.
const HARMLESS: [&str; 5] = ["offload", "idle-timeout", "engine", "on-oom", "on-oom-timeout"];

/// Request for a job, sent by `affinode run`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobRequest {
    /// Name of the job.
    pub name: String,
    /// Namespace of the job, which selects the policy rules. If empty, the user's own namespace
    /// applies.
    #[serde(default)]
    pub namespace: String,
    /// Annotations of the job, as for a container. Their names may omit `affinode.io/`.
    #[serde(default)]
    pub annotations: BTreeMap<String, String>,
}

/// Response to the request for a job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobReply {
    /// The controller admitted the job, which can now start.
    Granted {
        /// Path of the folder with the agent socket, for the job's processes.
        folder: String,
        /// Path of the file that the job's processes must lock.
        lock: String,
        /// Warnings about annotations that are invalid and ignored.
        warnings: Vec<String>,
    },
    /// The controller refused the job. Contains the reason.
    Refused(String),
}

/// The user who requested a job, as the kernel identified the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobUser {
    /// User id of the user.
    pub uid: u32,
    /// Group id of the user.
    pub gid: u32,
    /// Name of the user, or the uid if the user has no name.
    pub name: String,
}

/// Reason why a user may not run a job. Its text is shown to the user.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JobRefusal {
    /// The configuration does not list the user among those who may run jobs.
    #[error(
        "user {0} may not run jobs under Affinode on this node; an administrator allows it with jobs.users in the configuration"
    )]
    User(String),
    /// The job's name is empty, too long, or has characters that are not accepted.
    #[error(
        "invalid job name {0:?}; accepted: at most {MAX_TEXT_BYTES} letters, digits, '.', '_' and '-'"
    )]
    Name(String),
    /// The requested namespace is not the user's own.
    #[error("jobs of user {user} are in namespace {own}; only root may choose {namespace:?}")]
    OtherNamespace {
        /// Name of the user who requested the job.
        user: String,
        /// Namespace of the user's jobs.
        own: String,
        /// Namespace that the request names.
        namespace: String,
    },
    /// The namespace is too long, or has characters that are not accepted.
    #[error(
        "invalid namespace {0:?}; accepted: at most {MAX_TEXT_BYTES} letters, digits, '.', '_' and '-'"
    )]
    Namespace(String),
    /// The request has too many annotations.
    #[error("a job may have at most {MAX_ANNOTATIONS} annotations")]
    Annotations,
    /// The annotation affects other jobs, so only root may set it. Contains its name.
    #[error("only root may set annotation {0}; other users may set {others}", others = HARMLESS.join(", "))]
    OnlyRoot(String),
    /// The annotation's name is invalid, or its value is too long. Contains its name.
    #[error("annotation {0:?} has an invalid name, or a value of more than {MAX_TEXT_BYTES} bytes")]
    Annotation(String),
}

/// Checks whether a user may run jobs. `allowed` is the setting `jobs.users`.
///
/// # Errors
/// [`JobRefusal::User`]: the configuration does not list the user.
pub fn permit_user(user: &JobUser, allowed: &[String]) -> Result<(), JobRefusal> {
    let is_listed = |name: &String| *name == "*" || *name == user.name;
    if user.uid == 0 || allowed.iter().any(is_listed) {
        return Ok(());
    }
    Err(JobRefusal::User(user.name.clone()))
}

/// Checks whether a user may run a job. Returns the request with its namespace filled in and with
/// the full names of annotations.
///
/// # Errors
/// [`JobRefusal`]: the user may not run this job.
pub fn permit(
    request: JobRequest,
    user: &JobUser,
    allowed: &[String],
) -> Result<JobRequest, JobRefusal> {
    permit_user(user, allowed)?;
    let root = user.uid == 0;
    let plain = |word: &str| {
        let fine = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
        !word.is_empty() && word.len() <= MAX_TEXT_BYTES && word.bytes().all(fine)
    };
    if !plain(&request.name) {
        return Err(JobRefusal::Name(request.name));
    }
    let own = if root { "jobs".to_owned() } else { format!("user-{}", user.name) };
    let namespace = match request.namespace {
        namespace if namespace.is_empty() || namespace == own => own,
        namespace if !root => {
            return Err(JobRefusal::OtherNamespace { user: user.name.clone(), own, namespace });
        }
        namespace if plain(&namespace) => namespace,
        namespace => return Err(JobRefusal::Namespace(namespace)),
    };
    if request.annotations.len() > MAX_ANNOTATIONS {
        return Err(JobRefusal::Annotations);
    }
    let mut annotations = BTreeMap::new();
    for (name, value) in request.annotations {
        let short = name.strip_prefix(PREFIX).unwrap_or(&name);
        if !root && !HARMLESS.contains(&short) {
            return Err(JobRefusal::OnlyRoot(short.to_owned()));
        }
        if !plain(short) || value.len() > MAX_TEXT_BYTES {
            return Err(JobRefusal::Annotation(short.to_owned()));
        }
        annotations.insert(format!("{PREFIX}{short}"), value);
    }
    Ok(JobRequest { name: request.name, namespace, annotations })
}

#[cfg(test)]
mod tests;
