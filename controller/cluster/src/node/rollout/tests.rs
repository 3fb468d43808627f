use serde_json::{Value, json};

use super::*;
use crate::webhook::fake::Fake;

fn path(name: &str) -> String {
    format!("/apis/coordination.k8s.io/v1/namespaces/affinode/leases/{name}")
}

fn lease(name: &str) -> Value {
    json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
        "metadata": { "name": name, "namespace": "affinode" },
    })
}

fn slots(fake: &Fake, names: &[&str], node: &str) -> RolloutSlots {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    RolloutSlots::new(fake.client(), "affinode", &names, node)
}

fn holder_of(fake: &Fake, name: &str) -> Value {
    fake.get(&path(name))["spec"]["holderIdentity"].clone()
}

#[tokio::test]
async fn no_more_nodes_than_slots_are_installed() {
    let fake = Fake::default();
    for name in ["slot-0", "slot-1"] {
        fake.put(&path(name), lease(name));
    }
    let nodes: Vec<RolloutSlots> =
        ["a", "b", "c"].map(|node| slots(&fake, &["slot-0", "slot-1"], node)).into();
    let mut took = Vec::new();
    for node in &nodes {
        took.push(node.take().await.unwrap());
    }
    assert_eq!(took, [true, true, false]);
    // A node whose installation fails tries again, and still has its slot.
    assert!(nodes[0].take().await.unwrap());
    assert!(!nodes[2].take().await.unwrap());
    nodes[1].release().await.unwrap();
    assert!(nodes[2].take().await.unwrap());
    assert_eq!([holder_of(&fake, "slot-0"), holder_of(&fake, "slot-1")], ["a", "c"]);
}

#[tokio::test]
async fn one_of_two_nodes_at_a_time_takes_a_slot() {
    let fake = Fake::default();
    fake.put(&path("slot-0"), lease("slot-0"));
    let (a, b) = (slots(&fake, &["slot-0"], "a"), slots(&fake, &["slot-0"], "b"));
    let (a, b) = tokio::join!(a.take(), b.take());
    assert_ne!(a.unwrap(), b.unwrap());
    assert_eq!(fake.writes(), (1, 1), "one write is accepted, and the later write is refused");
}

#[tokio::test]
async fn a_slot_of_a_lost_node_is_free_later() {
    let fake = Fake::default();
    for (ago, free) in [(SLOT * 2, true), (SLOT / 2, false)] {
        let renewed = Timestamp::now() - ago;
        let mut held = lease("slot-0");
        held["spec"] = json!({ "holderIdentity": "lost", "renewTime": renewed.to_string() });
        fake.put(&path("slot-0"), held);
        assert_eq!(slots(&fake, &["slot-0"], "a").take().await.unwrap(), free);
    }
}

#[tokio::test]
async fn without_slots_there_is_no_limit() {
    let fake = Fake::default();
    let node = slots(&fake, &[], "a");
    assert!(node.take().await.unwrap());
    node.release().await.unwrap();
    assert_eq!(fake.writes(), (0, 0));
}

#[tokio::test]
async fn another_nodes_slot_is_not_released() {
    let fake = Fake::default();
    fake.put(&path("slot-0"), lease("slot-0"));
    let a = slots(&fake, &["slot-0"], "a");
    assert!(a.take().await.unwrap());
    let mut stolen = fake.get(&path("slot-0"));
    stolen["spec"]["holderIdentity"] = "b".into();
    fake.put(&path("slot-0"), stolen);
    a.release().await.unwrap();
    assert_eq!(holder_of(&fake, "slot-0"), "b");
}

#[tokio::test]
async fn a_restarted_agent_releases_its_slot() {
    let fake = Fake::default();
    fake.put(&path("slot-0"), lease("slot-0"));
    assert!(slots(&fake, &["slot-0"], "a").take().await.unwrap());
    slots(&fake, &["slot-0"], "a").release().await.unwrap();
    assert!(slots(&fake, &["slot-0"], "b").take().await.unwrap());
}
