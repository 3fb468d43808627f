//! Tests that the node agent shows in the cluster how the GPUs of its node are shared.

use std::{
    fs::{self, File},
    os::{fd::AsRawFd, unix::net::UnixListener},
    path::Path,
};

use serde_json::{Value, json};

use super::{
    Agent, EXCLUDE, OFFER_GPUS, STATE,
    api::{ApiServer, NODE},
    spawn,
};

const OFFERED_BY: &str = "affinode.io/gpus-offered-by";
const SHARING: &str = "affinode.io/gpu-sharing";
const PLUGINS: &str = "root/var/lib/kubelet/device-plugins";

/// Listens at a socket. The path of the folder may be longer than an address.
fn listen(folder: &Path, name: &str) -> UnixListener {
    let opened = File::open(folder).unwrap();
    UnixListener::bind(format!("/proc/self/fd/{}/{name}", opened.as_raw_fd())).unwrap()
}

/// Starts an agent on a node whose kubelet knows NVIDIA's device plugin with time-slicing, and on
/// which KAI has reserved a GPU.
fn start() -> Agent {
    let prepare = |folder: &Path| {
        fs::create_dir_all(folder.join(PLUGINS)).unwrap();
        let devices = json!({"nvidia.com/gpu": ["GPU-a::0", "GPU-a::1"]});
        let record = json!({"Data": {"RegisteredDevices": devices}, "Checksum": 1});
        let file = folder.join(PLUGINS).join("kubelet_internal_checkpoint");
        fs::write(file, record.to_string()).unwrap();
        let pod = "root/var/log/pods/kai-resource-reservation_gpu-reservation-1_ab";
        fs::create_dir_all(folder.join(pod)).unwrap();
    };
    Agent::with(ApiServer::start(json!({})), &["served"], &[], prepare)
}

/// Returns the events of the node that have this reason.
fn events(api: &ApiServer, reason: &str) -> Vec<Value> {
    let is_so = |object: &Value| object["reason"] == reason && object["regarding"]["name"] == "one";
    api.created().into_iter().filter(is_so).collect()
}

#[test]
fn sharing_of_gpus_is_shown_in_the_cluster() {
    let mut agent = start();
    let plugins = agent.folder.join(PLUGINS);
    agent.api.until("the annotation", |api| api.annotation(SHARING) == "time-slicing,kai");
    assert!(agent.api.label(OFFERED_BY).is_null(), "no plugin serves a socket");
    agent.api.until("the event", |api| !events(api, "AffinodeGPUSharingKAI").is_empty());
    let slicing = events(&agent.api, "AffinodeGPUTimeSlicing").remove(0);
    let note = slicing["note"].as_str().unwrap();
    assert_eq!(slicing["type"], "Normal");
    assert!(note.starts_with("nvidia.com/gpu: 2 for 1 GPUs, by time-slicing"), "{note}");
    assert!(note.ends_with("See docs/gpu-sharing.md#time-slicing"), "{note}");

    agent.child.kill().unwrap();
    agent.child.wait().unwrap();
    let _nvidia = listen(&plugins, "nvidia-gpu.sock");
    let affinode = listen(&plugins, "gpu.affinode.io.sock");
    agent.child = spawn(&agent.folder, &agent.options);
    agent.api.until("both programs", |api| api.label(OFFERED_BY) == "several");
    assert_eq!(agent.api.annotation(SHARING), "time-slicing,kai,offered-twice");
    agent.api.until("the warning", |api| !events(api, "AffinodeGPUOfferedTwice").is_empty());
    let twice = events(&agent.api, "AffinodeGPUOfferedTwice").remove(0);
    let note = twice["note"].as_str().unwrap();
    assert!(twice["type"] == "Warning" && note.ends_with("docs/gpu-sharing.md#by-node-pool"));
    assert!(note.contains("NVIDIA's device plugin, Affinode's device plugin"), "{note}");
    assert_eq!(events(&agent.api, "AffinodeGPUTimeSlicing").len(), 1, "it is not new");
    agent.until_state("the state", |state| state.starts_with("served, but several programs"));

    let offer = |value: Value| {
        agent.api.patch(NODE, &json!({ "metadata": { "labels": { OFFER_GPUS: value } } }));
    };
    offer("false".into());
    agent.api.until("the other program", |api| api.label(OFFERED_BY) == "nvidia-plugin");
    agent.until_state("the state without a problem", |state| state == "served");
    offer(Value::Null);
    agent.api.until("both programs again", |api| api.label(OFFERED_BY) == "several");

    drop(affinode);
    fs::remove_file(plugins.join("gpu.affinode.io.sock")).unwrap();
    agent.api.until("one program", |api| api.label(OFFERED_BY) == "nvidia-plugin");
    agent.until_state("the state without a problem", |state| state == "served");
}

#[test]
fn excluded_node_does_not_show_its_sharing() {
    let agent = start();
    agent.api.until("the annotation", |api| !api.annotation(SHARING).is_empty());
    agent.api.patch(NODE, &json!({ "metadata": { "labels": { EXCLUDE: "true" } } }));
    agent.until_state("the exclusion", |state| state.starts_with("excluded"));
    assert_eq!(agent.api.annotation(SHARING), "", "{}", agent.api.annotation(STATE));
}
