//! Steps with jobs in transient units: `systemd-run -p MemoryMax=... affinode run -- program`.

use anyhow::{Context, Result, ensure};

use affinode_e2e::wait::until;

use super::{
    controller::systemd_run,
    node::Node,
    program::{MIB, Program},
    rows::Step,
};

/// The steps with transient units, in the order in which they run.
pub fn steps<'a>() -> [Step<Units<'a>>; 5] {
    [
        ("offload, host memory counts for the unit", offload),
        ("`uninstall` while it is offloaded", uninstall_is_refused),
        ("wake", wake),
        ("`systemctl stop` of the unit while it is offloaded", stop),
        ("a memory limit that is too low", no_room),
    ]
}

/// A node, and a program that runs in a transient unit.
pub struct Units<'a> {
    node: &'a Node,
    program: Program,
    resident_bytes: u64,
}

impl<'a> Units<'a> {
    /// Prepares a node whose controller accepts jobs.
    pub fn new(node: &'a Node) -> Result<Self> {
        Ok(Self { node, program: Program::prepare(node, "train")?, resident_bytes: 0 })
    }

    fn memory(&self) -> Result<u64> {
        Ok(self.node.property(self.program.name, "MemoryCurrent")?.parse()?)
    }
}

fn offload(units: &mut Units<'_>) -> Result<String> {
    let (node, name) = (units.node, units.program.name);
    node.sh(&systemd_run(&units.program, "2G"))?;
    units.program.wait_filled()?;
    units.resident_bytes = units.memory()?;
    let row = node.move_out(name)?;
    node.wait_gpu_empty()?;
    let limit = node.property(name, "MemoryMax")?;
    ensure!(limit == (2_u64 << 30).to_string(), "the unit's memory limit is {limit}");
    let more = units.memory()?.saturating_sub(units.resident_bytes);
    ensure!(more >= MIB << 20, "the unit's memory grew by {more} bytes only");
    Ok(format!("{} is {}; {} MiB more of the unit's 2 GiB in use", row.name, row.state, more >> 20))
}

fn uninstall_is_refused(units: &mut Units<'_>) -> Result<String> {
    let output = units.node.output("affinode uninstall")?;
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    ensure!(
        output.status.code() == Some(1)
            && said.contains("1 job of `affinode run` is still running"),
        "expected 1 job of `affinode run` in: {said}"
    );
    Ok(said)
}

fn wake(units: &mut Units<'_>) -> Result<String> {
    units.program.verify()?;
    let row =
        units.node.row(units.program.name)?.context("the controller does not list the job")?;
    ensure!(row.restores == 1, "expected one restore: {row:?}");
    Ok("every word unchanged".into())
}

fn stop(units: &mut Units<'_>) -> Result<String> {
    let (node, name) = (units.node, units.program.name);
    node.move_out(name)?;
    node.sh(&format!("systemctl stop {name}"))?;
    gone(node, name)?;
    Ok("no longer listed; no VRAM, process or folder of it is left".into())
}

/// Waits until nothing of a job is left: its row in the controller, its folder and its GPU memory.
pub fn gone(node: &Node, name: &str) -> Result<()> {
    until(&format!("{name} to be no longer listed"), || {
        Ok(node.row(name)?.is_none().then_some(()))
    })?;
    until("its folder to be removed", || {
        let left = node.sh("ls /run/affinode/containers")?;
        Ok(left.is_empty().then_some(()))
    })?;
    node.wait_gpu_empty()
}

fn no_room(units: &mut Units<'_>) -> Result<String> {
    let node = units.node;
    let mut program = Program::prepare(node, "tight")?;
    node.sh(&systemd_run(&program, "600M"))?;
    program.wait_filled()?;
    let id = until("the job to be listed", || Ok(node.row("tight")?.map(|row| row.id)))?;
    let answer = node.cli().offload(&id)?;
    ensure!(
        !answer.done && answer.reason == "cgroup-memory",
        "expected a refusal for cgroup-memory, got {answer:?}"
    );
    let output = node.output("affinode offload tight")?;
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    ensure!(said.contains("tight.service has "), "expected `tight.service has ` in: {said}");
    program.verify()?;
    node.sh("systemctl stop tight")?;
    gone(node, "tight")?;
    Ok(said)
}
