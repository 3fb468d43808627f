//! Tests that claims survive the end of the agent's process at any moment.

use std::{fs, time::Instant};

use serde_json::Value;

use super::{
    Agent, REGISTRATION,
    claims::{claim, files, files_of, reference},
    kubelet::Kubelet,
    start,
};
use crate::api::{CLAIMS, PATIENCE};

/// Kills the agent, and starts a new one on the same node.
fn restart(agent: &mut Agent, kubelet: &Kubelet) {
    agent.child.kill().unwrap();
    agent.child.wait().unwrap();
    // A killed agent leaves its sockets. The test must not connect to these.
    fs::remove_file(agent.folder.join(REGISTRATION)).unwrap();
    agent.start_newer();
    agent.api.until("the new agent", |_| agent.folder.join(REGISTRATION).exists());
    kubelet.notify(true, "");
}

/// Waits until at least this many files of claims exist. Does not sleep between two looks, because
/// the agent writes all files within milliseconds.
fn until_files(agent: &Agent, least: usize) {
    let deadline = Instant::now() + PATIENCE;
    while files(agent).len() < least {
        assert!(Instant::now() < deadline, "{least} files do not appear: {:?}", files(agent));
        std::thread::yield_now();
    }
}

#[test]
fn new_agent_keeps_and_reverts_claims() {
    let mut agent = start(1);
    let kubelet = Kubelet::with_driver(&agent);
    claim(&agent, "one", "u-1");
    let prepared = kubelet.prepare(&[reference("one", "u-1")]);
    restart(&mut agent, &kubelet);
    assert_eq!(kubelet.prepare(&[reference("one", "u-1")]), prepared);
    agent.api.remove(&format!("{CLAIMS}/one"));
    restart(&mut agent, &kubelet);
    assert_eq!(kubelet.prepare(&[reference("one", "u-1")]), prepared, "the claim was deleted");
    assert_eq!(kubelet.unprepare(&[reference("one", "u-1")])["u-1"].error, "");
    assert!(files(&agent).is_empty());
}

#[test]
fn agent_killed_while_it_reads_a_claim() {
    let mut agent = start(1);
    let kubelet = Kubelet::with_driver(&agent);
    claim(&agent, "one", "u-1");
    let path = format!("{CLAIMS}/one");
    agent.api.hold(&path);
    let call = kubelet.start_preparing(&[reference("one", "u-1")]);
    agent.api.until("the reading of the claim", |api| api.is_asked_for(&path));
    restart(&mut agent, &kubelet);
    assert!(kubelet.result(call).is_err(), "the connection ended without an answer");
    assert_eq!(files(&agent), ["affinode/claims/requested/u-1"], "the claim counts as in use");
    agent.api.release(&path);
    assert_eq!(kubelet.prepare(&[reference("one", "u-1")])["u-1"].error, "");
    assert_eq!(files(&agent), files_of("u-1"));
    kubelet.unprepare(&[reference("one", "u-1")]);
    assert!(files(&agent).is_empty());
}

/// Kills the agent at five moments between the first and the last file of 32 claims. Each
/// specification that exists must be complete, because containerd reads it.
#[test]
fn agent_killed_while_it_writes_claims() {
    let mut agent = start(1);
    let kubelet = Kubelet::with_driver(&agent);
    let wanted: Vec<_> = (0..32).map(|n| reference(&format!("c{n}"), &format!("u-{n}"))).collect();
    for one in &wanted {
        claim(&agent, &one.name, &one.uid);
    }
    for least in [1, 20, 40, 60, 90] {
        let call = kubelet.start_preparing(&wanted);
        until_files(&agent, least);
        restart(&mut agent, &kubelet);
        let _ = kubelet.result(call);
        let specs = files(&agent).into_iter().filter(|name| name.ends_with(".json"));
        for name in specs {
            let text = fs::read(agent.folder.join("root/run").join(&name)).unwrap();
            let spec: Value = serde_json::from_slice(&text).unwrap();
            assert_eq!(spec["kind"], "gpu.affinode.io/claim", "{name}");
        }
        let prepared = kubelet.prepare(&wanted);
        assert!(prepared.values().all(|claim| claim.error.is_empty()), "{prepared:?}");
        assert_eq!(kubelet.unprepare(&wanted).len(), wanted.len());
        assert!(files(&agent).is_empty(), "after {least} files: {:?}", files(&agent));
    }
}
