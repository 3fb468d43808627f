//! Tests in which host memory does not suffice for all offloads at the same time.

use std::{
    io::Write,
    path::Path,
    process::{Child, ChildStdin, Command, Stdio},
};

use affinode_e2e::{
    cli::ActionRow,
    container::Spec,
    cpu_cgroup, memory_cgroup, oom, processes,
    testbed::{MIB, Testbed, TestbedConfig},
    wait::until,
    worker::{USUAL, Worker},
};
use affinode_proto::wire::counters::header;
use anyhow::{Context, Result, anyhow};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

const CONFIG: &str = r#"
[policy]
mode = "manual"
[timing]
sample_interval = "50ms"
[memory]
driver_overhead_mib = 64
host_pool_percent = 0
"#;
const VRAM_MIB: u64 = 512;
/// Host memory in MiB that suffices for one container and the driver's own need, but not for two
/// containers.
const ROOM_MIB: u64 = 900;

/// A pod with two containers, whose memory limit permits the offload of only one.
struct OversubscribedPod {
    world: Testbed,
    workers: [Worker; 2],
}

const NAMES: [&str; 2] = ["alpha", "beta"];

impl OversubscribedPod {
    fn new(engine: &str) -> Result<OversubscribedPod> {
        let world = TestbedConfig::default().config(CONFIG).world()?;
        let folder = memory_cgroup::folder(&world)?;
        let start = |id: &str| -> Result<Worker> {
            let mut worker = Worker::start_as(&world, Self::spec(id, engine))?;
            worker.wait_filled()?;
            world.cli().wait_for(id, "to have registered", |row| !row.processes.is_empty())?;
            Ok(worker)
        };
        let workers = [start(NAMES[0])?, start(NAMES[1])?];
        let limit_bytes = memory_cgroup::used_bytes(&folder)? + ROOM_MIB * MIB;
        memory_cgroup::set_limit(&folder, Some(limit_bytes))?;
        Ok(OversubscribedPod { world, workers })
    }

    fn spec(id: &str, engine: &str) -> Spec {
        Worker::spec(id, USUAL, VRAM_MIB).annotation("affinode.io/engine", engine)
    }

    /// Requests the offloads of both containers at the same time.
    fn offload_both(&self) -> Result<[ActionRow; 2]> {
        let cli = self.world.cli();
        std::thread::scope(|scope| {
            let [alpha, beta] = NAMES.map(|name| scope.spawn(move || cli.offload(name)));
            let joined = |thread: std::thread::ScopedJoinHandle<'_, Result<ActionRow>>| {
                thread.join().map_err(|_| anyhow!("the thread that asks has panicked"))?
            };
            Ok([joined(alpha)?, joined(beta)?])
        })
    }
}

fn one_leaves_and_one_stays(engine: &str) -> Result<()> {
    let mut pod = OversubscribedPod::new(engine)?;
    let said = pod.offload_both()?;
    assert_eq!(said.iter().filter(|said| said.done).count(), 1, "{engine}: {said:?}");
    let (out, stays) = if said[0].done { (0, 1) } else { (1, 0) };
    assert_eq!(said[stays].reason, "cgroup-memory", "{engine}: {said:?}");
    // Both processes must continue, with unchanged contents.
    assert!(pod.workers[stays].verify()?, "{engine}");
    assert!(pod.workers[out].verify()?, "{engine}");
    // The end of the offloaded container frees its host memory, and the controller's reservation
    // for it.
    pod.workers[out].running.kill(&pod.world)?;
    until("the other container to be offloaded", || {
        let said = pod.world.cli().offload(NAMES[stays])?;
        Ok(said.done.then_some(()))
    })?;
    assert!(pod.workers[stays].verify()?, "{engine}");
    Ok(())
}

#[test]
fn pod_limit_lets_one_leave_by_checkpoint() -> Result<()> {
    one_leaves_and_one_stays("checkpoint")
}

#[test]
fn pod_limit_lets_one_leave_by_copy() -> Result<()> {
    one_leaves_and_one_stays("copy")
}

#[test]
fn pod_limit_lets_one_leave_by_both() -> Result<()> {
    one_leaves_and_one_stays("full")
}

/// A second program in the container's pod. It allocates host memory on request, and does not free
/// it.
struct PodNeighbour {
    child: Child,
    start: Option<ChildStdin>,
}

impl PodNeighbour {
    fn start(pod: &Path) -> Result<PodNeighbour> {
        let folder = pod.join("neighbour");
        std::fs::create_dir_all(&folder)?;
        // The input has no line end, so `tail` stores the whole input while it searches for the
        // last line.
        let script = format!(
            "echo $$ > {}/cgroup.procs && echo ready && read mib && \
             (head -c ${{mib}}M /dev/zero; exec sleep 1000) | tail",
            folder.display()
        );
        let mut child = Command::new("sh")
            .args(["-c", &script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let start = child.stdin.take();
        let mut ready = [0; 6];
        std::io::Read::read_exact(
            &mut child.stdout.take().context("the process has no output pipe")?,
            &mut ready,
        )?;
        Ok(PodNeighbour { child, start })
    }

    fn take_memory(&mut self, mib: u64) -> Result<()> {
        let mut start =
            self.start.take().context("the neighbour was already ordered to allocate")?;
        Ok(writeln!(start, "{mib}")?)
    }
}

impl Drop for PodNeighbour {
    fn drop(&mut self) {
        drop(self.start.take());
        let _ = Command::new("pkill").args(["-P", &self.child.id().to_string()]).status();
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A process that was stopped with SIGSTOP. Dropping this value continues the process.
struct StoppedProcess(Pid);

impl StoppedProcess {
    fn stop(pid: i32) -> Result<StoppedProcess> {
        let pid = Pid::from_raw(pid);
        kill(pid, Signal::SIGSTOP)?;
        Ok(StoppedProcess(pid))
    }

    /// Whether the controller has ordered the process to cancel its copy out.
    fn is_turned_back(&self) -> Result<bool> {
        let counters = processes::counters(self.0.as_raw())?;
        let word = |at: usize| counters.get(at..at + 8).context("the counters are too short");
        let generation = word(header::GENERATION)?;
        Ok(word(header::TURN_BACK)? == generation)
    }
}

impl Drop for StoppedProcess {
    fn drop(&mut self) {
        let _ = kill(self.0, Signal::SIGCONT);
    }
}

/// Number of processes of a pod that the kernel has killed. With cgroup version 1, each container's
/// cgroup has its own count, so the counts are added.
fn kills_in(pod: &Path) -> Result<u64> {
    let below = std::fs::read_dir(pod)?.flatten().map(|entry| entry.path());
    Ok(below.chain([pod.to_owned()]).filter_map(|folder| oom::kills(&folder)).sum())
}

/// Checks that the controller cancels a copy out if another program of the pod allocates the host
/// memory that was promised to the copy. The library cannot see the pod's limit. Without the
/// controller, the kernel would kill the container.
#[test]
fn neighbour_in_the_pod_turns_a_copy_back() -> Result<()> {
    const NAME: &str = "slow";
    /// Host memory in MiB that remains free after the other program's allocation. The copy still
    /// needs far more.
    const LEFT_MIB: u64 = 96;
    let world = TestbedConfig::default().config(CONFIG).world()?;
    let folder = memory_cgroup::folder(&world)?;
    let mut worker = Worker::start_as(&world, OversubscribedPod::spec(NAME, "copy"))?;
    worker.wait_filled()?;
    world.cli().wait_for(NAME, "to have registered", |row| !row.processes.is_empty())?;
    let mut neighbour = PodNeighbour::start(&folder)?;
    let used_bytes = || memory_cgroup::used_bytes(&folder);
    let before_bytes = used_bytes()?;
    let limit_bytes = before_bytes + ROOM_MIB * MIB;
    memory_cgroup::set_limit(&folder, Some(limit_bytes))?;
    // The CPU limit makes the copy take seconds instead of a fraction of a second. The neighbour
    // can then act during the copy.
    let pid = worker.running.pid(&world)?;
    cpu_cgroup::set_percent(pid, Some(5))?;
    let cli = world.cli();
    let said = std::thread::scope(|scope| {
        let asks = scope.spawn(|| cli.offload(NAME));
        let is_copying = || Ok((used_bytes()? > before_bytes + 48 * MIB).then_some(()));
        until("the copy to be in progress", is_copying)?;
        // A stopped copy touches nothing, however slow the machine is.
        let stopped = StoppedProcess::stop(pid)?;
        neighbour.take_memory((limit_bytes - used_bytes()?) / MIB - LEFT_MIB)?;
        until("the copy to be cancelled", || Ok(stopped.is_turned_back()?.then_some(())))?;
        drop(stopped);
        asks.join().map_err(|_| anyhow!("the thread that asks has panicked"))?
    });
    assert_eq!(kills_in(&folder)?, 0, "{said:?}");
    let said = said?;
    assert_eq!((said.done, said.reason.as_str()), (false, "cgroup-memory"), "{said:?}");
    cpu_cgroup::set_percent(pid, None)?;
    assert!(worker.verify()?);
    // The container must still be resident. After the neighbour has ended, it can be offloaded.
    drop(neighbour);
    until("the offload", || Ok(cli.offload(NAME)?.done.then_some(())))?;
    assert!(worker.verify()?);
    Ok(())
}
