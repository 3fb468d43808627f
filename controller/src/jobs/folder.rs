//! The folder of a job (a program without a container). It has the layout of a container's folder,
//! and a record from which the next controller admits the job again.
//!
//! ```text
//! containers/<key>/job.json   its announcement, readable by root only
//!                  job.lock   readable by its user; locked by every process of the job
//!                  mount/     owned by root; its user's group may enter: agent.sock, engine, hint, pressure
//! ```

use std::{
    fs::{self, File, Permissions},
    io::{self, Read},
    os::{
        fd::AsFd,
        unix::fs::{OpenOptionsExt, PermissionsExt, chown},
    },
    path::{Path, PathBuf},
    time::Duration,
};

use affinode_core::{ContainerSpec, Key};
use affinode_proto::{paths, wire::Engine};
use rustix::{
    fs::{FlockOperation, OFlags},
    io::Errno,
};
use serde::{Deserialize, Serialize};

use super::{JobRequest, JobUser};

/// Name of the file that the job's processes lock. The job exists while a process holds the lock.
pub const LOCK_FILE: &str = "job.lock";
const RECORD_FILE: &str = "job.json";
/// Time limit for a new job to take its lock, counted from the job's announcement.
const JOB_LOCK_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum size of a job's record in bytes.
const MAX_BYTES: u64 = 64 << 10;

/// Content of a job's record, the file `job.json`.
#[derive(Debug, Serialize, Deserialize)]
struct JobRecord {
    uid: u32,
    request: JobRequest,
}

/// Folder of one job, with the content of its record.
#[derive(Debug)]
pub struct JobFolder {
    path: PathBuf,
    key: Key,
    uid: u32,
    request: JobRequest,
}

impl JobFolder {
    /// Creates the folder of a job that was permitted. The job's key cannot be guessed.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn make(run_dir: &Path, request: JobRequest, user: &JobUser) -> io::Result<JobFolder> {
        let mut random = [0; 16];
        File::open("/dev/urandom")?.read_exact(&mut random)?;
        let text = format!("{:032x}", u128::from_ne_bytes(random));
        let key = Key::parse(&text).map_err(io::Error::other)?;
        let containers = run_dir.join(paths::CONTAINERS_DIR);
        let job = JobFolder { path: containers.join(&text), key, uid: user.uid, request };
        // A part of a folder would never be found again.
        job.fill(&containers, user).inspect_err(|_| job.remove())?;
        Ok(job)
    }

    fn fill(&self, containers: &Path, user: &JobUser) -> io::Result<()> {
        fs::create_dir_all(self.mount())?;
        // Users may enter these folders but not read them: a process that can open a folder can
        // also lock it, and shims lock these folders.
        for folder in [containers, &self.path] {
            fs::set_permissions(folder, Permissions::from_mode(0o711))?;
        }
        let lock = File::create_new(self.lock())?;
        lock.set_permissions(Permissions::from_mode(0o400))?;
        let_read(&lock, user)?;
        // The user must not own this folder: root creates files in it by name.
        chown(self.mount(), None, Some(user.gid))?;
        fs::set_permissions(self.mount(), Permissions::from_mode(0o750))?;
        let record = JobRecord { uid: user.uid, request: self.request.clone() };
        let fresh = self.path.join(".job.json.new");
        fs::write(&fresh, serde_json::to_vec(&record)?)?;
        fs::set_permissions(&fresh, Permissions::from_mode(0o600))?;
        // The record is written last, so a folder that has a record is complete.
        fs::rename(fresh, self.path.join(RECORD_FILE))
    }

    /// Returns the key of the job.
    #[must_use]
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// Returns the uid of the user who started the job.
    #[must_use]
    pub fn uid(&self) -> u32 {
        self.uid
    }

    /// Returns the path of the job's lock file.
    #[must_use]
    pub fn lock(&self) -> PathBuf {
        self.path.join(LOCK_FILE)
    }

    /// Returns the path of the folder that the job's processes use.
    #[must_use]
    pub fn mount(&self) -> PathBuf {
        self.path.join(paths::MOUNT_DIR)
    }

    /// Removes the folder of a job that was not admitted. Otherwise the next controller would admit
    /// the job.
    pub fn remove(&self) {
        if let Err(error) = fs::remove_dir_all(&self.path) {
            tracing::warn!(key = %self.key, %error, "job {}: cannot remove {}", self.key, self.path.display());
        }
    }

    /// Writes the file with the name of the engine for the job's processes, as the shim does for a
    /// container.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write_engine(&self, engine: Engine) -> io::Result<()> {
        let fresh = self.mount().join(format!(".{}", paths::ENGINE_FILE));
        fs::write(&fresh, engine.as_str())?;
        fs::set_permissions(&fresh, Permissions::from_mode(0o644))?;
        fs::rename(fresh, self.mount().join(paths::ENGINE_FILE))
    }

    /// Describes the job as a container. The field `bundle` has the path of the job's lock file,
    /// because the job has ended when this lock is free.
    #[must_use]
    pub fn spec(&self) -> ContainerSpec {
        ContainerSpec {
            id: format!("{}-{}", self.request.name, &self.key.as_str()[..8]),
            container: self.request.name.clone(),
            namespace: self.request.namespace.clone(),
            annotations: self.request.annotations.clone().into_iter().collect(),
            bundle: self.lock().display().to_string(),
            job_user: Some(self.uid()),
            ..ContainerSpec::default()
        }
    }
}

/// Returns the jobs that earlier controllers admitted, including those that have ended since.
///
/// # Errors
/// The folder of containers cannot be listed.
pub fn kept(run_dir: &Path) -> io::Result<Vec<JobFolder>> {
    let entries = match fs::read_dir(run_dir.join(paths::CONTAINERS_DIR)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut jobs = Vec::new();
    for entry in entries {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let Ok(key) = Key::parse(name) else { continue };
        match read(&path.join(RECORD_FILE)) {
            Ok(JobRecord { uid, request }) => jobs.push(JobFolder { path, key, uid, request }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                tracing::warn!(
                    %error,
                    "job {name}: cannot read its record {}, so it runs unmanaged",
                    path.display()
                )
            }
        }
    }
    Ok(jobs)
}

/// Makes a file that root owns readable for a user. The user must not own it. An owner could write
/// to it, and could thus fill root's run directory.
fn let_read(file: &File, user: &JobUser) -> io::Result<()> {
    const VERSION: u32 = 2;
    const READ: u16 = 4;
    const NO_ID: u32 = u32::MAX;
    // Entries of `linux/posix_acl.h`: the owner, a user, the group, the mask of both, all others.
    let entries =
        [(1, READ, NO_ID), (2, READ, user.uid), (4, 0, NO_ID), (16, READ, NO_ID), (32, 0, NO_ID)];
    let mut list = VERSION.to_le_bytes().to_vec();
    for (who, may, id) in entries {
        let (who, may): (u16, u16) = (who, may);
        list.extend(who.to_le_bytes().into_iter().chain(may.to_le_bytes()).chain(id.to_le_bytes()));
    }
    let flags = rustix::fs::XattrFlags::empty();
    match rustix::fs::fsetxattr(file, "system.posix_acl_access", &list, flags) {
        // Without ACLs, all users of the group may read the lock file, so each of them could lock
        // it and keep the job from ending.
        Err(Errno::OPNOTSUPP) => {
            std::os::unix::fs::fchown(file, None, Some(user.gid))?;
            file.set_permissions(Permissions::from_mode(0o440))
        }
        set => Ok(set?),
    }
}

fn read(path: &Path) -> io::Result<JobRecord> {
    if fs::metadata(path)?.len() > MAX_BYTES {
        return Err(io::Error::other("too large"));
    }
    Ok(serde_json::from_slice(&fs::read(path)?)?)
}

/// Returns the number of jobs that run. A job that cannot be examined counts, because it may run.
#[must_use]
pub fn running(run_dir: &Path) -> usize {
    let jobs = kept(run_dir).unwrap_or_default();
    jobs.iter().filter(|job| !unused(&job.lock())).count()
}

/// Returns whether no process holds the lock of a job, although the time in which a new job must
/// take its lock has passed. Returns `false` if the lock file cannot be examined.
#[must_use]
pub fn unused(lock: &Path) -> bool {
    // If an earlier controller gave this file to the user, the user may have a lease on it. A
    // blocking open would wait until the user releases the lease.
    let open = File::options().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(lock);
    let Ok(file) = open else { return false };
    let age = file.metadata().and_then(|data| data.modified()).map(|made| made.elapsed());
    if !matches!(age, Ok(Ok(age)) if age >= JOB_LOCK_TIMEOUT) {
        return false;
    }
    rustix::fs::flock(file.as_fd(), FlockOperation::NonBlockingLockExclusive).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(run_dir: &Path) -> JobFolder {
        let request =
            JobRequest { name: "train".into(), namespace: "jobs".into(), ..JobRequest::default() };
        let (uid, gid) = (rustix::process::getuid(), rustix::process::getgid());
        let user = JobUser { uid: uid.as_raw(), gid: gid.as_raw(), name: "alice".into() };
        JobFolder::make(run_dir, request, &user).unwrap()
    }

    #[test]
    fn the_next_controller_recalls_the_job() {
        let dir = tempfile::tempdir().unwrap();
        let job = job(dir.path());
        fs::create_dir(dir.path().join(paths::CONTAINERS_DIR).join("0".repeat(32))).unwrap();
        let kept = kept(dir.path()).unwrap();
        assert_eq!(kept.len(), 1);
        assert_eq!(kept[0].spec(), job.spec());
        assert_eq!(kept[0].uid(), job.uid());
    }

    #[test]
    fn a_job_ends_when_its_lock_is_free() {
        let dir = tempfile::tempdir().unwrap();
        let job = job(dir.path());
        assert!(!unused(&job.lock()), "it was just born");
        let made = std::time::SystemTime::now() - 2 * JOB_LOCK_TIMEOUT;
        let file = File::options().write(true).open(job.lock()).unwrap();
        file.set_modified(made).unwrap();
        let held = File::open(job.lock()).unwrap();
        rustix::fs::flock(held.as_fd(), FlockOperation::LockShared).unwrap();
        assert!(!unused(&job.lock()));
        assert_eq!(running(dir.path()), 1);
        drop(held);
        assert!(unused(&job.lock()));
        assert_eq!(running(dir.path()), 0);
        assert!(!unused(&dir.path().join("nothing")), "what is not known is not over");
    }

    #[test]
    fn only_the_user_can_hold_a_jobs_lock() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), Permissions::from_mode(0o711)).unwrap();
        let request = JobRequest { name: "train".into(), ..JobRequest::default() };
        let user = JobUser { uid: 4711, gid: 4712, name: "alice".into() };
        let job = JobFolder::make(dir.path(), request, &user).unwrap();
        let can = |uid, gid, what: &str| {
            use std::os::unix::process::CommandExt;
            let mut shell = std::process::Command::new("sh");
            shell.uid(uid).gid(gid).args(["-c", what, "sh"]).arg(job.lock());
            shell.stderr(std::process::Stdio::null()).status().unwrap().success()
        };
        assert!(can(4711, 4712, "exec <\"$1\""), "its user");
        assert!(!can(4711, 4712, "chmod u+w \"$1\""), "it is not his");
        assert!(!can(4711, 4712, "exec >>\"$1\""));
        assert!(!can(4713, 4714, "exec <\"$1\""), "another user");
    }

    /// Checks that a lease of the job's user on the lock file does not block the controller. An
    /// open without `O_NONBLOCK` would wait up to 45 s for the lease.
    #[test]
    fn a_lease_of_the_user_does_not_block() {
        let dir = tempfile::tempdir().unwrap();
        let job = job(dir.path());
        let made = std::time::SystemTime::now() - 2 * JOB_LOCK_TIMEOUT;
        File::options().write(true).open(job.lock()).unwrap().set_modified(made).unwrap();
        let users = File::open(job.lock()).unwrap();
        // Other tests fork children, which inherit this descriptor until their exec.
        while let Err(error) = crate::sys::lease(&users, true) {
            assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "{error}");
            std::thread::yield_now();
        }
        // The unsuccessful open has made the kernel ask for the lease. When the lease is released,
        // the lock must be free.
        assert!(!unused(&job.lock()), "its user has it");
        crate::sys::lease(&users, false).unwrap();
        while !unused(&job.lock()) {
            std::thread::yield_now();
        }
    }
}
