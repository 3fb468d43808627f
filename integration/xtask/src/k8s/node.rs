//! A node of the test cluster: a testbed with a kubelet and GPUs.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use affinode_e2e::{containerd, image, supervisor::Job, testbed::Testbed};
use anyhow::{Context, Result};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use super::{control_plane::Plane, files, programs::DEVICE_PLUGIN_NAME};
use crate::output;

/// Name of the resource by which pods request a GPU.
pub const RESOURCE: &str = "nvidia.com/gpu";
/// Number of GPUs that the device plugin of each node names.
const GPUS: u32 = 2;
/// Number of times that the plugin offers each of these GPUs, as with time-slicing.
const REPLICAS: u32 = 2;

/// Socket of the device plugin on a node.
const DEVICE_PLUGIN_SOCKET: &str = "/var/lib/kubelet/device-plugins/affinode-test.sock";

/// Path of a node's folder, as processes of the node see it. The path is the same on all nodes,
/// because each node has private mounts.
pub const HOME: &str = "/run/containerd/node";

/// A node of the cluster. The path of its testbed's folder ends in the node's name.
pub struct Node<'a> {
    pub name: String,
    number: u8,
    pub world: &'a Testbed,
}

impl<'a> Node<'a> {
    /// Creates the node with this number in a testbed.
    pub fn new(number: u8, world: &'a Testbed) -> Self {
        Self { name: name(number), number, world }
    }

    pub fn address(&self) -> String {
        format!("10.97.0.{}", self.number)
    }

    /// Returns the address range of the node's pods.
    pub fn pods(&self) -> String {
        format!("10.98.{}.0/24", self.number)
    }

    /// Returns the path of the configuration file of the node's containerd.
    pub fn config_file(&self) -> PathBuf {
        self.world.containerd().config_file()
    }

    /// Restarts the node's containerd as systemd would.
    pub fn restart_containerd(&self) -> Result<()> {
        self.world.containerd().stop(Signal::SIGTERM)?;
        self.world.start_containerd()
    }

    /// Runs the command `ip` with each of these lines as arguments, in the node's network.
    pub fn ip(&self, lines: &[&str]) -> Result<()> {
        for line in lines {
            let mut ip = self.world.keeper().command(Path::new("ip"));
            containerd::run(ip.args(line.split(' ')))
                .context("cannot set up the node's network; `ip` is in the package iproute2")?;
        }
        Ok(())
    }

    /// Connects this node to the bridge of the first node.
    pub fn join(&self, first: &Node<'_>) -> Result<()> {
        let (port, keeper) = (format!("to-{}", self.name), self.world.keeper().pid());
        first.ip(&[
            &format!("link add {port} type veth peer name nodes netns {keeper}"),
            &format!("link set {port} master nodes up"),
        ])?;
        self.ip(&[
            &format!("address add {}/24 dev nodes", self.address()),
            "link set nodes up",
            "route add 10.96.0.0/24 via 10.97.0.1",
        ])
    }

    /// Starts the node's kubelet, and waits until the node is ready and has GPUs.
    pub fn start(&self, plane: &Plane<'_>) -> Result<()> {
        output::step(&format!("Starting the kubelet of {}", self.name));
        self.home()?;
        files::cni(&self.world.dir().join("cni"), &plane.programs().cni_dir(), &self.pods())?;
        self.kubelet(plane)?;
        self.gpus(plane)
    }

    fn home(&self) -> Result<()> {
        let world = self.world;
        containerd::run(world.keeper().command("mkdir".as_ref()).arg(HOME))?;
        let mut mount = world.keeper().command("mount".as_ref());
        containerd::run(mount.arg("--bind").arg(world.dir()).arg(HOME)).map(|_| ())
    }

    /// Returns the path of a component's log.
    pub fn log(&self, name: &str) -> PathBuf {
        self.world.dir().join(format!("{name}.log"))
    }

    /// Starts a component of the cluster on this node.
    pub fn spawn(&self, name: &str, program: &Path, arguments: &[String]) -> Result<()> {
        self.spawn_with(name, program, arguments, &[]).map(|_| ())
    }

    /// Starts a component with these environment variables, and returns its process id.
    pub fn spawn_with(
        &self,
        name: &str,
        program: &Path,
        arguments: &[String],
        variables: &[(&str, &str)],
    ) -> Result<Pid> {
        let argv = [program.display().to_string()].into_iter().chain(arguments.iter().cloned());
        let mut env = BTreeMap::from([("HOME".into(), self.world.dir().display().to_string())]);
        env.extend(variables.iter().map(|(name, value)| ((*name).into(), (*value).into())));
        let job = Job { argv: argv.collect(), env, log: self.log(name) };
        let pid = self.world.keeper().spawn(&job)?;
        Ok(Pid::from_raw(pid.try_into().context("the process id is out of range")?))
    }

    /// Converts a path on the node to a path that this program can open.
    pub fn path(&self, of_node: &str) -> PathBuf {
        // The first process of a node is its testbed's supervisor.
        PathBuf::from(format!("/proc/{}/root{of_node}", self.world.keeper().pid()))
    }

    /// Kills the kubelet and starts it again.
    pub fn restart_kubelet(&self, plane: &Plane<'_>) -> Result<()> {
        for kubelet in self.world.processes("kubelet --config")? {
            kill(kubelet.pid, Signal::SIGKILL)?;
            // The kernel frees the ports just before the process is a zombie.
            let stat = format!("/proc/{}/stat", kubelet.pid);
            plane.until("the kubelet to end", || {
                let ended = fs::read_to_string(&stat).map_or(true, |stat| stat.contains(") Z "));
                Ok(ended.then_some(()))
            })?;
        }
        self.kubelet(plane)
    }

    fn kubelet(&self, plane: &Plane<'_>) -> Result<()> {
        files::cgroups(&self.world.cgroup_parent())?;
        let config = self.world.dir().join("kubelet.json");
        fs::write(&config, files::kubelet(self).to_string())?;
        self.spawn(
            "kubelet",
            &plane.programs().built("kubelet"),
            &[
                format!("--config={}", config.display()),
                format!(
                    "--kubeconfig={}",
                    plane.dir().join(files::of_kubelet(&self.name)).display()
                ),
                format!("--hostname-override={}", self.name),
                format!("--node-ip={}", self.address()),
            ],
        )?;
        plane
            .until("the node to be ready", || {
                let node =
                    plane.kubectl().args(["get", "node", &self.name, "-o", "json"]).output()?;
                let node: Value = serde_json::from_slice(&node.stdout).unwrap_or_default();
                let conditions =
                    node["status"]["conditions"].as_array().cloned().unwrap_or_default();
                let ready = |c: &Value| c["type"] == "Ready" && c["status"] == "True";
                let open = node["spec"]["taints"].is_null();
                Ok((open && conditions.iter().any(ready)).then_some(()))
            })
            .with_context(|| {
                format!(
                    "the kubelet does not make the node ready; see its log {}",
                    self.log("kubelet").display()
                )
            })?;
        plane.until("namespaces to be complete", || {
            let account = plane.kubectl().args(["get", "serviceaccount", "default"]).output()?;
            Ok(account.status.success().then_some(()))
        })
    }

    /// Starts the device plugin and waits until the node offers GPUs. The plugin adds the device
    /// files that NVIDIA's toolkit would add to a container that requests a GPU.
    pub fn gpus(&self, plane: &Plane<'_>) -> Result<()> {
        let world = self.world;
        let parts = world.gpu().container_parts(world.artifacts(), world.dir())?;
        let mounts: Vec<Value> = (parts.mounts.iter())
            .map(|(host, inside)| {
                json!({"host_path": host, "container_path": inside, "read_only": true})
            })
            .collect();
        let config = json!({
            "Resource": RESOURCE, "GPUs": GPUS, "Replicas": REPLICAS,
            "Response": {"envs": parts.env, "mounts": mounts},
        });
        let file = world.dir().join("device-plugin.json");
        fs::write(&file, config.to_string())?;
        // An earlier plugin that was ended may have left its socket.
        let _ = fs::remove_file(self.path(DEVICE_PLUGIN_SOCKET));
        let plugin = plane.programs().built(DEVICE_PLUGIN_NAME);
        self.spawn(DEVICE_PLUGIN_NAME, &plugin, &[file.display().to_string()])?;
        self.offers(plane, GPUS * REPLICAS, DEVICE_PLUGIN_NAME)
    }

    /// Waits until the node offers this number of GPUs. `plugin` is the name of the log of the
    /// device plugin.
    pub fn offers(&self, plane: &Plane<'_>, count: u32, plugin: &str) -> Result<()> {
        plane
            .until(&format!("the node to have {count} GPUs"), || {
                let node = plane.get(&["node", &self.name])?;
                let count = count.to_string();
                Ok((node["status"]["allocatable"][RESOURCE] == count.as_str()).then_some(()))
            })
            .with_context(|| {
                format!(
                    "the device plugin does not offer the GPUs; see its log {}",
                    self.log(plugin).display()
                )
            })
    }

    /// Returns the manifest of a pod for this node. The pod requests a GPU and runs a CUDA program,
    /// which the test controls through pipes in a folder of the node.
    pub fn gpu_pod(&self, name: &str, vram_mib: u32) -> Result<Value> {
        use affinode_e2e::container::{CLIENTS, PIPES, make_pipes, piped};
        let pipes = make_pipes(self.world.dir(), name)?;
        let argv = piped(&[
            format!("{CLIENTS}/{}", affinode_e2e::worker::USUAL),
            "--mib".into(),
            vram_mib.to_string(),
        ]);
        let volume = |name: &str, path: &Path| json!({"name": name, "hostPath": {"path": path}});
        Ok(json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "annotations": {"affinode.io/idle-timeout": "2s", "affinode.io/offload": "eager"}},
            "spec": {
                "nodeSelector": {"kubernetes.io/hostname": self.name},
                "containers": [{
                    "name": "main", "image": image::PLAIN, "imagePullPolicy": "Never", "command": argv,
                    "resources": {"limits": {RESOURCE: "1"}},
                    "volumeMounts": [
                        {"name": "clients", "mountPath": CLIENTS}, {"name": "pipes", "mountPath": PIPES},
                    ],
                }],
                "volumes": [
                    volume("clients", &self.world.artifacts().clients_dir()), volume("pipes", &pipes),
                ],
                "terminationGracePeriodSeconds": 0,
            },
        }))
    }
}

/// Returns a CDI specification like the one that NVIDIA's container toolkit creates for a node's
/// GPU, but with the files and variables of the simulated GPU. The specification names the GPU by
/// its index, which is the toolkit's default.
pub fn toolkit_spec(node: &Node<'_>) -> Result<Value> {
    let world = node.world;
    let parts = world.gpu().container_parts(world.artifacts(), world.dir())?;
    let env: Vec<String> =
        parts.env.iter().map(|(name, value)| format!("{name}={value}")).collect();
    let mount = |(host, inside): &(PathBuf, PathBuf)| {
        json!({
            "hostPath": host, "containerPath": inside,
            "options": ["ro", "nosuid", "nodev", "rbind", "rprivate"],
        })
    };
    let mounts: Vec<Value> = parts.mounts.iter().map(mount).collect();
    let devices = ["0", "all"].map(|name| json!({"name": name, "containerEdits": {"env": env}}));
    Ok(json!({
        "cdiVersion": "0.5.0", "kind": RESOURCE, "devices": devices,
        "containerEdits": {"mounts": mounts},
    }))
}

/// Returns the name of the node with this number. Numbers start at 1.
pub fn name(number: u8) -> String {
    format!("node-{number}")
}
