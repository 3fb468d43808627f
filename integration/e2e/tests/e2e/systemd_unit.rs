//! Test of the controller as a systemd unit that stores its sockets in systemd's descriptor store.
//! This test simulates systemd. `cargo xtask systemd` uses the real systemd.

use std::{
    fs,
    io::IoSliceMut,
    mem::MaybeUninit,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::net::{UnixDatagram, UnixStream},
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use affinode_e2e::{artifacts::Artifacts, cli::Cli, wait::until};
use anyhow::{Context, Result, ensure};
use rustix::{
    io::FdFlags,
    net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags},
};

/// Shell script that passes descriptors to a program as systemd does. Its arguments are the numbers
/// of descriptors, `--`, and the program with its arguments.
const HAND_OVER: &str = "n=3; while [ \"$1\" != -- ]; do eval \"exec $n<&$1\"; n=$((n+1)); shift; done; \
                         shift; export LISTEN_PID=$$ LISTEN_FDS=$((n-3)); exec \"$@\"";

/// A simulated systemd with the functions that the controller uses: messages and a descriptor
/// store.
struct Supervisor {
    artifacts: Artifacts,
    dir: tempfile::TempDir,
    heard: UnixDatagram,
    store: Vec<(String, OwnedFd)>,
    ready: usize,
    controller: Option<Child>,
}

impl Supervisor {
    fn new() -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let heard = UnixDatagram::bind(dir.path().join("notify"))?;
        heard.set_nonblocking(true)?;
        fs::write(dir.path().join("config.toml"), "[jobs]\nenabled = true\n")?;
        let artifacts = Artifacts::find()?;
        Ok(Self { artifacts, dir, heard, store: Vec::new(), ready: 0, controller: None })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn start(&mut self) -> Result<()> {
        let mut command = Command::new("bash");
        command.args(["-c", HAND_OVER, "bash"]);
        for (_, kept) in &self.store {
            // The descriptor is meant for the child. A child of another test may inherit it as
            // well, but does not use it.
            rustix::io::fcntl_setfd(kept, FdFlags::empty())?;
            command.arg(kept.as_raw_fd().to_string());
        }
        command.arg("--").arg(self.artifacts.bin("containerd-shim-affinode-v1")?).arg("controller");
        let names: Vec<&str> = self.store.iter().map(|(name, _)| name.as_str()).collect();
        command.env("LISTEN_FDNAMES", names.join(":"));
        command.env("NOTIFY_SOCKET", self.path("notify"));
        command.env("AFFINODE_RUN_DIR", self.path("run"));
        command.env("AFFINODE_CONFIG", self.path("config.toml"));
        command.stdin(Stdio::null()).stderr(fs::File::create(self.path("controller.log"))?);
        self.controller = Some(command.spawn()?);
        let before = self.ready;
        until("the controller to be ready", || {
            self.hear()?;
            Ok((self.ready > before).then_some(()))
        })
    }

    /// Reads the controller's messages that have arrived since the last call.
    fn hear(&mut self) -> Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        loop {
            let (mut text, mut control) = ([0; 4096], RecvAncillaryBuffer::new(&mut space));
            let flags = RecvFlags::CMSG_CLOEXEC;
            let mut into = [IoSliceMut::new(&mut text)];
            let Ok(got) = rustix::net::recvmsg(&self.heard, &mut into, &mut control, flags) else {
                return Ok(());
            };
            let mut fds = control.drain().filter_map(|message| match message {
                RecvAncillaryMessage::ScmRights(fds) => Some(fds),
                _ => None,
            });
            let mut fds = fds.next().into_iter().flatten();
            let text = String::from_utf8_lossy(&text[..got.bytes]).into_owned();
            let name = text.lines().find_map(|line| line.strip_prefix("FDNAME=")).unwrap_or("");
            self.ready += usize::from(text.lines().any(|line| line == "READY=1"));
            if text.contains("FDSTOREREMOVE=1") {
                self.store.retain(|(kept, _)| kept != name);
            } else if text.contains("FDSTORE=1") {
                let fd = fds.next().context("the message has no descriptor")?;
                // The duplicate gets a high number, so that it does not collide with the numbers
                // under which descriptors are passed on.
                let fd = rustix::io::fcntl_dupfd_cloexec(fd, 100)?;
                self.store.push((name.to_owned(), fd));
            }
        }
    }

    fn kill(&mut self) -> Result<()> {
        let mut controller = self.controller.take().context("the supervisor has no controller")?;
        controller.kill()?;
        controller.wait()?;
        self.hear()
    }

    fn cli(&self) -> Result<Cli> {
        Ok(Cli::new(self.artifacts.bin("affinode")?, self.path("run")))
    }

    /// Starts `affinode run` with a program that waits until its input is closed.
    fn job(&self, name: &str) -> Result<Child> {
        let mut command = self.cli()?.command(&["run", "--name", name, "--", "cat"]);
        command.env("AFFINODE_LIB_DIR", self.artifacts.lib_dir());
        Ok(command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn()?)
    }

    fn wait_for_job(&self, name: &str) -> Result<PathBuf> {
        let row = until(&format!("job {name}"), || {
            let rows = self.cli()?.ps()?.containers;
            Ok(rows.into_iter().find(|row| row.container == name))
        })?;
        Ok(self.path("run/containers").join(row.key).join("mount/agent.sock"))
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        if let Some(mut controller) = self.controller.take() {
            let _ = controller.kill();
            let _ = controller.wait();
        }
    }
}

fn end(mut job: Child) -> Result<()> {
    drop(job.stdin.take());
    ensure!(job.wait()?.success(), "the job failed");
    Ok(())
}

fn connect(socket: &Path) -> Result<UnixStream> {
    UnixStream::connect(socket).with_context(|| socket.display().to_string())
}

#[test]
fn job_waits_for_the_next_controller() -> Result<()> {
    let mut systemd = Supervisor::new()?;
    systemd.start()?;
    let job = systemd.job("early")?;
    let agent = systemd.wait_for_job("early")?;
    systemd.kill()?;
    let mut names: Vec<&str> =
        systemd.store.iter().filter_map(|(name, _)| name.split(['/', '@']).next()).collect();
    names.sort_unstable();
    assert_eq!(names, ["containers", "control.sock", "jobs.sock"]);

    // No connection is refused. Connections that are made while no controller runs must be served
    // by the next controller.
    let _agent = connect(&agent)?;
    let _shim = connect(&systemd.path("run/control.sock"))?;
    let late = systemd.job("late")?;
    until("it to be connected", || {
        let fds = fs::read_dir(format!("/proc/{}/fd", late.id()))?;
        let links = fds.flatten().filter_map(|fd| fs::read_link(fd.path()).ok());
        Ok(links
            .into_iter()
            .any(|link| link.to_string_lossy().starts_with("socket:"))
            .then_some(()))
    })?;
    systemd.start()?;
    systemd.wait_for_job("early")?;
    systemd.wait_for_job("late")?;

    end(job)?;
    end(late)?;
    until("the jobs' sockets to leave the store", || {
        systemd.hear()?;
        Ok((systemd.store.len() == 2).then_some(()))
    })
}

#[test]
fn unit_waits_for_serving_controller_to_end() -> Result<()> {
    let (mut systemd, mut shim) = (Supervisor::new()?, Supervisor::new()?);
    // A controller that a shim starts has no supervisor to notify. It must end immediately if
    // another controller runs.
    let unsupervised = |of: &Supervisor| -> Result<Command> {
        let mut command = Command::new(of.artifacts.bin("containerd-shim-affinode-v1")?);
        command.arg("controller").env("AFFINODE_RUN_DIR", systemd.path("run"));
        command.env("AFFINODE_CONFIG", systemd.path("config.toml")).stderr(Stdio::null());
        Ok(command)
    };
    shim.controller = Some(unsupervised(&shim)?.spawn()?);
    let cli = systemd.cli()?;
    let first = cli.ps()?.controller_pid;
    let second = unsupervised(&shim)?.status()?;
    assert!(second.success(), "the second controller did not end with success");
    systemd.start()?;
    assert_eq!(cli.ps()?.controller_pid, first);
    shim.kill()?;
    let next = until("the next controller", || Ok(cli.ps_now().ok()))?;
    assert_eq!(Some(next.controller_pid), systemd.controller.as_ref().map(|c| c.id() as i32));
    Ok(())
}
