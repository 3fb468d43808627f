//! Tests on which nodes the chart's pods run, and which rights the pods and the uninstaller have.

use serde_json::{Value, json};

use super::{Rendered, render, render_for};

const ARCH: &str = "kubernetes.io/arch";

fn agents(rendered: &Rendered) -> &Value {
    &rendered.get("DaemonSet", "affinode-node")["spec"]["template"]["spec"]
}

#[test]
fn pods_run_where_the_image_runs() {
    // A node selector of the user must not replace the restriction to an architecture.
    let values = "
node: {nodeSelector: {kubernetes.io/arch: arm64, pool: a}, affinity: {}}
";
    let Some(rendered) = render_for("1.34.0", values) else { return };
    let rendered = rendered.unwrap();
    let mut seen = 0;
    for object in &rendered.0 {
        let single = object["kind"] == "Pod";
        let pod = if single { &object["spec"] } else { &object["spec"]["template"]["spec"] };
        if pod.is_object() {
            assert_eq!(pod["nodeSelector"][ARCH], "amd64", "{object}");
            seen += 1;
        }
    }
    assert_eq!(seen, 4, "agents, webhook, uninstaller, test");
    assert_eq!(agents(&rendered)["nodeSelector"]["pool"], "a");
}

/// A probe waits for a place among the agent's connections. A liveness probe that fails restarts the
/// agent.
#[test]
fn probes_of_agents_have_time() {
    let Some(rendered) = render("{}") else { return };
    let agent = &agents(&rendered)["containers"][0];
    for probe in ["readinessProbe", "livenessProbe"] {
        assert_eq!(agent[probe]["timeoutSeconds"], 5, "{probe}");
    }
}

#[test]
fn agents_find_every_kind_of_gpu_node() {
    let Some(rendered) = render("{}") else { return };
    let affinity = &agents(&rendered)["affinity"]["nodeAffinity"];
    let terms = &affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"];
    let keys: Vec<&str> = terms
        .as_array()
        .unwrap()
        .iter()
        .map(|term| term["matchExpressions"][0]["key"].as_str().unwrap())
        .collect();
    for key in [
        "nvidia.com/gpu.present",
        "feature.node.kubernetes.io/pci-0300_10de.present",
        "feature.node.kubernetes.io/pci-0302_10de.present",
        "cloud.google.com/gke-accelerator",
    ] {
        assert!(keys.contains(&key), "{key} is not in {keys:?}");
    }
}

#[test]
fn the_unit_of_the_controller_can_be_left_out() {
    for (values, argument) in [
        ("{}", "--controller-unit=true"),
        ("node: {controllerUnit: false}", "--controller-unit=false"),
    ] {
        let Some(rendered) = render(values) else { return };
        let args = agents(&rendered)["containers"][0]["args"].to_string();
        assert!(args.contains(argument), "{argument} is not in {args}");
    }
}

#[test]
fn time_until_gpus_are_idle_reaches_the_agents() {
    for (values, argument) in
        [("{}", "--gpus-idle-after=30m"), ("node: {gpusIdleAfter: 0s}", "--gpus-idle-after=0s")]
    {
        let Some(rendered) = render(values) else { return };
        let args = agents(&rendered)["containers"][0]["args"].to_string();
        assert!(args.contains(argument), "{argument} is not in {args}");
    }
}

#[test]
fn slots_of_a_rollout_are_those_agents_may_take() {
    let Some(rendered) = render("node: {rollout: {maxConcurrent: 2}}") else { return };
    let names = ["affinode-rollout-0", "affinode-rollout-1"];
    let args = agents(&rendered)["containers"][0]["args"].to_string();
    for name in names {
        rendered.get("Lease", name);
        assert!(args.contains(&format!("--rollout-lease={name}\"")), "{args}");
    }
    let rule = &rendered.get("Role", "affinode-node")["rules"][0];
    assert_eq!(rule["resourceNames"], json!(names));
    assert_eq!(rule["verbs"], json!(["get", "update"]));
    let Some(rendered) = render("{}") else { return };
    assert!(rendered.0.iter().all(|object| object["kind"] != "Lease"));
    assert!(rendered.find("Role", "affinode-node").is_none());
}

#[test]
fn a_quota_names_every_priority_class() {
    let values = "
resourceQuota: {enabled: true}
inject: {webhook: {priorityClassName: webhooks}}
";
    let Some(rendered) = render(values) else { return };
    let quota = &rendered.get("ResourceQuota", "affinode")["spec"];
    let classes = &quota["scopeSelector"]["matchExpressions"][0]["values"];
    assert_eq!(classes, &json!(["system-node-critical", "webhooks"]));
    assert_eq!(quota["hard"]["pods"], "10000");
}

#[test]
fn a_network_policy_covers_the_agents() {
    let values = "networkPolicy: {enabled: true, from: [{namespaceSelector: {}}]}";
    let Some(rendered) = render(values) else { return };
    let policy = &rendered.get("NetworkPolicy", "affinode-node")["spec"];
    assert_eq!(policy["podSelector"]["matchLabels"]["app.kubernetes.io/component"], "node");
    assert_eq!(policy["ingress"][0]["ports"], json!([{"port": "https", "protocol": "TCP"}]));
    assert_eq!(policy["ingress"][0]["from"], json!([{"namespaceSelector": {}}]));
    // A drain never evicts agents, so there is no disruption budget for them.
    assert!(rendered.find("PodDisruptionBudget", "affinode-node").is_none());
}

#[test]
fn rights_of_the_uninstaller_exist_while_it_runs() {
    let Some(rendered) = render("{}") else { return };
    let mut seen = 0;
    for object in &rendered.0 {
        if object["metadata"]["name"] != "affinode-uninstall" {
            continue;
        }
        let note = &object["metadata"]["annotations"];
        assert_eq!(note["helm.sh/hook"], "pre-delete", "{object}");
        let weight: i32 = note["helm.sh/hook-weight"].as_str().unwrap_or("0").parse().unwrap();
        let ends = note["helm.sh/hook-delete-policy"].as_str().unwrap();
        assert!(ends.contains("hook-succeeded"), "{object}");
        if object["kind"] == "Job" {
            // If the job fails, its pod stays, so that the log can be read.
            assert!(weight == 0 && !ends.contains("hook-failed"), "{object}");
        } else {
            assert!(weight < 0 && ends.contains("hook-failed"), "{object}");
        }
        seen += 1;
    }
    assert_eq!(seen, 6, "the Job, its account, two roles with their bindings");
}

#[test]
fn prometheus_may_read_metrics_where_it_is_named() {
    let values = "serviceMonitor: {account: {name: prometheus-k8s, namespace: monitoring}}";
    let Some(rendered) = render(values) else { return };
    let role = &rendered.get("ClusterRole", "affinode-metrics")["rules"];
    assert_eq!(role, &json!([{"nonResourceURLs": ["/metrics"], "verbs": ["get"]}]));
    let subject = &rendered.get("ClusterRoleBinding", "affinode-metrics")["subjects"][0];
    assert_eq!(subject["namespace"], "monitoring");
}

#[test]
fn helm_test_starts_a_gpu_pod_of_the_class() {
    let Some(rendered) = render("runtimeClass: {name: other}") else { return };
    let pod = rendered.get("Pod", "affinode-test");
    assert_eq!(pod["metadata"]["annotations"]["helm.sh/hook"], "test");
    assert_eq!(pod["spec"]["runtimeClassName"], "other");
    assert_eq!(pod["spec"]["restartPolicy"], "Never");
    let container = &pod["spec"]["containers"][0];
    assert_eq!(container["resources"]["limits"]["nvidia.com/gpu"], 1);
    let program = env!("CARGO_BIN_EXE_affinode-cluster");
    let command = container["command"].as_array().unwrap();
    // The command exists. It fails here, because this test does not run in a managed container.
    let mut check = std::process::Command::new(program);
    let output = check.args(command[1..].iter().map(|word| word.as_str().unwrap())).output();
    let output = output.unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("is not managed"), "{said}");
}

/// A user of `kubectl affinode` may list nodes and agents, and forward a port to an agent.
#[test]
fn users_of_the_plugin_may_reach_agents() {
    let Some(rendered) = render("{}") else { return };
    let may = |rules: &Value, resource: &str, verb: &str| {
        let has =
            |list: &Value, word: &str| list.as_array().is_some_and(|l| l.contains(&json!(word)));
        rules
            .as_array()
            .unwrap()
            .iter()
            .any(|r| has(&r["resources"], resource) && has(&r["verbs"], verb))
    };
    let role = rendered.get("Role", "affinode-kubectl");
    assert_eq!(role["metadata"]["namespace"], "affinode-system");
    for (resource, verb) in
        [("pods", "list"), ("pods/portforward", "get"), ("pods/portforward", "create")]
    {
        assert!(may(&role["rules"], resource, verb), "{verb} {resource}");
    }
    let viewer = &rendered.get("ClusterRole", "affinode-viewer")["rules"];
    assert!(may(viewer, "nodes", "list") && !may(viewer, "nodes", "patch"), "{viewer}");
    let Some(without) = render("rbac: {viewers: false}") else { return };
    assert!(without.find("Role", "affinode-kubectl").is_none());
}
