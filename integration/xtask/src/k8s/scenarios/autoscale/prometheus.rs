//! Prometheus on the first node. It reads the node agents as the chart's ServiceMonitor asks it to.

use std::fs;

use affinode_e2e::containerd;
use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::k8s::{
    control_plane::Plane,
    metrics_programs::MetricsPrograms,
    scenarios::{agent::PORT as AGENT_PORT, agent_pod},
};

/// Namespace and service account of Prometheus.
pub const NAMESPACE: &str = "monitoring";
pub const ACCOUNT: &str = "prometheus";
/// Address and port of Prometheus, on the first node.
pub const ADDRESS: &str = "127.0.0.1:9090";

/// Starts Prometheus with the account that the chart permits to read the metrics, and waits until it
/// has read all agents.
pub fn start(plane: &Plane<'_>, programs: &MetricsPrograms) -> Result<()> {
    let node = plane.first();
    containerd::run(plane.kubectl().args(["create", "namespace", NAMESPACE]))?;
    let account = ["create", "serviceaccount", ACCOUNT, "-n", NAMESPACE];
    containerd::run(plane.kubectl().args(account))?;
    let token = ["create", "token", ACCOUNT, "-n", NAMESPACE, "--duration=4h"];
    let token = containerd::run(plane.kubectl().args(token))?;
    let file = plane.dir().join("prometheus.token");
    fs::write(&file, token.trim())?;
    let config = plane.dir().join("prometheus.yml");
    fs::write(&config, configuration(plane, &file.display().to_string())?.to_string())?;
    let arguments = [
        format!("--config.file={}", config.display()),
        format!("--storage.tsdb.path={}", plane.dir().join("prometheus").display()),
        format!("--web.listen-address={ADDRESS}"),
    ];
    node.spawn("prometheus", &programs.prometheus, &arguments)?;
    plane
        .until("Prometheus to read all agents", || {
            let up = query(plane, "sum(up)").unwrap_or_default();
            Ok((up == plane.nodes().len().to_string()).then_some(()))
        })
        .with_context(|| format!("see the log {}", node.log("prometheus").display()))
}

/// Removes the account. The program ends with the cluster.
pub fn remove(plane: &Plane<'_>) -> Result<()> {
    containerd::run(plane.kubectl().args(["delete", "namespace", NAMESPACE])).map(|_| ())
}

/// Returns the value of a query that results in one number, or an empty text if it results in
/// nothing.
fn query(plane: &Plane<'_>, query: &str) -> Result<String> {
    let mut curl = plane.world().keeper().command("curl".as_ref());
    curl.args(["--silent", "--get", "--data-urlencode", &format!("query={query}")]);
    curl.arg(format!("http://{ADDRESS}/api/v1/query"));
    let said: Value = serde_json::from_str(&containerd::run(&mut curl)?)?;
    Ok(said["data"]["result"][0]["value"][1].as_str().unwrap_or_default().to_owned())
}

/// Returns the configuration of Prometheus, as JSON, which is also YAML. It is what the Prometheus
/// operator makes of the chart's ServiceMonitor, with two differences: the interval is shorter, and
/// the addresses are listed, because Debian builds Prometheus without the discovery of Kubernetes.
fn configuration(plane: &Plane<'_>, token: &str) -> Result<Value> {
    let mut targets = Vec::new();
    for node in plane.nodes() {
        let pod = agent_pod(plane, node)?;
        let address = pod["status"]["podIP"].as_str().context("the agent's pod has no address")?;
        targets.push(json!({
            "targets": [format!("{address}:{AGENT_PORT}")], "labels": {"node": node.name},
        }));
    }
    Ok(json!({
        "global": {"scrape_interval": "2s"},
        "scrape_configs": [{
            "job_name": "affinode", "scheme": "https", "honor_labels": true,
            "authorization": {"credentials_file": token},
            "tls_config": {"insecure_skip_verify": true},
            "static_configs": targets,
        }],
    }))
}
