//! Tests the closing of the gate against one calling thread, in all interleavings of their steps.
//! The calling thread runs on another processor, which has a store buffer (x86). A signal can
//! interrupt this thread, and the signal's handler makes a call as well.
//!
//! The real [`OrderMachine`] closes the gate of a real counter page, so the tests cover the
//! machine's actual steps and their order. At each access of the machine to the page, the caller
//! may take steps, and stores of the caller may become visible. The caller reads the gate with the
//! same function as the thunk's slow path. If the machine lacks the fence, the seal, or the second
//! check of the counts, the tests find an error: an interleaving in which the process is locked
//! while a call is inside the driver.

use core::sync::atomic::Ordering;

use affinode_cuda_sys::hook::Class;
use affinode_cuda_sys::{process_state, result};
use affinode_proto::wire::Phase;
use affinode_proto::wire::counters::Gate;
use affinode_proto::wire::message::{Action, CopyOptions, Outcome};

use crate::agent::machine::{CallAdmission, DriverCall, Host, OrderMachine};
use crate::counters::tests::page;
use crate::counters::{CounterPage, ThreadSlot};
use crate::gate::{GateCheck, look};
use crate::swap::pending_work::GpuWork;

/// Decisions of one run, one for each fork. A fork is a point at which the run can go on in several
/// ways. All runs together take every decision.
#[derive(Default)]
struct Choices {
    /// For each fork, the choice taken and the number of choices.
    forks: Vec<(usize, usize)>,
    at: usize,
}

impl Choices {
    fn choose(&mut self, many: usize) -> usize {
        if many == 1 {
            return 0;
        }
        if self.at == self.forks.len() {
            self.forks.push((0, many));
        }
        let (taken, there) = self.forks[self.at];
        assert_eq!(there, many, "a repeated run has the same choices");
        self.at += 1;
        taken
    }

    /// Prepares the next run. False: all runs have been made.
    fn next(&mut self) -> bool {
        self.at = 0;
        while let Some((taken, many)) = self.forks.pop() {
            if taken + 1 < many {
                self.forks.push((taken + 1, many));
                return true;
            }
        }
        false
    }
}

/// Step that a call of the thread has reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Outside,
    Counted,
    /// The gate held the nested call. The call now checks whether the gate is sealed.
    Held,
    Inside,
    /// The call has returned, or the gate holds it.
    Over,
}

/// The safeguard that is left out in a run.
#[derive(Clone, Copy, PartialEq)]
enum Without {
    Nothing,
    Fence,
    Seal,
}

/// State of a run: one calling thread, and the process whose gate the machine closes.
struct World<'a> {
    page: &'a CounterPage,
    choices: &'a mut Choices,
    without: Without,
    /// Class of both calls, the nested and the outer one.
    class: Class,
    /// Values of the outer call's count that are still in the store buffer: only the calling thread
    /// sees them.
    buffered: Vec<u32>,
    outer: Step,
    /// Step of the signal handler's call. `None`: the signal has not arrived. It arrives at most
    /// once.
    nested: Option<Step>,
    signals: bool,
    driver_state: u32,
    touched: bool,
    now_us: u64,
    violated: bool,
}

impl World<'_> {
    fn slot(&self) -> &ThreadSlot {
        &self.page.slots[1]
    }

    fn own_count(&self) -> u32 {
        self.buffered.last().copied().unwrap_or(self.slot().inflight.load(Ordering::SeqCst))
    }

    fn store(&mut self, to: u32) {
        self.buffered.push(to);
    }

    fn make_visible(&mut self, stores: usize) {
        for store in self.buffered.drain(..stores) {
            self.page.slots[1].inflight.store(store, Ordering::SeqCst);
        }
    }

    /// Adds `one` to the counts for the nested call, with locked instructions.
    fn add(&mut self, one: u32) {
        self.make_visible(self.buffered.len());
        let slot = self.slot();
        if self.class.is_special() {
            slot.allocating.fetch_add(one, Ordering::SeqCst);
        }
        slot.inflight.fetch_add(one, Ordering::SeqCst);
    }

    /// Advances the run between two accesses of the machine to the page, by as many steps as
    /// `choices` decides. In each step, the caller advances, the signal arrives, or the oldest
    /// buffered store becomes visible.
    fn go_on(&mut self) {
        loop {
            self.violated |=
                self.touched && (self.outer == Step::Inside || self.nested == Some(Step::Inside));
            let in_handler = self.nested.is_some_and(|step| step != Step::Over);
            let can_signal = self.signals && self.nested.is_none() && self.outer != Step::Over;
            let can_step = match (in_handler, self.outer) {
                (true, _) => true,
                (false, step) => step != Step::Over,
            };
            let can_commit = !self.buffered.is_empty();
            let many =
                1 + usize::from(can_step) + usize::from(can_signal) + usize::from(can_commit);
            let mut chosen = self.choices.choose(many);
            if chosen == 0 {
                return;
            }
            chosen -= 1;
            if can_step {
                if chosen == 0 {
                    match self.nested {
                        Some(step) if in_handler => self.step_nested(step),
                        _ => self.step_outer(),
                    }
                    continue;
                }
                chosen -= 1;
            }
            if can_signal && chosen == 0 {
                self.nested = Some(Step::Outside);
            } else {
                self.make_visible(1);
            }
        }
    }

    /// Executes the next step of the outer call, on the thunk's fast path, with plain stores.
    fn step_outer(&mut self) {
        self.outer = match self.outer {
            Step::Outside => {
                self.store(self.own_count() + 1);
                Step::Counted
            }
            Step::Counted if look(self.page, Class::Work) == GateCheck::Passes => Step::Inside,
            _ => {
                self.store(self.own_count() - 1);
                Step::Over
            }
        };
    }

    /// Executes the next step of the nested call, on the slow path, with locked instructions and a
    /// check of the seal.
    fn step_nested(&mut self, step: Step) {
        let is_nested = self.own_count() > u32::from(step != Step::Outside);
        let next = match step {
            Step::Outside => {
                self.add(1);
                Step::Counted
            }
            Step::Counted if look(self.page, self.class) == GateCheck::Passes => Step::Inside,
            Step::Counted => Step::Held,
            Step::Held if is_nested && !self.page.is_sealed() => Step::Inside,
            _ => {
                self.add(u32::MAX);
                Step::Over
            }
        };
        self.nested = Some(next);
    }
}

impl Host for World<'_> {
    fn set_gate(&mut self, gate: Gate) {
        self.go_on();
        self.page.set_gate(gate);
    }
    fn set_phase(&mut self, _: Phase) {}
    fn next_generation(&mut self) {}
    fn fence(&mut self) -> bool {
        self.go_on();
        if self.without != Without::Fence {
            self.make_visible(self.buffered.len());
        }
        true
    }
    fn set_sealed(&mut self, sealed: bool) {
        self.go_on();
        if self.without != Without::Seal {
            self.page.set_sealed(sealed);
        }
    }
    fn drained(&mut self, calls: CallAdmission) -> bool {
        self.go_on();
        match calls {
            CallAdmission::All => self.page.drained(|slot| &slot.inflight),
            CallAdmission::Allocating => self.page.drained(|slot| &slot.allocating),
        }
    }
    fn has_waiters(&mut self) -> bool {
        false
    }
    fn sleep_us(&mut self, us: u64) {
        self.now_us += us;
    }
    fn now_us(&mut self) -> u64 {
        self.now_us
    }
    fn is_eligible(&mut self) -> bool {
        true
    }
    fn keeps_context(&mut self) -> bool {
        false
    }
    fn call(&mut self, call: DriverCall) -> Option<u32> {
        self.touched = call != DriverCall::Unlock;
        self.driver_state =
            if self.touched { process_state::LOCKED } else { process_state::RUNNING };
        self.go_on();
        Some(result::SUCCESS)
    }
    fn note_threads(&mut self) {}
    fn has_driver_ended(&mut self) -> bool {
        false
    }
    fn state(&mut self) -> Option<u32> {
        Some(self.driver_state)
    }
    fn await_work(&mut self, _: u64) -> GpuWork {
        GpuWork::Done
    }
    fn copy_out(&mut self, _: CopyOptions, _: u64) -> Result<(), u32> {
        Err(0)
    }
    fn settle(&mut self) -> bool {
        true
    }
    fn exported_bytes(&mut self) -> u64 {
        0
    }
    fn copied_out_bytes(&mut self) -> u64 {
        0
    }
    fn copy_in(&mut self, _: Option<u64>) -> Result<(), u32> {
        Err(0)
    }
    fn is_parked(&mut self) -> bool {
        false
    }
    fn release_copied(&mut self, _: u64) {}
    fn announce_offloaded(&mut self) {}
    fn announce_restore(&mut self) {}
    fn leave_copier(&mut self) {}
    fn holds_imported(&mut self) -> bool {
        false
    }
    fn can_move(&mut self, _: u8, _: u8) -> bool {
        false
    }
    fn is_broken(&mut self, _: u32) -> bool {
        false
    }
    fn set_damaged(&mut self) {}
    fn begin_return(&mut self, _: u64) -> bool {
        false
    }
    fn end_return(&mut self) {}
}

/// Results of all runs together.
#[derive(Debug, Default, PartialEq)]
struct Found {
    /// A call was inside the driver while the process was locked, or while the machine reported
    /// that allocations are paused.
    violated: bool,
    /// True if the gate was closed in at least one run. The field `made` is true if a call, outer
    /// or nested, was inside the driver at the end of at least one run.
    closed: bool,
    made: bool,
}

fn explore(without: Without, signals: bool, hold: bool) -> Found {
    let (mut found, mut choices, page) = (Found::default(), Choices::default(), page());
    let owner = crate::sys::gettid();
    loop {
        page.slots[1].own_for_test(owner);
        page.slots[1].inflight.store(0, Ordering::SeqCst);
        page.slots[1].allocating.store(0, Ordering::SeqCst);
        page.set_sealed(false);
        page.set_gate(Gate::Open);
        let mut world = World {
            page: &page,
            choices: &mut choices,
            without,
            class: if hold { Class::Alloc } else { Class::Work },
            buffered: Vec::new(),
            outer: Step::Outside,
            nested: None,
            signals,
            driver_state: process_state::RUNNING,
            touched: false,
            now_us: 0,
            violated: false,
        };
        let mut machine = OrderMachine::new();
        machine.release_allocations(&mut world);
        if hold {
            let held = Action::HoldAllocations { deadline_ms: 0 };
            let done = machine.execute_order(&mut world, held).0 == Outcome::Done;
            found.closed |= done;
            let is_violated = |world: &World<'_>| world.nested == Some(Step::Inside);
            found.violated |= done && is_violated(&world);
            world.go_on();
            found.violated |= done && is_violated(&world);
        } else {
            let close = Action::Close { deadline_ms: 0 };
            if machine.execute_order(&mut world, close).0 == Outcome::Done {
                found.closed = true;
                machine.execute_order(&mut world, Action::Lock { timeout_ms: 1 });
            }
            found.violated |= world.violated;
        }
        found.made |= world.outer == Step::Inside || world.nested == Some(Step::Inside);
        if !choices.next() {
            return found;
        }
    }
}

const SOUND: Found = Found { violated: false, closed: true, made: true };

#[test]
fn close_in_any_interleaving_is_sound() {
    assert_eq!(explore(Without::Nothing, false, false), SOUND);
    assert_eq!(explore(Without::Nothing, true, false), SOUND);
}

#[test]
fn hold_in_any_interleaving_is_sound() {
    assert_eq!(explore(Without::Nothing, true, true), SOUND);
}

#[test]
fn close_without_fence_is_unsound() {
    assert!(explore(Without::Fence, false, false).violated);
}

#[test]
fn close_without_seal_is_unsound() {
    assert!(explore(Without::Seal, true, false).violated);
    assert!(explore(Without::Seal, true, true).violated);
}
