//! Compares the manifests of `config/kubernetes` with the program that they run, and with each
//! other.

#![allow(clippy::unwrap_used)] // Helpers of tests.

use std::path::Path;

use k8s_openapi::{
    api::{
        admissionregistration::v1::MutatingWebhookConfiguration,
        apps::v1::Deployment,
        core::v1::{Secret, Service},
        rbac::v1::{ClusterRole, Role},
    },
    serde::de::DeserializeOwned,
};
use serde::Deserialize;
use serde_json::Value;

fn documents(file: &str) -> Vec<Value> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../config/kubernetes");
    let text = std::fs::read_to_string(folder.join(file)).unwrap();
    let read = |document| Value::deserialize(document).unwrap();
    serde_yaml_ng::Deserializer::from_str(&text).map(read).collect()
}

fn one<T: DeserializeOwned>(file: &str, kind: &str) -> T {
    let mut found = documents(file).into_iter().filter(|document| document["kind"] == kind);
    let document = found.next().unwrap_or_else(|| panic!("{file} has no {kind}"));
    assert!(found.next().is_none(), "{file} has more than one {kind}");
    serde_json::from_value(document).unwrap()
}

/// Returns the default value of an option, from the output of `--help`.
fn default(option: &str) -> String {
    let program = env!("CARGO_BIN_EXE_affinode-cluster");
    let help = std::process::Command::new(program).args(["webhook", "--help"]).output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let (_, after) = help.split_once(&format!("--{option} ")).unwrap();
    let (_, default) = after.split_once("[default: ").unwrap();
    default.split_once(']').unwrap().0.to_owned()
}

#[test]
fn the_webhook_finds_what_the_manifest_makes() {
    let configuration: MutatingWebhookConfiguration =
        one("webhook.yaml", "MutatingWebhookConfiguration");
    assert_eq!(configuration.metadata.name.as_deref(), Some(&*default("webhook-configuration")));
    let webhooks = configuration.webhooks.unwrap();
    let webhook = &webhooks[0];
    assert_eq!(webhook.failure_policy.as_deref(), Some("Ignore"), "no pod waits for the webhook");
    let service: Service = one("webhook.yaml", "Service");
    assert_eq!(service.metadata.name.as_deref(), Some(&*default("service")));
    let called = webhook.client_config.service.as_ref().unwrap();
    assert_eq!(Some(&called.name), service.metadata.name.as_ref());
    assert_eq!(Some(&called.namespace), service.metadata.namespace.as_ref());
    assert_eq!(called.path.as_deref(), Some("/mutate"));
    let secret: Secret = one("webhook.yaml", "Secret");
    assert_eq!(secret.metadata.name.as_deref(), Some(&*default("secret")));
    let deployment: Deployment = one("webhook.yaml", "Deployment");
    let pod = deployment.spec.template;
    assert_eq!(pod.metadata.unwrap_or_default().labels, service.spec.unwrap().selector);
}

#[test]
fn webhook_rights_cover_only_its_writes() {
    let role: Role = one("webhook.yaml", "Role");
    let cluster: ClusterRole = one("webhook.yaml", "ClusterRole");
    let rules = [role.rules.unwrap(), cluster.rules.unwrap()].concat();
    for rule in &rules {
        let writes = rule.verbs.iter().any(|verb| !["get", "list", "watch"].contains(&&**verb));
        assert!(!writes || rule.resource_names.as_ref().is_some_and(|n| n.len() == 1), "{rule:?}");
    }
    let named: Vec<&str> =
        rules.iter().filter_map(|r| r.resource_names.as_ref()).flatten().map(|n| &**n).collect();
    let expected = [default("secret"), default("runtime-class"), default("webhook-configuration")];
    assert_eq!(named, expected);
}

#[test]
fn webhook_and_policy_look_at_the_same_pods() {
    let configuration: Value = one("webhook.yaml", "MutatingWebhookConfiguration");
    let policy: Value = one("admission-policy.yaml", "MutatingAdmissionPolicy");
    let (webhook, policy) = (&configuration["webhooks"][0], &policy["spec"]);
    let constraints = &policy["matchConstraints"];
    assert_eq!(webhook["rules"], constraints["resourceRules"]);
    assert_eq!(webhook["namespaceSelector"], constraints["namespaceSelector"]);
    assert_eq!(webhook["objectSelector"], constraints["objectSelector"]);
    assert_eq!(policy["failurePolicy"], "Ignore");
    let text = policy["matchConditions"].to_string();
    for name in [default("resource"), default("annotation")].join(" ").split(' ') {
        assert!(text.contains(name.trim_end_matches('*')), "{name}");
    }
    let excluded = constraints["namespaceSelector"].to_string();
    for namespace in default("exclude-namespace").split(' ') {
        assert!(excluded.contains(namespace), "{namespace}");
    }
}
