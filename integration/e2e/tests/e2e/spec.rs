//! Tests of the changes that the shim makes to a container's spec.

use affinode_e2e::{
    container::Spec,
    containerd::{AFFINODE, STOCK},
    testbed::{Testbed, TestbedConfig},
};
use anyhow::Result;

use crate::matrix::on_every_containerd;

on_every_containerd!(
    TestbedConfig::default();
    without_a_gpu_config_json_is_untouched,
    with_a_gpu_it_gets_the_library,
);

fn config_json(world: &Testbed, spec: Spec) -> Result<Vec<u8>> {
    let running = spec.start(world)?;
    let bundle = world.containerd().bundles("default").join(&running.id);
    let config = std::fs::read(bundle.join("config.json"))?;
    running.kill(world)?;
    running.delete(world)?;
    Ok(config)
}

fn without_a_gpu_config_json_is_untouched(world: &Testbed) -> Result<()> {
    let spec = || {
        Spec::plain("same", &["/bin/sleep", "infinity"])
            .env("A", "b")
            .annotation("affinode.io/idle-timeout", "5s")
            .annotation("example.org/other", "kept")
    };
    let stock = config_json(world, spec().runtime(STOCK))?;
    let ours = config_json(world, spec().runtime(AFFINODE))?;
    assert_eq!(String::from_utf8_lossy(&stock), String::from_utf8_lossy(&ours));
    Ok(())
}

fn with_a_gpu_it_gets_the_library(world: &Testbed) -> Result<()> {
    // The controller creates the socket when the container is announced.
    let wait = "until [ -S /.affinode/run/agent.sock ]; do sleep 0.1; done";
    let show = "cat /etc/ld.so.preload; ls /.affinode/lib /.affinode/run; touch /.affinode/lib/x 2>/dev/null && echo writable";
    let said =
        Spec::gpu("inject", &["/bin/sh", "-c", &format!("{wait}; {show}; true")]).run(world)?;
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines[0], "/.affinode/lib/libaffinode_preload.so", "{said}");
    assert!(lines.contains(&"libaffinode_preload.so"), "{said}");
    assert!(lines.contains(&"agent.sock"), "{said}");
    assert!(!lines.contains(&"writable"), "{said}");
    Ok(())
}
