//! A private containerd in a temporary folder, with the stock shim and Affinode's shim next to it.

mod image;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

pub use image::BOX;

pub const STOCK: &str = "io.containerd.runc.v2";
pub const OURS: &str = "io.containerd.affinode.v1";
const SHIM: &str = env!("CARGO_BIN_EXE_containerd-shim-affinode-v1");
/// Time limit of a wait. It is much longer than any step of these tests takes.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

pub struct Node {
    dir: tempfile::TempDir,
    /// containerd namespace of this node. Each node has its own, because runc keeps its state by
    /// namespace and id, for all containerds of the machine.
    pub namespace: String,
    containerd: Option<Child>,
}

/// Polls `check` until it returns a value, and returns the value.
pub fn eventually<T>(what: &str, mut check: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + WAIT_TIMEOUT;
    loop {
        if let Some(found) = check() {
            return found;
        }
        assert!(Instant::now() < deadline, "not reached within {WAIT_TIMEOUT:?}: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn which(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .map(|dir| dir.join(name))
        .find(|path| path.is_file())
}

impl Node {
    /// Starts the node. Returns `None`, and records a skip, if containers cannot run here.
    pub fn start() -> Option<Node> {
        if !rustix::process::geteuid().is_root() {
            affinode_test_notes::skip("root", "running containers needs root");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        for name in ["bin", "lib"] {
            fs::create_dir(path(name)).unwrap();
        }
        for name in ["containerd", "ctr", "runc", "containerd-shim-runc-v2"] {
            let Some(found) = which(name) else {
                affinode_test_notes::skip(name, &format!("{name} is not installed"));
                return None;
            };
            symlink(found, path("bin").join(name)).unwrap();
        }
        // The test runs its own copy of the binary, so that a build does not replace the binary
        // during the test.
        let shim = path("bin").join("containerd-shim-affinode-v1");
        fs::copy(SHIM, &shim).unwrap();
        fs::write(path("lib/libaffinode_preload.so"), "not a library").unwrap();
        image::make_rootfs(&path("rootfs"));
        fs::write(
            path("config.toml"),
            format!(
                "version = 2\nroot = '{0}/root'\nstate = '{0}/state'\n\
                 disabled_plugins = ['io.containerd.grpc.v1.cri', 'io.containerd.internal.v1.opt', \
                 'io.containerd.cri.v1.images', 'io.containerd.cri.v1.runtime']\n\
                 [grpc]\naddress = '{0}/c.sock'\n",
                dir.path().display()
            ),
        )
        .unwrap();
        let name = dir.path().file_name().unwrap().to_string_lossy();
        let namespace = format!("test{}", name.trim_start_matches('.'));
        let mut node = Node { dir, namespace, containerd: None };
        node.up();
        Some(node)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn env(&self, command: &mut Command) {
        let path = std::env::var("PATH").unwrap();
        command
            .env("PATH", format!("{}:{path}", self.path("bin").display()))
            .env("AFFINODE_RUN_DIR", self.path("affinode"))
            .env("AFFINODE_LIB_DIR", self.path("lib"))
            .env_remove("AFFINODE_STOCK_SHIM");
    }

    pub fn up(&mut self) {
        let log = fs::File::options().create(true).append(true).open(self.path("log")).unwrap();
        let mut command = Command::new(self.path("bin/containerd"));
        self.env(&mut command);
        let child = command
            .arg("-c")
            .arg(self.path("config.toml"))
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        self.containerd = Some(child);
        eventually("containerd accepts connections", || {
            self.ctr("version").status.success().then_some(())
        });
    }

    pub fn down(&mut self) {
        let mut child = self.containerd.take().unwrap();
        let pid = rustix::process::Pid::from_child(&child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        child.wait().unwrap();
    }

    /// Runs ctr with the words of `line`, split at blanks.
    pub fn ctr(&self, line: &str) -> Output {
        let mut command = Command::new(self.path("bin/ctr"));
        self.env(&mut command);
        command
            .arg("-a")
            .arg(self.path("c.sock"))
            .args(["-n", &self.namespace])
            .args(line.split_whitespace())
            .stdin(Stdio::null())
            .output()
            .unwrap()
    }

    /// Runs ctr and asserts its success. Returns stdout.
    pub fn ok(&self, line: &str) -> String {
        let output = self.ctr(line);
        assert!(
            output.status.success(),
            "ctr {line}: {}\n{}",
            String::from_utf8_lossy(&output.stderr),
            self.log()
        );
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs a container from the rootfs folder to its end. Returns stdout and exit code.
    pub fn run(&self, runtime: &str, flags: &str, args: &str) -> (String, Option<i32>) {
        let rootfs = self.path("rootfs");
        let output = self.ctr(&format!(
            "run --rm --runtime {runtime} {flags} --rootfs {} one {args}",
            rootfs.display()
        ));
        let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
        (stdout, output.status.code())
    }

    /// Starts a container that keeps running.
    pub fn detach(&self, runtime: &str, flags: &str, id: &str) {
        let rootfs = self.path("rootfs");
        self.ok(&format!(
            "run -d --runtime {runtime} {flags} --rootfs {} {id} {BOX} stay",
            rootfs.display()
        ));
    }

    /// Imports an image with these layers into containerd. Each layer is a list of path and text.
    /// `None` in place of the text is a whiteout.
    pub fn import(&self, name: &str, layers: &[&[(&str, Option<&str>)]]) {
        let tar = image::make_image(&self.path("rootfs"), self.dir.path(), name, layers);
        self.ok(&format!("images import {}", tar.display()));
    }

    pub fn bundle(&self, id: &str) -> PathBuf {
        self.path("state/io.containerd.runtime.v2.task").join(&self.namespace).join(id)
    }

    /// Status of a task, or `None` if there is no such task.
    pub fn status(&self, id: &str) -> Option<String> {
        let list = self.ok("task ls");
        list.lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>())
            .find(|words| words.first() == Some(&id))
            .map(|words| words[2].to_owned())
    }

    pub fn stop(&self, id: &str) {
        self.ok(&format!("task kill -s SIGKILL {id}"));
        eventually("the container stops", || (self.status(id)? == "STOPPED").then_some(()));
        self.ctr(&format!("task delete {id}"));
        self.ok(&format!("container delete {id}"));
    }

    /// Pids of this node's processes whose command line contains this word.
    pub fn pids(&self, word: &str) -> Vec<i32> {
        let mut pids: Vec<i32> = processes()
            .filter(|(_, command, env)| {
                command.contains(word)
                    && (command.contains(&*self.dir.path().to_string_lossy())
                        || env.contains(&*self.dir.path().to_string_lossy()))
            })
            .map(|(pid, ..)| pid)
            .collect();
        pids.sort_unstable();
        pids
    }

    /// Pids of the running proxies.
    pub fn proxies(&self) -> Vec<i32> {
        self.pids("affinode-v1\0-namespace")
    }

    /// Pids of the running controllers.
    pub fn controllers(&self) -> Vec<i32> {
        self.pids("affinode-v1\0controller")
    }

    /// Pids of the running stock shims.
    pub fn stock_shims(&self) -> Vec<i32> {
        self.pids("shim-runc-v2\0-namespace")
    }

    /// Asserts that no process, mount or file of any container is left.
    pub fn assert_clean(&self) {
        for (what, word) in [
            ("proxies", "affinode-v1\0-namespace"),
            ("stock shims", "shim-runc-v2\0-namespace"),
            ("containers", BOX),
        ] {
            eventually(&format!("{what} are gone"), || self.pids(word).is_empty().then_some(()));
        }
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        let ours = self.dir.path().to_string_lossy().into_owned();
        let left: Vec<_> = mounts.lines().filter(|line| line.contains(&ours)).collect();
        assert!(left.is_empty(), "{left:?}");
        let containers = self.path("affinode/containers");
        if let Ok(folders) = fs::read_dir(&containers) {
            let left: Vec<_> = folders.flatten().map(|entry| entry.path()).collect();
            assert!(left.is_empty(), "{left:?}");
        }
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap_or_default()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let leftovers = [self.proxies(), self.stock_shims(), self.pids(BOX), self.controllers()];
        for pid in leftovers.concat() {
            if let Some(pid) = rustix::process::Pid::from_raw(pid) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        }
        if let Some(mut child) = self.containerd.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        for line in mounts.lines() {
            let target = line.split(' ').nth(1).unwrap_or_default();
            if Path::new(target).starts_with(self.dir.path()) {
                let _ = Command::new("umount").args(["-l", target]).status();
            }
        }
    }
}

fn processes() -> impl Iterator<Item = (i32, String, String)> {
    fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        let read = |name: &str| {
            let bytes = fs::read(entry.path().join(name)).ok()?;
            Some(String::from_utf8_lossy(&bytes).into_owned())
        };
        Some((pid, read("cmdline")?, read("environ").unwrap_or_default()))
    })
}

/// Kills a process with SIGKILL, so that it cannot clean up.
pub fn kill(pid: i32) {
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}

/// Sends SIGTERM to a process.
pub fn terminate(pid: i32) {
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
}
