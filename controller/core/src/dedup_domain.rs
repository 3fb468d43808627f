//! The dedup domain of a container (`policy.dedup`): the set of containers with which it shares
//! identical offloaded memory. Memory is shared within one tenant only, because sharing reveals
//! that another container has the same content.

use affinode_proto::wire::Capabilities;

use super::{ContainerSpec, ProcessId, node_state::NodeState};

/// A set of processes whose identical content may be stored only once.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Domain {
    /// Containers of one namespace. Both the containerd namespace and the Kubernetes namespace must
    /// be equal, because containerd and Kubernetes may use the same name for different namespaces.
    Containers {
        /// Namespace of the container in containerd.
        containerd: String,
        /// Namespace in Kubernetes; empty outside Kubernetes.
        pod: String,
    },
    /// Jobs of one user and namespace. Jobs never share memory with containers, even if the
    /// namespaces have the same name.
    Jobs {
        /// User id of the job's owner, as the kernel reports it. A user name would not suffice,
        /// because different users may have the same name.
        uid: u32,
        /// Namespace of the job. Only root may choose it.
        namespace: String,
    },
}

impl Domain {
    /// Determines the dedup domain of a container or job. `None`: it has no namespace, so its
    /// memory is not deduplicated.
    #[must_use]
    pub fn of(spec: &ContainerSpec) -> Option<Domain> {
        let namespace = spec.namespace.clone();
        if namespace.is_empty() {
            return None;
        }
        Some(match spec.job_user {
            Some(uid) => Domain::Jobs { uid, namespace },
            None => Domain::Containers { containerd: namespace, pod: spec.pod_namespace.clone() },
        })
    }
}

/// Determines the dedup domain of a process. `None`: the policy does not enable deduplication, or
/// the process's library does not support it.
pub(super) fn domain_of(node: &NodeState, id: ProcessId) -> Option<Domain> {
    let process = node.registry.processes.get(&id).filter(|p| p.can(Capabilities::DEDUPS))?;
    let container = node.registry.containers.get(&process.key).filter(|c| c.policy.dedup)?;
    Domain::of(&container.spec)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(namespace: &str, pod_namespace: &str, user: Option<u32>) -> Option<Domain> {
        let spec = ContainerSpec {
            namespace: namespace.into(),
            pod_namespace: pod_namespace.into(),
            job_user: user,
            ..ContainerSpec::default()
        };
        Domain::of(&spec)
    }

    #[test]
    fn each_tenant_has_its_own_domain() {
        let all = [
            of("k8s.io", "ml", None),
            of("k8s.io", "web", None),
            of("k8s.io", "", None),
            of("ml", "", None),
            of("other", "ml", None),
            of("user-ann", "", None),
            of("user-ann", "", Some(1000)),
            of("user-ann", "", Some(1001)),
            of("user-ann", "", Some(0)),
            of("jobs", "", Some(0)),
            of("jobs", "", None),
        ];
        for (n, one) in all.iter().enumerate() {
            assert!(one.is_some());
            let alike = all.iter().filter(|other| *other == one).count();
            assert_eq!(alike, 1, "{n}: {one:?}");
        }
        assert_eq!(of("k8s.io", "ml", None), of("k8s.io", "ml", None));
        assert_eq!(of("jobs", "", Some(0)), of("jobs", "", Some(0)));
        assert_eq!(of("", "", None), None);
    }
}
