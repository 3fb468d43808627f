//! Follows the controller's events. After a restart of the controller, the new controller's events
//! are followed.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader},
    process::{Child, Stdio},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use crate::cli::{Cli, EventRow};

/// Pause before the next attempt to connect, after a controller has ended.
const AGAIN: Duration = Duration::from_millis(20);

/// A thread that reads the output of `affinode events`.
pub struct Watch {
    seen: Arc<Seen>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Seen {
    events: Mutex<Events>,
    changed: Condvar,
    over: AtomicBool,
    child: Mutex<Option<Child>>,
}

#[derive(Default)]
struct Events {
    /// Last state of each container, by the container's name.
    state: BTreeMap<String, String>,
    /// Events since the last [`Watch::clear`].
    log: Vec<EventRow>,
}

impl Watch {
    /// Starts the thread that follows the events of the controller to which `cli` belongs.
    #[must_use]
    pub fn start(cli: &Cli) -> Self {
        let seen = Arc::new(Seen::default());
        let (shared, cli) = (Arc::clone(&seen), cli.clone());
        let thread = std::thread::spawn(move || shared.follow(&cli));
        Self { seen, thread: Some(thread) }
    }

    /// Removes all recorded events. The last state of each container is kept.
    pub fn clear(&self) {
        self.seen.events().log.clear();
    }

    /// Events since the last [`Watch::clear`].
    #[must_use]
    pub fn log(&self) -> Vec<EventRow> {
        self.seen.events().log.clone()
    }

    /// The last known state of a container.
    #[must_use]
    pub fn state(&self, name: &str) -> String {
        self.seen.events().state.get(name).cloned().unwrap_or_default()
    }

    /// Waits until a container enters a state. Returns false if the time limit has passed. The
    /// first `from` events are ignored.
    #[must_use]
    pub fn wait(&self, name: &str, state: &str, from: usize, patience: Duration) -> bool {
        let entered = |event: &EventRow| {
            event.kind == "state" && event.container == name && event.to == state
        };
        self.wait_for(entered, from, patience)
    }

    /// Waits for an event of a kind. Returns false if the time limit has passed.
    #[must_use]
    pub fn wait_kind(&self, kind: &str, patience: Duration) -> bool {
        self.wait_for(|event| event.kind == kind, 0, patience)
    }

    fn wait_for(&self, which: impl Fn(&EventRow) -> bool, from: usize, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        let mut events = self.seen.events();
        loop {
            if events.log.iter().skip(from).any(&which) {
                return true;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let waited = self.seen.changed.wait_timeout(events, left);
            events = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Number of events since the last [`Watch::clear`].
    #[must_use]
    pub fn count(&self) -> usize {
        self.seen.events().log.len()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.seen.over.store(true, Ordering::SeqCst);
        if let Some(child) = &mut *lock(&self.seen.child) {
            let _ = child.kill();
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Seen {
    fn events(&self) -> MutexGuard<'_, Events> {
        lock(&self.events)
    }

    fn follow(&self, cli: &Cli) {
        while !self.over.load(Ordering::SeqCst) {
            self.follow_one(cli);
            if let Some(mut child) = lock(&self.child).take() {
                let _ = child.kill();
                let _ = child.wait();
            }
            std::thread::sleep(AGAIN);
        }
    }

    /// Follows the events of one controller. Returns when the controller ends.
    fn follow_one(&self, cli: &Cli) {
        let mut command = cli.command(&["events", "--follow", "-o", "json"]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let Ok(mut child) = command.spawn() else { return };
        let Some(lines) = child.stdout.take() else { return };
        *lock(&self.child) = Some(child);
        if self.over.load(Ordering::SeqCst) {
            return;
        }
        for line in BufReader::new(lines).lines().map_while(Result::ok) {
            let Ok(event) = serde_json::from_str::<EventRow>(&line) else { continue };
            let mut events = self.events();
            if event.kind == "state" {
                events.state.insert(event.container.clone(), event.to.clone());
            }
            events.log.push(event);
            self.changed.notify_all();
        }
    }
}
