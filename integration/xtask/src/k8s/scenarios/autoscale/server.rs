//! The Deployment of the autoscaling example. Each replica runs on another node, as the documents
//! advise, because a replica on the same GPU would wait too.

use affinode_e2e::{container, containerd, worker::Lines};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::{LARGE_MIB, NAME, NAMESPACE};
use crate::{
    k8s::{
        control_plane::Plane,
        node::{HOME, Node},
        scenarios::GPU_STATE,
    },
    output,
};

/// The Deployment with its first replica.
pub struct Server<'a> {
    plane: &'a Plane<'a>,
    pod: String,
    node: String,
    lines: Lines,
}

impl<'a> Server<'a> {
    /// Creates the Deployment with one replica, and waits until the GPU memory of the replica is
    /// offloaded.
    pub fn start(plane: &'a Plane<'a>) -> Result<Self> {
        super::step(&format!("A Deployment {NAME} whose container is idle"));
        for node in plane.nodes() {
            container::make_pipes(node.world.dir(), NAME)?;
        }
        plane.apply(&manifest(plane.first())?)?;
        let mut replicas = until_running(plane, 1)?;
        let (pod, node) = replicas.pop().context("the Deployment has no replica")?;
        let home = plane.nodes().iter().find(|known| known.name == node);
        let home = home.context("the replica runs on no node of the cluster")?;
        let lines = Lines::open(&home.world.dir().join("io").join(NAME))?;
        let mut server = Server { plane, pod, node, lines };
        server.receive("open")?;
        server.receive("fill")?;
        plane.until("the label Offloaded of the replica", || {
            let pod = plane.get(&["pod", &server.pod, "-n", NAMESPACE])?;
            Ok((pod["metadata"]["labels"][GPU_STATE] == "Offloaded").then_some(()))
        })?;
        output::note(&format!("{} runs on {}, and is offloaded", server.pod, server.node));
        Ok(server)
    }

    /// Returns the name of the node of the first replica.
    pub fn node(&self) -> &str {
        &self.node
    }

    fn receive(&mut self, command: &str) -> Result<()> {
        let line = self.lines.receive()?;
        let wanted = format!("\"command\":\"{command}\",\"result\":0");
        ensure!(line.contains(&wanted), "expected {wanted:?}, got {line}");
        Ok(())
    }

    /// Makes the program of the first replica call CUDA.
    pub fn call(&self) -> Result<()> {
        let script = format!("echo verify > {}/in", container::PIPES);
        let exec = ["exec", "-n", NAMESPACE, &self.pod, "--", "/bin/sh", "-c", &script];
        containerd::run(self.plane.kubectl().args(exec)).map(|_| ())
    }

    /// Waits until the second replica runs on another node. A cluster of one node has no other GPU,
    /// so that the second replica stays pending there.
    pub fn runs_elsewhere_too(&self) -> Result<()> {
        if self.plane.nodes().len() == 1 {
            return Ok(());
        }
        let replicas = until_running(self.plane, 2)?;
        let other = replicas.iter().find(|(_, node)| *node != self.node);
        let (pod, node) = other.context("no replica runs on another node")?;
        output::note(&format!("the second replica {pod} runs on {node}"));
        Ok(())
    }

    /// Waits for the reply to the call of the first replica.
    pub fn is_back(&mut self) -> Result<()> {
        self.receive("verify")
    }

    /// Deletes the Deployment, and waits until all replicas have ended.
    pub fn delete(self) -> Result<()> {
        let delete = ["delete", "deployment", NAME, "-n", NAMESPACE, "--cascade=foreground"];
        containerd::run(self.plane.kubectl().args(delete)).map(|_| ())
    }
}

/// Waits until this number of replicas runs. Returns the name and the node of each of them.
fn until_running(plane: &Plane<'_>, count: usize) -> Result<Vec<(String, String)>> {
    plane.until(&format!("{count} replicas to run"), || {
        let pods = plane.get(&["pods", "-n", NAMESPACE, "-l", &format!("app={NAME}")])?;
        let pods = pods["items"].as_array().cloned().unwrap_or_default();
        let running = pods.iter().filter(|pod| pod["status"]["phase"] == "Running");
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let found: Vec<_> = running
            .map(|pod| (text(&pod["metadata"]["name"]), text(&pod["spec"]["nodeName"])))
            .collect();
        Ok((found.len() >= count).then_some(found))
    })
}

/// Returns the manifest of the Deployment. Its pods are like those of the other checks, but may run
/// on any node.
fn manifest(node: &Node<'_>) -> Result<Value> {
    let mut pod = node.gpu_pod(NAME, LARGE_MIB)?;
    let labels = json!({"app": NAME});
    let spec = &mut pod["spec"];
    spec["nodeSelector"] = json!({});
    spec["containers"][0]["name"] = NAME.into();
    // This path leads to another folder on each node.
    let pipes = format!("{HOME}/io/{NAME}");
    spec["volumes"][1]["hostPath"]["path"] = pipes.into();
    spec["affinity"] = json!({"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{
        "labelSelector": {"matchLabels": labels}, "topologyKey": "kubernetes.io/hostname",
    }]}});
    Ok(json!({
        "apiVersion": "apps/v1", "kind": "Deployment",
        "metadata": {"name": NAME, "namespace": NAMESPACE},
        "spec": {
            "replicas": 1, "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels, "annotations": pod["metadata"]["annotations"]},
                "spec": pod["spec"],
            },
        },
    }))
}
