//! Causes and undoes each fault of a crash campaign.

use std::{path::PathBuf, time::Duration};

use anyhow::{Context, Result};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use rustix::{
    net::{Shutdown, shutdown},
    process::{PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open},
};

use super::{
    container::ChaosContainer,
    plan::{Fault, Strike},
};
use crate::{containerd, processes, supervisor::cgroup_folders, testbed::Testbed, wait::until};

/// A step that undoes a lasting fault, such as a stopped process. All these steps run before the
/// checks of a round.
pub enum Undo {
    /// Continues a stopped process with SIGCONT.
    Continue(Pid),
    /// Thaws the cgroup with this folder.
    Thaw(PathBuf),
    /// Continues the paused container with this id, by `ctr tasks resume`.
    Resume(String),
    /// Starts containerd again after the fault has ended it.
    StartContainerd,
}

/// Process name of a copier.
pub(super) const COPIER: &str = "affinode-copier";
/// Time limit of the search for a running runc process.
const RUNC_PATIENCE: Duration = Duration::from_millis(200);

/// Whether the process that the fault targets exists. A copier (process that copies VRAM) starts
/// and ends on demand, so it may be missing. All other targets are assumed to exist.
///
/// # Errors
/// When /proc cannot be read.
pub fn has_victim(world: &Testbed, fault: Fault) -> Result<bool> {
    let of_copier =
        matches!(fault, Fault::KillCopier | Fault::StopCopier | Fault::KillCopierAndController);
    Ok(!of_copier || !world.processes(COPIER)?.is_empty())
}

/// Causes the fault. Adds a step to `undo` if the fault lasts until it is undone.
///
/// # Errors
/// When the fault cannot be caused although the process that it hits exists.
pub fn strike(
    world: &Testbed,
    strike: &Strike,
    actor: &mut ChaosContainer,
    undo: &mut Vec<Undo>,
) -> Result<()> {
    let id = actor.running.id.clone();
    let process = strike.on.process;
    let pid = actor.processes.get(process).map(|process| process.pid);
    match strike.fault {
        Fault::KillController => {
            if let Some(controller) = world.controller()? {
                send(controller.pid, Signal::SIGKILL);
            }
        }
        Fault::StopController => {
            if let Some(controller) = world.controller()? {
                send(controller.pid, Signal::SIGSTOP);
                undo.push(Undo::Continue(controller.pid));
            }
        }
        Fault::KillCopier | Fault::StopCopier | Fault::KillCopierAndController => {
            for copier in world.processes(COPIER)? {
                if strike.fault == Fault::StopCopier {
                    send(copier.pid, Signal::SIGSTOP);
                    undo.push(Undo::Continue(copier.pid));
                } else {
                    send(copier.pid, Signal::SIGKILL);
                }
            }
            if strike.fault == Fault::KillCopierAndController
                && let Some(controller) = world.controller()?
            {
                send(controller.pid, Signal::SIGKILL);
            }
        }
        Fault::KillContainerd | Fault::EndContainerd => {
            if !undo.iter().any(|undo| matches!(undo, Undo::StartContainerd)) {
                let hard = strike.fault == Fault::KillContainerd;
                world.containerd().stop(if hard { Signal::SIGKILL } else { Signal::SIGTERM })?;
                undo.push(Undo::StartContainerd);
            }
        }
        Fault::KillStockShim | Fault::KillShim => {
            let stock = strike.fault == Fault::KillStockShim;
            let part =
                if stock { "containerd-shim-runc-v2" } else { "containerd-shim-affinode-v1" };
            let of = format!(" -id {id} ");
            for shim in world.shims()? {
                if shim.command.contains(part) && shim.command.contains(&of) {
                    send(shim.pid, Signal::SIGKILL);
                    actor.doomed = true;
                }
            }
        }
        Fault::KillRunc => kill_runc(world)?,
        Fault::CutAgent => cut_agent(world, actor)?,
        Fault::KillProcess | Fault::EndProcess => {
            if let (Some(pid), Some(process)) = (pid, actor.processes.get_mut(process)) {
                process.doomed = true;
                let hard = strike.fault == Fault::KillProcess;
                send(pid, if hard { Signal::SIGKILL } else { Signal::SIGTERM });
            }
        }
        Fault::StopProcess => {
            if let Some(pid) = pid {
                send(pid, Signal::SIGSTOP);
                undo.push(Undo::Continue(pid));
            }
        }
        Fault::Freeze => {
            if let Some(folder) = freezer(world, &id) {
                set_frozen(&folder, true)?;
                undo.push(Undo::Thaw(folder));
            }
        }
        Fault::Pause => {
            // Fails if another fault has hit containerd or the container.
            let _ = world.ctr().args(["tasks", "pause", &id]).output()?;
            undo.push(Undo::Resume(id));
        }
        Fault::EndContainer => {
            actor.doomed = true;
            let first = actor.pids(world).into_iter().min();
            if let Some(pid) = first {
                send(Pid::from_raw(pid), Signal::SIGTERM);
            }
        }
        Fault::DeleteContainer => {
            actor.doomed = true;
            let _ = world.ctr().args(["tasks", "delete", "--force", &id]).output()?;
        }
    }
    Ok(())
}

/// Undoes the lasting faults in reverse order.
///
/// # Errors
/// When containerd does not start again.
pub fn undo(world: &Testbed, what: Vec<Undo>) -> Result<()> {
    for undo in what.into_iter().rev() {
        match undo {
            Undo::Continue(pid) => send(pid, Signal::SIGCONT),
            Undo::Thaw(folder) => {
                // The cgroup does not exist if its container was removed.
                let _ = set_frozen(&folder, false);
            }
            Undo::Resume(id) => {
                if world.ctr().args(["version"]).output()?.status.success() {
                    let _ = world.ctr().args(["tasks", "resume", &id]).output()?;
                }
            }
            Undo::StartContainerd => world.start_containerd()?,
        }
    }
    Ok(())
}

/// Sends a signal. It is not an error if the process has ended meanwhile.
fn send(pid: Pid, signal: Signal) {
    let _ = kill(pid, signal);
}

fn kill_runc(world: &Testbed) -> Result<()> {
    let deadline = std::time::Instant::now() + RUNC_PATIENCE;
    while std::time::Instant::now() < deadline {
        let mut hit = false;
        for process in processes::named("runc", world.keeper().pid())? {
            let program = process.command.split(' ').next().unwrap_or_default();
            if program.ends_with("/runc") || program == "runc" {
                send(process.pid, Signal::SIGKILL);
                hit = true;
            }
        }
        if hit {
            return Ok(());
        }
    }
    Ok(())
}

/// Shuts down, on the controller's side, every connection to the agents of a container. An agent is
/// the library's thread in a CUDA process.
fn cut_agent(world: &Testbed, actor: &ChaosContainer) -> Result<()> {
    let Some(controller) = world.controller()? else { return Ok(()) };
    let Some(key) = world.cli().container(&actor.running.id).ok().flatten().map(|row| row.key)
    else {
        return Ok(());
    };
    let inodes = connected(controller.pid, &format!("/{key}/"))?;
    let Some(pid) = rustix::process::Pid::from_raw(controller.pid.as_raw()) else {
        return Ok(());
    };
    let Ok(pidfd) = pidfd_open(pid, PidfdFlags::empty()) else { return Ok(()) };
    let folder = format!("/proc/{}/fd", controller.pid);
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let target = std::fs::read_link(entry.path()).unwrap_or_default();
        let target = target.to_string_lossy().into_owned();
        let ours = inodes.iter().any(|inode| target == format!("socket:[{inode}]"));
        let number = entry.file_name().to_string_lossy().parse::<i32>();
        if let (true, Ok(number)) = (ours, number)
            && let Ok(socket) = pidfd_getfd(&pidfd, number, PidfdGetfdFlags::empty())
        {
            let _ = shutdown(socket, Shutdown::Both);
        }
    }
    Ok(())
}

/// Returns the inodes of connected Unix sockets whose path contains `part`. It searches the network
/// namespace of the process `pid`.
fn connected(pid: Pid, part: &str) -> Result<Vec<String>> {
    /// Value of the kernel's `SS_CONNECTED`, as /proc/net/unix prints it.
    const CONNECTED: &str = "03";
    let table = std::fs::read_to_string(format!("/proc/{pid}/net/unix")).unwrap_or_default();
    // Num RefCount Protocol Flags Type St Inode Path
    let rows = table.lines().filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let path = fields.get(7)?;
        (path.contains(part) && fields.get(5) == Some(&CONNECTED))
            .then(|| fields.get(6).map(|inode| (*inode).to_owned()))?
    });
    Ok(rows.collect())
}

/// Path of the cgroup folder through which a container can be frozen.
#[must_use]
pub fn freezer(world: &Testbed, id: &str) -> Option<PathBuf> {
    let folders = cgroup_folders(world.dir());
    folders.iter().map(|folder| folder.join(id)).find(|folder| {
        folder.join("freezer.state").exists() || folder.join("cgroup.freeze").exists()
    })
}

/// Freezes or thaws the cgroup of this folder.
///
/// # Errors
/// When the kernel refuses the change.
pub fn set_frozen(folder: &std::path::Path, frozen: bool) -> Result<()> {
    let v1 = folder.join("freezer.state");
    let (file, word) = if v1.exists() {
        (v1, if frozen { "FROZEN" } else { "THAWED" })
    } else {
        (folder.join("cgroup.freeze"), if frozen { "1" } else { "0" })
    };
    std::fs::write(&file, word).with_context(|| format!("cannot write {}", file.display()))
}

/// Removes a container in any state. Waits until none of its processes exists.
///
/// # Errors
/// When one of its processes does not end.
pub fn remove(world: &Testbed, actor: &mut ChaosContainer) -> Result<()> {
    let id = &actor.running.id;
    if let Some((_, mut child)) = actor.guest.take() {
        let _ = child.kill();
        let _ = child.wait();
    }
    let listed = |world: &Testbed| -> Result<bool> {
        let listed = containerd::run(world.ctr().args(["containers", "list", "--quiet"]))?;
        Ok(listed.lines().any(|line| line == id))
    };
    until(&format!("{id} to be removed"), || {
        let _ = world.ctr().args(["tasks", "delete", "--force", id]).output()?;
        let _ = world.ctr().args(["containers", "delete", id]).output()?;
        Ok((!listed(world)?).then_some(()))
    })?;
    until(&format!("the processes of {id} to end"), || {
        Ok(actor.pids(world).is_empty().then_some(()))
    })
}
