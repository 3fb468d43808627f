use std::collections::BTreeMap;

use serde_json::json;

use super::*;

fn device(request: &str, share: Option<&str>, policy: bool) -> ClaimDevice {
    ClaimDevice {
        allocated: AllocatedGpu {
            request: request.into(),
            pool: "one".into(),
            device: "gpu-a".into(),
            share_id: share.map(str::to_owned),
            policy: BTreeMap::new(),
            memory_bytes: None,
        },
        gpu: "nvidia.com/gpu=GPU-A".into(),
        policy_file: policy
            .then(|| ["/run/affinode/claims/u-1-1".into(), "/.affinode/claims/u-1-1".into()]),
    }
}

fn spec() -> ClaimSpec {
    let uid = "u-1".parse().unwrap();
    let claim = ClaimName { namespace: "ml".into(), name: "gpu".into(), uid };
    ClaimSpec::new(&claim, &[device("a", Some("s-1"), false), device("b/small", None, true)])
}

#[test]
fn specification_has_one_device_per_gpu() {
    let options = json!(["bind", "ro", "nosuid", "nodev", "noexec"]);
    let expected = json!({
        "cdiVersion": "0.6.0", "kind": "gpu.affinode.io/claim",
        "devices": [
            {
                "name": "u-1-0",
                "annotations": {
                    "affinode.io/request": "a", "affinode.io/pool": "one",
                    "affinode.io/device": "gpu-a", "affinode.io/share-id": "s-1",
                    "affinode.io/gpu": "nvidia.com/gpu=GPU-A",
                },
                "containerEdits": {"env": ["AFFINODE_CLAIM=ml/gpu"]},
            },
            {
                "name": "u-1-1",
                "annotations": {
                    "affinode.io/request": "b/small", "affinode.io/pool": "one",
                    "affinode.io/device": "gpu-a", "affinode.io/gpu": "nvidia.com/gpu=GPU-A",
                },
                "containerEdits": {
                    "env": ["AFFINODE_CLAIM=ml/gpu"],
                    "mounts": [{
                        "hostPath": "/run/affinode/claims/u-1-1",
                        "containerPath": "/.affinode/claims/u-1-1", "options": options,
                    }],
                },
            },
        ],
    });
    assert_eq!(serde_json::to_value(spec()).unwrap(), expected);
}

#[test]
fn answer_is_the_same_after_the_file_is_read() {
    let text = serde_json::to_vec(&spec()).unwrap();
    let read: ClaimSpec = serde_json::from_slice(&text).unwrap();
    assert_eq!(read.prepared(), spec().prepared());
    let prepared = spec().prepared();
    assert_eq!(prepared[1].request_names, ["b"], "without the subrequest");
    assert_eq!(prepared[0].share_id.as_deref(), Some("s-1"));
    let ids = ["nvidia.com/gpu=GPU-A", "gpu.affinode.io/claim=u-1-1"];
    assert_eq!(prepared[1].cdi_device_ids, ids);
}

#[test]
fn uids_are_safe_in_file_names() {
    for text in ["", "../x", "a/b", "a.b", "a\0", &"a".repeat(64)] {
        assert!(text.parse::<ClaimUid>().is_err(), "{text:?}");
    }
    assert!("8b2e6a5c-0000-4000-8000-00000000000a".parse::<ClaimUid>().is_ok());
}
