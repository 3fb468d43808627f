//! What a failed test shows of its world before it is removed.

use std::path::Path;

/// Lines that are shown of each log.
const LINES: usize = 40;

/// Prints the ends of all logs in `dir` and its `run` and `io` folders to standard error,
/// and keeps them whole where `AFFINODE_E2E_KEEP_LOGS` names a folder.
#[expect(clippy::print_stderr, reason = "a failing test's output")]
pub(crate) fn show(dir: &Path) {
    let keep = std::env::var_os("AFFINODE_E2E_KEEP_LOGS").map(std::path::PathBuf::from);
    for folder in [dir.to_path_buf(), dir.join("run"), dir.join("io")] {
        let Ok(entries) = std::fs::read_dir(&folder) else {
            continue;
        };
        for path in entries.flatten().map(|entry| entry.path()) {
            if path.extension().is_none_or(|extension| extension != "log") {
                continue;
            }
            let Ok(text) = std::fs::read_to_string(&path) else {
                continue;
            };
            let lines: Vec<&str> = text.lines().collect();
            let tail = &lines[lines.len().saturating_sub(LINES)..];
            eprintln!("--- {}\n{}", path.display(), tail.join("\n"));
            if let (Some(keep), Some(name)) = (&keep, path.file_name()) {
                let world = dir.file_name().unwrap_or_default();
                let folder = keep.join(world);
                // Best effort: the test has failed already.
                let _ = std::fs::create_dir_all(&folder);
                let _ = std::fs::copy(&path, folder.join(name));
            }
        }
    }
}
