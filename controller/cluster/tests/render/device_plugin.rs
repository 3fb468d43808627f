//! Tests which parts of the rendered chart the device plugin adds.

use super::{render, render_for};

const ENABLED: &str = "devicePlugin: {enabled: true, seats: 3}";

#[test]
fn device_plugin_is_off_by_default() {
    let Some(rendered) = render("{}") else { return };
    let agents = rendered.get("DaemonSet", "affinode-node")["spec"].to_string();
    assert!(!agents.contains("--device-plugin"), "{agents}");
    let policy = rendered.get("MutatingAdmissionPolicy", "affinode")["spec"].to_string();
    assert!(!policy.contains("affinode.io/gpu'"), "{policy}");
}

#[test]
fn enabled_device_plugin_needs_no_further_right() {
    let (Some(rendered), Some(without)) = (render(ENABLED), render("{}")) else { return };
    let agents = &rendered.get("DaemonSet", "affinode-node")["spec"]["template"]["spec"];
    let arguments = agents["containers"][0]["args"].to_string();
    for argument in [
        "--device-plugin=true",
        "--device-plugin-resource=affinode.io/gpu",
        "--device-plugin-seats=3",
        "--device-plugin-dir=/var/lib/kubelet/device-plugins",
        "--dra-oversubscription=2",
        "--dra-cdi-dir=/run/cdi",
        "--dra-cdi-kind=nvidia.com/gpu",
    ] {
        assert!(arguments.contains(&format!("\"{argument}\"")), "{argument}: {arguments}");
    }
    assert!(!arguments.contains("--dra=") && !arguments.contains("--dra-kubelet-dir"));
    let rules =
        |rendered: &super::Rendered| rendered.get("ClusterRole", "affinode-node")["rules"].clone();
    assert_eq!(rules(&rendered), rules(&without));
    assert!(rendered.find("DeviceClass", "gpu.affinode.io").is_none());
}

#[test]
fn pods_with_a_seat_are_gpu_pods() {
    let Some(rendered) = render(ENABLED) else { return };
    let policy = rendered.get("MutatingAdmissionPolicy", "affinode")["spec"].to_string();
    assert!(policy.contains("name == 'affinode.io/gpu'"), "{policy}");
    let values = "devicePlugin: {enabled: true, resourceName: example.com/seat}";
    let older = render_for("1.30.0", values).unwrap().unwrap();
    let webhook = older.get("Deployment", "affinode-webhook")["spec"].to_string();
    assert!(webhook.contains("--resource=example.com/seat"), "{webhook}");
}

#[test]
fn one_gpu_is_not_offered_twice() {
    let both = "{devicePlugin: {enabled: true}, dra: {enabled: true}}";
    let Some(refused) = render_for("1.36.0", both) else { return };
    let why = refused.err().unwrap();
    assert!(why.contains("would be given out twice; set one of them to false"), "{why}");
}

#[test]
fn odd_resource_names_and_seats_are_refused() {
    for (values, named) in [
        ("devicePlugin: {resourceName: gpu}", "resourceName"),
        ("devicePlugin: {seats: 17}", "seats"),
        ("devicePlugin: {seats: 1.5}", "seats"),
    ] {
        let Some(refused) = render_for("1.36.0", values) else { return };
        let why = refused.err().unwrap();
        assert!(why.contains(named), "{why}");
    }
}
