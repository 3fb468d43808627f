use serde_json::{Value, json};

use super::*;
use crate::node::dra::policy::{API_VERSION, KIND};

fn result(request: &str, device: &str) -> Value {
    json!({"request": request, "driver": DRIVER, "pool": "one", "device": device, "shareID": "s-1"})
}

fn config(requests: &[&str], policy: &Value) -> Value {
    json!({"source": "FromClaim", "requests": requests, "opaque": {
        "driver": DRIVER,
        "parameters": {"apiVersion": API_VERSION, "kind": KIND, "policy": policy},
    }})
}

fn claim(results: &[Value], configs: &[Value]) -> ResourceClaim {
    serde_json::from_value(json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": {"namespace": "ml", "name": "gpu", "uid": "u-1"},
        "spec": {},
        "status": {"allocation": {"devices": {"results": results, "config": configs}}},
    }))
    .unwrap()
}

fn refusal(claim: &ResourceClaim, uid: &str) -> String {
    allocated(claim, uid, "one").unwrap_err().to_string()
}

#[test]
fn amounts_of_the_api_server_are_parsed() {
    for (text, expected) in [
        ("614Mi", Some(614 << 20)),
        ("20Gi", Some(20 << 30)),
        ("7Ki", Some(7 << 10)),
        ("5k", Some(5_000)),
        ("1000341504", Some(1_000_341_504)),
        ("3e9", Some(3_000_000_000)),
        ("2E", Some(2_000_000_000_000_000_000)),
        ("0", Some(0)),
        ("", None),
        ("Gi", None),
        ("-1Gi", None),
        ("1.5Gi", None),
        ("1KMi", None),
        ("1i", None),
        ("3e99", None),
        ("99Ei", None),
    ] {
        assert_eq!(bytes(text), expected, "{text:?}");
    }
}

#[test]
fn allocated_memory_is_read() {
    let mut share = result("gpu", "gpu-a");
    share["consumedCapacity"] = json!({"memory": "614Mi"});
    let found = allocated(&claim(&[share.clone()], &[]), "u-1", "one").unwrap();
    assert_eq!(found[0].memory_bytes, Some(614 << 20));
    share["consumedCapacity"] = json!({"memory": "much"});
    assert!(refusal(&claim(&[share], &[]), "u-1").contains(r#"the invalid memory amount "much""#));
}

#[test]
fn devices_of_other_drivers_are_left_out() {
    let mut other = result("nic", "nic-0");
    other["driver"] = "nic.example.com".into();
    let found = allocated(&claim(&[other, result("gpu", "gpu-a")], &[]), "u-1", "one").unwrap();
    let expected = AllocatedGpu {
        request: "gpu".into(),
        pool: "one".into(),
        device: "gpu-a".into(),
        share_id: Some("s-1".into()),
        policy: Annotations::new(),
        memory_bytes: None,
    };
    assert_eq!(found, [expected]);
}

#[test]
fn policy_applies_to_the_named_requests() {
    let mut of_class = config(&[], &json!({"priority": 9, "idle-timeout": "9s"}));
    of_class["source"] = "FromClass".into();
    let configs = [
        config(&[], &json!({"offload": "pressure", "priority": 1})),
        config(&["a"], &json!({"priority": 2})),
        config(&["b/small"], &json!({"priority": 3})),
        json!({"source": "FromClaim", "opaque": {"driver": "nic.example.com", "parameters": {}}}),
        of_class,
    ];
    let results = ["a", "b/small", "b/large"].map(|request| result(request, "gpu-a"));
    let found = allocated(&claim(&results, &configs), "u-1", "one").unwrap();
    let priorities: Vec<_> =
        found.iter().map(|gpu| gpu.policy["affinode.io/priority"].as_str()).collect();
    assert_eq!(priorities, ["2", "3", "1"]);
    assert!(found.iter().all(|gpu| gpu.policy["affinode.io/offload"] == "pressure"));
    assert!(found.iter().all(|gpu| gpu.policy["affinode.io/idle-timeout"] == "9s"));
}

/// A device class sets `latency-sensitive`, and a claim of this class sets `offload`. Both
/// annotations determine when the container is offloaded, so only the annotation of the claim must
/// remain.
#[test]
fn claim_replaces_the_same_setting_of_its_class() {
    let mut of_class = config(&[], &json!({"latency-sensitive": true, "priority": 9}));
    of_class["source"] = "FromClass".into();
    let configs = [config(&[], &json!({"offload": "eager"})), of_class];
    let found = allocated(&claim(&[result("gpu", "gpu-a")], &configs), "u-1", "one").unwrap();
    let names: Vec<_> = found[0].policy.keys().map(String::as_str).collect();
    assert_eq!(names, ["affinode.io/offload", "affinode.io/priority"]);
}

#[test]
fn claims_that_are_not_for_this_node_are_refused() {
    let ours = claim(&[result("gpu", "gpu-a")], &[]);
    assert!(refusal(&ours, "u-2").contains("was replaced"));
    let mut elsewhere = result("gpu", "gpu-a");
    elsewhere["pool"] = "two".into();
    assert!(refusal(&claim(&[elsewhere], &[]), "u-1").contains("pool two"));
    assert!(refusal(&claim(&[], &[]), "u-1").contains("no device of driver"));
    let mut none = ours;
    none.status = None;
    assert!(refusal(&none, "u-1").contains("no device of driver"));
    let many = vec![result("gpu", "gpu-a"); 33];
    assert!(refusal(&claim(&many, &[]), "u-1").contains("33 devices"));
}

#[test]
fn invalid_policy_names_claim_and_position() {
    let configs = [config(&[], &json!({})), config(&[], &json!({"offload": "never"}))];
    let error = allocated(&claim(&[result("gpu", "gpu-a")], &configs), "u-1", "one").unwrap_err();
    let text = crate::error_chain::chain(&error);
    assert!(text.contains("claim ml/gpu: opaque configuration 1"), "{text}");
    assert!(text.contains("accepted: auto, eager"), "{text}");
}
