//! Tests that the device plugin withdraws the free seats of a full GPU. The test acts as the kubelet
//! and as the controller of the node.

use std::{fs, path::Path};

use affinode_cluster::node::{
    device_plugin::{
        kubelet::KUBELET,
        messages::{Empty, ListAndWatchResponse},
        pod_resources::{
            ContainerDevices, ContainerResources, FOLDER, LIST, ListPodResourcesResponse,
            PodResources,
        },
    },
    dra::{
        services::{serve, try_unary},
        sockets::NodeSocket,
    },
};
use tokio::{sync::watch, time::timeout};
use tonic::Streaming;

use super::{next, registered, start};
use crate::{
    api::PATIENCE,
    controller::{self, VRAM_BYTES},
    dra::UUID,
};

/// Lists the devices of pods as a kubelet does: one pod has this seat.
fn list_pods(root: &Path, seat: String) -> NodeSocket {
    let folder = root.join("var/lib/kubelet").join(FOLDER);
    fs::create_dir_all(&folder).unwrap();
    let (listener, socket) = NodeSocket::bind(&folder.join(KUBELET)).unwrap();
    let devices =
        ContainerDevices { resource_name: "affinode.io/gpu".into(), device_ids: vec![seat] };
    let container = ContainerResources { devices: vec![devices] };
    let pods = vec![PodResources { containers: vec![container] }];
    let answer = ListPodResourcesResponse { pods };
    tokio::spawn(serve(listener, move |request| {
        assert_eq!(request.uri().path(), LIST);
        let answer = answer.clone();
        try_unary(request, async move |_: Empty| Ok(answer))
    }));
    socket
}

async fn next_in_time(watch: &mut Streaming<ListAndWatchResponse>) -> [String; 2] {
    timeout(PATIENCE, next(watch)).await.expect("the list of devices changes in time")
}

#[test]
fn free_seats_of_a_full_gpu_are_withdrawn() {
    let agent = start();
    let root = agent.folder.join("root");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let _pods = list_pods(&root, format!("{UUID}::1"));
        let (unmovable, reported) = watch::channel(VRAM_BYTES);
        let mut controller = controller::start(&root, reported).await;
        let (mut watch, _kubelet) = registered(&agent).await;
        loop {
            let [free, taken] = next_in_time(&mut watch).await;
            assert_eq!(free, "Unhealthy", "from the beginning");
            // The kubelet may not have answered before the first list.
            if taken == "Healthy" {
                break;
            }
        }
        unmovable.send_replace(0);
        assert_eq!(next_in_time(&mut watch).await, ["Healthy", "Healthy"]);
        controller.shutdown().await.unwrap();
    });
}
