//! Tests preparations of claims by the agent's process, and the reverts of these preparations.

use std::fs;

use affinode_cluster::node::dra::messages::ClaimReference;
use serde_json::json;

use super::{Agent, UUID, kubelet::Kubelet, start};
use crate::api::CLAIMS;

/// Stores a claim at the simulated API server, with the first GPU of the node allocated to it.
pub fn claim(agent: &Agent, name: &str, uid: &str) {
    agent.api.put(
        &format!("{CLAIMS}/{name}"),
        json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            "metadata": {"namespace": "ml", "name": name, "uid": uid},
            "spec": {},
            "status": {"allocation": {"devices": {"results": [{
                "request": "gpu", "driver": "gpu.affinode.io", "pool": "one",
                "device": UUID.to_lowercase(), "shareID": format!("share-{uid}"),
                "consumedCapacity": {"memory": "64Mi"},
            }]}}},
        }),
    );
}

/// Returns the kubelet's reference to a claim in the namespace `ml`.
pub fn reference(name: &str, uid: &str) -> ClaimReference {
    ClaimReference { namespace: "ml".into(), uid: uid.into(), name: name.into() }
}

/// Returns the names of all files that the driver has written for claims, sorted.
pub fn files(agent: &Agent) -> Vec<String> {
    let root = agent.folder.join("root/run");
    let mut names = Vec::new();
    for folder in ["cdi", "affinode/claims", "affinode/claims/requested"] {
        for entry in fs::read_dir(root.join(folder)).into_iter().flatten().flatten() {
            if entry.path().is_file() {
                names.push(format!("{folder}/{}", entry.file_name().to_string_lossy()));
            }
        }
    }
    names.sort();
    names
}

/// Returns the names of the files of one prepared claim.
pub fn files_of(uid: &str) -> Vec<String> {
    vec![
        format!("affinode/claims/requested/{uid}"),
        format!("affinode/claims/{uid}-0"),
        format!("cdi/gpu.affinode.io-claim_{uid}.json"),
    ]
}

#[test]
fn prepared_twice_is_prepared_the_same() {
    let agent = start(1);
    let kubelet = Kubelet::with_driver(&agent);
    claim(&agent, "one", "u-1");
    let first = kubelet.prepare(&[reference("one", "u-1")]);
    assert_eq!(first["u-1"].error, "");
    let device = &first["u-1"].devices[0];
    assert_eq!(device.device_name, UUID.to_lowercase());
    assert_eq!(device.share_id.as_deref(), Some("share-u-1"));
    assert_eq!(device.cdi_device_ids, ["nvidia.com/gpu=0", "gpu.affinode.io/claim=u-1-0"]);
    let written = files(&agent);
    assert_eq!(kubelet.prepare(&[reference("one", "u-1")]), first);
    assert_eq!(kubelet.prepare_at_once(&vec![reference("one", "u-1"); 8]), first);
    assert_eq!((files(&agent), written.len()), (written, 3));
}

/// A pod and its claim were deleted by force, and created again with the same names, before the
/// kubelet has ended the first pod.
#[test]
fn recreated_claim_is_another_claim() {
    let agent = start(1);
    let kubelet = Kubelet::with_driver(&agent);
    claim(&agent, "one", "u-old");
    kubelet.prepare(&[reference("one", "u-old")]);
    claim(&agent, "one", "u-new");
    let error = &kubelet.prepare(&[reference("one", "u-old")])["u-old"].error;
    assert!(error.contains("replaced by a claim of the same name"), "{error}");
    let prepared = kubelet.prepare(&[reference("one", "u-new")]);
    assert_eq!(prepared["u-new"].devices[0].cdi_device_ids[1], "gpu.affinode.io/claim=u-new-0");
    assert_eq!(files(&agent).len(), 6, "the old pod may still run");
    assert_eq!(kubelet.unprepare(&[reference("one", "u-old")])["u-old"].error, "");
    assert_eq!(files(&agent), files_of("u-new"), "the new claim keeps its files");
    let again = kubelet.prepare(&[reference("one", "u-new")]);
    assert_eq!(again, prepared);
}

#[test]
fn failed_claims_do_not_affect_others() {
    let agent = start(1);
    let kubelet = Kubelet::with_driver(&agent);
    for (name, uid) in [("one", "u-1"), ("bare", "u-2"), ("three", "u-3")] {
        claim(&agent, name, uid);
    }
    agent.api.patch(&format!("{CLAIMS}/bare"), &json!({"status": null}));
    let wanted = [
        reference("one", "u-1"),
        reference("bare", "u-2"),
        reference("missing", "u-9"),
        reference("three", "u-3"),
    ];
    let prepared = kubelet.prepare(&wanted);
    assert_eq!(prepared.len(), wanted.len(), "one result for each claim");
    assert!(prepared["u-2"].error.contains("no device"), "{prepared:?}");
    assert!(prepared["u-9"].error.contains("cannot read ResourceClaim ml/missing"), "{prepared:?}");
    for uid in ["u-1", "u-3"] {
        assert_eq!((prepared[uid].error.as_str(), prepared[uid].devices.len()), ("", 1));
    }
    // The kubelet reverts all claims of the pod, also those that were not prepared.
    let reverted = kubelet.unprepare(&wanted);
    assert_eq!(reverted.len(), wanted.len());
    assert!(reverted.values().all(|claim| claim.error.is_empty()), "{reverted:?}");
    assert!(files(&agent).is_empty());
}

/// The kubelet reverts the preparation of a pod after the pod and its claim were deleted by force.
/// It repeats the call until the call succeeds, and knows claims that this driver does not know.
#[test]
fn unprepare_needs_no_claim_and_repeats() {
    let agent = start(1);
    let kubelet = Kubelet::with_driver(&agent);
    claim(&agent, "one", "u-1");
    claim(&agent, "two", "u-2");
    kubelet.prepare(&[reference("one", "u-1"), reference("two", "u-2")]);
    agent.api.remove(&format!("{CLAIMS}/one"));
    for _ in 0..2 {
        let reverted = kubelet.unprepare(&[reference("one", "u-1"), reference("never", "u-0")]);
        assert_eq!(reverted.len(), 2);
        assert!(reverted.values().all(|claim| claim.error.is_empty()), "{reverted:?}");
        assert_eq!(files(&agent), files_of("u-2"), "the other claim stays prepared");
    }
}

#[test]
fn many_claims_are_prepared_at_once() {
    let agent = start(1);
    let kubelet = Kubelet::with_driver(&agent);
    let wanted: Vec<_> = (0..64).map(|n| reference(&format!("c{n}"), &format!("u-{n}"))).collect();
    for one in &wanted {
        claim(&agent, &one.name, &one.uid);
    }
    let prepared = kubelet.prepare_at_once(&wanted);
    assert_eq!(prepared.len(), wanted.len());
    for (uid, result) in &prepared {
        let id = format!("gpu.affinode.io/claim={uid}-0");
        assert!(result.error.is_empty() && result.devices[0].cdi_device_ids[1] == id, "{result:?}");
    }
    assert_eq!(kubelet.prepare(&wanted), prepared, "in one call");
    assert_eq!(kubelet.unprepare(&wanted).len(), wanted.len());
    assert!(files(&agent).is_empty());
}

/// The kubelet cancels a call when it ends or when the call takes too long. The claim then counts as
/// in use until the kubelet reverts the preparation, and a further call prepares it.
#[test]
fn canceled_preparation_can_be_repeated() {
    let agent = start(1);
    let kubelet = Kubelet::with_driver(&agent);
    claim(&agent, "one", "u-1");
    let path = format!("{CLAIMS}/one");
    for repeat in [true, false] {
        agent.api.hold(&path);
        let call = kubelet.start_preparing(&[reference("one", "u-1")]);
        agent.api.until("the reading of the claim", |api| api.is_asked_for(&path));
        call.abort();
        assert_eq!(files(&agent), ["affinode/claims/requested/u-1"]);
        if repeat {
            agent.api.release(&path);
            assert_eq!(kubelet.prepare(&[reference("one", "u-1")])["u-1"].error, "");
            assert_eq!(files(&agent), files_of("u-1"));
        }
        assert_eq!(kubelet.unprepare(&[reference("one", "u-1")])["u-1"].error, "");
        agent.api.release(&path);
        // A further call on the same path shows that the canceled preparation wrote nothing later.
        kubelet.unprepare(&[reference("two", "u-2")]);
        assert!(files(&agent).is_empty());
    }
}
