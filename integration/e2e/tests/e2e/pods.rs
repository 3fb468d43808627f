//! Tests of pods that are created through CRI, as a kubelet runs them with a RuntimeClass.

use affinode_e2e::{
    cri::{self, Cri},
    image,
    testbed::{Testbed, TestbedConfig},
    wait::until,
};
use anyhow::Result;
use nix::sys::signal::Signal;

use crate::{lifecycle::nothing_is_left, matrix::on_every_containerd};

on_every_containerd!(
    TestbedConfig::default().cri();
    a_pod_with_two_containers,
    a_pod_survives_a_restart_of_containerd,
    a_shim_that_is_killed_leaves_nothing,
);

const HANDLERS: [&str; 2] = ["runc", "affinode"];

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|&word| word.to_owned()).collect()
}

fn a_pod_with_two_containers(world: &Testbed) -> Result<()> {
    let cri = Cri::connect(&world.containerd().socket())?;
    for handler in HANDLERS {
        let pod = cri::pod(&format!("pair-{handler}"), &world.cgroup_parent(), world.dir());
        let pod_id = cri.run_pod(&pod, handler)?;
        let sleeper = cri::container("sleeper", image::PLAIN, &words(&["/bin/sleep", "infinity"]));
        let short = cri::container("short", image::PLAIN, &words(&["/bin/true"]));
        let sleeper = cri.run_container(&pod_id, &sleeper, &pod)?;
        let short = cri.run_container(&pod_id, &short, &pod)?;
        until("the short program to exit", || {
            Ok((cri.state(&short)? == cri::EXITED).then_some(()))
        })?;
        let said = cri.exec(&sleeper, &["/bin/sh", "-c", "echo here; exit 3"])?;
        assert_eq!((said.stdout.as_slice(), said.exit_code), (&b"here\n"[..], 3), "{handler}");
        cri.remove_container(&short)?;
        cri.remove_container(&sleeper)?;
        cri.remove_pod(&pod_id)?;
        nothing_is_left(world)?;
    }
    Ok(())
}

fn a_pod_survives_a_restart_of_containerd(world: &Testbed) -> Result<()> {
    for handler in HANDLERS {
        let cri = Cri::connect(&world.containerd().socket())?;
        let pod = cri::pod(&format!("restart-{handler}"), &world.cgroup_parent(), world.dir());
        let pod_id = cri.run_pod(&pod, handler)?;
        let config = cri::container("sleeper", image::PLAIN, &words(&["/bin/sleep", "infinity"]));
        let first = cri.run_container(&pod_id, &config, &pod)?;
        world.containerd().stop(Signal::SIGTERM)?;
        world.start_containerd()?;
        let cri = Cri::connect(&world.containerd().socket())?;
        assert_eq!(cri.exec(&first, &["/bin/echo", "still"])?.stdout, b"still\n", "{handler}");
        let mut config = config;
        config.metadata = Some(cri::ContainerMetadata { name: "second".into() });
        let second = cri.run_container(&pod_id, &config, &pod)?;
        assert_eq!(cri.exec(&second, &["/bin/echo", "new"])?.stdout, b"new\n", "{handler}");
        cri.remove_container(&first)?;
        cri.remove_container(&second)?;
        cri.remove_pod(&pod_id)?;
        nothing_is_left(world)?;
    }
    Ok(())
}

/// Kills a pod's shim. containerd must notice the end of the connection and run the shim's command
/// `delete`. Then the pod can be removed.
fn a_shim_that_is_killed_leaves_nothing(world: &Testbed) -> Result<()> {
    let cri = Cri::connect(&world.containerd().socket())?;
    let pod = cri::pod("shot", &world.cgroup_parent(), world.dir());
    let pod_id = cri.run_pod(&pod, "affinode")?;
    let config = cri::container("sleeper", image::PLAIN, &words(&["/bin/sleep", "infinity"]));
    let id = cri.run_container(&pod_id, &config, &pod)?;
    for shim in world.shims()? {
        if shim.command.contains("containerd-shim-affinode-v1") {
            nix::sys::signal::kill(shim.pid, Signal::SIGKILL)?;
        }
    }
    until("containerd to see the end", || Ok((cri.state(&id)? == cri::EXITED).then_some(())))?;
    cri.remove_container(&id)?;
    // containerd refuses the removal while it cleans up after the shim, so this test tries again,
    // as a kubelet does.
    until("containerd to remove the pod", || Ok(cri.remove_pod(&pod_id).ok()))?;
    nothing_is_left(world)
}
