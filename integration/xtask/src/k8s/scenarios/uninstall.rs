//! Checks of `helm uninstall`. It must remove Affinode completely, from all nodes or from none.

use std::{fs, os::unix::fs::MetadataExt, path::PathBuf};

use affinode_e2e::{containerd, installed::SHIM, processes::Process};
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::{NAMESPACE, NODE, RELEASE, agent_log, is_labelled, step, wait_state};
use crate::{
    k8s::{control_plane::Plane, node::Node},
    output,
};

/// Kinds of objects that must not be left after `helm uninstall`.
const KINDS: &str = "all,configmaps,serviceaccounts,roles,rolebindings,clusterroles,\
    clusterrolebindings,runtimeclasses,mutatingwebhookconfigurations,\
    mutatingadmissionpolicies,mutatingadmissionpolicybindings,secrets,\
    validatingadmissionpolicies,validatingadmissionpolicybindings,\
    poddisruptionbudgets,networkpolicies,leases,resourcequotas,deviceclasses";
/// Paths of Affinode's files, relative to a node's folder.
const FILES: [&str; 4] = [
    "prefix/bin/affinode",
    "prefix/lib/affinode",
    "affinode/conf.d",
    "state-affinode/install.json",
];

/// State of the nodes before Affinode was installed.
pub struct Before(Vec<NodeBefore>);

struct NodeBefore {
    config: Vec<u8>,
    labels: Vec<String>,
    annotations: Vec<String>,
}

impl Before {
    pub fn look(plane: &Plane<'_>) -> Result<Self> {
        let look = |node: &Node<'_>| -> Result<NodeBefore> {
            let object = plane.get(&["node", &node.name])?;
            Ok(NodeBefore {
                config: fs::read(node.config_file())?,
                labels: keys(&object["metadata"]["labels"]),
                annotations: keys(&object["metadata"]["annotations"]),
            })
        };
        plane.nodes().iter().map(look).collect::<Result<_>>().map(Before)
    }
}

fn keys(object: &Value) -> Vec<String> {
    object.as_object().into_iter().flatten().map(|(key, _)| key.clone()).collect()
}

/// Runs `helm uninstall` while a pod of Affinode's runtime class runs on one node. The command must
/// fail, because the removal would end the pod's shim. Nothing may change on any node.
pub fn waits_for_pods(plane: &Plane<'_>) -> Result<()> {
    step("helm uninstall, while a pod of the class runs on one node");
    for node in &plane.nodes()[1..] {
        plane.until("the shims of its pods to end", || {
            let ours = |shim: &Process| shim.command.contains(SHIM);
            Ok((!node.world.shims()?.iter().any(ours)).then_some(()))
        })?;
    }
    let installed = plane.nodes().iter().map(written).collect::<Result<Vec<_>>>()?;
    let words = ["uninstall", RELEASE, "-n", NAMESPACE, "--timeout=120s"];
    let output = plane.helm().args(words).output()?;
    if output.status.success() {
        bail!("helm uninstall removed Affinode while a pod of the class was running");
    }
    let logs = ["-n", NAMESPACE, "logs", "job/affinode-uninstall", "--tail=3"];
    let said = containerd::run(plane.kubectl().args(logs))?;
    let because = format!("or cannot be reached: {NODE}: cannot be removed");
    ensure!(
        said.contains("end the containers first") && said.contains(&because),
        "expected {because:?} and the advice to end the containers, got {said}"
    );
    ensure!(
        said.matches("cannot be removed").count() == 1,
        "expected one node that cannot be removed, got {said}"
    );
    output::note(said.trim().lines().last().unwrap_or_default());
    for (node, installed) in plane.nodes().iter().zip(installed) {
        wait_state(plane, &node.name, |state| state == "served")?;
        plane.until("the label", || Ok(is_labelled(plane, &node.name)?.then_some(())))?;
        let now = written(node)?;
        ensure!(now == installed, "node {} changed from {installed:?} to {now:?}", node.name);
    }
    output::note("every node is unchanged and still served");
    Ok(())
}

/// Returns Affinode's files on a node, each with its inode and the time of the last write.
fn written(node: &Node<'_>) -> Result<Vec<(PathBuf, u64, i64)>> {
    let files = FILES.iter().map(|file| node.world.dir().join(file)).chain([node.config_file()]);
    files
        .map(|file| {
            let found = fs::metadata(&file)
                .with_context(|| format!("cannot examine {}", file.display()))?;
            Ok((file, found.ino(), found.mtime_nsec()))
        })
        .collect()
}

/// Removes Affinode from one node by a label, then removes the label. Affinode must then be
/// installed on the node again.
pub fn one(plane: &Plane<'_>) -> Result<()> {
    let Some(node) = plane.nodes()[1..].last() else { return Ok(()) };
    step("kubectl label node affinode.io/exclude=true");
    let label = |value: &str| {
        let label = format!("affinode.io/exclude{value}");
        containerd::run(plane.kubectl().args(["label", "node", &node.name, &label])).map(|_| ())
    };
    label("=true")?;
    wait_state(plane, &node.name, |state| state.starts_with("excluded"))?;
    ensure!(
        !is_labelled(plane, &node.name)?,
        "node {} still has the label of the runtime, so pods can be scheduled there",
        node.name
    );
    for gone in FILES {
        ensure!(!node.world.dir().join(gone).exists(), "{gone} was not removed");
    }
    ensure!(is_labelled(plane, NODE)?, "node {NODE} lost the label of the runtime");
    label("-")?;
    let is_back = |state: &str| state == "served" || state.starts_with("installed");
    wait_state(plane, &node.name, is_back)?;
    output::note(&format!("{} was left by Affinode, and got it again; {NODE} served", node.name));
    Ok(())
}

pub fn all(plane: &Plane<'_>) -> Result<()> {
    step("helm uninstall");
    containerd::run(plane.helm().args(["uninstall", RELEASE, "-n", NAMESPACE, "--timeout=180s"]))
        .map(|_| ())
        .with_context(|| agent_log(plane))
}

/// Checks that `helm uninstall` has left nothing on any node, and in no object of the cluster.
pub fn left_nothing(plane: &Plane<'_>, before: &Before) -> Result<()> {
    for (node, before) in plane.nodes().iter().zip(&before.0) {
        left_nothing_on(plane, node, before)
            .with_context(|| format!("the uninstallation left something on node {}", node.name))?;
    }
    plane.until("the agents' pods to go", || {
        let ours = ["-A", "-l", "app.kubernetes.io/instance=affinode", "-o", "name"];
        let text = containerd::run(plane.kubectl().args(["get", KINDS]).args(ours))?;
        Ok(text.trim().is_empty().then_some(()))
    })?;
    output::note(
        "no object, label, annotation or file of Affinode is left; \
               containerd's configuration is byte for byte as before",
    );
    Ok(())
}

fn left_nothing_on(plane: &Plane<'_>, node: &Node<'_>, before: &NodeBefore) -> Result<()> {
    let object = plane.get(&["node", &node.name])?;
    let labels = keys(&object["metadata"]["labels"]);
    ensure!(
        labels == before.labels,
        "the labels of the node differ from those before the installation: {labels:?}"
    );
    let annotations = keys(&object["metadata"]["annotations"]);
    let left: Vec<_> = annotations.iter().filter(|key| !before.annotations.contains(key)).collect();
    ensure!(left.is_empty(), "annotations of the node were not removed: {left:?}");
    ensure!(
        fs::read(node.config_file())? == before.config,
        "containerd's configuration differs from that before the installation"
    );
    for gone in FILES {
        ensure!(!node.world.dir().join(gone).exists(), "{gone} was not removed");
    }
    plane.until("the controller to end", || Ok(node.world.controller()?.is_none().then_some(())))
}
