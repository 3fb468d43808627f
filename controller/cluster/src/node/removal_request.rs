//! Requests to remove Affinode from the node: of the uninstaller by an annotation, and of an
//! operator by a label. A request of the uninstaller has a time limit, because an uninstaller that
//! is killed cannot withdraw it.

use k8s_openapi::{api::core::v1::Node, jiff::Timestamp};
use kube::{ResourceExt, core::PartialObjectMeta};

use super::node_labels::{
    EXCLUDE, EXCLUDED, READY, RETIRE, RETIRE_UNTIL, RETIRED, may_go, must_go,
};

/// Returns the state that the uninstaller or an operator has requested for the node: [`READY`],
/// [`RETIRED`] or [`EXCLUDED`]. `None`: no removal is requested, so Affinode stays installed.
pub(super) fn requested_removal(
    node: &PartialObjectMeta<Node>,
    ours: &str,
    now: Timestamp,
) -> Option<&'static str> {
    let uninstaller = uninstaller_request(node, ours).filter(|_| !is_late(node, now));
    uninstaller.or_else(|| is_excluded(node).then_some(EXCLUDED))
}

/// Returns whether the node has a request of the uninstaller that no longer applies.
pub(super) fn has_expired_request(
    node: &PartialObjectMeta<Node>,
    ours: &str,
    now: Timestamp,
) -> bool {
    uninstaller_request(node, ours).is_some() && is_late(node, now)
}

/// Returns whether an operator excluded the node from Affinode.
pub(super) fn is_excluded(node: &PartialObjectMeta<Node>) -> bool {
    node.labels().get(EXCLUDE).is_some_and(|value| value == "true")
}

fn uninstaller_request(node: &PartialObjectMeta<Node>, ours: &str) -> Option<&'static str> {
    let asked = node.annotations().get(RETIRE)?;
    if *asked == may_go(ours) {
        Some(READY)
    } else if *asked == must_go(ours) {
        Some(RETIRED)
    } else {
        None
    }
}

/// Returns whether the time limit of the uninstaller's request has passed. A request without a limit
/// applies until it is withdrawn. A limit that cannot be read has passed.
fn is_late(node: &PartialObjectMeta<Node>, now: Timestamp) -> bool {
    let until = node.annotations().get(RETIRE_UNTIL);
    until.is_some_and(|until| until.parse::<Timestamp>().map_or(true, |until| until <= now))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const OURS: &str = "system/affinode";

    fn node(annotations: serde_json::Value, labels: serde_json::Value) -> PartialObjectMeta<Node> {
        serde_json::from_value(json!({
            "apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata",
            "metadata": { "name": "one", "annotations": annotations, "labels": labels },
        }))
        .unwrap()
    }

    fn at(time: &str) -> Timestamp {
        time.parse().unwrap()
    }

    #[test]
    fn request_applies_until_its_time_limit() {
        let noon = "2026-11-27T12:00:00Z";
        for (value, wanted) in [(may_go(OURS), READY), (must_go(OURS), RETIRED)] {
            let node = node(json!({ RETIRE: value, RETIRE_UNTIL: noon }), json!({}));
            for (now, applies) in [("2026-11-27T11:59:59Z", true), (noon, false)] {
                let requested = requested_removal(&node, OURS, at(now));
                assert_eq!(requested, applies.then_some(wanted), "{value} at {now}");
                assert_eq!(has_expired_request(&node, OURS, at(now)), !applies);
            }
        }
    }

    #[test]
    fn request_without_a_limit_stays() {
        let node = node(json!({ RETIRE: may_go(OURS) }), json!({}));
        assert_eq!(requested_removal(&node, OURS, Timestamp::MAX), Some(READY));
    }

    #[test]
    fn unreadable_limit_has_passed() {
        let node = node(json!({ RETIRE: may_go(OURS), RETIRE_UNTIL: "soon" }), json!({}));
        assert!(has_expired_request(&node, OURS, Timestamp::MIN));
    }

    #[test]
    fn exclusion_has_no_time_limit() {
        let expired = json!({ RETIRE: may_go(OURS), RETIRE_UNTIL: "2026-11-27T12:00:00Z" });
        let node = node(expired, json!({ EXCLUDE: "true" }));
        assert_eq!(requested_removal(&node, OURS, Timestamp::MAX), Some(EXCLUDED));
    }

    #[test]
    fn request_of_another_installation_is_ignored() {
        let node = node(json!({ RETIRE: may_go("other/affinode"), RETIRE_UNTIL: "" }), json!({}));
        assert_eq!(requested_removal(&node, OURS, Timestamp::MIN), None);
        assert!(!has_expired_request(&node, OURS, Timestamp::MAX));
    }
}
