//! State and metrics of the node agent. The state determines whether the agent's pod is ready. The
//! metrics are served even if no controller runs on the node.

use std::{
    collections::BTreeSet,
    fmt,
    sync::{Mutex, MutexGuard, PoisonError},
};

use affinode_controller::metrics::classic;
use affinode_installer::doctor::sharing::SharingKind;
use prometheus_client::{
    encoding::{EncodeLabelSet, text::encode},
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::{Registry, Unit},
};

/// Content type of metrics for clients that request OpenMetrics.
pub const OPEN: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Content type of metrics for all other clients.
pub const CLASSIC: &str = "text/plain; version=0.0.4; charset=utf-8";
/// Last line of metrics in OpenMetrics text.
const END: &str = "# EOF\n";

/// State of the installation, as the agent last found or changed it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum InstallState {
    /// The agent has not checked the node yet.
    #[default]
    Unknown,
    /// Another installation of the cluster manages the node.
    Foreign,
    /// The node waits for its installation, because Affinode is being installed on the maximum
    /// number of other nodes. containerd does not serve the runtime.
    Waiting,
    /// containerd serves the runtime.
    Served,
    /// Affinode is installed. containerd serves the runtime after containerd's next start.
    RestartNeeded,
    /// The last installation on this node failed.
    Failed,
    /// Affinode was removed on request, or is about to be.
    Retired,
}

impl InstallState {
    const ALL: [InstallState; 7] = [
        InstallState::Unknown,
        InstallState::Foreign,
        InstallState::Waiting,
        InstallState::Served,
        InstallState::RestartNeeded,
        InstallState::Failed,
        InstallState::Retired,
    ];

    /// Returns the state of a node that waits for its turn to install. A node that serves an earlier
    /// form of the handler, so that its pods start, does not count as waiting.
    #[must_use]
    pub fn without_slot(serves: bool) -> InstallState {
        if serves { InstallState::Served } else { InstallState::Waiting }
    }

    /// Returns the value of the metric label `state` for this state.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            InstallState::Unknown => "unknown",
            InstallState::Foreign => "foreign",
            InstallState::Waiting => "waiting",
            InstallState::Served => "served",
            InstallState::RestartNeeded => "restart-needed",
            InstallState::Failed => "failed",
            InstallState::Retired => "retired",
        }
    }
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct VersionLabels {
    version: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct StateLabels {
    state: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct KindLabels {
    kind: &'static str,
}

/// The agent's state and its metrics.
#[derive(Debug)]
pub struct AgentMetrics(Mutex<AgentTable>);

#[derive(Debug)]
struct AgentTable {
    registry: Registry,
    state: InstallState,
    served: Gauge,
    states: Family<StateLabels, Gauge>,
    gpu_sharing: Family<KindLabels, Gauge>,
    config_accepted: Gauge,
    config_refusals: Counter,
    controller_up: Gauge,
    not_after: Gauge,
}

impl Default for AgentMetrics {
    fn default() -> AgentMetrics {
        let metrics = AgentMetrics(Mutex::new(AgentTable::new()));
        metrics.now(InstallState::Unknown);
        metrics.gpu_sharing(&BTreeSet::new());
        metrics
    }
}

impl AgentTable {
    fn new() -> AgentTable {
        let mut registry = Registry::with_prefix("affinode");
        let build = Family::<VersionLabels, Gauge>::default();
        build.get_or_create(&VersionLabels { version: env!("CARGO_PKG_VERSION") }).set(1);
        registry.register("agent_build_info", "Version of the node agent", build);
        let gauge = |registry: &mut Registry, name: &str, help: &str| {
            let gauge = Gauge::default();
            registry.register(name, help, gauge.clone());
            gauge
        };
        let help = "Whether containerd on the node serves the runtime (1: yes, 0: no)";
        let served = gauge(&mut registry, "agent_runtime_served", help);
        let states = Family::<StateLabels, Gauge>::default();
        let help = "State of the installation on the node: 1 for the present state, 0 for all \
                    other states";
        registry.register("agent_install_state", help, states.clone());
        let gpu_sharing = Family::<KindLabels, Gauge>::default();
        let help = "How the GPUs of the node are shared, as affinode doctor finds it: 1 for each \
                    kind that was found, 0 for all other kinds";
        registry.register("agent_gpu_sharing", help, gpu_sharing.clone());
        let help = "Whether the node uses the cluster's configuration (1: yes, 0: it was refused)";
        let config_accepted = gauge(&mut registry, "agent_config_accepted", help);
        config_accepted.set(1);
        let config_refusals = Counter::default();
        let help = "Number of cluster configurations that the node refused";
        registry.register("agent_config_refusals", help, config_refusals.clone());
        let help = "Whether a controller of the node answered this scrape (1: yes, 0: no). Without \
                    systemd the controller ends a minute after the last container";
        let controller_up = gauge(&mut registry, "controller_up", help);
        let not_after = Gauge::default();
        registry.register_with_unit(
            "agent_certificate_not_after_timestamp",
            "End of the validity of the agent's TLS certificate, in Unix time",
            Unit::Seconds,
            not_after.clone(),
        );
        AgentTable {
            registry,
            state: InstallState::Unknown,
            served,
            states,
            gpu_sharing,
            config_accepted,
            config_refusals,
            controller_up,
            not_after,
        }
    }
}

impl AgentMetrics {
    /// Returns whether the node is in its intended state: containerd serves this version, or
    /// Affinode was removed on request. Until this is true, the agent's pod is not ready, so the
    /// update of the agents on other nodes waits for this node.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        let table = self.table();
        match table.state {
            InstallState::Served => table.served.get() == 1,
            state => state == InstallState::Retired,
        }
    }

    /// Records whether containerd serves the runtime.
    pub fn serves(&self, served: bool) {
        self.table().served.set(i64::from(served));
    }

    /// Records the state of the installation.
    pub fn now(&self, state: InstallState) {
        let mut table = self.table();
        table.state = state;
        for other in InstallState::ALL {
            let labels = StateLabels { state: other.word() };
            table.states.get_or_create(&labels).set(i64::from(other == state));
        }
    }

    /// Records how the GPUs of the node are shared.
    pub fn gpu_sharing(&self, found: &BTreeSet<SharingKind>) {
        let table = self.table();
        for kind in SharingKind::ALL {
            let labels = KindLabels { kind: kind.as_str() };
            table.gpu_sharing.get_or_create(&labels).set(i64::from(found.contains(&kind)));
        }
    }

    /// Records that the node uses the cluster's configuration.
    pub fn config_accepted(&self) {
        self.table().config_accepted.set(1);
    }

    /// Records that the node refused a configuration of the cluster.
    pub fn config_refused(&self) {
        let table = self.table();
        table.config_accepted.set(0);
        table.config_refusals.inc();
    }

    /// Returns the agent's metrics in OpenMetrics text. The last line `# EOF` is left out, so that
    /// the controller's metrics can follow.
    ///
    /// # Errors
    /// In practice there is no error, because the text is written to memory.
    pub fn text(&self, controller_up: bool, not_after: Option<i64>) -> Result<String, fmt::Error> {
        let table = self.table();
        table.controller_up.set(i64::from(controller_up));
        table.not_after.set(not_after.unwrap_or_default());
        let mut text = String::new();
        encode(&mut text, &table.registry)?;
        text.truncate(text.len() - END.len());
        Ok(text)
    }

    fn table(&self) -> MutexGuard<'_, AgentTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Appends the controller's metrics to the agent's metrics, if the controller sent any. `open`
/// selects OpenMetrics text. Otherwise the result is classic Prometheus text.
#[must_use]
pub fn joined(agent: &str, controller: Option<&str>, open: bool) -> String {
    let mut text = if open { agent.to_owned() } else { classic(agent) };
    match controller {
        Some(controller) => text.push_str(controller),
        None if open => text.push_str(END),
        None => {}
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_state_is_set_at_a_time() {
        let metrics = AgentMetrics::default();
        for state in InstallState::ALL {
            metrics.now(state);
            let text = metrics.text(false, None).unwrap();
            let set: Vec<&str> = text
                .lines()
                .filter(|line| {
                    line.starts_with("affinode_agent_install_state{") && line.ends_with(" 1")
                })
                .collect();
            assert_eq!(
                set,
                [format!("affinode_agent_install_state{{state=\"{}\"}} 1", state.word())]
            );
        }
    }

    #[test]
    fn only_served_and_removed_nodes_are_ready() {
        let metrics = AgentMetrics::default();
        for (served, state, ready) in [
            (false, InstallState::Unknown, false),
            (false, InstallState::without_slot(false), false),
            (true, InstallState::without_slot(true), true),
            (true, InstallState::Served, true),
            (true, InstallState::Failed, false),
            (false, InstallState::Served, false),
            (false, InstallState::Retired, true),
        ] {
            metrics.serves(served);
            metrics.now(state);
            assert_eq!(metrics.is_ready(), ready, "{served} {state:?}");
        }
    }

    #[test]
    fn metrics_follow_what_is_recorded() {
        let metrics = AgentMetrics::default();
        let text = metrics.text(false, None).unwrap();
        for line in [
            "affinode_agent_runtime_served 0\n",
            "affinode_agent_config_accepted 1\n",
            "affinode_controller_up 0\n",
            "affinode_agent_gpu_sharing{kind=\"time-slicing\"} 0\n",
            concat!("affinode_agent_build_info{version=\"", env!("CARGO_PKG_VERSION"), "\"} 1\n"),
        ] {
            assert!(text.contains(line), "{line} is not in {text}");
        }
        metrics.serves(true);
        metrics.config_refused();
        metrics.gpu_sharing(&BTreeSet::from([SharingKind::TimeSlicing]));
        let text = metrics.text(true, Some(7)).unwrap();
        for line in [
            "affinode_agent_runtime_served 1\n",
            "affinode_agent_config_accepted 0\n",
            "affinode_agent_config_refusals_total 1\n",
            "affinode_controller_up 1\n",
            "affinode_agent_gpu_sharing{kind=\"time-slicing\"} 1\n",
            "affinode_agent_gpu_sharing{kind=\"kai\"} 0\n",
            "affinode_agent_certificate_not_after_timestamp_seconds 7\n",
        ] {
            assert!(text.contains(line), "{line} is not in {text}");
        }
    }

    #[test]
    fn both_formats_end_as_they_must() {
        let agent = AgentMetrics::default().text(false, None).unwrap();
        let alone = joined(&agent, None, true);
        assert_eq!(alone.matches("# EOF").count(), 1);
        assert!(alone.ends_with(END), "{alone}");
        let both = joined(&agent, Some("# TYPE a gauge\na 1\n# EOF\n"), true);
        assert_eq!(both.matches("# EOF").count(), 1);
        assert!(both.ends_with("a 1\n# EOF\n"), "{both}");
        let old = joined(&agent, Some("# TYPE a gauge\na 1\n"), false);
        assert!(!old.contains("# EOF") && !old.contains("# UNIT"), "{old}");
        assert!(old.contains("# TYPE affinode_agent_config_refusals_total counter\n"), "{old}");
    }
}
