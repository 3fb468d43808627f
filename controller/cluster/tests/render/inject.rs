//! Tests which pods get the runtime class by the rendered webhook or admission policy.

use serde_json::{Value, json};

use super::{Rendered, render, render_for};

const OLDER: &str = "1.34.0";

/// Returns the selectors for namespaces and pods in the rendered webhook. Checks before that the
/// rendered admission policy has the same selectors. `None`: helm is not installed.
fn selectors(values: &str) -> Option<Value> {
    let policy = render(values)?;
    let webhook = render_for(OLDER, values)?.unwrap();
    let of_policy =
        policy.get("MutatingAdmissionPolicy", "affinode")["spec"]["matchConstraints"].clone();
    let of_webhook = webhook_of(&webhook).clone();
    let both = |found: &Value| {
        json!({
            "namespaces": found["namespaceSelector"], "pods": found["objectSelector"],
        })
    };
    assert_eq!(both(&of_policy), both(&of_webhook));
    Some(both(&of_webhook))
}

fn webhook_of(rendered: &Rendered) -> &Value {
    &rendered.get("MutatingWebhookConfiguration", "affinode-webhook")["webhooks"][0]
}

fn expression<'a>(selector: &'a Value, key: &str) -> Vec<&'a Value> {
    selector["matchExpressions"].as_array().unwrap().iter().filter(|e| e["key"] == key).collect()
}

#[test]
fn pods_opt_out_by_default() {
    let Some(selectors) = selectors("{}") else { return };
    for selector in [&selectors["namespaces"], &selectors["pods"]] {
        let found = expression(selector, "affinode.io/inject");
        assert_eq!(
            found,
            [&json!({
                "key": "affinode.io/inject", "operator": "NotIn", "values": ["ignore"],
            })]
        );
    }
}

#[test]
fn with_opt_in_only_enabled_namespaces_count() {
    let Some(selectors) = selectors("inject: {optIn: true}") else { return };
    let found = expression(&selectors["namespaces"], "affinode.io/inject");
    assert_eq!(
        found,
        [&json!({
            "key": "affinode.io/inject", "operator": "In", "values": ["enabled"],
        })]
    );
    // A pod in such a namespace can still opt out.
    let found = expression(&selectors["pods"], "affinode.io/inject");
    assert_eq!(found[0]["operator"], "NotIn");
}

#[test]
fn selectors_of_users_come_in_addition() {
    let values = "
inject:
  namespaceSelector:
    matchLabels: {team: research}
    matchExpressions: [{key: stage, operator: Exists}]
  objectSelector:
    matchLabels: {app: notebook}
";
    let Some(selectors) = selectors(values) else { return };
    let namespaces = &selectors["namespaces"];
    assert_eq!(namespaces["matchLabels"], json!({"team": "research"}));
    assert_eq!(expression(namespaces, "stage").len(), 1);
    assert_eq!(expression(namespaces, "affinode.io/inject").len(), 1);
    let excluded = expression(namespaces, "kubernetes.io/metadata.name")[0]["values"].to_string();
    assert!(excluded.contains("kube-system") && excluded.contains("affinode-system"), "{excluded}");
    assert_eq!(selectors["pods"]["matchLabels"], json!({"app": "notebook"}));
}

#[test]
fn the_api_server_calls_only_for_gpu_pods() {
    let Some(rendered) = render_for(OLDER, "{}") else { return };
    let rendered = rendered.unwrap();
    let webhook = webhook_of(&rendered);
    assert_eq!(webhook["timeoutSeconds"], 2);
    assert_eq!(webhook["failurePolicy"], "Ignore");
    let condition = webhook["matchConditions"][0]["expression"].as_str().unwrap();
    for part in
        ["'nvidia.com/gpu'", "startsWith('nvidia.com/mig-')", "resourceClaims", "'gpu-fraction'"]
    {
        assert!(condition.contains(part), "{part} is not in {condition}");
    }
    // The manifest for installation without helm has the same conditions.
    let manifest = super::manifest("webhook.yaml", "MutatingWebhookConfiguration");
    assert_eq!(webhook["matchConditions"], manifest["webhooks"][0]["matchConditions"]);
    let every = render_for(OLDER, "inject: {webhook: {everyPod: true}}").unwrap().unwrap();
    assert!(webhook_of(&every)["matchConditions"].is_null());
}
