//! Tests of jobs, which are programs that `affinode run` starts without a container. The controller
//! manages them as it manages containers.

use std::{
    fs::{self, File, OpenOptions},
    os::unix::process::{CommandExt, ExitStatusExt},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
};

use affinode_e2e::{
    cli::ContainerRow,
    container::make_pipes,
    supervisor::Job,
    testbed::{MIB, Testbed, TestbedConfig},
    wait::until,
    worker::{Answer, Lines, USUAL},
};
use anyhow::{Context, Result};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::offload::{EAGER, wait_gpu_empty};

/// User id of a user without any rights.
const UNPRIVILEGED: u32 = 65_534;

/// A node without containers, on which only a controller runs. The test starts the controller as
/// systemd does.
struct Node {
    world: Testbed,
    /// Folder with the programs that the node's users run. All users can read the folder.
    shared: PathBuf,
}

impl Node {
    fn new(jobs: &str) -> Result<Node> {
        let world = TestbedConfig::default().config(&format!("{EAGER}\n[jobs]\n{jobs}")).world()?;
        let shared = world.dir().join("shared");
        fs::create_dir(&shared)?;
        let artifacts = world.artifacts();
        for file in [
            artifacts.bin("affinode")?,
            artifacts.clients_dir().join(USUAL),
            artifacts.sim_dir().join("libcuda.so.1"),
            artifacts.sim_dir().join("libnvidia-ml.so.1"),
            artifacts.lib_dir().join("libaffinode_preload.so"),
        ] {
            fs::copy(&file, shared.join(file.file_name().context("the path has no file name")?))?;
        }
        let node = Node { world, shared };
        node.start_controller()?;
        Ok(node)
    }

    fn start_controller(&self) -> Result<i32> {
        let world = &self.world;
        let mut env = world.gpu().host_env(world.artifacts(), world.dir());
        let config = world.dir().join("affinode/config.toml");
        env.insert("AFFINODE_RUN_DIR".into(), world.cli().run_dir().display().to_string());
        env.insert("AFFINODE_CONFIG".into(), config.display().to_string());
        let shim = world.artifacts().bin("containerd-shim-affinode-v1")?;
        let argv = vec![shim.display().to_string(), "controller".into()];
        let pid =
            world.keeper().spawn(&Job { argv, env, log: world.dir().join("controller.log") })?;
        until("the controller to reply", || Ok(world.cli().ps_now().ok()))?;
        Ok(i32::try_from(pid)?)
    }

    fn shoot_controller(&self) -> Result<()> {
        let pid = Pid::from_raw(self.world.cli().ps()?.controller_pid);
        kill(pid, Signal::SIGKILL)?;
        until("its end", || Ok((!Path::new(&format!("/proc/{pid}")).exists()).then_some(())))?;
        self.start_controller().map(drop)
    }

    /// Builds the command `affinode run` with these arguments, as a user of the node runs it.
    fn run(&self, words: &[&str]) -> Command {
        let mut command = self.world.host_gpu_command(&self.shared.join("affinode"));
        command.env("LD_LIBRARY_PATH", &self.shared).env("AFFINODE_LIB_DIR", &self.shared);
        command.arg("--run-dir").arg(self.world.cli().run_dir()).arg("run").args(words);
        command
    }

    fn worker(&self, uid: u32, name: &str, words: &[&str]) -> Result<Worker> {
        self.worker_with(uid, name, words, &[])
    }

    fn worker_with(
        &self,
        uid: u32,
        name: &str,
        words: &[&str],
        env: &[(&str, &str)],
    ) -> Result<Worker> {
        let folder = make_pipes(self.world.dir(), name)?;
        let lines = Lines::open(&folder)?;
        let pipe = |name: &str| OpenOptions::new().read(true).write(true).open(folder.join(name));
        let program = self.shared.join(USUAL);
        let mut command = self.run(&["--name", name]);
        command.envs(env.iter().copied());
        command.args(words).arg(program).args(["--mib", "64", "--seed", "7"]);
        command.stdin(pipe("in")?).stdout(pipe("out")?).uid(uid).gid(uid);
        command.stderr(File::create(folder.join("err.log"))?);
        let mut worker = Worker { child: command.spawn()?, lines };
        worker.expect("open")?;
        worker.expect("fill")?;
        Ok(worker)
    }

    fn job(&self, name: &str) -> Result<Option<ContainerRow>> {
        let rows = self.world.cli().ps()?.containers;
        Ok(rows.into_iter().find(|row| row.container == name))
    }

    fn wait_offloaded(&self, name: &str) -> Result<ContainerRow> {
        until(&format!("{name} to be offloaded"), || {
            Ok(self.job(name)?.filter(|row| row.state == "Offloaded"))
        })
    }

    fn wait_nothing_left(&self, name: &str) -> Result<()> {
        until("the job to be removed from the list", || {
            Ok(self.job(name)?.is_none().then_some(()))
        })?;
        let folders = self.world.cli().run_dir().join("containers");
        until("its folder to be removed", || {
            Ok(fs::read_dir(&folders)?.next().is_none().then_some(()))
        })?;
        wait_gpu_empty(&self.world)
    }
}

/// A CUDA program that was started by `affinode run`.
struct Worker {
    child: Child,
    lines: Lines,
}

impl Worker {
    fn expect(&mut self, command: &str) -> Result<Answer> {
        let line = self.lines.receive()?;
        let answer: Answer = serde_json::from_str(&line).with_context(|| line.clone())?;
        assert!(answer.command == command && answer.result == 0, "{line}");
        Ok(answer)
    }

    fn verify(&mut self) -> Result<bool> {
        self.lines.send("verify")?;
        self.expect("verify")?.ok.context("the reply to `verify` has no field `ok`")
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn idle_job_is_offloaded_and_restored() -> Result<()> {
    let node = Node::new("enabled = true")?;
    let mut worker = node.worker(0, "train", &["--annotation", "idle-timeout=150ms", "--"])?;
    let row = node.wait_offloaded("train")?;
    assert_eq!((row.name.as_str(), row.idle_timeout_ms), ("jobs/train", 150));
    wait_gpu_empty(&node.world)?;
    assert!(worker.verify()?);
    until("the restore to be counted", || Ok(node.job("train")?.filter(|row| row.restores == 1)))?;

    // After any end of a job, nothing of the job must be left. This must hold even if the job ends
    // while it is offloaded and its processes cannot report the end.
    node.wait_offloaded("train")?;
    drop(worker);
    node.wait_nothing_left("train")
}

/// Starts a job while no controller runs. The job must use the configured engine from its first
/// allocation. It reads the engine's name from a file next to the socket, which an earlier
/// controller has written.
#[test]
fn job_engine_applies_from_first_allocation() -> Result<()> {
    let node = Node::new("enabled = true")?;
    let controller = node.world.cli().ps()?.controller_pid;
    let script = format!("kill -9 {controller}; exec \"$0\" \"$@\"");
    let words = ["--annotation", "engine=full", "--", "/bin/sh", "-c", &script];
    let mut worker = node.worker(0, "early", &words)?;
    node.start_controller()?;
    // The copier may be in the same cgroup as the job. It does not count as an unmanaged process of
    // the job.
    let offloaded = node.wait_offloaded("early")?;
    assert_eq!(offloaded.process()?.swappable_bytes, 64 * MIB, "{offloaded:?}");
    assert!(worker.verify()?);
    Ok(())
}

/// Runs two jobs in one cgroup, and offloads them. For each job, the processes of the other job
/// must not count as unregistered processes.
#[test]
fn jobs_of_one_session_leave_beside_each_other() -> Result<()> {
    let node = Node::new("enabled = true")?;
    let mut workers = [node.worker(0, "one", &["--"])?, node.worker(0, "two", &["--"])?];
    for (worker, name) in workers.iter_mut().zip(["one", "two"]) {
        node.wait_offloaded(name)?;
        assert!(worker.verify()?);
        node.wait_offloaded(name)?;
    }
    Ok(())
}

/// Runs a job that preloads another library that hooks the driver. That library must work, and its
/// calls must wait while the job is offloaded.
#[test]
fn a_library_that_a_job_preloads_is_held_with_it() -> Result<()> {
    let node = Node::new("enabled = true")?;
    let limiter = node.shared.join("limiter.so");
    fs::copy(node.world.artifacts().clients_dir().join("limiter.so"), &limiter)?;
    let limiter = limiter.display().to_string();
    let env = [("LD_PRELOAD", limiter.as_str()), ("LIMIT_MIB", "80")];
    let mut worker = node.worker_with(0, "limited", &["--"], &env)?;
    node.wait_offloaded("limited")?;
    worker.lines.send("alloc 8")?;
    let line = worker.lines.receive()?;
    assert!(
        line.contains("\"result\":0"),
        "the allocation did not succeed after the restore: {line}"
    );
    worker.lines.send("alloc 32")?;
    let line = worker.lines.receive()?;
    assert!(
        line.contains("\"result\":2"),
        "the allocation beyond the other library's limit was not refused: {line}"
    );
    assert!(worker.verify()?);
    until("the restore to be counted", || Ok(node.job("limited")?.filter(|row| row.restores > 0)))?;
    Ok(())
}

#[test]
fn job_survives_controller_and_parent_death() -> Result<()> {
    let node = Node::new("enabled = true")?;
    // The job's first process is a shell that waits for the program, so it is not the GPU process.
    let shell = ["--", "sh", "-c", "exec 3<&0; \"$@\" <&3 & wait", "sh"];
    let mut worker = node.worker(0, "train", &shell)?;
    let before = node.wait_offloaded("train")?;
    node.shoot_controller()?;
    let after = node.wait_offloaded("train")?;
    assert_eq!((&before.key, &before.name), (&after.key, &after.name));
    assert!(worker.verify()?);

    worker.child.kill()?;
    worker.child.wait()?;
    node.wait_offloaded("train")?;
    node.shoot_controller()?;
    node.wait_offloaded("train")?;
    assert!(worker.verify()?);
    // The program ends when its input ends.
    let pid = until("its process to be registered", || {
        Ok(node.job("train")?.and_then(|row| Some(row.processes.first()?.pid)))
    })?;
    kill(Pid::from_raw(pid), Signal::SIGKILL)?;
    node.wait_nothing_left("train")
}

#[test]
fn job_rights_are_checked_per_user() -> Result<()> {
    let node = Node::new("enabled = true")?;
    let refused = node.run(&["--", "true"]).uid(UNPRIVILEGED).gid(UNPRIVILEGED).output()?;
    assert_eq!(refused.status.code(), Some(1));
    assert!(said(&refused).contains("jobs.users"), "{}", said(&refused));
    let unmanaged = node
        .run(&["--or-unmanaged", "--", "sh", "-c", "exit 7"])
        .uid(UNPRIVILEGED)
        .gid(UNPRIVILEGED)
        .output()?;
    assert_eq!(unmanaged.status.code(), Some(7));
    assert!(said(&unmanaged).contains("running without Affinode"), "{}", said(&unmanaged));

    let config = node.world.dir().join("affinode/config.toml");
    fs::write(&config, format!("{EAGER}\n[jobs]\nenabled = true\nusers = [\"*\"]"))?;
    node.world.cli().run(&["reload"])?;
    let refused = node
        .run(&["--annotation", "priority=9", "--", "true"])
        .uid(UNPRIVILEGED)
        .gid(UNPRIVILEGED)
        .output()?;
    assert!(said(&refused).contains("only root may set annotation"), "{}", said(&refused));
    let mut worker = node.worker(UNPRIVILEGED, "notebook", &["--"])?;
    let row = node.wait_offloaded("notebook")?;
    assert!(row.namespace.starts_with("user-"), "{row:?}");
    // Other users cannot reach the files of a user's job.
    let mount = node.world.cli().run_dir().join("containers").join(&row.key).join("mount");
    let stranger = Command::new("ls").arg(&mount).uid(1).gid(1).stdin(Stdio::null()).output()?;
    assert!(!stranger.status.success());
    // A process of the same group can connect, but still belongs to another user.
    let mut stranger = node.world.host_gpu_command(&node.shared.join(USUAL));
    stranger.env("LD_LIBRARY_PATH", &node.shared).env("AFFINODE_SOCKET", mount.join("agent.sock"));
    stranger.env("LD_PRELOAD", node.shared.join("libaffinode_preload.so"));
    stranger.args(["--mib", "64", "--seed", "8"]).stdin(Stdio::null()).stdout(Stdio::null());
    assert!(stranger.uid(1).gid(UNPRIVILEGED).status()?.success());
    let log = node.world.dir().join("controller.log");
    until("the connection to be rejected", || {
        Ok(fs::read_to_string(&log)?.contains("does not own this container").then_some(()))
    })?;
    assert!(worker.verify()?);
    Ok(())
}

#[test]
fn job_exit_status_is_that_of_its_program() -> Result<()> {
    let node = Node::new("enabled = true")?;
    assert_eq!(node.run(&["--", "sh", "-c", "exit 7"]).status()?.code(), Some(7));
    let killed = node.run(&["--", "sh", "-c", "kill -TERM $$"]).status()?;
    assert_eq!(killed.signal(), Some(Signal::SIGTERM as i32));
    let missing = node.run(&["--", "/nonexistent/program"]).output()?;
    assert_eq!(missing.status.code(), Some(127));

    let node = Node::new("enabled = false")?;
    let refused = node.run(&["--", "true"]).output()?;
    assert_eq!(refused.status.code(), Some(1));
    assert!(said(&refused).contains("jobs.enabled"), "{}", said(&refused));
    Ok(())
}
