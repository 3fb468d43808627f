//! Stores operator overrides (such as pins) on disk for the next controller, next to the journal.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use affinode_core::{Key, overrides::OperatorOverrides};
use serde::{Deserialize, Serialize};

const FILE: &str = "operator-overrides.json";
/// Name under which a file is kept that could not be read.
const BAD_FILE: &str = "operator-overrides.json.bad";
const VERSION: u32 = 1;

/// Content of the file. Fields that this controller does not know are ignored, because a newer
/// controller may have written them before a downgrade.
#[derive(Serialize, Deserialize)]
struct OverridesRecord {
    version: u32,
    auto_offload: bool,
    pinned: Vec<String>,
}

/// Reads the operator overrides of the earlier controller from disk. If the file does not exist,
/// there are no overrides. If it cannot be read, automatic offloads are off, because an operator
/// may have turned them off, or may have pinned containers. In this case the file is kept under
/// another name, and the second value tells the operator what to do.
#[must_use]
pub fn recall(run_dir: &Path) -> (OperatorOverrides, Option<String>) {
    let error = match read(run_dir) {
        Ok(overrides) => return (overrides, None),
        Err(error) => error,
    };
    let safe = OperatorOverrides::default().with_auto_offload(false);
    let kept = match replace(run_dir, &safe) {
        Ok(kept) => format!("the file is kept as {}", kept.display()),
        Err(error) => format!("the file cannot be replaced: {error}"),
    };
    let text = format!(
        "automatic offloads are off and no container is pinned, because the operator overrides in \
         {} cannot be read: {error}; {kept}; pin containers again if needed, then run `affinode \
         auto-offload on`",
        run_dir.join(FILE).display()
    );
    (safe, Some(text))
}

fn read(run_dir: &Path) -> io::Result<OperatorOverrides> {
    let text = match fs::read(run_dir.join(FILE)) {
        Ok(text) => text,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(OperatorOverrides::default()),
        Err(e) => return Err(e),
    };
    let record: OverridesRecord = serde_json::from_slice(&text)?;
    let invalid = |why: String| io::Error::new(io::ErrorKind::InvalidData, why);
    if record.version != VERSION {
        let version = record.version;
        return Err(invalid(format!("its version is {version}, and only {VERSION} is known")));
    }
    let pinned = record.pinned.iter().map(|key| {
        Key::parse(key).map_err(|_| invalid(format!("{key:?} is not the key of a container")))
    });
    Ok(OperatorOverrides {
        auto_offload: record.auto_offload,
        pinned: pinned.collect::<Result<_, _>>()?,
    })
}

/// Replaces a file that cannot be read, and returns under which name it is kept. There is at most
/// one such file.
fn replace(run_dir: &Path, overrides: &OperatorOverrides) -> io::Result<PathBuf> {
    let kept = run_dir.join(BAD_FILE);
    match fs::remove_file(&kept) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    // The file must exist at every moment: without it, automatic offloads would be on.
    fs::hard_link(run_dir.join(FILE), &kept)?;
    write(run_dir, overrides)?;
    Ok(kept)
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
    }

    #[test]
    fn unknown_fields_are_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let newer = r#"{"version": 1, "auto_offload": false, "pinned": [], "windows": {}}"#;
        fs::write(folder.path().join(FILE), newer).unwrap();
        assert!(!read(folder.path()).unwrap().auto_offload);
    }

    #[test]
    fn unreadable_overrides_turn_offloads_off() {
        let folder = tempfile::tempdir().unwrap();
        let bad = ["{", r#"{"version": 2, "auto_offload": true, "pinned": []}"#];
        let bad_pin = r#"{"version": 1, "auto_offload": true, "pinned": ["no key"]}"#;
        for text in bad.into_iter().chain([bad_pin]) {
            fs::write(folder.path().join(FILE), text).unwrap();
            let (overrides, why) = recall(folder.path());
            assert!(!overrides.auto_offload && overrides.pinned.is_empty(), "{text}");
            let why = why.unwrap();
            assert!(why.contains(BAD_FILE) && why.contains("affinode auto-offload on"), "{why}");
            assert_eq!(fs::read_to_string(folder.path().join(BAD_FILE)).unwrap(), text);
            // The next controller reads this too.
            assert_eq!(recall(folder.path()), (overrides, None));
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }
}
