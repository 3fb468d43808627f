//! Stores operator overrides (such as pins) on disk for the next controller, next to the journal.

use std::{fs, io, path::Path};

use affinode_core::{Key, overrides::OperatorOverrides};
use serde::{Deserialize, Serialize};

const FILE: &str = "operator-overrides.json";
const VERSION: u32 = 1;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct OverridesRecord {
    version: u32,
    auto_offload: bool,
    pinned: Vec<String>,
}

/// Reads the operator overrides from disk. If the file does not exist, there are no overrides.
///
/// # Errors
/// The file cannot be read, or is not valid.
pub fn read(run_dir: &Path) -> io::Result<OperatorOverrides> {
    let text = match fs::read(run_dir.join(FILE)) {
        Ok(text) => text,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(OperatorOverrides::default()),
        Err(e) => return Err(e),
    };
    let record: OverridesRecord = serde_json::from_slice(&text)?;
    if record.version != VERSION {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "another version"));
    }
    let pinned = record.pinned.iter().filter_map(|key| Key::parse(key).ok()).collect();
    Ok(OperatorOverrides { auto_offload: record.auto_offload, pinned })
}

/// Writes the operator overrides to disk. A reader sees the old file or the new file, never a part.
///
/// # Errors
/// The file cannot be written.
pub fn write(run_dir: &Path, wishes: &OperatorOverrides) -> io::Result<()> {
    let pinned = wishes.pinned.iter().map(Key::to_string).collect();
    let record = OverridesRecord { version: VERSION, auto_offload: wishes.auto_offload, pinned };
    let fresh = run_dir.join(format!(".{FILE}"));
    fs::write(&fresh, serde_json::to_vec(&record)?)?;
    fs::rename(fresh, run_dir.join(FILE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overrides_persist() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(read(folder.path()).unwrap(), OperatorOverrides::default());
        let key = Key::parse(&"a".repeat(32)).unwrap();
        let chosen = OperatorOverrides { auto_offload: false, pinned: [key].into() };
        write(folder.path(), &chosen).unwrap();
        assert_eq!(read(folder.path()).unwrap(), chosen);
        fs::write(folder.path().join(FILE), "{").unwrap();
        assert!(read(folder.path()).is_err());
    }
}
