//! The queue of planned events, in order of time. Events of the same time are in the order in which
//! they were planned.
//!
//! Most events plan one further event in the near future. The planned event replaces the current
//! event at the top of the heap and moves down a few levels. This costs less than a removal and an
//! insertion.

use std::{
    cmp::Ordering,
    collections::{BinaryHeap, binary_heap::PeekMut},
};

use affinode_core::Millis;

use super::SimulationEvent;

/// A planned event, ordered by its time and by its position among events of the same time.
#[derive(Clone, Copy, Debug)]
struct ScheduledEvent {
    at: Millis,
    sequence: u64,
    event: SimulationEvent,
}

impl ScheduledEvent {
    fn place(&self) -> u128 {
        u128::from(self.at) << 64 | u128::from(self.sequence)
    }
}

impl PartialEq for ScheduledEvent {
    fn eq(&self, other: &ScheduledEvent) -> bool {
        self.place() == other.place()
    }
}

impl Eq for ScheduledEvent {}

impl PartialOrd for ScheduledEvent {
    fn partial_cmp(&self, other: &ScheduledEvent) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Orders events in reverse, because the heap returns the greatest entry, which must be the
/// earliest event.
impl Ord for ScheduledEvent {
    fn cmp(&self, other: &ScheduledEvent) -> Ordering {
        other.place().cmp(&self.place())
    }
}

/// All planned events, in a heap.
#[derive(Debug, Default)]
pub(super) struct EventQueue {
    heap: BinaryHeap<ScheduledEvent>,
    /// Whether the event at the top of the heap is being handled. The next operation on the queue
    /// replaces or removes that event.
    happens: bool,
    sequence: u64,
}

impl EventQueue {
    /// Adds an event to the queue, to happen at the time `at`.
    pub(super) fn plan(&mut self, at: Millis, event: SimulationEvent) {
        self.sequence += 1;
        let planned = ScheduledEvent { at, sequence: self.sequence, event };
        if std::mem::take(&mut self.happens)
            && let Some(mut first) = self.heap.peek_mut()
        {
            *first = planned;
        } else {
            self.heap.push(planned);
        }
    }

    /// Returns the next event and its time. `None`: no event is planned.
    pub(super) fn next(&mut self) -> Option<(Millis, SimulationEvent)> {
        if self.happens
            && let Some(first) = self.heap.peek_mut()
        {
            PeekMut::pop(first);
        }
        let next = self.heap.peek().map(|first| (first.at, first.event));
        self.happens = next.is_some();
        next
    }

    /// Whether no event is planned except the current one.
    pub(super) fn is_empty(&self) -> bool {
        self.heap.len() == usize::from(self.happens)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The queue must return events in order of time, even if events are planned while another
        /// event is handled.
        #[test]
        fn events_come_in_order_of_time(
            steps in proptest::collection::vec((0_u64..50, 0_usize..4), 1..100),
        ) {
            let (mut agenda, mut planned, mut number, mut now) =
                (EventQueue::default(), Vec::new(), 0, 0);
            for (after, how_many) in steps {
                for _ in 0..how_many {
                    agenda.plan(now + after, SimulationEvent::Arrival(number));
                    planned.push((now + after, number));
                    number += 1;
                }
                prop_assert_eq!(agenda.is_empty(), planned.is_empty());
                let first = planned.iter().copied().min();
                planned.retain(|other| Some(*other) != first);
                let next = agenda.next().map(|(at, event)| match event {
                    SimulationEvent::Arrival(number) => (at, number),
                    other => unreachable!("{other:?} was not planned"),
                });
                prop_assert_eq!(next, first);
                now = next.map_or(now, |(at, _)| at);
            }
        }
    }
}
