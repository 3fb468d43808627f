//! Tests which parts of the rendered chart the DRA driver adds.

use serde_json::json;

use super::{render, render_for};

const OLDER: &str = "1.34.0";

#[test]
fn driver_is_off_by_default() {
    let Some(rendered) = render("{}") else { return };
    assert!(rendered.find("DeviceClass", "gpu.affinode.io").is_none());
    assert!(rendered.find("ValidatingAdmissionPolicy", "affinode-node-slices").is_none());
    let rules = rendered.get("ClusterRole", "affinode-node")["rules"].to_string();
    assert!(!rules.contains("resource.k8s.io"), "{rules}");
    let agents = rendered.get("DaemonSet", "affinode-node")["spec"].to_string();
    assert!(!agents.contains("--dra="), "{agents}");
}

#[test]
fn enabled_driver_has_class_rights_and_limits() {
    let Some(rendered) = render("dra: {enabled: true, oversubscription: 1.5}") else { return };
    let class = &rendered.get("DeviceClass", "gpu.affinode.io")["spec"];
    assert!(class["extendedResourceName"].is_null(), "{class}");
    let agents = &rendered.get("DaemonSet", "affinode-node")["spec"]["template"]["spec"];
    let arguments = agents["containers"][0]["args"].to_string();
    assert!(arguments.contains("--dra=true"), "{arguments}");
    assert!(arguments.contains("--dra-oversubscription=1.5"), "{arguments}");
    assert!(arguments.contains("--dra-limit-memory=true"), "{arguments}");
    let rules = rendered.get("ClusterRole", "affinode-node")["rules"].clone();
    let ours = |resource: &str| {
        let rules = rules.as_array().unwrap().iter();
        let mut found = rules.filter(|rule| rule["resources"] == json!([resource]));
        found.next().map(|rule| rule["verbs"].clone()).unwrap()
    };
    assert_eq!(ours("resourceclaims"), json!(["get"]));
    let verbs = json!(["get", "list", "watch", "create", "update", "delete"]);
    assert_eq!(ours("resourceslices"), verbs);
    // The rights are for all nodes, so a policy limits them to the agent's own.
    rendered.get("ValidatingAdmissionPolicy", "affinode-node-slices");
    rendered.get("ValidatingAdmissionPolicyBinding", "affinode-node-slices");
}

#[test]
fn pods_of_the_extended_resource_are_gpu_pods() {
    let values = "dra: {enabled: true, extendedResourceName: example.com/gpu}";
    let Some(rendered) = render(values) else { return };
    let class = &rendered.get("DeviceClass", "gpu.affinode.io")["spec"];
    assert_eq!(class["extendedResourceName"], "example.com/gpu");
    let policy = rendered.get("MutatingAdmissionPolicy", "affinode")["spec"].to_string();
    assert!(policy.contains("name == 'example.com/gpu'"), "{policy}");
    let older = render_for(OLDER, values).unwrap().unwrap();
    let webhook = older.get("Deployment", "affinode-webhook")["spec"].to_string();
    assert!(webhook.contains("--resource=example.com/gpu"), "{webhook}");
    assert!(webhook.contains("--device-class=gpu.affinode.io"), "{webhook}");
}

/// Kubernetes lets pods request devices of any class by a resource with the name of the class.
#[test]
fn pods_of_the_implicit_resource_are_gpu_pods() {
    let name = "deviceclass.resource.kubernetes.io/gpu.affinode.io";
    for (dra, expected) in [(true, true), (false, false)] {
        let values = format!("dra: {{enabled: {dra}}}");
        let Some(rendered) = render(&values) else { return };
        let policy = rendered.get("MutatingAdmissionPolicy", "affinode")["spec"].to_string();
        assert_eq!(policy.contains(&format!("name == '{name}'")), expected, "{policy}");
        let older = render_for(OLDER, &values).unwrap().unwrap();
        let webhook = older.get("Deployment", "affinode-webhook")["spec"].to_string();
        assert_eq!(webhook.contains(&format!("--resource={name}")), expected, "{webhook}");
        let calls = older.get("MutatingWebhookConfiguration", "affinode-webhook").to_string();
        assert_eq!(calls.contains(&format!("name == '{name}'")), expected, "{calls}");
    }
}

#[test]
fn api_servers_without_the_api_are_refused() {
    let Some(refused) = render_for("1.33.0", "dra: {enabled: true}") else { return };
    let why = refused.err().unwrap();
    assert!(why.contains("Kubernetes serves resource.k8s.io/v1 from 1.34"), "{why}");
}
