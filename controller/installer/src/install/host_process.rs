//! Tells processes of the machine from processes that only look like them. Any user can start a
//! program whose command line names Affinode's, and a container can have a program at the same
//! path. Such processes must not prevent an uninstallation, and must get no signal.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

/// Text that the kernel appends to the name of a program whose file was replaced or removed.
const REPLACED: &[u8] = b" (deleted)";

/// A process of the machine that runs as the installer's user, which is root. It is in no container
/// with a pid namespace of its own. Processes of other users count as foreign.
pub struct HostProcess {
    /// Pid of the process.
    pub pid: u32,
    folder: PathBuf,
}

impl HostProcess {
    /// Returns all processes of this kind.
    pub fn all() -> impl Iterator<Item = HostProcess> {
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        entries.filter_map(|entry| {
            let pid = entry.file_name().to_str()?.parse().ok()?;
            let status = fs::read_to_string(entry.path().join("status")).ok()?;
            let own = rustix::process::geteuid().as_raw();
            is_of(&status, own).then(|| HostProcess { pid, folder: entry.path() })
        })
    }

    /// Returns the command line. Each argument ends with a zero byte.
    pub fn command_line(&self) -> Vec<u8> {
        fs::read(self.folder.join("cmdline")).unwrap_or_default()
    }

    /// Returns whether the process runs one of these programs. `Some(true)`: it does, and the file
    /// was replaced after its start.
    pub fn runs(&self, programs: &[PathBuf]) -> Option<bool> {
        let exe = fs::read_link(self.folder.join("exe")).ok()?;
        let exe = exe.as_os_str().as_encoded_bytes();
        let (program, behind) = programs.iter().find_map(|program| {
            Some((program, exe.strip_prefix(program.as_os_str().as_encoded_bytes())?))
        })?;
        let replaced = match behind {
            b"" => false,
            REPLACED => true,
            _ => return None,
        };
        let real = self.shares_mounts() || self.is_file(program, replaced).unwrap_or(true);
        real.then_some(replaced)
    }

    /// Returns whether the process sees the same mounts as the machine's first process or as this
    /// one. Otherwise the name of its program may be that of another file.
    fn shares_mounts(&self) -> bool {
        let of = |folder: &Path| fs::metadata(folder.join("ns/mnt")).ok().map(|file| file.ino());
        let own = of(&self.folder);
        own.is_some() && ["/proc/1", "/proc/self"].iter().any(|other| of(Path::new(other)) == own)
    }

    /// Returns whether the process executes this file. If the file was replaced, compares only the
    /// file systems.
    fn is_file(&self, program: &Path, replaced: bool) -> io::Result<bool> {
        // The link leads to the executed file, in whatever mount namespace the process is.
        let executed = fs::metadata(self.folder.join("exe"))?;
        if replaced {
            let folder = fs::metadata(program.parent().unwrap_or(program))?;
            return Ok(executed.dev() == folder.dev());
        }
        let installed = fs::metadata(program)?;
        Ok((executed.dev(), executed.ino()) == (installed.dev(), installed.ino()))
    }
}

/// Returns whether a process with this content of /proc/PID/status has this real user, and no pid
/// in another namespace.
fn is_of(status: &str, user: u32) -> bool {
    let numbers = |field: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(field));
        line.map(|line| line.split_whitespace().collect::<Vec<_>>())
    };
    // A kernel without the second field has no pid namespaces.
    let outside = numbers("NSpid:").is_none_or(|pids| pids.len() == 1);
    let uid = numbers("Uid:").and_then(|uids| uids.first()?.parse::<u32>().ok());
    outside && uid == Some(user)
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead, BufReader},
        process::{Child, Command, Stdio},
    };

    use super::*;

    #[test]
    fn users_and_containers_are_foreign() {
        let status =
            |uid: u32, pids: &str| format!("Name:\tx\nNSpid:\t{pids}\nUid:\t{uid}\t0\t0\t0\n");
        assert!(is_of(&status(0, "41"), 0));
        assert!(!is_of(&status(1000, "41"), 0), "a user");
        assert!(!is_of(&status(0, "41\t1"), 0), "a container");
        assert!(is_of("Uid:\t0\t0\t0\t0\n", 0));
    }

    /// Starts a script in namespaces of its own, and waits for its first line. `None`: this machine
    /// does not permit it.
    fn unshared(option: &str, script: &str) -> Option<Child> {
        let mut unshare = Command::new("unshare");
        unshare.args([option, "--mount", "sh", "-c", script]).stdin(Stdio::piped());
        let mut child = unshare.stdout(Stdio::piped()).spawn().ok()?;
        let mut line = String::new();
        BufReader::new(child.stdout.take()?).read_line(&mut line).ok()?;
        (line == "ready\n").then_some(child)
    }

    /// A process in a mount namespace of its own runs another program at the path of the installed
    /// one. It must not count. The installed program itself must count, wherever it runs.
    #[test]
    fn another_file_at_the_path_does_not_count() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("bin/shim");
        fs::create_dir(folder.path().join("bin")).unwrap();
        assert!(Command::new("cp").arg("/bin/sleep").arg(&program).status().unwrap().success());
        let shim = program.display();
        let bin = folder.path().join("bin").display().to_string();
        let start = format!("{shim} 1000 & echo ready; read line; kill $!");
        let covered = format!("mount -t tmpfs none {bin} && cp /bin/sleep {bin}/shim && {start}");
        for (script, wanted) in [(&start, 1), (&covered, 0)] {
            let Some(mut child) = unshared("--propagation=private", script) else {
                return affinode_test_notes::skip("root", "only root can unshare mounts");
            };
            let count = || {
                let runs = |one: &HostProcess| one.runs(std::slice::from_ref(&program)).is_some();
                HostProcess::all().filter(runs).count()
            };
            let named = || {
                let is_it = |one: &HostProcess| {
                    fs::read_link(one.folder.join("exe")).is_ok_and(|exe| exe == program)
                };
                HostProcess::all().any(|one| is_it(&one))
            };
            // The child has the program only after its exec.
            while !named() {
                std::thread::yield_now();
            }
            let found = count();
            drop(child.stdin.take());
            child.wait().unwrap();
            assert_eq!(found, wanted, "{script}");
        }
    }
}
