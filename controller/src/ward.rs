//! A thread with a runtime of its own for what strangers can hold up.
//!
//! Who reads from a Unix socket, or closes one, may have to let go of descriptors that are still in
//! it, and the kernel does not return before it has: of a TCP socket that lingers not before its
//! peer has everything, of a file of a file system in user space not before that answers. A pipe is
//! read under a lock that a writer holds while the memory that it writes from is brought in. None of
//! it has a deadline, so it happens where nobody but the same strangers waits.

use std::{future::Future, io, thread};

use tokio::{
    runtime::{Builder, Handle},
    sync::oneshot,
};

/// The thread. It ends, with all that runs there, when this is dropped; nobody waits for that.
#[derive(Debug)]
pub struct Ward {
    runtime: Handle,
    _end: oneshot::Sender<()>,
}

impl Ward {
    /// Begins a thread of this name.
    ///
    /// # Errors
    /// There is no more of something.
    pub fn begin(name: &str) -> io::Result<Ward> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let (end, ended) = oneshot::channel::<()>();
        let handle = runtime.handle().clone();
        let live = move || {
            let _ = runtime.block_on(ended);
        };
        thread::Builder::new().name(name.into()).spawn(live)?;
        Ok(Ward { runtime: handle, _end: end })
    }

    /// Runs something there.
    pub fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.runtime.spawn(work);
    }

    /// Its runtime, for what is made elsewhere and used there.
    #[must_use]
    pub fn runtime(&self) -> &Handle {
        &self.runtime
    }
}
