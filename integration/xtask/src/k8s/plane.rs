//! A control plane and one node in a world: every component on the world's own network, where
//! the API server has the address of its service itself, so that no proxy of services is needed.
//!
//! ```text
//!  etcd <── kube-apiserver <── controller-manager, scheduler
//!              ^   10.96.0.1:443
//!              └── kubelet ──CRI──> containerd (the world's) ──CNI: ptp──> pods 10.98.0.0/24
//! ```

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use affinode_e2e::{containerd, image, keeper::Job, until::until_within, world::World};
use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::{
    files,
    programs::{DEVICE_PLUGIN_NAME, Programs},
};
use crate::say;

/// How long a control plane may take on a machine that has other work.
pub const PATIENCE: Duration = Duration::from_secs(300);
/// The node's name.
pub const NODE: &str = "node-1";
/// What pods ask for, and how many of it there are.
pub const RESOURCE: &str = "nvidia.com/gpu";
const DEVICES: u32 = 4;

/// A cluster of one node.
pub struct Plane<'a> {
    world: &'a World,
    programs: Programs,
    dir: PathBuf,
}

impl<'a> Plane<'a> {
    /// Starts it and waits until the node is ready and has GPUs.
    pub fn start(world: &'a World, programs: Programs) -> Result<Self> {
        let dir = world.dir().join("k8s");
        fs::create_dir_all(&dir)?;
        let plane = Self { world, programs, dir };
        plane.network()?;
        files::write(&plane.dir)?;
        files::cni(&world.dir().join("cni"), &plane.programs.cni_dir())?;
        plane.control()?;
        plane.node()?;
        plane.gpus()?;
        Ok(plane)
    }

    /// The world's folder, and what runs there.
    pub fn world(&self) -> &World {
        self.world
    }

    /// kubectl, as an administrator.
    pub fn kubectl(&self) -> Command {
        self.client("kubectl")
    }

    /// helm, likewise.
    pub fn helm(&self) -> Command {
        let mut helm = self.client("helm");
        helm.env("HELM_CACHE_HOME", self.dir.join("helm"))
            .env("HELM_CONFIG_HOME", self.dir.join("helm"));
        helm.env("HELM_DATA_HOME", self.dir.join("helm"));
        helm
    }

    fn client(&self, program: &str) -> Command {
        let mut command = self.world.keeper().command(&self.programs.built(program));
        command.env("KUBECONFIG", self.dir.join(files::ADMIN)).env("HOME", &self.dir);
        command
    }

    /// What `kubectl get … -o json` prints.
    pub fn get(&self, what: &[&str]) -> Result<Value> {
        let text = containerd::run(self.kubectl().arg("get").args(what).args(["-o", "json"]))?;
        serde_json::from_str(&text).context("kubectl's JSON")
    }

    /// Creates or changes an object.
    pub fn apply(&self, object: &Value) -> Result<()> {
        let file = self.dir.join("object.json");
        fs::write(&file, serde_json::to_vec(object)?)?;
        containerd::run(self.kubectl().args(["apply", "-f"]).arg(&file)).map(|_| ())
    }

    /// Waits until something is so.
    pub fn until<T>(&self, what: &str, probe: impl FnMut() -> Result<Option<T>>) -> Result<T> {
        until_within(PATIENCE, what, probe)
    }

    /// The log of a component.
    fn log(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.log"))
    }

    fn network(&self) -> Result<()> {
        for line in [
            "link set lo up",
            "address add 10.96.0.1/32 dev lo",
            "link add node0 type veth peer name node1",
            "address add 10.97.0.1/24 dev node0",
            "link set node0 up",
            "link set node1 up",
        ] {
            let mut ip = self.world.keeper().command(Path::new("ip"));
            containerd::run(ip.args(line.split(' ')))
                .context("the world's network; `ip` is of the package iproute2")?;
        }
        Ok(())
    }

    fn spawn(&self, name: &str, program: &Path, arguments: &[String]) -> Result<()> {
        let argv = [program.display().to_string()].into_iter().chain(arguments.iter().cloned());
        let env = BTreeMap::from([("HOME".into(), self.dir.display().to_string())]);
        let job = Job { argv: argv.collect(), env, log: self.log(name) };
        self.world.keeper().spawn(&job).map(|_| ())
    }

    fn control(&self) -> Result<()> {
        say::step("Starting etcd and the control plane");
        let dir = self.dir.display();
        let words = |lines: &str| -> Vec<String> {
            lines.split_whitespace().map(|word| word.replace("DIR", &dir.to_string())).collect()
        };
        self.spawn("etcd", &self.programs.etcd(), &words(files::ETCD))?;
        self.spawn("apiserver", &self.programs.built("kube-apiserver"), &words(files::API_SERVER))?;
        self.until("the API server to be ready", || {
            let said = self.kubectl().args(["get", "--raw", "/readyz"]).output()?;
            Ok(said.status.success().then_some(()))
        })
        .with_context(|| format!("its log: {}", self.log("apiserver").display()))?;
        let manager = self.programs.built("kube-controller-manager");
        self.spawn("controller-manager", &manager, &words(files::CONTROLLER_MANAGER))?;
        self.spawn("scheduler", &self.programs.built("kube-scheduler"), &words(files::SCHEDULER))
    }

    fn node(&self) -> Result<()> {
        say::step("Starting the kubelet");
        files::cgroups(&self.world.cgroup_parent())?;
        let config = self.dir.join("kubelet.json");
        fs::write(&config, files::kubelet(self.world).to_string())?;
        self.spawn(
            "kubelet",
            &self.programs.built("kubelet"),
            &[
                format!("--config={}", config.display()),
                format!("--kubeconfig={}", self.dir.join(files::KUBELET).display()),
                format!("--hostname-override={NODE}"),
                "--node-ip=10.97.0.1".into(),
            ],
        )?;
        self.until("the node to be ready", || {
            let node = self.kubectl().args(["get", "node", NODE, "-o", "json"]).output()?;
            let node: Value = serde_json::from_slice(&node.stdout).unwrap_or_default();
            let conditions = node["status"]["conditions"].as_array().cloned().unwrap_or_default();
            let ready = |c: &Value| c["type"] == "Ready" && c["status"] == "True";
            let open = node["spec"]["taints"].is_null();
            Ok((open && conditions.iter().any(ready)).then_some(()))
        })
        .with_context(|| format!("its log: {}", self.log("kubelet").display()))?;
        self.until("namespaces to be complete", || {
            let account = self.kubectl().args(["get", "serviceaccount", "default"]).output()?;
            Ok(account.status.success().then_some(()))
        })
    }

    /// A container gets of a device what NVIDIA's toolkit would add.
    fn gpus(&self) -> Result<()> {
        let parts = self.world.gpu().container_parts(self.world.artifacts(), self.world.dir())?;
        let mounts: Vec<Value> = (parts.mounts.iter())
            .map(|(host, inside)| {
                json!({"host_path": host, "container_path": inside, "read_only": true})
            })
            .collect();
        let config = json!({
            "Resource": RESOURCE, "Devices": DEVICES,
            "Response": {"envs": parts.env, "mounts": mounts},
        });
        let file = self.dir.join("device-plugin.json");
        fs::write(&file, config.to_string())?;
        let plugin = self.programs.built(DEVICE_PLUGIN_NAME);
        self.spawn(DEVICE_PLUGIN_NAME, &plugin, &[file.display().to_string()])?;
        self.until("the node to have GPUs", || {
            let node = self.get(&["node", NODE])?;
            Ok((node["status"]["allocatable"][RESOURCE] == DEVICES.to_string().as_str())
                .then_some(()))
        })
        .with_context(|| format!("its log: {}", self.log(DEVICE_PLUGIN_NAME).display()))
    }

    /// A pod that asks for a GPU and runs a CUDA program on pipes in a folder of the node.
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
