//! Checks of autoscaling by the wait for VRAM: the examples of `config/kubernetes/autoscaling`, with
//! a real Prometheus, the real prometheus-adapter, and the HPA controller of Kubernetes.

mod idle;
mod metrics_api;
mod server;

use std::path::PathBuf;

use affinode_e2e::{artifacts::workspace_dir, containerd};
use anyhow::{Context, Result, ensure};
use serde_json::Value;

use self::{metrics_api::MetricsApi, server::Server};
use super::{agent_log, dra, pods::Pod, step, uninstall};
use crate::{
    k8s::{control_plane::Plane, metrics_programs::MetricsPrograms},
    output,
};

/// Namespace of the example's Deployment.
const NAMESPACE: &str = "ml";
/// Name of the example's Deployment, container, HorizontalPodAutoscaler and ScaledObject.
const NAME: &str = "server";
/// External metrics of the example.
const METRIC: &str = "affinode-waiting-containers";
const WAIT_METRIC: &str = "affinode-longest-wait-seconds";
/// VRAM in MiB of a pod. Two such pods do not fit on a GPU of 1,024 MiB.
const LARGE_MIB: u32 = 600;

/// Installs Affinode, Prometheus and the metrics API, and applies the examples without changes. A
/// container that waits for VRAM must make the Deployment larger. The metric must return to 0 when
/// the container has its VRAM.
pub fn waits_scale_a_deployment(plane: &Plane<'_>) -> Result<()> {
    let programs = MetricsPrograms::prepare(plane.world().artifacts())?;
    step("helm install, Prometheus, prometheus-adapter");
    let account = metrics_api::ACCOUNT;
    let values = format!(
        "serviceMonitor.account.name={account},serviceMonitor.account.namespace={},\
         node.gpusIdleAfter={}",
        metrics_api::NAMESPACE,
        idle::IDLE_AFTER
    );
    dra::install_sharing(plane, &values)?;
    let api = MetricsApi::start(plane, &programs)?;
    containerd::run(plane.kubectl().args(["create", "namespace", NAMESPACE]))?;
    let query = scaled_object_is_valid(plane, &programs)?;
    let mut server = Server::start(plane)?;
    let holder = server_waits(plane, &server)?;
    grows(plane, &api, &query)?;
    server.runs_elsewhere_too()?;
    holder.delete()?;
    server.is_back()?;
    output::note("the other pod is deleted: the first replica has its GPU memory again");
    rests(plane, &api, &query)?;
    idle::nodes_are_named(plane, &mut server)?;
    server.delete()?;
    containerd::run(plane.kubectl().args(["delete", "crd", "scaledobjects.keda.sh"]))?;
    api.remove()?;
    containerd::run(plane.kubectl().args(["delete", "namespace", NAMESPACE]))?;
    uninstall::all(plane)
}

/// Returns the path of an example.
fn example(file: &str) -> PathBuf {
    workspace_dir().join("config/kubernetes/autoscaling").join(file)
}

/// Creates the ScaledObject of the example, with the real resource type of KEDA. Returns its query.
fn scaled_object_is_valid(plane: &Plane<'_>, programs: &MetricsPrograms) -> Result<String> {
    step("The ScaledObject for KEDA, against KEDA's resource type");
    let crd = ["apply", "--server-side", "-f"];
    containerd::run(plane.kubectl().args(crd).arg(&programs.scaled_object))?;
    let established =
        ["wait", "--for=condition=Established", "crd/scaledobjects.keda.sh", "--timeout=60s"];
    containerd::run(plane.kubectl().args(established))?;
    let apply = ["apply", "--validate=strict", "-f"];
    containerd::run(plane.kubectl().args(apply).arg(example("keda.yaml")))?;
    let object = plane.get(&["scaledobject", NAME, "-n", NAMESPACE])?;
    let trigger = &object["spec"]["triggers"][0];
    ensure!(trigger["type"] == "prometheus", "expected a trigger of type prometheus: {object}");
    let query = trigger["metadata"]["query"].as_str().context("the trigger has no query")?;
    output::note(&format!("the API server accepts it; its query: {query}"));
    Ok(query.to_owned())
}

/// Creates the HorizontalPodAutoscaler of the example, and fills the GPU of the server's container,
/// which is offloaded, with another pod. The server's container then makes a call, and waits.
/// Returns the pod that holds the GPU.
fn server_waits<'a>(plane: &'a Plane<'a>, server: &Server<'a>) -> Result<Pod<'a>> {
    step("kubectl apply -f config/kubernetes/autoscaling/hpa.yaml");
    containerd::run(plane.kubectl().args(["apply", "-f"]).arg(example("hpa.yaml")))?;
    let value = until_shown(plane, "0")?;
    output::note(&format!("the HorizontalPodAutoscaler reads {METRIC} = {value}"));
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
fn grows(plane: &Plane<'_>, api: &MetricsApi<'_>, query: &str) -> Result<()> {
    plane.until(&format!("{METRIC} to be 1"), || {
        Ok((api.external(NAMESPACE, METRIC, NAME)? == "1").then_some(()))
    })?;
    let replicas = plane
        .until("the Deployment to get a second replica", || {
            let object = plane.get(&["deployment", NAME, "-n", NAMESPACE])?;
            let replicas = object["spec"]["replicas"].as_u64().unwrap_or_default();
            Ok((replicas > 1).then_some(replicas))
        })
        .with_context(|| describe(plane))?;
    let seconds = api.external(NAMESPACE, WAIT_METRIC, NAME)?;
    ensure!(
        !seconds.is_empty() && seconds != "0",
        "{WAIT_METRIC} is {seconds:?} while a container waits"
    );
    let asked = api.query(query)?;
    ensure!(asked == "1", "KEDA's query returns {asked}, expected 1");
    output::note(&format!(
        "{METRIC} = 1, {WAIT_METRIC} = {seconds} (a Kubernetes quantity), KEDA's query = {asked}: \
         {replicas} replicas"
    ));
    Ok(())
}

/// Waits until the metric is 0 again, in the metrics API and in the HorizontalPodAutoscaler.
fn rests(plane: &Plane<'_>, api: &MetricsApi<'_>, query: &str) -> Result<()> {
    plane.until(&format!("{METRIC} to be 0"), || {
        Ok((api.external(NAMESPACE, METRIC, NAME)? == "0").then_some(()))
    })?;
    let value = until_shown(plane, "0")?;
    let asked = api.query(query)?;
    ensure!(asked == "0", "KEDA's query returns {asked}, expected 0");
    output::note(&format!(
        "the queue is empty: the HorizontalPodAutoscaler reads {METRIC} = {value}, KEDA's query = \
         {asked}"
    ));
    Ok(())
}

/// Waits until the HorizontalPodAutoscaler shows this value of the metric, and returns the value.
fn until_shown(plane: &Plane<'_>, wanted: &str) -> Result<String> {
    let shown = plane.until(&format!("the autoscaler to read {METRIC} = {wanted}"), || {
        let object = plane.get(&["hpa", NAME, "-n", NAMESPACE])?;
        let external = &object["status"]["currentMetrics"][0]["external"];
        let value = external["current"]["value"].as_str().unwrap_or_default();
        let conditions = object["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let is_active = |c: &Value| c["type"] == "ScalingActive" && c["status"] == "True";
        let reads = external["metric"]["name"] == METRIC && conditions.iter().any(is_active);
        Ok((reads && value == wanted).then(|| value.to_owned()))
    });
    shown.with_context(|| describe(plane))
}

/// Returns what kubectl shows about the HorizontalPodAutoscaler, and the logs of the agents.
fn describe(plane: &Plane<'_>) -> String {
    let told = plane.kubectl().args(["describe", "hpa", NAME, "-n", NAMESPACE]).output();
    let told = told.map(|told| String::from_utf8_lossy(&told.stdout).into_owned());
    told.unwrap_or_default() + &agent_log(plane)
}
