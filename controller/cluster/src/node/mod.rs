//! The agent on each GPU node: installs Affinode, reports whether the runtime is served, serves the
//! controller's API to the cluster, and removes Affinode on request.
//!
//! ```text
//!                    ┌── served ──> label on ─────────────────┐
//!  poll ──status──> ─┤                                        ├── after 15 s, or a change of the node
//!    ^               └── not served ──> label off, install ───┘
//!    │ retire: label off ──> wait for running containers ──> state "ready to be removed", or the reason
//!    │ retire now: uninstall ──> state "retired", or the reason
//!    │ label affinode.io/exclude: label off, uninstall ──> state "excluded", or the reason
//!    │ label affinode.io/offer-gpus=false: device plugin and DRA driver offer no GPU
//! ```
//!
//! The label is set last and removed first, so that no pod is scheduled to a node while the node is
//! changed. The label stays if the installation restarts the kubelet while pods of the runtime run,
//! because the kubelet would end pods without it, and for 5 minutes after a failed restart. If the
//! agent ends, the node keeps its label, because containerd still serves the runtime. The same
//! applies if an installation fails while containerd serves an earlier installation.

pub mod agent_metrics;
mod auth_proxy;
pub mod device_plugin;
pub mod dra;
mod full_gpus;
pub mod gpu_conditions;
mod gpu_load;
mod gpu_reader;
mod gpu_sharing;
pub mod host;
mod idle_gpus;
mod idle_label;
mod last_install;
mod node_events;
pub mod node_labels;
mod pod_condition;
pub mod pod_events;
mod pods;
mod reload;
mod removal_request;
pub mod retire;
mod rollout;
mod watch;

pub use auth_proxy::NO_CONTROLLER;

use std::{
    collections::BTreeSet,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use clap::{ArgAction, Args};
use futures_util::StreamExt;
use k8s_openapi::{api::core::v1::Node, jiff::Timestamp};
use kube::{
    Api, Client, ResourceExt,
    core::PartialObjectMeta,
    runtime::{WatchStreamExt, watcher},
};
use tokio::sync::Notify;

use self::{
    agent_metrics::{AgentMetrics, InstallState},
    auth_proxy::AuthProxy,
    device_plugin::{DevicePlugin, DevicePluginOptions, SeatControl},
    dra::{DraControl, DraDriver, DraOptions, publisher::SliceDemand},
    gpu_sharing::GpuSharing,
    host::{HandlerState, HostError, HostPaths},
    idle_label::IdleLabel,
    last_install::LastInstall,
    node_events::NodeEvents,
    node_labels::{
        AGENT, CERTIFICATE, EXCLUDED, NOT_RETIRED, NodeLabels, OFFER_GPUS, READY, RETIRE,
        RETIRE_UNTIL, RETIRED, RUNTIME, STATE,
    },
    removal_request::{has_expired_request, is_excluded, requested_removal},
    rollout::RolloutSlots,
    watch::ControllerWatch,
};
use crate::{
    error_chain,
    https::{
        self, authz,
        tls::{self, ServedCertificate},
    },
    service::{self, ServiceError, StopSignal},
};

/// Interval between two checks of the node.
const LOOK_EVERY: Duration = Duration::from_secs(15);
/// Pause after a failed installation. It is long, because each attempt may restart containerd.
const LEAVE_ALONE: Duration = Duration::from_secs(120);

/// Options of the agent.
#[derive(Args, Clone, Debug)]
pub struct NodeOptions {
    /// The node's name in the cluster.
    #[arg(long, value_name = "NAME", env = "NODE_NAME")]
    node_name: String,
    /// Name of this installation in the cluster, as namespace/name.
    #[arg(long, value_name = "NAME")]
    installation: String,
    /// This pod's name, for the events that it publishes.
    #[arg(long, value_name = "NAME", env = "POD_NAME", default_value = "affinode-node")]
    pod_name: String,
    /// Address and port of the node's dashboard, API and metrics.
    #[arg(long, value_name = "ADDRESS", default_value = "[::]:9411", env = "AFFINODE_LISTEN")]
    listen: SocketAddr,
    /// A host name by which clients reach the agent. IP addresses need not be listed.
    #[arg(long = "host", value_name = "NAME", value_delimiter = ',')]
    hosts: Vec<String>,
    #[command(flatten)]
    papers: tls::TlsFiles,
    /// Whether pods get a condition and a label that show where their GPU memory is.
    #[arg(long, value_name = "BOOL", default_value_t = true, action = ArgAction::Set)]
    pod_state: bool,
    /// Time without any use of the node's GPUs after which the node gets the label
    /// affinode.io/gpus-idle. 0s: never.
    #[arg(long, value_name = "TIME", default_value = "30m", value_parser = humantime::parse_duration)]
    gpus_idle_after: Duration,
    /// Name of a Lease in the installation's namespace. A node holds one of these Leases during its
    /// first installation. If omitted, any number of nodes is installed at a time.
    #[arg(long = "rollout-lease", value_name = "NAME")]
    rollout_leases: Vec<String>,
    #[command(flatten)]
    places: HostPaths,
    #[command(flatten)]
    dra: DraOptions,
    #[command(flatten)]
    device_plugin: DevicePluginOptions,
}

impl NodeOptions {
    /// Loads the certificate of the HTTPS proxy, for all names by which clients reach the agent.
    fn shown(&self) -> Result<Arc<ServedCertificate>, ServiceError> {
        let names = [std::slice::from_ref(&self.node_name), &self.hosts[..]].concat();
        Ok(self.papers.shown(&names)?)
    }

    /// Creates the watch of the node's controller.
    fn watch(&self, client: &Client, node_labels: &NodeLabels) -> ControllerWatch {
        let run_dir = self.places.on_host(&self.places.run_dir);
        let socket = run_dir.join(affinode_proto::paths::CONTROL_SOCKET);
        let idle_after = Some(self.gpus_idle_after).filter(|time| !time.is_zero());
        let idle = IdleLabel::new(node_labels.clone(), idle_after);
        let (mine, labels) = (self.pod_name.clone(), node_labels.clone());
        ControllerWatch::new(socket, client.clone(), labels, idle, mine, self.pod_state)
    }

    /// Returns the slots of first installations, of which this node takes one.
    fn slots(&self, client: &Client) -> RolloutSlots {
        let namespace = self.installation.split('/').next().unwrap_or_default();
        RolloutSlots::new(client.clone(), namespace, &self.rollout_leases, &self.node_name)
    }
}

/// Runs the node agent until SIGTERM or SIGINT.
///
/// # Errors
/// [`ServiceError`]: the service cannot start.
pub fn run(options: &NodeOptions) -> Result<(), ServiceError> {
    service::run(|stop| serve(options, stop))
}

async fn serve(options: &NodeOptions, mut stop: StopSignal) -> Result<(), ServiceError> {
    let client = service::client().await?;
    let metrics = Arc::new(AgentMetrics::default());
    let run_dir = options.places.on_host(&options.places.run_dir);
    let shown = options.shown()?;
    let bridge = AuthProxy {
        guard: authz::by_review(&options.hosts).map_err(ServiceError::Guard)?,
        socket: run_dir.join("http.sock"),
        shown: Arc::clone(&shown),
        metrics: Arc::clone(&metrics),
    };
    let node_labels = NodeLabels::new(client.clone(), &options.node_name);
    let watch = options.watch(&client, &node_labels);
    let events = NodeEvents::new(client.clone(), &options.node_name, &options.pod_name);
    let (places, name) = (&options.places, &options.node_name);
    let conditions = watch.gpu_conditions();
    let driver = DraDriver::new(&options.dra, places, &client, name, conditions.clone());
    let (driver, dra) = driver.unzip();
    let driver = async {
        match driver {
            Some(driver) => driver.run().await,
            None => std::future::pending().await,
        }
    };
    let plugin = DevicePlugin::start(&options.device_plugin, &options.dra, places, conditions)?;
    let (plugin, seats) = plugin.unzip();
    let plugin = async {
        match plugin {
            Some(plugin) => plugin.run().await,
            None => std::future::pending().await,
        }
    };
    let agent = NodeAgent {
        options,
        dra,
        seats,
        slots: options.slots(&client),
        events,
        sharing: GpuSharing::new(options.places.host_root.clone()),
        node_labels,
        metrics,
        shown,
        may_offer: true,
        checked: false,
        last: LastInstall::default(),
        controller_fails: false,
        said: None,
        bad_config: None,
    };
    let listener = service::listen(options.listen).await?;
    tokio::select! {
        () = https::serve(listener, Arc::new(bridge)) => {}
        () = watch.run() => {}
        () = agent.run(client) => {}
        () = driver => {}
        () = plugin => {}
        () = stop.wait() => {}
    }
    Ok(())
}

struct NodeAgent<'a> {
    options: &'a NodeOptions,
    /// Handle of the DRA driver. `None`: the agent is no DRA driver.
    dra: Option<DraControl>,
    /// Handle of the device plugin. `None`: the agent is no device plugin.
    seats: Option<SeatControl>,
    slots: RolloutSlots,
    events: NodeEvents,
    /// How the GPUs of the node are shared.
    sharing: GpuSharing,
    node_labels: NodeLabels,
    metrics: Arc<AgentMetrics>,
    /// The certificate of the HTTPS proxy. Its fingerprint is published in an annotation of the
    /// node.
    shown: Arc<ServedCertificate>,
    /// Whether Affinode may offer the GPUs of the node to pods. False if an operator left them to
    /// another program.
    may_offer: bool,
    /// Whether the installed files are known to be the files of this image.
    checked: bool,
    last: LastInstall,
    /// Whether the controller of the node fails at each start.
    controller_fails: bool,
    said: Option<String>,
    /// Reason why the cluster's configuration is not in use. `None`: it is in use.
    bad_config: Option<String>,
}

impl NodeAgent<'_> {
    async fn run(mut self, client: Client) {
        let changed = Arc::new(Notify::new());
        let watching = watch_node(client, self.options.node_name.clone(), Arc::clone(&changed));
        let looking = async {
            loop {
                let rest = match self.look().await {
                    Ok(rest) => rest,
                    Err(error) => {
                        tracing::warn!(
                            "node object: a request to the API server failed: {}",
                            error_chain::chain(&error)
                        );
                        LOOK_EVERY
                    }
                };
                tokio::select! {
                    () = tokio::time::sleep(rest) => {}
                    () = changed.notified() => {}
                }
            }
        };
        tokio::join!(watching, looking);
    }

    /// Checks the node, executes the steps that are due, and returns the time until the next check.
    async fn look(&mut self) -> kube::Result<Duration> {
        let node = self.node_labels.read().await?;
        let ours = &self.options.installation;
        if let Some(other) = node.annotations().get(AGENT).filter(|agent| *agent != ours) {
            self.leave_to(other);
            return Ok(LOOK_EVERY);
        }
        let labelled = node.labels().contains_key(RUNTIME);
        let now = Timestamp::now();
        if let Some(wanted) = requested_removal(&node, ours, now) {
            return self.retire(&node, wanted, labelled).await;
        }
        if has_expired_request(&node, ours, now) {
            tracing::warn!(
                "node: the uninstaller neither finished nor withdrew its request in time, so \
                 Affinode stays installed"
            );
            self.node_labels.clear_request(&node).await?;
        }
        self.may_offer = !leaves_gpus(&node);
        self.sharing.read(self.may_offer).await;
        self.metrics.gpu_sharing(&self.sharing.kinds());
        let rest = self.keep_installed(&node, labelled).await?;
        self.sharing.publish(&node, &self.node_labels, &self.events).await?;
        Ok(rest)
    }

    /// Reports that another installation manages the node. The agent then does not change the node.
    fn leave_to(&mut self, other: &str) {
        let text = format!(
            "installation {other} manages this node; if that installation no longer exists, remove \
             annotation {AGENT} from the node"
        );
        self.metrics.now(InstallState::Foreign);
        // The slices of this node are those of the other installation.
        self.demand_slices(SliceDemand::Undecided);
        self.offer_seats(false);
        if self.said.replace(text.clone()).as_ref() != Some(&text) {
            tracing::error!("{text}");
        }
    }

    /// Installs Affinode if it is not installed, and publishes whether containerd serves it.
    /// Returns the time until the next check.
    async fn keep_installed(
        &mut self,
        node: &PartialObjectMeta<Node>,
        was_labelled: bool,
    ) -> kube::Result<Duration> {
        let mut labelled = was_labelled;
        match self.tend(&mut labelled).await {
            Ok(true) => {
                self.metrics.now(InstallState::Served);
                self.serve(true, labelled).await?;
                let state = self.served_state();
                self.say(node, &state).await?;
                Ok(LOOK_EVERY)
            }
            Ok(false) => {
                self.metrics.now(InstallState::RestartNeeded);
                self.serve(false, labelled).await?;
                self.say(node, "installed: containerd serves the runtime after its next start")
                    .await?;
                Ok(LOOK_EVERY)
            }
            Err(NodeTrouble::Host(error)) => {
                let state = self.not_installed(&error, was_labelled).await?;
                self.say(node, &state).await?;
                Ok(LEAVE_ALONE)
            }
            Err(NodeTrouble::NoSlot { serves }) => {
                let state = self.waiting_state(serves);
                self.metrics.now(InstallState::without_slot(serves));
                self.serve(serves, labelled).await?;
                self.say(node, &state).await?;
                Ok(LOOK_EVERY)
            }
            Err(NodeTrouble::Cluster(error)) => Err(error),
        }
    }

    /// Returns the text for the state of a node that serves the runtime. The text also names a
    /// refused configuration, a problem of the DRA driver and GPUs that are offered twice, if there
    /// are any.
    fn served_state(&self) -> String {
        let mut state = "served".to_owned();
        if let Some(why) = &self.bad_config {
            state += &format!(", but the cluster's configuration is not in use: {why}");
        }
        if self.controller_fails {
            state += ", but no controller runs, because it fails at each start: see journalctl --unit \
                      affinode-controller on the node";
        }
        if let Some(why) = self.dra.as_ref().and_then(DraControl::problem) {
            state += &format!(", without the DRA driver: {why}");
        }
        if let Some(twice) = self.sharing.offered_twice() {
            state += &format!(", but {}", twice.found);
        }
        state
    }

    /// Returns the text for the state of a node that waits for a slot of the roll-out. `serves`:
    /// containerd serves an earlier form of the handler meanwhile.
    fn waiting_state(&self, serves: bool) -> String {
        let most = self.options.rollout_leases.len();
        let waits = format!(
            "waits for its turn: node.rollout.maxConcurrent limits installations to {most} at a time"
        );
        match serves {
            true => {
                format!("{}; the installation of the changed handler {waits}", self.served_state())
            }
            false => waits,
        }
    }

    /// Records that the installation failed, and returns the node's state as text.
    async fn not_installed(
        &mut self,
        error: &HostError,
        was_labelled: bool,
    ) -> kube::Result<String> {
        self.checked = false;
        let why = error_chain::chain(error);
        self.last.failed(error, &why);
        tracing::error!("node: cannot install Affinode: {why}");
        self.metrics.now(InstallState::Failed);
        Ok(match self.keeps_serving(was_labelled).await? {
            // The files may be those of this version already, with the earlier handler.
            true => format!("served, but this version is not completely installed: {why}"),
            false => format!("not installed: {why}"),
        })
    }

    /// Returns whether containerd still serves an earlier installation after an installation has
    /// failed. If it does, the node keeps its label, so that pods can use its GPUs.
    async fn keeps_serving(&self, labelled: bool) -> kube::Result<bool> {
        let (serves, has_pods) = match self.options.places.state().await {
            Ok(host) => (host.handler.serves(), host.running_shims > 0),
            // The state is unknown, so the label stays as it is.
            Err(_) => (labelled, true),
        };
        self.metrics.serves(serves);
        self.offer(serves);
        // The installation may have removed the label. If it restarted the kubelet, the kubelet may
        // still be starting, and would end running pods without the label. Later the label would
        // only bring new pods to the node, which do not start.
        let kept = has_pods && self.last.keeps_label(Instant::now());
        self.node_labels.serve(serves || kept).await?;
        Ok(serves)
    }

    /// Installs the files of this image if the installed files differ. Returns whether containerd
    /// serves the runtime.
    async fn tend(&mut self, labelled: &mut bool) -> Result<bool, NodeTrouble> {
        self.configure().await;
        let places = &self.options.places;
        let host = places.state().await?;
        let mut handler = host.handler;
        self.controller_fails = host.controller_fails;
        if matches!(handler, HandlerState::Missing | HandlerState::Outdated) {
            self.checked = false;
        }
        if !self.checked {
            let plan = places.plan().await?;
            if !plan.is_empty() {
                let limited = matches!(handler, HandlerState::Missing | HandlerState::Outdated)
                    && host::has_restart(&plan);
                if limited && !self.slots.take().await? {
                    return Err(NodeTrouble::NoSlot { serves: handler.serves() });
                }
                // A node whose last attempt must not be repeated keeps its slot too. Otherwise each
                // further node would repeat the failure.
                self.last.plan(&plan)?;
                self.label_for(&plan, host.running_shims, labelled).await?;
                let installed = self.options.places.install().await;
                self.last.end(installed.as_ref().map(drop), Instant::now());
                for step in installed? {
                    tracing::info!("{step}");
                }
                handler = places.status().await?;
            }
            self.slots.release().await?;
            self.checked = true;
        }
        match handler {
            HandlerState::Served | HandlerState::Outdated | HandlerState::RestartDue => Ok(true),
            HandlerState::RestartNeeded => Ok(false),
            HandlerState::Missing => {
                let why = "installed files were changed or removed".to_owned();
                Err(HostError::Refused(why).into())
            }
        }
    }

    /// Sets or removes the label for the time of an installation with the steps `plan`. Without the
    /// label, no pod is scheduled to the node during the installation. But a kubelet that starts
    /// admits its pods again, and ends those whose node selector the node's labels do not match.
    /// So if the installation restarts the kubelet and pods of the runtime run, the node has the
    /// label. A pod that comes meanwhile waits until containerd serves the runtime.
    async fn label_for(
        &mut self,
        plan: &[String],
        running_shims: usize,
        labelled: &mut bool,
    ) -> kube::Result<()> {
        self.last.label_kept = host::may_restart_kubelet(plan) && (*labelled || running_shims > 0);
        if !self.last.label_kept {
            self.serve(false, *labelled).await?;
        } else if !*labelled {
            self.node_labels.serve(true).await?;
        }
        *labelled = self.last.label_kept;
        Ok(())
    }

    /// Writes the cluster's configuration to the node and makes the controller use it. If the
    /// configuration is invalid, reports this and keeps the earlier configuration.
    async fn configure(&mut self) {
        let places = &self.options.places;
        self.bad_config = match places.configure().await {
            Ok(false) => {
                self.metrics.config_accepted();
                None
            }
            Ok(true) => {
                self.metrics.config_accepted();
                tracing::info!(
                    "controller: the cluster's configuration was written to conf.d/50-cluster.toml"
                );
                let run_dir = places.on_host(&places.run_dir);
                let socket = run_dir.join(affinode_proto::paths::CONTROL_SOCKET);
                match reload::reload(&socket).await {
                    Ok(None) => {}
                    Ok(Some(pid)) => tracing::info!(
                        "controller: the agent ended the running controller (process {pid}); the \
                         next controller starts with the new configuration"
                    ),
                    // If no controller runs yet, the next one reads the file when it starts.
                    Err(error) => tracing::info!(
                        "controller: the new configuration applies when a controller starts, \
                         because no running controller reloaded it: {}",
                        error_chain::chain(&error)
                    ),
                }
                None
            }
            Err(error) => {
                let why = error_chain::chain(&error);
                if self.bad_config.as_ref() != Some(&why) {
                    tracing::error!(
                        "controller: cannot use the cluster's configuration, so the earlier one \
                         stays in use: {why}"
                    );
                    self.metrics.config_refused();
                    self.events.config_refused(&why).await;
                }
                Some(why)
            }
        };
    }

    /// Executes a step of the removal and publishes its result. The step for [`READY`] checks that
    /// Affinode can be removed. The step for [`RETIRED`] and [`EXCLUDED`] removes Affinode. The
    /// result is the state `wanted`, or the reason why the node is not in that state.
    async fn retire(
        &mut self,
        node: &PartialObjectMeta<Node>,
        wanted: &str,
        labelled: bool,
    ) -> kube::Result<Duration> {
        if wanted != READY {
            self.metrics.now(InstallState::Retired);
            self.metrics.gpu_sharing(&BTreeSet::new());
            gpu_sharing::clear(node, &self.node_labels).await?;
        }
        self.offer(false);
        if node.annotations().get(STATE).is_some_and(|state| state == wanted) {
            return Ok(LOOK_EVERY);
        }
        self.checked = false;
        self.serve(false, labelled).await?;
        match self.take_off(wanted).await {
            Ok(()) => self.say(node, wanted).await?,
            Err(why) => {
                tracing::warn!("node: cannot uninstall Affinode: {why}");
                self.say(node, &format!("{NOT_RETIRED}{why}")).await?;
            }
        }
        Ok(LOOK_EVERY)
    }

    /// Checks or executes the removal of Affinode, depending on the state `wanted`. `Err`: the
    /// reason why Affinode cannot be removed.
    async fn take_off(&self, wanted: &str) -> Result<(), String> {
        self.needs_no_driver().await?;
        let places = &self.options.places;
        let did = match wanted {
            RETIRED | EXCLUDED => {
                tracing::info!("node: removing Affinode, as requested");
                places.uninstall().await
            }
            _ => {
                tracing::info!(
                    "node: checking whether Affinode can be removed, as the uninstaller requested"
                );
                places.may_go().await
            }
        };
        did.map_err(|error| error_chain::chain(&error))?;
        // A pod that the scheduler had placed on the node before can have arrived meanwhile.
        self.needs_no_driver().await
    }

    /// Checks that no pod needs the DRA driver. `Err`: the reason why the driver is still needed.
    async fn needs_no_driver(&self) -> Result<(), String> {
        match &self.dra {
            Some(dra) => dra.may_go().await.map_err(|error| error_chain::chain(&error)),
            None => Ok(()),
        }
    }

    /// Offers the node's GPUs to pods if `served` is true and the operator permits it, and otherwise
    /// withdraws them. Pods that have GPUs keep them.
    fn offer(&self, served: bool) {
        let offered = served && self.may_offer;
        self.demand_slices(if offered { SliceDemand::Publish } else { SliceDemand::Withdraw });
        self.offer_seats(offered);
    }

    fn demand_slices(&self, demand: SliceDemand) {
        if let Some(dra) = &self.dra {
            dra.demand(demand);
        }
    }

    fn offer_seats(&self, served: bool) {
        if let Some(seats) = &self.seats {
            seats.offer(served);
        }
    }

    async fn serve(&self, served: bool, labelled: bool) -> kube::Result<()> {
        self.metrics.serves(served);
        self.offer(served);
        if served == labelled {
            return Ok(());
        }
        tracing::info!("node: label {RUNTIME} is {}", if served { "set" } else { "removed" });
        self.node_labels.serve(served).await
    }

    /// Publishes the node's state, this installation and the certificate's fingerprint in the
    /// node's annotations. Writes nothing if the annotations have these values already.
    async fn say(&mut self, node: &PartialObjectMeta<Node>, state: &str) -> kube::Result<()> {
        // A renewed certificate has another fingerprint.
        self.shown.refresh();
        let certificate = self.shown.fingerprint();
        let there = node.annotations();
        let known = there.get(STATE).is_some_and(|known| known == state)
            && there.get(AGENT) == Some(&self.options.installation)
            && there.get(CERTIFICATE) == certificate.as_ref();
        if known {
            return Ok(());
        }
        if self.said.replace(state.to_owned()).as_deref() != Some(state) {
            tracing::info!("node: state: {state}");
        }
        let agent = Some(self.options.installation.clone());
        let said = [(STATE, Some(state.to_owned())), (AGENT, agent), (CERTIFICATE, certificate)];
        self.node_labels.annotate(&said).await
    }
}

/// Reason why a check of the node failed.
enum NodeTrouble {
    Host(HostError),
    Cluster(kube::Error),
    /// The node must wait, because the maximum number of nodes is being installed at this time.
    NoSlot {
        /// Whether containerd serves an earlier form of the handler meanwhile.
        serves: bool,
    },
}

/// Returns whether an operator left the GPUs of the node to another program.
fn leaves_gpus(node: &PartialObjectMeta<Node>) -> bool {
    node.labels().get(OFFER_GPUS).is_some_and(|value| value == "false")
}

impl From<HostError> for NodeTrouble {
    fn from(error: HostError) -> NodeTrouble {
        NodeTrouble::Host(error)
    }
}

impl From<kube::Error> for NodeTrouble {
    fn from(error: kube::Error) -> NodeTrouble {
        NodeTrouble::Cluster(error)
    }
}

/// Notifies `changed` when a request in the node object changes: the uninstaller's annotation or
/// one of the operator's labels.
async fn watch_node(client: Client, name: String, changed: Arc<Notify>) {
    let only = watcher::Config::default().fields(&format!("metadata.name={name}"));
    let events = watcher(Api::<PartialObjectMeta<Node>>::all(client), only).default_backoff();
    let mut wish = None;
    events
        .applied_objects()
        .for_each(|node| {
            match node {
                Ok(node) => {
                    let now = (
                        [RETIRE, RETIRE_UNTIL].map(|name| node.annotations().get(name).cloned()),
                        is_excluded(&node),
                        leaves_gpus(&node),
                    );
                    if wish.as_ref() != Some(&now) {
                        wish = Some(now);
                        changed.notify_one();
                    }
                }
                Err(error) => {
                    tracing::warn!(
                        "node object: the watch failed, and is started again: {}",
                        error_chain::chain(&error)
                    );
                }
            }
            std::future::ready(())
        })
        .await;
}
