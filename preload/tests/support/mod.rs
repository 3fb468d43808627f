//! Shared parts of the preload library's tests: the built library, C programs, and a fake
//! controller that sends the orders which the test chooses.

#![allow(dead_code, reason = "each test file uses its own part")]

pub mod controller;

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;

/// Returns the path of the built preload library. `AFFINODE_PRELOAD_SO` can name it. Otherwise the
/// library is built now.
pub fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        if let Some(named) = std::env::var_os("AFFINODE_PRELOAD_SO") {
            return named.into();
        }
        let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
        let built = Command::new(env!("CARGO"))
            .args(["rustc", "-p", "affinode-preload", "--profile", "preload"])
            .args(["--lib", "--crate-type", "cdylib", "--quiet", "--target-dir"])
            .arg(target)
            .status()
            .unwrap();
        assert!(built.success(), "the library does not build");
        target.join("preload/libaffinode_preload.so")
    })
}

/// Compiles a program of `tests/programs` once per test process.
fn compile(compiler: &str, source: &str, output: &str, flags: &[&str]) -> PathBuf {
    let path = folder(compiler).join(output);
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs").join(source);
    let done = Command::new(compiler)
        .args(["-O1", "-w", "-pthread"])
        .arg(source)
        .arg("-o")
        .arg(&path)
        .args(flags)
        .status()
        .unwrap();
    assert!(done.success(), "{compiler} {output}");
    path
}

fn folder(compiler: &str) -> PathBuf {
    static ROOT: OnceLock<PathBuf> = OnceLock::new();
    let root = ROOT.get_or_init(|| {
        // The folder is kept in a static, which is never dropped. So each test binary has a folder
        // of its own, and empties it when it runs again.
        let binary = std::env::current_exe().unwrap();
        let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join(binary.file_name().unwrap());
        let _ = std::fs::remove_dir_all(&root);
        root
    });
    let folder = root.join(compiler);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// A set of client programs, which one compiler has built with one kind of stub driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Build {
    Glibc,
    Musl,
}

impl Build {
    /// The folder with `libcuda.so.1`, `client` and `linked`.
    pub fn programs(self) -> &'static Path {
        static GLIBC: OnceLock<PathBuf> = OnceLock::new();
        static MUSL: OnceLock<PathBuf> = OnceLock::new();
        let (cell, compiler) = match self {
            Build::Glibc => (&GLIBC, "gcc"),
            Build::Musl => (&MUSL, "musl-gcc"),
        };
        cell.get_or_init(|| {
            let symbolic = ["-shared", "-fPIC", "-Wl,-Bsymbolic", "-Wl,-soname,libcuda.so.1"];
            let driver = compile(compiler, "stub_cuda.c", "libcuda.so.1", &symbolic);
            compile(compiler, "client.c", "client", &["-ldl"]);
            compile(compiler, "signals.c", "signals", &["-ldl"]);
            if self == Build::Glibc {
                compile(compiler, "walks.c", "walks", &["-rdynamic", "-ldl"]);
                compile(compiler, "creator.c", "creator", &["-rdynamic", "-ldl"]);
            }
            let shared = ["-shared", "-fPIC", "-ldl"];
            compile(compiler, "forward.c", "libforward.so", &shared);
            let driver = driver.to_str().unwrap();
            let named =
                ["-shared", "-fPIC", "-Wl,-Bsymbolic", "-Wl,-soname,libnvidia-ml.so.1", "-ldl"];
            let nvml = compile(compiler, "stub_nvml.c", "libnvidia-ml.so.1", &named);
            compile(compiler, "nvml_client.c", "nvml", &["-ldl"]);
            let linked = ["-DLINKED", nvml.to_str().unwrap(), "-ldl"];
            compile(compiler, "nvml_client.c", "nvml-linked", &linked);
            compile(compiler, "client.c", "linked", &["-DLINKED", driver, "-ldl"]);
            folder(compiler)
        })
    }
}

/// Returns the folder of another stub driver, built with `flags`: for example one without a
/// checkpoint interface, or one whose calls to its own functions other libraries can redirect to
/// themselves.
pub fn other_driver(name: &str, flags: &[&str]) -> PathBuf {
    let built = format!("libcuda-{name}.so");
    let shared = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"];
    let built = compile("gcc", "stub_cuda.c", &built, &[&shared, flags].concat());
    let path = folder(name).join("libcuda.so.1");
    std::fs::rename(built, &path).unwrap();
    path.parent().unwrap().to_owned()
}

/// Returns a `PATH` with a fake `nvidia-smi` in `folder`. It prints the file `free`, and adds a
/// byte to the file `asked` each time. Both files are in `folder`.
pub fn nvidia_smi(folder: &Path) -> String {
    use std::os::unix::fs::PermissionsExt;
    let (free, asked) = (folder.join("free"), folder.join("asked"));
    let script = format!("#!/bin/sh\nprintf . >>{}\ncat {}\n", asked.display(), free.display());
    let tool = folder.join("nvidia-smi");
    std::fs::write(&tool, script).unwrap();
    std::fs::set_permissions(&tool, std::fs::Permissions::from_mode(0o755)).unwrap();
    format!("{}:/usr/bin:/bin", folder.display())
}

/// A running client program of a test.
pub struct Client {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Client {
    /// Starts a client that gets the driver's functions by `route`, with additional environment
    /// variables.
    pub fn start(build: Build, route: &str, environment: &[(&str, &str)]) -> Client {
        let program = if route == "link" { "linked" } else { "client" };
        Client::start_program(build, &[program, route], environment)
    }

    /// Starts another program in the folder of the client. It must answer commands as the client
    /// does.
    pub fn start_program(build: Build, words: &[&str], environment: &[(&str, &str)]) -> Client {
        let folder = build.programs();
        let mut command = Command::new(folder.join(words[0]));
        command
            .args(&words[1..])
            .env("LD_LIBRARY_PATH", folder)
            .env("LD_PRELOAD", library())
            .env("AFFINODE_SOCKET", "/nonexistent/agent.sock")
            .envs(environment.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        Client {
            stdin: child.stdin.take().unwrap(),
            stdout: BufReader::new(child.stdout.take().unwrap()),
            child,
        }
    }

    /// Sends a command without waiting for its answer.
    pub fn send(&mut self, command: &str) {
        writeln!(self.stdin, "{command}").unwrap();
    }

    /// Waits for the next line of the client's output, which is a number.
    pub fn answer(&mut self) -> i64 {
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        let ended = self.child.try_wait();
        line.trim().parse().unwrap_or_else(|_| panic!("the client ended: {ended:?}"))
    }

    /// Sends a command to the client and waits for its answer.
    pub fn ask(&mut self, command: &str) -> i64 {
        self.send(command);
        self.answer()
    }

    /// The client's process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Ends the client with SIGTERM, which it does not handle, and waits for its end.
    pub fn terminate(mut self) {
        let pid = nix::unistd::Pid::from_raw(self.child.id() as i32);
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
        assert!(!self.child.wait().unwrap().success());
    }

    /// Closes the client's input and waits for its successful end.
    pub fn finish(mut self) {
        drop(self.stdin);
        assert!(self.child.wait().unwrap().success());
    }

    /// Closes the client's input. Returns the answers that its exit handlers print. The client must
    /// end successfully.
    pub fn last_answers(mut self) -> Vec<i64> {
        drop(self.stdin);
        let lines = std::io::read_to_string(&mut self.stdout).unwrap();
        let status = self.child.wait().unwrap();
        assert!(status.success(), "{status}: {lines}");
        lines.lines().map(|line| line.parse().unwrap()).collect()
    }

    /// Returns a number from the kernel's status file of the client's thread `name`. Returns 0 if
    /// there is none.
    pub fn thread_status(&self, name: &str, field: &str) -> u64 {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.pid())).unwrap();
        let texts = tasks
            .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("status")).ok())
            .find(|text| text.starts_with(&format!("Name:\t{name}\n")));
        let value = |text: String| {
            let mut lines = text.lines().filter_map(|line| line.split_once(":\t"));
            lines.find(|(known, _)| *known == field)?.1.trim().parse().ok()
        };
        texts.and_then(value).unwrap_or(0)
    }

    /// Returns the names of the client's threads.
    pub fn threads(&self) -> Vec<String> {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.pid())).unwrap();
        tasks
            .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok())
            .map(|name| name.trim().to_owned())
            .collect()
    }
}
