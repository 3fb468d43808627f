//! Definitions of those resource types of the Prometheus operator that the chart uses. They list
//! the fields of each type, so that the API server rejects a misspelt field.

use serde_json::{Value, json};

const GROUP: &str = "monitoring.coreos.com";

pub fn all() -> [Value; 2] {
    let text = || json!({"type": "string"});
    let texts = || json!({"type": "array", "items": {"type": "string"}});
    let map = || json!({"type": "object", "additionalProperties": {"type": "string"}});
    let duration = || json!({"type": "string", "pattern": "^(0|(([0-9]+)y)?(([0-9]+)w)?(([0-9]+)d)?(([0-9]+)h)?(([0-9]+)m)?(([0-9]+)s)?(([0-9]+)ms)?)$"});
    let monitor = json!({
        "type": "object", "required": ["selector", "endpoints"],
        "properties": {
            "jobLabel": text(), "targetLabels": texts(), "podTargetLabels": texts(),
            "namespaceSelector": {"type": "object", "properties": {"any": {"type": "boolean"}, "matchNames": texts()}},
            "selector": {"type": "object", "properties": {
                "matchLabels": map(),
                "matchExpressions": {"type": "array", "items": {"type": "object", "required": ["key", "operator"],
                    "properties": {"key": text(), "operator": text(), "values": texts()}}},
            }},
            "endpoints": {"type": "array", "items": {"type": "object", "properties": {
                "port": text(), "path": text(), "scheme": {"type": "string", "enum": ["http", "https"]},
                "interval": duration(), "scrapeTimeout": duration(), "bearerTokenFile": text(), "honorLabels": {"type": "boolean"},
                "tlsConfig": {"type": "object", "properties": {
                    "insecureSkipVerify": {"type": "boolean"}, "serverName": text(), "caFile": text(),
                }},
                "relabelings": {"type": "array", "items": {"type": "object", "properties": {
                    "sourceLabels": texts(), "targetLabel": text(), "regex": text(), "replacement": text(), "separator": text(), "action": text(),
                }}},
            }}},
        },
    });
    let rule = json!({
        "type": "object",
        "properties": {"groups": {
            "type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"],
            "items": {"type": "object", "required": ["name"], "properties": {
                "name": {"type": "string", "minLength": 1}, "interval": duration(), "labels": map(), "limit": {"type": "integer"},
                "rules": {"type": "array", "items": {"type": "object", "required": ["expr"], "properties": {
                    "alert": text(), "record": text(), "for": duration(), "keep_firing_for": duration(), "labels": map(), "annotations": map(),
                    "expr": {"x-kubernetes-int-or-string": true, "anyOf": [{"type": "integer"}, {"type": "string"}]},
                }}},
            }},
        }},
    });
    [("ServiceMonitor", "servicemonitors", monitor), ("PrometheusRule", "prometheusrules", rule)]
        .map(|(kind, plural, spec)| definition(kind, plural, &spec))
}

fn definition(kind: &str, plural: &str, spec: &Value) -> Value {
    json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": format!("{plural}.{GROUP}")},
        "spec": {
            "group": GROUP, "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.to_lowercase()},
            "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": {
                "type": "object", "required": ["spec"],
                "properties": {
                    "apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": {"type": "object"}, "spec": spec,
                },
            }}}],
        },
    })
}
