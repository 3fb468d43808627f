//! What is shown, step by step; each fails when it is not seen.

use std::{fs, path::PathBuf, time::Duration};

use affinode_e2e::{containerd, until::until_within, worker::Lines};
use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::{
    plane::{NODE, Plane},
    release::{self, NAMESPACE, RELEASE},
};
use crate::say;

/// The label of a node that serves the runtime.
const LABEL: &str = "affinode.io/runtime";
/// Where an agent says how its node stands.
const STATE: &str = "affinode.io/state";
/// The chart's port.
const PORT: u16 = 9411;
/// What there is of Affinode in a cluster after `helm uninstall`: nothing.
const KINDS: &str = "all,configmaps,serviceaccounts,roles,rolebindings,clusterroles,\
    clusterrolebindings,runtimeclasses,mutatingwebhookconfigurations,\
    mutatingadmissionpolicies,mutatingadmissionpolicybindings,secrets,\
    validatingadmissionpolicies,validatingadmissionpolicybindings";

/// All of it.
pub fn all(plane: &Plane<'_>) -> Result<()> {
    let before = Before::look(plane)?;
    chart_is_sound(plane)?;
    install(plane)?;
    agents_change_their_own_alone(plane)?;
    by_policy(plane)?;
    let mut pod = Pod::start(plane, "trainer")?;
    pod.is_moved_out()?;
    pod.wakes_by_exec()?;
    metrics(plane)?;
    by_webhook(plane)?;
    uninstall_waits_for_pods(plane)?;
    pod.delete()?;
    uninstall(plane, &before)
}

fn step(text: &str) {
    say::step(text);
}

/// What the node was like before.
struct Before {
    config: Vec<u8>,
    labels: Value,
    annotations: Vec<String>,
}

impl Before {
    fn look(plane: &Plane<'_>) -> Result<Self> {
        let node = plane.get(&["node", NODE])?;
        Ok(Self {
            config: fs::read(config_file(plane))?,
            labels: node["metadata"]["labels"].clone(),
            annotations: keys(&node["metadata"]["annotations"]),
        })
    }
}

fn config_file(plane: &Plane<'_>) -> PathBuf {
    plane.world().dir().join("containerd.toml")
}

fn keys(object: &Value) -> Vec<String> {
    object.as_object().into_iter().flatten().map(|(key, _)| key.clone()).collect()
}

/// Before anything is installed: helm's own look, the schema, and the API server's.
fn chart_is_sound(plane: &Plane<'_>) -> Result<()> {
    step("helm lint, values.schema.json, and a dry run by the API server");
    release::helm(plane, &["lint", "--strict"])?;
    for wrong in ["node.restart=sometimes", "node.port=0", "imagee.tag=x", "runtimeClass.name=A_b"]
    {
        let said = plane
            .helm()
            .args(["template", "x"])
            .arg(release::chart())
            .args(["--set", wrong])
            .output()?;
        let said = String::from_utf8_lossy(&said.stderr).into_owned();
        ensure!(said.contains("schema"), "the schema takes {wrong}: {said}");
    }
    release::helm(
        plane,
        &["install", RELEASE, "-n", NAMESPACE, "--create-namespace", "--dry-run=server"],
    )?;
    let rendered = release::helm(
        plane,
        &[
            "template",
            RELEASE,
            "-n",
            NAMESPACE,
            "--api-versions=admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy",
        ],
    )?;
    let file = plane.world().dir().join("rendered.yaml");
    fs::write(&file, rendered)?;
    containerd::run(plane.kubectl().args(["create", "namespace", NAMESPACE]))?;
    let dry = ["apply", "--dry-run=server", "--validate=strict", "-f"];
    let said = containerd::run(plane.kubectl().args(dry).arg(&file))?;
    say::note(&format!("the API server takes {} objects", said.lines().count()));
    Ok(())
}

/// The label must not come before the runtime is served.
fn install(plane: &Plane<'_>) -> Result<()> {
    step("helm install");
    release::load_image(plane)?;
    containerd::run(plane.kubectl().args(["label", "node", NODE, "nvidia.com/gpu.present=true"]))?;
    release::helm(plane, &["install", RELEASE, "-n", NAMESPACE])?;
    let state = wait_state(plane, |state| state.starts_with("installed"))?;
    let node = plane.get(&["node", NODE])?;
    ensure!(node["metadata"]["labels"][LABEL].is_null(), "the label was there before the runtime");
    say::note(&format!("the node says: {state}; it has no label, and pods of the class wait"));
    let early = plane.gpu_pod("early", Some("affinode"))?;
    plane.apply(&early)?;
    plane.until("a pod of the class to find no node", || {
        let pod = plane.get(&["pod", "early"])?;
        Ok((pod["status"]["conditions"][0]["reason"] == "Unschedulable").then_some(()))
    })?;
    containerd::run(plane.kubectl().args(["delete", "pod", "early"]))?;
    say::note("containerd is restarted");
    plane.world().containerd().stop(Signal::SIGTERM)?;
    plane.world().start_containerd()?;
    wait_state(plane, |state| state == "served")?;
    plane.until("the label", || {
        let node = plane.get(&["node", NODE])?;
        Ok((node["metadata"]["labels"][LABEL] == "true").then_some(()))
    })?;
    let ready = ["-n", NAMESPACE, "rollout", "status", "daemonset/affinode-node", "--timeout=120s"];
    containerd::run(plane.kubectl().args(ready))?;
    say::note(&format!("the node says: served; label {LABEL}=true"));
    Ok(())
}

fn wait_state(plane: &Plane<'_>, is_it: impl Fn(&str) -> bool) -> Result<String> {
    plane
        .until("the node's agent", || {
            let node = plane.get(&["node", NODE])?;
            let state = node["metadata"]["annotations"][STATE].as_str().unwrap_or_default();
            Ok(is_it(state).then(|| state.to_owned()))
        })
        .with_context(|| agent_log(plane))
}

fn agent_log(plane: &Plane<'_>) -> String {
    let log = ["-n", NAMESPACE, "logs", "daemonset/affinode-node", "--tail=30"];
    let describe = ["-n", NAMESPACE, "describe", "pods"];
    [&log[..], &describe[..]]
        .iter()
        .filter_map(|words| plane.kubectl().args(*words).output().ok())
        .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
        .collect()
}

/// With the token of an agent: its node's own labels of ours, and no more.
fn agents_change_their_own_alone(plane: &Plane<'_>) -> Result<()> {
    step("An agent's token changes nothing but what is Affinode's");
    let pods = plane.get(&["pods", "-n", NAMESPACE, "-l", "app.kubernetes.io/component=node"])?;
    let pod = pods["items"][0]["metadata"]["name"].as_str().context("an agent's pod")?;
    let token = containerd::run(plane.kubectl().args([
        "-n",
        NAMESPACE,
        "create",
        "token",
        "affinode-node",
        "--bound-object-kind=Pod",
        &format!("--bound-object-name={pod}"),
    ]))?;
    plane.apply(&json!({
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-2"},
    }))?;
    let tried = |what: &[&str]| -> Result<String> {
        let token = format!("--token={}", token.trim());
        let output = plane.kubectl().arg(&token).args(what).output()?;
        let told = if output.status.success() { output.stdout } else { output.stderr };
        Ok(String::from_utf8_lossy(&told).trim().to_owned())
    };
    let own = tried(&["label", "node", NODE, "affinode.io/tried=true"])?;
    ensure!(own.contains("labeled"), "{own}");
    for (what, why) in [
        (["label", "node", NODE, "example.com/tried=true"], "labels of affinode.io alone"),
        (["annotate", "node", NODE, "example.com/tried=true"], "annotations of affinode.io alone"),
        (["label", "node", "node-2", "affinode.io/tried=true"], "its own node alone"),
        (["taint", "node", NODE, "affinode.io/tried=true:NoSchedule"], "no node's spec"),
    ] {
        let said = tried(&what)?;
        ensure!(said.contains(why), "{what:?}: {said}");
    }
    containerd::run(plane.kubectl().args(["label", "node", NODE, "affinode.io/tried-"]))?;
    containerd::run(plane.kubectl().args(["delete", "node", "node-2"]))?;
    say::note("its own node's label: yes; other labels, annotations, nodes, taints: refused");
    Ok(())
}

/// This API server serves MutatingAdmissionPolicy: the chart chose that.
fn by_policy(plane: &Plane<'_>) -> Result<()> {
    step("GPU pods get the class by an admission policy");
    let policies = plane.get(&["mutatingadmissionpolicies"])?;
    ensure!(policies["items"][0]["metadata"]["name"] == RELEASE, "{policies}");
    pods_get_the_class(plane, "asks-policy")
}

/// The other way, as on API servers that serve none.
fn by_webhook(plane: &Plane<'_>) -> Result<()> {
    step("helm upgrade --set inject.by=webhook: GPU pods get the class by the webhook");
    let upgrade = ["upgrade", RELEASE, "-n", NAMESPACE, "--set=inject.by=webhook"];
    release::helm(plane, &upgrade)?;
    let ready =
        ["-n", NAMESPACE, "rollout", "status", "deployment/affinode-webhook", "--timeout=180s"];
    containerd::run(plane.kubectl().args(ready)).with_context(|| agent_log(plane))?;
    let policies = plane.get(&["mutatingadmissionpolicies"])?;
    ensure!(policies["items"].as_array().is_some_and(Vec::is_empty), "{policies}");
    pods_get_the_class(plane, "asks-webhook")?;
    let logs = ["-n", NAMESPACE, "logs", "deployment/affinode-webhook", "--all-pods=true"];
    let said = containerd::run(plane.kubectl().args(logs))?;
    let line = said.lines().find(|line| line.contains("asks-webhook")).context("its log")?;
    say::note(&format!("the webhook says: {line}"));
    Ok(())
}

/// Those alone that ask for a GPU, and did not say no.
fn pods_get_the_class(plane: &Plane<'_>, name: &str) -> Result<()> {
    let class = |pod: &Value| -> Result<Value> {
        let file = plane.world().dir().join("pod.json");
        fs::write(&file, pod.to_string())?;
        let dry = ["create", "--dry-run=server", "-o", "json", "-f"];
        let made = containerd::run(plane.kubectl().args(dry).arg(file))?;
        Ok(serde_json::from_str::<Value>(&made)?["spec"].take())
    };
    let asks = plane.gpu_pod(name, None)?;
    // An API server begins to call a webhook, or to apply a policy, a moment after it was made.
    let spec = plane.until("a GPU pod to get the class", || {
        let spec = class(&asks)?;
        Ok((spec["runtimeClassName"] == "affinode").then_some(spec))
    })?;
    ensure!(spec["overhead"]["memory"] == "16Mi", "no overhead: {spec}");
    let mut declines = asks.clone();
    declines["metadata"]["labels"] = json!({"affinode.io/inject": "ignore"});
    let mut without = asks.clone();
    without["spec"]["containers"][0]["resources"] = json!({});
    for (pod, what) in [(declines, "one that declines"), (without, "one without a GPU")] {
        let spec = class(&pod)?;
        ensure!(spec["runtimeClassName"].is_null(), "{what} got the class: {spec}");
    }
    say::note(
        "a GPU pod gets class and overhead; one that declines, one without a GPU: as they were",
    );
    Ok(())
}

/// A pod with a CUDA program.
struct Pod<'a> {
    plane: &'a Plane<'a>,
    name: &'static str,
    lines: Lines,
}

impl<'a> Pod<'a> {
    fn start(plane: &'a Plane<'a>, name: &'static str) -> Result<Self> {
        step("A GPU pod whose manifest names no class");
        let pod = plane.gpu_pod(name, None)?;
        plane.apply(&pod)?;
        let lines = Lines::open(&plane.world().dir().join("io").join(name))?;
        let pod = plane
            .until(&format!("pod {name} to run"), || {
                let pod = plane.get(&["pod", name])?;
                Ok((pod["status"]["phase"] == "Running").then_some(pod))
            })
            .with_context(|| describe(plane, name))?;
        ensure!(pod["spec"]["runtimeClassName"] == "affinode", "{}", pod["spec"]);
        ensure!(pod["spec"]["overhead"]["memory"] == "16Mi", "{}", pod["spec"]["overhead"]);
        ensure!(pod["spec"]["nodeSelector"][LABEL] == "true", "{}", pod["spec"]["nodeSelector"]);
        say::note("it runs as a pod of the class, with its overhead and node selector");
        Ok(Self { plane, name, lines })
    }

    fn receive(&mut self, command: &str) -> Result<()> {
        let line = self.lines.receive()?;
        let wanted = format!("\"command\":\"{command}\",\"result\":0");
        ensure!(line.contains(&wanted), "{line}");
        Ok(())
    }

    fn is_moved_out(&mut self) -> Result<()> {
        self.receive("open")?;
        self.receive("fill")?;
        let event = self.event("GPUOffloaded")?;
        say::note(&format!("event of the pod: GPUOffloaded: {event}"));
        Ok(())
    }

    fn wakes_by_exec(&mut self) -> Result<()> {
        step("kubectl exec: its program is called");
        let pipe = affinode_e2e::container::PIPES;
        let script = format!("echo verify > {pipe}/in");
        containerd::run(
            self.plane.kubectl().args(["exec", self.name, "--", "/bin/sh", "-c", &script]),
        )?;
        self.receive("verify")?;
        let event = self.event("GPURestored")?;
        say::note("contents of its GPU memory: as before");
        say::note(&format!("event of the pod: GPURestored: {event}"));
        Ok(())
    }

    fn event(&self, reason: &str) -> Result<String> {
        let named = format!("reason={reason},involvedObject.name={}", self.name);
        self.plane
            .until(&format!("event {reason}"), || {
                let events = self.plane.get(&["events", "--field-selector", &named])?;
                Ok(events["items"][0]["message"].as_str().map(str::to_owned))
            })
            .with_context(|| agent_log(self.plane))
    }

    fn delete(self) -> Result<()> {
        containerd::run(self.plane.kubectl().args(["delete", "pod", self.name])).map(|_| ())
    }
}

fn describe(plane: &Plane<'_>, name: &str) -> String {
    let told = plane.kubectl().args(["describe", "pod", name]).output();
    told.map(|told| String::from_utf8_lossy(&told.stdout).into_owned()).unwrap_or_default()
}

/// As Prometheus would: over the pod network, with an account's token.
fn metrics(plane: &Plane<'_>) -> Result<()> {
    step("Metrics, by way of the agent");
    let pods = plane.get(&["pods", "-n", NAMESPACE, "-l", "app.kubernetes.io/component=node"])?;
    let address = pods["items"][0]["status"]["podIP"].as_str().context("the agent's address")?;
    let url = format!("https://{address}:{PORT}/metrics");
    let kubectl = |words: &[&str]| containerd::run(plane.kubectl().args(words));
    kubectl(&["create", "serviceaccount", "prometheus"])?;
    let token = kubectl(&["create", "token", "prometheus"])?;
    let scrape = |token: Option<&str>| -> Result<(u16, String)> {
        let mut curl = plane.world().keeper().command("curl".as_ref());
        curl.args(["--silent", "--insecure", "--write-out", "\n%{http_code}", &url]);
        if let Some(token) = token {
            curl.arg("--header").arg(format!("Authorization: Bearer {}", token.trim()));
        }
        let said = containerd::run(&mut curl)?;
        let (text, code) = said.rsplit_once('\n').context("curl")?;
        Ok((code.parse()?, text.to_owned()))
    };
    let (none, _) = scrape(None)?;
    let (stranger, _) = scrape(Some(&token))?;
    ensure!((none, stranger) == (401, 403), "without a token {none}, of a stranger {stranger}");
    kubectl(&[
        "create",
        "clusterrolebinding",
        "prometheus",
        "--clusterrole=affinode-viewer",
        "--serviceaccount=default:prometheus",
    ])?;
    // A no is remembered for ten seconds.
    let text = until_within(Duration::from_secs(60), "the account to be let in", || {
        let (code, text) = scrape(Some(&token))?;
        Ok((code == 200).then_some(text))
    })?;
    kubectl(&["delete", "clusterrolebinding", "prometheus"])?;
    kubectl(&["delete", "serviceaccount", "prometheus"])?;
    let line = text
        .lines()
        .find(|line| {
            line.starts_with("affinode_container_cuda_calls_total{")
                && line.contains("pod=\"trainer\"")
        })
        .with_context(|| format!("no calls of the pod in {text}"))?;
    say::note("without a token: 401; of an account that may not: 403; that may:");
    say::note(line);
    let node = plane.until("the node's annotation of VRAM", || {
        let node = plane.get(&["node", NODE])?;
        let seen = &node["metadata"]["annotations"]["affinode.io/reclaimable-vram-bytes"];
        Ok(seen.as_str().map(str::to_owned))
    })?;
    say::note(&format!("annotation affinode.io/reclaimable-vram-bytes: {node}"));
    Ok(())
}

/// Nobody loses a shim: an uninstallation that would take it away changes nothing.
fn uninstall_waits_for_pods(plane: &Plane<'_>) -> Result<()> {
    step("helm uninstall, while a pod of the class runs");
    let words = ["uninstall", RELEASE, "-n", NAMESPACE, "--timeout=120s"];
    let output = plane.helm().args(words).output()?;
    if output.status.success() {
        bail!("it was uninstalled below a running pod");
    }
    let logs = ["-n", NAMESPACE, "logs", "job/affinode-uninstall", "--tail=3"];
    let said = containerd::run(plane.kubectl().args(logs))?;
    ensure!(said.contains("end their containers first"), "{said}");
    say::note(said.trim().lines().last().unwrap_or_default());
    wait_state(plane, |state| state == "served")?;
    say::note("all of it is as it was: the node says: served");
    Ok(())
}

fn uninstall(plane: &Plane<'_>, before: &Before) -> Result<()> {
    step("helm uninstall");
    containerd::run(plane.helm().args(["uninstall", RELEASE, "-n", NAMESPACE, "--timeout=180s"]))
        .with_context(|| agent_log(plane))?;
    containerd::run(plane.kubectl().args(["label", "node", NODE, "nvidia.com/gpu.present-"]))?;
    let node = plane.get(&["node", NODE])?;
    let after = &node["metadata"];
    ensure!(after["labels"] == before.labels, "labels are left: {}", after["labels"]);
    let annotations = keys(&after["annotations"]);
    let left: Vec<_> = annotations.iter().filter(|key| !before.annotations.contains(key)).collect();
    ensure!(left.is_empty(), "annotations are left: {left:?}");
    ensure!(fs::read(config_file(plane))? == before.config, "containerd's configuration differs");
    let world = plane.world().dir();
    for gone in [
        "prefix/bin/affinode",
        "prefix/lib/affinode",
        "affinode/conf.d",
        "state-affinode/install.json",
    ] {
        ensure!(!world.join(gone).exists(), "{gone} is left on the node");
    }
    plane.until("the controller to end", || {
        Ok(plane.world().controller()?.is_none().then_some(()))
    })?;
    plane.until("the agents' pods to go", || {
        let text = containerd::run(plane.kubectl().args([
            "get",
            KINDS,
            "-A",
            "-l",
            "app.kubernetes.io/instance=affinode",
            "-o",
            "name",
        ]))?;
        Ok(text.trim().is_empty().then_some(()))
    })?;
    say::note(
        "the cluster has no object of it, the node no label, annotation or file; \
               containerd's configuration is byte for byte as before",
    );
    Ok(())
}
