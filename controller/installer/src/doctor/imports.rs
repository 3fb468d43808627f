//! Finds the files that containerd's file imports. containerd 2 does not start if an imported file
//! is missing, and its `config dump` does not report that.

use std::{
    collections::VecDeque,
    fs,
    path::{Path, PathBuf},
};

use toml::{Table, Value};

/// Maximum number of files that are read. The limit also ends a search in cyclic imports.
const MAX_FILES: usize = 1_000;

/// The files from which containerd's configuration is made, and the first missing import.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ConfigImports {
    /// containerd's own file, and all files that it imports directly or through other files. Each
    /// file comes after the files whose settings it overrides.
    pub files: Vec<PathBuf>,
    /// The first missing file, and the file that imports it.
    pub missing: Option<(PathBuf, PathBuf)>,
}

/// Finds all files that a file imports, directly or through other files.
pub fn of(root: &Path) -> ConfigImports {
    let mut found = ConfigImports::default();
    let mut left = VecDeque::from([root.to_owned()]);
    while let Some(file) = left.pop_front().filter(|_| found.files.len() < MAX_FILES) {
        if found.files.contains(&file) {
            continue;
        }
        for import in imports(&file) {
            match import.to_string_lossy().contains(['*', '?', '[']) {
                true => left.extend(matching(&import)),
                false if import.exists() => left.push_back(import),
                false => found.missing = found.missing.or_else(|| Some((import, file.clone()))),
            }
        }
        found.files.push(file);
    }
    found
}

/// Returns the paths in the `imports` list of one file. Relative paths start at the folder of that
/// file.
fn imports(file: &Path) -> Vec<PathBuf> {
    let text = fs::read_to_string(file).unwrap_or_default();
    let said = text.parse::<Table>().unwrap_or_default();
    let imports = said.get("imports").and_then(Value::as_array).into_iter().flatten();
    let folder = file.parent().unwrap_or(Path::new("/"));
    imports.filter_map(Value::as_str).map(|import| folder.join(import)).collect()
}

/// Returns the files that match a pattern with one star in its last part. For other patterns, the
/// list is empty.
fn matching(pattern: &Path) -> Vec<PathBuf> {
    let name = pattern.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let (Some(folder), Some((head, tail))) = (pattern.parent(), name.split_once('*')) else {
        return Vec::new();
    };
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let files = entries.map(|entry| entry.path());
    let fits = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.len() >= head.len() + tail.len() && name.starts_with(head) && name.ends_with(tail)
    };
    let mut files: Vec<_> = files.filter(fits).collect();
    files.sort();
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_import_is_found_at_any_depth() {
        let folder = tempfile::tempdir().unwrap();
        let [root, imported] = ["config.toml", "1.toml"].map(|name| folder.path().join(name));
        let import =
            |file: &Path, what: &str| fs::write(file, format!("imports = [{what}]")).unwrap();
        let missing = |file: &Path| of(file).missing;
        import(&root, "\"*.toml\", \"/nonexistent/*.toml\"");
        assert_eq!(missing(&root), None, "a pattern may match nothing");
        import(&imported, "\"config.toml\", \"other.conf\"");
        assert_eq!(of(&root).files, [&root, &imported].map(PathBuf::clone));
        let named = Some((folder.path().join("other.conf"), imported.clone()));
        assert_eq!(missing(&root), named);
        import(&root, "\"1.toml\"");
        assert_eq!(missing(&root), named);
        import(&imported, "\"config.toml\"");
        assert_eq!(missing(&root), None, "in a ring");
    }
}
