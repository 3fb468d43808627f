//! Checks of pods with a CUDA program: offload, restore, wait, refusal, and their events.

use affinode_e2e::{cli::ContainerRow, containerd, image, worker::Lines};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::{GPU_STATE, LABEL, RESIDENT, SMALL_MIB, agent_log, step};
use crate::{
    k8s::{control_plane::Plane, node::Node},
    output,
};

/// Name of the pod that looks as if it had ended while no node agent ran.
const ENDED: &str = "ended";
/// VRAM of a large pod in MiB. Two such pods do not fit on a GPU.
const LARGE_MIB: u32 = 600;

/// Runs a pod that names no runtime class. The pod must be offloaded, and a call through `kubectl
/// exec` must restore it.
pub fn comes_and_goes<'a>(plane: &'a Plane<'a>, node: &'a Node<'a>, name: &str) -> Result<Pod<'a>> {
    step(&format!("A GPU pod of {} whose manifest names no class is idle", node.name));
    gives_back(plane, node, name, &node.gpu_pod(name, SMALL_MIB)?)
}

/// Runs a pod. The pod must be offloaded, and a call through `kubectl exec` must restore it.
pub fn gives_back<'a>(
    plane: &'a Plane<'a>,
    node: &'a Node<'a>,
    name: &str,
    manifest: &Value,
) -> Result<Pod<'a>> {
    let mut pod = Pod::start(plane, node, name, manifest)?;
    output::note("it runs as a pod of the class, with its overhead and node selector");
    pod.is_moved_out()?;
    let message = pod.stands(&["Offloaded"], "False", "IdleTimeout")?;
    output::note(&format!(
        "kubectl get pods -L {GPU_STATE} says Offloaded; {RESIDENT}=False: {message}"
    ));
    step("kubectl exec makes its program call CUDA");
    pod.call()?;
    pod.is_back()?;
    Ok(pod)
}

/// Makes a CUDA call in an offloaded pod while VRAM for it is not free. The call must wait, and the
/// pod's condition must show that it waits.
pub fn waiting_pod_is_reported(plane: &Plane<'_>) -> Result<()> {
    step("Two pods that together want more VRAM than there is");
    let node = plane.first();
    let mut first = Pod::start(plane, node, "first", &node.gpu_pod("first", LARGE_MIB)?)?;
    first.is_moved_out()?;
    let mut second = node.gpu_pod("second", LARGE_MIB)?;
    second["metadata"]["annotations"]["affinode.io/offload"] = "off".into();
    let mut second = Pod::start(plane, node, "second", &second)?;
    second.has_filled()?;
    output::note("the second holds the GPU; the first makes a call");
    first.call()?;
    first.tells("GPUWaiting")?;
    let message = first.stands(&["Queued"], "False", "")?;
    output::note(&format!("label Queued: {message}"));
    output::note("the second is deleted");
    second.delete()?;
    first.is_back()?;
    first.stands(&["Active", "Idle"], "True", "")?;
    first.delete()
}

/// Runs a pod that cannot be offloaded. The pod must stay resident, and its condition must show the
/// reason.
pub fn staying_pod_is_reported(plane: &Plane<'_>) -> Result<()> {
    step("A pod whose memory limit has no room for its VRAM");
    let node = plane.first();
    let mut tight = node.gpu_pod("tight", SMALL_MIB)?;
    tight["spec"]["containers"][0]["resources"]["limits"]["memory"] = "256Mi".into();
    let tight = Pod::start(plane, node, "tight", &tight)?;
    tight.tells("GPUOffloadRefused")?;
    tight.delete()
}

/// Creates a pod that ends at once, and then sets Affinode's label and condition on it. The pod
/// then looks as if it had ended while no node agent ran.
pub fn ended_long_ago<'a>(plane: &'a Plane<'a>) -> Result<Ended<'a>> {
    plane.apply(&json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": ENDED},
        "spec": {"restartPolicy": "Never", "containers": [{
            "name": "main", "image": image::PLAIN, "imagePullPolicy": "Never", "command": ["true"],
        }]},
    }))?;
    plane.until("a pod to end", || {
        let pod = plane.get(&["pod", ENDED])?;
        Ok((pod["status"]["phase"] == "Succeeded").then_some(()))
    })?;
    let said = json!({
        "metadata": {"labels": {GPU_STATE: "Active"}},
        "status": {"conditions": [{"type": RESIDENT, "status": "True"}]},
    });
    let patch = ["patch", "pod", ENDED, "--subresource=status", "--patch"];
    containerd::run(plane.kubectl().args(patch).arg(said.to_string()))?;
    Ok(Ended(plane))
}

/// A pod that looks as if it had ended while no node agent ran.
pub struct Ended<'a>(&'a Plane<'a>);

impl Ended<'_> {
    /// Checks that Affinode's label and condition are removed from the pod, and nothing else
    /// changes.
    pub fn says_nothing(self) -> Result<()> {
        let pod = self.0.get(&["pod", ENDED])?;
        ensure!(
            pod["metadata"]["labels"][GPU_STATE].is_null(),
            "the ended pod still has the label {GPU_STATE}: {}",
            pod["metadata"]["labels"]
        );
        let conditions = pod["status"]["conditions"].to_string();
        ensure!(
            !conditions.contains(RESIDENT),
            "the ended pod still has the condition {RESIDENT}: {conditions}"
        );
        ensure!(
            conditions.contains("PodScheduled"),
            "the pod lost the condition PodScheduled: {conditions}"
        );
        output::note("a pod that has ended has no label and no condition of it either");
        containerd::run(self.0.kubectl().args(["delete", "pod", ENDED])).map(|_| ())
    }
}

/// A pod with a CUDA program.
pub struct Pod<'a> {
    plane: &'a Plane<'a>,
    node: &'a Node<'a>,
    pub name: String,
    lines: Lines,
}

impl<'a> Pod<'a> {
    /// Creates a pod and waits until it runs.
    pub fn start(
        plane: &'a Plane<'a>,
        node: &'a Node<'a>,
        name: &str,
        pod: &Value,
    ) -> Result<Self> {
        plane.apply(pod)?;
        let lines = Lines::open(&node.world.dir().join("io").join(name))?;
        let pod = plane
            .until(&format!("pod {name} to run"), || {
                let pod = plane.get(&["pod", name])?;
                Ok((pod["status"]["phase"] == "Running").then_some(pod))
            })
            .with_context(|| describe(plane, name))?;
        ensure!(
            pod["spec"]["runtimeClassName"] == "affinode",
            "expected the runtime class affinode: {}",
            pod["spec"]
        );
        ensure!(
            pod["spec"]["overhead"]["memory"] == "16Mi",
            "expected an overhead of 16Mi, got {}",
            pod["spec"]["overhead"]
        );
        ensure!(
            pod["spec"]["nodeSelector"][LABEL] == "true",
            "expected a node selector with {LABEL}, got {}",
            pod["spec"]["nodeSelector"]
        );
        ensure!(
            pod["spec"]["nodeName"] == *node.name,
            "expected the pod on node {}, it is on {}",
            node.name,
            pod["spec"]["nodeName"]
        );
        Ok(Self { plane, node, name: name.into(), lines })
    }

    fn receive(&mut self, command: &str) -> Result<()> {
        let line = self.lines.receive()?;
        let wanted = format!("\"command\":\"{command}\",\"result\":0");
        ensure!(line.contains(&wanted), "expected {wanted:?}, got {line}");
        Ok(())
    }

    /// Waits until the pod's program has filled its GPU memory.
    pub fn has_filled(&mut self) -> Result<()> {
        self.receive("open")?;
        self.receive("fill")
    }

    /// Waits until the pod's program has filled its GPU memory, and the memory is offloaded.
    pub fn is_moved_out(&mut self) -> Result<()> {
        self.has_filled()?;
        self.tells("GPUOffloaded")
    }

    fn tells(&self, reason: &str) -> Result<()> {
        let event = self.event(reason)?;
        output::note(&format!("event of pod {}: {reason}: {event}", self.name));
        Ok(())
    }

    /// Waits until a kubelet that has just started accepts commands for the pod.
    pub fn accepts_commands(&self) -> Result<()> {
        self.plane.until(&format!("the kubelet to know pod {}", self.name), || {
            let said = self.plane.kubectl().args(["exec", &self.name, "--", "true"]).output()?;
            Ok(said.status.success().then_some(()))
        })
    }

    /// Makes the pod's program allocate `mib` MiB more. The allocation must fail for lack of memory.
    pub fn is_refused_memory(&mut self, mib: u32) -> Result<()> {
        self.send(&format!("alloc {mib} -"))?;
        let line = self.lines.receive()?;
        ensure!(
            line.contains("\"result\":2"),
            "expected CUDA_ERROR_OUT_OF_MEMORY in {}, got {line}",
            self.name
        );
        Ok(())
    }

    /// Makes the pod's program call CUDA.
    fn call(&self) -> Result<()> {
        self.send("verify")
    }

    /// Sends a command to the pod's program, through `kubectl exec`.
    fn send(&self, command: &str) -> Result<()> {
        let pipe = affinode_e2e::container::PIPES;
        let script = format!("echo '{command}' > {pipe}/in");
        containerd::run(
            self.plane.kubectl().args(["exec", &self.name, "--", "/bin/sh", "-c", &script]),
        )
        .map(|_| ())
    }

    /// Waits until the pod's GPU memory is offloaded after its idle time. Queries the node's
    /// controller, because the node agent may be down.
    pub fn is_offloaded(&self) -> Result<()> {
        self.plane.until(&format!("the memory of {} to be offloaded", self.name), || {
            let known = self.node.world.cli().ps()?.containers;
            let offloaded = |c: &ContainerRow| c.pod == self.name && c.state == "Offloaded";
            Ok(known.iter().any(offloaded).then_some(()))
        })
    }

    /// Makes the pod's program call CUDA. Checks that the contents of its GPU memory are unchanged,
    /// and that the container was not restarted.
    pub fn comes_back(&mut self) -> Result<()> {
        self.call()?;
        self.receive("verify")?;
        let pod = self.plane.get(&["pod", &self.name])?;
        let restarts = &pod["status"]["containerStatuses"][0]["restartCount"];
        ensure!(*restarts == 0, "{} was restarted {restarts} times", self.name);
        Ok(())
    }

    /// Checks the reply of the pod's program to a call, and the event of the pod's restore.
    fn is_back(&mut self) -> Result<()> {
        self.receive("verify")?;
        output::note("contents of its GPU memory: as before");
        self.tells("GPURestored")
    }

    /// Waits until the pod's label has one of the values `states`, and its condition has this
    /// status and this reason. An empty `reason` stands for any reason. Returns the message of the
    /// condition.
    fn stands(&self, states: &[&str], resident: &str, reason: &str) -> Result<String> {
        self.plane
            .until(&format!("label {GPU_STATE}={}", states.join(" or ")), || {
                let pod = self.plane.get(&["pod", &self.name])?;
                let conditions = pod["status"]["conditions"].as_array().cloned();
                let ours = |c: &&Value| c["type"] == RESIDENT;
                let conditions = conditions.unwrap_or_default();
                let Some(condition) = conditions.iter().find(ours) else { return Ok(None) };
                let fits =
                    states.iter().any(|state| pod["metadata"]["labels"][GPU_STATE] == *state)
                        && condition["status"] == resident
                        && (reason.is_empty() || condition["reason"] == reason);
                Ok(condition["message"].as_str().filter(|_| fits).map(str::to_owned))
            })
            .with_context(|| {
                format!("{}{}", agent_log(self.plane), describe(self.plane, &self.name))
            })
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

    pub fn delete(self) -> Result<()> {
        containerd::run(self.plane.kubectl().args(["delete", "pod", &self.name])).map(|_| ())
    }
}

/// Returns the output of `kubectl describe` about a pod.
pub fn describe(plane: &Plane<'_>, name: &str) -> String {
    let told = plane.kubectl().args(["describe", "pod", name]).output();
    told.map(|told| String::from_utf8_lossy(&told.stdout).into_owned()).unwrap_or_default()
}
