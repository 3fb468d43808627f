//! Prints the logs of a testbed after a failed test. The logs are printed before the testbed's
//! files are removed.

use std::path::{Path, PathBuf};

/// Number of lines that are printed from the end of each log.
const LINES: usize = 40;

/// Returns the paths of the log files in a testbed's folder, and in its subfolders `run` and `io`.
pub(crate) fn all(dir: &Path) -> impl Iterator<Item = PathBuf> {
    let folders = [dir.to_path_buf(), dir.join("run"), dir.join("io")];
    let entries = folders.into_iter().filter_map(|folder| std::fs::read_dir(folder).ok()).flatten();
    let paths = entries.flatten().map(|entry| entry.path());
    paths.filter(|path| path.extension().is_some_and(|extension| extension == "log"))
}

/// Prints the last lines of each log to standard error. If `AFFINODE_E2E_KEEP_LOGS` contains the
/// path of a folder, the logs are also copied to it.
#[expect(clippy::print_stderr, reason = "a failing test's output")]
pub(crate) fn show(dir: &Path) {
    for path in all(dir) {
        let Ok(text) = std::fs::read_to_string(&path) else {
            continue;
        };
        let lines: Vec<&str> = text.lines().collect();
        let tail = &lines[lines.len().saturating_sub(LINES)..];
        eprintln!("--- {}\n{}", path.display(), tail.join("\n"));
        keep(dir, &path);
    }
}

/// Copies a log of a testbed to the folder whose path is in the variable `AFFINODE_E2E_KEEP_LOGS`.
/// Without the variable, nothing is copied.
pub(crate) fn keep(dir: &Path, log: &Path) {
    let keep = std::env::var_os("AFFINODE_E2E_KEEP_LOGS").map(PathBuf::from);
    if let (Some(keep), Some(name)) = (keep, log.file_name()) {
        let folder = keep.join(dir.file_name().unwrap_or_default());
        // Errors are ignored here. The missing copy shows the failure.
        let _ = std::fs::create_dir_all(&folder);
        let _ = std::fs::copy(log, folder.join(name));
    }
}
