//! Lists the processes of a testbed, which are the descendants of its supervisor.

use std::{
    collections::{BTreeSet, HashMap},
    fs::File,
    os::unix::fs::FileExt,
};

use affinode_proto::wire::counters::PAGE_BYTES;
use anyhow::{Context, Result};
use nix::unistd::Pid;

/// A process and its command line.
#[derive(Clone, Debug)]
pub struct Process {
    /// Process id on the host.
    pub pid: Pid,
    /// Program and arguments, separated by blanks.
    pub command: String,
}

/// Returns the target of each open descriptor of a process: `socket:[…]`, `/memfd:…`, or a path.
///
/// # Errors
/// When the process has ended.
pub fn descriptors(pid: i32) -> Result<Vec<String>> {
    let folder = format!("/proc/{pid}/fd");
    let entries = std::fs::read_dir(&folder).with_context(|| folder)?;
    // A descriptor that was closed since the listing is skipped.
    let links = entries.flatten().filter_map(|entry| std::fs::read_link(entry.path()).ok());
    Ok(links.map(|link| link.to_string_lossy().into_owned()).collect())
}

/// Returns the resident memory of a process, in bytes.
///
/// # Errors
/// When the process has ended.
pub fn resident_bytes(pid: i32) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line
        .and_then(|line| line.trim().strip_suffix(" kB"))
        .context("/proc/PID/status has no VmRSS")?;
    Ok(kib.trim().parse::<u64>()? << 10)
}

/// Returns the inodes of the sealed memory files that a process has mapped. Such a file stores
/// contents that several processes share.
///
/// # Errors
/// When the process has ended.
pub fn sealed_files(pid: i32) -> Result<BTreeSet<String>> {
    let maps = format!("/proc/{pid}/maps");
    let maps = std::fs::read_to_string(&maps).with_context(|| maps)?;
    let sealed = maps.lines().filter(|line| line.contains("memfd:affinode-shared"));
    Ok(sealed.filter_map(|line| line.split_whitespace().nth(4)).map(str::to_owned).collect())
}

/// Reads the shared page in which a CUDA process of a container counts its calls. The process may
/// be stopped.
///
/// # Errors
/// When the process has ended, or has made no CUDA call yet.
pub fn counters(pid: i32) -> Result<Vec<u8>> {
    let maps = format!("/proc/{pid}/maps");
    let maps = std::fs::read_to_string(&maps).with_context(|| maps)?;
    let start = maps
        .lines()
        .find(|line| line.contains("memfd:affinode-page"))
        .and_then(|line| u64::from_str_radix(line.split_once('-')?.0, 16).ok())
        .with_context(|| format!("process {pid} has no counters"))?;
    let mut counters = vec![0; PAGE_BYTES];
    let memory = format!("/proc/{pid}/mem");
    File::open(&memory)
        .and_then(|memory| memory.read_exact_at(&mut counters, start))
        .with_context(|| format!("cannot read the counters in {memory}"))?;
    Ok(counters)
}

/// Whether a process has ended but was not reaped.
#[must_use]
pub fn is_zombie(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('Z'))
}

/// Lists all descendants of the process `of` whose command line contains `part`.
pub fn named(part: &str, of: i32) -> Result<Vec<Process>> {
    let found = descendants(of)?.into_iter().filter_map(|pid| {
        let raw = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let command = String::from_utf8_lossy(&raw).replace('\0', " ");
        command.contains(part).then(|| Process { pid: Pid::from_raw(pid), command })
    });
    Ok(found.collect())
}

/// Returns the process ids of all descendants of a process.
pub(crate) fn descendants(of: i32) -> Result<Vec<i32>> {
    let mut children: HashMap<i32, Vec<i32>> = HashMap::new();
    for entry in std::fs::read_dir("/proc").context("cannot read /proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        // A process that has ended since the listing has no parent.
        if let Some(parent) = parent(pid) {
            children.entry(parent).or_default().push(pid);
        }
    }
    let mut found = Vec::new();
    let mut look = vec![of];
    while let Some(pid) = look.pop() {
        let below = children.remove(&pid).unwrap_or_default();
        found.extend(&below);
        look.extend(below);
    }
    Ok(found)
}

fn parent(pid: i32) -> Option<i32> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command name can contain any character, including blanks and parentheses.
    let after = stat.rsplit_once(") ")?.1;
    after.split(' ').nth(1)?.parse().ok()
}
