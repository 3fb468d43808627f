//! Tests how a kubelet finds the driver, and how the driver follows what the kubelet reports.

use std::{
    fs,
    os::unix::{fs::MetadataExt, net::UnixListener},
    path::Path,
    process::{Child, Command},
};

use super::{
    KUBELET, REGISTRATION, SLICES, STATE,
    claims::{claim, files, reference},
    devices,
    kubelet::Kubelet,
    register, start, start_with,
};

/// An agent was killed, and its socket files are still there. A new agent must serve at the same
/// paths.
#[test]
fn stale_sockets_are_replaced() {
    let leave = |folder: &Path| {
        for socket in [REGISTRATION, super::ENDPOINT] {
            let path = folder.join(socket);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            // The path is too long for an address of a socket.
            let short = tempfile::tempdir().unwrap();
            let link = short.path().join("folder");
            std::os::unix::fs::symlink(path.parent().unwrap(), &link).unwrap();
            // The file of a socket stays when the listener is dropped.
            drop(UnixListener::bind(link.join(path.file_name().unwrap())).unwrap());
        }
    };
    let agent = start_with(1, leave);
    agent.until_state("the service", |state| state == "served");
    let info = register(&agent);
    assert_eq!(info.name, "gpu.affinode.io");
    assert_eq!(info.supported_versions, ["v1.DRAPlugin"], "kubelets from 1.34 on call v1");
    agent.api.until("the slice", |api| api.slices().len() == 1);
}

/// A kubelet that starts again deletes the slices of its node, and registers the plugins whose
/// sockets it finds.
#[test]
fn kubelet_registers_the_driver_again() {
    let agent = start(1);
    let first = register(&agent);
    for _ in 0..2 {
        agent.api.until("the slice", |api| api.slices().len() == 1);
        let slice = agent.api.slices().remove(0);
        let name = slice["metadata"]["name"].as_str().unwrap().to_owned();
        agent.api.remove(&format!("{SLICES}/{name}"));
        assert_eq!(register(&agent), first, "the properties are the same");
        agent.api.until("a new slice", |api| {
            api.slices().first().is_some_and(|new| new["metadata"]["name"] != name.as_str())
        });
        assert_eq!(devices(&agent.api.slices()[0]), devices(&slice));
    }
}

#[test]
fn refused_driver_offers_nothing_until_accepted() {
    let agent = start(1);
    agent.until_state("the service", |state| state == "served");
    let kubelet = Kubelet::of(&agent);
    kubelet.info();
    kubelet.notify(false, "validation failed");
    // A change of the node object makes the agent report its state at once.
    let touch = |text: &str| {
        let retire = serde_json::json!({ "metadata": { "labels": { "touched": text } } });
        agent.api.patch(super::NODE, &retire);
    };
    touch("1");
    agent.until_state("the refusal", |state| {
        state.starts_with("served, without the DRA driver") && state.contains("validation failed")
    });
    assert!(agent.api.slices().is_empty(), "the scheduler must not use this node for claims");
    kubelet.notify(true, "");
    agent.api.until("the slice", |api| api.slices().len() == 1);
    touch("2");
    agent.until_state("the registration", |state| state == "served");
    // A kubelet that refuses the driver after a restart has deleted the slices of its node.
    kubelet.notify(false, "another driver");
    touch("3");
    agent.until_state("the second refusal", |state| state.contains("another driver"));
    let name = agent.api.slices()[0]["metadata"]["name"].as_str().unwrap().to_owned();
    agent.api.remove(&format!("{SLICES}/{name}"));
    touch("4");
    // The agent reads the node and its own slices before it reports its state.
    agent.api.patch(super::NODE, &serde_json::json!({"metadata": {"annotations": {STATE: null}}}));
    agent.until_state("the state again", |state| state.contains("another driver"));
    assert!(agent.api.slices().is_empty(), "no slice while the driver is refused");
    assert!(!agent.api.annotation(STATE).contains("validation failed"));
}

/// A node runs two agents for a moment, as during an upgrade without a pause. The kubelet must reach
/// the newer agent, which knows the claims of the older agent, and the end of the older agent must
/// not remove the sockets of the newer agent.
#[test]
fn newer_agent_takes_over_the_claims() {
    let mut agent = start(1);
    let kubelet = Kubelet::of(&agent);
    register(&agent);
    claim(&agent, "one", "u-1");
    let prepared = kubelet.prepare(&[reference("one", "u-1")]);
    let inode = |agent: &super::Agent| {
        fs::metadata(agent.folder.join(REGISTRATION)).map(|data| data.ino()).ok()
    };
    let older = inode(&agent);
    agent.start_newer();
    agent.api.until("the newer agent's sockets", |_| {
        inode(&agent).is_some_and(|newer| Some(newer) != older)
    });
    register(&agent);
    assert_eq!(kubelet.prepare(&[reference("one", "u-1")]), prepared, "from the newer agent");
    terminate(&mut agent.older[0]);
    assert!(agent.folder.join(KUBELET).join("plugins/gpu.affinode.io/dra.sock").exists());
    assert_eq!(kubelet.info().name, "gpu.affinode.io", "the newer agent still serves");
    assert_eq!(kubelet.unprepare(&[reference("one", "u-1")])["u-1"].error, "");
    assert!(files(&agent).is_empty());
}

/// Ends an agent as a kubelet does, and waits until it has ended.
fn terminate(child: &mut Child) {
    let kill = Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
    assert!(kill.success() && child.wait().unwrap().success());
}
