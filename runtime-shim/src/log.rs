//! Writes log lines to stderr, as the stock shim does. For the daemon, stderr is the pipe `log` in
//! the bundle, which containerd copies to its own log. stdout is only for the reply to containerd.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use tracing::level_filters::LevelFilter;

/// Log output to stderr that ignores write errors. The pipe behind stderr has no reader while
/// containerd is stopped, and a shim must continue to run then.
#[derive(Clone, Copy, Debug)]
struct StderrLog;

impl Write for StderrLog {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // If the pipe is full, the line is lost.
        let _ = io::stderr().write_all(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Installs the logger for this level and above.
pub fn init(level: LevelFilter) {
    // Fails if a logger is installed already, which happens in tests.
    let _ = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(|| StderrLog)
        .with_ansi(false)
        .with_target(false)
        .log_internal_errors(false)
        .try_init();
}

/// Opens the pipe that containerd reads, for both directions and without blocking. Lines that are
/// written while containerd restarts stay in the pipe, up to its capacity.
pub fn open_pipe(bundle: &Path) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(i32::try_from(rustix::fs::OFlags::NONBLOCK.bits()).unwrap_or(0))
        .open(bundle.join("log"))
}
