//! Tests that hostile input from a container does not affect any other container.

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    path::Path,
    process::Command,
};

use affinode_e2e::{
    attack,
    container::{CLIENTS, Spec},
    processes::{descriptors, resident_bytes},
    testbed::{MIB, TestbedConfig},
    wait::until,
    worker::{USUAL, Worker},
};
use anyhow::{Context, Result};

use crate::offload::{EAGER, MANUAL};

#[test]
fn garbage_on_the_agent_socket_harms_nobody() -> Result<()> {
    let world = TestbedConfig::default().config(EAGER).world()?;
    let mut worker = Worker::start(&world, "good", 32)?;
    let key = world.cli().known("good")?.key;
    let socket = world.cli().run_dir().join("containers").join(key).join("mount/agent.sock");
    for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 4096], &[0; 128], b"x"] {
        let mut stream = UnixStream::connect(&socket)?;
        // The controller may close the connection during the write.
        let _ = stream.write_all(garbage);
    }
    world.cli().wait_for_state("good", "Offloaded")?;
    assert!(worker.verify()?);
    Ok(())
}

/// Overwrites the counters (a page that a process shares with the controller) with arbitrary bytes.
/// Other containers must not be affected.
#[test]
fn a_scribbled_page_harms_nobody_else() -> Result<()> {
    let world = TestbedConfig::default().config(EAGER).world()?;
    let mut good = Worker::start(&world, "good", 32)?;
    let mut bad = Worker::start_as(&world, Spec::gpu("bad", &[&format!("{CLIENTS}/scribble")]))?;
    bad.expect("ready")?;
    until("the hostile process to be registered", || {
        let row = world.cli().container("bad")?;
        Ok(row.filter(|row| !row.processes.is_empty()))
    })?;
    bad.send("go")?;
    let said = bad.receive_line()?;
    assert!(said.contains("\"pages\":1"), "{said}");
    for _ in 0..2 {
        world.cli().wait_for_state("good", "Offloaded")?;
        assert!(good.verify()?);
    }
    bad.running.kill(&world)?;
    bad.running.delete(&world)?;
    until("the controller to remove it from its list", || {
        Ok(world.cli().container("bad")?.is_none().then_some(()))
    })
}

/// Number of connections that a hostile container opens. The controller serves fewer at the same
/// time.
const FLOOD: usize = 2000;
const MAX_OPEN: usize = 512;

/// Whether the controller has kept the connection open.
fn is_open(mut stream: &UnixStream) -> bool {
    // The controller sends nothing before a greeting. A read therefore returns either an error (no
    // data) or the end of the stream.
    !matches!(stream.read(&mut [0]), Ok(0)) && stream.peer_addr().is_ok()
}

/// Opens connections from a container without limit. The controller must close them, and must still
/// serve the other container.
#[test]
fn a_flood_of_connections_harms_nobody_else() -> Result<()> {
    let world = TestbedConfig::default().config(EAGER).world()?;
    let mut good = Worker::start(&world, "good", 32)?;
    let flooder = Spec::gpu("flood", &["/bin/sleep", "infinity"]).start(&world)?;
    let key = until("the flooding container to be listed", || world.cli().container("flood"))?.key;
    let socket = world.cli().run_dir().join("containers").join(key).join("mount/agent.sock");
    let controller = world.controller()?.context("no controller is running")?.pid.as_raw();
    let before = descriptors(controller)?.len();
    let (mut open, mut most) = (Vec::new(), 0);
    for count in 1..=FLOOD {
        // A connection in the kernel's queue is accepted later, and then closed.
        let stream = UnixStream::connect(&socket)?;
        stream.set_nonblocking(true)?;
        open.push(stream);
        if count % 50 == 0 {
            most = most.max(descriptors(controller)?.len());
        }
    }
    until("the controller to close all connections beyond the limit", || {
        most = most.max(descriptors(controller)?.len());
        Ok((open.iter().filter(|stream| is_open(stream)).count() <= MAX_OPEN).then_some(()))
    })?;
    assert!(
        most <= before + MAX_OPEN + 50,
        "the controller has {most} open descriptors, {before} before the attack"
    );
    world.cli().wait_for_state("good", "Offloaded")?;
    assert!(good.verify()?);
    drop(open);
    flooder.kill(&world)?;
    flooder.delete(&world)
}

/// Runs a container that makes all attacks of `attack.c` at the same time. Offloads and restores of
/// another container must continue. The attacker's use of the controller's resources must be
/// limited, and must end with the attacker.
#[test]
fn combined_attack_harms_no_other_container() -> Result<()> {
    let world = TestbedConfig::default().config(EAGER).world()?;
    let mut good = Worker::start(&world, "good", 32)?;
    let controller = world.controller()?.context("no controller is running")?;
    let bad = attack::start(&world, "bad")?;
    for _ in 0..5 {
        world.cli().wait_for_state("good", "Offloaded")?;
        assert!(good.verify()?);
        let (open, resident) =
            (descriptors(controller.pid.as_raw())?.len(), resident_bytes(controller.pid.as_raw())?);
        assert!(open < 3 * 512 + 100, "the controller has {open} open descriptors");
        assert!(resident < 100 * MIB, "the controller has {resident} bytes of resident memory");
    }
    let row = world.cli().known("bad")?;
    assert!(row.processes.len() <= 1, "the attacker is listed with more than one process: {row:?}");
    bad.running.kill(&world)?;
    bad.running.delete(&world)?;
    until("the controller to close the descriptors of the attacker", || {
        Ok((descriptors(controller.pid.as_raw())?.len() < 100).then_some(()))
    })?;
    world.cli().wait_for_state("good", "Offloaded")?;
    assert!(good.verify()?);
    Ok(())
}

/// Checks that a container sees only its own files. It must have no path to the control API or to
/// another container, and may write only to the pipe for its own hints. Its processes have one more
/// mapped page and one more socket than without Affinode.
#[test]
fn a_container_sees_nothing_but_its_own_socket() -> Result<()> {
    let world = TestbedConfig::default().config(MANUAL).world()?;
    let mut managed = Worker::start(&world, "managed", 32)?;
    let alone = Worker::spec("alone", USUAL, 32).env("AFFINODE_DISABLE", "1");
    let mut alone = Worker::start_as(&world, alone)?;
    alone.wait_filled()?;
    let kinds = |worker: &Worker| -> Result<Vec<String>> {
        let mut kinds: Vec<String> = descriptors(worker.running.pid(&world)?)?
            .into_iter()
            .map(|link| link.split(['[', ' ']).next().unwrap_or_default().to_owned())
            .collect();
        kinds.sort();
        Ok(kinds)
    };
    let (with, mut without) = (kinds(&managed)?, kinds(&alone)?);
    without.extend(["/memfd:affinode-page".into(), "socket:".into()]);
    without.sort();
    assert_eq!(with, without);

    // The script uses only built-ins of the shell, because the image has few other programs.
    let look = r#"for path in /.affinode/* /.affinode/*/* /.affinode/run/.[!.]*; do echo "$path"; done
        for path in /.affinode/run/x /.affinode/run/engine /.affinode/run/pressure /.affinode/run/state /.affinode/lib/x /etc/ld.so.preload; do
            (: >> "$path") 2>/dev/null && echo "can write $path"
        done
        for path in /run/affinode/* /.affinode/run/../../run/affinode/*; do [ -e "$path" ] && echo "$path"; done
        while read -r source path rest; do case "$path" in /.affinode/*) echo "mount $path";; esac; done < /proc/mounts
        while read -r line; do case "$line" in *control.sock*) echo "$line";; esac; done < /proc/net/unix"#;
    let said = Spec::gpu("look", &["/bin/sh", "-c", look]).run(&world)?;
    let wanted = "/.affinode/lib\n/.affinode/run\n/.affinode/lib/libaffinode_preload.so\n\
        /.affinode/run/agent.sock\n/.affinode/run/engine\n/.affinode/run/hint\n/.affinode/run/pressure\n\
        /.affinode/run/state\n\
        /.affinode/run/.[!.]*\nmount /.affinode/lib\nmount /.affinode/run\n";
    assert_eq!(said, wanted);
    assert!(managed.verify()?);
    Ok(())
}

#[test]
fn garbage_on_the_control_socket_is_refused() -> Result<()> {
    let world = TestbedConfig::default().config(MANUAL).world()?;
    let mut worker = Worker::start(&world, "good", 32)?;
    let socket = world.cli().run_dir().join("control.sock");
    for garbage in [&[0xff; 64][..], b"GET / HTTP/1.1\r\n\r\n"] {
        let mut stream = UnixStream::connect(&socket)?;
        let _ = stream.write_all(garbage);
    }
    world.cli().move_out("good")?;
    assert!(worker.verify()?);
    Ok(())
}

/// Connects to the control socket as root and as other users. Only root may use the control API.
#[test]
fn the_control_socket_is_for_root_alone() -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let world = TestbedConfig::default().config(MANUAL).world()?;
    let _worker = Worker::start(&world, "good", 32)?;
    let socket = world.cli().run_dir().join("control.sock");
    let mode = std::fs::metadata(&socket)?.permissions().mode();
    assert_eq!(mode & 0o077, 0, "{mode:o}");
    Ok(())
}

/// Checks that other users of the host cannot open a container's socket and other files. These
/// users may only traverse the folder above, which also contains the folders of their own jobs.
#[test]
fn host_users_cannot_reach_container_socket() -> Result<()> {
    use std::os::unix::process::CommandExt;
    let world = TestbedConfig::default().config(MANUAL).world()?;
    let _worker = Worker::start(&world, "good", 32)?;
    let folders = world.cli().run_dir().join("containers");
    let inside = folders.join(world.cli().known("good")?.key).join("mount");
    let exists = |user: u32, path: &Path| {
        let status = Command::new("test").arg("-e").arg(path).uid(user).gid(user).status();
        status.map(|status| status.success())
    };
    assert!(exists(65534, &folders)?, "the user of the job may traverse the folder");
    for name in ["agent.sock", "hint", "pressure"] {
        assert!(exists(0, &inside.join(name))?, "{name}");
        assert!(!exists(65534, &inside.join(name))?, "{name}");
    }
    Ok(())
}

/// Starts a container while Affinode's configuration is invalid. Affinode cannot manage the
/// container, so the container must run as with the stock shim.
#[test]
fn container_runs_with_invalid_configuration() -> Result<()> {
    let world = TestbedConfig::default().config("[policy]\nmode = \"sometimes\"\n").world()?;
    let mut worker = Worker::start(&world, "runs", 32)?;
    assert!(worker.verify()?);
    assert!(world.cli().ps_now().is_err());
    worker.running.kill(&world)?;
    worker.running.delete(&world)
}
