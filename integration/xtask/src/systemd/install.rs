//! Steps that install and remove Affinode. The installer restarts containerd through systemd.

use affinode_e2e::snapshot::Snapshot;
use anyhow::{Context, Result, ensure};

use super::{
    controller::UNIT,
    node::Node,
    program::{MIB, Program},
    rows::Step,
};

/// The steps of installation and removal, in the order in which they run.
pub fn steps<'a>() -> [Step<Install<'a>>; 9] {
    [
        ("systemd has booted", booted),
        ("`install --restart-mode systemd`", install),
        ("GPU container through ctr: offload", offload),
        ("`systemctl restart containerd` while it is offloaded", restart_containerd),
        ("`uninstall`, the container runs", uninstall_is_refused),
        ("`uninstall`", uninstall),
        ("containerd's unit does not start with the handler", rolled_back),
        ("containerd's unit fails once", rolled_back_once),
        ("`install` again", reinstall),
    ]
}
/// Shell command that installs Affinode from the built files.
pub const INSTALL: &str = "/opt/affinode/bin/affinode install --from /opt/affinode \
                       --restart-mode systemd";
/// Path of a drop-in (an additional unit file) that prevents containerd's start.
const DROP_IN: &str = "/etc/systemd/system/containerd.service.d/fault.conf";
/// Shell command that checks whether Affinode's handler is in containerd's configuration file.
const HAS_HANDLER: &str = "grep -q affinode /etc/containerd/config.toml";

/// A node, and a snapshot of its files before the installation.
pub struct Install<'a> {
    node: &'a Node,
    before: Vec<Snapshot>,
    program: Option<Program>,
}

impl<'a> Install<'a> {
    /// Prepares the steps on a node without Affinode.
    pub fn new(node: &'a Node) -> Result<Self> {
        Ok(Self { node, before: files(node)?, program: None })
    }

    fn same_as_before(&self) -> Result<usize> {
        let now = files(self.node)?;
        self.before.iter().zip(&now).try_for_each(|(before, now)| before.same_as(now))?;
        Ok(now.iter().map(Snapshot::count).sum())
    }

    /// Returns the main process id of containerd's unit.
    fn containerd(&self) -> Result<String> {
        self.node.property("containerd", "MainPID")
    }

    fn program(&mut self) -> Result<&mut Program> {
        self.program.as_mut().context("the program has not been started")
    }
}

/// Takes snapshots of all folders that an installation may change.
fn files(node: &Node) -> Result<Vec<Snapshot>> {
    ["/etc", "/usr/local"].iter().map(|folder| Snapshot::of(&node.file(folder))).collect()
}

/// Returns the command that runs a program in a GPU container.
pub fn ctr_run(program: &Program) -> String {
    let mounts: String = [
        ("/run/affinode-sim", "ro"),
        ("/opt/affinode/clients", "ro"),
        ("/usr/lib/x86_64-linux-gnu/libcuda.so.1", "ro"),
        ("/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1", "ro"),
        ("/srv/io", "rw"),
    ]
    .iter()
    .map(|(path, how)| format!("--mount type=bind,src={path},dst={path},options=rbind:{how} "))
    .collect();
    format!(
        "ctr run --detach --null-io --runtime io.containerd.affinode.v1 \
         --env NVIDIA_VISIBLE_DEVICES=all {mounts} localhost/affinode/plain:1 {} {}",
        program.name,
        program.command()
    )
}

fn booted(install: &mut Install<'_>) -> Result<String> {
    let node = install.node;
    let comm = node.sh("cat /proc/1/comm; systemctl is-active containerd")?;
    ensure!(
        comm == "systemd\nactive",
        "expected systemd as process 1 and an active containerd, got {comm}"
    );
    let networks = node.sh("ls /sys/class/net")?;
    ensure!(networks == "lo", "expected only loopback, got {networks}");
    let versions = node.sh("systemctl --version | head -1; containerd --version")?;
    node.sh("ctr image import /srv/images.tar && rm /srv/images.tar")?;
    Ok(format!("{versions}; containerd's unit is active; network: {networks}"))
}

fn done(install: &Install<'_>) -> Result<()> {
    let before = install.containerd()?;
    install.node.sh(INSTALL)?;
    ensure!(install.containerd()? != before, "containerd was not restarted");
    let status = install.node.sh("affinode status")?;
    ensure!(
        status.contains("served by containerd"),
        "expected `served by containerd` in: {status}"
    );
    ensure!(
        status.contains("keeps a controller running"),
        "expected `keeps a controller running` in: {status}"
    );
    let active = install.node.sh("systemctl is-active containerd")?;
    ensure!(active == "active", "containerd's unit is {active}");
    Ok(())
}

fn install(install: &mut Install<'_>) -> Result<String> {
    done(install)?;
    let node = install.node.cli().ps()?;
    ensure!(node.containers.is_empty(), "expected an empty node: {node:?}");
    let pid = install.node.property(UNIT, "MainPID")?;
    ensure!(
        pid == node.controller_pid.to_string(),
        "process {} serves, but the unit's process is {pid}",
        node.controller_pid
    );
    Ok("systemd runs another containerd, and a controller on the empty node".into())
}

fn offload(install: &mut Install<'_>) -> Result<String> {
    let node = install.node;
    let mut program = Program::prepare(node, "ctr")?;
    node.sh(&ctr_run(&program))?;
    program.wait_filled()?;
    let row = node.move_out(program.name)?;
    node.wait_gpu_empty()?;
    install.program = Some(program);
    ensure!(row.offloaded_bytes >= MIB << 20, "expected {MIB} MiB offloaded: {row:?}");
    Ok(format!("{} is {}; NVML shows 0 in use", row.name, row.state))
}

fn restart_containerd(install: &mut Install<'_>) -> Result<String> {
    let (node, before) = (install.node, install.containerd()?);
    node.sh("systemctl restart containerd")?;
    ensure!(install.containerd()? != before, "containerd was not restarted");
    let name = install.program()?.name;
    let tasks = node.sh("ctr tasks ls")?;
    ensure!(tasks.contains("RUNNING"), "expected `RUNNING` in: {tasks}");
    node.wait_for(name, "Offloaded")?;
    install.program()?.verify()?;
    Ok("it runs and is offloaded; after a call every word is unchanged".into())
}

fn uninstall_is_refused(install: &mut Install<'_>) -> Result<String> {
    let output = install.node.output("affinode uninstall")?;
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    ensure!(
        output.status.code() == Some(1) && said.contains("1 shim runs"),
        "expected `1 shim runs` in: {said}"
    );
    install.program()?.verify()?;
    Ok(said)
}

fn uninstall(install: &mut Install<'_>) -> Result<String> {
    let name = install.program.take().context("the program has not been started")?.name;
    let node = install.node;
    node.sh(&format!("ctr tasks delete --force {name}; ctr containers delete {name}"))?;
    let before = install.containerd()?;
    node.sh("affinode uninstall --drain 1m")?;
    ensure!(install.containerd()? != before, "containerd was not restarted");
    let unit = node.property(UNIT, "LoadState")?;
    ensure!(unit == "not-found", "the controller's unit is {unit}");
    Ok(format!("{} files and folders unchanged, byte for byte", install.same_as_before()?))
}

/// Installs Affinode while a drop-in runs the shell command `check` before each start of
/// containerd. If `check` fails, containerd does not start, and the installation must fail.
/// Afterwards containerd must run, and all files must be unchanged.
fn refused(install: &Install<'_>, check: &str) -> Result<String> {
    let node = install.node;
    let file = node.file(DROP_IN);
    std::fs::create_dir_all(file.parent().context("the path has no folder")?)?;
    std::fs::write(&file, format!("[Service]\nExecStartPre=/bin/sh -c '{check}'\n"))?;
    node.sh("systemctl daemon-reload")?;
    let output = node.output(INSTALL)?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.code() == Some(1), "the installation succeeded: {said}");
    std::fs::remove_dir_all(file.parent().context("the path has no folder")?)?;
    node.sh("systemctl daemon-reload")?;
    let active = node.output("systemctl is-active containerd")?;
    ensure!(active.status.success(), "containerd does not run");
    node.sh("ctr version")?;
    let count = install.same_as_before()?;
    let said = said.lines().next().unwrap_or_default().trim_start_matches("affinode: ");
    let said = said.split(':').next().unwrap_or_default();
    Ok(format!("{said}; containerd is active, {count} files and folders unchanged"))
}

fn rolled_back(install: &mut Install<'_>) -> Result<String> {
    refused(install, &format!("! {HAS_HANDLER}"))
}

fn rolled_back_once(install: &mut Install<'_>) -> Result<String> {
    refused(install, "test -e /run/failed-once || ! : >/run/failed-once")
}

fn reinstall(install: &mut Install<'_>) -> Result<String> {
    done(install)?;
    Ok("served by containerd".into())
}
