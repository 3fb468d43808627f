//! Steps with Slurm jobs, which a user of the node submits with config/slurm/job.sh.

use std::fs;

use affinode_e2e::{artifacts::workspace_dir, wait::until};
use anyhow::{Context, Result, ensure};

use super::{
    controller::UNIT,
    node::{Node, USER},
    program::{MIB, Program},
    rows::Step,
    units::gone,
};

/// The steps with Slurm jobs, in the order in which they run.
pub fn steps<'a>() -> [Step<Slurm<'a>>; 6] {
    [
        ("slurmctld and slurmd serve", serves),
        ("`sbatch job.sh`: managed, idle, offloaded", idle),
        ("wake", wake),
        ("`kill -9` of the controller while it is offloaded", kill),
        ("`scancel` while it is offloaded", cancel),
        ("`sbatch job.sh` without a controller", unmanaged),
    ]
}

/// A node, and a program that runs in a step of a Slurm job.
pub struct Slurm<'a> {
    node: &'a Node,
    program: Program,
    job: String,
}

impl<'a> Slurm<'a> {
    /// Prepares a node whose controller accepts jobs of the user [`USER`].
    pub fn new(node: &'a Node) -> Result<Self> {
        Ok(Self { node, program: Program::prepare(node, "step")?, job: String::new() })
    }

    /// Name by which Affinode shows the job.
    fn name(&self) -> String {
        format!("slurm-{}", self.job)
    }

    /// Submits the job script of config/slurm, with this program as the job's command.
    fn submit(&mut self) -> Result<()> {
        let mut script = fs::read_to_string(workspace_dir().join("config/slurm/job.sh"))?;
        for (theirs, ours) in [
            ("python3 serve.py", self.program.command().as_str()),
            ("idle-timeout=10m", "idle-timeout=300ms"),
            ("--mem=64G", "--mem=2G"),
        ] {
            ensure!(script.contains(theirs), "config/slurm/job.sh does not contain {theirs:?}");
            script = script.replace(theirs, ours);
        }
        let home = format!("/home/{USER}");
        fs::write(self.node.file(&home).join("job.sh"), script)?;
        let submit = format!("cd {home} && runuser -u {USER} -- sbatch --parsable job.sh");
        self.job = self.node.sh(&submit)?;
        Ok(())
    }

    /// Returns the output that the job has written so far.
    fn output(&self) -> String {
        let file = self.node.file(&format!("/home/{USER}/slurm-{}.out", self.job));
        fs::read_to_string(file).unwrap_or_default()
    }

    fn wait_filled(&mut self) -> Result<()> {
        let filled = self.program.wait_filled();
        filled.with_context(|| format!("the output of the job is: {}", self.output()))
    }

    /// Cancels the job, and waits until Slurm no longer lists it.
    fn scancel(&self) -> Result<()> {
        self.node.sh(&format!("scancel {}", self.job))?;
        until("Slurm to have no job", || {
            Ok(self.node.sh("squeue --noheader")?.is_empty().then_some(()))
        })
    }
}

fn serves(slurm: &mut Slurm<'_>) -> Result<String> {
    let node = slurm.node;
    until("the node to be idle", || {
        Ok((node.sh("sinfo --noheader --format %T")? == "idle").then_some(()))
    })?;
    let (said, gpus) = (node.sh("slurmd -V")?, node.sh("sinfo --noheader --format %G")?);
    Ok(format!("{said}; the node is idle, with {gpus}"))
}

fn idle(slurm: &mut Slurm<'_>) -> Result<String> {
    slurm.submit()?;
    slurm.wait_filled()?;
    let (node, name) = (slurm.node, slurm.name());
    let row = node.wait_for(&name, "Offloaded")?;
    node.wait_gpu_empty()?;
    ensure!(row.namespace == format!("user-{USER}"), "expected the namespace of {USER}: {row:?}");
    let pid = row.processes.first().context("the job has no process")?.pid;
    let cgroups = node.sh(&format!("cat /proc/{pid}/cgroup"))?;
    let own = cgroups
        .lines()
        .find_map(|line| line.rsplit(':').next().filter(|path| path.contains("/step_")));
    let own =
        own.with_context(|| format!("the process is not in the cgroup of a step: {cgroups}"))?;
    let used = slurm.memory_of(own)?;
    ensure!(used >= MIB << 20, "{own} uses {used} bytes");
    Ok(format!(
        "{}/{} is {}; {} MiB are in use in {own}",
        row.namespace,
        name,
        row.state,
        used >> 20
    ))
}

impl Slurm<'_> {
    /// Returns the memory use of a cgroup in bytes, with either cgroup version.
    fn memory_of(&self, cgroup: &str) -> Result<u64> {
        let files = [
            format!("/sys/fs/cgroup/memory{cgroup}/memory.usage_in_bytes"),
            format!("/sys/fs/cgroup{cgroup}/memory.current"),
        ];
        let script = format!("cat {} 2>/dev/null || cat {}", files[0], files[1]);
        Ok(self.node.sh(&script)?.parse()?)
    }
}

fn wake(slurm: &mut Slurm<'_>) -> Result<String> {
    slurm.program.verify()?;
    let row = slurm.node.row(&slurm.name())?.context("the controller does not list the job")?;
    ensure!(row.restores >= 1, "expected at least one restore: {row:?}");
    Ok("every word unchanged".into())
}

fn kill(slurm: &mut Slurm<'_>) -> Result<String> {
    let (node, name) = (slurm.node, slurm.name());
    node.wait_for(&name, "Offloaded")?;
    let old = node.cli().ps()?.controller_pid;
    node.sh(&format!("kill -9 {old}"))?;
    slurm.program.verify()?;
    ensure!(node.cli().ps()?.controller_pid != old, "process {old} was not killed");
    node.wait_for(&name, "Offloaded")?;
    Ok("every word unchanged in a call right after the kill; offloaded again by the next controller"
        .into())
}

fn cancel(slurm: &mut Slurm<'_>) -> Result<String> {
    let (node, name) = (slurm.node, slurm.name());
    node.wait_for(&name, "Offloaded")?;
    slurm.scancel()?;
    gone(node, &name)?;
    let left = node.output("grep -l dlopen_dlsym /proc/[0-9]*/comm")?;
    ensure!(
        !left.status.success(),
        "processes are left: {}",
        String::from_utf8_lossy(&left.stdout)
    );
    Ok("neither Slurm nor the controller lists the job; no VRAM, process or folder of it is left"
        .into())
}

fn unmanaged(slurm: &mut Slurm<'_>) -> Result<String> {
    let node = slurm.node;
    node.sh(&format!("systemctl stop {UNIT}"))?;
    ensure!(node.cli().ps_now().is_err(), "a controller is still running");
    slurm.program = Program::prepare(node, "alone")?;
    slurm.submit()?;
    slurm.wait_filled()?;
    slurm.program.verify()?;
    let said = slurm.output();
    ensure!(
        said.contains("running without Affinode"),
        "expected `running without Affinode` in the job's output: {said}"
    );
    slurm.scancel()?;
    node.sh(&format!("systemctl start {UNIT}"))?;
    node.wait_gpu_empty()?;
    Ok(said.lines().find(|line| line.contains("without Affinode")).unwrap_or_default().to_owned())
}
