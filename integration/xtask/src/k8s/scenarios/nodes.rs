//! Checks that need a cluster of several nodes.

use std::{fs, path::Path, process::Command};

use affinode_e2e::{artifacts::Artifacts, containerd, installed::FILES, processes::Process};
use anyhow::{Context, Result, ensure};
use nix::{
    errno::Errno,
    sys::signal::{Signal, kill},
};

use super::{
    NAMESPACE, NODE, RELEASE, agent_log, agent_pod, is_labelled, plugin,
    pods::{self, Pod},
    release, rolled_out, step, wait_state,
};
use crate::{
    k8s::{control_plane::Plane, node::Node},
    output,
};

/// Text that marks the files of a second build, to which the nodes are upgraded.
const SIGN: &str = "another build, for a test";
/// Tag of the image of the second build.
const NEXT: &str = "next";

/// Runs one pod on each node except the first. Affinode must offload and restore each pod, as on
/// the first node. Returns the pods.
pub fn others_serve<'a>(plane: &'a Plane<'a>) -> Result<Vec<Pod<'a>>> {
    let others = plane.nodes()[1..].iter();
    others
        .map(|node| pods::comes_and_goes(plane, node, &format!("trainer-of-{}", node.name)))
        .collect()
}

/// Upgrades the nodes one after the other. Each node must get the new files, and running pods must
/// not be affected.
pub fn upgrade<'a>(plane: &'a Plane<'a>, pods: &mut [Pod<'a>]) -> Result<()> {
    step("helm upgrade to another build, while a pod of each node is offloaded");
    pods.iter().try_for_each(|pod| pod.is_offloaded())?;
    let controllers = plane.nodes().iter().map(controller).collect::<Result<Vec<_>>>()?;
    let fresh = another(plane)?;
    release::load_image(plane, &fresh)?;
    for node in plane.nodes() {
        let mut ctr = node.world.containerd().ctr(node.world.keeper(), "k8s.io");
        let image =
            containerd::run(ctr.args(["images", "ls", "--quiet", "name~=affinode/affinode:"]))?;
        let image = image.lines().next().context("containerd does not list the image")?;
        let (repository, _) = image.rsplit_once(':').context("the name of the image has no tag")?;
        let mut ctr = node.world.containerd().ctr(node.world.keeper(), "k8s.io");
        containerd::run(ctr.args(["images", "tag", image, &format!("{repository}:{NEXT}")]))?;
    }
    let tag = format!("--set=image.tag={NEXT}");
    release::helm(plane, &["upgrade", RELEASE, "-n", NAMESPACE, &tag])?;
    rolled_out(plane)?;
    for (node, before) in plane.nodes().iter().zip(controllers) {
        plane
            .until("the files of the new build", || {
                let files = FILES.iter().map(|file| is_another(&node.world.prefix().join(file)));
                let all = files.collect::<Result<Vec<_>>>()?;
                Ok((!all.contains(&false)).then_some(()))
            })
            .with_context(|| agent_log(plane))?;
        wait_state(plane, &node.name, |state| state == "served")?;
        plane.until("its controller", || Ok((controller(node)? != before).then_some(())))?;
        ensure!(
            is_labelled(plane, &node.name)?,
            "node {} lost the label of the runtime",
            node.name
        );
        output::note(&format!("{}: the new files, and a controller of them", node.name));
    }
    pods.iter_mut().try_for_each(Pod::comes_back)?;
    output::note(
        "the pods of all nodes were called: contents as before, no container was restarted",
    );
    Ok(())
}

/// Creates the programs and the library of the second build in a separate folder. Each file has an
/// additional section, which remains when the file is stripped for the image.
fn another(plane: &Plane<'_>) -> Result<Artifacts> {
    let ours = plane.world().artifacts();
    let fresh = Artifacts::at(plane.world().dir().join("another"));
    let sign = plane.world().dir().join("sign");
    fs::write(&sign, SIGN)?;
    let section = format!("--add-section=.another={}", sign.display());
    for (from, to) in [(ours.bin_dir(), fresh.bin_dir()), (ours.lib_dir(), fresh.lib_dir())] {
        fs::create_dir_all(&to)?;
        for file in fs::read_dir(from)?.flatten() {
            let mut copy = Command::new("objcopy");
            copy.arg(&section).arg(file.path()).arg(to.join(file.file_name()));
            containerd::run(&mut copy)?;
        }
    }
    Ok(fresh)
}

/// Whether an installed file belongs to the second build.
fn is_another(file: &Path) -> Result<bool> {
    let mut grep = Command::new("grep");
    Ok(grep.args(["--quiet", "--text", "--fixed-strings", SIGN]).arg(file).status()?.success())
}

fn controller(node: &Node<'_>) -> Result<i32> {
    Ok(node.world.cli().ps()?.controller_pid)
}

/// Suspends the node agent of one node, and then kills it. While the agent is suspended, the pod on
/// this node must still be offloaded and restored.
pub fn an_agent_ends<'a>(plane: &'a Plane<'a>, pods: &mut [Pod<'a>]) -> Result<()> {
    step("The agent of a node stops, and is killed");
    let (node, pod) =
        plane.nodes().last().zip(pods.last_mut()).context("the cluster has no node with a pod")?;
    let agent: Process = (node.world.processes("affinode-cluster node")?.into_iter().next())
        .context("no agent runs on the node")?;
    plugin::row(plane, &node.name, |row| row["health"] == "Serving")?;
    kill(agent.pid, Signal::SIGSTOP)?;
    let row = plugin::row(plane, &node.name, |row| row["health"] == "Unreachable")?;
    ensure!(
        row["why"].as_str().is_some_and(|why| !why.is_empty()),
        "expected a row with a reason: {row}"
    );
    output::note(&format!("{} is Unreachable: {}", node.name, row["why"]));
    if node.name != NODE {
        plugin::row(plane, NODE, |row| row["health"] == "Serving")?;
        output::note(&format!("{NODE} is Serving"));
    }
    plane.until("its pod to be not ready", || Ok((!is_ready(plane, node)?).then_some(())))?;
    pod.is_offloaded()?;
    pod.comes_back()?;
    ensure!(
        is_labelled(plane, &node.name)?,
        "the node lost the label of the runtime, so no pod can be scheduled there"
    );
    output::note("its agent's pod is not ready; containerd serves the runtime, so the label stays");
    output::note("a pod there was called meanwhile: contents as before");
    match kill(agent.pid, Signal::SIGKILL) {
        // The kubelet ended the agent first, after two minutes without a reply.
        Ok(()) | Err(Errno::ESRCH) => {}
        Err(error) => return Err(error).context("cannot stop the agent"),
    }
    plugin::row(plane, &node.name, |row| row["health"] == "Serving")?;
    plane.until("its pod to be ready", || Ok(is_ready(plane, node)?.then_some(())))?;
    output::note("killed and restarted: Serving");
    Ok(())
}

fn is_ready(plane: &Plane<'_>, node: &Node<'_>) -> Result<bool> {
    Ok(agent_pod(plane, node)?["status"]["containerStatuses"][0]["ready"] == true)
}
