//! Reads a container's names for display, from its annotations or from Docker's files.

use affinode_proto::annotations::{CLAIM, CLAIMED_VRAM};
use affinode_proto::api::control::Announcement;
use containerd_shim_protos::api::CreateTaskRequest;
use serde_json::Value;

use tracing::warn;

use crate::paths::container_key;
use crate::{docker, report, spec};

const OWN_PREFIX: &str = "affinode.io/";
/// Annotation that states whether a container is managed.
const INJECT: &str = "affinode.io/inject";
/// Maximum number of Affinode's annotations that are read from one pod. It is about three times the
/// number of annotations that Affinode defines.
pub const MAX_ANNOTATIONS: usize = 48;
/// Maximum length of one annotation in bytes, name and value together. Valid annotations are
/// shorter.
pub const MAX_ANNOTATION_BYTES: usize = 512;

/// Returns the announcement of a container that is being created, which describes it to the
/// controller.
#[must_use]
pub fn announcement(namespace: &str, request: &CreateTaskRequest, spec: &Value) -> Announcement {
    let cri = |name: &str, in_crio: &str| {
        let ours = format!("io.kubernetes.cri.{name}");
        let found = [&*ours, in_crio].into_iter().find_map(|name| spec::annotation(spec, name));
        found.unwrap_or_default().to_owned()
    };
    let mut container = cri("container-name", "io.kubernetes.container.name");
    let mut image = cri("image-name", "io.kubernetes.cri-o.ImageName");
    if namespace == docker::NAMESPACE {
        match docker::names(&request.id, spec) {
            Ok(names) => (container, image) = (names.container, names.image),
            Err(error) => {
                warn!(
                    "container {}: cannot read its name, so its id is shown: {}",
                    request.id,
                    report(&error)
                );
            }
        }
    }
    if container.is_empty() {
        container = spec::annotation(spec, "nerdctl/name")
            .filter(|name| !name.is_empty())
            .unwrap_or(&request.id)
            .to_owned();
    }
    Announcement {
        key: container_key(namespace, &request.id),
        namespace: namespace.to_owned(),
        id: request.id.clone(),
        sandbox_id: cri("sandbox-id", "io.kubernetes.cri-o.SandboxID"),
        pod_namespace: cri("sandbox-namespace", "io.kubernetes.pod.namespace"),
        pod: cri("sandbox-name", "io.kubernetes.pod.name"),
        pod_uid: cri("sandbox-uid", "io.kubernetes.pod.uid"),
        container,
        image,
        annotations: own_annotations(spec).take(MAX_ANNOTATIONS).collect(),
        cgroups_path: spec::cgroups_path(spec).unwrap_or_default().to_owned(),
        bundle: request.bundle.clone(),
        ..Announcement::default()
    }
}

/// Returns the annotations of Affinode that have at most [`MAX_ANNOTATION_BYTES`], in the order of
/// the spec.
fn own_annotations(spec: &Value) -> impl Iterator<Item = (String, String)> {
    spec::annotations(spec)
        .filter(|(name, value)| is_own(name, value))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
}

fn is_own(name: &str, value: &str) -> bool {
    ![CLAIMED_VRAM, CLAIM].contains(&name)
        && name.starts_with(OWN_PREFIX)
        && name.len() + value.len() <= MAX_ANNOTATION_BYTES
}

/// Whether a ResourceClaim may set this annotation of Affinode. It may not set
/// `affinode.io/inject`, because only the pod may decide whether a container is managed.
#[must_use]
pub fn may_be_claimed(name: &str, value: &str) -> bool {
    name != INJECT && is_own(name, value)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn request() -> CreateTaskRequest {
        let mut request = CreateTaskRequest::new();
        request.id = "abc".to_owned();
        request.bundle = "/b".to_owned();
        request
    }

    #[test]
    fn a_pod_annotates_so_much_and_no_more() {
        let long = "x".repeat(MAX_ANNOTATION_BYTES);
        let many = (0..100).map(|n| (format!("affinode.io/{n:03}"), json!("v")));
        let mut annotations: serde_json::Map<String, Value> = many.collect();
        annotations.insert("affinode.io/000-long".to_owned(), json!(long));
        let got = announcement("ns", &request(), &json!({"annotations": annotations})).annotations;
        assert_eq!(got.len(), MAX_ANNOTATIONS);
        assert!(got.contains_key("affinode.io/000") && !got.contains_key("affinode.io/000-long"));
    }

    #[test]
    fn pod_cannot_set_its_claim_and_its_amount() {
        let forged = json!({"affinode.io/claimed-vram": "1", "affinode.io/claim": "other/claim"});
        let spec = json!({"annotations": forged});
        assert!(announcement("ns", &request(), &spec).annotations.is_empty());
    }

    #[test]
    fn a_pods_container() {
        let spec = json!({
            "linux": {"cgroupsPath": "kubepods.slice:cri-containerd:abc"},
            "annotations": {
                "io.kubernetes.cri.sandbox-id": "s",
                "io.kubernetes.cri.sandbox-namespace": "ml",
                "io.kubernetes.cri.sandbox-name": "notebook-0",
                "io.kubernetes.cri.sandbox-uid": "u",
                "io.kubernetes.cri.container-name": "jupyter",
                "io.kubernetes.cri.image-name": "docker.io/a/b:c",
                "affinode.io/priority": "5",
                "other.io/x": "y"
            }
        });
        let got = announcement("k8s.io", &request(), &spec);
        let words = [
            &got.namespace,
            &got.id,
            &got.sandbox_id,
            &got.pod_namespace,
            &got.pod,
            &got.pod_uid,
            &got.container,
            &got.image,
            &got.cgroups_path,
            &got.bundle,
        ];
        assert_eq!(
            words.map(String::as_str),
            [
                "k8s.io",
                "abc",
                "s",
                "ml",
                "notebook-0",
                "u",
                "jupyter",
                "docker.io/a/b:c",
                "kubepods.slice:cri-containerd:abc",
                "/b"
            ]
        );
        assert_eq!(got.key, container_key("k8s.io", "abc"));
        let annotations: Vec<_> = got.annotations.into_iter().collect();
        assert_eq!(annotations, [("affinode.io/priority".to_owned(), "5".to_owned())]);
    }

    #[test]
    fn pod_of_crio_has_its_names() {
        let spec = json!({"annotations": {
            "io.container.manager": "cri-o",
            "io.kubernetes.cri-o.SandboxID": "s",
            "io.kubernetes.cri-o.ImageName": "docker.io/a/b:c",
            "io.kubernetes.container.name": "jupyter",
            "io.kubernetes.pod.namespace": "ml",
            "io.kubernetes.pod.name": "notebook-0",
            "io.kubernetes.pod.uid": "u",
        }});
        let got = announcement("cri-o", &request(), &spec);
        let words = [&got.sandbox_id, &got.image, &got.container, &got.pod_namespace, &got.pod];
        assert_eq!(
            words.map(String::as_str),
            ["s", "docker.io/a/b:c", "jupyter", "ml", "notebook-0"]
        );
        assert_eq!(got.pod_uid, "u");
    }

    #[test]
    fn outside_kubernetes() {
        let spec = json!({"annotations": {"nerdctl/name": "trainer"}});
        assert_eq!(announcement("default", &request(), &spec).container, "trainer");
        assert_eq!(announcement("default", &request(), &json!({})).container, "abc");
        // Docker has no file of this container.
        assert_eq!(announcement(docker::NAMESPACE, &request(), &json!({})).container, "abc");
    }

    #[test]
    fn docker_container_has_dockers_names() {
        let id = "5f".repeat(32);
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("containers").join(&id);
        std::fs::create_dir_all(&folder).unwrap();
        let names = r#"{"Name": "/trainer", "Config": {"Image": "a/b"}}"#;
        std::fs::write(folder.join("config.v2.json"), names).unwrap();
        let hosts = folder.join("hosts");
        let spec = json!({"mounts": [{"destination": "/etc/hosts", "source": hosts}]});
        let request = CreateTaskRequest { id: id.clone(), ..request() };
        let got = announcement(docker::NAMESPACE, &request, &spec);
        assert_eq!((got.container.as_str(), got.image.as_str()), ("trainer", "a/b"));
        // In a namespace other than Docker's, the name comes only from annotations.
        assert_eq!(announcement("default", &request, &spec).container, id);
    }
}
