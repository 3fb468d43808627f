//! NVIDIA's own device plugin on a node, in place of the test's.

use std::{fs, path::PathBuf};

use affinode_e2e::{artifacts::workspace_dir, containerd};
use anyhow::{Result, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;

use super::{OFFERED_BY, SHARING, shows};
use crate::{
    k8s::{
        control_plane::Plane,
        go_module::{GoModule, GoProgram},
        node::Node,
        programs::DEVICE_PLUGIN_NAME,
        scenarios::step,
    },
    output,
};

const PLUGIN: GoModule = GoModule {
    folder: "nvidia-device-plugin",
    path: "github.com/NVIDIA/k8s-device-plugin",
    version: "v0.19.0",
};
/// Name of the plugin in its module, and of its log.
const NAME: &str = "nvidia-device-plugin";
/// Number of times that the example of time-slicing offers each GPU.
const REPLICAS: u32 = 4;

/// Runs NVIDIA's plugin on the last node, which has one GPU and no pod of the test: first without
/// time-slicing, then with the configuration of the example. The node object must show both.
pub fn is_told(plane: &Plane<'_>) -> Result<()> {
    let Some(node) = plane.nodes()[1..].last() else { return Ok(()) };
    let program = GoProgram { name: NAME, time: "two minutes", has_c: true };
    let program = PLUGIN.build(&plane.world().artifacts().cache_dir(), &program)?;
    step(&format!("NVIDIA's device plugin {} on {}", PLUGIN.version, node.name));
    for own in node.world.processes(DEVICE_PLUGIN_NAME)? {
        end(plane, own.pid)?;
    }
    let plugin = Plugin { plane, node, program };
    let whole = plugin.start(&[], 1)?;
    plugin.is_shown("unshared")?;
    end(plane, whole)?;
    let config = format!("--config-file={}", time_slicing(plane)?.display());
    let sliced = plugin.start(&[config], REPLICAS)?;
    plugin.is_shown("time-slicing")?;
    end(plane, sliced)?;
    node.gpus(plane)
}

/// NVIDIA's plugin on a node.
struct Plugin<'a> {
    plane: &'a Plane<'a>,
    node: &'a Node<'a>,
    program: PathBuf,
}

impl Plugin<'_> {
    /// Starts the plugin, and waits until the node offers this number of GPUs. The plugin asks the
    /// simulated NVML.
    fn start(&self, arguments: &[String], count: u32) -> Result<Pid> {
        let world = self.node.world;
        let env = world.gpu().host_env(world.artifacts(), world.dir());
        let mut variables: Vec<(&str, &str)> =
            env.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        // The simulated NVML reports no events of broken GPUs.
        variables.push(("DP_DISABLE_HEALTHCHECKS", "all"));
        let pid = self.node.spawn_with(NAME, &self.program, arguments, &variables)?;
        self.node.offers(self.plane, count, NAME)?;
        Ok(pid)
    }

    /// Waits until the node object shows NVIDIA's plugin, and this kind of sharing alone.
    fn is_shown(&self, kind: &str) -> Result<()> {
        shows(self.plane, self.node, &format!("the kind {kind}"), |metadata: &Value| {
            metadata["labels"][OFFERED_BY] == "nvidia-plugin"
                && metadata["annotations"][SHARING] == kind
        })?;
        output::note(&format!("{}: {OFFERED_BY}=nvidia-plugin, {SHARING}={kind}", self.node.name));
        Ok(())
    }
}

/// Cuts the plugin's configuration out of the example, by the command in the documents.
fn time_slicing(plane: &Plane<'_>) -> Result<PathBuf> {
    let example = workspace_dir().join("config/kubernetes/sharing/time-slicing.yaml");
    let mut sed = std::process::Command::new("sed");
    let text = containerd::run(sed.arg("1,/^  config: |/d; s/^    //").arg(example))?;
    ensure!(text.starts_with("version: v1"), "the configuration is not in the example: {text}");
    let file = plane.dir().join("time-slicing-config.yaml");
    fs::write(&file, text)?;
    Ok(file)
}

/// Ends a device plugin, and waits until it has ended.
fn end(plane: &Plane<'_>, pid: Pid) -> Result<()> {
    kill(pid, Signal::SIGKILL)?;
    let stat = format!("/proc/{pid}/stat");
    plane.until("the device plugin to end", || {
        let ended = fs::read_to_string(&stat).map_or(true, |stat| stat.contains(") Z "));
        Ok(ended.then_some(()))
    })
}
