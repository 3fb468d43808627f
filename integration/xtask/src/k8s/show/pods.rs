//! Pods with a CUDA program: they leave, come home, wait, stay, and are told.

use affinode_e2e::{containerd, worker::Lines};
use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{LABEL, SMALL_MIB, agent_log, step};
use crate::{k8s::plane::Plane, say};

/// Of two such pods one fits on the GPU.
const LARGE_MIB: u32 = 600;

/// A pod that names no class is moved out, and is called by `kubectl exec`.
pub fn comes_and_goes<'a>(plane: &'a Plane<'a>) -> Result<Pod<'a>> {
    step("A GPU pod whose manifest names no class is idle");
    let mut pod = Pod::start(plane, "trainer", &plane.gpu_pod("trainer", SMALL_MIB)?)?;
    say::note("it runs as a pod of the class, with its overhead and node selector");
    pod.is_moved_out()?;
    step("kubectl exec: its program is called");
    pod.call()?;
    pod.is_back()?;
    Ok(pod)
}

/// A call that finds no room waits for it.
pub fn who_waits_is_told(plane: &Plane<'_>) -> Result<()> {
    step("Two pods that together want more VRAM than there is");
    let mut first = Pod::start(plane, "first", &plane.gpu_pod("first", LARGE_MIB)?)?;
    first.is_moved_out()?;
    let mut second = plane.gpu_pod("second", LARGE_MIB)?;
    second["metadata"]["annotations"]["affinode.io/offload"] = "off".into();
    let mut second = Pod::start(plane, "second", &second)?;
    second.receive("open")?;
    second.receive("fill")?;
    say::note("the second has the GPU and keeps it; the first is called");
    first.call()?;
    first.tells("GPUWaiting")?;
    say::note("the second is deleted");
    second.delete()?;
    first.is_back()?;
    first.delete()
}

/// A pod that cannot be moved stays, and says why.
pub fn who_stays_is_told(plane: &Plane<'_>) -> Result<()> {
    step("A pod whose memory limit has no room for its VRAM");
    let mut tight = plane.gpu_pod("tight", SMALL_MIB)?;
    tight["spec"]["containers"][0]["resources"]["limits"]["memory"] = "256Mi".into();
    let tight = Pod::start(plane, "tight", &tight)?;
    tight.tells("GPUOffloadRefused")?;
    tight.delete()
}

/// A pod with a CUDA program.
pub struct Pod<'a> {
    plane: &'a Plane<'a>,
    name: &'static str,
    lines: Lines,
}

impl<'a> Pod<'a> {
    fn start(plane: &'a Plane<'a>, name: &'static str, pod: &Value) -> Result<Self> {
        plane.apply(pod)?;
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
        self.tells("GPUOffloaded")
    }

    fn tells(&self, reason: &str) -> Result<()> {
        let event = self.event(reason)?;
        say::note(&format!("event of pod {}: {reason}: {event}", self.name));
        Ok(())
    }

    /// By `kubectl exec`: its program is told to look at its memory.
    fn call(&self) -> Result<()> {
        let pipe = affinode_e2e::container::PIPES;
        let script = format!("echo verify > {pipe}/in");
        containerd::run(
            self.plane.kubectl().args(["exec", self.name, "--", "/bin/sh", "-c", &script]),
        )
        .map(|_| ())
    }

    /// The call is answered, and its pod is told.
    fn is_back(&mut self) -> Result<()> {
        self.receive("verify")?;
        say::note("contents of its GPU memory: as before");
        self.tells("GPURestored")
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

    /// Ends it.
    pub fn delete(self) -> Result<()> {
        containerd::run(self.plane.kubectl().args(["delete", "pod", self.name])).map(|_| ())
    }
}

fn describe(plane: &Plane<'_>, name: &str) -> String {
    let told = plane.kubectl().args(["describe", "pod", name]).output();
    told.map(|told| String::from_utf8_lossy(&told.stdout).into_owned()).unwrap_or_default()
}
