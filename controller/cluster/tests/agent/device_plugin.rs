//! Tests the node agent as a device plugin. The test acts as the kubelet.

mod full;

use std::{fs, path::Path};

use affinode_cluster::node::{
    device_plugin::{
        kubelet::{ENDPOINT, KUBELET, REGISTER},
        messages::{Empty, ListAndWatchResponse, RegisterRequest},
        service::LIST,
    },
    dra::{
        services::{serve, try_unary},
        sockets::NodeSocket,
    },
};
use serde_json::json;
use tokio::sync::mpsc::unbounded_channel;
use tonic::{
    Request, Streaming, client::Grpc, codegen::http::uri::PathAndQuery, transport::Endpoint,
};
use tonic_prost::ProstCodec;

use super::{
    Agent, EXCLUDE, OFFER_GPUS, RUNTIME,
    api::{ApiServer, NODE},
    dra,
};

const SOCKETS: &str = "root/var/lib/kubelet/device-plugins";

fn start() -> Agent {
    let prepare = |folder: &Path| {
        for dir in [SOCKETS, "root/etc/cdi"] {
            fs::create_dir_all(folder.join(dir)).unwrap();
        }
        let spec = json!({"kind": "nvidia.com/gpu", "devices": [{"name": "0"}]});
        fs::write(folder.join("root/etc/cdi/nvidia.json"), spec.to_string()).unwrap();
        fs::write(folder.join("node/gpus"), dra::gpus(1)).unwrap();
    };
    let options = ["--device-plugin=true", "--device-plugin-seats=2"];
    Agent::with(ApiServer::start(json!({})), &["served"], &options, prepare)
}

/// Waits as a kubelet until the agent registers, and opens the stream of its devices. The agent
/// stays registered as long as the returned socket of the kubelet exists.
async fn registered(agent: &Agent) -> (Streaming<ListAndWatchResponse>, NodeSocket) {
    let folder = agent.folder.join(SOCKETS);
    let (sender, mut requests) = unbounded_channel();
    let (listener, kubelet) = NodeSocket::bind(&folder.join(KUBELET)).unwrap();
    let serving = serve(listener, move |request| {
        let sender = sender.clone();
        assert_eq!(request.uri().path(), REGISTER);
        try_unary(request, async move |asked: RegisterRequest| {
            sender.send(asked).unwrap();
            Ok(Empty {})
        })
    });
    let request = tokio::select! {
        request = requests.recv() => request.unwrap(),
        ended = serving => panic!("{ended:?}"),
    };
    assert_eq!(request.resource_name, "affinode.io/gpu");
    // The path of the socket is too long for an address.
    let link = tempfile::tempdir().unwrap();
    let socket = link.path().join("plugin.sock");
    std::os::unix::fs::symlink(folder.join(&request.endpoint), &socket).unwrap();
    let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display())).unwrap();
    let mut client = Grpc::new(endpoint.connect().await.unwrap());
    client.ready().await.unwrap();
    let codec = ProstCodec::<Empty, ListAndWatchResponse>::default();
    let path = PathAndQuery::from_static(LIST);
    let answer = client.server_streaming(Request::new(Empty {}), path, codec).await.unwrap();
    (answer.into_inner(), kubelet)
}

/// Waits for the first list in which all devices are offered. Without a controller, the agent offers
/// none for some seconds after its start.
async fn first_offer(watch: &mut Streaming<ListAndWatchResponse>) {
    while next(watch).await != ["Healthy", "Healthy"] {}
}

/// Waits for the next list of devices, and returns the health of the two devices in it.
async fn next(watch: &mut Streaming<ListAndWatchResponse>) -> [String; 2] {
    let list = watch.message().await.unwrap().unwrap().devices;
    list.into_iter().map(|device| device.health).collect::<Vec<_>>().try_into().unwrap()
}

fn exclude(agent: &Agent, value: serde_json::Value) {
    agent.api.patch(NODE, &json!({ "metadata": { "labels": { EXCLUDE: value } } }));
}

#[test]
fn seats_are_healthy_while_the_node_serves() {
    let mut agent = start();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let (mut watch, _kubelet) = registered(&agent).await;
        first_offer(&mut watch).await;
        exclude(&agent, "true".into());
        assert_eq!(next(&mut watch).await, ["Unhealthy", "Unhealthy"]);
        agent.until_state("the exclusion", |state| state.starts_with("excluded"));
        exclude(&agent, json!(null));
        assert_eq!(next(&mut watch).await, ["Healthy", "Healthy"]);
    });
    let socket = agent.folder.join(SOCKETS).join(ENDPOINT);
    let pid = agent.child.id().to_string();
    let kill = std::process::Command::new("kill").args(["-TERM", &pid]).status().unwrap();
    assert!(kill.success() && agent.child.wait().unwrap().success());
    assert!(!socket.exists());
}

/// An operator leaves the GPUs of the node to another program. The runtime stays on the node.
#[test]
fn node_left_to_another_plugin_offers_no_seat() {
    let agent = start();
    let offer = |value: serde_json::Value| {
        agent.api.patch(NODE, &json!({ "metadata": { "labels": { OFFER_GPUS: value } } }));
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let (mut watch, _kubelet) = registered(&agent).await;
        first_offer(&mut watch).await;
        offer("false".into());
        assert_eq!(next(&mut watch).await, ["Unhealthy", "Unhealthy"]);
        assert_eq!(agent.api.label(RUNTIME), "true");
        offer(json!(null));
        assert_eq!(next(&mut watch).await, ["Healthy", "Healthy"]);
    });
}

fn start_without_folder(options: &[&str]) -> Agent {
    let prepare = |folder: &Path| {
        fs::create_dir_all(folder.join("root/var/lib/kubelet")).unwrap();
    };
    Agent::with(ApiServer::start(json!({})), &["served"], options, prepare)
}

#[test]
fn one_agent_does_not_offer_gpus_twice() {
    let mut agent = start_without_folder(&["--device-plugin=true", "--dra=true"]);
    assert!(!agent.child.wait().unwrap().success());
    let log = fs::read_to_string(agent.folder.join("log")).unwrap();
    assert!(log.contains("would offer each GPU twice"), "{log}");
}

/// The kubelet has no folder for device plugins. The agent must log this and continue, because it
/// has other tasks on the node.
#[test]
fn missing_folder_of_plugins_keeps_the_agent() {
    let agent = start_without_folder(&["--device-plugin=true"]);
    agent.until_state("the service", |state| state == "served");
    agent.api.until("the message", |_| {
        let log = fs::read_to_string(agent.folder.join("log")).unwrap_or_default();
        log.contains("not registered") && log.contains("var/lib/kubelet/device-plugins")
    });
}
