//! What runs on each GPU node: puts Affinode on it, says whether the runtime is served, shows the
//! controller to the cluster, and takes Affinode off again when it is asked to.
//!
//! ```text
//!                    ┌── as it should be ──> label on ──┐
//!  look ──status──> ─┤                                  ├── after a while, or a change of the node
//!    ^               └── not so ──> label off ──> install ──┘
//!    │ retire: label off ──> uninstall (waits for running containers) ──> state "retired", or why not
//! ```
//!
//! The label comes last and goes first: while the node is touched, no pod is sent to it. A node
//! whose agent ends keeps its label, because containerd goes on serving the runtime.

mod bridge;
pub mod host;
pub mod mark;
pub mod retire;
pub mod tell;
mod watch;

use std::{
    io,
    net::SocketAddr,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use affinode_controller::{
    config::{Auth, HttpSection, KubernetesSection},
    http::{Guard, GuardError},
};
use clap::Args;
use futures_util::StreamExt;
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, Client, ResourceExt,
    core::PartialObjectMeta,
    runtime::{WatchStreamExt, watcher},
};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::Notify,
};

use self::{
    bridge::Bridge,
    host::{Handler, HostError, Places},
    mark::{AGENT, Mark, NOT_RETIRED, RETIRE, RETIRED, RUNTIME, STATE},
    watch::Watch,
};
use crate::{
    report,
    webhook::tls::{self, Pair, Shown, TlsError},
};

/// How often the node is looked at.
const LOOK_EVERY: Duration = Duration::from_secs(15);
/// How long a node is left alone that could not be installed: an attempt may restart containerd.
const LEAVE_ALONE: Duration = Duration::from_secs(120);
/// What a pod has of its service account.
const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// How the agent runs.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// The node's name in the cluster.
    #[arg(long, value_name = "NAME", env = "NODE_NAME")]
    node_name: String,
    /// This installation in the cluster: namespace/name.
    #[arg(long, value_name = "NAME")]
    installation: String,
    /// This pod's name, for the events that it publishes.
    #[arg(long, value_name = "NAME", env = "POD_NAME", default_value = "affinode-node")]
    pod_name: String,
    /// Where the dashboard, the API and the metrics of the node are.
    #[arg(long, value_name = "ADDRESS", default_value = "[::]:9411", env = "AFFINODE_LISTEN")]
    listen: SocketAddr,
    /// A name, other than addresses, that clients call it by.
    #[arg(long = "host", value_name = "NAME", value_delimiter = ',')]
    hosts: Vec<String>,
    /// A PEM file with its certificate; one is made for this run when left out.
    #[arg(long, value_name = "FILE", requires = "tls_key_file")]
    tls_cert_file: Option<PathBuf>,
    /// A PEM file with the certificate's key.
    #[arg(long, value_name = "FILE", requires = "tls_cert_file")]
    tls_key_file: Option<PathBuf>,
    #[command(flatten)]
    places: Places,
}

/// Why it does not run.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// No runtime, no signals: the machine is out of something.
    #[error("cannot start")]
    Start(#[source] io::Error),
    /// It does not know where the API server is.
    #[error("no API server: run in a pod whose service account token is mounted")]
    Cluster(#[source] kube::Error),
    /// Nobody could be let in.
    #[error("nobody can be asked whose a token is")]
    Guard(#[source] GuardError),
    /// There is no certificate.
    #[error("there is no certificate to show")]
    Papers(#[from] TlsError),
    /// None can be made.
    #[error("a certificate cannot be made")]
    Make(#[from] rcgen::Error),
    /// It cannot listen.
    #[error("cannot listen on {0}; choose another address with --listen")]
    Listen(SocketAddr, #[source] io::Error),
}

/// Looks after the node until SIGTERM or SIGINT.
///
/// # Errors
/// [`NodeError`].
pub fn run(options: &Options) -> Result<(), NodeError> {
    // Whoever installed one before us installed the same.
    let _ = tokio_rustls::rustls::crypto::ring::default_provider().install_default();
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(NodeError::Start)?
        .block_on(serve(options))
}

async fn serve(options: &Options) -> Result<(), NodeError> {
    let mut term = signal(SignalKind::terminate()).map_err(NodeError::Start)?;
    let mut int = signal(SignalKind::interrupt()).map_err(NodeError::Start)?;
    let client = Client::try_default().await.map_err(NodeError::Cluster)?;
    let served = Arc::new(AtomicBool::new(false));
    let run_dir = options.places.on_host(&options.places.run_dir);
    let bridge = Bridge {
        guard: guard(options)?,
        socket: run_dir.join("http.sock"),
        shown: papers(options)?,
        served: Arc::clone(&served),
    };
    let mark = Mark::new(client.clone(), &options.node_name);
    let socket = run_dir.join(affinode_proto::paths::CONTROL_SOCKET);
    let watch = Watch::new(socket, client.clone(), mark.clone(), options.pod_name.clone());
    let agent = Agent { options, mark, served, checked: false, said: None, bad_config: None };
    tokio::select! {
        bridged = bridge::serve(options.listen, bridge) => {
            return bridged.map_err(|error| NodeError::Listen(options.listen, error));
        }
        () = watch.run() => {}
        () = agent.run(client) => {}
        _ = term.recv() => {}
        _ = int.recv() => {}
    }
    Ok(())
}

fn guard(options: &Options) -> Result<Guard, NodeError> {
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    let (host, port) = (variable("KUBERNETES_SERVICE_HOST"), variable("KUBERNETES_SERVICE_PORT"));
    let host = if host.contains(':') { format!("[{host}]") } else { host };
    Guard::new(&HttpSection {
        auth: Auth::TokenReview,
        hosts: options.hosts.clone(),
        kubernetes: KubernetesSection {
            api_server: format!("https://{host}:{port}"),
            ca_file: format!("{ACCOUNT}/ca.crt"),
            token_file: format!("{ACCOUNT}/token"),
            audiences: Vec::new(),
        },
        ..HttpSection::default()
    })
    .map_err(NodeError::Guard)
}

fn papers(options: &Options) -> Result<Arc<Shown>, NodeError> {
    let pair = match (&options.tls_cert_file, &options.tls_key_file) {
        (Some(cert), Some(key)) => tls::read(cert, key)?,
        _ => {
            let mut names = vec![options.node_name.clone(), "localhost".into()];
            names.extend(options.hosts.iter().cloned());
            let made = rcgen::generate_simple_self_signed(names)?;
            let (cert, key) = (made.cert.pem().into(), made.signing_key.serialize_pem().into());
            Pair { cert, key }
        }
    };
    let shown = Shown::default();
    shown.show(&pair)?;
    Ok(Arc::new(shown))
}

struct Agent<'a> {
    options: &'a Options,
    mark: Mark,
    served: Arc<AtomicBool>,
    /// What is installed is what this container brings.
    checked: bool,
    said: Option<String>,
    /// Why the configuration is not the one that the cluster wants.
    bad_config: Option<String>,
}

impl Agent<'_> {
    async fn run(mut self, client: Client) {
        let changed = Arc::new(Notify::new());
        let watching = watch_node(client, self.options.node_name.clone(), Arc::clone(&changed));
        let looking = async {
            loop {
                let rest = match self.look().await {
                    Ok(rest) => rest,
                    Err(error) => {
                        tracing::warn!("the node object: {}", report::chain(&error));
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

    /// Looks at the node, does what is to be done, and says when to look again.
    async fn look(&mut self) -> kube::Result<Duration> {
        let node = self.mark.read().await?;
        let ours = &self.options.installation;
        if let Some(other) = node.annotations().get(AGENT).filter(|agent| *agent != ours) {
            let text = format!(
                "{other} looks after this node; if that is gone, take annotation {AGENT} off the node"
            );
            if self.said.replace(text.clone()).as_ref() != Some(&text) {
                tracing::error!("{text}");
            }
            return Ok(LOOK_EVERY);
        }
        let asked = node.annotations().get(RETIRE);
        let labelled = node.labels().contains_key(RUNTIME);
        if asked == Some(&self.options.installation) {
            return self.retire(&node, labelled).await;
        }
        match self.tend(labelled).await {
            Ok(true) => {
                self.serve(true, labelled).await?;
                let state = match &self.bad_config {
                    None => "served".to_owned(),
                    Some(why) => format!("served, with another configuration: {why}"),
                };
                self.say(&node, &state).await?;
                Ok(LOOK_EVERY)
            }
            Ok(false) => {
                self.serve(false, labelled).await?;
                self.say(&node, "installed: containerd serves it after its next start").await?;
                Ok(LOOK_EVERY)
            }
            Err(Trouble::Host(error)) => {
                self.checked = false;
                let why = report::chain(&error);
                tracing::error!("the node cannot be installed: {why}");
                self.serve(false, labelled).await?;
                self.say(&node, &format!("not installed: {why}")).await?;
                Ok(LEAVE_ALONE)
            }
            Err(Trouble::Cluster(error)) => Err(error),
        }
    }

    /// Brings the node to what this container brings, and says whether containerd serves it.
    async fn tend(&mut self, labelled: bool) -> Result<bool, Trouble> {
        self.configure().await;
        let places = &self.options.places;
        let mut handler = places.status().await?;
        if handler == Handler::Missing {
            self.checked = false;
        }
        if !self.checked {
            if !places.plan().await?.is_empty() {
                // No pod is sent here while the node is touched.
                self.serve(false, labelled).await?;
                for step in places.install().await? {
                    tracing::info!("{step}");
                }
                handler = places.status().await?;
            }
            self.checked = true;
        }
        match handler {
            Handler::Served => Ok(true),
            Handler::RestartNeeded => Ok(false),
            Handler::Missing => {
                let why = "what was installed is not as it was installed".to_owned();
                Err(HostError::Refused(why).into())
            }
        }
    }

    /// A configuration that is of no use is told of, and the one before it holds.
    async fn configure(&mut self) {
        let places = &self.options.places;
        self.bad_config = match places.configure().await {
            Ok(false) => None,
            Ok(true) => {
                tracing::info!("the controller's configuration was written");
                let run_dir = places.on_host(&places.run_dir);
                let socket = run_dir.join(affinode_proto::paths::CONTROL_SOCKET);
                // Where there is none yet, it reads it when it starts.
                if let Err(error) = watch::reload(&socket).await {
                    tracing::info!("no controller has read it: {}", report::chain(&error));
                }
                None
            }
            Err(error) => {
                let why = report::chain(&error);
                if self.bad_config.as_ref() != Some(&why) {
                    tracing::error!("the controller's configuration stays as it was: {why}");
                }
                Some(why)
            }
        };
    }

    async fn retire(
        &mut self,
        node: &PartialObjectMeta<Node>,
        labelled: bool,
    ) -> kube::Result<Duration> {
        if node.annotations().get(STATE).is_some_and(|state| state == RETIRED) {
            return Ok(LOOK_EVERY);
        }
        tracing::info!("asked to take Affinode off this node");
        self.checked = false;
        self.serve(false, labelled).await?;
        match self.options.places.uninstall().await {
            Ok(()) => {
                tracing::info!("nothing of Affinode is left on the node");
                self.say(node, RETIRED).await?;
            }
            Err(error) => {
                let why = report::chain(&error);
                tracing::warn!("it cannot be taken off: {why}");
                self.say(node, &format!("{NOT_RETIRED}{why}")).await?;
            }
        }
        Ok(LOOK_EVERY)
    }

    async fn serve(&self, served: bool, labelled: bool) -> kube::Result<()> {
        self.served.store(served, Ordering::Relaxed);
        if served == labelled {
            return Ok(());
        }
        tracing::info!("label {RUNTIME}: {}", if served { "on" } else { "off" });
        self.mark.serve(served).await
    }

    /// Tells people how the node stands, when it is news.
    async fn say(&mut self, node: &PartialObjectMeta<Node>, state: &str) -> kube::Result<()> {
        let there = node.annotations();
        let known = there.get(STATE).is_some_and(|known| known == state)
            && there.get(AGENT) == Some(&self.options.installation);
        if known {
            return Ok(());
        }
        if self.said.replace(state.to_owned()).as_deref() != Some(state) {
            tracing::info!("state: {state}");
        }
        let agent = Some(self.options.installation.clone());
        self.mark.annotate(&[(STATE, Some(state.to_owned())), (AGENT, agent)]).await
    }
}

/// What stood in the way.
enum Trouble {
    Host(HostError),
    Cluster(kube::Error),
}

impl From<HostError> for Trouble {
    fn from(error: HostError) -> Trouble {
        Trouble::Host(error)
    }
}

impl From<kube::Error> for Trouble {
    fn from(error: kube::Error) -> Trouble {
        Trouble::Cluster(error)
    }
}

/// Tells of each change of the wish that stands at the node object.
async fn watch_node(client: Client, name: String, changed: Arc<Notify>) {
    let only = watcher::Config::default().fields(&format!("metadata.name={name}"));
    let events = watcher(Api::<PartialObjectMeta<Node>>::all(client), only).default_backoff();
    let mut wish = None;
    events
        .applied_objects()
        .for_each(|node| {
            match node {
                Ok(node) => {
                    let now = node.annotations().get(RETIRE).cloned();
                    if wish.as_ref() != Some(&now) {
                        wish = Some(now);
                        changed.notify_one();
                    }
                }
                Err(error) => {
                    tracing::warn!("the node cannot be watched: {}", report::chain(&error));
                }
            }
            std::future::ready(())
        })
        .await;
}
