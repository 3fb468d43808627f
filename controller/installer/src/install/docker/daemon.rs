//! The dockerd of this machine: its process, its configuration file, and the runtimes that it
//! serves.

use std::{
    ffi::{OsStr, OsString},
    fs, io,
    os::unix::{
        ffi::{OsStrExt, OsStringExt},
        net::UnixStream,
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use affinode_controller::inventory::process;
use affinode_core::input::Identity;
use serde_json::Value;

use super::{DockerError, engine_api};
use crate::install::host_process::HostProcess;

/// Name of dockerd's process, as in /proc/PID/comm.
pub const PROGRAM: &str = "dockerd";
/// Default value of dockerd's option `--config-file`.
const CONFIG_FILE: &str = "/etc/docker/daemon.json";
const CONFIG_FLAG: &str = "--config-file";
/// API version of Docker 23, which is the first release that supports shims as runtimes.
const MIN_API: (u32, u32) = (1, 42);
/// Time limit for a reload. dockerd reads its file within a second of the signal. If dockerd
/// rejects the file, it reports the rejection only in its log.
const RELOAD_TIMEOUT: Duration = Duration::from_secs(10);
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// A running dockerd, with the paths of its socket and its configuration file.
#[derive(Debug)]
pub struct DockerDaemon {
    /// Path of dockerd's socket.
    pub socket: PathBuf,
    /// Path of dockerd's configuration file, which may not exist.
    pub config_file: PathBuf,
    process: Identity,
    argv: Vec<OsString>,
    path: OsString,
}

impl DockerDaemon {
    /// Finds the dockerd that listens at a socket, like [`DockerDaemon::find`], but only if a
    /// dockerd runs already. If none runs, systemd may hold the socket, and a connection would
    /// start dockerd and its containers.
    ///
    /// # Errors
    /// [`DockerError`]: there is no dockerd, or it does not support shims as runtimes.
    pub fn running(socket: &Path) -> Result<DockerDaemon, DockerError> {
        if !HostProcess::all().any(|process| is_dockerd(process.pid)) {
            let source = io::Error::new(io::ErrorKind::NotFound, "no process dockerd runs");
            return Err(DockerError::Absent { socket: socket.to_owned(), source });
        }
        DockerDaemon::find(socket)
    }

    /// Finds the dockerd that listens at a socket.
    ///
    /// # Errors
    /// [`DockerError`]: there is no dockerd, or it does not support shims as runtimes.
    pub fn find(socket: &Path) -> Result<DockerDaemon, DockerError> {
        let absent = |source| DockerError::Absent { socket: socket.to_owned(), source };
        let pid = behind(socket).map_err(absent)?;
        let pid = pid.ok_or_else(|| DockerError::Foreign(socket.to_owned()))?;
        let process = process::identity(pid).map_err(absent)?;
        let proc = PathBuf::from(format!("/proc/{pid}"));
        let read = |name: &str| fs::read(proc.join(name)).map_err(absent);
        let argv: Vec<OsString> = words(&read("cmdline")?);
        let folder = fs::read_link(proc.join("cwd")).map_err(absent)?;
        let file = flag(&argv, CONFIG_FLAG).unwrap_or_else(|| CONFIG_FILE.into());
        let environment = words(&read("environ")?);
        let path = environment.iter().find_map(|entry| entry.as_bytes().strip_prefix(b"PATH="));
        let daemon = DockerDaemon {
            socket: socket.to_owned(),
            config_file: folder.join(file),
            process,
            path: OsString::from_vec(path.unwrap_or_default().to_vec()),
            argv,
        };
        let answer = engine_api::get(socket, "/version").map_err(absent)?;
        let said = answer.get("ApiVersion").and_then(Value::as_str).unwrap_or_default();
        match api_version(said) {
            Some(version) if version >= MIN_API => Ok(daemon),
            _ => Err(DockerError::Old(said.to_owned())),
        }
    }

    /// Returns whether dockerd serves a runtime of this name now.
    ///
    /// # Errors
    /// dockerd does not answer.
    pub fn serves(&self, name: &str) -> io::Result<bool> {
        let info = engine_api::get(&self.socket, "/info")?;
        Ok(info.get("Runtimes").is_some_and(|runtimes| runtimes.get(name).is_some()))
    }

    /// Returns whether dockerd's present default runtime has this name. dockerd reads the default
    /// from a flag or from its configuration file.
    pub fn is_default(&self, name: &str) -> bool {
        let info = engine_api::get(&self.socket, "/info").unwrap_or_default();
        info.get("DefaultRuntime").and_then(Value::as_str) == Some(name)
    }

    /// Checks a configuration file by running dockerd's own program with dockerd's flags and PATH.
    ///
    /// # Errors
    /// dockerd would not start with the file. The error is the program's output.
    pub fn validate(&self, config: &Path) -> Result<(), String> {
        // /proc/PID/exe is the program of the running process, even if an update has replaced the
        // program's file since.
        let mut command = Command::new(format!("/proc/{}/exe", self.process.pid));
        command.args(without_flag(&self.argv, CONFIG_FLAG)).arg(CONFIG_FLAG).arg(config);
        command.arg("--validate").env("PATH", &self.path).stdin(Stdio::null());
        let output = command.output().map_err(|error| error.to_string())?;
        match output.status.success() {
            true => Ok(()),
            false => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        }
    }

    /// Makes dockerd read its file again. If `served` is true, waits until dockerd serves the
    /// runtime. Otherwise waits until dockerd no longer serves it.
    ///
    /// # Errors
    /// The reason why dockerd did not reach the expected state.
    pub fn reload(&self, name: &str, served: bool) -> Result<(), String> {
        process::reload(&self.process).map_err(|error| error.to_string())?;
        let began = Instant::now();
        loop {
            let why = match self.serves(name) {
                Ok(now) if now == served => return Ok(()),
                Ok(true) => format!("dockerd still serves runtime {name}"),
                Ok(false) => format!("dockerd does not serve runtime {name}"),
                Err(error) => error.to_string(),
            };
            if began.elapsed() > RELOAD_TIMEOUT {
                return Err(why);
            }
            thread::sleep(LOOK_EVERY);
        }
    }
}

/// Returns the pid of the dockerd that listens at a socket. `None`: another program listens.
fn behind(socket: &Path) -> io::Result<Option<u32>> {
    let stream = UnixStream::connect(socket)?;
    let peer = rustix::net::sockopt::socket_peercred(&stream)?.pid.as_raw_nonzero().get();
    let peer = peer.cast_unsigned();
    if is_dockerd(peer) {
        return Ok(Some(peer));
    }
    // The peer may be systemd, which listens on the socket and has passed it to dockerd.
    let table = fs::read_to_string(format!("/proc/{peer}/net/unix"))?;
    let real = |path: &str| fs::canonicalize(path).ok();
    let wanted = fs::canonicalize(socket)?;
    let rows = table.lines().filter_map(listener);
    let links: Vec<PathBuf> = rows
        .filter(|(_, path)| real(path).as_ref() == Some(&wanted))
        .map(|(inode, _)| PathBuf::from(format!("socket:[{inode}]")))
        .collect();
    let pids = fs::read_dir("/proc")?
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    Ok(pids.filter(|pid| is_dockerd(*pid)).find(|pid| holds(*pid, &links)))
}

fn is_dockerd(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim_end() == PROGRAM)
}

fn holds(pid: u32, links: &[PathBuf]) -> bool {
    let open = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    open.filter_map(|entry| fs::read_link(entry.path()).ok()).any(|link| links.contains(&link))
}

/// Parses a row of /proc/net/unix, `Num RefCount Protocol Flags Type St Inode Path`. Returns inode
/// and path.
fn listener(row: &str) -> Option<(&str, &str)> {
    let mut fields = row.split_ascii_whitespace();
    let inode = fields.nth(6)?;
    Some((inode, fields.next()?))
}

fn words(bytes: &[u8]) -> Vec<OsString> {
    let words = bytes.split(|byte| *byte == 0).filter(|word| !word.is_empty());
    words.map(|word| OsString::from_vec(word.to_vec())).collect()
}

/// Returns the value of a flag, written as `--flag value` or as `--flag=value`. If the flag is
/// repeated, its last value applies.
fn flag(argv: &[OsString], name: &str) -> Option<OsString> {
    let mut found = None;
    for (index, word) in argv.iter().enumerate().skip(1) {
        if word == name {
            found = argv.get(index + 1).cloned();
        } else if let Some(value) = value_of(word, name) {
            found = Some(value.to_owned());
        }
    }
    found
}

/// Returns the arguments without the program's name and without the flag `name`.
fn without_flag(argv: &[OsString], name: &str) -> Vec<OsString> {
    let mut rest = Vec::new();
    let mut words = argv.iter().skip(1);
    while let Some(word) = words.next() {
        if word == name {
            let _value = words.next();
        } else if value_of(word, name).is_none() {
            rest.push(word.clone());
        }
    }
    rest
}

fn value_of<'a>(word: &'a OsStr, name: &str) -> Option<&'a OsStr> {
    let value = word.as_bytes().strip_prefix(name.as_bytes())?.strip_prefix(b"=")?;
    Some(OsStr::from_bytes(value))
}

/// Parses the two numbers of a version such as `1.45`.
fn api_version(said: &str) -> Option<(u32, u32)> {
    let (major, minor) = said.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn argv(words: &[&str]) -> Vec<OsString> {
        words.iter().map(OsString::from).collect()
    }

    #[test]
    fn flags_are_found_and_left_out_in_each_form() {
        let both = argv(&["dockerd", "--config-file", "/a", "-H", "fd://", "--config-file=/b"]);
        assert_eq!(flag(&both, CONFIG_FLAG), Some("/b".into()));
        assert_eq!(without_flag(&both, CONFIG_FLAG), argv(&["-H", "fd://"]));
        let none = argv(&["dockerd", "--config-file-of-another=/a"]);
        assert_eq!(flag(&none, CONFIG_FLAG), None);
        assert_eq!(without_flag(&none, CONFIG_FLAG), none[1..]);
    }

    #[test]
    fn versions_before_docker_23_are_older() {
        assert!(api_version("1.41") < Some(MIN_API) && api_version("1.42") >= Some(MIN_API));
        assert!(api_version("2.0") >= Some(MIN_API) && api_version("").is_none());
    }

    #[test]
    fn a_row_names_inode_and_path() {
        let row = "ffff8880: 00000002 00000000 00010000 0001 01 21543 /run/docker.sock";
        assert_eq!(listener(row), Some(("21543", "/run/docker.sock")));
        assert_eq!(listener("ffff8880: 00000003 00000000 00000000 0001 03 21544"), None);
    }

    #[test]
    fn another_program_behind_the_socket_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("docker.sock");
        let found = DockerDaemon::find(&socket);
        assert!(matches!(found, Err(DockerError::Absent { .. })), "{found:?}");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let found = DockerDaemon::find(&socket);
        assert!(matches!(found, Err(DockerError::Foreign(_))), "{found:?}");
    }
}
