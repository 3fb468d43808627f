//! Tests the objects of the Prometheus operator in the rendered chart.

use super::{Rendered, render, render_for};

#[test]
fn scraped_labels_are_those_of_the_containers() {
    let Some(rendered) = render("serviceMonitor: {enabled: true}") else { return };
    let monitor = rendered.get("ServiceMonitor", "affinode-node");
    let endpoint = &monitor["spec"]["endpoints"][0];
    assert_eq!(endpoint["honorLabels"], true);
    assert_eq!(endpoint["relabelings"][0]["targetLabel"], "node");
    assert!(endpoint["metricRelabelings"].is_null());
}

#[test]
fn relabelings_of_users_come_last() {
    let values = "
serviceMonitor:
  enabled: true
  honorLabels: false
  relabelings: [{targetLabel: cluster, replacement: a}]
  metricRelabelings: [{action: drop, regex: affinode_http_.*, sourceLabels: [__name__]}]
";
    let Some(rendered) = render(values) else { return };
    let endpoint = &rendered.get("ServiceMonitor", "affinode-node")["spec"]["endpoints"][0];
    assert_eq!(endpoint["honorLabels"], false);
    assert_eq!(endpoint["relabelings"][0]["targetLabel"], "node");
    assert_eq!(endpoint["relabelings"][1]["targetLabel"], "cluster");
    assert_eq!(endpoint["metricRelabelings"][0]["action"], "drop");
}

#[test]
fn every_alert_links_its_runbook() {
    let values = "alertRules: {enabled: true, runbookBase: https://docs.example.com/affinode/}";
    let Some(rendered) = render(values) else { return };
    let groups = &rendered.get("PrometheusRule", "affinode")["spec"]["groups"];
    let mut seen = 0;
    for rule in groups.as_array().unwrap().iter().flat_map(|g| g["rules"].as_array().unwrap()) {
        let Some(name) = rule["alert"].as_str() else { continue };
        let heading = name.to_lowercase();
        let page = format!("https://docs.example.com/affinode/docs/operations.md#{heading}");
        assert_eq!(rule["annotations"]["runbook_url"], page, "{name}");
        seen += 1;
    }
    assert!(seen > 10, "{seen} alerts");
}

/// Returns the expression of an alert in the rendered chart.
fn expression(rendered: &Rendered, object: &str, alert: &str) -> String {
    let groups = &rendered.get("PrometheusRule", object)["spec"]["groups"];
    let mut rules =
        groups.as_array().unwrap().iter().flat_map(|group| group["rules"].as_array().unwrap());
    let rule = rules.find(|rule| rule["alert"] == alert).unwrap();
    rule["expr"].as_str().unwrap().to_owned()
}

#[test]
fn alerts_name_the_objects_of_the_release() {
    let values = "
alertRules: {enabled: true}
serviceMonitor: {enabled: true}
fullnameOverride: gpu
runtimeClass: {name: shared-gpu}
";
    let Some(rendered) = render_for("1.34.0", values) else { return };
    let rendered = rendered.unwrap();
    // The label `job` of a ServiceMonitor's targets is the name of the Service.
    rendered.get("Service", "gpu-node");
    rendered.get("Deployment", "gpu-webhook");
    rendered.get("RuntimeClass", "shared-gpu");
    let expression = |alert| expression(&rendered, "gpu", alert);
    assert!(expression("AffinodeAgentDown").contains("{job=~\"gpu-node\"}"));
    assert!(expression("AffinodeWebhookDown").contains("{deployment=~\"gpu-webhook\"}"));
    assert!(expression("AffinodePodsPending").contains("{runtimeclass_name=\"shared-gpu\"}"));
}

#[test]
fn the_webhook_is_scraped_where_it_runs() {
    let values = "serviceMonitor: {enabled: true}";
    let Some(rendered) = render_for("1.34.0", values) else { return };
    let rendered = rendered.unwrap();
    let selector = &rendered.get("ServiceMonitor", "affinode-webhook")["spec"]["selector"];
    let service = &rendered.get("Service", "affinode-webhook")["metadata"]["labels"];
    for (name, value) in selector["matchLabels"].as_object().unwrap() {
        assert_eq!(&service[name], value, "{name}");
    }
    // The Service of the agents has another component label.
    let agents = &rendered.get("Service", "affinode-node")["metadata"]["labels"];
    assert_ne!(agents["app.kubernetes.io/component"], "webhook");
    let by_policy = render(values).unwrap();
    assert!(by_policy.find("ServiceMonitor", "affinode-webhook").is_none());
}
