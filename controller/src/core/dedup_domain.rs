//! Whose memory may be held together (`policy.dedup`): that of one tenant, and no other's with it.
//! Who shares learns that somebody else has the same content.

use affinode_proto::api::control::Announcement;

use super::{Key, Node, ProcessId};

/// Processes of equal ones may hold once what they have in common.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Domain {
    /// Containers. A namespace of Kubernetes' and one of containerd's may have the same name.
    Containers {
        /// containerd's namespace.
        containerd: String,
        /// Kubernetes'; empty outside Kubernetes.
        pod: String,
    },
    /// Jobs, which are no containers, whatever their namespace is called.
    Jobs {
        /// Who runs them, by the kernel: names can be alike.
        uid: u32,
        /// As root may choose it.
        namespace: String,
    },
}

impl Domain {
    /// That of a container, or of a job of this user. `None`: who is in no namespace is alone.
    #[must_use]
    pub fn of(announcement: &Announcement, user: Option<u32>) -> Option<Domain> {
        let namespace = announcement.namespace.clone();
        if namespace.is_empty() {
            return None;
        }
        Some(match user {
            Some(uid) => Domain::Jobs { uid, namespace },
            None => Domain::Containers {
                containerd: namespace,
                pod: announcement.pod_namespace.clone(),
            },
        })
    }
}

impl Node {
    /// Whom a process may hold memory together with, if its policy has that. `user` knows whose
    /// job a container is.
    #[must_use]
    pub fn domain_of(
        &self,
        id: ProcessId,
        user: impl FnOnce(&Key) -> Option<u32>,
    ) -> Option<Domain> {
        let key = &self.processes.get(&id)?.key;
        let container = self.containers.get(key).filter(|container| container.policy.dedup)?;
        Domain::of(&container.announcement, user(key))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(namespace: &str, pod_namespace: &str, user: Option<u32>) -> Option<Domain> {
        let announcement = Announcement {
            namespace: namespace.into(),
            pod_namespace: pod_namespace.into(),
            ..Announcement::default()
        };
        Domain::of(&announcement, user)
    }

    #[test]
    fn each_tenant_is_one_of_its_own() {
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
