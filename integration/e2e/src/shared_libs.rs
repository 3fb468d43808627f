//! Finds the shared libraries that a program needs, with the machine's own dynamic loader.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

/// Returns the files that the dynamic loader would map for `program`, except `program` itself.
/// Empty for a static program.
///
/// # Errors
/// When `ldd` cannot be run, or does not find a library.
pub fn libraries(program: &Path) -> Result<BTreeSet<PathBuf>> {
    let output = Command::new("ldd")
        .arg(program)
        .env_remove("LD_PRELOAD")
        .output()
        .context("cannot run ldd")?;
    let text = String::from_utf8_lossy(&output.stdout);
    if let Some(line) = text.lines().find(|line| line.contains("not found")) {
        bail!("{}: a library is missing: {}", program.display(), line.trim());
    }
    Ok(text.lines().filter_map(path_in).collect())
}

/// Returns the path in a line of `ldd`, such as `libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6
/// (0x…)` or `/lib64/ld-linux-x86-64.so.2 (0x…)`.
fn path_in(line: &str) -> Option<PathBuf> {
    let (before, _address) = line.trim().split_once(" (0x")?;
    let path = before.rsplit(' ').next()?;
    path.starts_with('/').then(|| PathBuf::from(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_of_a_line_are_read() {
        let resolved = "\tlibc.so.6 => /lib/x/libc.so.6 (0x00007f)";
        assert_eq!(path_in(resolved), Some("/lib/x/libc.so.6".into()));
        let loader = "\t/lib64/ld-linux-x86-64.so.2 (0x00007f)";
        assert_eq!(path_in(loader), Some("/lib64/ld-linux-x86-64.so.2".into()));
        assert_eq!(path_in("\tlinux-vdso.so.1 (0x00007f)"), None);
        assert_eq!(path_in("\tstatically linked"), None);
    }
}
