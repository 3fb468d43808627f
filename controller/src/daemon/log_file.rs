//! Limits the size of the log file to which standard error is directed. A full file is renamed, and
//! a new file takes its place. The renamed file replaces the file of the previous rename, so at
//! most two files exist.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use tracing_subscriber::fmt::MakeWriter;

/// Size in bytes at which the log file is full and is renamed. The size is small, because the log
/// file and the renamed file are in /run, which is in memory.
const MAX_BYTES: u64 = 4 << 20;

/// Writes log lines to standard error, and limits the size of the file behind it.
#[derive(Clone, Debug)]
pub struct LogOutput(Arc<Mutex<LogSink>>);

#[derive(Debug)]
struct LogSink {
    file: Option<PathBuf>,
    bytes: u64,
}

impl LogOutput {
    /// Creates the writer for the current standard error. The size is limited only if standard
    /// error is a regular file with a known path.
    #[must_use]
    pub fn standard_error() -> LogOutput {
        let name = fs::read_link("/proc/self/fd/2").ok();
        let same = |path: &PathBuf| -> Option<u64> {
            let (open, named) = (rustix::fs::fstat(io::stderr()).ok()?, path.metadata().ok()?);
            let regular =
                named.is_file() && (open.st_dev, open.st_ino) == (named.dev(), named.ino());
            regular.then_some(named.len())
        };
        let bytes = name.as_ref().and_then(same);
        let file = name.filter(|_| bytes.is_some());
        LogOutput(Arc::new(Mutex::new(LogSink { file, bytes: bytes.unwrap_or(0) })))
    }
}

impl LogSink {
    /// Returns the path of the log file if the file is full. The caller must rename the file before
    /// it writes the next line. For each full file, the path is returned only once.
    fn full(&mut self) -> Option<PathBuf> {
        let file = self.file.clone().filter(|_| self.bytes >= MAX_BYTES)?;
        self.bytes = 0;
        Some(file)
    }
}

impl<'a> MakeWriter<'a> for LogOutput {
    type Writer = LogOutput;

    fn make_writer(&'a self) -> LogOutput {
        self.clone()
    }
}

impl Write for LogOutput {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut sink = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // If no new file can be created, logging continues in the old file.
        if let Some(file) = sink.full()
            && let Ok(fresh) = turn(&file)
        {
            let _ = rustix::stdio::dup2_stderr(&fresh);
        }
        let written = io::stderr().write(line)?;
        sink.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

/// Renames the log file, and creates a new file with its name. If this fails, the log file keeps its
/// name, so that the next call can succeed.
fn turn(path: &Path) -> io::Result<File> {
    let [before, fresh] = [".1", ".new"].map(|end| {
        let mut name = path.as_os_str().to_owned();
        name.push(end);
        PathBuf::from(name)
    });
    // A controller that was killed here may have left the file.
    let _ = fs::remove_file(&fresh);
    let file = OpenOptions::new().create_new(true).append(true).mode(0o640).open(&fresh)?;
    match fs::rename(path, &before) {
        // The log file was removed, but standard error still writes to it.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        renamed => renamed?,
    }
    if let Err(error) = fs::rename(&fresh, path) {
        let _ = fs::rename(&before, path);
        return Err(error);
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_file_is_renamed_once() {
        let mut file = LogSink { file: Some("/log".into()), bytes: MAX_BYTES - 1 };
        assert_eq!(file.full(), None);
        file.bytes += 1;
        assert_eq!((file.full(), file.full()), (Some("/log".into()), None));
        assert_eq!(LogSink { file: None, bytes: MAX_BYTES }.full(), None);
    }

    #[test]
    fn of_many_files_two_stay() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("controller.log");
        fs::write(&path, "first").unwrap();
        for words in ["second", "third"] {
            turn(&path).unwrap().write_all(words.as_bytes()).unwrap();
        }
        assert_eq!(fs::read_to_string(&path).unwrap(), "third");
        assert_eq!(fs::read_to_string(dir.path().join("controller.log.1")).unwrap(), "second");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    #[test]
    fn a_failed_turn_does_not_end_the_limit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("controller.log");
        fs::write(&path, "first").unwrap();
        // The new file cannot be created while a folder has its name.
        let blocked = dir.path().join("controller.log.new");
        fs::create_dir(&blocked).unwrap();
        turn(&path).unwrap_err();
        assert_eq!(fs::read_to_string(&path).unwrap(), "first");
        fs::remove_dir(&blocked).unwrap();
        for words in ["second", "third"] {
            turn(&path).unwrap().write_all(words.as_bytes()).unwrap();
        }
        assert_eq!(fs::read_to_string(dir.path().join("controller.log.1")).unwrap(), "second");
        fs::remove_file(&path).unwrap();
        turn(&path).unwrap().write_all(b"fourth").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "fourth");
    }
}
