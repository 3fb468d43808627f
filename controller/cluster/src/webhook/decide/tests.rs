use std::collections::BTreeMap;

use clap::Parser;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    rules: NamespaceRules,
}

fn rules(arguments: &[&str]) -> NamespaceRules {
    Line::try_parse_from(["test"].iter().chain(arguments)).unwrap().rules
}

fn class() -> RuntimeClass {
    serde_json::from_value(json!({
        "apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass",
        "metadata": { "name": "affinode" }, "handler": "affinode",
        "overhead": { "podFixed": { "memory": "16Mi" } },
        "scheduling": { "nodeSelector": { "affinode.io/ready": "true" } },
    }))
    .unwrap()
}

/// Returns a pod with one container that requests one GPU.
fn gpu_pod() -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "job" },
        "spec": { "containers": [{
            "name": "main", "image": "cuda",
            "resources": { "limits": { "nvidia.com/gpu": "1" }, "requests": { "nvidia.com/gpu": "1" } },
        }] },
    })
}

/// Returns [`gpu_pod`] merged with these changes. A null removes a field.
fn with(changes: Value) -> Value {
    let mut pod = gpu_pod();
    json_patch::merge(&mut pod, &changes);
    pod
}

fn without_gpu(changes: Value) -> Value {
    let mut pod = with(json!({ "spec": { "containers": [{ "name": "main", "image": "cuda" }] } }));
    json_patch::merge(&mut pod, &changes);
    pod
}

fn typed(pod: &Value) -> Pod {
    serde_json::from_value(pod.clone()).unwrap()
}

/// Returns the decision about a pod in namespace `ml`, with default rules and an existing
/// RuntimeClass.
fn decision(pod: &Value) -> AdmissionDecision {
    decide(&typed(pod), "ml", &rules(&[]), Some(&class()), &Claims::new())
}

fn word(decision: &AdmissionDecision) -> &'static str {
    match decision {
        AdmissionDecision::Inject { .. } => "injected",
        AdmissionDecision::Leave(left) => left.word(),
        AdmissionDecision::Ask(_) => "asks",
    }
}

fn gpus(resource: &str, quantity: &str) -> Value {
    let limits = json!({ resource: quantity });
    json!([{ "name": "main", "image": "cuda", "resources": { "limits": limits } }])
}

#[test]
fn pods_of_every_kind() {
    let plain = json!([{ "name": "main", "image": "app" }]);
    let privileged = json!([{
        "name": "main", "image": "cuda", "securityContext": { "privileged": true },
        "resources": { "limits": { "nvidia.com/gpu": "1" } },
    }]);
    let daemon = json!({ "nodeAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": {
        "nodeSelectorTerms": [{ "matchFields": [
            { "key": "metadata.name", "operator": "In", "values": ["node-1"] },
        ] }],
    } } });
    let zone = json!({ "nodeAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": {
        "nodeSelectorTerms": [{ "matchExpressions": [
            { "key": "zone", "operator": "In", "values": ["a"] },
        ] }],
    } } });
    let table = [
        ("a GPU as a limit", gpu_pod(), "injected"),
        (
            "MIG",
            with(json!({ "spec": { "containers": gpus("nvidia.com/mig-1g.10gb", "1") } })),
            "injected",
        ),
        (
            "a shared GPU",
            with(json!({ "spec": { "containers": gpus("nvidia.com/gpu.shared", "2") } })),
            "injected",
        ),
        ("no GPU", without_gpu(json!({})), "no-gpu"),
        (
            "none of a GPU",
            with(json!({ "spec": { "containers": gpus("nvidia.com/gpu", "0") } })),
            "no-gpu",
        ),
        (
            "a fraction of a GPU, as a request to KAI",
            without_gpu(json!({ "metadata": { "annotations": { "gpu-fraction": "0.5" } } })),
            "injected",
        ),
        (
            "another device",
            with(json!({ "spec": { "containers": gpus("example.com/fpga", "1") } })),
            "no-gpu",
        ),
        (
            "a GPU only in an init container",
            without_gpu(json!({ "spec": { "initContainers": gpus("nvidia.com/gpu", "1") } })),
            "injected",
        ),
        (
            "a sidecar with a GPU",
            without_gpu(json!({ "spec": { "initContainers": [{
            "name": "side", "image": "cuda", "restartPolicy": "Always",
            "resources": { "limits": { "nvidia.com/gpu": "1" } },
        }] } })),
            "injected",
        ),
        (
            "an ephemeral container beside a GPU",
            with(
                json!({ "spec": { "ephemeralContainers": [{ "name": "debug", "image": "sh" }] } }),
            ),
            "injected",
        ),
        (
            "a GPU only in an ephemeral container, which API servers reject",
            without_gpu(json!({ "spec": { "ephemeralContainers": gpus("nvidia.com/gpu", "1") } })),
            "no-gpu",
        ),
        ("Windows in spec.os", with(json!({ "spec": { "os": { "name": "windows" } } })), "windows"),
        (
            "Windows in the node selector",
            with(json!({ "spec": { "nodeSelector": { "kubernetes.io/os": "windows" } } })),
            "windows",
        ),
        ("Linux in spec.os", with(json!({ "spec": { "os": { "name": "linux" } } })), "injected"),
        ("the host's processes", with(json!({ "spec": { "hostPID": true } })), "injected"),
        (
            "the host's network and IPC",
            with(json!({ "spec": { "hostNetwork": true, "hostIPC": true } })),
            "injected",
        ),
        ("a user namespace", with(json!({ "spec": { "hostUsers": false } })), "injected"),
        ("privileged", with(json!({ "spec": { "containers": privileged } })), "injected"),
        ("another class", with(json!({ "spec": { "runtimeClassName": "nvidia" } })), "other-class"),
        ("an empty class name", with(json!({ "spec": { "runtimeClassName": "" } })), "injected"),
        ("our class", with(json!({ "spec": { "runtimeClassName": "affinode" } })), "already"),
        (
            "opted out by label",
            with(json!({ "metadata": { "labels": { "affinode.io/inject": "ignore" } } })),
            "opted-out",
        ),
        (
            "opted out by annotation",
            with(json!({ "metadata": { "annotations": { "affinode.io/inject": "false" } } })),
            "opted-out",
        ),
        (
            "an inject label with a value that does not exclude",
            with(json!({ "metadata": { "labels": { "affinode.io/inject": "true" } } })),
            "injected",
        ),
        (
            "a mirror pod",
            with(
                json!({ "metadata": { "annotations": { "kubernetes.io/config.mirror": "abc" } } }),
            ),
            "mirror-pod",
        ),
        ("bound by name", with(json!({ "spec": { "nodeName": "node-1" } })), "bound-to-node"),
        ("of a DaemonSet", with(json!({ "spec": { "affinity": daemon } })), "bound-to-node"),
        ("with an affinity to a zone", with(json!({ "spec": { "affinity": zone } })), "injected"),
        (
            "a node selector that contradicts the class",
            with(json!({ "spec": { "nodeSelector": { "affinode.io/ready": "false" } } })),
            "node-selector",
        ),
        (
            "a node selector with the same value as the class",
            with(json!({ "spec": { "nodeSelector": { "affinode.io/ready": "true" } } })),
            "injected",
        ),
        (
            "an overhead in the pod",
            with(json!({ "spec": { "overhead": { "memory": "1Gi" } } })),
            "overhead",
        ),
        (
            "without a specification",
            json!({ "apiVersion": "v1", "kind": "Pod", "metadata": {} }),
            "no-gpu",
        ),
        (
            "nothing but containers",
            with(json!({ "metadata": null, "spec": { "containers": plain } })),
            "no-gpu",
        ),
    ];
    for (what, pod, expected) in table {
        assert_eq!(word(&decision(&pod)), expected, "{what}: {pod}");
    }
}

#[test]
fn excluded_namespace_overrides_all() {
    let decide = |namespace| {
        decide(&typed(&gpu_pod()), namespace, &rules(&[]), Some(&class()), &Claims::new())
    };
    assert_eq!(decide("kube-system"), AdmissionDecision::Leave(LeftAlone::Namespace));
    assert_eq!(word(&decide("kube-system-2")), "injected");
    let rules = rules(&["--exclude-namespace", "team-*,other"]);
    let decide = |namespace| {
        super::decide(&typed(&gpu_pod()), namespace, &rules, Some(&class()), &Claims::new())
    };
    assert_eq!(decide("team-a"), AdmissionDecision::Leave(LeftAlone::Namespace));
    assert_eq!(word(&decide("kube-system")), "injected", "the default list is replaced");
}

#[test]
fn missing_class_leaves_pods_and_warns() {
    let decision = decide(&typed(&gpu_pod()), "ml", &rules(&[]), None, &Claims::new());
    assert_eq!(decision, AdmissionDecision::Leave(LeftAlone::NoClass("affinode".into())));
    let AdmissionDecision::Leave(left) = decision else { unreachable!() };
    assert!(left.warns());
    let none = decide(&typed(&without_gpu(json!({}))), "ml", &rules(&[]), None, &Claims::new());
    assert_eq!(
        none,
        AdmissionDecision::Leave(LeftAlone::NoGpu),
        "a pod without a GPU gets no warning"
    );
}

#[test]
fn replaced_class_leaves_no_fields() {
    let rules = rules(&["--replace-class", "nvidia"]);
    let pod = with(json!({ "spec": {
        "runtimeClassName": "nvidia", "overhead": { "memory": "64Mi" },
    } }));
    let AdmissionDecision::Inject { patch, .. } =
        decide(&typed(&pod), "ml", &rules, Some(&class()), &Claims::new())
    else {
        panic!("the class must be replaced");
    };
    let mut after = pod.clone();
    json_patch::patch(&mut after, &patch).unwrap();
    assert_eq!(after["spec"]["runtimeClassName"], "affinode");
    assert_eq!(after["spec"]["overhead"], Value::Null, "the API server adds the new overhead");
    let kata = with(json!({ "spec": { "runtimeClassName": "kata" } }));
    let decision = decide(&typed(&kata), "ml", &rules, Some(&class()), &Claims::new());
    assert_eq!(decision, AdmissionDecision::Leave(LeftAlone::OtherClass("kata".into())));
}

fn claiming(claim: Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "job" },
        "spec": {
            "containers": [{ "name": "main", "image": "cuda", "resources": { "claims": [{ "name": "gpu" }] } }],
            "resourceClaims": [claim],
        },
    })
}

#[test]
fn claim_decides_by_its_device_class() {
    let own = ClaimName::Claim("one".into());
    let made = ClaimName::Template("many".into());
    for (claim, name) in [
        (json!({ "name": "gpu", "resourceClaimName": "one" }), own),
        (json!({ "name": "gpu", "resourceClaimTemplateName": "many" }), made),
    ] {
        let pod = claiming(claim);
        assert_eq!(decision(&pod), AdmissionDecision::Ask([name.clone()].into()));
        let answered = |classes: Option<Vec<String>>| {
            let claims = BTreeMap::from([(name.clone(), classes)]);
            decide(&typed(&pod), "ml", &rules(&[]), Some(&class()), &claims)
        };
        let gpu = answered(Some(vec!["net.example.com".into(), "gpu.nvidia.com".into()]));
        assert!(
            matches!(gpu, AdmissionDecision::Inject { because, .. } if because == "gpu.nvidia.com")
        );
        assert_eq!(
            answered(Some(vec!["net.example.com".into()])),
            AdmissionDecision::Leave(LeftAlone::NoGpu)
        );
        assert_eq!(answered(None), AdmissionDecision::Leave(LeftAlone::Claim(name.clone())));
    }
}

#[test]
fn a_claim_that_no_container_uses_is_not_read() {
    let mut pod = claiming(json!({ "name": "other", "resourceClaimName": "one" }));
    assert_eq!(decision(&pod), AdmissionDecision::Leave(LeftAlone::NoGpu));
    // No claim is read for a pod that requests a GPU by resource.
    pod["spec"]["containers"] = gpus("nvidia.com/gpu", "1");
    assert_eq!(word(&decision(&pod)), "injected");
}

#[test]
fn quantities_of_nothing_are_nothing() {
    for nothing in ["0", "0.0", "0k", "-0", "0e9", ""] {
        assert!(is_zero(&Quantity(nothing.into())), "{nothing}");
    }
    for something in ["1", "10", "0.5", "1e0", "2k"] {
        assert!(!is_zero(&Quantity(something.into())), "{something}");
    }
}

/// Generates arbitrary JSON. Some of its strings are words that the webhook interprets.
fn json_value() -> impl Strategy<Value = Value> {
    let word = prop_oneof![
        Just("nvidia.com/gpu".to_owned()),
        Just("affinode".to_owned()),
        Just("windows".to_owned()),
        "[a-z0-9./*-]{0,8}",
    ];
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        word.prop_map(Value::from),
    ];
    let key = prop::sample::select(vec![
        "spec",
        "metadata",
        "containers",
        "initContainers",
        "resources",
        "limits",
        "requests",
        "claims",
        "name",
        "nvidia.com/gpu",
        "runtimeClassName",
        "overhead",
        "nodeSelector",
        "resourceClaims",
        "resourceClaimName",
        "affinity",
        "labels",
        "os",
        "nodeName",
    ]);
    leaf.prop_recursive(6, 64, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map(key.clone().prop_map(String::from), inner, 0..6)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

/// Generates pods that an API server might send, with arbitrary JSON in the fields that the webhook
/// reads.
fn pods() -> impl Strategy<Value = Value> {
    (
        json_value(),
        prop::option::of(prop::sample::select(vec!["", "affinode", "nvidia", "kata"])),
        prop::bool::ANY,
        prop::bool::ANY,
    )
        .prop_map(|(noise, class, gpu, overhead)| {
            let mut pod = if gpu { gpu_pod() } else { without_gpu(json!({})) };
            pod["metadata"]["annotations"] = json!({ "noise": noise.to_string() });
            pod["spec"]["futureField"] = noise;
            if let Some(class) = class {
                pod["spec"]["runtimeClassName"] = class.into();
            }
            if overhead {
                pod["spec"]["overhead"] = json!({ "memory": "1Mi" });
            }
            pod
        })
}

proptest! {
    #[test]
    fn hostile_pods_never_panic(noise in json_value()) {
        let mut pod = json!({ "apiVersion": "v1", "kind": "Pod" });
        json_patch::merge(&mut pod, &noise);
        if let Ok(pod) = serde_json::from_value::<Pod>(pod) {
            let _ = decide(&pod, "ml", &rules(&[]), Some(&class()), &Claims::new());
        }
    }

    #[test]
    fn a_patched_pod_differs_in_what_is_named_alone(pod in pods()) {
        let rules = rules(&["--replace-class", "nvidia"]);
        let decide = |pod: &Value| decide(&typed(pod), "ml", &rules, Some(&class()), &Claims::new());
        let AdmissionDecision::Inject { patch, .. } = decide(&pod) else { return Ok(()) };
        let mut after = pod.clone();
        json_patch::patch(&mut after, &patch).unwrap();
        prop_assert_eq!(&after["spec"]["runtimeClassName"], "affinode");
        prop_assert_eq!(&after["spec"]["overhead"], &Value::Null);
        // The API server may call the webhook again. Then there is no further change.
        prop_assert_eq!(decide(&after), AdmissionDecision::Leave(LeftAlone::Already));
        let strip = |mut pod: Value| {
            let spec = pod["spec"].as_object_mut().unwrap();
            spec.shift_remove("runtimeClassName");
            spec.shift_remove("overhead");
            pod
        };
        prop_assert_eq!(strip(after), strip(pod));
    }
}
