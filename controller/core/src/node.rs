//! The node receives each input and passes it to the file that decides about it.
//!
//! The data of the node is in `node_state.rs`. The other files contain functions that decide about
//! this data and change it. These files call each other in one direction only (a test checks this).
//! Registration and exit are in `registration.rs`, counters and NVML samples in `measurements.rs`,
//! requests of operators in `requests.rs`, idle containers in `evaluate.rs`, the steps of an offload
//! in `offload.rs` and those of a restore in `restore.rs`, the reports of agents in `completions.rs`,
//! the queue in `serve_queue.rs`. What the node sends is in `output.rs`, and the lists for operators
//! are in `view.rs`.
//!
//! A function that changes a container does not send the container's next orders. It calls `resume`
//! (`output.rs`), and the node then calls `advance`.

use std::collections::BTreeSet;

use affinode_proto::{
    state::State,
    wire::message::{AgentMessage, PROOF_TTL_MS},
};

use super::{
    Effect, Key, Millis, ProcessId, completions, connection_prewake,
    container::Goal,
    copier_use, copy_watch, disk_step, driver_limit, early_release, evaluate, grants, hints, holds,
    host_pool, host_promises, host_relief, idle, immediate,
    input::{Input, SwapStatus},
    measurements, no_progress,
    node_state::{JournalClaim, NodeState},
    nvml_readings, offload, oom_wait,
    order_report::OrderReport,
    plan::OrderDeadlines,
    policy::Policies,
    prefault, prefault_host_pool, pressure, prewake,
    registration::{self, RegistrationStatus},
    requests, restore, serve_queue,
    victims::VictimRule,
    vram_limit,
};

/// Settings of the node, from the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Policies of the node and of its namespaces.
    pub policies: Policies,
    /// Deadlines of the orders to close the gate and to lock a process.
    pub deadlines: OrderDeadlines,
    /// Time limit for a process to pause its allocations after it was ordered to, in milliseconds.
    pub hold_ms: u32,
    /// Maximum number of managed CUDA processes in one container.
    pub max_processes: usize,
    /// Whether copiers (processes that copy GPU memory for other processes) are used on this node.
    pub copiers: bool,
    /// Whether the node has a folder for disk files, so that content of offloaded containers may move
    /// from the host pool to disk.
    pub disk: bool,
    /// Minimum amount of memory, in bytes, that an agent must be able to copy for its process to be
    /// prefaulted (host memory prepared before an offload).
    pub prefault_min_bytes: u64,
    /// The rule by which containers are chosen for eviction when another container needs VRAM.
    pub victims: VictimRule,
    /// Whether processes pause their allocations while another container is restored. False only in
    /// simulations, because simulated processes never allocate.
    pub hold: bool,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            policies: Policies::default(),
            deadlines: OrderDeadlines { close_ms: 1_000, lock_ms: 5_000 },
            hold_ms: 500,
            max_processes: 256,
            copiers: true,
            disk: false,
            prefault_min_bytes: 16 << 20,
            victims: VictimRule::Expected,
            hold: true,
        }
    }
}

/// The state of all containers and processes of one node, and the decisions about them. One task
/// drives it.
#[derive(Debug, Default)]
pub struct Node {
    pub(super) state: NodeState,
}

impl Node {
    /// Creates a node without containers.
    #[must_use]
    pub fn new(settings: Settings) -> Node {
        Node { state: NodeState { settings, ..NodeState::default() } }
    }

    /// Handles one input at the time `now`. Returns the effects, which the caller executes in
    /// order.
    #[must_use]
    pub fn handle(&mut self, now: Millis, input: Input) -> Vec<Effect> {
        decide(&mut self.state, now, input);
        std::mem::take(&mut self.state.output.effects)
    }

    /// Like [`handle`](Node::handle), but appends the effects to the caller's buffer. This saves
    /// the simulator one allocation per input.
    pub fn handle_into(&mut self, now: Millis, input: Input, effects: &mut Vec<Effect>) {
        decide(&mut self.state, now, input);
        effects.append(&mut self.state.output.effects);
    }
}

fn decide(node: &mut NodeState, now: Millis, mut input: Input) {
    let silent_ms = now.saturating_sub(node.clock.now);
    node.clock.now = node.clock.now.max(now);
    if silent_ms > PROOF_TTL_MS {
        grants::doubt_grants(node);
    }
    holds::excuse_stall(node, silent_ms);
    // These inputs neither free nor request VRAM, so the queue is not served after them. Most
    // inputs are counter readings.
    let may_serve = !matches!(
        input,
        Input::Page(..)
            | Input::Worked(_)
            | Input::Clock(_)
            | Input::Foreseen(..)
            | Input::CopierReport(..)
            | Input::VramRead { .. }
            | Input::DriverLimited(..)
            | Input::Message(_, AgentMessage::AskVram { .. } | AgentMessage::VramTaken)
    );
    if let Some(gpus) = input.samples_mut() {
        measurements::take_unreadable(node, gpus);
    }
    take(node, input);
    advance_resumed(node);
    if may_serve {
        serve_queue::serve_queue(node);
        host_promises::settle_host_memory(node);
        driver_limit::update(node);
    }
    copier_use::prove_when_copiers_rest(node);
    // A container that these resume would wait for the next input.
    debug_assert!(node.output.resumed.is_empty(), "a container was resumed too late");
}

/// Passes an input to the function that handles it.
fn take(node: &mut NodeState, input: Input) {
    match input {
        Input::Started(ticks) => node.clock.started_ticks = ticks,
        Input::Clock(unix_ms) => set_clock(node, unix_ms),
        Input::Reconfigured(settings) => reconfigure(node, *settings),
        Input::Overridden(overrides) => node.overrides = overrides,
        Input::Foreseen(key, next_use) => foresee(node, &key, next_use),
        Input::Announced(spec, key) => registration::announced(node, *spec, &key),
        Input::Withdrawn(key) => registration::withdrawn(node, &key),
        Input::Joined {
            key,
            process,
            identity,
            phase,
            generation,
            hazards,
            capabilities,
            swap,
        } => {
            let standing = RegistrationStatus { phase, generation, hazards, capabilities, swap };
            registration::register(node, &key, process, identity, standing);
        }
        Input::Detached(process) => registration::detached(node, process),
        Input::Exited(process) => registration::exited(node, process),
        Input::Message(process, message) => agent_message(node, process, message),
        Input::Page(process, page) => measurements::page(node, process, page),
        Input::BadPage(process, why) => measurements::bad_page(node, process, why),
        Input::Gpus(gpus) => {
            measurements::gpus_read(node, gpus);
            vram_limit::show(node);
            driver_limit::gpus_read(node);
        }
        Input::Worked(work) => idle::worked(node, &work),
        Input::CopierReport(copier, report) => copier_use::copier_reported(node, copier, report),
        Input::CopierEnded(copier) => copier_use::copier_ended(node, copier),
        Input::CopierExited(copier) => copier_use::copier_exited(node, copier),
        Input::NotAttached(process) => prefault::not_attached(node, process),
        Input::HostPoolConnected(process) => host_pool::connected(node, process),
        Input::Surveyed(key, survey) => offload::surveyed(node, &key, survey),
        Input::HostLevels(levels) => {
            copy_watch::host_levels_read(node, levels);
            copy_watch::cancel_unwanted_copies(node);
        }
        Input::Proven(key, number, gpus) => serve_queue::proven(node, &key, number, gpus),
        Input::VramRead { key, epoch, pending, gpus } => {
            vram_limit::read(node, &key, epoch, &pending, gpus);
        }
        Input::DriverLimited(key, outcome) => driver_limit::reported(node, key, outcome),
        Input::Recalled { key, identity, offloaded, to, restoring, host } => {
            let claim = JournalClaim { offloaded, to, restoring, host, held_bytes: None };
            grants::recall(node, key, identity, claim);
        }
        Input::Command(command, key, request) => requests::command(node, command, &key, request),
        Input::Hinted(key, hint, who) => {
            hints::hinted(node, &key, hint, &who);
            due(node, &key);
        }
        Input::Connections(key, count) => connection_prewake::connections(node, &key, count),
        Input::Due(key) => due(node, &key),
        Input::Tick => tick(node),
    }
}

fn set_clock(node: &mut NodeState, unix_ms: i64) {
    node.clock.unix_ms = unix_ms.saturating_sub(i64::try_from(node.clock.now).unwrap_or(i64::MAX));
}

fn reconfigure(node: &mut NodeState, settings: Settings) {
    node.settings = settings;
    for container in node.registry.containers.values_mut() {
        let (policy, warnings) = container.spec.policy(&node.settings.policies);
        container.policy = policy;
        container.warnings = warnings;
    }
}

fn foresee(node: &mut NodeState, key: &Key, next_use: Option<Millis>) {
    if let Some(container) = node.registry.containers.get_mut(key) {
        container.usage.next_use = next_use;
    }
}

fn agent_message(node: &mut NodeState, id: ProcessId, message: AgentMessage) {
    match message {
        // The protocol allows one Hello per connection. Later ones are ignored.
        AgentMessage::Hello { .. } => {}
        AgentMessage::Wake { generation, .. } => {
            if restore::wake(node, id, generation) {
                // The container enters the queue first, because the answer contains its place.
                advance_resumed(node);
                restore::acknowledge_wake(node, id, generation);
            }
        }
        AgentMessage::Report {
            order,
            outcome,
            phase,
            cuda_error,
            swappable_bytes: bytes,
            copied_out_bytes,
            unchanged_bytes,
            zero_bytes,
            local_memory_bytes,
            ..
        } => {
            let swap = SwapStatus {
                swappable_bytes: bytes,
                copied_out_bytes,
                unchanged_bytes,
                zero_bytes,
                local_memory_bytes,
            };
            completions::report(node, id, OrderReport { order, outcome, phase, cuda_error, swap });
        }
        AgentMessage::AllocWait { ticket, bytes, uuid, attempts } => {
            oom_wait::alloc_wait_began(node, id, ticket, bytes, &uuid, attempts);
        }
        AgentMessage::AllocWaitDone { ticket, served } => {
            oom_wait::alloc_wait_ended(node, id, ticket, served)
        }
        AgentMessage::Notice { hazards } => measurements::learn_hazards(node, id, hazards),
        AgentMessage::AskVram { ticket, bytes, uuid } => {
            vram_limit::asked(node, id, ticket, bytes, uuid);
        }
        AgentMessage::VramTaken => vram_limit::taken(node, id),
        AgentMessage::Releasing => early_release::begins(node, id),
        AgentMessage::AskReadings => nvml_readings::send_readings(node, id),
    }
}

fn tick(node: &mut NodeState) {
    let keys: BTreeSet<Key> = node.registry.containers.keys().cloned().collect();
    for key in keys {
        due(node, &key);
    }
    serve_queue::check_grants(node);
    immediate::check_terminations(node);
    pressure::look_at_pressure(node);
    copier_use::keep_copiers(node);
    if disk_step::update(node) {
        host_relief::content_moved_to_disk(node);
    }
}

/// Decides and sends the next orders of each container in the list `resumed`.
fn advance_resumed(node: &mut NodeState) {
    while let Some(key) = node.output.resumed.pop_front() {
        advance(node, &key);
    }
}

/// Sends the next orders for a container's offload or restore, if any are due.
fn advance(node: &mut NodeState, key: &Key) {
    let Some(container) = node.registry.containers.get(key) else {
        return;
    };
    if container.shown.state == State::Unregistered {
        return;
    }
    restore::end_incomplete_restore(node, key);
    let positions = node.positions(key);
    if positions.is_empty() {
        return;
    }
    let Some(container) = node.registry.containers.get(key) else { return };
    match container.goal {
        Goal::OffloadRequested(_) => {}
        Goal::Offloaded(_) => offload::advance_offload(node, key, &positions),
        Goal::Resident(_) => restore::advance_restore(node, key, &positions),
    }
}

fn due(node: &mut NodeState, key: &Key) {
    completions::check_overdue(node, key);
    oom_wait::check_alloc_wait(node, key);
    vram_limit::check_taken(node, key);
    evaluate::evaluate(node, key);
    no_progress::check_progress(node, key);
    host_promises::survey_again(node, key);
    prefault::update_prefault(node, key);
    prefault_host_pool::update(node, key);
    prewake::expect(node, key);
    node.resume(key);
    advance_resumed(node);
    requests::settle_requests(node, key);
}
