//! Steps in which the controller runs as a systemd unit. It is killed, restarted or stopped while
//! containers are offloaded.

use std::{fs, time::Instant};

use affinode_e2e::wait::until;
use anyhow::{Context, Result, ensure};

use super::{
    install::{INSTALL, ctr_run},
    node::Node,
    program::Program,
    rows::Step,
    units::gone,
};

/// The steps with the controller's unit, in the order in which they run.
pub fn steps<'a>() -> [Step<Controller<'a>>; 12] {
    [
        ("the unit that `install` wrote", written),
        ("`kill -9`, a job is offloaded", kill_with_job),
        ("the same, without the descriptor store", kill_without_store),
        ("`affinode run` while there is no controller", run_meanwhile),
        ("`kill -9`, a container is offloaded, too", kill_with_both),
        ("`systemctl restart`, both are offloaded", restart),
        ("`install` of another build, both are offloaded", upgrade),
        ("`systemctl stop`, both are offloaded", stop),
        ("`systemctl start`, while a shim's controller serves", start),
        ("the shim's controller ends", shims_ends),
        ("both end, their sockets leave the store", end),
        ("`uninstall`, then `install` again", uninstalled),
    ]
}
pub const UNIT: &str = "affinode-controller";
/// Shell command that creates another build of the same version.
const NEXT: &str = "mkdir /opt/next && cd /opt/affinode && \
                    cp bin/affinode bin/containerd-shim-affinode-v1 lib/libaffinode_preload.so /opt/next \
                    && echo another build | tee -a /opt/next/* >/dev/null";
/// Number of times that the controller is killed in one step.
const KILLS: usize = 3;
/// Number of sockets in systemd's descriptor store that belong to the controller itself.
const OWN_SOCKETS: usize = 2;

/// A node with the controller's unit, a container, and a job in its own unit.
pub struct Controller<'a> {
    node: &'a Node,
    container: Program,
    job: Program,
}

impl<'a> Controller<'a> {
    /// Prepares a container and a job on a node where Affinode is installed.
    pub fn new(node: &'a Node) -> Result<Self> {
        let prepare = |name| Program::prepare(node, name);
        Ok(Self { node, container: prepare("box")?, job: prepare("serve")? })
    }

    fn both_go_out(&self) -> Result<()> {
        for name in [self.container.name, self.job.name] {
            self.node.move_out(name)?;
        }
        self.node.wait_gpu_empty()
    }

    fn both_verify(&mut self) -> Result<()> {
        self.container.verify()?;
        self.job.verify()
    }

    /// Waits until a controller with another pid than `old` replies. Returns its pid.
    fn another_than(&self, old: i32) -> Result<i32> {
        until("another controller", || {
            let pid = self.node.cli().ps_now().map(|node| node.controller_pid).ok();
            Ok(pid.filter(|pid| *pid != old))
        })
    }
}

/// Returns the command line that runs a job in a transient unit of systemd, with a memory limit.
pub fn systemd_run(program: &Program, memory_max: &str) -> String {
    let name = program.name;
    format!(
        "systemd-run --quiet --unit {name} --property MemoryMax={memory_max} \
         affinode run --name {name} -- {}",
        program.command()
    )
}

/// Returns the pid of the controller that replies, and the main pid of the systemd unit.
fn serving(node: &Node) -> Result<(i32, i32)> {
    let unit = node.property(UNIT, "MainPID")?;
    Ok((node.cli().ps()?.controller_pid, unit.parse()?))
}

/// Checks that the unit's controller replies to the command `affinode`. Returns its pid.
fn unit_serves(node: &Node) -> Result<i32> {
    until("the unit's controller to serve", || {
        let (serving, unit) = serving(node)?;
        Ok((serving == unit).then_some(unit))
    })
}

fn written(controller: &mut Controller<'_>) -> Result<String> {
    let node = controller.node;
    let said = node.sh(&format!("systemctl is-active {UNIT}; systemctl is-enabled {UNIT}"))?;
    ensure!(said == "active\nenabled", "expected the unit to be active and enabled, got {said}");
    let (serving, unit) = serving(node)?;
    ensure!(serving == unit, "process {serving} serves, but the unit's process is {unit}");
    node.sh(&systemd_run(&controller.job, "2G"))?;
    controller.job.wait_filled()?;
    Ok("active, enabled, its process serves".into())
}

/// Repeatedly kills the controller while a program is offloaded, and then makes a CUDA call in that
/// program. Returns how long each call waited.
fn killed(node: &Node, program: &mut Program) -> Result<String> {
    let mut waited = Vec::new();
    for _ in 0..KILLS {
        node.move_out(program.name)?;
        let old = unit_serves(node)?;
        node.sh(&format!("kill -9 {old}"))?;
        let called = Instant::now();
        program.verify()?;
        waited.push(called.elapsed().as_millis().to_string());
        ensure!(unit_serves(node)? != old, "process {old} was not killed");
    }
    let waited = waited.join(", ");
    Ok(format!("every word unchanged, after {waited} ms; the unit's next controller serves"))
}

fn kill_with_job(controller: &mut Controller<'_>) -> Result<String> {
    killed(controller.node, &mut controller.job)
}

fn kill_without_store(controller: &mut Controller<'_>) -> Result<String> {
    let node = controller.node;
    let folder = format!("/etc/systemd/system/{UNIT}.service.d");
    fs::create_dir_all(node.file(&folder))?;
    let drop_in = node.file(&folder).join("no-store.conf");
    fs::write(&drop_in, "[Service]\nFileDescriptorStoreMax=0\n")?;
    let again =
        format!("systemctl stop {UNIT} && systemctl daemon-reload && systemctl start {UNIT}");
    node.sh(&again)?;
    let stored = node.property(UNIT, "NFileDescriptorStore")?;
    ensure!(stored == "0", "systemd stores {stored} descriptors, expected none");
    let seen = killed(node, &mut controller.job)?;
    let old = unit_serves(node)?;
    let output = node.output(&format!("kill -9 {old} && affinode run -- true"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    let said = said.split(':').take(2).collect::<Vec<_>>().join(":");
    unit_serves(node)?;
    fs::remove_dir_all(node.file(&folder))?;
    node.sh(&again)?;
    stored_are(node, OWN_SOCKETS + 1)?;
    Ok(format!("{seen}; a job that begins meanwhile: {:?} {said}", output.status.code()))
}

/// Waits until systemd's descriptor store has this number of sockets.
fn stored_are(node: &Node, number: usize) -> Result<()> {
    let mut stored = String::new();
    until(&format!("{number} sockets in the store"), || {
        stored = node.property(UNIT, "NFileDescriptorStore")?;
        Ok((stored == number.to_string()).then_some(()))
    })
    .with_context(|| format!("systemd stores {stored} sockets, expected {number}"))
}

fn run_meanwhile(controller: &mut Controller<'_>) -> Result<String> {
    let node = controller.node;
    let mut late = Program::prepare(node, "late")?;
    let old = unit_serves(node)?;
    let unit = format!("kill -9 {old} && {}", systemd_run(&late, "2G"));
    node.sh(&unit)?;
    late.wait_filled()?;
    node.move_out(late.name)?;
    late.verify()?;
    node.sh("systemctl stop late")?;
    Ok("the job waited for the next controller, which manages it".into())
}

fn kill_with_both(controller: &mut Controller<'_>) -> Result<String> {
    let node = controller.node;
    node.sh(&ctr_run(&controller.container))?;
    controller.container.wait_filled()?;
    node.move_out(controller.job.name)?;
    let seen = killed(node, &mut controller.container)?;
    node.wait_for(controller.job.name, "Offloaded")?;
    controller.job.verify()?;
    Ok(format!("{seen}; the job is still offloaded and unchanged"))
}

fn restart(controller: &mut Controller<'_>) -> Result<String> {
    controller.both_go_out()?;
    let node = controller.node;
    let old = unit_serves(node)?;
    node.sh(&format!("systemctl restart {UNIT}"))?;
    controller.another_than(old)?;
    ensure!(unit_serves(node)? != old, "the controller was not restarted");
    for name in [controller.container.name, controller.job.name] {
        node.wait_for(name, "Offloaded")?;
    }
    controller.both_verify()?;
    Ok("both are still offloaded and unchanged; the unit's controller serves".into())
}

fn upgrade(controller: &mut Controller<'_>) -> Result<String> {
    controller.both_go_out()?;
    let node = controller.node;
    let old = unit_serves(node)?;
    node.sh(NEXT)?;
    let said = node.sh("/opt/next/affinode install --from /opt/next")?;
    ensure!(
        said.contains(&format!("systemctl try-restart {UNIT}")) && !said.contains("end the"),
        "expected systemd alone to replace the controller: {said}"
    );
    ensure!(unit_serves(node)? != old, "the controller was not replaced");
    for name in [controller.container.name, controller.job.name] {
        node.wait_for(name, "Offloaded")?;
    }
    controller.both_verify()?;
    Ok("both are still offloaded and unchanged; the new version's controller serves".into())
}

fn stop(controller: &mut Controller<'_>) -> Result<String> {
    controller.both_go_out()?;
    let node = controller.node;
    let old = unit_serves(node)?;
    node.sh(&format!("systemctl stop {UNIT}"))?;
    let new = controller.another_than(old)?;
    let told = format!("tr '\\0' '\\n' </proc/{new}/environ");
    ensure!(
        !node.sh(&told)?.contains("NOTIFY_SOCKET="),
        "the controller inherited containerd's NOTIFY_SOCKET"
    );
    let state = node.property(UNIT, "ActiveState")?;
    ensure!(state == "inactive", "the unit is {state}");
    for name in [controller.container.name, controller.job.name] {
        node.wait_for(name, "Offloaded")?;
    }
    controller.both_verify()?;
    Ok("the shim has started its own controller; both are still offloaded there, and unchanged"
        .into())
}

fn start(controller: &mut Controller<'_>) -> Result<String> {
    let node = controller.node;
    let (old, _) = serving(node)?;
    node.sh(&format!("systemctl start {UNIT}"))?;
    controller.both_go_out()?;
    controller.both_verify()?;
    ensure!(serving(node)?.0 == old, "the serving controller was replaced");
    let (status, restarts) =
        (node.property(UNIT, "StatusText")?, node.property(UNIT, "NRestarts")?);
    ensure!(
        status.contains("waiting until it exits") && restarts == "0",
        "expected a waiting unit without restarts, got status {status:?} and {restarts} restarts"
    );
    Ok(status)
}

fn shims_ends(controller: &mut Controller<'_>) -> Result<String> {
    controller.both_go_out()?;
    let node = controller.node;
    let (old, _) = serving(node)?;
    node.sh(&format!("kill -9 {old}"))?;
    unit_serves(node)?;
    controller.both_verify()?;
    Ok("the unit's controller serves, both are unchanged".into())
}

fn end(controller: &mut Controller<'_>) -> Result<String> {
    let (node, name, job) = (controller.node, controller.container.name, controller.job.name);
    stored_are(node, OWN_SOCKETS + 2)?;
    node.sh(&format!(
        "systemctl stop {job}; ctr tasks delete --force {name}; ctr containers delete {name}"
    ))?;
    gone(node, job)?;
    stored_are(node, OWN_SOCKETS)?;
    Ok(format!("{} sockets were in the store, now {OWN_SOCKETS}", OWN_SOCKETS + 2))
}

fn uninstalled(controller: &mut Controller<'_>) -> Result<String> {
    let node = controller.node;
    node.sh("affinode uninstall")?;
    let unit = node.property(UNIT, "LoadState")?;
    ensure!(unit == "not-found", "the unit is {unit}");
    ensure!(node.cli().ps_now().is_err(), "a controller is left");
    node.sh(INSTALL)?;
    unit_serves(node)?;
    Ok("no unit and no controller is left; after install it serves".into())
}
