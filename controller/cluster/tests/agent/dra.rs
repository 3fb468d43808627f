//! Tests the node agent as a DRA driver. The test acts as the kubelet.

mod claims;
mod full;
mod kills;
mod kubelet;
mod registration;

use std::{fs, path::Path};

use affinode_cluster::node::dra::messages::PluginInfo;
use kubelet::Kubelet;
use serde_json::{Value, json};

use super::{
    Agent, EXCLUDE, OFFER_GPUS, STATE,
    api::{ApiServer, NODE, SLICES},
};

pub const UUID: &str = "GPU-8b2e6a5c-0000-0000-0000-000000000000";
const KUBELET: &str = "root/var/lib/kubelet";
const ENDPOINT: &str = "root/var/lib/kubelet/plugins/gpu.affinode.io/dra.sock";
const REGISTRATION: &str = "root/var/lib/kubelet/plugins_registry/gpu.affinode.io-reg.sock";

pub fn gpus(count: u32) -> String {
    let gpu = |index: u32| {
        json!({
            "index": index, "uuid": format!("{}{index}", &UUID[..UUID.len() - 1]),
            "name": "NVIDIA H200", "vram_bytes": 1u64 << 30, "mig": false,
        })
    };
    let all: Vec<Value> = (0..count).map(gpu).collect();
    json!({"driver_version": "580.159", "host_memory_bytes": 64u64 << 30, "gpus": all}).to_string()
}

fn start(count: u32) -> Agent {
    start_with(count, |_| {})
}

/// Starts the agent on a node that `prepare` has changed before the start.
fn start_with(count: u32, prepare: impl Fn(&Path)) -> Agent {
    let gpus = |folder: &Path| {
        fs::create_dir_all(folder.join(KUBELET)).unwrap();
        fs::write(folder.join("node/gpus"), gpus(count)).unwrap();
        let devices = json!([{"name": "0", "containerEdits": {}}]);
        let toolkit = json!({"cdiVersion": "0.6.0", "kind": "nvidia.com/gpu", "devices": devices});
        fs::create_dir_all(folder.join("root/etc/cdi")).unwrap();
        fs::write(folder.join("root/etc/cdi/nvidia.json"), toolkit.to_string()).unwrap();
        prepare(folder);
    };
    let options = ["--dra=true", "--dra-oversubscription=1.5"];
    let agent = Agent::with(ApiServer::start(json!({})), &["served"], &options, gpus);
    agent.api.until("the registration socket", |_| agent.folder.join(REGISTRATION).exists());
    agent
}

/// Registers the agent's driver as a kubelet does, and returns the properties of the driver.
fn register(agent: &Agent) -> PluginInfo {
    let kubelet = Kubelet::of(agent);
    let info = kubelet.info();
    kubelet.notify(true, "");
    info
}

fn devices(slice: &Value) -> Vec<&str> {
    let devices = slice["spec"]["devices"].as_array().unwrap();
    devices.iter().map(|device| device["name"].as_str().unwrap()).collect()
}

#[test]
fn registered_driver_publishes_its_gpus() {
    let agent = start(1);
    agent.until_state("the service", |state| state == "served");
    assert!(agent.api.slices().is_empty(), "the kubelet does not know the driver yet");
    let info = register(&agent);
    assert_eq!(info.endpoint, "/var/lib/kubelet/plugins/gpu.affinode.io/dra.sock", "on the node");
    agent.api.until("the slice", |api| api.slices().len() == 1);
    let slice = agent.api.slices().remove(0);
    assert_eq!(devices(&slice), [UUID.to_lowercase()]);
    assert_eq!(slice["spec"]["nodeName"], "one");
    assert_eq!(slice["spec"]["devices"][0]["capacity"]["memory"]["value"], "1536Mi");
    // A kubelet deletes the slices of its node when it starts.
    let name = slice["metadata"]["name"].as_str().unwrap();
    agent.api.remove(&format!("{SLICES}/{name}"));
    agent.api.until("a new slice", |api| {
        api.slices().first().is_some_and(|slice| slice["metadata"]["name"] != name)
    });
}

#[test]
fn changed_gpus_raise_the_generation() {
    let agent = start(1);
    register(&agent);
    agent.api.until("the slice", |api| api.slices().len() == 1);
    fs::write(agent.folder.join("node/gpus"), gpus(2)).unwrap();
    // Any change of the slice makes the agent compare it with the GPUs.
    let name = agent.api.slices()[0]["metadata"]["name"].as_str().unwrap().to_owned();
    let path = format!("{SLICES}/{name}");
    agent.api.patch(&path, &json!({"metadata": {"labels": {"touched": "true"}}}));
    agent.api.until("the second GPU", |api| devices(&api.get(&path)).len() == 2);
    assert_eq!(agent.api.get(&path)["spec"]["pool"]["generation"], 2);
}

/// The NVIDIA driver of a node is unloaded and loaded again. The node must offer no GPU in between,
/// because containers of new pods could not use the GPU.
#[test]
fn node_without_driver_offers_no_gpu() {
    let agent = start(1);
    register(&agent);
    agent.api.until("the slice", |api| api.slices().len() == 1);
    let name = agent.api.slices()[0]["metadata"]["name"].as_str().unwrap().to_owned();
    fs::remove_file(agent.folder.join("node/gpus")).unwrap();
    // Any change of the slice makes the agent read the GPUs at once. It repeats a failed reading.
    let touched = json!({"metadata": {"labels": {"touched": "true"}}});
    agent.api.patch(&format!("{SLICES}/{name}"), &touched);
    agent.api.until("the slice to be deleted", |api| api.slices().is_empty());
    fs::write(agent.folder.join("node/gpus"), gpus(1)).unwrap();
    agent.api.until("the slice again", |api| api.slices().len() == 1);
}

#[test]
fn node_with_claims_is_not_left() {
    let agent = start(1);
    register(&agent);
    agent.api.until("the slice", |api| api.slices().len() == 1);
    let claim = agent.folder.join("root/run/cdi/gpu.affinode.io-claim_u-1.json");
    fs::create_dir_all(claim.parent().unwrap()).unwrap();
    fs::write(&claim, "{}").unwrap();
    agent.api.patch(NODE, &json!({ "metadata": { "labels": { EXCLUDE: "true" } } }));
    agent.until_state("the refusal", |state| state.starts_with("cannot be removed"));
    let why = agent.api.annotation(STATE);
    assert!(
        why.contains("1 resource claims") && why.contains("delete the pods that use u-1"),
        "{why}"
    );
    assert!(agent.has("served"), "the runtime stays for the pods");
    agent.api.until("the slice to be deleted", |api| api.slices().is_empty());
    fs::remove_file(&claim).unwrap();
    agent.until_state("the exclusion", |state| state.starts_with("excluded"));
    agent.api.patch(NODE, &json!({ "metadata": { "labels": { EXCLUDE: null } } }));
    agent.api.until("the slice again", |api| api.slices().len() == 1);
}

/// An operator leaves the GPUs of the node to another program. The driver stays for the claims of
/// running pods.
#[test]
fn node_left_to_another_driver_has_no_slice() {
    let agent = start(1);
    register(&agent);
    agent.api.until("the slice", |api| api.slices().len() == 1);
    agent.api.patch(NODE, &json!({ "metadata": { "labels": { OFFER_GPUS: "false" } } }));
    agent.api.until("the slice to be deleted", |api| api.slices().is_empty());
    assert!(agent.folder.join(ENDPOINT).exists());
    agent.api.patch(NODE, &json!({ "metadata": { "labels": { OFFER_GPUS: null } } }));
    agent.api.until("the slice again", |api| api.slices().len() == 1);
}

#[test]
fn ended_agent_leaves_no_socket() {
    let mut agent = start(1);
    let sockets = [REGISTRATION, ENDPOINT];
    assert!(sockets.iter().all(|socket| agent.folder.join(socket).exists()));
    let pid = agent.child.id().to_string();
    let kill = std::process::Command::new("kill").args(["-TERM", &pid]).status().unwrap();
    assert!(kill.success() && agent.child.wait().unwrap().success());
    assert!(sockets.iter().all(|socket| !agent.folder.join(socket).exists()));
}

#[test]
fn missing_kubelet_folder_is_named() {
    let options = ["--dra=true", "--dra-kubelet-dir=/var/lib/k0s/kubelet"];
    let agent = Agent::with(ApiServer::start(json!({})), &["served"], &options, |_| {});
    // The agent does more than the driver, so it goes on.
    agent.until_state("the service without the driver", |state| {
        state.starts_with("served, without the DRA driver")
            && state.contains("/var/lib/k0s/kubelet")
    });
}
