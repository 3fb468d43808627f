//! The agent: one thread per CUDA process. It executes the controller's orders, reports waiting
//! callers, and restores its process itself when the controller does not respond.
//!
//! The agent has SIGURG blocked and sleeps until that signal is pending. The kernel raises the
//! signal when the agent's socket has something to read, and callers raise it when the counters
//! have changed. The agent's descriptors are the controller's socket and the counters' file. If a
//! copier is used, they also include the copier's socket and the staging file. If the process has
//! exported memory, they include a socket for processes that open this memory.

mod blocked;
#[cfg(test)]
mod closing_tests;
pub mod connection;
mod gpus;
mod host;
mod machine;
mod pin;
mod vram;
mod watchdog;

use core::ffi::c_void;
use core::sync::atomic::Ordering;

use affinode_proto::paths::{ENGINE_FILE, VRAM_LIMIT_FILE};
use affinode_proto::wire::counters::Gate;
use affinode_proto::wire::message::{Action, AgentMessage, ControllerMessage, WAKE_REPEAT_MS};
use affinode_proto::wire::{Capabilities, Hazards, Phase, ProcessFlags, WIRE_VERSION};

use self::blocked::BlockedThreadWatch;
use self::connection::{ControllerConnection, ReceivedMessage};
use self::gpus::GpuMap;
use self::host::DriverHost;
use self::machine::OrderMachine;
pub use self::vram::note_path;
use self::watchdog::{ControllerWatchdog, GateActivity};
use crate::counters::CounterPage;
use crate::fds::TrackedFd;
use crate::oom_wait::{AllocRequest, PendingAlloc};
use crate::process::PROCESS;
use crate::{call_recorder, exit, libc, nvml, overhead, process, swap, sys};

/// Capabilities of this library that it reports to the controller.
const ABILITIES: Capabilities = Capabilities(
    Capabilities::RECORDS_CALLS.0
        | Capabilities::USES_COPIER.0
        | Capabilities::RETAINS_HOST_COPY.0
        | Capabilities::PREFAULTS.0
        | Capabilities::CHECKS.0
        | Capabilities::DEDUPS.0
        | Capabilities::AWAITS_WORK.0
        | Capabilities::LEAVES_IN_PART.0
        | Capabilities::LIMITS_VRAM.0
        | Capabilities::USES_HOST_POOL.0
        | Capabilities::FREES_HOST_MEMORY.0
        | Capabilities::GIVES_UP_COPIES.0
        | Capabilities::RELEASES_EARLY.0
        | Capabilities::STORES_ON_DISK.0
        | Capabilities::COPIES_UNDER_MPS.0
        | Capabilities::PREFAULTS_HOST_POOL.0,
);

/// Signal set that contains SIGURG, the only signal that wakes the agent.
const LOOK: u64 = 1 << (sys::SIGURG - 1);

/// Main function of the agent's thread. It never returns, because callers send signals to the id of
/// this thread.
///
/// # Safety
/// `named_socket` must come from [`connection::named_socket`]. Only pthread_create may call this
/// function.
pub unsafe extern "C" fn main(named_socket: *mut c_void) -> *mut c_void {
    sys::set_signal_mask(!libc::internal_signals());
    sys::set_thread_name(c"affinode-agent");
    let tid = sys::gettid();
    process::become_agent(tid);
    // This must come before the thread calls the driver or stores an address of the driver.
    pin::pin_libcuda();
    let mut path = [0; connection::PATH_BYTES];
    if let Some(file) = connection::file_beside(named_socket, ENGINE_FILE, &mut path) {
        swap::set_engine_by_file(file);
    }
    // This must come before the agent permits allocations.
    if let Some(file) = connection::file_beside(named_socket, VRAM_LIMIT_FILE, &mut path) {
        PROCESS.vram_limit.set_by_file(file);
    }
    if let Some(page) = process::page() {
        overhead::measure(page);
        page.note(ProcessFlags::MOVABLE, gpus::driver_can());
    }
    if let Some((page, file)) = process::page().zip(TrackedFd::note(process::page_fd())) {
        Agent {
            page,
            own: DriverHost {
                page,
                gpus: GpuMap::none(),
                watch: BlockedThreadWatch::new(),
                turn: None,
                patience: host::WaitBudget::default(),
            },
            machine: OrderMachine::new(),
            link: ControllerConnection::new(named_socket, tid, file),
            silence: ControllerWatchdog::new(sys::now_us()),
            heard: false,
            hold: AllocationHold::AtStart,
            told_hazards: Hazards(0),
            wake_sent: None,
            want_sent: None,
            tidy_us: None,
            frees_all: false,
            released: swap::ScrubState::None,
            more_asked: false,
        }
        .run();
        PROCESS.oom_wait.set_wait_ms(0);
        PROCESS.vram_limit.set_bytes(0);
    } else if let Some(page) = process::page() {
        // The counters' file is closed already, so no controller can ever end the pause of
        // allocations.
        page.set_gate(Gate::Open);
    }
    loop {
        // Managed or not, the process answers requests of other processes to open memory that it
        // has exported.
        while swap::answer() {}
        sys::wait_signal(LOOK, 3_600_000);
    }
}

struct Agent {
    page: &'static CounterPage,
    own: DriverHost,
    machine: OrderMachine,
    link: ControllerConnection,
    silence: ControllerWatchdog,
    /// True if an order or an acknowledgement has arrived since the watchdog's last check.
    heard: bool,
    /// Reason why allocations are paused, if [`OrderMachine::allocations_held`] is true.
    hold: AllocationHold,
    told_hazards: Hazards,
    /// The gate's generation at the last Wake (the request for a restore), and the time of that
    /// Wake. `None`: no Wake was sent on this connection.
    wake_sent: Option<(u64, u64)>,
    /// Ticket and number of attempts in the last AllocWait. This message reports that an allocation
    /// waits for VRAM. `None`: no waiting allocation is reported.
    want_sent: Option<(u64, u32)>,
    /// Time at which unneeded host memory is freed. `None`: not scheduled; `u64::MAX`: no unneeded
    /// host memory is left.
    tidy_us: Option<u64>,
    /// True after the controller has requested all host memory that the process keeps, until that
    /// memory is free.
    frees_all: bool,
    /// Progress of the scrub (clearing) of freed device memory. The driver notices the end of the
    /// scrub only at its next allocation.
    released: swap::ScrubState,
    /// True if more messages may have arrived already: requests of other processes, or messages of
    /// the copier. The agent then handles them without a sleep.
    more_asked: bool,
}

/// Why allocations are paused.
#[derive(Clone, Copy, PartialEq, Eq)]
enum AllocationHold {
    /// Allocations are paused since the start: no controller has ended the pause yet.
    AtStart,
    /// A controller ordered the pause on an earlier connection. The next controller repeats the
    /// order or ends the pause.
    Before,
    /// The controller ordered the pause on this connection.
    Now,
}

/// Whether the controller still manages the process.
#[derive(PartialEq, Eq)]
enum AgentMode {
    Still,
    NoMore,
}

impl Agent {
    /// Runs the agent's loop until the controller no longer manages the process. Returns after
    /// calls can pass the gate again.
    fn run(&mut self) {
        loop {
            let (page, phase) = (self.page, self.machine.phase());
            let mut connected = false;
            self.link.keep(sys::now_us(), || {
                connected = true;
                hello(page, phase)
            });
            if connected && self.hold == AllocationHold::Now {
                self.hold = AllocationHold::Before;
            }
            let managed = self.listen();
            if !self.link.is_welcomed() {
                // Without a connection, no calls are recorded, nothing is prefaulted and no copier
                // is used.
                call_recorder::watch(self.page, 0, 0);
                if self.machine.phase() == Phase::Open {
                    swap::end_preparation();
                    swap::end_host_pool_prefault();
                }
            }
            if managed == AgentMode::NoMore {
                break;
            }
            self.look_at_threads();
            self.tell();
            self.look_after();
            self.tidy();
            self.take_note();
            match self.machine.phase() {
                Phase::CopiedOut => swap::go_on_storing(true),
                Phase::Checkpointed => swap::go_on_storing(false),
                // Also after a restore that was given up.
                Phase::Open => swap::stop_storing(),
                _ => {}
            }
            // The driver may be called only while it neither locks nor checkpoints the process.
            // Memory that is shared stays on the GPU, so requests for it are also answered while
            // the process is copied out.
            self.more_asked = match self.machine.phase() {
                Phase::Open | Phase::CopiedOut => swap::answer(),
                Phase::Checkpointed => swap::copier_restore::recv(),
                _ => false,
            };
            sys::wait_signal(LOOK, self.patience_ms());
        }
        while !self.machine.restore_self(&mut self.own) {
            if self.machine.phase() == Phase::CopiedOut {
                while swap::answer() {}
            }
            sys::wait_signal(LOOK, WAKE_REPEAT_MS);
        }
    }

    fn listen(&mut self) -> AgentMode {
        loop {
            let (message, descriptor) = match self.link.receive(sys::now_us()) {
                ReceivedMessage::Message(message, descriptor) => (message, descriptor),
                ReceivedMessage::Nothing | ReceivedMessage::Lost => return AgentMode::Still,
            };
            match message {
                ControllerMessage::Refuse { retry: false, .. } => {
                    self.link.lose(sys::now_us());
                    return AgentMode::NoMore;
                }
                ControllerMessage::Refuse { retry: true, .. } => self.link.lose(sys::now_us()),
                ControllerMessage::Welcome {
                    wait_for_room_ms, engine, vram_limit_bytes, ..
                } => {
                    self.link.set_welcomed();
                    PROCESS.oom_wait.set_wait_ms(wait_for_room_ms);
                    PROCESS.vram_limit.set_bytes(vram_limit_bytes);
                    // Set the engine before an allocation can pass the gate.
                    swap::set_engine(engine);
                    if self.hold != AllocationHold::Now {
                        self.machine.release_allocations(&mut self.own);
                    }
                    // The Hello contained the state at that time, which may be older. So hazards,
                    // Wake and AllocWait are sent again.
                    self.told_hazards = Hazards(0);
                    (self.wake_sent, self.want_sent) = (None, None);
                }
                // A peer that sends another message before its Welcome is not a controller.
                _ if !self.link.is_welcomed() && !is_hold(&message) => {
                    self.link.lose(sys::now_us())
                }
                ControllerMessage::WakeAck { .. } => self.heard = true,
                ControllerMessage::AllocGrant { ticket, granted } => {
                    PROCESS.oom_wait.answer(ticket, granted)
                }
                ControllerMessage::SampleCalls { one_in, read } => {
                    call_recorder::watch(self.page, one_in, read)
                }
                ControllerMessage::Copier => swap::copier_restore::meet(descriptor),
                ControllerMessage::HostPool => swap::host_pool::meet(descriptor),
                ControllerMessage::FreeHostMemory => {
                    if self.machine.phase() == Phase::Open {
                        swap::end_host_pool_prefault();
                        self.frees_all = true;
                        self.tidy_us = Some(sys::now_us());
                    }
                }
                ControllerMessage::PrefaultHostPool => {
                    // Memory that another container needs is freed first.
                    if self.machine.phase() == Phase::Open && !self.frees_all {
                        swap::prefault_host_pool();
                        self.tidy_us = Some(sys::now_us());
                    }
                }
                ControllerMessage::StoreOnDisk => {
                    if matches!(self.machine.phase(), Phase::CopiedOut | Phase::Checkpointed) {
                        swap::store_on_disk();
                    }
                }
                ControllerMessage::Prefault { on } => {
                    // A process that is being offloaded needs no prefault.
                    if self.machine.phase() == Phase::Open {
                        swap::prepare(on);
                        self.tidy_us = Some(sys::now_us());
                    }
                }
                ControllerMessage::VramAllowance { ticket, uuid, bytes, free_bytes, epoch } => {
                    PROCESS.vram_limit.answer(ticket, &uuid, bytes, free_bytes, epoch);
                }
                ControllerMessage::Reading(reading) => nvml::store_reading(&reading),
                ControllerMessage::Gpus { first, total, gpus } => {
                    self.own.gpus.take(first, total, &gpus);
                }
                ControllerMessage::Order { order, action, decided_ms } => {
                    self.execute(order, action, decided_ms);
                }
            }
        }
    }

    /// Executes an order, and reports its outcome.
    fn execute(&mut self, order: u64, action: Action, decided_ms: u64) {
        // Send new hazards first, so that the controller knows them when it reads the report.
        self.tell_hazards();
        let is_hold = matches!(action, Action::HoldAllocations { .. });
        if is_hold {
            self.hold = AllocationHold::Now;
        }
        let start_us = sys::now_us();
        let (outcome, cuda_error) = self.machine.obey(&mut self.own, action, decided_ms);
        let now_us = sys::now_us();
        self.heard = true;
        self.tell_hazards();
        let report = AgentMessage::Report {
            order,
            outcome,
            phase: self.machine.phase(),
            cuda_error,
            elapsed_us: now_us.saturating_sub(start_us),
            swappable_bytes: self.page.swappable_bytes.load(Ordering::Relaxed),
            copied_out_bytes: self.page.copied_out_bytes.load(Ordering::Relaxed),
            unchanged_bytes: swap::unchanged_bytes(),
            zero_bytes: swap::zero_bytes(),
            local_memory_bytes: swap::local_memory::released_bytes(),
        };
        self.link.send(now_us, &report);
        // Query the GPUs only after the report was sent, because the controller waits for the
        // report.
        if is_hold && self.machine.phase() == Phase::Open {
            self.page.note(ProcessFlags::ONE_GPU, host::sees_one_gpu());
        }
    }

    /// Samples the threads to find calls that block inside the driver. Such a thread counts as a
    /// waiting caller: see [`blocked`].
    fn look_at_threads(&mut self) {
        let now_us = sys::now_us();
        match self.machine.phase() {
            Phase::Checkpointed => {
                self.own.watch.look(now_us);
            }
            Phase::Open if self.own.watch.settle(now_us) => {
                self.page.add_hazards(Hazards::HIDDEN_WAY);
            }
            _ => {}
        }
    }

    fn tell(&mut self) {
        if !self.link.is_welcomed() {
            return;
        }
        self.tell_hazards();
        self.tell_want();
        self.tell_vram_requests();
        if nvml::take_asked() {
            self.link.send(sys::now_us(), &AgentMessage::AskReadings);
        }
        let (now_us, waiters) = (sys::now_us(), self.waiters());
        let generation = self.page.generation.load(Ordering::SeqCst);
        let due = self.wake_sent.is_none_or(|(told, at_us)| {
            told != generation || now_us.saturating_sub(at_us) >= WAKE_REPEAT_MS * 1_000
        });
        let held = self.machine.phase() != Phase::Open || self.machine.allocations_held();
        if waiters > 0 && held && due {
            // The driver's state is queried only if the program has begun to exit, or at a repeated
            // Wake. Without a Wake the process requests no VRAM.
            let repeated = self.wake_sent.is_some_and(|(told, _)| told == generation);
            if (exit::has_begun() || repeated) && self.machine.has_ended(&mut self.own) {
                return;
            }
            self.wake_sent = Some((generation, now_us));
            let wake = AgentMessage::Wake {
                generation,
                waiters,
                hook: match self.page.count_waiters(now_us) {
                    0 => 0,
                    _ => PROCESS.waiting_hook.load(Ordering::Relaxed),
                },
            };
            self.link.send(now_us, &wake);
        }
    }

    /// Reports to the controller that an allocation waits for free VRAM, or that a reported wait
    /// has ended.
    fn tell_want(&mut self) {
        let case = PROCESS.oom_wait.case();
        if let Some((ticket, _)) = self.want_sent
            && case.is_none_or(|case| case.ticket != ticket)
        {
            self.want_sent = None;
            let served = PROCESS.oom_wait.was_served(ticket);
            self.link.send(sys::now_us(), &AgentMessage::AllocWaitDone { ticket, served });
        }
        let Some(PendingAlloc { ticket, want, attempts, asked: true }) = case else { return };
        if self.want_sent != Some((ticket, attempts)) {
            self.want_sent = Some((ticket, attempts));
            let AllocRequest { bytes, uuid } = want;
            let message = AgentMessage::AllocWait { ticket, bytes, uuid, attempts };
            self.link.send(sys::now_us(), &message);
        }
    }

    /// Sends two kinds of messages about VRAM allowances to the controller: new requests, and the
    /// confirmation that the last reply was used.
    fn tell_vram_requests(&mut self) {
        // Order: VramTaken ends the service of a request that was sent earlier.
        if PROCESS.vram_limit.was_taken() {
            self.link.send(sys::now_us(), &AgentMessage::VramTaken);
        }
        while let Some(request) = PROCESS.vram_limit.next_request() {
            self.link.send(sys::now_us(), &request);
        }
    }

    fn tell_hazards(&mut self) {
        let hazards = self.page.hazards();
        if hazards != self.told_hazards && self.link.is_welcomed() {
            self.told_hazards = hazards;
            self.link.send(sys::now_us(), &AgentMessage::Notice { hazards });
        }
    }

    /// Opens or restores the process without the controller if a response of the controller is
    /// overdue.
    fn look_after(&mut self) {
        let connected = self.link.is_welcomed();
        // Without a controller no VRAM is granted to other processes. If a controller has paused
        // allocations and ended, the next controller ends the pause, or the watchdog does.
        if self.link.is_alone() && self.hold == AllocationHold::AtStart {
            self.machine.release_allocations(&mut self.own);
        }
        let situation = GateActivity {
            waiters: self.waiters() > 0,
            phase: self.machine.phase(),
            allocations_held: self.machine.allocations_held(),
            connected,
            heard: core::mem::take(&mut self.heard),
        };
        if self.silence.is_too_long(sys::now_us(), situation)
            && self.machine.restore_self(&mut self.own)
        {
            // If the controller was only too busy to respond, it receives the phase with the next
            // Hello.
            self.link.lose(sys::now_us());
        }
    }

    /// Frees unneeded host memory, and continues the prefault. Begins 2 s after a restore, so that
    /// waiting calls are served first. Works in small parts, so that the agent reads orders in
    /// between.
    fn tidy(&mut self) {
        const PAUSE_US: u64 = 2_000_000;
        // Interval while retained host copies exist, because the application may need the host
        // memory.
        const LOOK_US: u64 = 250_000;
        // Interval while pages are being faulted in.
        const SOON_US: u64 = 20_000;
        if self.machine.phase() != Phase::Open {
            (self.tidy_us, self.frees_all) = (None, false);
            return;
        }
        let now_us = sys::now_us();
        match self.tidy_us {
            None => self.tidy_us = Some(now_us + PAUSE_US),
            Some(due_us) if now_us >= due_us => {
                let step = match swap::go_on_preparing() {
                    true => swap::PrefaultStep::Soon,
                    false => swap::go_on_prefaulting_host_pool(),
                };
                self.tidy_us = Some(match step {
                    swap::PrefaultStep::Soon => now_us + SOON_US,
                    swap::PrefaultStep::Now => now_us,
                    swap::PrefaultStep::Over => match swap::tidy(self.frees_all) {
                        swap::TrimResult::Part => now_us,
                        swap::TrimResult::Kept => now_us + LOOK_US,
                        swap::TrimResult::All => {
                            self.frees_all = false;
                            u64::MAX
                        }
                    },
                });
            }
            Some(_) => {}
        }
    }

    fn take_note(&mut self) {
        let copied_out = self.machine.phase() == Phase::CopiedOut && self.waiters() == 0;
        let held = self.machine.allocations_held();
        if self.released.is_due(sys::now_us(), copied_out, held) {
            swap::absorb_scrub_stall();
        }
    }

    fn waiters(&self) -> u32 {
        let blocked = self.machine.phase() == Phase::Checkpointed && self.own.watch.has_blocked();
        self.page.count_waiters(sys::now_us()).saturating_add(u32::from(blocked))
    }

    fn patience_ms(&self) -> u64 {
        // Interval at which the agent checks whether a blocked thread has continued after the
        // restore.
        const SETTLES_MS: u64 = 50;
        if self.more_asked {
            return 0;
        }
        let now_us = sys::now_us();
        let tidy_ms = self.tidy_us.map_or(u64::MAX, |due| due.saturating_sub(now_us) / 1_000);
        let note_ms = self.released.patience_ms(now_us);
        let link_ms = self.link.patience_ms(now_us).min(tidy_ms).min(note_ms);
        let is_open = self.machine.phase() == Phase::Open;
        if is_open && self.own.watch.is_settling() {
            return link_ms.min(SETTLES_MS);
        }
        let open = is_open && !self.machine.allocations_held();
        // While the published number of waiters is above 0, the agent counts again at this
        // interval, because a wait may no longer count.
        if open && !self.page.may_have_waiters() { link_ms } else { link_ms.min(WAKE_REPEAT_MS) }
    }
}

/// Whether a message orders a pause of allocations. The agent accepts this order even before the
/// Welcome, because the Welcome would otherwise let allocations pass. It accepts no other order
/// before the Welcome.
fn is_hold(message: &ControllerMessage) -> bool {
    matches!(message, ControllerMessage::Order { action: Action::HoldAllocations { .. }, .. })
}

fn hello(page: &CounterPage, phase: Phase) -> AgentMessage {
    AgentMessage::Hello {
        version: WIRE_VERSION,
        pid_in_namespace: sys::getpid(),
        phase,
        generation: page.generation.load(Ordering::SeqCst),
        driver_version: host::driver_version(),
        hazards: page.hazards(),
        abilities: ABILITIES,
        swappable_bytes: page.swappable_bytes.load(Ordering::Relaxed),
        copied_out_bytes: page.copied_out_bytes.load(Ordering::Relaxed),
        local_memory_bytes: swap::local_memory::released_bytes(),
    }
}
