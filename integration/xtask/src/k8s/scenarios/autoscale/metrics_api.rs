//! The API of external metrics, which the API server forwards to a program on the first node:
//! prometheus-adapter or KEDA's adapter. A cluster has only one such program at a time.

use affinode_e2e::containerd;
use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::{example, prometheus};
use crate::{
    k8s::{control_plane::Plane, files, metrics_programs::MetricsPrograms},
    output,
};

/// Path of the API of external metrics, and name of its registration.
const API: &str = "/apis/external.metrics.k8s.io/v1beta1";
const API_SERVICE: &str = "v1beta1.external.metrics.k8s.io";
/// Name of prometheus-adapter's service and log, and its port on the first node.
const ADAPTER: &str = "prometheus-adapter";
const ADAPTER_PORT: u16 = 6443;

/// The registered API of external metrics.
pub struct MetricsApi<'a> {
    plane: &'a Plane<'a>,
}

impl<'a> MetricsApi<'a> {
    /// Starts prometheus-adapter with the rules of the example, and registers it.
    pub fn of_adapter(plane: &'a Plane<'a>, programs: &MetricsPrograms) -> Result<Self> {
        let kubeconfig = plane.dir().join(files::ADMIN).display().to_string();
        let arguments = [
            format!("--config={}", example("prometheus-adapter.yaml").display()),
            format!("--prometheus-url=http://{}/", prometheus::ADDRESS),
            // The usual values of the adapter are too long for a test.
            "--metrics-relist-interval=5s".into(),
            "--metrics-max-age=60s".into(),
            format!("--secure-port={ADAPTER_PORT}"),
            format!("--cert-dir={}", plane.dir().join("adapter").display()),
            format!("--lister-kubeconfig={kubeconfig}"),
            format!("--authentication-kubeconfig={kubeconfig}"),
            format!("--authorization-kubeconfig={kubeconfig}"),
        ];
        plane.first().spawn(ADAPTER, &programs.adapter, &arguments)?;
        Self::register(plane, prometheus::NAMESPACE, ADAPTER, ADAPTER_PORT)
    }

    /// Registers a server of the API that listens at this port of the first node, with a service of
    /// this name. The log of the server has the same name.
    pub fn register(
        plane: &'a Plane<'a>,
        namespace: &str,
        service: &str,
        port: u16,
    ) -> Result<Self> {
        let node = plane.first();
        let objects = objects(&node.address(), namespace, service, port);
        objects.iter().try_for_each(|object| plane.apply(object))?;
        // The metrics themselves appear with the first GPU container.
        plane
            .until(&format!("the API server to reach {service}"), || {
                let object = plane.get(&["apiservice", API_SERVICE])?;
                let conditions = object["status"]["conditions"].as_array().cloned();
                let is_available = |c: &Value| c["type"] == "Available" && c["status"] == "True";
                Ok(conditions.unwrap_or_default().iter().any(is_available).then_some(()))
            })
            .with_context(|| format!("see the log {}", node.log(service).display()))?;
        output::note(&format!("the API server serves {API}, by {service}"));
        Ok(MetricsApi { plane })
    }

    /// Returns the value of an external metric, as the API server serves it. The text is empty if
    /// there is no value.
    pub fn external(&self, namespace: &str, metric: &str, selector: &str) -> Result<String> {
        let selector = selector.replace('=', "%3D");
        let path = format!("{API}/namespaces/{namespace}/{metric}?labelSelector={selector}");
        let said = containerd::run(self.plane.kubectl().args(["get", "--raw", &path]))?;
        let said: Value = serde_json::from_str(&said)?;
        Ok(said["items"][0]["value"].as_str().unwrap_or_default().to_owned())
    }

    /// Removes the registration. The program that serves the API runs on.
    pub fn remove(self) -> Result<()> {
        let service = ["delete", "apiservice", API_SERVICE];
        containerd::run(self.plane.kubectl().args(service)).map(|_| ())
    }
}

/// Returns the objects by which the API server finds the server of the API on the node with this
/// address.
fn objects(address: &str, namespace: &str, service: &str, port: u16) -> [Value; 3] {
    let name = json!({"name": service, "namespace": namespace});
    [
        json!({
            "apiVersion": "v1", "kind": "Service", "metadata": name,
            "spec": {"ports": [{"name": "https", "port": 443, "targetPort": port}]},
        }),
        json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
            "metadata": {
                "name": service, "namespace": namespace,
                "labels": {"kubernetes.io/service-name": service},
            },
            "ports": [{"name": "https", "port": port}],
            "endpoints": [{"addresses": [address], "conditions": {"ready": true}}],
        }),
        json!({
            "apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService",
            "metadata": {"name": API_SERVICE},
            "spec": {
                "group": "external.metrics.k8s.io", "version": "v1beta1", "service": name,
                "insecureSkipTLSVerify": true, "groupPriorityMinimum": 100, "versionPriority": 100,
            },
        }),
    ]
}
