//! Tests of processes that do not pause their allocations as ordered, and of the time for which
//! other containers wait for them.

use affinode_proto::{
    state::State,
    wire::{
        Phase, ProcessFlags,
        message::{Action, AgentMessage, ControllerMessage, Outcome},
    },
};

use super::{
    super::{Effect, Input, Millis, ProcessId, holds::HoldRecord, input::SwapStatus},
    world::{Host, World},
};

/// Reaction of a simulated process to orders to pause its allocations.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Manner {
    /// The process pauses its allocations.
    Done,
    /// The process reports Busy at once.
    Busy,
    /// The process reports Busy after this time, in milliseconds.
    BusyAfter(Millis),
    /// The process sends no report.
    Silent,
    /// The process reports Busy after 400 ms to the first order, and sends no report on the second.
    /// It obeys the third, and reports Busy at once to the fourth. Then the sequence repeats.
    Alternates,
    /// The process reports Busy to each order in the first minute. After that it pauses its
    /// allocations as ordered.
    BusyForAMinute,
    /// A new process of the container reports Busy each time.
    NewEachTime,
}

/// A simulated process whose reports on orders the test chooses.
struct Liar {
    id: ProcessId,
    manner: Manner,
    holds: usize,
    messages: usize,
    /// Reports that the process will send later. Each entry contains the time, and the number of
    /// the order to which the process then reports Busy.
    later: Vec<(Millis, u64)>,
}

impl Liar {
    fn join(world: &mut World, manner: Manner) -> Liar {
        world.join(1);
        let id = ProcessId(world.next);
        Liar { id, manner, holds: 0, messages: 0, later: Vec::new() }
    }

    /// Handles the messages of the process, and the messages that its reports cause, until no
    /// message is left.
    fn act(&mut self, world: &mut World) {
        const MAX_ROUNDS: usize = 1_000;
        let mut taken = 0;
        while let Some(message) = world.agents.get_mut(&self.id).unwrap().inbox.pop_front() {
            taken += 1;
            assert!(taken < MAX_ROUNDS, "messages and reports never end");
            match message {
                ControllerMessage::Welcome { .. } => {
                    world.agents.get_mut(&self.id).unwrap().welcomed = true;
                }
                ControllerMessage::Order { order, action, .. } => self.told(world, order, action),
                _ => {}
            }
        }
        self.messages += taken;
        let now = world.now;
        let due: Vec<u64> = self.later.extract_if(.., |(at, _)| *at <= now).map(|l| l.1).collect();
        due.into_iter().for_each(|order| report(world, self.id, order, Outcome::Busy));
    }

    fn told(&mut self, world: &mut World, order: u64, action: Action) {
        if !matches!(action, Action::HoldAllocations { .. }) {
            return report(world, self.id, order, Outcome::Done);
        }
        self.holds += 1;
        let manner = match self.manner {
            Manner::Alternates => {
                [Manner::Busy, Manner::BusyAfter(400), Manner::Silent, Manner::Done][self.holds % 4]
            }
            Manner::BusyForAMinute if world.now > 60_000 => Manner::Done,
            Manner::BusyForAMinute | Manner::NewEachTime => Manner::BusyAfter(500),
            manner => manner,
        };
        match manner {
            Manner::Done => report(world, self.id, order, Outcome::Done),
            Manner::Busy => report(world, self.id, order, Outcome::Busy),
            Manner::BusyAfter(ms) => self.later.push((world.now + ms, order)),
            _ => {}
        }
    }
}

fn report(world: &mut World, id: ProcessId, order: u64, outcome: Outcome) {
    let report = SwapStatus::default().report(order, outcome, Phase::Open, 0);
    world.feed(Input::Message(id, report));
}

/// Runs all steps of the process `victim` and of NVML that take no time.
fn serve(world: &mut World, victim: ProcessId) {
    for _ in 0..20 {
        world.answer_question();
        world.work(victim);
    }
}

/// Measures the durations of wakes, in milliseconds, while another process on the GPU reacts in
/// this manner to orders to pause its allocations. For ten minutes, a container is repeatedly
/// offloaded when idle and then called.
fn wakes_beside(mut world: World, manner: Manner) -> Vec<Millis> {
    const STEP_MS: Millis = 20;
    const TEN_MINUTES_MS: Millis = 600_000;
    let victim = world.running(0, 300);
    world.settle();
    assert_eq!(world.agents[&victim].phase, Phase::Checkpointed);
    let mut liar = Liar::join(&mut world, manner);
    let (mut waits_ms, mut messages) = (Vec::new(), 0);
    while world.now < TEN_MINUTES_MS {
        let called = world.now;
        loop {
            world.call(victim);
            liar.act(&mut world);
            serve(&mut world, victim);
            if world.agents[&victim].phase == Phase::Open {
                break;
            }
            assert!(world.now - called < 120_000, "{manner:?}: still offloaded after two minutes");
            world.tick_after(STEP_MS);
        }
        waits_ms.push(world.now - called);
        while world.agents[&victim].phase != Phase::Checkpointed {
            world.tick_after(STEP_MS);
            liar.act(&mut world);
            serve(&mut world, victim);
        }
        if manner == Manner::NewEachTime {
            messages += liar.messages;
            world.exit(liar.id);
            liar = Liar::join(&mut world, manner);
        }
        (0..20).for_each(|_| world.tick_after(100));
    }
    messages += liar.messages;
    // For each wake the process may receive one order to hold, one order to release, and the
    // Welcome.
    let most = 5 * waits_ms.len();
    assert!(messages <= most, "{messages} messages for {} wakes", waits_ms.len());
    waits_ms
}

/// Returns the longest wake, the sum of all other wakes, and the number of wakes. Durations are in
/// milliseconds.
fn longest_and_rest(waits_ms: &[Millis]) -> (Millis, Millis, usize) {
    let longest = waits_ms.iter().copied().max().unwrap();
    (longest, waits_ms.iter().sum::<Millis>() - longest, waits_ms.len())
}

/// A process of another container reports Busy to each order to pause its allocations, at once or
/// late. It must delay the wakes of others only once, by at most 1 s.
#[test]
fn busy_for_ten_minutes_delays_wakes_once() {
    let undelayed = longest_and_rest(&wakes_beside(World::new(2), Manner::Done));
    for manner in [
        Manner::Busy,
        Manner::BusyAfter(10),
        Manner::BusyAfter(500),
        Manner::BusyAfter(890),
        Manner::BusyAfter(5_000),
        Manner::BusyForAMinute,
        Manner::Silent,
    ] {
        let (longest, rest, wakes) = longest_and_rest(&wakes_beside(World::new(2), manner));
        println!(
            "{manner:?}: longest wake {longest} ms, the other {} together {rest} ms",
            wakes - 1
        );
        assert!(wakes > 150, "{manner:?}: {wakes} wakes");
        assert!(longest <= undelayed.0 + 1_000, "{manner:?}: {longest} ms");
        // The waits for refusals become shorter. Together they take about 200 ms.
        assert!(rest <= undelayed.1 + 300, "{manner:?}: {rest} ms after the first");
    }
}

/// A container's process pauses its allocations only sometimes, or the container uses a new process
/// each time. It must delay each wake of another container only briefly.
#[test]
fn changing_refusals_delay_wakes_briefly() {
    for manner in [Manner::Alternates, Manner::NewEachTime] {
        let mut waits_ms = wakes_beside(World::new(2), manner);
        let (longest, rest, wakes) = longest_and_rest(&waits_ms);
        println!(
            "{manner:?}: longest wake {longest} ms, the other {} together {rest} ms",
            wakes - 1
        );
        assert!(longest <= 1_000, "{manner:?}: {longest} ms");
        waits_ms.sort_unstable();
        // The controller waits only briefly for the container: for periods of one, two, four and
        // eight minutes.
        let tenth = waits_ms[waits_ms.len() - 10];
        assert!(tenth <= 110, "{manner:?}: ten wakes take {tenth} ms and longer");
    }
}

/// A process that reports Busy uses another GPU but sees several GPUs, so it may create a context
/// on the grant's GPU. It must delay wakes only once.
#[test]
fn busy_on_another_gpu_delays_wakes_once() {
    let mut world = World::new(2);
    world.two_gpus = true;
    let (longest, rest, _) = longest_and_rest(&wakes_beside(world, Manner::BusyAfter(500)));
    println!("on another GPU: longest wake {longest} ms, the others together {rest} ms");
    assert!(longest <= 1_000 && rest <= 300, "{longest} ms, then {rest} ms");
}

/// The processes of a container register one after the other, each during a proof of free VRAM.
/// They must delay a wake only briefly.
#[test]
fn joins_during_proofs_delay_a_wake_briefly() {
    const NVML_MS: Millis = 40;
    let mut world = World::new(2);
    let victim = world.running(0, 300);
    world.settle();
    let mut waits_ms = Vec::new();
    for _ in 0..10 {
        let called = world.now;
        world.call(victim);
        let mut asked: Option<Millis> = None;
        while world.agents[&victim].phase != Phase::Open {
            assert!(world.now - called < 60_000, "still offloaded after a minute");
            world.work(victim);
            asked = asked.or((!world.questions.is_empty()).then_some(world.now));
            if asked.is_some_and(|at| world.now - at >= NVML_MS) {
                world.answer_question();
                asked = None;
            }
            world.join(1);
            let id = ProcessId(world.next);
            while !world.agents[&id].inbox.is_empty() {
                world.work(id);
            }
            world.tick_after(20);
            world.exit(id);
        }
        waits_ms.push(world.now - called);
        world.settle();
    }
    println!("beside processes that join all the time: {waits_ms:?} ms");
    assert!(waits_ms.iter().all(|wait| *wait <= 500), "{waits_ms:?}");
    // The controller waits for the container's processes for shorter times, and finally not at all.
    assert!(waits_ms[5..].iter().all(|wait| *wait <= NVML_MS), "{waits_ms:?}");
}

/// A process registers after the NVML reading for a proof was requested. The reading may miss the
/// allocations of that process, so NVML must be read again.
#[test]
fn newcomer_during_a_proof_is_proven_anew() {
    let mut world = World::new(2);
    let victim = world.running(0, 600);
    world.settle();
    world.call(victim);
    assert_eq!(world.questions.len(), 1, "a reading of NVML is requested");
    let free = world.gpus();
    let Some(Effect::Prove { key: owner, number, .. }) = world.questions.pop_front() else {
        panic!("no proof");
    };
    // The process allocated its memory while no controller ran, and registers only now.
    world.join(1);
    let newcomer = ProcessId(world.next);
    world.agents.get_mut(&newcomer).unwrap().size = 600;
    world.feed(Input::Proven(owner, number, Ok(free)));
    assert_eq!(world.state(0), State::Queued, "the earlier reading of NVML is no proof");
    while !world.agents[&newcomer].inbox.is_empty() {
        world.work(newcomer);
    }
    serve(&mut world, victim);
    assert_eq!(world.agents[&victim].phase, Phase::Checkpointed);
    world.exit(newcomer);
    world.settle();
    assert!(!world.agents[&victim].wants, "a call of the victim still waits");
}

/// Only processes that can allocate VRAM of the grant's GPU must be ordered to pause their
/// allocations.
#[test]
fn holds_are_asked_on_the_device_concerned() {
    for (notes, read, asked) in [
        (ProcessFlags::ONE_GPU, true, false),
        // NVML shows no memory of the process yet, so the process may be about to allocate on this
        // GPU.
        (ProcessFlags::ONE_GPU, false, true),
        // The process sees both GPUs.
        (ProcessFlags::default(), true, true),
    ] {
        let mut world = World::new(2);
        world.two_gpus = true;
        let victim = world.running(0, 300);
        let mut other = Liar::join(&mut world, Manner::Done);
        let agent = world.agents.get_mut(&other.id).unwrap();
        (agent.notes, agent.gpu, agent.fixed) = (notes, 1, true);
        agent.size = if read { 100 } else { 0 };
        while world.agents[&victim].phase != Phase::Checkpointed {
            world.tick();
            other.act(&mut world);
            serve(&mut world, victim);
        }
        world.call(victim);
        other.act(&mut world);
        serve(&mut world, victim);
        other.act(&mut world);
        assert_eq!(world.agents[&victim].phase, Phase::Open, "{notes:?}, {read}");
        assert_eq!(other.holds > 0, asked, "{notes:?}, {read}");
    }
}

/// The controller gets no CPU time for some time. It then sees a process's report and the missed
/// deadline in the same step. It must not count the missed deadline as a refusal of the process.
#[test]
fn stalled_controller_blames_no_process() {
    let mut world = World::new(2);
    let victim = world.running(0, 300);
    world.settle();
    let mut other = Liar::join(&mut world, Manner::Done);
    other.act(&mut world);
    for _ in 0..3 {
        world.call(victim);
        // The process has reported meanwhile, but the check for overdue reports comes first.
        world.tick_after(2_500);
        let proof = |question: &Effect| matches!(question, Effect::Prove { .. });
        assert!(!world.questions.iter().any(proof), "the report is awaited");
        other.act(&mut world);
        serve(&mut world, victim);
        assert_eq!(world.agents[&victim].phase, Phase::Open);
        while world.agents[&victim].phase != Phase::Checkpointed {
            world.tick();
            other.act(&mut world);
            serve(&mut world, victim);
        }
    }
    assert_eq!(world.process(other.id).holds.record, HoldRecord::default());
}

/// A process waits for VRAM, is ordered to try again, and does not allocate. It repeats this with
/// the same ticket, with another ticket, or after a pause. It must delay the wakes of others less
/// each time.
#[test]
fn vain_allocations_delay_wakes_less_and_less() {
    for (same_ticket, idles_ms) in [(true, 0), (true, 300), (false, 300), (false, 9_000)] {
        let mut world = World::new(2);
        let victim = world.running(0, 300);
        world.settle();
        let liar = Liar::join(&mut world, Manner::Done).id;
        let (mut ticket, mut told, mut held_ms) = (1, None, 0);
        let mut waits_ms = Vec::new();
        let want =
            |ticket| AgentMessage::AllocWait { ticket, bytes: 10, uuid: [7; 16], attempts: 0 };
        world.feed(Input::Message(liar, want(ticket)));
        while world.now < 100_000 {
            let called = world.now;
            while world.agents[&victim].phase != Phase::Open {
                assert!(world.now - called < 120_000, "still offloaded after two minutes");
                world.call(victim);
                serve(&mut world, victim);
                while let Some(message) = world.agents.get_mut(&liar).unwrap().inbox.pop_front() {
                    match message {
                        ControllerMessage::AllocGrant { granted: true, .. } => {
                            told = Some(world.now)
                        }
                        ControllerMessage::AllocGrant { granted: false, .. } => {
                            world.feed(Input::Message(liar, want(ticket)));
                        }
                        ControllerMessage::Order { order, .. } => {
                            report(&mut world, liar, order, Outcome::Done);
                        }
                        _ => {}
                    }
                }
                if told.take_if(|at| world.now - *at >= idles_ms).is_some() {
                    if !same_ticket {
                        let over = AgentMessage::AllocWaitDone { ticket, served: true };
                        world.feed(Input::Message(liar, over));
                        ticket += 1;
                    }
                    world.feed(Input::Message(liar, want(ticket)));
                }
                world.tick_after(20);
            }
            waits_ms.push(world.now - called);
            held_ms += (world.now - called).saturating_sub(100);
            while world.agents[&victim].phase != Phase::Checkpointed {
                world.tick_after(20);
                serve(&mut world, victim);
            }
        }
        let longest = waits_ms.iter().max().unwrap();
        let wakes = waits_ms.len();
        println!(
            "{same_ticket}, {idles_ms}: longest {longest} ms, {held_ms} ms beyond 0.1 s in {wakes} wakes"
        );
        assert!(*longest <= 10_500, "{longest} ms");
        assert!(held_ms <= 20_000, "{held_ms} ms of 100 s");
    }
}

/// An allocation waits for VRAM in a container that has another process, which is neither resident
/// nor offloaded. The allocation cannot be served, and must not keep its VRAM from other waiters.
#[test]
fn grant_that_nothing_uses_ends() {
    let mut world = World::new(2);
    let victim = world.running(0, 300);
    world.settle();
    assert_eq!(world.agents[&victim].phase, Phase::Checkpointed);
    let mut waiter = Liar::join(&mut world, Manner::Done);
    let mut stuck = Liar::join(&mut world, Manner::Silent);
    for liar in [&mut waiter, &mut stuck] {
        liar.act(&mut world);
    }
    world.process_mut(stuck.id).agent.phase = Phase::CopyingOut;
    let want = AgentMessage::AllocWait { ticket: 1, bytes: 800, uuid: [7; 16], attempts: 0 };
    world.feed(Input::Message(waiter.id, want));
    let called = world.now;
    while world.agents[&victim].phase != Phase::Open {
        assert!(world.now - called < 40_000, "the victim is still offloaded");
        world.call(victim);
        serve(&mut world, victim);
        waiter.act(&mut world);
        world.tick_after(20);
    }
    assert!(world.process(waiter.id).alloc_wait.is_some(), "the allocation still waits");
}

/// An allocation waits for VRAM of a container in use, and its library does not keep to the time
/// limit of the wait. The restore of another container waits behind it. This restore must
/// be served soon after the time limit.
#[test]
fn allocation_waits_no_longer_than_its_policy() {
    const TIMEOUT_MS: Millis = 120_000;
    let mut world = World::new(3);
    let victim = world.running(0, 300);
    world.settle();
    assert_eq!(world.agents[&victim].phase, Phase::Checkpointed);
    let mut waiter = Liar::join(&mut world, Manner::Done);
    waiter.act(&mut world);
    let busy = world.running(2, 300);
    world.agents.get_mut(&busy).unwrap().inflight = 1;
    let want = AgentMessage::AllocWait { ticket: 1, bytes: 800, uuid: [7; 16], attempts: 0 };
    world.feed(Input::Message(waiter.id, want));
    let called = world.now;
    while world.agents[&victim].phase != Phase::Open {
        assert!(world.now - called < TIMEOUT_MS + 5_000, "the victim is still offloaded");
        world.call(victim);
        serve(&mut world, victim);
        waiter.act(&mut world);
        world.tick_after(20);
    }
    assert!(world.now - called >= TIMEOUT_MS, "the allocation was first in the queue");
    assert!(world.process(waiter.id).alloc_wait.is_none(), "its wait has ended");
}

/// Measures how long the restore of `victim` takes, in milliseconds, while another process on its
/// GPU sends no reports.
fn waits_for_silence(world: &mut World, victim: ProcessId) -> Millis {
    while world.agents[&victim].phase != Phase::Checkpointed {
        world.tick();
        serve(world, victim);
    }
    let mut liar = Liar::join(world, Manner::Silent);
    liar.act(world);
    let called = world.now;
    while world.agents[&victim].phase != Phase::Open {
        world.call(victim);
        liar.act(world);
        serve(world, victim);
        world.tick_after(20);
    }
    world.exit(liar.id);
    world.now - called
}

/// One process sends no reports. Other processes of its container must then be awaited only
/// briefly: first for a period of one minute, next for a period of two minutes.
#[test]
fn silence_of_one_is_held_against_its_container() {
    let mut world = World::new(2);
    let victim = world.running(0, 300);
    let mut waits_ms = Vec::new();
    for pause_ms in [0, 30_000, 31_000, 61_000, 61_000] {
        (0..pause_ms / 100).for_each(|_| world.tick_after(100));
        waits_ms.push(waits_for_silence(&mut world, victim));
    }
    let long = waits_ms.iter().map(|wait| *wait > 500).collect::<Vec<_>>();
    assert_eq!(long, [true, false, true, false, true], "{waits_ms:?}");
}

/// A process that exits while its report is awaited must cause no delay. The same applies to a
/// process with invalid counters.
#[test]
fn gone_or_distrusted_process_is_not_awaited() {
    for scribbles in [true, false] {
        let mut world = World::new(2);
        let victim = world.running(0, 300);
        world.settle();
        let mut other = Liar::join(&mut world, Manner::Silent);
        other.act(&mut world);
        if scribbles {
            world.feed(Input::BadPage(other.id, "scribbled".into()));
        }
        world.call(victim);
        other.act(&mut world);
        serve(&mut world, victim);
        assert_eq!(other.holds, 1, "the process is ordered to hold");
        if !scribbles {
            assert_eq!(
                world.agents[&victim].phase,
                Phase::Checkpointed,
                "the grant waits for the process"
            );
            world.exit(other.id);
            serve(&mut world, victim);
        }
        assert_eq!(world.agents[&victim].phase, Phase::Open, "{scribbles}");
    }
}

/// A process starts in a partly offloaded container. It must allocate no VRAM before the
/// container's other processes are restored.
#[test]
fn new_sibling_holds_until_the_rest_is_back() {
    let mut world = World::new(1);
    let ids = [world.running(0, 300), world.running(0, 300)];
    world.settle();
    world.others = 900;
    world.join(0);
    let sibling = ProcessId(world.next);
    while !world.agents[&sibling].inbox.is_empty() {
        world.work(sibling);
    }
    (0..20).for_each(|_| world.pass());
    assert_eq!(world.agents[&ids[0]].phase, Phase::Checkpointed, "there is no free VRAM");
    assert!(world.agents[&sibling].held);
    world.others = 0;
    (0..20).for_each(|_| world.pass());
    assert!(!world.agents[&sibling].held);
}
