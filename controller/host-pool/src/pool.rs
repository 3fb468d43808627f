//! The attached processes, and the threads that serve them. Each process has a thread that reads
//! its socket. All processes share the workers, which carry out the requests.

use std::{
    collections::BTreeMap,
    io,
    os::fd::{BorrowedFd, OwnedFd},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use affinode_proto::wire::host_pool::{FromHostPool, ToHostPool};
use rustix::net::Shutdown;

use crate::{
    client::{Client, DiskAllowance, ReadError},
    disk_file::{DiskFile, Piece},
    disk_folder::DiskFolder,
    disk_writers::{DiskWriters, EarlierWriters},
    ended_files::EndedFiles,
    memory_file::{CreateError, MemoryFile, Populated},
    queue::{ClientId, Job, Queue, Request},
    socket,
};

/// Time for which a request that finds too little memory waits for an `Allow`. The `Allow` that
/// permits it may have been sent earlier and arrive later.
pub const LATE_ALLOW: Duration = Duration::from_secs(1);

/// Maximum time for which a process's request for a disk file waits for the end of its earlier one.
const EARLIER_END: Duration = Duration::from_secs(5);

/// Maximum number of workers.
const MAX_WORKERS: usize = 16;

/// Size of a thread's stack in bytes.
const STACK_BYTES: usize = 256 << 10;

/// Reason why a process cannot be attached.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The container has too many memory files of ended connections.
    #[error("processes of its container keep too many memory files of earlier connections")]
    Files,
    /// The memory file cannot be created.
    #[error(transparent)]
    File(#[from] CreateError),
    /// No thread can be started for the process.
    #[error("cannot start a thread")]
    Thread(#[source] io::Error),
}

/// All attached processes and their requests.
#[derive(Debug)]
pub struct Pool {
    state: Mutex<State>,
    /// Notified if a worker may have work.
    work: Condvar,
    /// Notified if a thread no longer uses a connection.
    unused: Condvar,
    late_allow: Duration,
    /// The folder for disk files. `None`: no content is stored on disk.
    disk: Option<Arc<DiskFolder>>,
}

#[derive(Debug, Default)]
struct State {
    queue: Queue,
    clients: BTreeMap<ClientId, Arc<Client>>,
    ended_files: EndedFiles,
    next_id: u64,
    has_stopped: bool,
}

impl Pool {
    /// Starts the workers. A request that finds too little memory waits `late_allow` for an
    /// `Allow`. Content is stored in files in the folder `disk`.
    ///
    /// # Errors
    /// No worker can be started.
    pub fn start(late_allow: Duration, disk: Option<DiskFolder>) -> io::Result<Arc<Pool>> {
        let pool = Arc::new(Pool {
            state: Mutex::default(),
            work: Condvar::new(),
            unused: Condvar::new(),
            late_allow,
            disk: disk.map(Arc::new),
        });
        let processors = thread::available_parallelism().map_or(1, usize::from);
        for number in 0..processors.min(MAX_WORKERS) {
            let own = Arc::clone(&pool);
            match spawn("worker", move || own.work()) {
                // Fewer workers suffice.
                Err(error) if number > 0 => tracing::warn!(%error, "cannot start a worker"),
                started => started?,
            }
        }
        Ok(pool)
    }

    /// Attaches a process of a container: creates its memory file, and starts a thread that sends the
    /// file and reads requests. Replaces an earlier connection of the process.
    ///
    /// # Errors
    /// [`AttachError`]: the file or the thread cannot be created. The process's socket is then
    /// closed.
    pub fn attach(
        self: &Arc<Self>,
        process: u64,
        container: u64,
        socket: OwnedFd,
    ) -> Result<(), AttachError> {
        if let Some(old) = self.find(process) {
            self.end(&old);
            self.let_go(old);
        }
        if !self.lock().ended_files.may_add(container) {
            return Err(AttachError::Files);
        }
        let memory = MemoryFile::create()?;
        let mut state = self.lock();
        let id = ClientId(state.next_id);
        state.next_id += 1;
        let client = Arc::new(Client {
            id,
            process,
            container,
            socket,
            memory,
            room: Condvar::new(),
            disk_allowance: DiskAllowance::default(),
        });
        state.queue.add(id);
        state.clients.insert(id, Arc::clone(&client));
        drop(state);
        let (pool, own) = (Arc::clone(self), Arc::clone(&client));
        let started = spawn("process", move || pool.read(own)).map_err(AttachError::Thread);
        if started.is_err() {
            self.end(&client);
        }
        self.let_go(client);
        started
    }

    /// Sets how much memory the file of a process may contain, see [`MemoryFile::allow`]. Does
    /// nothing if the process is not attached.
    ///
    /// # Errors
    /// The limit cannot be set.
    pub fn allow(&self, process: u64, bytes: u64, kept_bytes: u64) -> io::Result<()> {
        let Some(client) = self.find(process) else { return Ok(()) };
        let set = client.memory.allow(bytes, kept_bytes);
        self.lock().queue.allowed(client.id);
        self.work.notify_all();
        self.let_go(client);
        set
    }

    /// Sets the maximum size of the disk file of a process, in bytes. Does nothing if the process is
    /// not attached.
    pub fn allow_disk(&self, process: u64, bytes: u64) {
        if let Some(client) = self.find(process) {
            client.disk_allowance.set(bytes);
            self.let_go(client);
        }
    }

    /// Ends the connection of a process. Does nothing if the process is not attached.
    pub fn detach(&self, process: u64) {
        if let Some(client) = self.find(process) {
            self.end(&client);
            self.let_go(client);
        }
    }

    /// Ends all connections and workers, without waiting for them.
    pub fn stop(&self) {
        let clients = {
            let mut state = self.lock();
            state.has_stopped = true;
            state.clients.values().cloned().collect::<Vec<_>>()
        };
        self.work.notify_all();
        for client in clients {
            self.end(&client);
            self.let_go(client);
        }
    }

    /// Returns the number of requests that wait for an `Allow`.
    #[cfg(test)]
    pub fn parked(&self) -> usize {
        self.lock().queue.parked()
    }

    /// Returns the size of the pieces of all disk files, in bytes.
    #[cfg(test)]
    pub fn disk_used_bytes(&self) -> u64 {
        self.disk.as_ref().map_or(0, |disk| disk.used_bytes())
    }

    fn find(&self, process: u64) -> Option<Arc<Client>> {
        self.lock().clients.values().find(|client| client.process == process).cloned()
    }

    /// Ends a connection. Its thread then closes its socket and its file.
    pub(crate) fn end(&self, client: &Client) {
        // Not with the lock, because the kernel may wait for others that use the file system.
        let ended = client.memory.end();
        let mut state = self.lock();
        state.queue.remove(client.id);
        let removed = state.clients.remove(&client.id);
        if removed.is_some()
            && let Ok(file_system) = ended
        {
            state.ended_files.add(client.container, file_system);
        }
        drop(state);
        drop(removed);
        client.room.notify_all();
        // Wakes the thread up that reads the socket.
        let _ = rustix::net::shutdown(&client.socket, Shutdown::Both);
    }

    /// Drops a reference to a connection in a thread that does not own it.
    fn let_go(&self, client: Arc<Client>) {
        self.let_go_all(client);
    }

    /// Drops a value that has a reference to a connection, in a thread that does not own the
    /// connection.
    pub(crate) fn let_go_all(&self, value: impl Sized) {
        let state = self.lock();
        drop(value);
        drop(state);
        self.unused.notify_all();
    }

    /// Closes a connection. The socket may contain descriptors of the process's files, and to close
    /// these may take long. Therefore only the thread of the connection closes the socket, after
    /// all other threads.
    fn close(&self, client: Arc<Client>) {
        let mut state = self.lock();
        while Arc::strong_count(&client) > 1 {
            state = self.unused.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        drop(state);
        drop(client);
    }

    /// Body of the thread of a connection.
    fn read(self: &Arc<Self>, client: Arc<Client>) {
        let process = client.process;
        match catch_unwind(AssertUnwindSafe(|| self.hear(&client))) {
            Ok(Err(error)) if !error.is_hang_up() => {
                let error: &dyn std::error::Error = &error;
                tracing::warn!(error, "process {process}: connection closed");
            }
            Ok(_) => {}
            Err(_) => tracing::warn!("process {process}: connection closed after a panic"),
        }
        self.end(&client);
        self.close(client);
    }

    /// Sends the memory file, then reads requests until the connection ends.
    fn hear(self: &Arc<Self>, client: &Arc<Client>) -> Result<(), ReadError> {
        let file = Some(client.memory.file());
        socket::send(&client.socket, &FromHostPool::File.encode(), file)?;
        let (mut writers, mut earlier) = (None::<DiskWriters>, None);
        while let Some(frame) = socket::receive(&client.socket)? {
            let goes_on = match ToHostPool::decode(&frame)? {
                ToHostPool::Populate { offset, bytes, processor } => {
                    let deadline = Instant::now() + self.late_allow;
                    self.push(client, Request { offset, bytes, processor, deadline })
                }
                ToHostPool::OpenDisk => {
                    if writers.is_none() && self.have_ended(earlier.as_ref()) {
                        writers = self.open_disk(client);
                    }
                    let file = writers.as_ref().map(|writers| &writers.file);
                    let reply = FromHostPool::DiskFile { done: file.is_some() };
                    let file = file.map(|file| file.readable());
                    socket::send(&client.socket, &reply.encode(), file)?;
                    true
                }
                ToHostPool::Store { offset, bytes, key } => {
                    let piece = Piece { offset, bytes, key };
                    // A process that has no disk file does not keep to the protocol.
                    writers.as_ref().is_some_and(|writers| writers.push(piece))
                }
                ToHostPool::CloseDisk => {
                    earlier = writers.take().map(DiskWriters::close).or(earlier);
                    true
                }
            };
            if !goes_on {
                break;
            }
        }
        Ok(())
    }

    /// Adds a request to the queue, when there is space. False: the connection has ended.
    fn push(&self, client: &Client, request: Request) -> bool {
        let mut state = self.lock();
        while state.queue.is_full(client.id) {
            state = client.room.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let pushed = state.queue.push(client.id, request);
        drop(state);
        self.work.notify_one();
        pushed
    }

    /// Waits until the threads of a process's earlier disk file have ended. A process has threads for
    /// one file only. False: they have not ended in time.
    fn have_ended(&self, earlier: Option<&EarlierWriters>) -> bool {
        let run = |_: &mut State| earlier.is_some_and(|earlier| !earlier.have_ended());
        let waited = self.unused.wait_timeout_while(self.lock(), EARLIER_END, run);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// Creates the disk file of a process, if the process may have one.
    fn open_disk(self: &Arc<Self>, client: &Arc<Client>) -> Option<DiskWriters> {
        let folder = self.disk.as_ref()?;
        if !client.disk_allowance.is_given(self.late_allow) {
            return None;
        }
        let process = client.process;
        let file = DiskFile::create(folder).inspect_err(|error| {
            let error: &dyn std::error::Error = error;
            tracing::warn!(error, "process {process}: its content stays in host memory");
        });
        let started = DiskWriters::start(self, client, file.ok()?);
        let failed = |error: &io::Error| tracing::warn!(%error, "cannot start a disk thread");
        started.inspect_err(failed).ok()
    }

    /// Body of a worker.
    fn work(&self) {
        while let Some((client, job)) = self.next_job() {
            let request = job.request;
            let elsewhere_bytes = self.lock().ended_files.used_bytes(client.container);
            let populate = || client.populate(request, elsewhere_bytes);
            let populated = catch_unwind(AssertUnwindSafe(populate));
            self.conclude(&client, &job, populated.unwrap_or(Populated::Refused));
            self.let_go(client);
        }
    }

    /// Waits for the next request. Returns `None` if the pool has stopped.
    fn next_job(&self) -> Option<(Arc<Client>, Job)> {
        let mut state = self.lock();
        loop {
            if state.has_stopped {
                return None;
            }
            let now = Instant::now();
            if let Some(job) = state.queue.take(now) {
                if let Some(client) = state.clients.get(&job.client) {
                    return Some((Arc::clone(client), job));
                }
                continue;
            }
            let deadline = state.queue.next_deadline();
            state = match deadline.map(|deadline| deadline.saturating_duration_since(now)) {
                Some(rest) => {
                    let waited = self.work.wait_timeout(state, rest);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.work.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    /// Replies to a request, or parks it.
    fn conclude(&self, client: &Client, job: &Job, populated: Populated) {
        if populated == Populated::NoRoom && self.lock().queue.park(job, Instant::now()) {
            // A waiting worker has to notice the deadline.
            self.work.notify_one();
            return;
        }
        let done = populated == Populated::Done;
        let reply = FromHostPool::Populated { offset: job.request.offset, done };
        if socket::send(&client.socket, &reply.encode(), None::<BorrowedFd<'_>>).is_err() {
            self.end(client);
        }
        self.lock().queue.finish(job);
        client.room.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Starts a thread with a small stack.
///
/// # Errors
/// The kernel permits no further thread.
pub fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new().name(name.to_owned()).stack_size(STACK_BYTES).spawn(body).map(drop)
}
