//! CUDA streams and events. Each stream has a queue and a worker thread, and all work of the GPU is
//! an [`Op`] on a stream.
//!
//! The operations of a stream are numbered, and such a number is called a ticket. An operation may
//! wait for other operations, given as `(stream, ticket)` pairs. All of these were submitted
//! earlier, so there is no cycle. The legacy default stream of a context waits for the context's
//! blocking streams, and the blocking streams wait for the legacy default stream. An event refers
//! to a ticket.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::abi::{
    CUresult, INVALID_HANDLE, INVALID_VALUE, OUT_OF_MEMORY, Outcome, STREAM_CAPTURE_INVALIDATED,
    STREAM_CAPTURE_UNSUPPORTED,
};
use crate::checkpoint_thread::spawn_quiet;
use crate::driver::Driver;
use crate::gate::wait_until;
use crate::stats::now_ns;

pub type StreamId = u64;
/// One operation of a stream, as the stream and the operation's ticket (number).
pub type Mark = (StreamId, u64);
/// Work that is executed on the GPU. If it fails, all later calls of the process also return its
/// error, as with a real GPU.
pub type Op = Box<dyn FnOnce() -> Outcome + Send>;

struct Stream {
    context: u64,
    kind: StreamKind,
    submitted: u64,
    completed: u64,
    queue: VecDeque<(Vec<Mark>, Op)>,
    worker: bool,
    closing: bool,
    capture: Option<Capture>,
}

/// State of a stream that is being captured. Calls on the stream are added to a graph instead of
/// being executed.
#[derive(Debug, Clone, Copy)]
struct Capture {
    /// Whether the capture was begun in the mode `global`. Calls that can block are then forbidden
    /// in all threads, except in threads with the capture mode `relaxed`.
    is_global: bool,
    /// Whether a call has invalidated the capture.
    spoilt: bool,
}

/// Relation of a stream to the legacy default stream of its context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamKind {
    /// The legacy default stream itself.
    Legacy,
    Blocking,
    NonBlocking,
}

struct Event {
    mark: Option<Mark>,
    /// Time at which the event occurred. 0 if it has not occurred yet.
    at_ns: Arc<AtomicU64>,
}

#[derive(Default)]
struct State {
    streams: HashMap<StreamId, Stream>,
    events: HashMap<u64, Event>,
    next: u64,
}

/// All streams and events of this process.
pub struct Streams {
    state: Mutex<State>,
    changed: Condvar,
    failure: AtomicI32,
}

impl State {
    fn reached(&self, (stream, ticket): Mark) -> bool {
        self.streams.get(&stream).is_none_or(|stream| stream.completed >= ticket)
    }

    /// Returns the operations on other streams that must end before the next operation on this
    /// stream begins.
    fn order(&self, id: StreamId) -> Vec<Mark> {
        let Some(stream) = self.streams.get(&id) else { return Vec::new() };
        let other = |candidate: &Stream| match stream.kind {
            StreamKind::Legacy => candidate.kind == StreamKind::Blocking,
            StreamKind::Blocking => candidate.kind == StreamKind::Legacy,
            StreamKind::NonBlocking => false,
        };
        let waits = self
            .streams
            .iter()
            .filter(|(_, s)| s.context == stream.context && s.completed < s.submitted && other(s));
        waits.map(|(id, stream)| (*id, stream.submitted)).collect()
    }
}

impl Streams {
    pub fn new() -> Self {
        Self { state: Mutex::default(), changed: Condvar::new(), failure: AtomicI32::new(0) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the error of a kernel that has failed, if there is one. Every later call returns
    /// this error.
    pub fn check(&self) -> Outcome {
        match self.failure.load(Ordering::Relaxed) {
            0 => Ok(()),
            code => Err(code),
        }
    }

    pub fn create(&self, context: u64, kind: StreamKind) -> StreamId {
        let mut state = self.lock();
        state.next += 1;
        let id = state.next;
        let queue = VecDeque::new();
        let stream = Stream {
            context,
            kind,
            submitted: 0,
            completed: 0,
            queue,
            worker: false,
            closing: false,
            capture: None,
        };
        state.streams.insert(id, stream);
        id
    }

    /// Begins the capture of a stream. Further calls on the stream are added to a graph.
    pub fn begin_capture(&self, id: StreamId, is_global: bool) -> Outcome {
        let mut state = self.lock();
        let stream = state.streams.get_mut(&id).ok_or(INVALID_HANDLE)?;
        stream.capture = Some(Capture { is_global, spoilt: false });
        Ok(())
    }

    /// Ends the capture of a stream. Returns an error if a call has invalidated the capture.
    pub fn end_capture(&self, id: StreamId) -> Outcome {
        let mut state = self.lock();
        let stream = state.streams.get_mut(&id).ok_or(INVALID_HANDLE)?;
        let capture = stream.capture.take().ok_or(INVALID_VALUE)?;
        if capture.spoilt { Err(STREAM_CAPTURE_INVALIDATED) } else { Ok(()) }
    }

    /// Whether the stream is being captured.
    pub fn is_capturing(&self, id: StreamId) -> bool {
        self.lock().streams.get(&id).is_some_and(|stream| stream.capture.is_some())
    }

    /// Returns an error and invalidates the capture if this stream is being captured. Used by calls
    /// that are forbidden on a captured stream.
    pub fn spoils_own(&self, id: StreamId) -> Outcome {
        self.spoil(|of, _| of == id)
    }

    /// Returns an error and invalidates the capture if the capture of any stream forbids calls that
    /// can block. Such calls stay allowed if `relaxed` is true, which means that the calling thread
    /// has the capture mode `relaxed`.
    pub fn spoils_global(&self, relaxed: bool) -> Outcome {
        self.spoil(|_, capture| capture.is_global && !relaxed)
    }

    fn spoil(&self, which: impl Fn(StreamId, &Capture) -> bool) -> Outcome {
        let mut result = Ok(());
        for (id, stream) in &mut self.lock().streams {
            if let Some(capture) = stream.capture.as_mut().filter(|capture| which(*id, capture)) {
                capture.spoilt = true;
                result = Err(STREAM_CAPTURE_UNSUPPORTED);
            }
        }
        result
    }

    /// Destroys a stream after its queued work has been executed.
    pub fn destroy(&self, id: StreamId) -> Outcome {
        let mut state = self.lock();
        let stream =
            state.streams.get_mut(&id).filter(|stream| !stream.closing).ok_or(INVALID_HANDLE)?;
        stream.closing = true;
        if !stream.worker {
            state.streams.remove(&id);
        }
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// Destroys all streams of a context.
    pub fn destroy_context(&self, context: u64) {
        let ids: Vec<_> = self
            .lock()
            .streams
            .iter()
            .filter(|(_, s)| s.context == context)
            .map(|(id, _)| *id)
            .collect();
        for id in ids {
            let _ = self.destroy(id);
        }
    }

    /// Returns the context and the kind of an existing stream.
    pub fn get(&self, id: StreamId) -> Outcome<(u64, StreamKind)> {
        let state = self.lock();
        let stream =
            state.streams.get(&id).filter(|stream| !stream.closing).ok_or(INVALID_HANDLE)?;
        Ok((stream.context, stream.kind))
    }

    pub fn submit(&'static self, id: StreamId, op: Op) -> Outcome<Mark> {
        self.submit_after(id, Vec::new(), op)
    }

    fn submit_after(&'static self, id: StreamId, mut after: Vec<Mark>, op: Op) -> Outcome<Mark> {
        self.check()?;
        let mut state = self.lock();
        after.extend(state.order(id));
        let stream =
            state.streams.get_mut(&id).filter(|stream| !stream.closing).ok_or(INVALID_HANDLE)?;
        if !stream.worker {
            spawn_quiet("cuda-stream", move || self.work(id)).map_err(|_| OUT_OF_MEMORY)?;
            stream.worker = true;
        }
        stream.submitted += 1;
        stream.queue.push_back((after, op));
        let mark = (id, stream.submitted);
        drop(state);
        self.changed.notify_all();
        Ok(mark)
    }

    fn work(&self, id: StreamId) {
        let mut state = self.lock();
        loop {
            let Some(stream) = state.streams.get(&id) else { return };
            let ready = stream
                .queue
                .front()
                .map(|(after, _)| after.iter().all(|mark| state.reached(*mark)));
            match ready {
                Some(true) => {
                    let op = state.streams.get_mut(&id).and_then(|stream| stream.queue.pop_front());
                    drop(state);
                    if let Some(Err(code)) = op.map(|(_, op)| op()) {
                        self.fail(code);
                    }
                    state = self.lock();
                    if let Some(stream) = state.streams.get_mut(&id) {
                        stream.completed += 1;
                    }
                    self.changed.notify_all();
                }
                None if stream.closing => {
                    state.streams.remove(&id);
                    self.changed.notify_all();
                    return;
                }
                _ => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    fn fail(&self, code: CUresult) {
        let _ = self.failure.compare_exchange(0, code, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Waits until one operation is done.
    pub fn wait(&self, mark: Mark) -> Outcome {
        let mut state = self.lock();
        while !state.reached(mark) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        drop(state);
        self.check()
    }

    /// Returns the operation that was queued last on a stream.
    pub fn last(&self, id: StreamId) -> Outcome<Mark> {
        let state = self.lock();
        let stream =
            state.streams.get(&id).filter(|stream| !stream.closing).ok_or(INVALID_HANDLE)?;
        Ok((id, stream.submitted))
    }

    /// Whether an operation is done.
    pub fn is_done(&self, mark: Mark) -> bool {
        self.lock().reached(mark)
    }

    /// Waits until the streams of a context, or all streams, have no work. Returns false if the
    /// deadline has passed.
    pub fn wait_idle(&self, context: Option<u64>, deadline: Option<Instant>) -> bool {
        let mut state = self.lock();
        let concerns = |stream: &Stream| context.is_none_or(|context| stream.context == context);
        while state
            .streams
            .values()
            .any(|stream| concerns(stream) && stream.completed < stream.submitted)
        {
            match wait_until(&self.changed, state, deadline) {
                Some(woken) => state = woken,
                None => return false,
            }
        }
        true
    }

    pub fn create_event(&self) -> u64 {
        let mut state = self.lock();
        state.next += 1;
        let id = state.next;
        state.events.insert(id, Event { mark: None, at_ns: Arc::default() });
        id
    }

    /// Destroys an event. Operations that are already queued and refer to the event still run.
    pub fn destroy_event(&self, id: u64) -> Outcome {
        self.lock().events.remove(&id).map(drop).ok_or(INVALID_HANDLE)
    }

    /// Records an event: it occurs when the stream has completed the work queued so far.
    pub fn record(&'static self, event: u64, stream: StreamId) -> Outcome {
        let at_ns = Arc::new(AtomicU64::new(0));
        let noted = Arc::clone(&at_ns);
        if !self.lock().events.contains_key(&event) {
            return Err(INVALID_HANDLE);
        }
        let mark = self.submit(
            stream,
            Box::new(move || {
                noted.store(now_ns(), Ordering::Relaxed);
                Ok(())
            }),
        )?;
        if let Some(event) = self.lock().events.get_mut(&event) {
            *event = Event { mark: Some(mark), at_ns };
        }
        Ok(())
    }

    /// Records an event of a context. The event occurs when all streams of the context have
    /// completed the work queued so far. `legacy` is the context's default stream. Every capture in
    /// the context becomes invalid.
    pub fn record_context(&'static self, event: u64, context: u64, legacy: StreamId) -> Outcome {
        let mut state = self.lock();
        let mut captured = false;
        let of_context = |stream: &&mut Stream| stream.context == context;
        for capture in
            state.streams.values_mut().filter(of_context).filter_map(|s| s.capture.as_mut())
        {
            (capture.spoilt, captured) = (true, true);
        }
        if captured {
            return Err(STREAM_CAPTURE_UNSUPPORTED);
        }
        let running = |s: &Stream| s.context == context && s.completed < s.submitted;
        let marks: Vec<Mark> = (state.streams.iter())
            .filter(|(id, stream)| **id != legacy && running(stream))
            .map(|(id, stream)| (*id, stream.submitted))
            .collect();
        drop(state);
        self.submit_after(legacy, marks, Box::new(|| Ok(())))?;
        self.record(event, legacy)
    }

    /// Returns the operation that an event refers to, and the time at which the event occurred.
    pub fn event(&self, id: u64) -> Outcome<(Option<Mark>, u64)> {
        let state = self.lock();
        let event = state.events.get(&id).ok_or(INVALID_HANDLE)?;
        Ok((event.mark, event.at_ns.load(Ordering::Relaxed)))
    }

    /// Makes the stream wait until the event has occurred.
    pub fn wait_event(&'static self, stream: StreamId, event: u64) -> Outcome {
        let (mark, _) = self.event(event)?;
        self.submit_after(stream, mark.into_iter().collect(), Box::new(|| Ok(()))).map(drop)
    }
}

impl Driver {
    /// Queues a kernel on a stream. Its running time counts as use of the GPU.
    pub fn submit_kernel(&'static self, stream: StreamId, gpu: usize, kernel: Op) -> Outcome {
        let op = move || {
            let _busy = self.stats.kernel(gpu);
            kernel()
        };
        self.streams.submit(stream, Box::new(op)).map(drop)
    }
}
