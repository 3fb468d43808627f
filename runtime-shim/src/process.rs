//! Operations on processes that are identified by pid and start time. So a later process with the
//! same pid is never signalled.

use std::io;
use std::os::fd::OwnedFd;
use std::process::Child;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags, Signal};

/// Returns the start time of a process in clock ticks after boot. Returns `None` if there is no
/// such process.
#[must_use]
pub fn start_ticks(pid: i32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command name may contain blanks and brackets. The fields start after the last closing
    // bracket, because no field contains a bracket.
    let fields = &stat[stat.rfind(')')? + 1..];
    fields.split_whitespace().nth(19)?.parse().ok()
}

/// Kills the process with this pid if its start time is `began`, and waits for its end. Returns
/// false if there is no such process, or if it does not end in time.
pub fn kill(pid: i32, began: u64, patience: Duration) -> io::Result<bool> {
    if pid <= 1 {
        return Ok(false);
    }
    let Some(pid) = Pid::from_raw(pid) else {
        return Ok(false);
    };
    let fd = match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
        Ok(fd) => fd,
        Err(rustix::io::Errno::SRCH) => return Ok(false),
        Err(error) => return Err(error.into()),
    };
    // The descriptor now refers to this process, even if its pid is used again later.
    if start_ticks(pid.as_raw_nonzero().get()) != Some(began) {
        return Ok(false);
    }
    rustix::process::pidfd_send_signal(&fd, Signal::KILL)?;
    ends(&fd, Instant::now() + patience)
}

/// Waits for the end of the process with this pid and start time. Returns false if it has not ended
/// before the deadline.
pub fn wait_for_end(pid: i32, began: u64, deadline: Instant) -> io::Result<bool> {
    let Some(pid) = Pid::from_raw(pid) else { return Ok(true) };
    let fd = match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
        Ok(fd) => fd,
        Err(rustix::io::Errno::SRCH) => return Ok(true),
        Err(error) => return Err(error.into()),
    };
    Ok(start_ticks(pid.as_raw_nonzero().get()) != Some(began) || ends(&fd, deadline)?)
}

/// Waits for a child's end. Returns true if it exited with success before the deadline.
pub fn wait(child: &mut Child, deadline: Instant) -> io::Result<bool> {
    // The child has not been waited for, so its pid cannot have been reused.
    let fd = rustix::process::pidfd_open(Pid::from_child(child), PidfdFlags::empty())?;
    if !ends(&fd, deadline)? {
        return Ok(false);
    }
    Ok(child.wait()?.success())
}

fn ends(fd: &OwnedFd, deadline: Instant) -> io::Result<bool> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(left.subsec_nanos()),
        };
        match rustix::event::poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&timeout)) {
            Ok(ready) => return Ok(ready > 0),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Sets a process's OOM score to the value that the stock shim sets for itself: one above
/// containerd's, so that the kernel kills shims before containerd.
pub fn adjust_oom_score(pid: u32) -> io::Result<()> {
    let path = "/proc/self/oom_score_adj";
    let own: i32 = std::fs::read_to_string(path)?.trim().parse().map_err(io::Error::other)?;
    // This process inherited its own score from containerd.
    let score = (own + 1).min(1000);
    match std::fs::write(format!("/proc/{pid}/oom_score_adj"), score.to_string()) {
        // As in the stock shim: under an unprivileged containerd the score stays as it is.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn only_the_process_that_is_meant_is_killed() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let began = start_ticks(pid).unwrap();
        assert!(!kill(pid, began + 1, Duration::from_secs(20)).unwrap());
        assert!(child.try_wait().unwrap().is_none(), "still there");
        assert!(kill(pid, began, Duration::from_secs(20)).unwrap());
        assert!(!child.wait().unwrap().success());
        assert!(!kill(pid, began, Duration::from_secs(20)).unwrap());
    }

    #[test]
    fn a_childs_end_is_waited_for() {
        let soon = || Instant::now() + Duration::from_secs(20);
        for (program, well) in [("true", true), ("false", false)] {
            let mut child = Command::new(program).spawn().unwrap();
            assert_eq!(wait(&mut child, soon()).unwrap(), well);
        }
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        assert!(!wait(&mut child, Instant::now()).unwrap());
        child.kill().unwrap();
        assert!(!wait(&mut child, soon()).unwrap());
    }

    #[test]
    fn pids_that_name_no_one_process_are_refused() {
        for pid in [0, -1, 1] {
            assert!(!kill(pid, 0, Duration::ZERO).unwrap());
        }
    }

    #[test]
    fn a_child_gets_one_more() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        adjust_oom_score(child.id()).unwrap();
        let read = |pid: &str| -> i32 {
            std::fs::read_to_string(format!("/proc/{pid}/oom_score_adj"))
                .unwrap()
                .trim()
                .parse()
                .unwrap()
        };
        assert_eq!(read(&child.id().to_string()), (read("self") + 1).min(1000));
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
