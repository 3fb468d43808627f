//! Tests of GPU containers in pods: their names and annotations, and two containers that are
//! offloaded and restored independently.

use std::collections::HashMap;

use affinode_e2e::{
    cri::{self, Cri},
    image,
    testbed::{Testbed, TestbedConfig},
    wait::until,
};
use anyhow::{Context, Result};

use crate::{
    matrix::on_every_containerd,
    offload::{EAGER, wait_gpu_empty},
};

on_every_containerd!(
    TestbedConfig::default().cri().config(EAGER);
    two_gpu_containers_of_a_pod_go_and_come_back,
);

fn two_gpu_containers_of_a_pod_go_and_come_back(world: &Testbed) -> Result<()> {
    let cri = Cri::connect(&world.containerd().socket())?;
    let mut pod = cri::pod("trainer", &world.cgroup_parent(), world.dir());
    pod.annotations = HashMap::from([("affinode.io/idle-timeout".into(), "300ms".into())]);
    let pod_id = cri.run_pod(&pod, "affinode")?;
    let mut ids = Vec::new();
    let mut lines = Vec::new();
    for name in ["first", "second"] {
        let (config, pipes) = cri::gpu_container(world, name, 32)?;
        ids.push(cri.run_container(&pod_id, &config, &pod)?);
        lines.push(pipes);
    }
    for id in &ids {
        let row = world.cli().wait_for_state(id, "Offloaded")?;
        assert_eq!((row.pod_namespace.as_str(), row.pod.as_str()), ("team", "trainer"), "{row:?}");
        assert_eq!(row.idle_timeout_ms, 300, "the pod's annotation: {row:?}");
        assert_eq!(row.image, image::PLAIN, "{row:?}");
    }
    wait_gpu_empty(world)?;
    // An exec in an offloaded container works as usual, and its program loads the library.
    let said = cri.exec(&ids[0], &["/bin/cat", "/proc/self/maps"])?;
    assert!(String::from_utf8_lossy(&said.stdout).contains("affinode_preload"));

    lines[1].send("verify")?;
    for (at, command) in ["open", "fill", "verify"].iter().enumerate() {
        let line = lines[1].receive().with_context(|| format!("line {at}"))?;
        assert!(line.contains(&format!("\"command\":\"{command}\",\"result\":0")), "{line}");
    }
    // The exec must not restore the other container.
    let first = world.cli().known(&ids[0])?;
    assert_eq!((first.state.as_str(), first.restores), ("Offloaded", 0), "{first:?}");
    for id in &ids {
        cri.remove_container(id)?;
    }
    cri.remove_pod(&pod_id)?;
    until("the controller to remove them from its list", || {
        Ok(world.cli().ps()?.containers.is_empty().then_some(()))
    })
}
