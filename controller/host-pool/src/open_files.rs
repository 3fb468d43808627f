//! Disk files that their processes may still have open, although the connections of the processes have
//! ended. They take space until the processes close them. The kernel reports this moment.

use std::{
    collections::BTreeMap,
    io,
    mem::MaybeUninit,
    os::fd::{AsRawFd, OwnedFd},
    sync::{Mutex, MutexGuard, PoisonError},
};

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};

/// Size of the buffer for events of the kernel, in bytes. It has space for several events.
const BUFFER_BYTES: usize = 512;

/// The files, and the kernel's events about them.
#[derive(Debug)]
pub struct OpenFiles {
    events: OwnedFd,
    /// Size of each file in bytes, by the number of its watch.
    bytes: Mutex<BTreeMap<i32, u64>>,
}

impl OpenFiles {
    /// Creates an empty list.
    ///
    /// # Errors
    /// The kernel permits no further inotify instance.
    pub fn new() -> io::Result<OpenFiles> {
        let events = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        Ok(OpenFiles { events, bytes: Mutex::default() })
    }

    /// Adds a file without a name, which the caller is about to close.
    ///
    /// # Errors
    /// The kernel permits no further watch.
    pub fn add(&self, file: &OwnedFd, bytes: u64) -> io::Result<()> {
        // An event can come as soon as the watch exists.
        let mut all = self.bytes();
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let watch = inotify::add_watch(&self.events, path, WatchFlags::DELETE_SELF)?;
        all.insert(watch, bytes);
        Ok(())
    }

    /// Removes the files that no process has open any more. Returns the sum of their sizes in bytes.
    pub fn closed_bytes(&self) -> u64 {
        let mut all = self.bytes();
        let mut buffer = [MaybeUninit::uninit(); BUFFER_BYTES];
        let mut events = Reader::new(&self.events, &mut buffer);
        let mut closed_bytes = 0;
        // An error means that there are no further events.
        while let Ok(event) = events.next() {
            if event.events().intersects(ReadFlags::DELETE_SELF | ReadFlags::IGNORED) {
                closed_bytes += all.remove(&event.wd()).unwrap_or(0);
            }
        }
        closed_bytes
    }

    fn bytes(&self) -> MutexGuard<'_, BTreeMap<i32, u64>> {
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
