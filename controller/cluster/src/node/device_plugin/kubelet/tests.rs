//! Tests of the plugin's registration at a fake kubelet.

use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::FutureExt;

use super::*;
use crate::node::device_plugin::fake_kubelet::{FakeKubelet, cdi, next, seat_list};

struct Linked {
    folder: tempfile::TempDir,
    link: tokio::task::JoinHandle<()>,
}

impl Drop for Linked {
    fn drop(&mut self) {
        self.link.abort();
    }
}

/// Creates a plugin whose `run` has not been called yet. When it runs, it registers again after
/// `unwatched_looks` checks in which no kubelet watches the list of seats.
fn unlinked(folder: &Path, seats: SeatList, unwatched_looks: u32) -> KubeletLink {
    let tick = Duration::from_millis(5);
    KubeletLink {
        folder: folder.to_owned(),
        resource: "affinode.io/gpu".parse().unwrap(),
        seats: watch::Sender::new(seats),
        lookup: cdi(folder, &["GPU-a"]),
        pace: LinkPace { look: tick, retry: tick, unwatched_looks },
    }
}

/// Runs a plugin in a task. The plugin registers again after `unwatched_looks` checks in which no
/// kubelet watches the list of seats.
fn link(seats: SeatList, unwatched_looks: u32) -> Linked {
    let folder = tempfile::tempdir().unwrap();
    let link = unlinked(folder.path(), seats, unwatched_looks);
    Linked { folder, link: tokio::spawn(link.run()) }
}

#[tokio::test]
async fn kubelet_gets_the_seats_after_registration() {
    let linked = link(seat_list(&[("GPU-a", 2)]), u32::MAX);
    let mut kubelet = FakeKubelet::start(linked.folder.path());
    let registered = kubelet.registration().await;
    let expected = RegisterRequest {
        version: "v1beta1".into(),
        endpoint: "gpu.affinode.io.sock".into(),
        resource_name: "affinode.io/gpu".into(),
        options: Some(service::options()),
    };
    assert_eq!(registered, expected);
    let plugin = kubelet.plugin(&registered);
    let mut watch = plugin.watch().await;
    assert_eq!(next(&mut watch).await, ["GPU-a::0 Healthy", "GPU-a::1 Healthy"]);
    let answer = plugin.allocate(&["GPU-a::1"]).await.unwrap();
    assert_eq!(answer.container_responses[0].cdi_devices[0].name, "nvidia.com/gpu=GPU-a");
}

#[tokio::test]
async fn plugin_without_gpus_does_not_register() {
    let folder = tempfile::tempdir().unwrap();
    let _kubelet = FakeKubelet::start(folder.path());
    let link = unlinked(folder.path(), SeatList::default(), u32::MAX);
    assert!(link.kubelet_socket().now_or_never().is_none());
    link.seats.send_replace(seat_list(&[("GPU-a", 1)]));
    assert!(link.kubelet_socket().now_or_never().is_some());
}

#[tokio::test]
async fn new_kubelet_is_registered_at_again() {
    let linked = link(seat_list(&[("GPU-a", 1)]), u32::MAX);
    let folder = linked.folder.path();
    let mut first = FakeKubelet::start(folder);
    first.registration().await;
    // A kubelet that starts removes all sockets, and makes its own.
    drop(first);
    let _ = fs::remove_file(folder.join(ENDPOINT));
    let mut second = FakeKubelet::start(folder);
    let registered = second.registration().await;
    assert_eq!(next(&mut second.plugin(&registered).watch().await).await, ["GPU-a::0 Healthy"]);
    // The socket of a kubelet can also be replaced while the plugin's socket stays.
    let mut third = FakeKubelet::start(folder);
    let registered = third.registration().await;
    assert_eq!(next(&mut third.plugin(&registered).watch().await).await, ["GPU-a::0 Healthy"]);
}

#[tokio::test]
async fn removed_socket_is_made_again() {
    let linked = link(seat_list(&[("GPU-a", 1)]), u32::MAX);
    let mut kubelet = FakeKubelet::start(linked.folder.path());
    kubelet.registration().await;
    fs::remove_file(linked.folder.path().join(ENDPOINT)).unwrap();
    let registered = kubelet.registration().await;
    assert_eq!(next(&mut kubelet.plugin(&registered).watch().await).await, ["GPU-a::0 Healthy"]);
}

#[tokio::test]
async fn unwatched_plugin_registers_again() {
    let linked = link(seat_list(&[("GPU-a", 1)]), 3);
    let mut kubelet = FakeKubelet::start(linked.folder.path());
    kubelet.registration().await;
    let registered = kubelet.registration().await;
    assert_eq!(registered.resource_name, "affinode.io/gpu");
}

#[tokio::test]
async fn refused_registration_is_tried_again() {
    let linked = link(seat_list(&[("GPU-a", 1)]), u32::MAX);
    let refuse = Arc::new(AtomicBool::new(true));
    let answer = {
        let refuse = Arc::clone(&refuse);
        move |_: &RegisterRequest| match refuse.load(Ordering::Relaxed) {
            true => Err(Status::invalid_argument("the version is not supported")),
            false => Ok(Empty {}),
        }
    };
    let mut kubelet = FakeKubelet::answering(linked.folder.path(), answer);
    kubelet.registration().await;
    refuse.store(false, Ordering::Relaxed);
    let registered = kubelet.registration().await;
    assert_eq!(registered.endpoint, ENDPOINT);
}

#[tokio::test]
async fn ended_plugin_leaves_no_socket() {
    let mut linked = link(seat_list(&[("GPU-a", 1)]), u32::MAX);
    let mut kubelet = FakeKubelet::start(linked.folder.path());
    kubelet.registration().await;
    let socket = linked.folder.path().join(ENDPOINT);
    assert!(socket.exists());
    linked.link.abort();
    assert!((&mut linked.link).await.unwrap_err().is_cancelled());
    assert!(!socket.exists());
}

#[tokio::test]
async fn error_names_the_socket_of_the_kubelet() {
    let folder = tempfile::tempdir().unwrap();
    let error = connect(folder.path()).await.unwrap_err().to_string();
    assert!(error.contains("kubelet.sock") && error.contains("kubelet runs"), "{error}");
}
