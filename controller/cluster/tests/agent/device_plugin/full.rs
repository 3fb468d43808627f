//! Tests that the device plugin withdraws the free seats of a full GPU. The test acts as the kubelet
//! and as the controller of the node.

use std::{fs, path::Path, sync::Arc};

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
use affinode_proto::{
    api::{
        control::{EventsRequest, EventsResponse, Gpu, ListRequest, ListResponse},
        control_ttrpc::{Control, create_control},
    },
    paths::CONTROL_SOCKET,
};
use async_trait::async_trait;
use tokio::{sync::watch, time::timeout};
use tonic::Streaming;
use ttrpc::r#async::{Server, TtrpcContext};

use super::{next, registered, start};
use crate::{api::PATIENCE, dra::UUID};

const VRAM_BYTES: u64 = 1 << 30;

/// A controller that reports one GPU.
struct FakeController {
    /// VRAM of the GPU that no offload can free.
    unmovable_bytes: watch::Receiver<u64>,
}

#[async_trait]
impl Control for FakeController {
    async fn events(&self, _: &TtrpcContext, _: EventsRequest) -> ttrpc::Result<EventsResponse> {
        Ok(EventsResponse::default())
    }

    async fn list(&self, _: &TtrpcContext, _: ListRequest) -> ttrpc::Result<ListResponse> {
        let gpu = Gpu {
            uuid: UUID.into(),
            vram_total_bytes: VRAM_BYTES,
            vram_unmovable_bytes: *self.unmovable_bytes.borrow(),
            ..Gpu::default()
        };
        Ok(ListResponse { gpus: vec![gpu], ..ListResponse::default() })
    }
}

/// Starts the controller of a node, which serves until the returned server ends.
async fn controller(root: &Path, unmovable_bytes: watch::Receiver<u64>) -> Server {
    let run_dir = root.join("run/affinode");
    fs::create_dir_all(&run_dir).unwrap();
    let address = format!("unix://{}", run_dir.join(CONTROL_SOCKET).display());
    let service = create_control(Arc::new(FakeController { unmovable_bytes }));
    let mut server = Server::new().bind(&address).unwrap().register_service(service);
    server.start().await.unwrap();
    server
}

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
        let mut controller = controller(&root, reported).await;
        let (mut watch, _kubelet) = registered(&agent).await;
        assert_eq!(next_in_time(&mut watch).await, ["Healthy", "Healthy"]);
        assert_eq!(next_in_time(&mut watch).await, ["Unhealthy", "Healthy"]);
        unmovable.send_replace(0);
        assert_eq!(next_in_time(&mut watch).await, ["Healthy", "Healthy"]);
        controller.shutdown().await.unwrap();
    });
}
