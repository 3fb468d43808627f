//! Tests of starting, stopping and removing containers without a GPU. Every test runs with the
//! stock runtime and with Affinode's, and the results must be equal.

use std::{
    io::Read,
    process::{Command, Stdio},
};

use affinode_e2e::{
    container::Spec,
    containerd::{AFFINODE, STOCK},
    supervisor::cgroup_folders,
    testbed::{Testbed, TestbedConfig},
    wait::until,
};
use anyhow::{Context, Result};
use nix::sys::signal::Signal;

use crate::matrix::on_every_containerd;

const RUNTIMES: [&str; 2] = [STOCK, AFFINODE];

on_every_containerd!(
    TestbedConfig::default();
    runs_to_its_end,
    passes_the_exit_status,
    execs,
    gives_a_terminal,
    kills_and_deletes,
    survives_a_restart_of_containerd,
    survives_a_crash_of_containerd,
    reports_a_program_that_is_not_there,
);

fn runs_to_its_end(world: &Testbed) -> Result<()> {
    for runtime in RUNTIMES {
        let spec = Spec::plain("run", &["/bin/sh", "-c", "echo hello; id -u"]).runtime(runtime);
        assert_eq!(spec.run(world)?, "hello\n0\n", "{runtime}");
    }
    nothing_is_left(world)
}

fn passes_the_exit_status(world: &Testbed) -> Result<()> {
    for runtime in RUNTIMES {
        let spec = Spec::plain("status", &["/bin/sh", "-c", "exit 7"]).runtime(runtime);
        let status = spec.command(world, &["--rm"])?.status()?;
        assert_eq!(status.code(), Some(7), "{runtime}");
    }
    nothing_is_left(world)
}

fn execs(world: &Testbed) -> Result<()> {
    for runtime in RUNTIMES {
        let spec = Spec::plain("exec", &["/bin/sleep", "infinity"]).runtime(runtime);
        let running = spec.env("WHO", "me").start(world)?;
        assert_eq!(running.exec(world, &["/bin/sh", "-c", "echo $WHO"])?, "me\n", "{runtime}");
        running.kill(world)?;
        running.delete(world)?;
    }
    nothing_is_left(world)
}

fn gives_a_terminal(world: &Testbed) -> Result<()> {
    for runtime in RUNTIMES {
        let spec = Spec::plain("tty", &["/bin/sh", "-c", "tty; stty size"]).runtime(runtime);
        let said = on_a_terminal(spec.command(world, &["--rm", "--tty"])?)?;
        assert!(said.contains("/dev/pts/") || said.contains("/dev/console"), "{runtime}: {said}");
    }
    nothing_is_left(world)
}

fn kills_and_deletes(world: &Testbed) -> Result<()> {
    for runtime in RUNTIMES {
        let running =
            Spec::plain("kill", &["/bin/sleep", "infinity"]).runtime(runtime).start(world)?;
        assert_eq!(running.status(world)?.as_deref(), Some("RUNNING"), "{runtime}");
        running.kill(world)?;
        running.delete(world)?;
        assert_eq!(running.status(world)?, None, "{runtime}");
        nothing_is_left(world)?;
    }
    Ok(())
}

fn survives_a_restart_of_containerd(world: &Testbed) -> Result<()> {
    survives(world, Signal::SIGTERM)
}

fn survives_a_crash_of_containerd(world: &Testbed) -> Result<()> {
    survives(world, Signal::SIGKILL)
}

fn survives(world: &Testbed, signal: Signal) -> Result<()> {
    for runtime in RUNTIMES {
        let spec = Spec::plain("restart", &["/bin/sleep", "infinity"]).runtime(runtime);
        let running = spec.start(world)?;
        let pid = running.pid(world)?;
        world.containerd().stop(signal)?;
        world.start_containerd()?;
        assert_eq!(running.pid(world)?, pid, "{runtime}");
        assert_eq!(running.exec(world, &["/bin/echo", "still"])?, "still\n", "{runtime}");
        running.kill(world)?;
        running.delete(world)?;
        nothing_is_left(world)?;
    }
    Ok(())
}

fn reports_a_program_that_is_not_there(world: &Testbed) -> Result<()> {
    let mut messages = Vec::new();
    for runtime in RUNTIMES {
        let spec = Spec::plain("absent", &["/bin/no-such-program"]).runtime(runtime);
        let output = spec.command(world, &["--rm"])?.output()?;
        assert!(!output.status.success(), "{runtime}");
        // Log lines of ctr contain the time, so they are left out.
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let lines: Vec<String> =
            said.lines().filter(|line| !line.starts_with("time=")).map(str::to_owned).collect();
        assert!(!lines.is_empty(), "{runtime}: {said}");
        messages.push(lines);
    }

    assert_eq!(messages[0], messages[1]);
    nothing_is_left(world)
}

/// Requires that no shim, bundle or cgroup of a removed container remains.
pub fn nothing_is_left(world: &Testbed) -> Result<()> {
    no_shim_or_bundle_is_left(world)?;
    let mut left = Vec::new();
    until("cgroups to be removed", || {
        left.clear();
        for folder in cgroup_folders(world.dir()) {
            let below = std::fs::read_dir(folder)?.flatten().map(|entry| entry.path());
            left.extend(below.filter(|path| path.is_dir()));
        }
        Ok(left.is_empty().then_some(()))
    })
    .with_context(|| format!("these are left: {left:?}"))
}

/// Requires that no shim process and no bundle remains. Cgroups are not checked.
fn no_shim_or_bundle_is_left(world: &Testbed) -> Result<()> {
    until("shims to end", || Ok(world.shims()?.is_empty().then_some(())))?;
    let mut left = Vec::new();
    until("bundles to be removed", || {
        left.clear();
        for namespace in ["default", "k8s.io"] {
            // The folder does not exist before the first container.
            let entries = std::fs::read_dir(world.containerd().bundles(namespace));
            left.extend(entries.into_iter().flatten().flatten().map(|entry| entry.path()));
        }
        Ok(left.is_empty().then_some(()))
    })
    .with_context(|| format!("these are left: {left:?}"))
}

/// Runs a command on a pseudo-terminal, and returns its output.
fn on_a_terminal(mut command: Command) -> Result<String> {
    let pty = nix::pty::openpty(None, None)?;
    let end = || -> Result<Stdio> { Ok(pty.slave.try_clone()?.into()) };
    let mut child = command.stdin(end()?).stdout(end()?).stderr(end()?).spawn()?;
    // The parent's copy of the terminal must be closed. Otherwise the terminal never reports its
    // end.
    drop(command);
    drop(pty.slave);
    let mut said = Vec::new();
    let mut terminal = std::fs::File::from(pty.master);
    let mut chunk = [0; 1024];
    // The terminal reports its end as the error EIO.
    while let Ok(count) = terminal.read(&mut chunk) {
        if count == 0 {
            break;
        }
        said.extend(&chunk[..count]);
    }
    let status = child.wait()?;
    let said = String::from_utf8_lossy(&said).into_owned();
    status
        .success()
        .then_some(())
        .with_context(|| format!("the command failed with {status}: {said}"))?;
    Ok(said)
}
