//! The gate's protocol, explored in all interleavings of two processors with store
//! buffers (x86). It shows that the barrier is what makes plain increments sound: take
//! it out, and an interleaving is found in which the driver is touched under a caller.

use std::collections::HashSet;

/// Whether the closer uses the barrier on all threads.
#[derive(Clone, Copy, PartialEq)]
enum Barrier {
    Used,
    LeftOut,
}

/// Memory, the caller's store buffer, and where both sides are. The closer's stores are
/// sequentially consistent, so they need no buffer.
#[derive(Clone, PartialEq, Eq, Hash)]
struct State {
    inflight: i32,
    closed: bool,
    /// Stores of `inflight` that the caller has made and nobody else sees yet.
    buffered: Vec<i32>,
    caller: Caller,
    calls_left: u8,
    closer: Closer,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Caller {
    Outside,
    Counted,
    Inside,
    Waiting,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Closer {
    Open,
    Closed,
    Fenced,
    TouchesDriver,
    Reopened,
}

impl State {
    /// The caller's own view: its newest store.
    fn own_count(&self) -> i32 {
        self.buffered.last().copied().unwrap_or(self.inflight)
    }

    fn with(&self, change: impl FnOnce(&mut State)) -> State {
        let mut next = self.clone();
        change(&mut next);
        next
    }

    fn drain(&mut self) {
        if let Some(last) = self.buffered.pop() {
            self.inflight = last;
            self.buffered.clear();
        }
    }

    fn successors(&self, barrier: Barrier) -> Vec<State> {
        let mut next = Vec::new();
        if !self.buffered.is_empty() {
            next.push(self.with(|s| s.inflight = s.buffered.remove(0)));
        }
        let add = |s: &mut State, n: i32| s.buffered.push(s.own_count() + n);
        match self.caller {
            Caller::Outside if self.calls_left > 0 => next.push(self.with(|s| {
                add(s, 1);
                s.calls_left -= 1;
                s.caller = Caller::Counted;
            })),
            Caller::Counted if self.closed => next.push(self.with(|s| {
                add(s, -1);
                s.caller = Caller::Waiting;
            })),
            Caller::Counted => next.push(self.with(|s| s.caller = Caller::Inside)),
            Caller::Inside => next.push(self.with(|s| {
                add(s, -1);
                s.caller = Caller::Outside;
            })),
            Caller::Waiting if !self.closed => next.push(self.with(|s| {
                add(s, 1);
                s.caller = Caller::Counted;
            })),
            _ => {}
        }
        match self.closer {
            Closer::Open => next.push(self.with(|s| {
                s.closed = true;
                s.closer = Closer::Closed;
            })),
            Closer::Closed => next.push(self.with(|s| {
                if barrier == Barrier::Used {
                    s.drain();
                }
                s.closer = Closer::Fenced;
            })),
            Closer::Fenced if self.inflight == 0 => {
                next.push(self.with(|s| s.closer = Closer::TouchesDriver));
            }
            Closer::TouchesDriver => next.push(self.with(|s| {
                s.closed = false;
                s.closer = Closer::Reopened;
            })),
            _ => {}
        }
        next
    }

    fn is_violated(&self) -> bool {
        self.closer == Closer::TouchesDriver && self.caller == Caller::Inside
    }

    fn is_done(&self) -> bool {
        self.calls_left == 0 && self.caller == Caller::Outside
    }
}

/// Explores everything; whether the driver was ever touched under a caller, and whether
/// every end is one in which all calls were made.
fn explore(barrier: Barrier) -> (bool, bool) {
    let mut todo = vec![State {
        inflight: 0,
        closed: false,
        buffered: Vec::new(),
        caller: Caller::Outside,
        calls_left: 3,
        closer: Closer::Open,
    }];
    let mut seen = HashSet::new();
    let (mut violated, mut all_made) = (false, true);
    while let Some(state) = todo.pop() {
        if !seen.insert(state.clone()) {
            continue;
        }
        violated |= state.is_violated();
        let next = state.successors(barrier);
        all_made &= !next.is_empty() || state.is_done();
        todo.extend(next);
    }
    (violated, all_made)
}

#[test]
fn nobody_is_inside_while_the_driver_is_touched_and_every_call_is_made() {
    assert_eq!(explore(Barrier::Used), (false, true));
}

#[test]
fn without_the_barrier_the_driver_is_touched_under_a_caller() {
    assert!(explore(Barrier::LeftOut).0);
}
