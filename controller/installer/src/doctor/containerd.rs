//! Finds the containerd that serves a socket. The kernel identifies the process that listens at the
//! socket. The checks then read the program, configuration and PATH of exactly that process.

use std::{
    ffi::OsString,
    fs,
    os::unix::{
        ffi::{OsStrExt, OsStringExt},
        net::UnixStream,
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use affinode_controller::error_chain;

use super::{CheckGroup, DoctorCheck};

/// Paths of containerd's socket in distributions, in the order in which they are tried. The sockets
/// of Kubernetes distributions come first. On a node of such a distribution, a second containerd
/// may serve Docker, which needs no handler.
const SOCKETS: [&str; 4] = [
    "/run/k3s/containerd/containerd.sock",
    "/run/k0s/containerd.sock",
    "/var/snap/microk8s/common/run/containerd.sock",
    "/run/containerd/containerd.sock",
];
/// Default value of containerd's option `--config`.
const CONFIG_FILE: &str = "/etc/containerd/config.toml";
/// Path of the configuration file that k3s and rke2 generate for containerd, relative to their data
/// folder.
pub const RENDERED: &str = "agent/etc/containerd/config.toml";
/// First containerd release that has all the calls that the shim serves.
const MIN_VERSION: (u32, u32) = (1, 6);

/// The containerd process that serves a socket.
#[derive(Clone, Debug)]
pub struct ContainerdProcess {
    /// Path of the socket.
    pub socket: PathBuf,
    /// Pid of the containerd process, which listens at the socket.
    pub pid: u32,
    /// Path of containerd's executable.
    pub program: PathBuf,
    /// Output of `--version`, or the reason why the program failed.
    pub version: Result<String, String>,
    /// Path of the configuration file with which containerd was started.
    pub config_file: PathBuf,
    /// containerd's configuration with all imports, or the reason why the configuration cannot be
    /// read.
    pub config: Result<toml::Table, String>,
    environment: Vec<u8>,
    argv: Vec<OsString>,
}

/// Reason why no containerd was found.
#[derive(Debug, thiserror::Error)]
pub enum ContainerdAbsent {
    /// The socket does not exist.
    #[error("containerd's socket {} does not exist", .0.display())]
    NoSocket(PathBuf),
    /// The socket exists, but no process accepts connections at it.
    #[error("cannot connect to {}", socket.display())]
    Silent {
        /// Path of the socket.
        socket: PathBuf,
        /// System error of the failed connection.
        #[source]
        source: std::io::Error,
    },
    /// A process listens at the socket and its pid is known, but its folder in /proc cannot be
    /// read.
    #[error("cannot read /proc of the process that listens at {}", socket.display())]
    Hidden {
        /// Path of the socket.
        socket: PathBuf,
        /// System error of the failed read.
        #[source]
        source: std::io::Error,
    },
}

impl ContainerdProcess {
    /// Returns the configuration as containerd's program reads it now.
    ///
    /// # Errors
    /// The program failed. The error is its output.
    pub fn dump(&self) -> Result<toml::Table, String> {
        dump(self.pid, &self.argv)
    }

    /// Returns the configuration as containerd's program would read it from another file.
    ///
    /// # Errors
    /// The program failed. The error is its output.
    pub fn dump_of(&self, file: &Path) -> Result<toml::Table, String> {
        let name = self.argv.first().cloned().unwrap_or_default();
        dump(self.pid, &[name, "--config".into(), file.into()])
    }

    /// Returns a variable of containerd's environment. `None`: the variable is not set or is empty.
    #[must_use]
    pub fn variable(&self, name: &str) -> Option<OsString> {
        self.environment.split(|byte| *byte == 0).find_map(|entry| {
            let value = entry.strip_prefix(name.as_bytes())?.strip_prefix(b"=")?;
            (!value.is_empty()).then(|| OsString::from_vec(value.to_vec()))
        })
    }

    /// Returns the folders of containerd's PATH variable.
    #[must_use]
    pub fn path(&self) -> Vec<PathBuf> {
        std::env::split_paths(&self.variable("PATH").unwrap_or_default()).collect()
    }
}

/// Finds the containerd that serves this socket. `None`: tries the sockets that distributions use.
///
/// # Errors
/// [`ContainerdAbsent`]: the socket does not exist, no process accepts connections, or the process
/// cannot be examined.
pub fn find(socket: Option<&Path>) -> Result<ContainerdProcess, ContainerdAbsent> {
    let known = || {
        let last = SOCKETS.last().map(PathBuf::from).unwrap_or_default();
        first(&SOCKETS.map(PathBuf::from)).unwrap_or(last)
    };
    let socket = socket.map_or_else(known, Path::to_owned);
    if !socket.exists() {
        return Err(ContainerdAbsent::NoSocket(socket));
    }
    let silent = |source| ContainerdAbsent::Silent { socket: socket.clone(), source };
    let stream = UnixStream::connect(&socket).map_err(silent)?;
    let peer = rustix::net::sockopt::socket_peercred(&stream).map_err(|e| silent(e.into()))?;
    let pid = peer.pid.as_raw_nonzero().get().cast_unsigned();
    look(&socket, pid).map_err(|source| ContainerdAbsent::Hidden { socket, source })
}

/// Returns the first socket on which a process listens. If there is none, returns the first socket
/// that exists, because a stopped containerd does not remove its socket.
fn first(sockets: &[PathBuf]) -> Option<PathBuf> {
    let answers = |path: &&PathBuf| UnixStream::connect(path).is_ok();
    let there = |path: &&PathBuf| path.exists();
    sockets.iter().find(answers).or_else(|| sockets.iter().find(there)).cloned()
}

fn look(socket: &Path, pid: u32) -> std::io::Result<ContainerdProcess> {
    let proc = PathBuf::from(format!("/proc/{pid}"));
    let argv: Vec<OsString> = fs::read(proc.join("cmdline"))?
        .split(|byte| *byte == 0)
        .map(|word| OsString::from_vec(word.to_vec()))
        .collect();
    let version = run(pid, &argv, &["--version".into()]);
    let named = config_flag(&argv);
    let named = named.last().map(|word| {
        let bytes = word.as_bytes();
        let path = bytes.iter().position(|byte| *byte == b'=').map_or(bytes, |at| &bytes[at + 1..]);
        PathBuf::from(OsString::from_vec(path.to_vec()))
    });
    Ok(ContainerdProcess {
        socket: socket.to_owned(),
        pid,
        program: fs::read_link(proc.join("exe"))?,
        version: version.map(|text| text.trim().to_owned()),
        config_file: fs::read_link(proc.join("cwd"))?
            .join(named.unwrap_or_else(|| PathBuf::from(CONFIG_FILE))),
        config: dump(pid, &argv),
        environment: fs::read(proc.join("environ"))?,
        argv,
    })
}

fn dump(pid: u32, argv: &[OsString]) -> Result<toml::Table, String> {
    let words = config_flag(argv).into_iter().chain(["config".into(), "dump".into()]);
    let text = run(pid, argv, &words.collect::<Vec<_>>())?;
    text.parse()
        .map_err(|error| format!("cannot parse the output of `containerd config dump`: {error}"))
}

/// Runs containerd's executable with the `argv[0]` of the running daemon, because some executables
/// contain several programs.
fn run(pid: u32, argv: &[OsString], arguments: &[OsString]) -> Result<String, String> {
    // /proc/PID/exe is the executable of the running process, even if an update has replaced its
    // file.
    let mut command = Command::new(format!("/proc/{pid}/exe"));
    command.arg0(argv.first().cloned().unwrap_or_default()).args(arguments).stdin(Stdio::null());
    let output = command.output().map_err(|error| error_chain::chain(&error))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(String::from_utf8_lossy(&output.stderr).trim().to_owned())
}

/// Returns the arguments that form containerd's flag `--config FILE`, in any of its spellings.
fn config_flag(argv: &[OsString]) -> Vec<OsString> {
    let names: [&[u8]; 4] = [b"--config", b"-config", b"-c", b"--c"];
    for (index, word) in argv.iter().enumerate().skip(1) {
        let bytes = word.as_bytes();
        if names.contains(&bytes) {
            return argv.iter().skip(index).take(2).cloned().collect();
        }
        if names.iter().any(|name| bytes.strip_prefix(*name).is_some_and(|b| b.starts_with(b"="))) {
            return vec![word.clone()];
        }
    }
    Vec::new()
}

/// Returns whether the kubelet runs on this machine, alone or as a part of a Kubernetes
/// distribution.
#[must_use]
pub fn kubelet_runs() -> bool {
    process_runs(&["kubelet", "k3s-server", "k3s-agent", "k0s", "kubelite"])
}

/// Returns whether a process with one of these names runs. The kernel truncates names to 15 bytes.
#[must_use]
pub fn process_runs(names: &[&str]) -> bool {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_name().as_bytes().iter().all(u8::is_ascii_digit))
        .filter_map(|entry| fs::read_to_string(entry.path().join("comm")).ok())
        .any(|comm| names.contains(&comm.trim_end()))
}

/// Returns the checks of containerd's process and version. `podman_alone`: Podman is installed, and
/// containerd is not.
#[must_use]
pub fn judge(
    found: &Result<ContainerdProcess, ContainerdAbsent>,
    podman_alone: bool,
) -> Vec<DoctorCheck> {
    let mut group = CheckGroup::new("containerd");
    match found {
        Ok(daemon) => {
            let place = format!("{} (process {})", daemon.socket.display(), daemon.pid);
            group.good("daemon", place);
            judge_version(&mut group, &daemon.version);
        }
        Err(ContainerdAbsent::NoSocket(_)) if podman_alone => {
            group.good("daemon", "containerd is not installed, and Podman does not need it");
        }
        Err(why) => {
            let hint = "install and start containerd, or pass its socket with --containerd";
            group.bad("daemon", error_chain::chain(why), hint);
        }
    }
    group.checks
}

fn judge_version(group: &mut CheckGroup, version: &Result<String, String>) {
    match version {
        Ok(said) => match parse_version(said) {
            Some((number, version)) if version >= MIN_VERSION => group.good("version", number),
            Some((number, _)) => {
                let hint =
                    format!("install containerd {}.{} or newer", MIN_VERSION.0, MIN_VERSION.1);
                group.bad("version", format!("containerd {number} is too old"), hint);
            }
            None => group.warning(
                "version",
                format!("no version number in the output of containerd --version: {said}"),
                "check the version: containerd 1.6 to 2.4 were tested",
            ),
        },
        Err(why) => group.warning(
            "version",
            format!("containerd --version failed: {why}"),
            "check the version: containerd 1.6 to 2.4 were tested",
        ),
    }
}

/// Parses the output of `containerd --version`, such as `containerd
/// github.com/containerd/containerd v1.7.24 4ee…`. Returns the version as text, and its first two
/// numbers.
fn parse_version(said: &str) -> Option<(String, (u32, u32))> {
    let number = said.split_whitespace().nth(2)?.trim_start_matches('v');
    let mut parts = number.split(|c: char| !c.is_ascii_digit());
    let version = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    Some((number.to_owned(), version))
}

#[cfg(test)]
mod tests {
    use super::{super::CheckVerdict, *};

    impl ContainerdProcess {
        /// Creates the entry of a process that a test started in containerd's place. `argv` is the
        /// command line with which its program prints the configuration.
        pub(crate) fn simulated(
            socket: PathBuf,
            pid: u32,
            config_file: PathBuf,
            argv: Vec<OsString>,
            environment: &[u8],
        ) -> ContainerdProcess {
            ContainerdProcess {
                socket,
                pid,
                program: "/nowhere/containerd".into(),
                version: Err("simulated".into()),
                config_file,
                config: dump(pid, &argv),
                environment: environment.to_vec(),
                argv,
            }
        }
    }

    #[test]
    fn versions_of_every_packager_are_parsed() {
        let judged = |said: &str| {
            let mut group = CheckGroup::new("containerd");
            judge_version(&mut group, &Ok(said.into()));
            group.checks[0].verdict
        };
        let containerd = "containerd github.com/containerd/containerd";
        assert_eq!(judged(&format!("{containerd} 1.6.20~ds1 1.6.20~ds1-1+b1")), CheckVerdict::Good);
        assert_eq!(judged(&format!("{containerd}/v2 v2.1.9 5fb4e9a")), CheckVerdict::Good);
        assert_eq!(judged(&format!("{containerd} v1.5.13 a")), CheckVerdict::Bad);
        assert_eq!(judged("something else"), CheckVerdict::Warning);
    }

    #[test]
    fn the_config_flag_is_found() {
        let flag =
            |words: &[&str]| config_flag(&words.iter().map(OsString::from).collect::<Vec<_>>());
        assert_eq!(flag(&["containerd", "-c", "/a", "x"]), ["-c", "/a"]);
        assert_eq!(flag(&["containerd", "--config=/a"]), ["--config=/a"]);
        assert!(flag(&["containerd", "--log-level", "debug"]).is_empty());
    }

    /// Creates a socket file on which no process listens. The socket is bound and never listens. A
    /// closed listener would not suffice: a process that another test starts at that moment
    /// inherits the listener until its exec, and accepts connections.
    fn leave_dead(path: &Path) {
        use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, socket};
        let socket = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        bind(socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    }

    #[test]
    fn a_dead_socket_differs_from_no_socket() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("containerd.sock");
        let none = find(Some(&socket));
        assert!(matches!(none, Err(ContainerdAbsent::NoSocket(_))));
        let verdicts = [false, true].map(|podman| judge(&none, podman)[0].verdict);
        assert_eq!(verdicts, [CheckVerdict::Bad, CheckVerdict::Good]);
        leave_dead(&socket);
        assert!(matches!(find(Some(&socket)), Err(ContainerdAbsent::Silent { .. })));
        let judged = judge(&find(Some(&socket)), true);
        assert_eq!(judged[0].verdict, CheckVerdict::Bad);
    }

    #[test]
    fn the_first_live_socket_is_used() {
        let folder = tempfile::tempdir().unwrap();
        let [stopped, k3s, docker] = ["a", "b", "c"].map(|name| folder.path().join(name));
        let all = [stopped.clone(), k3s.clone(), docker.clone()];
        assert_eq!(first(&all), None);
        let bind = |path: &Path| std::os::unix::net::UnixListener::bind(path).unwrap();
        leave_dead(&stopped);
        assert_eq!(first(&all), Some(stopped));
        let _docker = bind(&docker);
        assert_eq!(first(&all), Some(docker));
        let _k3s = bind(&k3s);
        assert_eq!(first(&all), Some(k3s));
    }

    /// A program runs with the `argv[0]` of the daemon. k3s has kubectl, containerd and other
    /// programs in one file, and selects the program by `argv[0]`.
    #[test]
    fn a_program_runs_under_its_own_name() {
        let mut bash = Command::new("bash").arg("-c").arg("read").stdin(Stdio::piped()).spawn();
        let bash = bash.as_mut().unwrap();
        let argv = ["containerd", "-c", "/a"].map(OsString::from);
        let said = run(bash.id(), &argv, &["-c".into(), "echo $0".into()]);
        bash.kill().unwrap();
        bash.wait().unwrap();
        assert_eq!(said.unwrap(), "containerd\n");
    }

    #[test]
    fn the_kernel_names_the_process_behind_a_socket() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("containerd.sock");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        // This test program has no `config dump`: the error is reported.
        let daemon = look(&socket, std::process::id()).unwrap();
        assert_eq!(daemon.program, std::env::current_exe().unwrap());
        assert_eq!(daemon.variable("PATH"), std::env::var_os("PATH"));
        assert_eq!(daemon.variable("PAT"), None);
    }
}
