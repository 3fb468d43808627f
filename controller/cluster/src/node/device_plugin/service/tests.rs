//! Tests the gRPC service of the device plugin. The tests call the service over its socket, as a
//! kubelet does.

use super::*;
use crate::node::{
    device_plugin::{
        fake_kubelet::{Plugin, cdi, next, seat_list},
        messages::ContainerPreferredAllocationRequest,
        seats::GpuFault,
    },
    dra::{services, sockets::NodeSocket},
};

struct Served {
    plugin: Plugin,
    seats: watch::Sender<SeatList>,
    _folder: tempfile::TempDir,
    _socket: NodeSocket,
}

/// Serves GPU-a and GPU-b with two seats each, and GPU-c with one seat. Only GPU-a and GPU-b have
/// CDI devices.
fn serve() -> Served {
    let folder = tempfile::tempdir().unwrap();
    let seats = watch::Sender::new(seat_list(&[("GPU-a", 2), ("GPU-b", 2), ("GPU-c", 1)]));
    let lookup = cdi(folder.path(), &["GPU-a", "GPU-b"]);
    let service = SeatService { seats: seats.clone(), lookup };
    let path = folder.path().join("plugin.sock");
    let (listener, socket) = NodeSocket::bind(&path).unwrap();
    let serving = services::serve(listener, move |request| service.clone().answer(request));
    tokio::spawn(async { serving.await.unwrap() });
    Served { plugin: Plugin(path), seats, _folder: folder, _socket: socket }
}

#[tokio::test]
async fn options_promise_only_what_is_served() {
    let served = serve();
    let told: DevicePluginOptions = served.plugin.call(OPTIONS, Empty {}).await.unwrap();
    assert!(told.get_preferred_allocation_available && !told.pre_start_required, "{told:?}");
    let start = "/v1beta1.DevicePlugin/PreStartContainer";
    let answer: Result<Empty, Status> = served.plugin.call(start, Empty {}).await;
    assert_eq!(answer.unwrap_err().code(), tonic::Code::Unimplemented);
}

#[tokio::test]
async fn each_change_is_sent_to_watchers() {
    let served = serve();
    let mut watch = served.plugin.watch().await;
    assert_eq!(next(&mut watch).await.len(), 5);
    served.seats.send_modify(|seats| seats.gpus[0].fault = Some(GpuFault::Gone));
    assert_eq!(next(&mut watch).await[..2], ["GPU-a::0 Unhealthy", "GPU-a::1 Unhealthy"]);
    served.seats.send_modify(|seats| seats.gpus[0].fault = None);
    assert_eq!(next(&mut watch).await[0], "GPU-a::0 Healthy");
    assert_eq!(served.seats.receiver_count(), 1);
    drop(watch);
    served.seats.closed().await;
}

#[tokio::test]
async fn watchers_are_limited() {
    let served = serve();
    let taken: Vec<_> = (0..MAX_WATCHERS).map(|_| served.seats.subscribe()).collect();
    let answer: Result<ListAndWatchResponse, Status> = served.plugin.call(LIST, Empty {}).await;
    assert_eq!(answer.unwrap_err().code(), tonic::Code::ResourceExhausted);
    drop(taken);
    assert_eq!(next(&mut served.plugin.watch().await).await.len(), 5);
}

#[tokio::test]
async fn container_gets_each_gpu_of_its_seats_once() {
    let served = serve();
    let answer = served.plugin.allocate(&["GPU-b::1", "GPU-a::0", "GPU-b::0"]).await.unwrap();
    let container = &answer.container_responses[0];
    let names: Vec<&str> = container.cdi_devices.iter().map(|device| &*device.name).collect();
    assert_eq!(names, ["nvidia.com/gpu=GPU-a", "nvidia.com/gpu=GPU-b"]);
    assert_eq!(container.envs["NVIDIA_VISIBLE_DEVICES"], "void");
}

#[tokio::test]
async fn unknown_seats_are_named() {
    let served = serve();
    let long = "y".repeat(10_000);
    let many = ["GPU-a::0", "GPU-a::9", "GPU-z::0", "x\n", &long, "1", "2", "3", "4", "5"];
    let error = served.plugin.allocate(&many).await.unwrap_err();
    assert_eq!(error.code(), tonic::Code::FailedPrecondition);
    let why = error.message();
    assert!(why.contains(r#""GPU-a::9", "GPU-z::0", "x\n""#) && !why.contains("GPU-a::0"), "{why}");
    assert!(why.contains("9 of the request") && why.len() < 500, "{why}");
    assert!(served.plugin.allocate(&[]).await.is_err(), "no seat");
}

#[tokio::test]
async fn faulty_gpu_is_not_given_to_a_container() {
    let served = serve();
    served.seats.send_modify(|seats| seats.gpus[0].fault = Some(GpuFault::Gone));
    let error = served.plugin.allocate(&["GPU-b::0", "GPU-a::0"]).await.unwrap_err();
    assert!(error.message().contains("GPU-a cannot be used: NVML does not see"), "{error}");
    let error = served.plugin.allocate(&["GPU-c::0"]).await.unwrap_err();
    assert!(error.message().contains("nvidia-ctk cdi generate"), "{error}");
}

#[tokio::test]
async fn seats_are_chosen_for_each_container() {
    let served = serve();
    let ask = |available: &[&str], included: &[&str], allocation_size| {
        let ids = |ids: &[&str]| ids.iter().map(|id| (*id).to_owned()).collect();
        ContainerPreferredAllocationRequest {
            available_device_ids: ids(available),
            must_include_device_ids: ids(included),
            allocation_size,
        }
    };
    let free = ["GPU-a::1", "GPU-b::0", "GPU-b::1"];
    let container_requests =
        vec![ask(&free, &[], 1), ask(&free, &["GPU-b::1"], 2), ask(&free, &[], -1)];
    let request = PreferredAllocationRequest { container_requests };
    let answer: PreferredAllocationResponse = served.plugin.call(PREFER, request).await.unwrap();
    let chosen: Vec<_> = answer.container_responses.into_iter().map(|it| it.device_ids).collect();
    assert_eq!(chosen, [vec!["GPU-b::0"], vec!["GPU-b::1", "GPU-a::1"], vec![]]);
}
