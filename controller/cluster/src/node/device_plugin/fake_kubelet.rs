//! A fake kubelet for tests. It accepts the registration of a device plugin, and calls the plugin
//! over the plugin's socket.

use std::path::{Path, PathBuf};

use affinode_controller::inventory::gpu_facts::{GpuFacts, NodeGpus};
use prost::Message;
use tokio::{
    sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
    task::JoinHandle,
};
use tonic::{
    Request, Status, Streaming,
    client::Grpc,
    codegen::http::uri::PathAndQuery,
    transport::{Channel, Endpoint},
};
use tonic_prost::ProstCodec;

use super::{
    kubelet::{KUBELET, REGISTER},
    messages::{
        AllocateRequest, AllocateResponse, ContainerAllocateRequest, Device, Empty,
        ListAndWatchResponse, RegisterRequest,
    },
    seats::{SeatList, SeatedGpu},
    service::{ALLOCATE, LIST},
};
use crate::node::dra::{
    cdi_lookup::CdiLookup,
    services::{self, try_unary},
    sockets::NodeSocket,
};

/// Creates a list of the given GPUs: the UUID and the number of seats of each.
pub fn seat_list(gpus: &[(&str, u32)]) -> SeatList {
    let gpu = |(index, (uuid, seats)): (u32, &(&str, u32))| SeatedGpu {
        uuid: (*uuid).to_owned(),
        index,
        seats: *seats,
        fault: None,
        kept_seats: None,
    };
    SeatList { gpus: (0..).zip(gpus).map(gpu).collect() }
}

/// Creates a reading of GPUs with these UUIDs. Each GPU has 1 GiB of VRAM, and the node has 64 GiB
/// of host memory.
pub fn reading(uuids: &[&str]) -> NodeGpus {
    let gpu = |(index, uuid): (u32, &&str)| GpuFacts {
        index,
        uuid: (*uuid).to_owned(),
        vram_bytes: 1 << 30,
        ..GpuFacts::default()
    };
    NodeGpus {
        host_memory_bytes: 64 << 30,
        gpus: (0..).zip(uuids).map(gpu).collect(),
        ..NodeGpus::default()
    }
}

/// Writes a CDI specification with GPUs of these UUIDs into `folder`. Returns a look-up that
/// searches this folder.
pub fn cdi(folder: &Path, uuids: &[&str]) -> CdiLookup {
    let devices: Vec<_> = uuids.iter().map(|name| serde_json::json!({"name": name})).collect();
    let spec = serde_json::json!({"kind": "nvidia.com/gpu", "devices": devices});
    std::fs::write(folder.join("nvidia.json"), spec.to_string()).unwrap();
    CdiLookup { folders: vec![folder.to_owned()], kind: "nvidia.com/gpu".into() }
}

/// Returns the identity and the health of each device as text.
pub fn health(list: &[Device]) -> Vec<String> {
    list.iter().map(|device| format!("{} {}", device.id, device.health)).collect()
}

/// A fake kubelet that listens on its socket. The socket is removed when the value is dropped.
pub struct FakeKubelet {
    folder: PathBuf,
    registered: UnboundedReceiver<RegisterRequest>,
    server: JoinHandle<()>,
    _socket: NodeSocket,
}

impl Drop for FakeKubelet {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl FakeKubelet {
    /// Starts a kubelet that accepts registrations.
    pub fn start(folder: &Path) -> FakeKubelet {
        FakeKubelet::answering(folder, |_| Ok(Empty {}))
    }

    /// Starts a kubelet that replies to each registration with the result of `answer`.
    pub fn answering(
        folder: &Path,
        answer: impl Fn(&RegisterRequest) -> Result<Empty, Status> + Clone + Send + Sync + 'static,
    ) -> FakeKubelet {
        let (listener, socket) = NodeSocket::bind(&folder.join(KUBELET)).unwrap();
        let (sender, registered) = unbounded_channel();
        let serving = services::serve(listener, move |request| {
            assert_eq!(request.uri().path(), REGISTER);
            let (sender, answer): (UnboundedSender<_>, _) = (sender.clone(), answer.clone());
            try_unary(request, async move |asked: RegisterRequest| {
                let reply = answer(&asked);
                sender.send(asked).unwrap();
                reply
            })
        });
        let server = tokio::spawn(async { serving.await.unwrap() });
        FakeKubelet { folder: folder.to_owned(), registered, server, _socket: socket }
    }

    /// Waits for the next registration request of a plugin.
    pub async fn registration(&mut self) -> RegisterRequest {
        self.registered.recv().await.unwrap()
    }

    /// Returns a client of the plugin that sent this registration request.
    pub fn plugin(&self, registered: &RegisterRequest) -> Plugin {
        Plugin(self.folder.join(&registered.endpoint))
    }
}

/// A client of the plugin that listens at this socket path.
pub struct Plugin(pub PathBuf);

impl Plugin {
    async fn connect(&self) -> Grpc<Channel> {
        let endpoint = Endpoint::from_shared(format!("unix://{}", self.0.display())).unwrap();
        let mut client = Grpc::new(endpoint.connect().await.unwrap());
        client.ready().await.unwrap();
        client
    }

    /// Calls a method of the plugin and waits for its answer.
    pub async fn call<Q, A>(&self, method: &'static str, request: Q) -> Result<A, Status>
    where
        Q: Message + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        let codec = ProstCodec::<Q, A>::default();
        let path = PathAndQuery::from_static(method);
        let mut client = self.connect().await;
        Ok(client.unary(Request::new(request), path, codec).await?.into_inner())
    }

    /// Requests seats for one container.
    pub async fn allocate(&self, ids: &[&str]) -> Result<AllocateResponse, Status> {
        let device_ids = ids.iter().map(|id| (*id).to_owned()).collect();
        let container_requests = vec![ContainerAllocateRequest { device_ids }];
        self.call(ALLOCATE, AllocateRequest { container_requests }).await
    }

    /// Opens the stream on which the plugin sends its list of devices after each change.
    pub async fn watch(&self) -> Streaming<ListAndWatchResponse> {
        let codec = ProstCodec::<Empty, ListAndWatchResponse>::default();
        let path = PathAndQuery::from_static(LIST);
        let mut client = self.connect().await;
        let answer = client.server_streaming(Request::new(Empty {}), path, codec).await;
        answer.unwrap().into_inner()
    }
}

/// Waits for the next list of devices on a stream, and returns the health of each device.
pub async fn next(watch: &mut Streaming<ListAndWatchResponse>) -> Vec<String> {
    health(&watch.message().await.unwrap().unwrap().devices)
}
