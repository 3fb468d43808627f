//! A simulated controller of a node with one GPU.

use std::{fs, path::Path, sync::Arc};

use affinode_proto::{
    api::{
        control::{EventsRequest, EventsResponse, Gpu, ListRequest, ListResponse},
        control_ttrpc::{Control, create_control},
    },
    paths::CONTROL_SOCKET,
};
use async_trait::async_trait;
use tokio::sync::watch;
use ttrpc::r#async::{Server, TtrpcContext};

use crate::dra::UUID;

/// VRAM of the GPU.
pub const VRAM_BYTES: u64 = 1 << 30;

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
pub async fn start(root: &Path, unmovable_bytes: watch::Receiver<u64>) -> Server {
    let run_dir = root.join("run/affinode");
    fs::create_dir_all(&run_dir).unwrap();
    let address = format!("unix://{}", run_dir.join(CONTROL_SOCKET).display());
    let service = create_control(Arc::new(FakeController { unmovable_bytes }));
    let mut server = Server::new().bind(&address).unwrap().register_service(service);
    server.start().await.unwrap();
    server
}
