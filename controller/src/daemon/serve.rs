//! Starts and runs the actor: the task that drives the core (the module that decides about moves).
//! Only the actor changes the core's state. It feeds inputs to the core, and executes the resulting
//! effects in order.

use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    io,
    path::{Path, PathBuf},
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

use affinode_core::{Input, Node};
use affinode_proto::paths;
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::{mpsc, watch},
    time::{Instant, sleep_until},
};
use ttrpc::r#async::Server;

use super::{
    DaemonError,
    actor::{NodeActor, memory_rules},
    api::{self, ControlService},
    commands,
    connection_polling::ConnectionPolling,
    event_limits::EventLimits,
    frontend::Frontend,
    gc::GarbageCollector,
    gpu_polling::GpuPolling,
    incoming, job_socket,
    pending_commands::PendingCommands,
    recall, tick, viewers,
};
use crate::{
    agents::AgentMail,
    call_trace::CallTraceHub,
    clock::unix_ms,
    config::Config,
    copier::{CopierMessage, CopierProcesses},
    driver_library::DriverLibrary,
    handle::{Command, ControllerHandle, EventLog},
    host_pool::{self, HostPool},
    inventory::{
        Inventory, host_levels::HostLevels, process_utilization::ProcessUtilization,
        utilization::GpuUtilization,
    },
    isolated_runtime::IsolatedRuntime,
    jobs,
    journal::{Journal, UnclaimedEntry},
    socket_activation::{self, ActivationSockets},
};

/// Maximum number of messages from agents in the actor's queue. If the queue is full, each message
/// waits in the socket of the agent that sent it.
const INBOX: usize = 1024;
/// Maximum number of commands that wait for the actor.
const COMMANDS: usize = 64;
/// Time without containers after which the controller ends. The next shim starts a new controller.
const LINGER: Duration = Duration::from_secs(60);

/// Receivers of all messages that the actor handles.
struct ActorInbox {
    findings: mpsc::UnboundedReceiver<Input>,
    commands: mpsc::Receiver<Command>,
    copiers: mpsc::UnboundedReceiver<CopierMessage>,
    agents: mpsc::Receiver<AgentMail>,
    /// Whether the last turn was a command.
    had_command: bool,
}

/// What the actor does next.
enum Turn {
    End,
    Finding(Input),
    Command(Command),
    Tick,
    ReadLevels,
    Copier(CopierMessage),
    Agent(AgentMail),
    /// Nothing but perhaps further commands waits.
    OnlyCommands,
}

/// Streams of the signals that end the controller.
struct EndSignals {
    terminate: Signal,
    interrupt: Signal,
}

/// Sockets that the controller serves. Dropping this value closes them.
struct ServedSockets {
    _api: Server,
    _viewers: Option<IsolatedRuntime>,
    _jobs: Option<IsolatedRuntime>,
}

/// Runs the controller until it receives a signal. It also ends if there was no container for the
/// time [`LINGER`], unless systemd supervises it or jobs are enabled.
pub(super) async fn serve(run_dir: PathBuf, config: Config) -> Result<(), DaemonError> {
    let (calls, commands) = mpsc::channel(COMMANDS);
    let (mut inbox, mut actor) = begin(&run_dir, config, commands)?;
    recall::recall(&mut actor)?;
    let hub = Arc::new(CallTraceHub::default());
    let door = ControllerHandle::new(calls.clone(), Arc::clone(&actor.events));
    let show = Frontend::start(&run_dir, &actor.config, door, Arc::clone(&hub));
    actor.dashboard.clone_from(&show.dashboard);
    let stays = actor.config.jobs.enabled || socket_activation::supervised();
    let (events, prices) = (Arc::clone(&actor.events), actor.config.report.clone());
    let service = ControlService::new(calls.clone(), events, hub, show.history.clone(), prices);
    let sockets = ServedSockets::open(&mut actor, calls, service).await?;
    let mut signals = EndSignals {
        terminate: signal(SignalKind::terminate()).map_err(DaemonError::Runtime)?,
        interrupt: signal(SignalKind::interrupt()).map_err(DaemonError::Runtime)?,
    };
    tracing::info!(run_dir = %run_dir.display(), version = env!("CARGO_PKG_VERSION"), "controller is ready");
    socket_activation::tell_ready("serves this node");
    super::forget_failure(&run_dir);
    run(&mut actor, &mut inbox, &mut signals, stays).await;
    // From here on, commands get no response. Each caller that waits gets `ShuttingDown`, because
    // its channel is dropped.
    drop(inbox.commands);
    // The history may wait for the disk. Before that, the agents must see that this controller has
    // ended, so that they restore themselves.
    drop((sockets, actor));
    show.end().await;
    Ok(())
}

/// Creates the actor. Also starts the threads that read GPUs, processes and host memory, and that
/// send the results to the actor.
fn begin(
    run_dir: &Path,
    config: Config,
    commands: mpsc::Receiver<Command>,
) -> Result<(ActorInbox, NodeActor), DaemonError> {
    let folder = run_dir.join(paths::JOURNAL_DIR);
    let journal = Journal::open(&folder).map_err(DaemonError::file("cannot create", &folder))?;
    let (mail, agents) = mpsc::channel(INBOX);
    let (found, findings) = mpsc::unbounded_channel();
    let (of_copiers, copiers) = mpsc::unbounded_channel();
    let (utilization, levels, inventory) =
        start_readers(run_dir, &config, &found).map_err(DaemonError::Runtime)?;
    let actor = NodeActor {
        node: Node::new(config.settings()),
        copiers: CopierProcesses::new(DriverLibrary::cuda(&config), of_copiers),
        host_pool: HostPool::new(host_pool::cgroup_of(&config.memory), config.memory.disk()),
        in_host_pool: BTreeSet::new(),
        allowed_users: watch::Sender::new(config.jobs.users.clone()),
        config,
        run_dir: run_dir.to_owned(),
        sockets: ActivationSockets::take(run_dir),
        agents: HashMap::new(),
        listeners: HashMap::new(),
        numbers: Arc::new(AtomicU64::new(1)),
        mail,
        later: VecDeque::new(),
        inventory,
        readings: GpuPolling::default(),
        utilization,
        levels,
        connections: ConnectionPolling::default(),
        journal,
        unclaimed: UnclaimedEntry::default(),
        events: Arc::new(EventLog::default()),
        event_limits: EventLimits::default(),
        commands: PendingCommands::default(),
        started_unix_ms: unix_ms(),
        busy: GpuUtilization::default(),
        sweep: GarbageCollector::new(run_dir),
        job_users: HashMap::new(),
        empty_since: std::time::Instant::now(),
        sent_pressure: None,
        dashboard: String::new(),
    };
    Ok((ActorInbox { findings, commands, copiers, agents, had_command: false }, actor))
}

/// Starts the threads that read GPUs, processes and host memory. They are separate threads, because
/// a reading may block.
fn start_readers(
    run_dir: &Path,
    config: &Config,
    found: &mpsc::UnboundedSender<Input>,
) -> io::Result<(ProcessUtilization, HostLevels, Inventory)> {
    let rules = memory_rules(config);
    let of_work = found.clone();
    let utilization = ProcessUtilization::start(DriverLibrary::nvml(config), move |work| {
        let _ = of_work.send(Input::Worked(work));
    })?;
    let of_levels = found.clone();
    let levels = HostLevels::start(rules, move |levels| {
        let _ = of_levels.send(Input::HostLevels(levels));
    })?;
    let found = found.clone();
    let nvml = DriverLibrary::nvml(config);
    let pool_cgroup = host_pool::cgroup_of(&config.memory);
    let inventory = Inventory::start(nvml, rules, pool_cgroup, run_dir, move |finding| {
        let _ = found.send(finding);
    })?;
    Ok((utilization, levels, inventory))
}

impl ServedSockets {
    /// Opens the sockets for jobs, for viewers (the group that may read the state) and for root.
    async fn open(
        actor: &mut NodeActor,
        calls: mpsc::Sender<Command>,
        service: ControlService,
    ) -> Result<ServedSockets, DaemonError> {
        let jobs = if actor.config.jobs.enabled {
            let socket = actor.run_dir.join(jobs::SOCKET);
            let listener = actor.sockets.listen(jobs::SOCKET, 0o666);
            let allowed = actor.allowed_users.subscribe();
            let served = listener.and_then(|listener| job_socket::serve(listener, calls, allowed));
            Some(served.map_err(DaemonError::file("cannot bind", &socket))?)
        } else {
            None
        };
        let (group, run_dir) = (&actor.config.control.view_group, &actor.run_dir);
        let viewers = viewers::serve(&mut actor.sockets, run_dir, group, service.clone());
        let api = api::serve(&mut actor.sockets, run_dir, service).await?;
        Ok(ServedSockets { _api: api, _viewers: viewers, _jobs: jobs })
    }
}

impl ActorInbox {
    /// Waits for what the actor must do next. The next tick is at `next_tick`, and the next reading
    /// of the host memory at `levels_due`.
    async fn next(
        &mut self,
        signals: &mut EndSignals,
        next_tick: Instant,
        levels_due: Option<Instant>,
    ) -> Turn {
        // Clients can keep the channel of commands full. After each command, everything else that
        // is due has one turn.
        let may_command = !self.had_command;
        let turn = tokio::select! {
            // The channels are polled in this order. Agents come last: containers can keep their
            // channel full, and must not delay signals, readings, requests or ticks.
            biased;
            _ = signals.terminate.recv() => Turn::End,
            _ = signals.interrupt.recv() => Turn::End,
            Some(finding) = self.findings.recv() => Turn::Finding(finding),
            Some(command) = self.commands.recv(), if may_command => Turn::Command(command),
            () = sleep_until(next_tick) => Turn::Tick,
            () = sleep_until(levels_due.unwrap_or(next_tick)), if levels_due.is_some() => {
                Turn::ReadLevels
            }
            Some(mail) = self.copiers.recv() => Turn::Copier(mail),
            Some(mail) = self.agents.recv() => Turn::Agent(mail),
            () = std::future::ready(()), if !may_command => Turn::OnlyCommands,
        };
        self.had_command = matches!(turn, Turn::Command(_));
        turn
    }
}

/// Handles messages until a signal arrives. If `stays` is false, also returns when there was no
/// container for the time [`LINGER`].
async fn run(actor: &mut NodeActor, inbox: &mut ActorInbox, signals: &mut EndSignals, stays: bool) {
    let mut next_tick = Instant::now();
    loop {
        match inbox.next(signals, next_tick, actor.levels.due()).await {
            Turn::End => break,
            Turn::Finding(finding) => incoming::found(actor, finding),
            Turn::Command(command) => commands::call(actor, command),
            Turn::Tick => {
                tick::tick(actor);
                if !stays && is_unused(actor) {
                    tracing::info!(
                        "controller: exits, because there was no container for {} s",
                        LINGER.as_secs()
                    );
                    break;
                }
                next_tick = Instant::now() + actor.pause();
            }
            Turn::ReadLevels => actor.levels.read(actor.node.copies_in_progress()),
            Turn::Copier(mail) => incoming::copier_said(actor, mail),
            Turn::Agent(mail) => incoming::agent_said(actor, mail),
            Turn::OnlyCommands => {}
        }
        // If a container now waits or moves, the next tick comes earlier than planned.
        next_tick = next_tick.min(Instant::now() + actor.pause());
    }
}

/// Returns whether the controller has had no container for longer than [`LINGER`].
fn is_unused(actor: &mut NodeActor) -> bool {
    if !actor.listeners.is_empty() {
        actor.empty_since = std::time::Instant::now();
    }
    actor.empty_since.elapsed() > LINGER
}

#[cfg(test)]
mod tests;
