//! Tests that a full GPU has a taint. The test acts as the kubelet and as the controller of the node.

use serde_json::json;
use tokio::sync::watch;

use super::{UUID, register, start};
use crate::{
    api::SLICES,
    controller::{self, VRAM_BYTES},
};

/// An agent starts while a GPU is full. The slice of the earlier agent has other devices, so the
/// agent replaces it.
#[test]
fn restarted_agent_keeps_the_taint() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let agent = start(1);
        let (_unmovable, reported) = watch::channel(VRAM_BYTES);
        let _controller = controller::start(&agent.folder.join("root"), reported).await;
        let device = json!({
            "name": UUID.to_lowercase(), "attributes": { "load": { "string": "busy" } },
            "taints": [{ "key": "gpu.affinode.io/full", "effect": "NoSchedule" }],
        });
        let pool = json!({ "name": "one", "generation": 5, "resourceSliceCount": 1 });
        let path = format!("{SLICES}/earlier");
        let spec = json!({
            "driver": "gpu.affinode.io", "nodeName": "one", "pool": pool, "devices": [device],
        });
        agent.api.put(&path, json!({ "metadata": { "name": "earlier" }, "spec": spec }));
        let test = move || {
            register(&agent);
            agent
                .api
                .until("the replacement", |api| api.get(&path)["spec"]["pool"]["generation"] != 5);
            let device = agent.api.get(&path)["spec"]["devices"][0].clone();
            assert_eq!(device["capacity"]["memory"]["value"], "1536Mi", "{device}");
            assert_eq!(device["taints"][0]["key"], "gpu.affinode.io/full", "{device}");
        };
        tokio::task::spawn_blocking(test).await.unwrap();
    });
}
