//! Checks of the DRA driver, by which pods share a GPU. Each pod claims an amount of the GPU's
//! memory.

mod full;
mod hostile;
mod load;
mod slices;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

use affinode_e2e::{cli::ContainerRow, containerd};
use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use serde_json::{Value, json};

use super::{
    NAMESPACE, RELEASE, SMALL_MIB, agent_log, install,
    pods::{self, Pod},
    release, rolled_out, step, uninstall,
};
use crate::{
    k8s::{
        VRAM_BYTES,
        control_plane::Plane,
        node::{HOME, Node, toolkit_spec},
    },
    output,
};

/// Name of the DRA driver and of its device class.
const DRIVER: &str = "gpu.affinode.io";
/// Name of the extended resource with which a pod can request a device of the class, without a
/// claim.
const RESOURCE: &str = "example.com/gpu";
/// Folder of CDI specifications on a node.
const CDI_DIR: &str = "/run/cdi";
/// Beginning of the name of a claim's CDI file.
const CLAIM_FILE: &str = "gpu.affinode.io-claim_";
/// Memory that each claim requests: 60 % of the VRAM of 1,024 MiB. With an oversubscription of 2,
/// three claims fit, and a fourth does not.
const CLAIM_MEMORY: &str = "615Mi";
/// VRAM in MiB that the program of a pod fills. Two programs do not fit on the GPU.
const FILLED_MIB: u32 = 540;
/// VRAM in MiB that a pod requests in addition to `FILLED_MIB`, so that the sum exceeds its claim.
/// The GPU has this much free VRAM while the other pods are offloaded.
const EXCESS_MIB: u32 = 200;
/// Number of times that each pod takes its turn on the GPU.
const ROUNDS: usize = 3;
/// Idle timeout in the policy of the claims. It differs from the timeout in the chart's values.
const IDLE_TIMEOUT_MS: u64 = 3_000;

/// Installs Affinode with the DRA driver, and runs three pods on one GPU. The pods must take turns
/// on the GPU, and keep their claims when the kubelet or the node agent restarts. A fourth pod must
/// wait until a claim is released.
pub fn pods_share_a_gpu(plane: &Plane<'_>) -> Result<()> {
    step("helm install --set dra.enabled=true");
    install_driver(plane)?;
    let node = plane.first();
    slices::gpus_are_published(plane)?;
    slices::foreign_slices_are_refused(plane, node)?;
    load::idle_gpu_is_preferred(plane)?;
    templates(plane)?;
    let mut sharing = three_share(plane, node)?;
    let waiting = one_finds_no_room(plane, node)?;
    take_turns(node, &mut sharing)?;
    claims_limit_memory(node, &mut sharing)?;
    kubelet_restarts(plane, node, &mut sharing)?;
    agent_is_killed(plane, node, &mut sharing)?;
    // An allocation fails if a pod that is not idle has the VRAM.
    sharing.iter().try_for_each(|pod| pod.is_offloaded())?;
    let first = sharing.remove(0);
    sharing.push(room_is_given_back(plane, node, first, &waiting)?);
    bad_policy_is_named(plane, node)?;
    sharing.into_iter().try_for_each(|pod| force_delete(plane, node, &pod))?;
    full::full_gpu_takes_no_pod(plane, node)?;
    by_extended_resource(plane, node)?;
    hostile::hostile_pods_harm_themselves(plane)?;
    // The kubelet ends a claim after its pod, and Affinode stays on a node with prepared claims.
    for node in plane.nodes() {
        plane.until("all claims to be unprepared", || {
            Ok(claim_files(node)?.is_empty().then_some(()))
        })?;
    }
    uninstall::all(plane)?;
    slices::nothing_is_left(plane)
}

fn install_driver(plane: &Plane<'_>) -> Result<()> {
    let set = format!("dra.enabled=true,dra.extendedResourceName={RESOURCE},inject.by=webhook");
    install_sharing(plane, &set)?;
    let ready =
        ["-n", NAMESPACE, "rollout", "status", "deployment/affinode-webhook", "--timeout=180s"];
    containerd::run(plane.kubectl().args(ready)).map(|_| ()).with_context(|| agent_log(plane))
}

/// Installs the chart with these values, and waits until the runtime is available on all nodes.
/// Environment variables let the loader of the node agents find the simulated driver, as it would
/// find a real driver.
pub fn install_sharing(plane: &Plane<'_>, values: &str) -> Result<()> {
    for node in plane.nodes() {
        fs::write(node.path("/etc/cdi/nvidia.json"), toolkit_spec(node)?.to_string())?;
    }
    let world = plane.world();
    let env = world.gpu().host_env(world.artifacts(), HOME.as_ref());
    let env: Vec<Value> =
        env.iter().map(|(name, value)| json!({"name": name, "value": value})).collect();
    let set = format!("--set={values}");
    let env = format!("--set-json=node.extraEnv={}", Value::from(env));
    release::load_image(plane, world.artifacts())?;
    release::helm(plane, &["install", RELEASE, "-n", NAMESPACE, "--create-namespace", &set, &env])?;
    plane.nodes().iter().try_for_each(|node| install::serves(plane, node))?;
    rolled_out(plane)
}

/// Creates two templates of claims: one with a valid policy, and one with an invalid policy.
fn templates(plane: &Plane<'_>) -> Result<()> {
    share_template(plane)?;
    template(plane, "bad", "64Mi", &json!({"offload": "sometimes"}))
}

fn share_template(plane: &Plane<'_>) -> Result<()> {
    let policy = json!({"offload": "eager", "keep-alive": "fixed", "idle-timeout": "3s"});
    template(plane, "share", CLAIM_MEMORY, &policy)
}

/// Creates a template of claims for an amount of a GPU's memory, with a policy for the containers.
fn template(plane: &Plane<'_>, name: &str, memory: &str, policy: &Value) -> Result<()> {
    template_in(plane, "default", name, memory, policy)
}

/// Like [`template`], in a namespace.
fn template_in(
    plane: &Plane<'_>,
    namespace: &str,
    name: &str,
    memory: &str,
    policy: &Value,
) -> Result<()> {
    plane.apply(&json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"spec": {"devices": {
            "requests": [{"name": "gpu", "exactly": {
                "deviceClassName": DRIVER,
                "capacity": {"requests": {"memory": memory}},
            }}],
            "config": [{"opaque": {"driver": DRIVER, "parameters": {
                "apiVersion": "affinode.io/v1alpha1", "kind": "ContainerPolicy",
                "policy": policy,
            }}}],
        }}},
    }))
}

/// Returns the manifest of a pod that requests GPU memory by a claim, and has no annotation of
/// Affinode.
fn claiming(node: &Node<'_>, name: &str, template: &str) -> Result<Value> {
    let mut pod = node.gpu_pod(name, FILLED_MIB)?;
    pod["metadata"]["annotations"] = json!({});
    pod["spec"]["containers"][0]["resources"] = json!({"claims": [{"name": "gpu"}]});
    pod["spec"]["resourceClaims"] = json!([{"name": "gpu", "resourceClaimTemplateName": template}]);
    Ok(pod)
}

fn three_share<'a>(plane: &'a Plane<'a>, node: &'a Node<'a>) -> Result<Vec<Pod<'a>>> {
    step(&format!("Three pods that each request {CLAIM_MEMORY} of a GPU of {}", node.name));
    let mut pods = Vec::new();
    for name in ["share-1", "share-2", "share-3"] {
        let mut pod = Pod::start(plane, node, name, &claiming(node, name, "share")?)?;
        pod.is_moved_out().with_context(|| pods::describe(plane, name))?;
        pods.push(pod);
    }
    ensure!(claim_files(node)?.len() == 3, "expected a file for each claim");
    let rows = rows(node)?;
    ensure!(rows.len() == 3, "expected three managed containers: {rows:?}");
    for row in rows.values() {
        ensure!(
            row.idle_timeout_ms == IDLE_TIMEOUT_MS && row.warnings.is_empty(),
            "the policy of the claim is not in effect: {row:?}"
        );
    }
    output::note("all run on one GPU, each with the policy of its claim");
    Ok(pods)
}

/// Returns the containers that the node's controller knows, by the names of their pods.
fn rows(node: &Node<'_>) -> Result<BTreeMap<String, ContainerRow>> {
    let known = node.world.cli().ps()?.containers;
    Ok(known.into_iter().map(|row| (row.pod.clone(), row)).collect())
}

/// Returns the names of the CDI files of prepared claims on a node.
fn claim_files(node: &Node<'_>) -> Result<BTreeSet<String>> {
    let entries = fs::read_dir(node.path(CDI_DIR)).context("cannot read the CDI folder")?;
    let names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    Ok(names.filter(|name| name.starts_with(CLAIM_FILE)).collect())
}

/// Checks that a pod with a fourth claim is not scheduled, because four claims together exceed the
/// capacity of the GPU. Returns the manifest of the pod.
fn one_finds_no_room<'a>(plane: &'a Plane<'a>, node: &'a Node<'a>) -> Result<Value> {
    let pod = claiming(node, "share-4", "share")?;
    plane.apply(&pod)?;
    let why = finds_no_gpu(plane, "share-4")?;
    output::note(&format!("a fourth waits: {why}"));
    Ok(pod)
}

/// Waits until the scheduler finds no GPU for a pod, and returns the scheduler's reason.
fn finds_no_gpu(plane: &Plane<'_>, name: &str) -> Result<String> {
    plane.until(&format!("{name} to find no GPU"), || {
        let pod = plane.get(&["pod", name])?;
        let condition = &pod["status"]["conditions"][0];
        let waits = condition["reason"] == "Unschedulable";
        Ok(waits.then(|| condition["message"].as_str().unwrap_or_default().to_owned()))
    })
}

/// Makes a CUDA call in each pod in turn. While the memory of one pod is on the GPU, the memory of
/// the other pods must be offloaded.
pub fn take_turns(node: &Node<'_>, pods: &mut [Pod<'_>]) -> Result<()> {
    step("The pods take turns on the GPU");
    for _ in 0..ROUNDS {
        for at in 0..pods.len() {
            pods[at].comes_back()?;
            let rows = rows(node)?;
            let others = pods.iter().enumerate().filter(|(other, _)| *other != at);
            for (_, other) in others {
                let row = rows.get(&other.name).context("a pod is not managed")?;
                ensure!(
                    row.state == "Offloaded",
                    "{} has the GPU, but {} is {}",
                    pods[at].name,
                    other.name,
                    row.state
                );
            }
            let held = node.world.gpu().holders(node.world.dir(), 0)?.used_bytes;
            ensure!(held <= VRAM_BYTES, "{held} bytes are in use");
        }
    }
    let (turns, all) = (ROUNDS * pods.len(), pods.len());
    output::note(&format!("{turns} turns: contents as before, all but one of {all} offloaded"));
    Ok(())
}

/// Checks that no pod can allocate more memory than its claim, although the GPU has room for it.
fn claims_limit_memory(node: &Node<'_>, pods: &mut [Pod<'_>]) -> Result<()> {
    step(&format!("Each pod asks for {EXCESS_MIB} MiB beyond its claim"));
    for pod in &mut *pods {
        pod.comes_back()?;
        pod.is_refused_memory(EXCESS_MIB)?;
        let used = node.world.gpu().holders(node.world.dir(), 0)?.used_bytes;
        let free_mib = (VRAM_BYTES - used) >> 20;
        ensure!(free_mib > EXCESS_MIB.into(), "only {free_mib} MiB of the GPU are free");
        pod.comes_back()?;
    }
    output::note(
        "refused with CUDA_ERROR_OUT_OF_MEMORY, while the GPU had room; contents as before",
    );
    Ok(())
}

/// Restarts the kubelet, and checks that the claims of running pods stay prepared. A kubelet
/// deletes the ResourceSlices of its node when it starts.
fn kubelet_restarts(plane: &Plane<'_>, node: &Node<'_>, pods: &mut [Pod<'_>]) -> Result<()> {
    step("The kubelet is killed and starts again");
    let before = claim_files(node)?;
    let slice = slices::published(plane, node, None)?;
    node.restart_kubelet(plane)?;
    slices::published(plane, node, Some(&slice))?;
    pods.iter().try_for_each(Pod::accepts_commands)?;
    pods.iter_mut().try_for_each(Pod::comes_back)?;
    ensure!(claim_files(node)? == before, "the files of the claims changed");
    output::note(
        "the GPU is published again, the pods go on, the files of their claims are the same",
    );
    Ok(())
}

fn agent_is_killed(plane: &Plane<'_>, node: &Node<'_>, pods: &mut [Pod<'_>]) -> Result<()> {
    step("The node agent is killed");
    let agents = || node.world.processes("affinode-cluster node");
    let killed = agents()?.into_iter().next().context("no agent runs on the node")?.pid;
    kill(killed, Signal::SIGKILL)?;
    plane.until("a new agent", || {
        Ok(agents()?.iter().any(|agent| agent.pid != killed).then_some(()))
    })?;
    // The slice of the killed agent would stay even without a new agent.
    let slice = slices::published(plane, node, None)?;
    let name = slice["metadata"]["name"].as_str().context("the slice has no name")?;
    containerd::run(plane.kubectl().args(["delete", "resourceslice", name]))?;
    slices::published(plane, node, Some(&slice))?;
    pods.iter_mut().try_for_each(Pod::comes_back)?;
    output::note("a new agent publishes the GPU, the pods go on");
    Ok(())
}

/// Deletes a pod, and checks that the waiting pod gets its share of the GPU.
fn room_is_given_back<'a>(
    plane: &'a Plane<'a>,
    node: &'a Node<'a>,
    pod: Pod<'a>,
    waiting: &Value,
) -> Result<Pod<'a>> {
    step("A pod is deleted, and the waiting one gets its share");
    pod.delete()?;
    let mut fourth = Pod::start(plane, node, "share-4", waiting)?;
    fourth.is_moved_out().with_context(|| pods::describe(plane, "share-4"))?;
    plane.until("the file of the deleted pod's claim to be removed", || {
        Ok((claim_files(node)?.len() == 3).then_some(()))
    })?;
    Ok(fourth)
}

fn bad_policy_is_named(plane: &Plane<'_>, node: &Node<'_>) -> Result<()> {
    step("A claim with an invalid policy");
    let mut bad = claiming(node, "bad", "bad")?;
    bad["spec"]["containers"][0]["command"] = json!(["true"]);
    plane.apply(&bad)?;
    let named = "involvedObject.name=bad,type=Warning";
    let why = plane.until("the event of the kubelet", || {
        let events = plane.get(&["events", "--field-selector", named])?;
        let events = events["items"].as_array().cloned().unwrap_or_default();
        let messages = events.iter().filter_map(|event| event["message"].as_str());
        Ok(messages.filter(|text| text.contains("opaque")).map(str::to_owned).next())
    })?;
    ensure!(why.contains("accepted: auto, eager"), "the event does not help: {why}");
    output::note(&why);
    containerd::run(plane.kubectl().args(["delete", "pod", "bad"])).map(|_| ())
}

fn force_delete(plane: &Plane<'_>, node: &Node<'_>, pod: &Pod<'_>) -> Result<()> {
    let files = claim_files(node)?.len();
    let delete = ["delete", "pod", &pod.name, "--force", "--grace-period=0"];
    containerd::run(plane.kubectl().args(delete))?;
    plane.until(&format!("the claim of {} to be unprepared", pod.name), || {
        Ok((claim_files(node)?.len() < files).then_some(()))
    })
}

/// Checks a pod that requests the extended resource instead of a claim. The pod must get a share
/// that equals the GPU's whole VRAM.
fn by_extended_resource(plane: &Plane<'_>, node: &Node<'_>) -> Result<()> {
    step(&format!("A pod that requests {RESOURCE}: 1, without a claim"));
    let mut pod = node.gpu_pod("extended", SMALL_MIB)?;
    pod["spec"]["containers"][0]["resources"] = json!({"limits": {RESOURCE: "1"}});
    let mut pod = Pod::start(plane, node, "extended", &pod)?;
    pod.is_moved_out()?;
    pod.comes_back()?;
    let of_pod = plane.get(&["pod", "extended"])?;
    let claim = &of_pod["status"]["extendedResourceClaimStatus"]["resourceClaimName"];
    let claim = plane.get(&["resourceclaim", claim.as_str().context("the pod has no claim")?])?;
    let result = &claim["status"]["allocation"]["devices"]["results"][0];
    ensure!(
        result["consumedCapacity"]["memory"] == format!("{}Gi", VRAM_BYTES >> 30),
        "expected the VRAM as consumed capacity: {claim}"
    );
    pod.delete()?;
    for template in ["share", "bad"] {
        let delete = ["delete", "resourceclaimtemplate", template];
        containerd::run(plane.kubectl().args(delete))?;
    }
    Ok(())
}
