//! Checks of autoscaling by the wait for VRAM: the examples of `config/kubernetes/autoscaling`, with
//! a real Prometheus, the real prometheus-adapter, the real KEDA, and the HPA controller of Kubernetes.

mod idle;
mod keda;
mod metrics_api;
mod prometheus;
mod server;

use std::path::PathBuf;

use affinode_e2e::{artifacts::workspace_dir, containerd};
use anyhow::{Context, Result, ensure};
use serde_json::Value;

use self::{keda::Keda, metrics_api::MetricsApi, server::Server};
use super::{agent_log, dra, pods::Pod, step, uninstall};
use crate::{
    k8s::{control_plane::Plane, metrics_programs::MetricsPrograms},
    output,
};

/// Namespace of the example's Deployment.
const NAMESPACE: &str = "ml";
/// Name of the example's Deployment, container, HorizontalPodAutoscaler and ScaledObject.
const NAME: &str = "server";
/// The HorizontalPodAutoscaler of the example.
const OF_ADAPTER: Autoscaler =
    Autoscaler { name: NAME, metric: "affinode-waiting-containers", selector: "container=server" };
/// The other external metric of the example.
const WAIT_METRIC: &str = "affinode-longest-wait-seconds";
/// VRAM in MiB of a pod. Two such pods do not fit on a GPU of 1,024 MiB.
const LARGE_MIB: u32 = 600;

/// A HorizontalPodAutoscaler, and the external metric that it reads: the number of containers that
/// wait.
#[derive(PartialEq)]
struct Autoscaler {
    name: &'static str,
    metric: &'static str,
    selector: &'static str,
}

/// Installs Affinode and Prometheus, and applies the examples without changes, first with
/// prometheus-adapter and then with KEDA. A container that waits for VRAM must make the Deployment
/// larger. The metric must return to 0 when the container has its VRAM.
pub fn waits_scale_a_deployment(plane: &Plane<'_>) -> Result<()> {
    let programs = MetricsPrograms::prepare(plane.world().artifacts())?;
    step("helm install, Prometheus");
    let values = format!(
        "serviceMonitor.account.name={},serviceMonitor.account.namespace={},node.gpusIdleAfter={}",
        prometheus::ACCOUNT,
        prometheus::NAMESPACE,
        idle::IDLE_AFTER
    );
    dra::install_sharing(plane, &values)?;
    prometheus::start(plane, &programs)?;
    containerd::run(plane.kubectl().args(["create", "namespace", NAMESPACE]))?;
    by_adapter(plane, &programs)?;
    by_keda(plane, &programs)?;
    prometheus::remove(plane)?;
    containerd::run(plane.kubectl().args(["delete", "namespace", NAMESPACE]))?;
    uninstall::all(plane)
}

/// The example `hpa.yaml`, with prometheus-adapter. Then checks the label of idle nodes.
fn by_adapter(plane: &Plane<'_>, programs: &MetricsPrograms) -> Result<()> {
    step("prometheus-adapter");
    let api = MetricsApi::of_adapter(plane, programs)?;
    let mut server = Server::start(plane)?;
    step("kubectl apply -f config/kubernetes/autoscaling/hpa.yaml");
    containerd::run(plane.kubectl().args(["apply", "-f"]).arg(example("hpa.yaml")))?;
    scales(plane, &api, &OF_ADAPTER, &mut server)?;
    idle::nodes_are_named(plane, &mut server)?;
    containerd::run(plane.kubectl().args(["delete", "hpa", NAME, "-n", NAMESPACE]))?;
    server.delete()?;
    api.remove()
}

/// The example `keda.yaml`, with KEDA.
fn by_keda(plane: &Plane<'_>, programs: &MetricsPrograms) -> Result<()> {
    let keda = Keda::start(plane, programs)?;
    let mut server = Server::start(plane)?;
    keda.apply_example()?;
    scales(plane, keda.api(), &keda::AUTOSCALER, &mut server)?;
    keda.remove()?;
    server.delete()
}

/// Makes the server's container wait for VRAM, until the Deployment has a second replica. Then gives
/// the container its VRAM.
fn scales(
    plane: &Plane<'_>,
    api: &MetricsApi<'_>,
    autoscaler: &Autoscaler,
    server: &mut Server<'_>,
) -> Result<()> {
    let value = until_shown(plane, autoscaler, "0")?;
    let metric = autoscaler.metric;
    output::note(&format!("the HorizontalPodAutoscaler reads {metric} = {value}"));
    let holder = server_waits(plane, server)?;
    grows(plane, api, autoscaler)?;
    server.runs_elsewhere_too()?;
    holder.delete()?;
    server.is_back()?;
    output::note("the other pod is deleted: the first replica has its GPU memory again");
    plane.until(&format!("{metric} to be 0"), || {
        Ok((api.external(NAMESPACE, metric, autoscaler.selector)? == "0").then_some(()))
    })?;
    let value = until_shown(plane, autoscaler, "0")?;
    output::note(&format!(
        "the queue is empty: the HorizontalPodAutoscaler reads {metric} = {value}"
    ));
    Ok(())
}

/// Returns the path of an example.
fn example(file: &str) -> PathBuf {
    workspace_dir().join("config/kubernetes/autoscaling").join(file)
}

/// Fills the GPU of the server's container, which is offloaded, with another pod. The server's
/// container then makes a call, and waits. Returns the pod that holds the GPU.
fn server_waits<'a>(plane: &'a Plane<'a>, server: &Server<'a>) -> Result<Pod<'a>> {
    step(&format!("Another pod holds the GPU of {}, and the server makes a call", server.node()));
    let node = plane.nodes().iter().find(|node| node.name == server.node());
    let node = node.context("the server runs on no node of the cluster")?;
    let mut holder = node.gpu_pod("holder", LARGE_MIB)?;
    holder["metadata"]["annotations"]["affinode.io/offload"] = "off".into();
    let mut holder = Pod::start(plane, node, "holder", &holder)?;
    holder.has_filled()?;
    server.call()?;
    Ok(holder)
}

/// Waits until the HorizontalPodAutoscaler has made the Deployment larger.
fn grows(plane: &Plane<'_>, api: &MetricsApi<'_>, autoscaler: &Autoscaler) -> Result<()> {
    let Autoscaler { metric, selector, .. } = autoscaler;
    plane.until(&format!("{metric} to be 1"), || {
        Ok((api.external(NAMESPACE, metric, selector)? == "1").then_some(()))
    })?;
    let replicas = plane
        .until("the Deployment to get a second replica", || {
            let object = plane.get(&["deployment", NAME, "-n", NAMESPACE])?;
            let replicas = object["spec"]["replicas"].as_u64().unwrap_or_default();
            Ok((replicas > 1).then_some(replicas))
        })
        .with_context(|| describe(plane, autoscaler))?;
    output::note(&format!("{metric} = 1: {replicas} replicas"));
    if *autoscaler == OF_ADAPTER {
        let seconds = api.external(NAMESPACE, WAIT_METRIC, selector)?;
        ensure!(
            !seconds.is_empty() && seconds != "0",
            "{WAIT_METRIC} is {seconds:?} while a container waits"
        );
        output::note(&format!("{WAIT_METRIC} = {seconds} (a Kubernetes quantity)"));
    }
    Ok(())
}

/// Waits until the HorizontalPodAutoscaler shows this value of the metric, and returns the value.
fn until_shown(plane: &Plane<'_>, autoscaler: &Autoscaler, wanted: &str) -> Result<String> {
    let Autoscaler { name, metric, .. } = autoscaler;
    let shown = plane.until(&format!("the autoscaler to read {metric} = {wanted}"), || {
        let object = plane.get(&["hpa", name, "-n", NAMESPACE])?;
        let external = &object["status"]["currentMetrics"][0]["external"];
        let value = external["current"]["value"].as_str().unwrap_or_default();
        let conditions = object["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let is_active = |c: &Value| c["type"] == "ScalingActive" && c["status"] == "True";
        let reads = external["metric"]["name"] == *metric && conditions.iter().any(is_active);
        Ok((reads && value == wanted).then(|| value.to_owned()))
    });
    shown.with_context(|| describe(plane, autoscaler))
}

/// Returns what kubectl shows about the HorizontalPodAutoscaler, and the logs of the agents.
fn describe(plane: &Plane<'_>, autoscaler: &Autoscaler) -> String {
    let told = plane.kubectl().args(["describe", "hpa", autoscaler.name, "-n", NAMESPACE]).output();
    let told = told.map(|told| String::from_utf8_lossy(&told.stdout).into_owned());
    told.unwrap_or_default() + &agent_log(plane)
}
