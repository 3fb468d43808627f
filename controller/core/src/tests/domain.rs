//! Test of dedup domains (sets of processes whose identical content is stored once).

use affinode_proto::wire::Capabilities;

use super::{
    super::{Domain, ProcessId, dedup_domain},
    world::World,
};

#[test]
fn dedup_domain_needs_policy_and_job_user() {
    let mut world = World::new(3);
    let id = world.running(1, 600);
    let container = world.container_mut(1);
    container.spec.namespace = "k8s.io".into();
    container.spec.pod_namespace = "ml".into();
    let domain = |world: &mut World, id, user| {
        world.container_mut(1).spec.job_user = user;
        dedup_domain::domain_of(&world.node.state, id)
    };
    assert_eq!(domain(&mut world, id, None), None, "the policy does not enable dedup");
    world.container_mut(1).policy.dedup = true;
    let (containerd, pod) = ("k8s.io".to_owned(), "ml".to_owned());
    assert_eq!(domain(&mut world, id, None), Some(Domain::Containers { containerd, pod }));
    let namespace = "k8s.io".to_owned();
    assert_eq!(domain(&mut world, id, Some(1000)), Some(Domain::Jobs { uid: 1000, namespace }));
    assert_eq!(domain(&mut world, ProcessId(u64::MAX), None), None, "the process is unknown");
    world.process_mut(id).agent.capabilities = Capabilities::PREFAULTS;
    assert_eq!(domain(&mut world, id, None), None, "the library does not support dedup");
}
