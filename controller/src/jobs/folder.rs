//! A job's folder: a container's, with what the next controller needs to know of it.
//!
//! ```text
//! containers/<key>/job.json   its announcement, for root alone
//!                  job.lock   its user may read it; held by every process of the job
//!                  mount/     root's, who writes in it; its user's group may pass: agent.sock, engine, hint, pressure
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

use affinode_proto::{api::control::Announcement, paths};
use rustix::{
    fs::{FlockOperation, OFlags},
    io::Errno,
};
use serde::{Deserialize, Serialize};

use super::{JobRequest, JobUser};
use crate::core::Key;

/// In the folder: the file whose lock is the job's life.
pub const LOCK_FILE: &str = "job.lock";
const RECORD_FILE: &str = "job.json";
/// So long a job may take from its announcement to its lock.
const JOB_LOCK_TIMEOUT: Duration = Duration::from_secs(10);
/// The largest record that is read.
const MAX_BYTES: u64 = 64 << 10;

/// What the next controller reads.
#[derive(Debug, Serialize, Deserialize)]
struct JobRecord {
    uid: u32,
    request: JobRequest,
}

/// The folder of one job.
#[derive(Debug)]
pub struct JobFolder {
    path: PathBuf,
    key: Key,
    uid: u32,
    request: JobRequest,
}

impl JobFolder {
    /// Makes the folder of a job that was permitted, with a key that nobody can guess.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn make(run_dir: &Path, request: JobRequest, user: &JobUser) -> io::Result<JobFolder> {
        let mut random = [0; 16];
        File::open("/dev/urandom")?.read_exact(&mut random)?;
        let text = format!("{:032x}", u128::from_ne_bytes(random));
        let key = Key::parse(&text).map_err(io::Error::other)?;
        let containers = run_dir.join(paths::CONTAINERS_DIR);
        let job = JobFolder { path: containers.join(&text), key, uid: user.uid, request };
        fs::create_dir_all(job.mount())?;
        // To be passed and not read: a folder that can be opened can be locked, as shims do.
        for folder in [&containers, &job.path] {
            fs::set_permissions(folder, Permissions::from_mode(0o711))?;
        }
        let lock = File::create_new(job.lock())?;
        lock.set_permissions(Permissions::from_mode(0o400))?;
        let_read(&lock, user)?;
        // Never the user's own: root makes files in it by name.
        chown(job.mount(), None, Some(user.gid))?;
        fs::set_permissions(job.mount(), Permissions::from_mode(0o750))?;
        let record = JobRecord { uid: user.uid, request: job.request.clone() };
        let fresh = job.path.join(".job.json.new");
        fs::write(&fresh, serde_json::to_vec(&record)?)?;
        fs::set_permissions(&fresh, Permissions::from_mode(0o600))?;
        // The last: a folder with a record is whole.
        fs::rename(fresh, job.path.join(RECORD_FILE))?;
        Ok(job)
    }

    /// The job's key.
    #[must_use]
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// Whose it is.
    #[must_use]
    pub fn uid(&self) -> u32 {
        self.uid
    }

    /// The file whose lock is its life.
    #[must_use]
    pub fn lock(&self) -> PathBuf {
        self.path.join(LOCK_FILE)
    }

    /// The folder that its processes see.
    #[must_use]
    pub fn mount(&self) -> PathBuf {
        self.path.join(paths::MOUNT_DIR)
    }

    /// Leaves the word of an engine for the job's processes, as the shim does for a container's.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn write_engine(&self, word: &str) -> io::Result<()> {
        let fresh = self.mount().join(format!(".{}", paths::ENGINE_FILE));
        fs::write(&fresh, word)?;
        fs::set_permissions(&fresh, Permissions::from_mode(0o644))?;
        fs::rename(fresh, self.mount().join(paths::ENGINE_FILE))
    }

    /// The job as a container. Its bundle is its lock: gone when that is free.
    #[must_use]
    pub fn announcement(&self) -> Announcement {
        let key = self.key.to_string();
        Announcement {
            id: format!("{}-{}", self.request.name, &key[..8]),
            container: self.request.name.clone(),
            namespace: self.request.namespace.clone(),
            annotations: self.request.annotations.clone().into_iter().collect(),
            bundle: self.lock().display().to_string(),
            key,
            ..Announcement::default()
        }
    }
}

/// The jobs that earlier controllers took, and folders that are none any more.
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
            Err(error) => tracing::warn!(%error, "a job's record is left out: {}", path.display()),
        }
    }
    Ok(jobs)
}

/// Lets a user read a file of root's. Never his own: he could write to it, in root's run directory.
fn let_read(file: &File, user: &JobUser) -> io::Result<()> {
    const VERSION: u32 = 2;
    const READ: u16 = 4;
    const NOBODY: u32 = u32::MAX;
    // As `linux/posix_acl.h` has them: the owner, a user, the group, the most that both may, all others.
    let entries = [
        (1, READ, NOBODY),
        (2, READ, user.uid),
        (4, 0, NOBODY),
        (16, READ, NOBODY),
        (32, 0, NOBODY),
    ];
    let mut list = VERSION.to_le_bytes().to_vec();
    for (who, may, id) in entries {
        let (who, may): (u16, u16) = (who, may);
        list.extend(who.to_le_bytes().into_iter().chain(may.to_le_bytes()).chain(id.to_le_bytes()));
    }
    let flags = rustix::fs::XattrFlags::empty();
    match rustix::fs::fsetxattr(file, "system.posix_acl_access", &list, flags) {
        // No lists there: all of his group then, who could keep his job from ending.
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

/// How many jobs run, or may: of one that cannot be looked at it is not known that it has ended.
#[must_use]
pub fn running(run_dir: &Path) -> usize {
    let jobs = kept(run_dir).unwrap_or_default();
    jobs.iter().filter(|job| !unused(&job.lock())).count()
}

/// Whether nobody holds this lock any more, and nobody is about to take it. Unknown is no.
#[must_use]
pub fn unused(lock: &Path) -> bool {
    // Its user had a lease on it, perhaps, where an earlier controller made it his: an open that
    // waits would wait for him.
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
        let user = JobUser { uid: uid.as_raw(), gid: gid.as_raw(), name: "somebody".into() };
        JobFolder::make(run_dir, request, &user).unwrap()
    }

    #[test]
    fn the_next_controller_knows_the_job_by_the_same_key_and_names() {
        let dir = tempfile::tempdir().unwrap();
        let job = job(dir.path());
        fs::create_dir(dir.path().join(paths::CONTAINERS_DIR).join("0".repeat(32))).unwrap();
        let kept = kept(dir.path()).unwrap();
        assert_eq!(kept.len(), 1);
        assert_eq!(kept[0].announcement(), job.announcement());
        assert_eq!(kept[0].uid(), job.uid());
    }

    #[test]
    fn a_job_is_over_when_its_lock_is_free_and_not_before_it_could_be_taken() {
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
    fn its_user_can_hold_a_jobs_lock_and_nobody_else_and_he_cannot_write_to_it() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), Permissions::from_mode(0o711)).unwrap();
        let request = JobRequest { name: "train".into(), ..JobRequest::default() };
        let user = JobUser { uid: 4711, gid: 4712, name: "somebody".into() };
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
        assert!(!can(4713, 4714, "exec <\"$1\""), "somebody else");
    }

    /// The kernel lets who opens such a file wait for its user, 45 s and again.
    #[test]
    fn a_lease_of_its_user_keeps_nobody_waiting() {
        let dir = tempfile::tempdir().unwrap();
        let job = job(dir.path());
        let made = std::time::SystemTime::now() - 2 * JOB_LOCK_TIMEOUT;
        File::options().write(true).open(job.lock()).unwrap().set_modified(made).unwrap();
        let users = File::open(job.lock()).unwrap();
        // Children of other tests have it open until they are programs.
        while let Err(error) = crate::sys::lease(&users, true) {
            assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "{error}");
            std::thread::yield_now();
        }
        // Who waits finds it let go of, when the kernel has taken the lease away.
        assert!(!unused(&job.lock()), "its user has it");
        crate::sys::lease(&users, false).unwrap();
        while !unused(&job.lock()) {
            std::thread::yield_now();
        }
    }
}
