//! Checks that a pod that claims all that it can, and a container that forges its claim and avoids
//! Affinode's library, harm only themselves. Other pods share the GPU with them.

use affinode_e2e::{
    container::{CLIENTS, PIPES, make_pipe_pairs},
    containerd,
    gpu::cgroup_limits,
    image, liar,
    testbed::MIB,
    worker::{Answer, Lines, USUAL},
};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::{FILLED_MIB, claim_files, claiming, finds_no_gpu, rows, share_template, template};
use crate::{
    k8s::{
        VRAM_BYTES,
        control_plane::Plane,
        node::Node,
        scenarios::{agent_log, pods::Pod, step},
    },
    output,
};

/// Namespace of the hostile pods.
const NAMESPACE: &str = "greedy";
/// Memory in MiB of each claim of the forging pod, and the number of its claims. Together they are
/// the limit of its container.
const SMALL_MIB: u64 = 16;
const SMALL_CLAIMS: usize = 12;
const LIMIT_MIB: u64 = SMALL_MIB * SMALL_CLAIMS as u64;
/// Memory in MiB of the claim that takes almost all that is left.
const LARGE_MIB: u64 = 600;
/// Memory in MiB of a claim of the other pods, and of a claim that does not fit any more.
const SHARE_MIB: u64 = 615;
const LATE_MIB: u64 = 64;
/// Number of further pods, each of which claims a whole GPU.
const FLOOD: usize = 20;
/// VRAM in MiB that the two programs of the forging pod fill, and an amount that exceeds the limit.
const FORGER_MIB: u64 = 64;
const DODGER_MIB: u64 = 32;
const EXCESS_MIB: u64 = 300;
const OUT_OF_MEMORY: i32 = 2;
/// Name of the quota's entry for the devices of the driver's class.
const QUOTA: &str = "gpu.affinode.io.deviceclass.resource.k8s.io/devices";

/// Runs hostile pods beside two pods that share a GPU. Only the driver of the last node enforces
/// limits, and only in a cluster of several nodes.
pub fn hostile_pods_harm_themselves(plane: &Plane<'_>) -> Result<()> {
    let Some(node) = plane.nodes()[1..].last() else { return Ok(()) };
    step(&format!("Hostile pods of the namespace {NAMESPACE} beside two pods on {}", node.name));
    share_template(plane)?;
    template(plane, "late", &format!("{LATE_MIB}Mi"), &json!({"offload": "eager"}))?;
    let mut others = Vec::new();
    for name in ["other-1", "other-2"] {
        let mut pod = Pod::start(plane, node, name, &claiming(node, name, "share")?)?;
        pod.is_moved_out()?;
        others.push(pod);
    }
    let alone = Accounting::read(plane, node)?;
    ensure!(alone == Accounting { claimed_mib: 2 * SHARE_MIB, files: 2 }, "{alone:?}");
    objects(plane)?;
    let mut forger = Forger::start(plane, node)?;
    claims_are_exhausted(plane, node, &mut others)?;
    quota_gives_room(plane, node)?;
    // The GPU must have room for an allocation that exceeds the limit.
    others.iter().try_for_each(Pod::is_offloaded)?;
    forger.is_limited(node)?;
    super::take_turns(node, &mut others)?;
    everything_is_returned(plane, node, &alone)?;
    others.iter_mut().try_for_each(Pod::comes_back)?;
    others.into_iter().try_for_each(Pod::delete)?;
    for template in ["share", "late"] {
        let delete = ["delete", "resourceclaimtemplate", template];
        containerd::run(plane.kubectl().args(delete))?;
    }
    Ok(())
}

/// What the claims of a node's GPU take, according to the scheduler and to the node agent.
#[derive(Debug, PartialEq)]
struct Accounting {
    /// Sum of the memory of all allocated claims, in MiB.
    claimed_mib: u64,
    /// Number of prepared claims.
    files: usize,
}

impl Accounting {
    fn read(plane: &Plane<'_>, node: &Node<'_>) -> Result<Self> {
        let claims = plane.get(&["resourceclaims", "-A"])?;
        let claims = claims["items"].as_array().cloned().unwrap_or_default();
        let results = claims
            .iter()
            .filter_map(|claim| claim["status"]["allocation"]["devices"]["results"].as_array());
        let mut claimed_mib = 0;
        for result in results.flatten().filter(|result| result["pool"] == *node.name) {
            let amount = result["consumedCapacity"]["memory"].as_str().unwrap_or_default();
            let mib = amount.strip_suffix("Mi").and_then(|mib| mib.parse::<u64>().ok());
            claimed_mib += mib.with_context(|| format!("unexpected amount: {result}"))?;
        }
        Ok(Self { claimed_mib, files: claim_files(node)?.len() })
    }

    fn until(&self, plane: &Plane<'_>, node: &Node<'_>) -> Result<()> {
        let mut last = String::new();
        let found = plane.until(&format!("{self:?}"), || {
            let now = Self::read(plane, node)?;
            last = format!("{now:?}");
            Ok((now == *self).then_some(()))
        });
        found.with_context(|| format!("the last was {last}\n{}", agent_log(plane)))
    }
}

/// Creates the namespace and its templates. The policy of the small claims names a limit that is
/// larger than the claims.
fn objects(plane: &Plane<'_>) -> Result<()> {
    containerd::run(plane.kubectl().args(["create", "namespace", NAMESPACE]))?;
    let forged = json!({"offload": "eager", "vram-limit": "900Mi"});
    for (name, memory, policy) in [
        ("small", format!("{SMALL_MIB}Mi"), forged),
        ("large", format!("{LARGE_MIB}Mi"), json!({})),
        ("whole", "1Gi".into(), json!({})),
    ] {
        super::template_in(plane, NAMESPACE, name, &memory, &policy)?;
    }
    Ok(())
}

/// Returns the metadata and the spec of a pod that only sleeps, with one claim.
fn sleeping(node: &Node<'_>, template: &str) -> Value {
    json!({
        "metadata": {"name": template, "namespace": NAMESPACE, "labels": {"app": template}},
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": node.name},
            "containers": [{
                "name": "main", "image": image::PLAIN, "imagePullPolicy": "Never",
                "command": ["sleep", "infinity"], "resources": {"claims": [{"name": "gpu"}]},
            }],
            "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": template}],
            "terminationGracePeriodSeconds": 0,
        },
    })
}

/// Creates a pod that claims almost all that is left of the GPU.
fn large_starts(plane: &Plane<'_>, node: &Node<'_>) -> Result<()> {
    let mut pod = sleeping(node, "large");
    pod["apiVersion"] = "v1".into();
    pod["kind"] = "Pod".into();
    plane.apply(&pod)
}

/// Claims almost all that is left of the GPU, and then more than there is. The sum of all claims
/// must be exact, and the other pods must go on. Only a pod that comes later finds no room.
fn claims_are_exhausted(plane: &Plane<'_>, node: &Node<'_>, others: &mut [Pod<'_>]) -> Result<()> {
    large_starts(plane, node)?;
    let whole = sleeping(node, "whole");
    plane.apply(&json!({
        "apiVersion": "apps/v1", "kind": "Deployment",
        "metadata": {"name": "flood", "namespace": NAMESPACE},
        "spec": {
            "replicas": FLOOD, "selector": {"matchLabels": {"app": "whole"}},
            "template": {"metadata": {"labels": {"app": "whole"}}, "spec": whole["spec"]},
        },
    }))?;
    plane.until("the pods that claim too much to wait", || {
        let pods = plane.get(&["pods", "-n", NAMESPACE, "-l", "app=whole"])?;
        let pods = pods["items"].as_array().cloned().unwrap_or_default();
        let waits = |pod: &&Value| pod["status"]["conditions"][0]["reason"] == "Unschedulable";
        Ok((pods.iter().filter(waits).count() == FLOOD).then_some(()))
    })?;
    let claimed_mib = 2 * SHARE_MIB + LIMIT_MIB + LARGE_MIB;
    Accounting { claimed_mib, files: 3 + SMALL_CLAIMS }.until(plane, node)?;
    super::take_turns(node, others)?;
    plane.apply(&claiming(node, "late", "late")?)?;
    let why = finds_no_gpu(plane, "late")?;
    output::note(&format!(
        "{claimed_mib} MiB are claimed, {FLOOD} pods wait; a pod that comes later waits too: {why}"
    ));
    Ok(())
}

/// Limits the number of devices of the namespace by a quota, as the documents advise. When the
/// hostile pods start again, the quota refuses their claims, and the later pod has room.
fn quota_gives_room(plane: &Plane<'_>, node: &Node<'_>) -> Result<()> {
    let quota = format!("--hard={QUOTA}={SMALL_CLAIMS}");
    let create = ["create", "quota", "gpus", "-n", NAMESPACE, &quota];
    containerd::run(plane.kubectl().args(create))?;
    let gone = ["delete", "deployment/flood", "pod/large", "-n", NAMESPACE];
    containerd::run(plane.kubectl().args(gone).arg("--cascade=foreground"))?;
    plane.until("the quota to be used up by the small claims", || {
        let quota = plane.get(&["quota", "gpus", "-n", NAMESPACE])?;
        let used = quota["status"]["used"][QUOTA].as_str().and_then(|used| used.parse().ok());
        Ok((used == Some(SMALL_CLAIMS)).then_some(()))
    })?;
    large_starts(plane, node)?;
    let named = ["-n", NAMESPACE, "--field-selector", "involvedObject.name=large,type=Warning"];
    let why = plane.until("the quota to refuse the claim", || {
        let events = plane.get(&[&["events"], &named[..]].concat())?;
        let events = events["items"].as_array().cloned().unwrap_or_default();
        let mut messages = events.iter().filter_map(|event| event["message"].as_str());
        Ok(messages.find(|text| text.contains("exceeded quota")).map(str::to_owned))
    })?;
    output::note(&why);
    plane.until("the later pod to run", || {
        let pod = plane.get(&["pod", "late"])?;
        Ok((pod["status"]["phase"] == "Running").then_some(()))
    })?;
    containerd::run(plane.kubectl().args(["delete", "pod", "late"])).map(|_| ())
}

/// Deletes the namespace. All of its claims, files, VRAM and limits must go.
fn everything_is_returned(plane: &Plane<'_>, node: &Node<'_>, alone: &Accounting) -> Result<()> {
    step(&format!("kubectl delete namespace {NAMESPACE}"));
    containerd::run(plane.kubectl().args(["delete", "namespace", NAMESPACE]))?;
    alone.until(plane, node)?;
    plane.until("the controller to forget the hostile containers", || {
        let rows = rows(node)?;
        Ok((rows.len() == 2 && rows.keys().all(|pod| pod.starts_with("other-"))).then_some(()))
    })?;
    ensure!(!driver_limits(node)?, "the limit of the ended container is left in the driver");
    let holders = node.world.gpu().holders(node.world.dir(), 0)?;
    ensure!(
        holders.by_pid.len() <= 2 && holders.used_bytes < u64::from(FILLED_MIB + 64) * MIB,
        "VRAM is left: {holders:?}"
    );
    output::note("the claims, the VRAM and the limit in the driver are returned");
    Ok(())
}

/// A pod with many claims, which forges its claim. A second program in its container avoids
/// Affinode's library.
struct Forger<'a> {
    plane: &'a Plane<'a>,
    honest: Lines,
    dodger: Lines,
}

impl<'a> Forger<'a> {
    /// Starts the pod, and waits until both programs have filled their VRAM.
    fn start(plane: &'a Plane<'a>, node: &'a Node<'a>) -> Result<Self> {
        let pod = manifest(node)?;
        let pipes = make_pipe_pairs(node.world.dir(), "forger", &["", "-2"])?;
        plane.apply(&pod)?;
        let (honest, dodger) = (Lines::open(&pipes)?, Lines::open_pair(&pipes, "-2")?);
        plane
            .until("pod forger to run", || {
                let pod = plane.get(&["pod", "forger", "-n", NAMESPACE])?;
                Ok((pod["status"]["phase"] == "Running").then_some(()))
            })
            .with_context(|| agent_log(plane))?;
        let mut forger = Self { plane, honest, dodger };
        for lines in [&mut forger.honest, &mut forger.dodger] {
            for command in ["open", "fill"] {
                let answer = receive(lines)?;
                ensure!(answer.command == command && answer.result == 0, "{answer:?}");
            }
        }
        Ok(forger)
    }

    /// Checks that the container has the limit of its real claims, in the library and in the driver,
    /// and cannot change what makes this limit.
    fn is_limited(&mut self, node: &Node<'_>) -> Result<()> {
        step("A container forges its claim, avoids the library, and changes what it can reach");
        self.plane.until("the driver's limit of the container", || {
            Ok(driver_limits(node)?.then_some(()))
        })?;
        let rows = rows(node)?;
        let row = rows.get("forger").context("the controller does not know the pod")?;
        let claims: Vec<&str> = row.claim.split(',').map(str::trim).collect();
        ensure!(
            row.vram_limit_bytes == LIMIT_MIB * MIB
                && row.vram_limit_enforced_by == "library and driver"
                && claims.len() == SMALL_CLAIMS
                && claims.iter().all(|claim| claim.starts_with("greedy/forger-")),
            "the container has another limit or other claims: {row:?}"
        );
        let used = node.world.gpu().holders(node.world.dir(), 0)?.used_bytes;
        ensure!(VRAM_BYTES - used > EXCESS_MIB * MIB, "the GPU has no room: {used} bytes are used");
        let variables = "LD_PRELOAD= AFFINODE_CLAIM=ml/other";
        let program = format!("{CLIENTS}/{USUAL} --mib {EXCESS_MIB} --script verify");
        let script = format!("{variables} {program} || true");
        let said = self.exec(&["/bin/sh", "-c", &script])?;
        let fill = said.lines().find(|line| line.contains("\"fill\"")).context("no reply")?;
        ensure!(fill.contains("\"result\":2"), "a child exceeds the limit: {said}");
        for (who, lines) in [("program", &mut self.honest), ("child", &mut self.dodger)] {
            let answer = ask(lines, &format!("alloc {EXCESS_MIB} -"))?;
            ensure!(answer.result == OUT_OF_MEMORY, "the {who} exceeds the limit: {answer:?}");
        }
        output::note(&format!(
            "limited to {LIMIT_MIB} MiB: the container, its child with another environment, and \
             its child without the library"
        ));
        self.files_stay()
    }

    /// Checks that the container cannot change the files from which its limit comes.
    fn files_stay(&self) -> Result<()> {
        let list = "echo /.affinode/claims/* /.affinode/run/* /.affinode/lib/*";
        let files = self.exec(&["/bin/sh", "-c", list])?;
        // A container may write hints.
        let is_hint = |file: &&str| file.ends_with("/hint");
        let files: Vec<&str> = files.split_whitespace().filter(|file| !is_hint(file)).collect();
        ensure!(files.len() > SMALL_CLAIMS, "the container does not see its files: {files:?}");
        let program = liar::program();
        let said = self.exec(&[&[program.as_str(), "files"], &files[..]].concat())?;
        // The folder of the claims' files belongs to the container. A new file in it does not count.
        let is_harmless = |line: &str| line == "done" || line.ends_with(": created beside it");
        ensure!(said.lines().all(is_harmless), "files were changed: {said}");
        output::note(&format!("none of {} files could be changed", files.len()));
        Ok(())
    }

    /// Runs a command in the container, and returns its output.
    fn exec(&self, words: &[&str]) -> Result<String> {
        let exec = ["exec", "-n", NAMESPACE, "forger", "--"];
        containerd::run(self.plane.kubectl().args(exec).args(words))
    }
}

/// Returns the manifest of the forging pod. It names another claim and another limit in its
/// environment and its annotations.
fn manifest(node: &Node<'_>) -> Result<Value> {
    let mut pod = claiming(node, "forger", "small")?;
    let program = format!("{CLIENTS}/{USUAL}");
    let script = format!(
        "AFFINODE_DISABLE=1 {program} --mib {DODGER_MIB} <{PIPES}/in-2 >{PIPES}/out-2 & \
         exec {program} --mib {FORGER_MIB} <{PIPES}/in >{PIPES}/out"
    );
    pod["metadata"] = json!({
        "name": "forger", "namespace": NAMESPACE,
        "annotations": {
            "affinode.io/vram-limit": "900Mi", "affinode.io/claimed-vram": "900000000",
            "affinode.io/claim": "ml/other",
        },
    });
    let names: Vec<String> = (0..SMALL_CLAIMS).map(|number| format!("gpu-{number}")).collect();
    let container = &mut pod["spec"]["containers"][0];
    container["command"] = json!(["/bin/sh", "-c", script]);
    container["env"] = json!([{"name": "AFFINODE_CLAIM", "value": "ml/other"}]);
    let used: Vec<Value> = names.iter().map(|name| json!({"name": name})).collect();
    container["resources"] = json!({"claims": used});
    let claims =
        names.iter().map(|name| json!({"name": name, "resourceClaimTemplateName": "small"}));
    pod["spec"]["resourceClaims"] = claims.collect();
    Ok(pod)
}

/// Whether the driver limits a cgroup to the claims of the forging pod.
fn driver_limits(node: &Node<'_>) -> Result<bool> {
    let limits = cgroup_limits(node.world.dir())?;
    Ok(limits.iter().any(|limit| limit.hard_bytes == LIMIT_MIB * MIB))
}

fn ask(lines: &mut Lines, command: &str) -> Result<Answer> {
    lines.send(command)?;
    receive(lines)
}

fn receive(lines: &mut Lines) -> Result<Answer> {
    let line = lines.receive()?;
    serde_json::from_str(&line).with_context(|| format!("cannot parse the reply: {line}"))
}
