//! KEDA's operator and its server of external metrics, on the first node.

use std::fs;

use affinode_e2e::containerd;
use anyhow::{Context, Result, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;

use super::{
    Autoscaler, NAME, NAMESPACE as OF_SERVER, example, metrics_api::MetricsApi, prometheus,
};
use crate::{
    k8s::{control_plane::Plane, files, metrics_programs::MetricsPrograms, scenarios::step},
    output,
};

/// Namespace in which the programs of KEDA look for their own objects.
const NAMESPACE: &str = "keda";
/// Name of the operator's log.
const OPERATOR: &str = "keda-operator";
/// Name of the service and the log of the server of external metrics, and its port.
const ADAPTER: &str = "keda-metrics-apiserver";
const ADAPTER_PORT: u16 = 6444;
/// Address at which the operator computes metrics for this server.
const METRICS_SERVICE: &str = "127.0.0.1:9666";
/// Address of the operator's health, and port of the server's own metrics.
const HEALTH: &str = "127.0.0.1:8091";
const ADAPTER_METRICS_PORT: u16 = 8092;
/// Address of Prometheus in the example.
const EXAMPLE_ADDRESS: &str = "http://prometheus-operated.monitoring.svc:9090";

/// The HorizontalPodAutoscaler that KEDA makes for the example. KEDA names the metric after the
/// number and the type of the trigger.
pub const AUTOSCALER: Autoscaler = Autoscaler {
    name: "keda-hpa-server",
    metric: "s0-prometheus",
    selector: "scaledobject.keda.sh/name=server",
};

/// The running programs of KEDA.
pub struct Keda<'a> {
    plane: &'a Plane<'a>,
    programs: &'a MetricsPrograms,
    started: [Pid; 2],
    api: MetricsApi<'a>,
}

impl<'a> Keda<'a> {
    /// Creates KEDA's resource types, starts its programs, and registers its server of external
    /// metrics in place of another.
    pub fn start(plane: &'a Plane<'a>, programs: &'a MetricsPrograms) -> Result<Self> {
        step("KEDA's operator and its server of external metrics");
        let types = ["apply", "--server-side", "-f"];
        containerd::run(plane.kubectl().args(types).arg(&programs.keda_types))?;
        let established = ["wait", "--for=condition=Established", "--timeout=60s", "-f"];
        containerd::run(plane.kubectl().args(established).arg(&programs.keda_types))?;
        containerd::run(plane.kubectl().args(["create", "namespace", NAMESPACE]))?;
        let certificates = plane.dir().join(NAMESPACE);
        files::loopback_certificate(&certificates)?;
        let certificates = certificates.display();
        let kubeconfig = plane.dir().join(files::ADMIN).display().to_string();
        // An empty text stands for all namespaces.
        let env = [
            ("POD_NAMESPACE", NAMESPACE),
            ("KEDA_CLUSTER_OBJECT_NAMESPACE", NAMESPACE),
            ("WATCH_NAMESPACE", ""),
        ];
        let node = plane.first();
        let operator = [
            format!("--kubeconfig={kubeconfig}"),
            format!("--cert-dir={certificates}"),
            format!("--metrics-service-bind-address={METRICS_SERVICE}"),
            format!("--health-probe-bind-address={HEALTH}"),
            "--enable-prometheus-metrics=false".into(),
        ];
        let operator = node.spawn_with(OPERATOR, &programs.keda_operator, &operator, &env)?;
        plane
            .until("KEDA's operator", || {
                let mut curl = plane.world().keeper().command("curl".as_ref());
                curl.args(["--silent", "--fail", &format!("http://{HEALTH}/readyz")]);
                Ok(curl.output()?.status.success().then_some(()))
            })
            .with_context(|| format!("see the log {}", node.log(OPERATOR).display()))?;
        let adapter = [
            format!("--kubeconfig={kubeconfig}"),
            format!("--lister-kubeconfig={kubeconfig}"),
            format!("--authentication-kubeconfig={kubeconfig}"),
            format!("--authorization-kubeconfig={kubeconfig}"),
            format!("--metrics-service-address={METRICS_SERVICE}"),
            format!("--secure-port={ADAPTER_PORT}"),
            format!("--port={ADAPTER_METRICS_PORT}"),
            format!("--cert-dir={certificates}"),
            format!("--tls-cert-file={certificates}/tls.crt"),
            format!("--tls-private-key-file={certificates}/tls.key"),
        ];
        let adapter = node.spawn_with(ADAPTER, &programs.keda_adapter, &adapter, &env)?;
        let api = MetricsApi::register(plane, NAMESPACE, ADAPTER, ADAPTER_PORT)?;
        Ok(Self { plane, programs, started: [operator, adapter], api })
    }

    /// The API of external metrics.
    pub fn api(&self) -> &MetricsApi<'a> {
        &self.api
    }

    /// Creates the ScaledObject of the example, with the address of this cluster's Prometheus, and
    /// waits until KEDA has made a HorizontalPodAutoscaler of it.
    pub fn apply_example(&self) -> Result<()> {
        step("kubectl apply -f config/kubernetes/autoscaling/keda.yaml");
        let text = fs::read_to_string(example("keda.yaml")).context("cannot read the example")?;
        ensure!(text.contains(EXAMPLE_ADDRESS), "the example does not name {EXAMPLE_ADDRESS}");
        let address = format!("http://{}", prometheus::ADDRESS);
        let file = self.plane.dir().join("keda.yaml");
        fs::write(&file, text.replace(EXAMPLE_ADDRESS, &address))?;
        let apply = ["apply", "--validate=strict", "-f"];
        containerd::run(self.plane.kubectl().args(apply).arg(&file))?;
        self.plane
            .until("the ScaledObject to be ready", || {
                let object = self.plane.get(&["scaledobject", NAME, "-n", OF_SERVER])?;
                let conditions = object["status"]["conditions"].as_array().cloned();
                let is_ready = |c: &Value| c["type"] == "Ready" && c["status"] == "True";
                Ok(conditions.unwrap_or_default().iter().any(is_ready).then_some(()))
            })
            .with_context(|| self.log())?;
        let object = self.plane.get(&["hpa", AUTOSCALER.name, "-n", OF_SERVER])?;
        ensure!(
            object["spec"]["scaleTargetRef"]["name"] == NAME
                && object["spec"]["minReplicas"] == 1
                && object["spec"]["maxReplicas"] == 4,
            "KEDA made another HorizontalPodAutoscaler: {object}"
        );
        output::note(&format!("KEDA made the HorizontalPodAutoscaler {}", AUTOSCALER.name));
        Ok(())
    }

    /// Deletes the ScaledObject, with which the HorizontalPodAutoscaler must go. Then removes KEDA.
    pub fn remove(self) -> Result<()> {
        let plane = self.plane;
        let object = ["delete", "scaledobject", NAME, "-n", OF_SERVER, "--timeout=120s"];
        containerd::run(plane.kubectl().args(object)).with_context(|| self.log())?;
        plane.until("the HorizontalPodAutoscaler to go", || {
            let all = plane.get(&["hpa", "-n", OF_SERVER])?;
            Ok(all["items"].as_array().is_some_and(Vec::is_empty).then_some(()))
        })?;
        output::note("the ScaledObject is deleted, and KEDA's HorizontalPodAutoscaler with it");
        for pid in self.started {
            kill(pid, Signal::SIGKILL)
                .with_context(|| format!("a program of KEDA ended too early; {}", self.log()))?;
        }
        self.api.remove()?;
        let types = ["delete", "-f"];
        containerd::run(plane.kubectl().args(types).arg(&self.programs.keda_types))?;
        containerd::run(plane.kubectl().args(["delete", "namespace", NAMESPACE])).map(|_| ())
    }

    /// Returns where the logs of KEDA's programs are.
    fn log(&self) -> String {
        let node = self.plane.first();
        let (operator, adapter) = (node.log(OPERATOR), node.log(ADAPTER));
        format!("see the logs {} and {}", operator.display(), adapter.display())
    }
}
