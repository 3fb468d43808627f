//! The shared libraries that a program needs, from the machine's own loader.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

/// The files that the dynamic loader would map for `program`, without `program` itself. A static
/// program has none.
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

/// The path in a line such as `libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x…)` or
/// `/lib64/ld-linux-x86-64.so.2 (0x…)`.
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
