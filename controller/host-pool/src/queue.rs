//! Order in which the worker threads carry out requests. Processes take turns, so a process with
//! many requests delays another process by at most one request per worker.
//!
//! ```text
//! push ──> waiting ──take──> in work ──> finish
//!             ^                 │ no room
//!             └─Allow, or late──┴──> parked
//! ```
//!
//! `Allow` is the controller's order that sets how much memory a process may use. A request can
//! arrive before the `Allow` that permits it, because the two use different sockets. A request that
//! finds too little memory is therefore parked until the next `Allow` or its deadline. No worker
//! waits for it.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Instant,
};

use affinode_proto::wire::host_pool::MAX_PENDING;

/// Number of a connection of a process. It is used only once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ClientId(pub u64);

/// Request of a process to allocate the pages of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// First byte of the range.
    pub offset: u64,
    /// Size of the range in bytes.
    pub bytes: u64,
    /// Processor that allocates the pages.
    pub processor: u32,
    /// Time after which the request is refused if there is no room.
    pub deadline: Instant,
}

/// A request that a worker carries out.
#[derive(Debug)]
pub struct Job {
    /// Connection of the request.
    pub client: ClientId,
    /// The request of the process.
    pub request: Request,
    /// Value of [`Lane::allows`] when the work began.
    allows: u64,
}

/// Requests of one process.
#[derive(Debug, Default)]
struct Lane {
    waiting: VecDeque<Request>,
    parked: Vec<Request>,
    /// Number of requests that have no reply yet, including those in work.
    pending: usize,
    /// Number of `Allow` orders so far.
    allows: u64,
}

/// Requests of all processes.
#[derive(Debug, Default)]
pub struct Queue {
    lanes: BTreeMap<ClientId, Lane>,
    /// Connections with a waiting request, in the order of their turns.
    turns: VecDeque<ClientId>,
}

impl Queue {
    /// Adds an empty queue for a connection.
    pub fn add(&mut self, client: ClientId) {
        self.lanes.insert(client, Lane::default());
    }

    /// Removes a connection and its requests.
    pub fn remove(&mut self, client: ClientId) {
        self.lanes.remove(&client);
        self.turns.retain(|turn| *turn != client);
    }

    /// Whether a connection must wait for a reply before its next request.
    pub fn is_full(&self, client: ClientId) -> bool {
        self.lanes.get(&client).is_some_and(|lane| lane.pending >= MAX_PENDING)
    }

    /// Adds a request. Returns false if the connection was removed.
    pub fn push(&mut self, client: ClientId, request: Request) -> bool {
        let Some(lane) = self.lanes.get_mut(&client) else { return false };
        lane.pending += 1;
        self.wait(client, [request]);
        true
    }

    /// Returns the next request to carry out.
    pub fn take(&mut self, now: Instant) -> Option<Job> {
        self.unpark(|request| request.deadline <= now);
        let client = self.turns.pop_front()?;
        let lane = self.lanes.get_mut(&client)?;
        let request = lane.waiting.pop_front()?;
        if !lane.waiting.is_empty() {
            self.turns.push_back(client);
        }
        Some(Job { client, request, allows: lane.allows })
    }

    /// Returns the earliest deadline of all parked requests. At its deadline, a request is tried
    /// for the last time.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.lanes.values().flat_map(|lane| &lane.parked).map(|request| request.deadline).min()
    }

    /// Keeps a request for which there was no room. Returns false if the request must be refused
    /// now.
    pub fn park(&mut self, job: &Job, now: Instant) -> bool {
        let Some(lane) = self.lanes.get_mut(&job.client) else { return false };
        if lane.allows != job.allows {
            // An `Allow` took effect after the attempt began.
            self.wait(job.client, [job.request]);
        } else if now < job.request.deadline {
            lane.parked.push(job.request);
        } else {
            return false;
        }
        true
    }

    /// Removes a request that has its reply.
    pub fn finish(&mut self, job: &Job) {
        if let Some(lane) = self.lanes.get_mut(&job.client) {
            lane.pending = lane.pending.saturating_sub(1);
        }
    }

    /// Records that an `Allow` has taken effect. The parked requests of the process are tried again.
    pub fn allowed(&mut self, client: ClientId) {
        let Some(lane) = self.lanes.get_mut(&client) else { return };
        lane.allows += 1;
        let parked = std::mem::take(&mut lane.parked);
        self.wait(client, parked);
    }

    /// Returns the number of parked requests.
    #[cfg(test)]
    pub fn parked(&self) -> usize {
        self.lanes.values().map(|lane| lane.parked.len()).sum()
    }

    fn unpark(&mut self, which: impl Fn(&Request) -> bool) {
        let mut due = Vec::new();
        for (client, lane) in &mut self.lanes {
            due.extend(lane.parked.extract_if(.., |request| which(request)).map(|r| (*client, r)));
        }
        for (client, request) in due {
            self.wait(client, [request]);
        }
    }

    fn wait(&mut self, client: ClientId, requests: impl IntoIterator<Item = Request>) {
        let Some(lane) = self.lanes.get_mut(&client) else { return };
        let has_turn = !lane.waiting.is_empty();
        lane.waiting.extend(requests);
        if !has_turn && !lane.waiting.is_empty() {
            self.turns.push_back(client);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const A: ClientId = ClientId(1);
    const B: ClientId = ClientId(2);

    fn queue() -> (Queue, Instant) {
        let mut queue = Queue::default();
        queue.add(A);
        queue.add(B);
        (queue, Instant::now())
    }

    fn request(offset: u64, now: Instant) -> Request {
        Request { offset, bytes: 1, processor: 0, deadline: now + Duration::from_secs(1) }
    }

    fn order(queue: &mut Queue, now: Instant) -> Vec<(u64, u64)> {
        std::iter::from_fn(|| queue.take(now))
            .map(|job| (job.client.0, job.request.offset))
            .collect()
    }

    #[test]
    fn processes_take_turns() {
        let (mut queue, now) = queue();
        for offset in 0..4 {
            assert!(queue.push(A, request(offset, now)));
        }
        queue.push(B, request(0, now));
        queue.push(B, request(1, now));
        let fair = [(1, 0), (2, 0), (1, 1), (2, 1), (1, 2), (1, 3)];
        assert_eq!(order(&mut queue, now), fair);
    }

    #[test]
    fn a_process_has_a_limited_number_of_requests() {
        let (mut queue, now) = queue();
        for offset in 0..MAX_PENDING as u64 {
            assert!(!queue.is_full(A));
            queue.push(A, request(offset, now));
        }
        let job = queue.take(now).unwrap();
        assert!(queue.is_full(A) && !queue.is_full(B), "the request in work counts");
        assert!(queue.park(&job, now));
        assert!(queue.is_full(A), "a parked request counts");
        let job = queue.take(now).unwrap();
        queue.finish(&job);
        assert!(!queue.is_full(A));
    }

    #[test]
    fn request_without_room_waits_for_an_allow() {
        let (mut queue, now) = queue();
        queue.push(A, request(7, now));
        let job = queue.take(now).unwrap();
        assert!(queue.park(&job, now));
        assert!(queue.take(now).is_none());
        queue.allowed(B);
        assert!(queue.take(now).is_none(), "the other process was allowed more");
        queue.allowed(A);
        let job = queue.take(now).unwrap();
        assert!(queue.park(&job, now));
        let late = queue.next_deadline().unwrap();
        assert_eq!(late, job.request.deadline);
        let job = queue.take(late).unwrap();
        assert!(!queue.park(&job, late), "this was the last attempt");
        assert_eq!(queue.next_deadline(), None);
    }

    #[test]
    fn an_allow_during_the_attempt_is_not_missed() {
        let (mut queue, now) = queue();
        queue.push(A, request(7, now));
        let job = queue.take(now).unwrap();
        queue.allowed(A);
        assert!(queue.park(&job, now));
        assert_eq!(order(&mut queue, now), [(1, 7)]);
    }

    #[test]
    fn a_removed_process_has_no_requests() {
        let (mut queue, now) = queue();
        for offset in 0..3 {
            queue.push(A, request(offset, now));
        }
        let job = queue.take(now).unwrap();
        queue.push(B, request(9, now));
        queue.remove(A);
        assert!(!queue.park(&job, now) && !queue.push(A, request(5, now)) && !queue.is_full(A));
        queue.finish(&job);
        assert_eq!(order(&mut queue, now), [(2, 9)]);
    }
}
