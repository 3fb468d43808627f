//! Kills a program before its n-th step. A step is a system call that changes a file, or that
//! starts another program or waits for one. ptrace stops the program at each system call, so the
//! kill hits exactly the n-th step.

use std::{
    io::Write,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};
use nix::{
    libc,
    sys::{
        ptrace::{self, Options},
        signal::{Signal, kill},
        wait::{WaitStatus, waitpid},
    },
    unistd::Pid,
};

/// System calls that count as steps, each with its name. They change a file, start a program, or
/// wait for a program.
const STEPS: [(i64, &str); 10] = [
    (libc::SYS_mkdir, "mkdir"),
    (libc::SYS_rmdir, "rmdir"),
    (libc::SYS_rename, "rename"),
    (libc::SYS_unlink, "unlink"),
    (libc::SYS_fsync, "fsync"),
    (libc::SYS_clone, "clone"),
    (libc::SYS_clone3, "clone3"),
    (libc::SYS_vfork, "vfork"),
    (libc::SYS_wait4, "wait4"),
    (libc::SYS_openat, "open to write"),
];

/// Runs a command and kills it before its n-th step (one of the system calls in [`STEPS`]). Returns
/// the name of that step. `None` if the command ends earlier.
pub(super) fn before_step(command: &Command, n: usize) -> Result<Option<&'static str>> {
    // The shell waits until it is traced before it runs the command.
    let mut traced = Command::new("sh");
    traced.args(["-c", "read -r go; exec \"$@\" </dev/null", "sh"]);
    traced.arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        traced.env(name, value.unwrap_or_default());
    }
    traced.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = traced.spawn()?;
    let pid = Pid::from_raw(i32::try_from(child.id())?);
    ptrace::seize(pid, Options::PTRACE_O_TRACESYSGOOD | Options::PTRACE_O_EXITKILL)
        .context("cannot trace the program: run as root")?;
    ptrace::interrupt(pid)?;
    waitpid(pid, None)?;
    ptrace::syscall(pid, None)?;
    child.stdin.take().context("the process has no input pipe")?.write_all(b"go\n")?;
    let mut seen = 0;
    loop {
        match waitpid(pid, None)? {
            WaitStatus::PtraceSyscall(_) => {
                if let Some(step) = step(pid)? {
                    seen += 1;
                    if seen == n {
                        kill(pid, Signal::SIGKILL)?;
                        while !matches!(waitpid(pid, None)?, WaitStatus::Signaled(..)) {}
                        return Ok(Some(step));
                    }
                }
                ptrace::syscall(pid, None)?;
            }
            WaitStatus::Stopped(_, signal) => ptrace::syscall(pid, signal)?,
            WaitStatus::PtraceEvent(..) => ptrace::syscall(pid, None)?,
            WaitStatus::Exited(_, 0) => return Ok(None),
            ended => bail!("{command:?} ended by itself: {ended:?}"),
        }
    }
}

/// Returns the name of the step that the traced process is about to execute. `None` for any other
/// system call.
fn step(pid: Pid) -> Result<Option<&'static str>> {
    let registers = ptrace::getregs(pid)?;
    // At the entry of a system call, the register of the return value contains -ENOSYS.
    if registers.rax.cast_signed() != -i64::from(libc::ENOSYS) {
        return Ok(None);
    }
    let call = registers.orig_rax.cast_signed();
    let writes = registers.rdx.cast_signed() & i64::from(libc::O_CREAT) != 0;
    let step = STEPS.iter().find(|(number, _)| *number == call);
    Ok(step.filter(|_| call != libc::SYS_openat || writes).map(|(_, name)| *name))
}
