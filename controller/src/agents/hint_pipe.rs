//! Reads hints (`idle` or `busy`) that a container writes into a pipe. The pipe is in the folder
//! that is mounted into the container. The folder is read-only for the container, but a pipe in it
//! can still be written. The pipe holds at most 64 KiB.

use std::{
    fs::{self, File, OpenOptions, Permissions},
    io::{self, Read},
    os::unix::fs::{FileTypeExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use nix::{libc::O_NONBLOCK, sys::stat::Mode, unistd::mkfifo};

use crate::sys;

/// Maximum number of bytes per read. Only the last hint in the text matters.
const MAX_BYTES: usize = 64 << 10;
/// Number of bytes of unprocessed text that are kept. Older text is dropped.
const KEPT_BYTES: usize = 512;
/// Minimum time between two readings while a container writes without pause.
const PACE: Duration = Duration::from_millis(50);

/// Text that was read from a hint pipe and not yet processed by the actor.
#[derive(Clone, Debug, Default)]
pub struct ReceivedHint(Arc<Mutex<Vec<u8>>>);

impl ReceivedHint {
    /// Returns the received text and empties the buffer.
    #[must_use]
    pub fn take(&self) -> Vec<u8> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn add(&self, more: &[u8]) {
        let mut received = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        received.extend_from_slice(more);
        let old = received.len().saturating_sub(KEPT_BYTES);
        received.drain(..old);
    }
}

/// Reading end of a hint pipe. The file is also open for writing. Otherwise, a read would return an
/// end of file whenever no program of the container has the pipe open.
#[derive(Debug)]
pub struct HintPipe(File);

/// Creates the hint pipe. A pipe of an earlier controller is kept, so that its writers can
/// continue.
///
/// # Errors
/// The pipe cannot be created, or another file has its name.
pub fn make(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(known) if known.file_type().is_fifo() => {}
        Ok(_) => {
            return Err(io::Error::other("the file at the path of the hint pipe is not a pipe"));
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            mkfifo(path, Mode::from_bits_truncate(0o622))?;
        }
        Err(e) => return Err(e),
    }
    fs::set_permissions(path, Permissions::from_mode(0o622))
}

/// Reads all text that the container writes into its hint pipe. Must run on the container's own
/// thread, because opening or reading a pipe can block: the kernel waits until a write in progress
/// ends. Page faults of the writer can delay that end without limit.
pub async fn listen(path: PathBuf, received: ReceivedHint) {
    let pipe = HintPipe::open(&path);
    let watched =
        pipe.and_then(|pipe| Ok((sys::watch_readable(pipe.0.try_clone()?.into())?, pipe)));
    let (watched, pipe) = match watched {
        Ok(opened) => opened,
        Err(error) => {
            tracing::warn!(
                %error,
                "cannot read the pipe {}, so the container cannot report that it is idle or busy",
                path.display()
            );
            return;
        }
    };
    while let Ok(mut ready) = watched.readable().await {
        loop {
            let more = pipe.read();
            if more.is_empty() {
                break;
            }
            received.add(&more);
            // A container that writes without pause costs at most one reading per PACE.
            tokio::time::sleep(PACE).await;
        }
        ready.clear_ready();
    }
}

impl HintPipe {
    fn open(path: &Path) -> io::Result<HintPipe> {
        let file = OpenOptions::new().read(true).write(true).custom_flags(O_NONBLOCK).open(path)?;
        Ok(HintPipe(file))
    }

    /// Returns the text that was written into the pipe since the last reading.
    #[must_use]
    fn read(&self) -> Vec<u8> {
        let mut buffer = [0; KEPT_BYTES];
        let mut received = Vec::new();
        let mut left = MAX_BYTES;
        // A read of an empty pipe fails (EAGAIN), which ends the loop.
        while left > 0
            && let Ok(bytes @ 1..) = (&self.0).read(&mut buffer)
        {
            received.extend_from_slice(&buffer[..bytes]);
            left = left.saturating_sub(bytes);
            let old = received.len().saturating_sub(buffer.len());
            received.drain(..old);
        }
        received
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_long_text_keeps_its_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hint");
        make(&path).unwrap();
        let pipe = HintPipe::open(&path).unwrap();
        assert_eq!(pipe.read(), b"");
        let write = |text: &[u8]| {
            let mut container = OpenOptions::new().write(true).open(&path).unwrap();
            container.write_all(text).unwrap();
        };
        write(b"busy\n");
        write(b"idle\n");
        assert_eq!(pipe.read(), b"busy\nidle\n");
        write(&[b'x'; 32 << 10]);
        write(b" idle");
        let received = pipe.read();
        assert!(received.len() <= 512 && received.ends_with(b" idle"));
        // The next controller opens the same pipe.
        write(b"busy");
        drop(pipe);
        make(&path).unwrap();
        assert!(HintPipe::open(&path).is_ok());
    }

    #[tokio::test]
    async fn an_existing_pipe_is_read_too() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hint");
        for _ in 0..2 {
            make(&path).unwrap();
            let received = ReceivedHint::default();
            let listens = tokio::spawn(listen(path.clone(), received.clone()));
            let (to, words) = (path.clone(), |word: &str| format!("{word}\n"));
            for word in ["idle", "busy"] {
                let (to, text) = (to.clone(), words(word));
                tokio::task::spawn_blocking(move || {
                    OpenOptions::new().write(true).open(to).unwrap().write_all(text.as_bytes())
                })
                .await
                .unwrap()
                .unwrap();
                let mut said = Vec::new();
                while said.is_empty() {
                    tokio::task::yield_now().await;
                    said = received.take();
                }
                assert_eq!(said, words(word).into_bytes());
            }
            listens.abort();
            let _ = listens.await;
        }
    }
}
