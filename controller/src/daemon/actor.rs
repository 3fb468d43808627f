//! The actor: the data of the task that drives the core (the module that decides about moves), and
//! the methods that all parts of `daemon` use.
//!
//! ```text
//!  serve ──> commands, tick, recall ──> containers, hints, jobs, … ──> effects ──> copiers ──> actor
//! ```
//!
//! The other parts are files with functions that work on this data. Each part calls only parts to
//! the right of it in the picture.

use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    path::PathBuf,
    sync::{Arc, atomic::AtomicU64},
    time::{Duration, Instant},
};

use affinode_core::{Input, Key, Millis, Node, ProcessId, event::NodeEvent};
use affinode_proto::{api::control::Event, event::EventKind, reason::Reason, state::State};
use tokio::sync::{mpsc, watch};

use super::{
    connection_polling::ConnectionPolling, event_limits::EventLimits, gc::GarbageCollector,
    gpu_polling::GpuPolling, pending_commands::PendingCommands,
};
use crate::{
    agents::{AgentHandle, AgentListener, AgentMail},
    clock::{monotonic_ms, unix_ms},
    config::Config,
    conversion,
    copier::CopierProcesses,
    handle::EventLog,
    host_pool::HostPool,
    inventory::{
        Inventory, InventoryQuery,
        host_levels::HostLevels,
        memory::{self, MemoryRules},
        process_utilization::ProcessUtilization,
        utilization::GpuUtilization,
    },
    journal::{Journal, UnclaimedEntry},
    socket_activation::ActivationSockets,
};

/// State of the controller's main task: the core (the module that decides about moves), and all
/// that is needed to execute the core's effects (the actions that it has decided).
pub(super) struct NodeActor {
    pub(super) node: Node,
    pub(super) config: Config,
    pub(super) run_dir: PathBuf,
    pub(super) sockets: ActivationSockets,
    pub(super) agents: HashMap<ProcessId, AgentHandle>,
    pub(super) copiers: CopierProcesses,
    pub(super) host_pool: HostPool,
    /// Processes that are connected to the host pool's process.
    pub(super) in_host_pool: BTreeSet<ProcessId>,
    pub(super) listeners: HashMap<Key, AgentListener>,
    pub(super) numbers: Arc<AtomicU64>,
    pub(super) mail: mpsc::Sender<AgentMail>,
    /// Inputs for the core that arose while effects were executed. The core has not processed them
    /// yet.
    pub(super) later: VecDeque<Input>,
    pub(super) inventory: Inventory,
    pub(super) readings: GpuPolling,
    pub(super) utilization: ProcessUtilization,
    pub(super) levels: HostLevels,
    pub(super) connections: ConnectionPolling,
    pub(super) journal: Journal,
    pub(super) unclaimed: UnclaimedEntry,
    pub(super) events: Arc<EventLog>,
    pub(super) event_limits: EventLimits,
    pub(super) commands: PendingCommands,
    pub(super) started_unix_ms: i64,
    pub(super) busy: GpuUtilization,
    pub(super) sweep: GarbageCollector,
    /// Users who may run jobs, for the socket for job requests.
    pub(super) allowed_users: watch::Sender<Vec<String>>,
    /// For each job, the uid of the user who started it.
    pub(super) job_users: HashMap<Key, u32>,
    pub(super) empty_since: Instant,
    /// GPUs under pressure, as last written to the pressure files of the containers.
    pub(super) sent_pressure: Option<BTreeSet<String>>,
    pub(super) dashboard: String,
}

impl NodeActor {
    pub(super) fn now(&self) -> Millis {
        monotonic_ms()
    }

    /// Returns the time until the next tick. It is short while a container waits or moves.
    pub(super) fn pause(&self) -> Duration {
        Duration::from_millis(self.node.tick_ms(self.config.timing.sample_interval))
    }

    /// Requests a reading of the GPUs from NVML. If a reading is in progress, a new reading begins
    /// after it.
    pub(super) fn ask_gpus(&mut self) {
        if self.readings.wanted() {
            self.inventory.ask(InventoryQuery::Gpus);
        }
    }

    /// Logs an event, and adds it to the event list of the APIs. Events of a container above its
    /// rate limit are only counted.
    pub(super) fn publish(&mut self, event: Event) {
        if event.to == State::Offloaded.as_str() || event.to == State::Active.as_str() {
            // The move has changed the use of VRAM. The dashboard shows this after a new reading of
            // the GPUs.
            self.ask_gpus();
        }
        let Some(omission) = self.event_limits.admit(&event) else { return };
        omission.into_iter().chain([event]).for_each(|event| self.record(event));
    }

    fn record(&self, event: Event) {
        tracing::info!(
            container = event.container,
            kind = event.kind,
            from = event.from,
            to = event.to,
            reason = event.reason,
            bytes = event.bytes,
            elapsed_ms = event.elapsed_ms,
            "{}",
            event.text
        );
        self.events.add(event, unix_ms());
    }

    /// Publishes an event about an operator's request and who made it.
    pub(super) fn note(&mut self, key: Option<&Key>, container: String, text: String) {
        let event = NodeEvent::new(EventKind::Request, text).because(Reason::Requested);
        let event = NodeEvent { key: key.cloned(), container, ..event };
        self.publish(conversion::event_of(event));
    }
}

/// Creates the rules for counting host memory from the values of the configuration.
pub(super) fn memory_rules(config: &Config) -> MemoryRules {
    MemoryRules {
        overhead_bytes: config.memory.driver_overhead_mib << 20,
        node_reserve_bytes: config.memory.node_reserve_bytes(),
        host_pool_bytes: memory::total_bytes()
            .map_or(0, |total_bytes| config.memory.host_pool_bytes(total_bytes)),
    }
}
