//! The task that drives the core. Only this task changes [`Node`]: it feeds the inputs, and
//! executes the effects in order.

use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    path::PathBuf,
    sync::{Arc, atomic::AtomicU64},
    time::{Duration, Instant},
};

use affinode_core::{
    CommandId, Effect, Input, JournalStep, Key, Millis, Node, ProcessId,
    copy_watch::LEVELS_INTERVAL_MS, event::NodeEvent, input::SwapStatus,
};
use affinode_proto::{
    api::control::{ActionResponse, ListResponse},
    event::EventKind,
    paths,
    wire::{counters::PAGE_BYTES, message::AgentMessage},
};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::{mpsc, oneshot},
};

use super::{
    DaemonError,
    api::{self, ControlService},
    frontend::Frontend,
    gc::GarbageCollector,
    gpu_polling::GpuPolling,
    job_socket, viewers,
};
use crate::{
    agents::{AgentHandle, AgentListener, AgentMail},
    call_trace::CallTraceHub,
    clock::{monotonic_ms, unix_ms},
    config::Config,
    conversion,
    copier::CopierProcesses,
    driver_library::DriverLibrary,
    error_chain,
    handle::{Command, ControllerHandle, EventLog},
    inventory::{
        Inventory, InventoryQuery, InventoryResult, host_levels::HostLevels, memory,
        memory::MemoryRules, process, process_utilization::ProcessUtilization,
        utilization::GpuUtilization,
    },
    jobs,
    journal::{Journal, UnclaimedEntry},
    overrides,
    socket_activation::{self, ActivationSockets},
};

/// Maximum number of messages of agents that wait for the actor. Further messages wait in the
/// sockets of their senders.
const INBOX: usize = 1024;
/// Time without containers after which the controller ends. The next shim starts a new controller.
const LINGER: Duration = Duration::from_secs(60);
/// Time between two readings of the GPUs when no container waits.
const GPU_INTERVAL: Duration = Duration::from_secs(1);

/// Minimum time between two readings of the processes' utilization. The usual time is the sample
/// interval.
const WITNESS_INTERVAL: Duration = Duration::from_millis(250);

pub(super) struct NodeActor {
    pub(super) node: Node,
    pub(super) config: Config,
    pub(super) run_dir: PathBuf,
    pub(super) sockets: ActivationSockets,
    pub(super) agents: HashMap<ProcessId, AgentHandle>,
    pub(super) copiers: CopierProcesses,
    pub(super) listeners: HashMap<Key, AgentListener>,
    pub(super) numbers: Arc<AtomicU64>,
    pub(super) mail: mpsc::Sender<AgentMail>,
    /// Inputs that effects produced and that were not fed to the core yet.
    pub(super) later: VecDeque<Input>,
    pub(super) inventory: Inventory,
    witness: ProcessUtilization,
    witness_asked: Option<Instant>,
    host_levels: HostLevels,
    /// Time of the next reading of host memory, while a copy out is in progress.
    pub(super) levels_due: Option<tokio::time::Instant>,
    pub(super) journal: Journal,
    unclaimed: UnclaimedEntry,
    pub(super) events: Arc<EventLog>,
    pub(super) commands: HashMap<CommandId, oneshot::Sender<ActionResponse>>,
    next_command: u64,
    started_unix_ms: i64,
    gpus_read: Option<Instant>,
    readings: GpuPolling,
    /// The container whose TCP connections were counted last. Each tick counts the connections of
    /// only some containers.
    pub(super) counted: Option<Key>,
    busy: GpuUtilization,
    pub(super) sweep: GarbageCollector,
    /// The uid of the user of each job.
    pub(super) job_users: HashMap<Key, u32>,
    empty_since: Instant,
    /// The GPUs under pressure as last written to the containers' pressure files.
    pub(super) sent_pressure: Option<BTreeSet<String>>,
    dashboard: String,
}

/// Serves until the process receives a signal. A controller without a supervisor and without jobs
/// also ends when there was no container for `LINGER`.
pub(super) async fn serve(run_dir: PathBuf, config: Config) -> Result<(), DaemonError> {
    let file = |what, path: PathBuf| move |source| DaemonError::File { what, path, source };
    let folder = run_dir.join(paths::JOURNAL_DIR);
    let journal = Journal::open(&folder).map_err(file("cannot create", folder.clone()))?;
    let (mail, mut from_agents) = mpsc::channel(INBOX);
    let (found, mut findings) = mpsc::unbounded_channel();
    let (of_copiers, mut from_copiers) = mpsc::unbounded_channel();
    let rules = memory_rules(&config);
    let of_work = found.clone();
    let witness = ProcessUtilization::start(DriverLibrary::nvml(&config), move |work| {
        let _ = of_work.send(InventoryResult::Worked(work));
    })
    .map_err(DaemonError::Runtime)?;
    let of_levels = found.clone();
    let host_levels = HostLevels::start(rules, move |levels| {
        let _ = of_levels.send(InventoryResult::HostLevels(levels));
    })
    .map_err(DaemonError::Runtime)?;
    let inventory = Inventory::start(DriverLibrary::nvml(&config), rules, move |finding| {
        let _ = found.send(finding);
    })
    .map_err(DaemonError::Runtime)?;
    let events = Arc::new(EventLog::default());
    let (calls, mut from_api) = mpsc::channel(64);
    let mut actor = NodeActor {
        node: Node::new(config.settings()),
        copiers: CopierProcesses::new(DriverLibrary::cuda(&config), of_copiers),
        config,
        run_dir: run_dir.clone(),
        sockets: ActivationSockets::take(&run_dir),
        agents: HashMap::new(),
        listeners: HashMap::new(),
        numbers: Arc::new(AtomicU64::new(1)),
        mail,
        later: VecDeque::new(),
        inventory,
        host_levels,
        levels_due: None,
        witness,
        witness_asked: None,
        journal,
        unclaimed: UnclaimedEntry::default(),
        events: Arc::clone(&events),
        commands: HashMap::new(),
        next_command: 0,
        started_unix_ms: unix_ms(),
        gpus_read: None,
        readings: GpuPolling::default(),
        counted: None,
        busy: GpuUtilization::default(),
        sweep: GarbageCollector::new(&run_dir),
        job_users: HashMap::new(),
        empty_since: Instant::now(),
        sent_pressure: None,
        dashboard: String::new(),
    };
    if let Ok(own) = process::identity(std::process::id()) {
        actor.feed(Input::Started(own.start_ticks));
    }
    match overrides::read(&run_dir) {
        Ok(overrides) => actor.feed(Input::Overridden(overrides)),
        Err(error) => {
            tracing::warn!(%error, "controller: cannot read the operator overrides in {}, so none apply",
                run_dir.display())
        }
    }
    // The journal is read before any socket is served. A restore that the earlier controller
    // ordered may still be running, and its VRAM must not be promised to another container.
    actor.recall().map_err(file("cannot read", folder))?;
    actor.recall_jobs();
    actor.recall_containers();
    let hub = Arc::new(CallTraceHub::default());
    let door = ControllerHandle::new(calls.clone(), Arc::clone(&events));
    let show = Frontend::start(&run_dir, &actor.config, door, Arc::clone(&hub));
    actor.dashboard.clone_from(&show.dashboard);
    let prices = actor.config.report.clone();
    let takes_jobs = actor.config.jobs.enabled;
    let stays = takes_jobs || socket_activation::supervised();
    let _jobs = if takes_jobs {
        let socket = run_dir.join(jobs::SOCKET);
        let listener = actor.sockets.listen(jobs::SOCKET, 0o666);
        let served = listener.and_then(|listener| job_socket::serve(listener, calls.clone()));
        Some(served.map_err(file("cannot bind", socket))?)
    } else {
        None
    };
    let service = ControlService::new(calls, events, hub, show.history.clone(), prices);
    let group = &actor.config.control.view_group;
    let _viewers = viewers::serve(&mut actor.sockets, &run_dir, group, service.clone());
    let _api = api::serve(&mut actor.sockets, &run_dir, service).await?;
    let mut terminate = signal(SignalKind::terminate()).map_err(DaemonError::Runtime)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(DaemonError::Runtime)?;
    tracing::info!(run_dir = %run_dir.display(), version = env!("CARGO_PKG_VERSION"), "controller is ready");
    socket_activation::tell_ready("serves this node");
    let mut next_tick = tokio::time::Instant::now();
    loop {
        let levels_due = actor.levels_due.unwrap_or(next_tick);
        tokio::select! {
            // The channels are polled in this order. Agents come last: containers can keep their
            // channel full, and must not delay signals, readings, requests or ticks.
            biased;
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
            Some(finding) = findings.recv() => actor.found(finding),
            Some(call) = from_api.recv() => actor.call(call),
            () = tokio::time::sleep_until(next_tick) => {
                actor.tick();
                if !stays && actor.is_unused() {
                    tracing::info!(
                        "controller: exits, because there was no container for {} s",
                        LINGER.as_secs()
                    );
                    break;
                }
                next_tick = tokio::time::Instant::now() + actor.pause();
            }
            () = tokio::time::sleep_until(levels_due), if actor.levels_due.is_some() => {
                actor.read_levels();
            }
            Some(mail) = from_copiers.recv() => actor.copier_said(mail),
            Some(mail) = from_agents.recv() => actor.mail(mail),
        }
        // If a container now waits or moves, the next tick comes earlier than planned.
        next_tick = next_tick.min(tokio::time::Instant::now() + actor.pause());
    }
    // From here on, commands get no response. Each caller that waits gets `ShuttingDown`, because
    // its channel is dropped.
    drop(from_api);
    show.end();
    Ok(())
}

fn memory_rules(config: &Config) -> MemoryRules {
    MemoryRules {
        overhead_bytes: config.memory.driver_overhead_mib << 20,
        node_reserve_bytes: config.memory.node_reserve_bytes(),
    }
}

impl NodeActor {
    pub(super) fn now(&self) -> Millis {
        monotonic_ms()
    }

    fn pause(&self) -> Duration {
        Duration::from_millis(self.node.tick_ms(self.config.timing.sample_interval))
    }

    fn is_unused(&mut self) -> bool {
        if !self.listeners.is_empty() {
            self.empty_since = Instant::now();
        }
        self.empty_since.elapsed() > LINGER
    }

    /// Reads the journal that an earlier controller wrote.
    fn recall(&mut self) -> std::io::Result<()> {
        let (records, bad) = self.journal.read_all()?;
        for why in bad {
            tracing::warn!("controller: a journal record is invalid and is ignored: {why}");
        }
        for (key, record) in records {
            self.unclaimed.add(key.clone(), &record);
            let restoring = record.step == JournalStep::Restore;
            for process in record.processes {
                let identity = (process.pid, process.start_ticks);
                // A process that has ended is not recalled, even if another process has its pid
                // now.
                let lives = process::lives(process.pid, process.start_ticks);
                if lives {
                    let bytes = process.offloaded.iter().map(|on| on.bytes).sum();
                    let host = memory::pools_of(memory_rules(&self.config), process.pid, bytes);
                    self.feed(Input::Recalled {
                        key: key.clone(),
                        identity,
                        offloaded: process.offloaded,
                        to: process.to,
                        restoring,
                        host,
                    });
                }
            }
        }
        Ok(())
    }

    /// Feeds an input, then the inputs that its effects produce. Effects are executed in the order
    /// of the decisions.
    pub(super) fn feed(&mut self, input: Input) {
        self.later.push_back(input);
        while let Some(input) = self.later.pop_front() {
            for effect in self.node.handle(self.now(), input) {
                self.execute_order(effect);
            }
        }
    }

    pub(super) fn ask_gpus(&mut self) {
        if self.readings.wanted() {
            self.inventory.ask(InventoryQuery::Gpus);
        }
    }

    /// Reads the host memory that is available to the copies out in progress. The readings are
    /// repeated at short intervals until no copy out is in progress.
    fn read_levels(&mut self) {
        let copies = self.node.copies_in_progress();
        let next = tokio::time::Instant::now() + Duration::from_millis(LEVELS_INTERVAL_MS);
        self.levels_due = (!copies.is_empty()).then_some(next);
        if !copies.is_empty() {
            self.host_levels.ask(copies);
        }
    }

    fn found(&mut self, finding: InventoryResult) {
        if matches!(finding, InventoryResult::HostLevels(_)) {
            // The need of each copy is read after the levels. If the copy progresses between the
            // two readings, its need is lower than at the first reading: it can be underestimated
            // but not overestimated.
            let copying = self.node.copies_in_progress().into_iter();
            copying.flat_map(|copy| copy.processes).for_each(|(id, _)| self.read_page(id));
        }
        // The reading may not show a change that happened during it, so another reading follows.
        if matches!(finding, InventoryResult::Gpus(_)) && self.readings.came() {
            self.inventory.ask(InventoryQuery::Gpus);
        }
        if let InventoryResult::Gpus(Ok(gpus)) = &finding {
            self.busy.note(self.now(), gpus);
            self.copiers.seen(gpus);
        }
        self.feed(match finding {
            InventoryResult::Gpus(gpus) => Input::Gpus(gpus),
            InventoryResult::HostLevels(levels) => Input::HostLevels(levels),
            InventoryResult::Worked(work) => Input::Worked(work),
            InventoryResult::Proven(key, number, gpus) => Input::Proven(key, number, gpus),
            InventoryResult::Surveyed(key, survey) => Input::Surveyed(key, survey),
        });
    }

    fn mail(&mut self, mail: AgentMail) {
        match mail {
            AgentMail::Joined { key, id, identity, hello, agent } => {
                let AgentMessage::Hello {
                    phase,
                    generation,
                    hazards,
                    abilities,
                    swappable_bytes,
                    copied_out_bytes,
                    local_memory_bytes,
                    ..
                } = hello
                else {
                    return;
                };
                self.agents.insert(id, agent);
                self.read_page(id);
                self.feed(Input::Joined {
                    key,
                    process: id,
                    identity,
                    phase,
                    generation,
                    hazards,
                    capabilities: abilities,
                    swap: SwapStatus {
                        swappable_bytes,
                        copied_out_bytes,
                        unchanged_bytes: 0,
                        zero_bytes: 0,
                        local_memory_bytes,
                    },
                });
            }
            AgentMail::Message(id, message) => self.feed(Input::Message(id, message)),
            AgentMail::Detached(id) => self.feed(Input::Detached(id)),
            AgentMail::Exited(id) => self.feed(Input::Exited(id)),
            AgentMail::Refused { key, why } => {
                tracing::warn!(%key, "container {key}: rejected connection: {why}");
                let event = NodeEvent { key: Some(key), ..NodeEvent::new(EventKind::Process, why) };
                self.events.add(conversion::event_of(event), unix_ms());
            }
        }
    }

    /// The node with its GPUs and containers, as the API shows it.
    fn list(&self) -> ListResponse {
        let mut list = conversion::list(&self.node, self.now(), unix_ms());
        list.node = nix::unistd::gethostname()
            .map(|n| n.to_string_lossy().into_owned())
            .unwrap_or_default();
        list.version = env!("CARGO_PKG_VERSION").into();
        list.controller_pid = std::process::id();
        list.started_unix_ms = self.started_unix_ms;
        for gpu in &mut list.gpus {
            gpu.utilization_minute_percent = self.busy.percent(&gpu.uuid);
            self.copiers.show(gpu);
        }
        list.dashboard.clone_from(&self.dashboard);
        list.host_free_bytes = memory::room_bytes(self.config.memory.node_reserve_bytes());
        list
    }

    pub(super) fn call(&mut self, call: Command) {
        match call {
            Command::Announce(announcement, answer) => {
                let _ = answer.send(self.announced(*announcement));
            }
            Command::Withdraw(key, generation) => self.withdrawn(&key, generation),
            Command::List(answer) => {
                let _ = answer.send(self.list());
            }
            Command::Sights(keys, answer) => {
                let _ = answer.send(self.sights(keys.as_deref()));
            }
            Command::Find(name, answer) => {
                let _ = answer.send(self.node.find(&name));
            }
            Command::Act(name, request, answer) => match self.node.find(&name) {
                Ok(key) => {
                    // The memory that an offload moves may have been allocated after the last
                    // sample of the counters. Therefore the counters are read again.
                    for id in self.node.connected_of(&key) {
                        self.read_page(id);
                    }
                    self.next_command += 1;
                    let command = CommandId(self.next_command);
                    self.commands.insert(command, answer);
                    self.feed(Input::Command(command, key, request));
                }
                Err(error) => {
                    let reason_text = error.to_string();
                    let _ =
                        answer.send(ActionResponse { reason_text, ..ActionResponse::default() });
                }
            },
            Command::Pin(name, pinned, who, answer) => self.pin(&name, pinned, &who, answer),
            Command::AutoOffload(on, who, answer) => {
                let _ = answer.send(self.auto_offload(on, &who));
            }
            Command::Reload(answer) => {
                let _ = answer.send(self.reload());
            }
            Command::Hint(name, hint, who, answer) => {
                let _ = answer.send(self.hint(&name, hint, &who));
            }
            Command::Policy(name, answer) => {
                let _ = answer.send(self.policy(&name));
            }
            Command::SetPolicy(changes, answer) => {
                let _ = answer.send(self.set_policy(&changes));
            }
            Command::Job(request, user, answer) => {
                let _ = answer.send(match self.job(request, &user) {
                    Ok(granted) => granted,
                    Err(error) => jobs::JobReply::Refused(error_chain::chain(&error)),
                });
            }
        }
    }

    fn read_page(&mut self, id: ProcessId) {
        let mut buffer = [0; PAGE_BYTES];
        let Some(agent) = self.agents.get(&id) else {
            return;
        };
        match agent.read_page(&mut buffer) {
            Ok(page) => self.feed(Input::Page(id, page)),
            Err(error) => self.feed(Input::BadPage(id, error_chain::chain(&error))),
        }
    }

    fn tick(&mut self) {
        let ids: Vec<ProcessId> = self.node.connected().collect();
        for id in ids {
            self.read_page(id);
        }
        // While a container waits or moves, decisions need fresh readings of VRAM.
        let hurry = self.pause() < Duration::from_millis(self.config.timing.sample_interval);
        let interval = if hurry { Duration::from_millis(100) } else { GPU_INTERVAL };
        if self.gpus_read.is_none_or(|read| read.elapsed() >= interval) {
            self.gpus_read = Some(Instant::now());
            self.ask_gpus();
        }
        let interval = Duration::from_millis(self.config.timing.sample_interval);
        let interval = interval.clamp(WITNESS_INTERVAL, GPU_INTERVAL);
        if !self.agents.is_empty() && self.witness_asked.is_none_or(|at| at.elapsed() >= interval) {
            self.witness_asked = Some(Instant::now());
            self.witness.ask();
        }
        // Hints and connections are read before the tick, because the tick decides about idle
        // containers and wakes.
        self.read_hints();
        self.read_connections();
        self.feed(Input::Clock(unix_ms()));
        self.feed(Input::Tick);
        self.tell_pressure();
        self.write_states();
        let useless =
            self.unclaimed.useless(|key| self.listeners.contains_key(key), process::lives);
        for key in useless {
            self.execute_order(Effect::Journal(key, None));
        }
        self.withdraw_the_gone();
    }
}
