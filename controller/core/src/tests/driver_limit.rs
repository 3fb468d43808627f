//! Tests of the orders about the VRAM limit that the driver enforces. Its limit must be lifted before
//! each offload, stay lifted while the container is offloaded, and be set again after the restore.

use std::ops::{Deref, DerefMut};

use affinode_proto::{
    state::State,
    wire::message::{ControllerMessage, Outcome},
};

use super::{
    super::{
        ContainerSpec, Effect, Input, ProcessId, Settings,
        driver_limit::{DriverLimit, DriverLimitOrder, DriverLimitOutcome},
        harness::{Bench, Host, agent::Agent, answer, key},
        host_memory::SurveyedMemory,
        input::{CommandId, Request},
        policy::{Policies, Policy},
    },
    world::GPU,
};

const LIMIT: u64 = 1 << 29;
const OTHER_LIMIT: u64 = 1 << 28;
const TOTAL: u64 = 1 << 30;
const ID: ProcessId = ProcessId(1);

/// A step whose place in the order of effects matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Limit(DriverLimit),
    Prove,
}

struct LimitedNode {
    bench: Bench,
    steps: Vec<Step>,
    orders: Vec<DriverLimitOrder>,
    outcome: DriverLimitOutcome,
}

impl Deref for LimitedNode {
    type Target = Bench;

    fn deref(&self) -> &Bench {
        &self.bench
    }
}

impl DerefMut for LimitedNode {
    fn deref_mut(&mut self) -> &mut Bench {
        &mut self.bench
    }
}

impl Host for LimitedNode {
    fn execute(&mut self, effect: Effect) -> Option<Input> {
        match effect {
            Effect::LimitInDriver(order) => {
                self.steps.push(Step::Limit(order.limit));
                self.orders.push(order.clone());
                return Some(Input::DriverLimited(order.key, self.outcome.clone()));
            }
            Effect::Prove { .. } => self.steps.push(Step::Prove),
            _ => {}
        }
        self.deliver(effect);
        None
    }
}

fn settings(limit_bytes: u64) -> Settings {
    let node = Policy { vram_limit_bytes: limit_bytes, ..Policy::default() };
    Settings { policies: Policies { node, ..Policies::default() }, ..Settings::default() }
}

impl LimitedNode {
    /// A node whose only container has the limit `LIMIT` and one process.
    fn new(outcome: DriverLimitOutcome) -> LimitedNode {
        LimitedNode::of_user(outcome, None)
    }

    /// Like [`LimitedNode::new`]. `job_user`: the container is a job of this user.
    fn of_user(outcome: DriverLimitOutcome, job_user: Option<u32>) -> LimitedNode {
        let bench = Bench::new(settings(LIMIT), &[GPU], TOTAL);
        let mut node = LimitedNode { bench, steps: Vec::new(), orders: Vec::new(), outcome };
        let cgroups_path = "/pod/c".into();
        let spec = ContainerSpec { cgroups_path, job_user, ..ContainerSpec::default() };
        node.feed(Input::Announced(Box::new(spec), key(0)));
        node.tick();
        assert_eq!(node.steps, [], "no process is known");
        let agent = Agent { pid: 7, size: LIMIT, calls: 1, ..Agent::default() };
        node.agents.insert(ID, agent);
        node.hello(ID);
        node
    }

    fn tick(&mut self) {
        self.now += 60;
        self.read_counters();
        self.feed(Input::Gpus(Ok(self.gpus())));
        self.feed(Input::Tick);
    }

    /// Makes the container move, and returns the steps until it is in this state.
    fn moved(&mut self, request: Request, wanted: State) -> Vec<Step> {
        self.steps.clear();
        self.feed(Input::Command(CommandId(1), key(0), request));
        for _ in 0..100 {
            while let Some(ControllerMessage::Order { order, action, .. }) =
                self.agents.get_mut(&ID).and_then(|agent| agent.inbox.pop_front())
            {
                self.agents.get_mut(&ID).unwrap().execute(action);
                self.report(ID, order, Outcome::Done, 0);
            }
            while let Some(question) = self.questions.pop_front() {
                let gpus = Ok(self.gpus());
                self.feed(answer(question, gpus, Ok(SurveyedMemory::default())));
            }
            self.tick();
            if self.node.state(&key(0)) == Some(wanted) {
                return self.steps.clone();
            }
        }
        panic!("the container stays {:?}", self.node.state(&key(0)));
    }
}

#[test]
fn first_registration_sets_the_drivers_limit() {
    let node = LimitedNode::new(DriverLimitOutcome::Done);
    let order = &node.orders[0];
    assert_eq!(node.steps, [Step::Limit(DriverLimit::Set(LIMIT))]);
    assert_eq!((order.process.unwrap().0, order.cgroups_path.as_str()), (7, "/pod/c"));
    assert_eq!((order.gpus[0].uuid.as_str(), order.gpus[0].bytes), (GPU, TOTAL));
    assert!(node.node.has_driver_limit(&key(0)));
}

#[test]
fn drivers_limit_is_lifted_until_the_restore() {
    let mut node = LimitedNode::new(DriverLimitOutcome::Done);
    let set = Step::Limit(DriverLimit::Set(LIMIT));
    let lifted = Step::Limit(DriverLimit::Lifted);
    for _ in 0..2 {
        assert_eq!(node.moved(Request::Offload, State::Offloaded), [lifted]);
        assert_eq!(node.moved(Request::Restore, State::Active), [Step::Prove, set]);
    }
    assert!(node.node.has_driver_limit(&key(0)));
}

/// The controller is replaced while the container is offloaded. The next controller must lift the
/// limit and not set it: the process may restore itself if that controller ends too.
#[test]
fn next_controller_sets_no_limit_while_offloaded() {
    let mut first = LimitedNode::new(DriverLimitOutcome::Done);
    first.moved(Request::Offload, State::Offloaded);
    let mut next = LimitedNode::new(DriverLimitOutcome::Done);
    next.feed(Input::Withdrawn(key(0)));
    next.steps.clear();
    let spec = ContainerSpec { cgroups_path: "/pod/c".into(), ..ContainerSpec::default() };
    next.feed(Input::Announced(Box::new(spec), key(0)));
    let agent = first.agents.remove(&ID).unwrap();
    next.agents.insert(ID, agent);
    next.hello(ID);
    next.tick();
    assert_eq!(next.steps, [Step::Limit(DriverLimit::Lifted)]);
}

#[test]
fn drivers_limit_follows_the_policy() {
    let mut node = LimitedNode::new(DriverLimitOutcome::Done);
    node.steps.clear();
    for limit in [OTHER_LIMIT, 0, LIMIT] {
        node.feed(Input::Reconfigured(Box::new(settings(limit))));
        node.tick();
        node.tick();
    }
    node.feed(Input::Withdrawn(key(0)));
    let limits = [
        DriverLimit::Set(OTHER_LIMIT),
        DriverLimit::Removed,
        DriverLimit::Set(LIMIT),
        DriverLimit::Removed,
    ];
    assert_eq!(node.steps, limits.map(Step::Limit));
    assert!(!node.node.has_driver_limit(&key(0)));
}

#[test]
fn old_driver_gets_no_further_orders() {
    let mut node = LimitedNode::new(DriverLimitOutcome::TooOld);
    assert_eq!(node.moved(Request::Offload, State::Offloaded), []);
    assert_eq!(node.moved(Request::Restore, State::Active), [Step::Prove]);
    node.steps.clear();
    assert!(!node.node.has_driver_limit(&key(0)) && node.node.warnings(&key(0)).is_empty());
    // A driver that is replaced cannot be read meanwhile.
    node.feed(Input::Gpus(Err("reloaded".into())));
    node.tick();
    assert_eq!(node.steps, [Step::Limit(DriverLimit::Set(LIMIT))]);
}

/// A job is in a cgroup of its user, and could otherwise limit the user's other programs.
#[test]
fn job_gets_no_limit_in_the_driver() {
    let mut node = LimitedNode::of_user(DriverLimitOutcome::Done, Some(1000));
    node.tick();
    node.feed(Input::Withdrawn(key(0)));
    assert_eq!(node.steps, []);
}

#[test]
fn failed_driver_limit_is_a_warning() {
    let mut node = LimitedNode::new(DriverLimitOutcome::Failed("no permission".into()));
    assert!(node.node.warnings(&key(0))[0].contains("no permission"));
    assert_eq!(node.steps, [Step::Limit(DriverLimit::Set(LIMIT))]);
    assert_eq!(node.moved(Request::Offload, State::Offloaded).len(), 1, "it is offloaded anyway");
    // The order is repeated for a further process, and not before.
    (node.outcome, node.steps) = (DriverLimitOutcome::Done, Vec::new());
    node.tick();
    assert_eq!(node.steps, []);
    node.agents.insert(ProcessId(2), Agent { pid: 8, calls: 1, ..Agent::default() });
    node.hello(ProcessId(2));
    assert!(matches!(node.steps[..], [Step::Limit(_), ..]), "{:?}", node.steps);
}
