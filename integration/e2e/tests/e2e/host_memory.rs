//! More VRAM wants to leave at once than host memory holds.

use affinode_e2e::{
    cli::ActionRow,
    container::Spec,
    memory_cgroup,
    testbed::{MIB, Testbed, TestbedConfig},
    wait::until,
    worker::{USUAL, Worker},
};
use anyhow::{Result, anyhow};

const CONFIG: &str = r#"
[policy]
mode = "manual"
[timing]
sample_interval = "50ms"
[memory]
driver_overhead_mib = 64
"#;
const VRAM_MIB: u64 = 512;
/// For one of them and what the driver takes beside it, not for two.
const ROOM_MIB: u64 = 900;

/// Two containers of one pod, and a limit on the pod that has room for one to leave.
struct CrowdedPod {
    world: Testbed,
    workers: [Worker; 2],
}

const NAMES: [&str; 2] = ["alpha", "beta"];

impl CrowdedPod {
    fn new(engine: &str) -> Result<CrowdedPod> {
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
        Ok(CrowdedPod { world, workers })
    }

    fn spec(id: &str, engine: &str) -> Spec {
        Worker::spec(id, USUAL, VRAM_MIB).annotation("affinode.io/engine", engine)
    }

    /// Asks for both offloads at the same moment.
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
    let mut pod = CrowdedPod::new(engine)?;
    let said = pod.offload_both()?;
    assert_eq!(said.iter().filter(|said| said.done).count(), 1, "{engine}: {said:?}");
    let (out, stays) = if said[0].done { (0, 1) } else { (1, 0) };
    assert_eq!(said[stays].reason, "cgroup-memory", "{engine}: {said:?}");
    // Both live, and have what they had.
    assert!(pod.workers[stays].verify()?, "{engine}");
    assert!(pod.workers[out].verify()?, "{engine}");
    // What the first one took is free with its end: the promise has ended, too.
    pod.workers[out].running.kill(&pod.world)?;
    until("the other to leave", || {
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
