//! Stores the journal: one record per container, in a file below the run directory. The controller
//! writes a record before a destructive step. The next controller can then determine the VRAM that
//! each process needs for its restore. Processes do not outlive a reboot, so a tmpfs is sufficient.
//!
//! The tmpfs can be full when a restore begins. So each record has a spare file next to it, whose
//! space is reserved while the container is offloaded. The next record is written into the spare
//! file, and the two files exchange their names. A record ends with spaces that fill the reserved
//! space, so that both files keep it.
//!
//! ```text
//! affinode-journal 1 <sha256 of the rest, hex>
//! {"step":"checkpoint","processes":[…]}
//! ```

use std::{
    fs::{self, File},
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use affinode_core::{Key, Record};
use rustix::fs::{CWD, FallocateFlags, RenameFlags};
use sha2::{Digest, Sha256};

const TITLE: &str = "affinode-journal 1";
/// Maximum size of a journal record in bytes. A record with the maximum number of processes is far
/// smaller.
const MAX_BYTES: u64 = 1 << 20;
/// Size to which the space of a spare file is rounded up, in bytes: a page of the tmpfs.
const PAGE_BYTES: u64 = 4096;

/// Result of reading the journal: valid records, and the fault of each invalid record.
pub type Found = (Vec<(Key, Record)>, Vec<String>);

/// The folder in which the journal's records are stored.
#[derive(Clone, Debug)]
pub struct Journal {
    folder: PathBuf,
}

impl Journal {
    /// Opens the folder of the journal, or creates it.
    ///
    /// # Errors
    /// The folder cannot be created.
    pub fn open(folder: &Path) -> io::Result<Journal> {
        fs::create_dir_all(folder)?;
        let journal = Journal { folder: folder.to_owned() };
        journal.complete()?;
        Ok(journal)
    }

    /// Completes what a controller that ended left: removes spare files without a record, and
    /// reserves missing spare files.
    fn complete(&self) -> io::Result<()> {
        for entry in fs::read_dir(&self.folder)?.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if let Ok(key) = Key::parse(&name) {
                let text = fs::read_to_string(entry.path()).unwrap_or_default();
                self.reserve(&key, text.trim_end().len() as u64);
            } else if let Some(Ok(key)) = name.strip_prefix('.').map(Key::parse)
                && !self.record(&key).exists()
            {
                let _ = fs::remove_file(entry.path());
            }
        }
        Ok(())
    }

    fn record(&self, key: &Key) -> PathBuf {
        self.folder.join(key.as_str())
    }

    fn spare(&self, key: &Key) -> PathBuf {
        self.folder.join(format!(".{key}"))
    }

    /// Reserves space in the spare file for a record that is up to twice as large as one of this
    /// size. Without it, the next record can only be written if the file system has free space then.
    fn reserve(&self, key: &Key, record_bytes: u64) {
        let bytes = (2 * record_bytes).next_multiple_of(PAGE_BYTES).min(MAX_BYTES);
        let reserved = open(&self.spare(key)).and_then(|spare| {
            Ok(rustix::fs::fallocate(&spare, FallocateFlags::empty(), 0, bytes)?)
        });
        if let Err(error) = reserved {
            tracing::warn!(%key, %error, "container {key}: cannot reserve space for the next journal record. Free space on the file system of the run directory");
        }
    }

    /// Writes the record of a container. A reader sees the old record or the new record, never a
    /// part. If the container has a record already, this needs no further space.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, key: &Key, record: &Record) -> io::Result<()> {
        let body = serde_json::to_string(record)?;
        let (record, spare) = (self.record(key), self.spare(key));
        let text_bytes = text_of(&body).len() as u64;
        if !spare.exists() {
            self.reserve(key, text_bytes);
        }
        let file = open(&spare)?;
        // The record fills its file with spaces, which JSON ignores. A shorter file would return
        // space to the file system, and the space would not be reserved for later records.
        let spaces = file.metadata()?.len().saturating_sub(text_bytes);
        let text = text_of(&(body + &" ".repeat(usize::try_from(spaces).unwrap_or(0))));
        file.write_all_at(text.as_bytes(), 0)?;
        // The earlier record becomes the spare file, so its space stays reserved.
        if rustix::fs::renameat_with(CWD, &spare, CWD, &record, RenameFlags::EXCHANGE).is_err() {
            fs::rename(&spare, &record)?;
        }
        self.reserve(key, text_bytes);
        Ok(())
    }

    /// Removes the record of a container, if there is one.
    ///
    /// # Errors
    /// The file cannot be removed.
    pub fn remove(&self, key: &Key) -> io::Result<()> {
        // The record goes first: a spare file without a record means nothing.
        for file in [self.record(key), self.spare(key)] {
            match fs::remove_file(file) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// Reads every record of the journal. Also returns the fault of each record that cannot be
    /// read.
    ///
    /// # Errors
    /// The folder cannot be listed.
    pub fn read_all(&self) -> io::Result<Found> {
        let (mut good, mut bad) = (Vec::new(), Vec::new());
        for entry in fs::read_dir(&self.folder)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let Ok(key) = Key::parse(&name) else { continue };
            match read(&entry.path()) {
                Ok(record) => good.push((key, record)),
                Err(why) => bad.push(format!("{}: {why}", entry.path().display())),
            }
        }
        Ok((good, bad))
    }
}

/// Containers whose journal records were read from disk, and which are not announced yet. If a
/// container's shim died together with the controller that wrote the record, the container is never
/// announced.
#[derive(Debug, Default)]
pub struct UnclaimedEntry(Vec<(Key, Vec<(u32, u64)>)>);

impl UnclaimedEntry {
    /// Adds a container whose journal record was read from disk.
    pub fn add(&mut self, key: Key, record: &Record) {
        let processes = record.processes.iter().map(|p| (p.pid, p.start_ticks)).collect();
        self.0.push((key, processes));
    }

    /// Removes containers from this list, and returns those whose journal records are useless. A
    /// record is useless if its container is not announced and none of its processes (pid, start
    /// time) is running. Announced containers are removed but not returned.
    pub fn useless(
        &mut self,
        announced: impl Fn(&Key) -> bool,
        lives: impl Fn(u32, u64) -> bool,
    ) -> Vec<Key> {
        let mut useless = Vec::new();
        self.0.retain(|(key, processes)| {
            if announced(key) {
                return false;
            }
            let of_use = processes.iter().any(|(pid, start)| lives(*pid, *start));
            if !of_use {
                useless.push(key.clone());
            }
            of_use
        });
        useless
    }
}

/// Opens a file for writing, and keeps its content and its space.
fn open(path: &Path) -> io::Result<File> {
    File::options().create(true).truncate(false).write(true).open(path)
}

/// Returns the content of a journal file with this body.
fn text_of(body: &str) -> String {
    format!("{TITLE} {}\n{body}", digest(body))
}

fn digest(body: &str) -> String {
    Sha256::digest(body).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn read(path: &Path) -> Result<Record, String> {
    if fs::metadata(path).map_err(|e| e.to_string())?.len() > MAX_BYTES {
        return Err("the file is larger than the maximum size of a record".into());
    }
    let text = fs::read_to_string(path).map_err(|e| e.to_string())?;
    let (head, body) = text.split_once('\n').ok_or("the file has no first line")?;
    let sum = head
        .strip_prefix(TITLE)
        .ok_or("the file is not a journal record, or has another version")?
        .trim();
    if sum != digest(body) {
        return Err("the checksum does not match".into());
    }
    serde_json::from_str(body).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use affinode_core::{DeviceBytes, JournalStep, RecordedProcess};

    use super::*;

    #[test]
    fn a_record_without_live_process_is_useless() {
        let key = |n: u8| Key::parse(&format!("{n:032x}")).unwrap();
        let process =
            |pid| RecordedProcess { pid, start_ticks: 1, offloaded: Vec::new(), to: None };
        let record = |pid| Record { step: JournalStep::Checkpoint, processes: vec![process(pid)] };
        let mut unclaimed = UnclaimedEntry::default();
        (1..=3).for_each(|n| unclaimed.add(key(n), &record(n.into())));
        let announced = |k: &Key| *k == key(1);
        assert_eq!(unclaimed.useless(announced, |pid, _| pid == 3), [key(2)]);
        assert_eq!(unclaimed.useless(announced, |_, _| false), [key(3)]);
        assert!(unclaimed.useless(announced, |_, _| false).is_empty());
    }

    /// Checks that the words for journal steps do not change, because a later controller must read
    /// the words that an earlier controller wrote.
    #[test]
    fn journal_steps_keep_their_words() {
        let words =
            [(JournalStep::Checkpoint, "\"checkpoint\""), (JournalStep::Restore, "\"restore\"")];
        for (step, word) in words {
            assert_eq!(serde_json::to_string(&step).unwrap(), word);
        }
    }

    #[test]
    fn a_damaged_record_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let journal = Journal::open(folder.path()).unwrap();
        let key = Key::parse(&"a".repeat(32)).unwrap();
        let record = Record {
            step: JournalStep::Checkpoint,
            processes: vec![RecordedProcess {
                pid: 7,
                start_ticks: 9,
                offloaded: vec![DeviceBytes { uuid: "GPU-1".into(), bytes: 5 }],
                to: Some("GPU-2".into()),
            }],
        };
        journal.write(&key, &record).unwrap();
        assert_eq!(journal.read_all().unwrap().0, [(key.clone(), record)]);

        let path = folder.path().join(key.as_str());
        let text = fs::read_to_string(&path).unwrap().replace("\"pid\":7", "\"pid\":8");
        fs::write(&path, text).unwrap();
        let (good, bad) = journal.read_all().unwrap();
        assert!(good.is_empty() && bad[0].contains("checksum"), "{bad:?}");

        journal.remove(&key).unwrap();
        journal.remove(&key).unwrap();
        assert!(journal.read_all().unwrap().1.is_empty());
    }

    fn record_of(step: JournalStep, to: Option<String>) -> Record {
        let offloaded = vec![DeviceBytes { uuid: "GPU-1".into(), bytes: 5 }];
        let process = RecordedProcess { pid: 7, start_ticks: 9, offloaded, to };
        Record { step, processes: vec![process; 4] }
    }

    /// Mounts a file system that is soon full. Returns false, and notes the skipped test, if this is
    /// not permitted.
    fn mount_small(folder: &Path) -> bool {
        let mount = std::process::Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=64k", "none"])
            .arg(folder)
            .stderr(std::process::Stdio::null())
            .status();
        let mounted = mount.is_ok_and(|status| status.success());
        if !mounted {
            affinode_test_notes::skip("root", "only root can mount a file system");
        }
        mounted
    }

    /// A file system is full when a container must be restored. The record of the restore must be
    /// written nevertheless: without it, the next controller could promise the VRAM again.
    #[test]
    fn a_full_file_system_takes_the_next_record() {
        let folder = tempfile::tempdir().unwrap();
        if !mount_small(folder.path()) {
            return;
        }
        let journal = Journal::open(&folder.path().join("journal")).unwrap();
        let key = Key::parse(&"a".repeat(32)).unwrap();
        let other = Key::parse(&"b".repeat(32)).unwrap();
        journal.write(&key, &record_of(JournalStep::Checkpoint, None)).unwrap();
        let filled = fs::write(folder.path().join("filler"), vec![0; 1 << 17]);
        let refused = journal.write(&other, &record_of(JournalStep::Checkpoint, None));
        let restore = record_of(JournalStep::Restore, Some("GPU-2".into()));
        let written = [(); 3].map(|()| journal.write(&key, &restore).is_ok());
        let read = journal.read_all().unwrap();
        std::process::Command::new("umount").arg(folder.path()).status().unwrap();
        assert!(filled.is_err() && refused.is_err(), "the file system is full");
        assert_eq!(written, [true; 3]);
        assert_eq!(read, (vec![(key, restore)], Vec::new()));
    }

    /// The records of many processes need more than one page, and the record of a restore is larger
    /// than the one before it.
    #[test]
    fn a_full_file_system_takes_a_larger_record() {
        let folder = tempfile::tempdir().unwrap();
        if !mount_small(folder.path()) {
            return;
        }
        let journal = Journal::open(&folder.path().join("journal")).unwrap();
        let key = Key::parse(&"a".repeat(32)).unwrap();
        let many = |step, to: Option<&str>| {
            let mut record = record_of(step, to.map(str::to_owned));
            record.processes = vec![record.processes[0].clone(); 40];
            record
        };
        journal.write(&key, &many(JournalStep::Checkpoint, None)).unwrap();
        let filled = fs::write(folder.path().join("filler"), vec![0; 1 << 17]);
        let restore = many(JournalStep::Restore, Some("GPU-2b1c8a5e-0000-4000-8000-000000000000"));
        let mut written = Vec::new();
        for number in 0..4 {
            written.push(journal.write(&key, &restore).is_ok());
            // Others take whatever the journal returns to the file system.
            let _ = fs::write(folder.path().join(format!("filler-{number}")), vec![0; 1 << 17]);
        }
        let journal = Journal::open(&folder.path().join("journal")).unwrap();
        let read = journal.read_all().unwrap();
        std::process::Command::new("umount").arg(folder.path()).status().unwrap();
        assert!(filled.is_err(), "the file system is full");
        assert_eq!(written, [true; 4]);
        assert_eq!(read, (vec![(key, restore)], Vec::new()));
    }

    #[test]
    fn only_records_have_spare_files() {
        let folder = tempfile::tempdir().unwrap();
        let names = || {
            let entries = fs::read_dir(folder.path()).unwrap().flatten();
            let mut names: Vec<_> =
                entries.map(|entry| entry.file_name().into_string().unwrap()).collect();
            names.sort();
            names
        };
        let journal = Journal::open(folder.path()).unwrap();
        let [key, other] = ["a", "b"].map(|name| Key::parse(&name.repeat(32)).unwrap());
        let record = record_of(JournalStep::Checkpoint, None);
        journal.write(&key, &record).unwrap();
        journal.write(&key, &record).unwrap();
        let both = [format!(".{key}"), key.to_string()];
        assert_eq!(names(), both);
        // A controller was killed while it wrote a first record, and after it had written another.
        fs::write(folder.path().join(format!(".{other}")), "affinode-jour").unwrap();
        fs::remove_file(folder.path().join(format!(".{key}"))).unwrap();
        let journal = Journal::open(folder.path()).unwrap();
        assert_eq!(names(), both);
        assert_eq!(journal.read_all().unwrap().0.len(), 1);
        journal.remove(&key).unwrap();
        assert!(names().is_empty());
    }
}
