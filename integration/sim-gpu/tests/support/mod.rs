//! Test support: a node with simulated GPUs, and client programs on it.

#![allow(dead_code, reason = "each test binary uses a part")]
#![allow(clippy::unwrap_used, reason = "a panic in a test is its failure")]

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use affinode_sim_protocol::{GpuSnapshot, Packet, Reply, Request};
use serde_json::Value;
use tempfile::TempDir;

pub const MIB: u64 = 1 << 20;
/// VRAM that the tests' daemons count for a context, in bytes.
pub const CONTEXT: u64 = 16 * MIB;
/// Maximum time for which a test waits for an expected event.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// The built products of the simulated GPU. Each test binary builds them once.
pub struct Products {
    pub daemon: PathBuf,
    /// Folder with libcuda.so.1 and libnvidia-ml.so.1.
    pub libraries: PathBuf,
    pub clients: PathBuf,
}

pub fn products() -> &'static Products {
    static PRODUCTS: OnceLock<Products> = OnceLock::new();
    PRODUCTS.get_or_init(|| {
        // The path of the test binary ends with debug/deps/NAME.
        let test = std::env::current_exe().unwrap();
        let debug = test.parent().and_then(Path::parent).unwrap();
        let build = Command::new(env!("CARGO"))
            .args(["build", "--quiet", "--target-dir"])
            .arg(debug.parent().unwrap())
            .args(["-p", "affinode-sim-gpud", "-p", "affinode-sim-cuda", "-p", "affinode-sim-nvml"])
            .status();
        assert!(build.unwrap().success());
        // A static is never dropped, so a temporary folder would remain. This folder belongs to the
        // test binary, whose next run empties it.
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(test.file_name().unwrap());
        let _ = std::fs::remove_dir_all(&folder);
        let (libraries, clients) = (folder.join("lib"), folder.join("clients"));
        std::fs::create_dir_all(&libraries).unwrap();
        for (built, installed) in [("cuda", "libcuda.so.1"), ("nvml", "libnvidia-ml.so.1")] {
            let built = debug.join(format!("libaffinode_sim_{built}.so"));
            std::fs::copy(built, libraries.join(installed)).unwrap();
        }
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../clients/build.sh");
        assert!(Command::new(sources).arg(&clients).status().unwrap().success());
        Products { daemon: debug.join("affinode-sim-gpud"), libraries, clients }
    })
}

/// A node with simulated GPUs: one GPU daemon in a temporary folder.
pub struct Node {
    daemon: Child,
    folder: TempDir,
}

impl Node {
    pub fn start(options: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        // Other users must be able to reach the socket.
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(folder.path(), open).unwrap();
        let mut daemon = Command::new(&products().daemon)
            .arg("--socket")
            .arg(folder.path().join("gpu.sock"))
            .args(options)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(daemon.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        Self { daemon, folder }
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("gpu.sock")
    }

    /// Builds a command that runs a program with the simulated driver.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        command
            .env("LD_LIBRARY_PATH", &products().libraries)
            .env("AFFINODE_SIM_SOCKET", self.socket());
        command
    }

    /// Starts a client program that executes commands of the test.
    pub fn client(&self, name: &str, arguments: &[&str]) -> Client {
        let mut command = self.command(products().clients.join(name));
        command.args(arguments);
        Client::start(command)
    }

    /// Starts a client program, and makes it fill this many MiB of GPU memory.
    pub fn worker(&self, mib: u64) -> Client {
        let mut worker = self.client("dlopen_dlsym", &["--mib", &mib.to_string()]);
        assert_eq!(worker.answer("fill")["result"], 0);
        worker
    }

    /// Makes these checkpoint calls on the process `pid` from a program that runs as root. Returns
    /// the result code of each call.
    pub fn checkpoint(&self, pid: u32, calls: &[&str]) -> Vec<i64> {
        let answers = self.checkpoint_answers(pid, calls);
        answers.iter().map(|answer| answer["result"].as_i64().unwrap()).collect()
    }

    pub fn checkpoint_answers(&self, pid: u32, calls: &[&str]) -> Vec<Value> {
        let mut command = self.command(products().clients.join("checkpoint"));
        let output = command.arg(pid.to_string()).args(calls).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Returns the checkpoint state of a process, as `cuCheckpointProcessGetState` reports it.
    pub fn state(&self, pid: u32) -> i64 {
        self.checkpoint_answers(pid, &["state"])[0]["value"].as_i64().unwrap()
    }

    pub fn snapshot(&self) -> Vec<GpuSnapshot> {
        let packet = Packet::connect(&self.socket()).unwrap();
        packet.send(&Request::Snapshot, None).unwrap();
        match packet.receive().unwrap() {
            Some((Reply::Snapshot(gpus), _)) => gpus,
            other => panic!("{other:?}"),
        }
    }

    pub fn used_bytes(&self, gpu: usize) -> u64 {
        self.snapshot()[gpu].used_bytes
    }

    /// Waits until this many bytes of a GPU's VRAM are in use.
    pub fn wait_used(&self, gpu: usize, bytes: u64) {
        wait_for(&format!("{bytes} bytes in use"), || self.used_bytes(gpu) == bytes);
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

/// A running client program.
pub struct Client {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
}

impl Client {
    pub fn start(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take().unwrap());
        // A separate thread reads, so that a missing reply fails the test instead of blocking it.
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            let mut lines = BufReader::new(stdout).lines();
            lines.try_for_each(|line| sender.send(line.ok()?).ok())
        });
        Self { child, stdin, lines }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a command without waiting for its reply.
    pub fn send(&mut self, command: &str) {
        writeln!(self.stdin.as_mut().unwrap(), "{command}").unwrap();
    }

    /// Waits for the client's next reply, which must be to this command.
    pub fn answer(&mut self, command: &str) -> Value {
        loop {
            let line = self.lines.recv_timeout(WAIT_TIMEOUT);
            let line = line.unwrap_or_else(|error| panic!("no answer to {command}: {error}"));
            let answer: Value = serde_json::from_str(&line).unwrap();
            if answer["command"] == command {
                return answer;
            }
        }
    }

    pub fn ask(&mut self, command: &str) -> Value {
        self.send(command);
        self.answer(command.split(' ').next().unwrap())
    }

    /// Sends a command. The client must reply with this result.
    pub fn expect(&mut self, command: &str, result: i64) {
        let answer = self.ask(command);
        assert_eq!(answer["result"], result, "{answer}");
    }

    /// Checks that all words in the client's GPU memory have the expected values.
    pub fn expect_intact(&mut self) {
        let answer = self.ask("verify");
        assert_eq!((&answer["result"], &answer["ok"]), (&0.into(), &true.into()), "{answer}");
    }

    /// Sends a command, and waits until the client blocks in it.
    pub fn expect_blocked(&mut self, command: &str) {
        self.send(command);
        let futex = format!("{} ", nix::libc::SYS_futex);
        let syscall = format!("/proc/{}/syscall", self.pid());
        // The program waits for commands in `poll`, never in `futex`.
        wait_for("a blocked call", || {
            std::fs::read_to_string(&syscall).is_ok_and(|call| call.starts_with(&futex))
        });
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Closes the program's input, waits for its end, and returns its exit status.
    pub fn end(mut self) -> ExitStatus {
        drop(self.stdin.take());
        wait_for("the end of a client", || self.child.try_wait().unwrap().is_some());
        self.child.wait().unwrap()
    }

    /// Closes the program's input and waits for its end. Returns the signal that ended it, if there
    /// was one.
    pub fn fatal_signal(self) -> Option<i32> {
        self.end().signal()
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits until a condition holds, and fails after the time limit.
pub fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < WAIT_TIMEOUT, "waited in vain for {what}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// Returns the time of CLOCK_MONOTONIC in microseconds, as the clients print it.
pub fn now_us() -> u64 {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC).unwrap();
    now.tv_sec() as u64 * 1_000_000 + now.tv_nsec() as u64 / 1000
}

pub fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

/// Changes a command so that it runs as this user.
pub fn as_user(mut command: Command, uid: u32) -> Command {
    command.uid(uid).gid(uid);
    command
}
