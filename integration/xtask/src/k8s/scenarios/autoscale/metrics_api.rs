//! Prometheus and prometheus-adapter on the first node. Prometheus reads the node agents as the
//! chart's ServiceMonitor asks it to. The adapter serves external metrics to the API server.

use std::fs;

use affinode_e2e::containerd;
use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::example;
use crate::{
    k8s::{
        control_plane::Plane,
        files,
        metrics_programs::MetricsPrograms,
        scenarios::{agent::PORT as AGENT_PORT, agent_pod},
    },
    output,
};

/// Namespace and service account of Prometheus.
pub const NAMESPACE: &str = "monitoring";
pub const ACCOUNT: &str = "prometheus";
/// Path of the API of external metrics, and name of its registration.
const API: &str = "/apis/external.metrics.k8s.io/v1beta1";
const API_SERVICE: &str = "v1beta1.external.metrics.k8s.io";
/// Address and port of Prometheus, on the first node.
const PROMETHEUS: &str = "127.0.0.1:9090";
/// Port of the adapter on the first node.
const ADAPTER_PORT: u16 = 6443;

/// The running Prometheus and metrics API.
pub struct MetricsApi<'a> {
    plane: &'a Plane<'a>,
}

impl<'a> MetricsApi<'a> {
    /// Starts Prometheus and the adapter with the rules of the example, and registers the adapter.
    pub fn start(plane: &'a Plane<'a>, programs: &MetricsPrograms) -> Result<Self> {
        let api = MetricsApi { plane };
        api.prometheus(programs)?;
        let node = plane.first();
        let kubeconfig = plane.dir().join(files::ADMIN).display().to_string();
        let arguments = [
            format!("--config={}", example("prometheus-adapter.yaml").display()),
            format!("--prometheus-url=http://{PROMETHEUS}/"),
            // The usual values of the adapter are too long for a test.
            "--metrics-relist-interval=5s".into(),
            "--metrics-max-age=60s".into(),
            format!("--secure-port={ADAPTER_PORT}"),
            format!("--cert-dir={}", plane.dir().join("adapter").display()),
            format!("--lister-kubeconfig={kubeconfig}"),
            format!("--authentication-kubeconfig={kubeconfig}"),
            format!("--authorization-kubeconfig={kubeconfig}"),
        ];
        node.spawn("prometheus-adapter", &programs.adapter, &arguments)?;
        objects(&node.address()).iter().try_for_each(|object| plane.apply(object))?;
        // The metrics themselves appear with the first GPU container.
        plane
            .until("the API server to reach the adapter", || {
                let object = plane.get(&["apiservice", API_SERVICE])?;
                let conditions = object["status"]["conditions"].as_array().cloned();
                let is_available = |c: &Value| c["type"] == "Available" && c["status"] == "True";
                Ok(conditions.unwrap_or_default().iter().any(is_available).then_some(()))
            })
            .with_context(|| format!("see the log {}", node.log("prometheus-adapter").display()))?;
        output::note(&format!("the API server serves {API}"));
        Ok(api)
    }

    /// Starts Prometheus with the account that the chart permits to read the metrics.
    fn prometheus(&self, programs: &MetricsPrograms) -> Result<()> {
        let (plane, node) = (self.plane, self.plane.first());
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
            format!("--web.listen-address={PROMETHEUS}"),
        ];
        node.spawn("prometheus", &programs.prometheus, &arguments)?;
        plane
            .until("Prometheus to read all agents", || {
                let up = self.query("sum(up)").unwrap_or_default();
                Ok((up == plane.nodes().len().to_string()).then_some(()))
            })
            .with_context(|| format!("see the log {}", node.log("prometheus").display()))
    }

    /// Returns the value of a query that results in one number, or an empty text if it results in
    /// nothing.
    pub fn query(&self, query: &str) -> Result<String> {
        let mut curl = self.plane.world().keeper().command("curl".as_ref());
        curl.args(["--silent", "--get", "--data-urlencode", &format!("query={query}")]);
        curl.arg(format!("http://{PROMETHEUS}/api/v1/query"));
        let said: Value = serde_json::from_str(&containerd::run(&mut curl)?)?;
        Ok(said["data"]["result"][0]["value"][1].as_str().unwrap_or_default().to_owned())
    }

    /// Returns the value of an external metric for the containers of this name, as the API server
    /// serves it. The text is empty if there is no value.
    pub fn external(&self, namespace: &str, metric: &str, container: &str) -> Result<String> {
        let path =
            format!("{API}/namespaces/{namespace}/{metric}?labelSelector=container%3D{container}");
        let said = containerd::run(self.plane.kubectl().args(["get", "--raw", &path]))?;
        let said: Value = serde_json::from_str(&said)?;
        Ok(said["items"][0]["value"].as_str().unwrap_or_default().to_owned())
    }

    /// Removes the registration and the account. The programs end with the cluster.
    pub fn remove(self) -> Result<()> {
        let service = ["delete", "apiservice", API_SERVICE];
        containerd::run(self.plane.kubectl().args(service))?;
        let namespace = ["delete", "namespace", NAMESPACE];
        containerd::run(self.plane.kubectl().args(namespace)).map(|_| ())
    }
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

/// Returns the objects by which the API server finds the adapter on the node with this address.
fn objects(address: &str) -> [Value; 3] {
    let service = json!({"name": "prometheus-adapter", "namespace": NAMESPACE});
    [
        json!({
            "apiVersion": "v1", "kind": "Service", "metadata": service,
            "spec": {"ports": [{"name": "https", "port": 443, "targetPort": ADAPTER_PORT}]},
        }),
        json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
            "metadata": {
                "name": "prometheus-adapter", "namespace": NAMESPACE,
                "labels": {"kubernetes.io/service-name": "prometheus-adapter"},
            },
            "ports": [{"name": "https", "port": ADAPTER_PORT}],
            "endpoints": [{"addresses": [address], "conditions": {"ready": true}}],
        }),
        json!({
            "apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService",
            "metadata": {"name": API_SERVICE},
            "spec": {
                "group": "external.metrics.k8s.io", "version": "v1beta1", "service": service,
                "insecureSkipTLSVerify": true, "groupPriorityMinimum": 100, "versionPriority": 100,
            },
        }),
    ]
}
