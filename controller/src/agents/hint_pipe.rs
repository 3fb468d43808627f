//! A pipe in the folder that a container sees, into which it writes `idle` and `busy`. The
//! folder is read-only for it, a pipe takes words all the same, and holds 64 KiB at most.

use std::{
    fs::{self, File, OpenOptions, Permissions},
    io::{self, Read},
    os::unix::fs::{FileTypeExt, OpenOptionsExt, PermissionsExt},
    path::Path,
};

use nix::{libc::O_NONBLOCK, sys::stat::Mode, unistd::mkfifo};

/// What is read at once: of what was written since the last look the end counts.
const MOST_BYTES: usize = 64 << 10;

/// The reading end. It is a writing end as well, so that the container may come and go.
#[derive(Debug)]
pub struct HintPipe(File);

impl HintPipe {
    /// Makes the pipe, or opens the one that an earlier controller made: who is writing into
    /// it goes on.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn make(path: &Path) -> io::Result<HintPipe> {
        match fs::symlink_metadata(path) {
            Ok(known) if known.file_type().is_fifo() => {}
            Ok(_) => return Err(io::Error::other("there is something else of its name")),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                mkfifo(path, Mode::from_bits_truncate(0o622))?;
            }
            Err(e) => return Err(e),
        }
        fs::set_permissions(path, Permissions::from_mode(0o622))?;
        let file = OpenOptions::new().read(true).write(true).custom_flags(O_NONBLOCK).open(path)?;
        Ok(HintPipe(file))
    }

    /// What was written since the last look.
    #[must_use]
    pub fn read(&self) -> Vec<u8> {
        let mut buffer = [0; 512];
        let mut heard = Vec::new();
        let mut left = MOST_BYTES;
        // Nothing more to read is an error too, and the end of it.
        while left > 0
            && let Ok(bytes @ 1..) = (&self.0).read(&mut buffer)
        {
            heard.extend_from_slice(&buffer[..bytes]);
            left = left.saturating_sub(bytes);
            let old = heard.len().saturating_sub(buffer.len());
            heard.drain(..old);
        }
        heard
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn the_end_of_what_was_written_is_heard_and_a_flood_is_bounded() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hint");
        let pipe = HintPipe::make(&path).unwrap();
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
        let heard = pipe.read();
        assert!(heard.len() <= 512 && heard.ends_with(b" idle"));
        // The next controller opens the same one.
        write(b"busy");
        drop(pipe);
        assert!(HintPipe::make(&path).is_ok());
    }
}
