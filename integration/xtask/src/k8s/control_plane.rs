//! The control plane of the test cluster, on the first node. Each node is a testbed with its own
//! network. A bridge joins the nodes, and the API server's service address is on that bridge, so no
//! service proxy is needed.
//!
//! ```text
//!  node-1 10.97.0.1                                              node-2 10.97.0.2, …
//!  etcd <── kube-apiserver <── controller-manager, scheduler
//!              ^   10.96.0.1:443
//!              ├── kubelet ──CRI──> containerd                    kubelet ──CRI──> containerd
//!              │                       └─CNI: ptp─> pods 10.98.1.0/24     └──> pods 10.98.2.0/24
//!              └────────────────────────── bridge ───────────────────┘
//! ```

use std::{fs, path::PathBuf, process::Command, time::Duration};

use affinode_e2e::{containerd, testbed::Testbed, wait::until_within};
use anyhow::{Context, Result};
use serde_json::Value;

use super::{files, node::Node, programs::Programs};
use crate::output;

/// Time limit for the start of the cluster on a busy machine.
pub const START_TIMEOUT: Duration = Duration::from_secs(300);
/// Name of the first node, which runs the control plane.
pub const NODE: &str = "node-1";

pub struct Plane<'a> {
    nodes: Vec<Node<'a>>,
    programs: Programs,
    dir: PathBuf,
}

impl<'a> Plane<'a> {
    /// Starts the cluster and waits until all nodes are ready and have GPUs.
    pub fn start(worlds: &'a [Testbed], programs: Programs) -> Result<Self> {
        let nodes: Vec<Node<'_>> =
            (1u8..).zip(worlds).map(|(at, world)| Node::new(at, world)).collect();
        let dir = nodes.first().context("the cluster has no node")?.world.dir().join("k8s");
        fs::create_dir_all(&dir)?;
        let plane = Self { nodes, programs, dir };
        plane.network()?;
        files::write(&plane.dir, &plane.nodes)?;
        plane.control()?;
        for node in &plane.nodes {
            node.start(&plane)?;
        }
        Ok(plane)
    }

    pub fn nodes(&self) -> &[Node<'a>] {
        &self.nodes
    }

    pub fn first(&self) -> &Node<'a> {
        &self.nodes[0]
    }

    /// Returns the testbed of the first node.
    pub fn world(&self) -> &'a Testbed {
        self.first().world
    }

    /// The programs of all nodes.
    pub fn programs(&self) -> &Programs {
        &self.programs
    }

    /// Returns the folder that contains the control plane's files.
    pub fn dir(&self) -> &PathBuf {
        &self.dir
    }

    /// Returns a kubectl command with the rights of an administrator.
    pub fn kubectl(&self) -> Command {
        self.client("kubectl")
    }

    /// Returns a `kubectl affinode` command. `kubeconfig` is the name of a file in the control
    /// plane's folder, which the command uses.
    pub fn plugin(&self, kubeconfig: &str) -> Result<Command> {
        let program = self.world().artifacts().bin("kubectl-affinode")?;
        let mut command = self.world().keeper().command(&program);
        command.env("KUBECONFIG", self.dir.join(kubeconfig)).env("HOME", &self.dir);
        Ok(command)
    }

    pub fn helm(&self) -> Command {
        let mut helm = self.client("helm");
        helm.env("HELM_CACHE_HOME", self.dir.join("helm"))
            .env("HELM_CONFIG_HOME", self.dir.join("helm"));
        helm.env("HELM_DATA_HOME", self.dir.join("helm"));
        helm
    }

    fn client(&self, program: &str) -> Command {
        let mut command = self.world().keeper().command(&self.programs.built(program));
        command.env("KUBECONFIG", self.dir.join(files::ADMIN)).env("HOME", &self.dir);
        command
    }

    /// Returns the parsed output of `kubectl get … -o json`.
    pub fn get(&self, what: &[&str]) -> Result<Value> {
        let text = containerd::run(self.kubectl().arg("get").args(what).args(["-o", "json"]))?;
        serde_json::from_str(&text).context("cannot parse the JSON that kubectl printed")
    }

    /// Creates an object in the cluster, or changes it if it exists.
    pub fn apply(&self, object: &Value) -> Result<()> {
        let file = self.dir.join("object.json");
        fs::write(&file, serde_json::to_vec(object)?)?;
        containerd::run(self.kubectl().args(["apply", "-f"]).arg(&file)).map(|_| ())
    }

    /// Polls `probe` until it returns a value.
    pub fn until<T>(&self, what: &str, probe: impl FnMut() -> Result<Option<T>>) -> Result<T> {
        until_within(START_TIMEOUT, what, probe)
    }

    /// Adds routes on each node to the pods of all other nodes.
    fn network(&self) -> Result<()> {
        let bridge =
            ["link add nodes type bridge", "link set nodes up", "address add 10.96.0.1/32 dev lo"];
        self.first().ip(&bridge)?;
        self.first().ip(&["address add 10.97.0.1/24 dev nodes"])?;
        for node in &self.nodes {
            node.ip(&["link set lo up"])?;
            if node.name != NODE {
                node.join(self.first())?;
            }
        }
        for node in &self.nodes {
            for other in self.nodes.iter().filter(|other| other.name != node.name) {
                node.ip(&[&format!("route add {} via {}", other.pods(), other.address())])?;
            }
        }
        Ok(())
    }

    fn control(&self) -> Result<()> {
        output::step("Starting etcd and the control plane");
        let dir = self.dir.display();
        let words = |lines: &str| -> Vec<String> {
            lines.split_whitespace().map(|word| word.replace("DIR", &dir.to_string())).collect()
        };
        let node = self.first();
        node.spawn("etcd", &self.programs.etcd(), &words(files::ETCD))?;
        node.spawn("apiserver", &self.programs.built("kube-apiserver"), &words(files::API_SERVER))?;
        self.until("the API server to be ready", || {
            let said = self.kubectl().args(["get", "--raw", "/readyz"]).output()?;
            Ok(said.status.success().then_some(()))
        })
        .with_context(|| {
            format!("the API server is not ready; see its log {}", node.log("apiserver").display())
        })?;
        let manager = self.programs.built("kube-controller-manager");
        node.spawn("controller-manager", &manager, &words(files::CONTROLLER_MANAGER))?;
        node.spawn("scheduler", &self.programs.built("kube-scheduler"), &words(files::SCHEDULER))
    }
}
