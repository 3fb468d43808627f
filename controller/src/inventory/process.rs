//! Reads and signals processes by their pid, through /proc.

use std::{collections::HashSet, fs, io};

use affinode_core::input::Identity;
use rustix::{
    io::Errno,
    process::{Pid, PidfdFlags, Signal},
};

/// Returns the identity of the process with this pid.
///
/// # Errors
/// The process has ended, or /proc cannot be read.
pub fn identity(pid: u32) -> io::Result<Identity> {
    let stat = read_stat(pid)?;
    let memory_cgroup = super::memory::cgroup_of(pid).unwrap_or_default();
    Ok(Identity { pid, start_ticks: stat.start_ticks, command: stat.command, memory_cgroup })
}

/// Returns whether the process with this pid and start time is still running.
#[must_use]
pub fn lives(pid: u32, start_ticks: u64) -> bool {
    read_stat(pid).is_ok_and(|now| now.start_ticks == start_ticks)
}

/// Ends a process: sends it SIGTERM, or SIGKILL if `by_force` is true. Sends no signal if the
/// process has ended or its pid belongs to another process.
///
/// # Errors
/// The kernel refuses the signal.
pub fn end(who: &Identity, by_force: bool) -> io::Result<()> {
    send(who, if by_force { Signal::KILL } else { Signal::TERM })
}

/// Sends a process SIGHUP, on which a daemon reads its configuration again. Sends no signal if the
/// process has ended or its pid belongs to another process.
///
/// # Errors
/// The kernel refuses the signal.
pub fn reload(who: &Identity) -> io::Result<()> {
    send(who, Signal::HUP)
}

fn send(who: &Identity, signal: Signal) -> io::Result<()> {
    let Some(pid) = i32::try_from(who.pid).ok().and_then(Pid::from_raw) else { return Ok(()) };
    // The descriptor refers to one process. Values that are read by pid afterwards belong to that
    // process, if it still runs.
    let pidfd = match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
        Err(Errno::SRCH) => return Ok(()),
        opened => opened?,
    };
    if !lives(who.pid, who.start_ticks) {
        return Ok(());
    }
    match rustix::process::pidfd_send_signal(&pidfd, signal) {
        Err(Errno::SRCH) => Ok(()),
        sent => Ok(sent?),
    }
}

/// Returns by how much a process's `CLOCK_MONOTONIC` is ahead of the controller's, in milliseconds.
/// It differs from 0 only in a time namespace.
#[must_use]
pub fn clock_ahead_ms(pid: u32) -> i64 {
    let offsets = fs::read_to_string(format!("/proc/{pid}/timens_offsets")).unwrap_or_default();
    monotonic_offset_ms(&offsets).unwrap_or(0)
}

fn monotonic_offset_ms(offsets: &str) -> Option<i64> {
    let mut words =
        offsets.lines().find_map(|line| line.strip_prefix("monotonic "))?.split_whitespace();
    let seconds: i64 = words.next()?.parse().ok()?;
    let nanoseconds: i64 = words.next()?.parse().ok()?;
    seconds.checked_mul(1_000)?.checked_add(nanoseconds / 1_000_000)
}

/// Returns whether a signal or a debugger has stopped the process.
#[must_use]
pub fn is_stopped(pid: u32) -> bool {
    read_stat(pid).is_ok_and(|stat| matches!(stat.state, 'T' | 't'))
}

/// Returns the lines of `/proc/PID/cgroup` of a process.
///
/// # Errors
/// The process has ended, or /proc cannot be read.
pub fn cgroups(pid: u32) -> io::Result<String> {
    fs::read_to_string(format!("/proc/{pid}/cgroup"))
}

/// Finds an unmanaged process: a process of `on_gpu` that is in the same cgroup as a process of
/// `ours`, but is neither in `ours` nor in `known`.
#[must_use]
pub fn stranger(ours: &[u32], known: &[u32], on_gpu: &[u32]) -> Option<u32> {
    let groups: HashSet<String> = ours.iter().filter_map(|pid| cgroups(*pid).ok()).collect();
    on_gpu
        .iter()
        .copied()
        .filter(|pid| !ours.contains(pid) && !known.contains(pid))
        .find(|pid| cgroups(*pid).is_ok_and(|group| groups.contains(&group)))
}

struct ProcessStat {
    command: String,
    state: char,
    start_ticks: u64,
}

fn read_stat(pid: u32) -> io::Result<ProcessStat> {
    // A process can set its name to any bytes. A name that is not UTF-8 must not make the read
    // fail.
    let bytes = fs::read(format!("/proc/{pid}/stat"))?;
    parse_stat(&String::from_utf8_lossy(&bytes)).ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidData, format!("cannot parse /proc/{pid}/stat"))
    })
}

/// Parses the line `pid (comm) state ppid …` of `/proc/PID/stat`. The command may contain spaces
/// and brackets.
fn parse_stat(text: &str) -> Option<ProcessStat> {
    let (open, close) = (text.find('(')?, text.rfind(')')?);
    let command = text.get(open + 1..close)?.to_owned();
    let mut rest = text.get(close + 1..)?.split_whitespace();
    let state = rest.next()?.chars().next()?;
    // Field 22 of the file; the state is field 3.
    let start_ticks = rest.nth(18)?.parse().ok()?;
    Some(ProcessStat { command, state, start_ticks })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_namespace_has_a_clock_offset() {
        let offsets = "monotonic           3     500000000\nboottime            0         0\n";
        assert_eq!(monotonic_offset_ms(offsets), Some(3_500));
        assert_eq!(monotonic_offset_ms("monotonic -2 1000000\n"), Some(-1_999));
        assert_eq!(clock_ahead_ms(std::process::id()), 0);
    }

    #[test]
    fn a_command_with_brackets_is_read() {
        let text = "12 (a) b (c)) T 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20";
        let stat = parse_stat(text).unwrap();
        assert_eq!((stat.command.as_str(), stat.state, stat.start_ticks), ("a) b (c)", 'T', 4711));
    }

    #[test]
    fn a_name_that_is_not_utf8_can_be_ended() {
        use std::os::unix::ffi::OsStrExt;
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join(std::ffi::OsStr::from_bytes(b"a\xff)\xfe"));
        fs::copy("/bin/sleep", &program).unwrap();
        let mut child = std::process::Command::new(program).arg("60").spawn().unwrap();
        let found = identity(child.id()).map(|who| (lives(who.pid, who.start_ticks), who));
        let ended = found.as_ref().map(|(_, who)| end(who, false).is_ok()).unwrap_or(false);
        if !ended {
            child.kill().unwrap();
        }
        child.wait().unwrap();
        let (lives, who) = found.unwrap();
        assert!(lives && ended && who.command.starts_with('a'), "{who:?}");
    }

    #[test]
    fn a_process_is_not_its_own_stranger() {
        let me = std::process::id();
        let identity = identity(me).unwrap();
        assert!(identity.start_ticks > 0 && !is_stopped(me));
        assert_eq!(stranger(&[me], &[], &[me]), None);
    }

    #[test]
    fn only_the_process_that_is_meant_is_ended() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let meant = identity(child.id()).unwrap();
        let older = Identity { start_ticks: meant.start_ticks + 1, ..meant.clone() };
        end(&older, true).unwrap();
        assert!(child.try_wait().unwrap().is_none(), "another process was ended");
        end(&meant, false).unwrap();
        assert!(!child.wait().unwrap().success());
        end(&meant, true).unwrap();
    }

    #[test]
    fn an_unknown_child_is_a_stranger() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let (me, it) = (std::process::id(), child.id());
        assert_eq!(stranger(&[me], &[], &[it]), Some(it));
        assert_eq!(stranger(&[me], &[it], &[it]), None);
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
