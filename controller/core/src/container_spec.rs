//! Description of a container as its shim announced it: names, annotations and paths.

use std::collections::BTreeMap;

use affinode_proto::annotations::CLAIM;

use super::policy::{Policies, Policy};

/// Description of a container or job without its key. It changes only when the container is
/// announced again.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContainerSpec {
    /// Namespace of the container in containerd. Without containerd: name of the container engine.
    pub namespace: String,
    /// containerd's id of the container.
    pub id: String,
    /// Id of the CRI sandbox; empty outside CRI.
    pub sandbox_id: String,
    /// Namespace in Kubernetes; empty outside CRI.
    pub pod_namespace: String,
    /// Name of the pod; empty outside CRI.
    pub pod: String,
    /// Uid of the pod; empty outside CRI.
    pub pod_uid: String,
    /// Name of the container in its pod, or the name that a user gave it.
    pub container: String,
    /// Name of the image.
    pub image: String,
    /// All annotations whose names begin with `affinode.io/`.
    pub annotations: BTreeMap<String, String>,
    /// The container's `linux.cgroupsPath` in its OCI spec, unchanged.
    pub cgroups_path: String,
    /// Path of the OCI bundle's directory on the host. For a job: path of its lock file.
    pub bundle: String,
    /// Number that distinguishes containers that use the same id one after another. 0: unknown.
    pub generation: u64,
    /// Pid and start time of the container's first process. They are set if no shim reports the
    /// container's deletion. `None`: a shim reports the deletion, or the container is a job.
    pub init: Option<(u32, u64)>,
    /// User id of a job's owner, as the kernel reports it. `None` for a container.
    pub job_user: Option<u32>,
}

impl ContainerSpec {
    /// Namespace to which the rules of `[[policy.namespace]]` are applied: the namespace in
    /// Kubernetes if there is one, otherwise the namespace in containerd.
    #[must_use]
    pub fn rule_namespace(&self) -> &str {
        if self.pod_namespace.is_empty() { &self.namespace } else { &self.pod_namespace }
    }

    /// Determines the policy of the container, and returns a warning for each invalid annotation.
    #[must_use]
    pub fn policy(&self, policies: &Policies) -> (Policy, Vec<String>) {
        policies.resolve(self.rule_namespace(), &self.annotations)
    }

    /// The ResourceClaims of the container, as its shim read them from the claims' files. Empty: the
    /// container has none, or they have no files.
    #[must_use]
    pub fn claim(&self) -> &str {
        self.annotations.get(CLAIM).map_or("", String::as_str)
    }

    /// Name shown to users: `namespace/pod/container`, or `namespace/name` outside Kubernetes. A
    /// container without a name is shown by its id. If containerd generated the id, it is cut to 12
    /// digits.
    #[must_use]
    pub fn display_name(&self) -> String {
        const SHORT: usize = 12;
        if !self.pod.is_empty() {
            return [&self.pod_namespace, "/", &self.pod, "/", &self.container].concat();
        }
        let generated = self.id.len() == 64 && self.id.bytes().all(|b| b.is_ascii_hexdigit());
        let name = match (self.container.as_str(), generated) {
            ("", true) => &self.id[..SHORT],
            ("", false) => &self.id,
            (name, _) => name,
        };
        [&self.namespace, "/", name].concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn display_name_is_what_users_named() {
        let outside = ContainerSpec {
            namespace: "default".into(),
            id: "ab".repeat(32),
            ..ContainerSpec::default()
        };
        assert_eq!(outside.display_name(), "default/abababababab");
        let named = ContainerSpec { container: "trainer".into(), ..outside.clone() };
        assert_eq!(named.display_name(), "default/trainer");
        let pod = ContainerSpec {
            pod_namespace: "ml".into(),
            pod: "p-0".into(),
            container: "c".into(),
            ..outside
        };
        assert_eq!(pod.display_name(), "ml/p-0/c");
    }
}
