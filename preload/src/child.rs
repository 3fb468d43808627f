//! Runs a program and reads its output, without effects that the application could notice.
//!
//! The application would notice an ordinary child process in three ways: through SIGCHLD, through
//! `waitpid(-1)`, and through its own `fork` handlers. So the agent starts a keeper task, whose end
//! sends no signal. The keeper task starts the program and waits for it:
//!
//! ```text
//! agent ──clone, no signal──> keeper ──clone, SIGCHLD──> program
//!    waits for it             reads the pipe, kills the program after the timeout, reaps it
//! ```
//!
//! Both tasks are created like those of `vfork`, but on their own stacks. They share the memory of
//! this process, because copying the page tables of a large process takes seconds. They have their
//! own descriptors and signal handlers. Their thread pointer is that of the agent, so they may only make system calls.

use core::ffi::{CStr, c_char};

use crate::sys::task;
use crate::{libc, sys};

/// Maximum number of arguments of a program, its name included.
pub const MAX_ARGUMENTS: usize = 4;

const STACK_BYTES: usize = 64 << 10;

struct ChildJob<'a> {
    path: &'a CStr,
    arguments: [*const c_char; MAX_ARGUMENTS + 1],
    output: &'a mut [u8],
    /// Number of bytes of output. `None` if the program failed or did not end in time.
    length: Option<usize>,
    end_us: u64,
    pipe: [i32; 2],
    program_stack: usize,
}

/// Runs a program and returns its output, truncated to the size of `output`. Returns `None` if the
/// program cannot be run, fails, or takes longer than `timeout_ms`.
///
/// The caller must have all signals blocked, as the agent has, because their handlers belong to the
/// application.
pub fn output_of<'o>(
    path: &CStr,
    arguments: &[&CStr],
    timeout_ms: u64,
    output: &'o mut [u8],
) -> Option<&'o [u8]> {
    let mut job = ChildJob {
        path,
        arguments: [core::ptr::null(); MAX_ARGUMENTS + 1],
        output: &mut *output,
        length: None,
        end_us: sys::now_us() + timeout_ms * 1_000,
        pipe: [-1; 2],
        program_stack: 0,
    };
    for (place, argument) in job.arguments[..MAX_ARGUMENTS].iter_mut().zip(arguments) {
        *place = argument.as_ptr();
    }
    let stacks = sys::MappedRegion::new(2 * STACK_BYTES).ok()?;
    job.program_stack = stacks.start() + STACK_BYTES;
    let keeper_stack = stacks.start() + 2 * STACK_BYTES;
    // SAFETY: the keeper has its own stack. `job` outlives the keeper, because this thread sleeps
    // until the keeper has ended. The keeper only makes system calls: see the module header.
    let keeper = unsafe { task::spawn(0, keeper_stack, keep, (&raw mut job).cast()) };
    if let Ok(keeper) = keeper {
        let _ = task::wait_child(keeper);
    }
    let length = job.length?;
    output.get(..length)
}

unsafe extern "C" fn keep(job: *mut core::ffi::c_void) -> i32 {
    const SIGCHLD: usize = 17;
    task::die_with_parent();
    // The application may ignore SIGCHLD. The kernel would then reap the program itself.
    task::reset_handler(SIGCHLD);
    // SAFETY: `output_of` made the job, and its thread sleeps until this task has ended.
    let job = unsafe { &mut *job.cast::<ChildJob<'_>>() };
    let Ok(pipe) = task::pipe() else {
        return 1;
    };
    job.pipe = pipe;
    let stack = job.program_stack;
    // SAFETY: the new task has its own stack. This task sleeps until the program runs or has failed
    // to start.
    let started = unsafe { task::spawn(SIGCHLD, stack, become_program, (&raw mut *job).cast()) };
    let Ok(program) = started else {
        return 1;
    };
    sys::close(pipe[1]);
    let mut length = 0;
    let in_time = loop {
        let left_us = job.end_us.saturating_sub(sys::now_us());
        let room = job.output.get_mut(length..).unwrap_or_default();
        if left_us == 0 || room.is_empty() {
            break false;
        }
        if !task::wait_readable(pipe[0], left_us / 1_000 + 1) {
            continue;
        }
        match task::read(pipe[0], room) {
            Ok(0) => break true,
            Ok(count) => length += count,
            Err(sys::EINTR) => {}
            Err(_) => break false,
        }
    };
    if !in_time {
        task::kill(program);
    }
    if task::wait_child(program) == Ok(0) && in_time {
        job.length = Some(length);
    }
    0
}

unsafe extern "C" fn become_program(job: *mut core::ffi::c_void) -> i32 {
    task::die_with_parent();
    // SAFETY: `output_of` made the job. The keeper sleeps until this task has become a program.
    let job = unsafe { &*job.cast::<ChildJob<'_>>() };
    task::take_standard_streams(job.pipe[1]);
    let no_environment = [core::ptr::null()];
    // SAFETY: all lists end with null pointers, and their strings with zeros. If the application
    // changes its environment at this moment, the kernel may find other memory there, and the call
    // fails.
    unsafe {
        task::execute(job.path, job.arguments.as_ptr(), libc::environ());
        task::execute(job.path, job.arguments.as_ptr(), no_environment.as_ptr());
    }
    127
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &CStr, timeout_ms: u64) -> Option<Vec<u8>> {
        // All signals are blocked, as in the agent: libtest's threads have signal handlers of the
        // standard library.
        let mask = sys::set_signal_mask(!0);
        let mut output = [0; 64];
        let said = output_of(c"/bin/sh", &[c"sh", c"-c", script], timeout_ms, &mut output);
        let said = said.map(<[u8]>::to_vec);
        sys::set_signal_mask(mask);
        said
    }

    #[test]
    fn a_program_says_something_or_not() {
        assert_eq!(shell(c"echo one; echo two >&2; echo three", 60_000).unwrap(), b"one\nthree\n");
        assert_eq!(shell(c"cat; true", 60_000).unwrap(), b"", "the input of the program is empty");
        assert_eq!(shell(c"echo one; exit 3", 60_000), None);
        assert_eq!(shell(c"kill -9 $$", 60_000), None);
        let mut output = [0; 64];
        assert_eq!(output_of(c"/no/such/program", &[c"p"], 60_000, &mut output), None);
    }

    #[test]
    fn too_much_and_too_late_are_no_answers() {
        assert_eq!(shell(c"while echo more; do :; done", 60_000), None);
        assert_eq!(shell(c"echo one; sleep 1000", 50), None);
    }

    #[test]
    fn nothing_is_left_to_the_application() {
        let before = std::fs::read_dir("/proc/self/fd").unwrap().count();
        for _ in 0..50 {
            assert!(shell(c"echo x", 60_000).is_some());
        }
        let children =
            std::fs::read_to_string(format!("/proc/self/task/{}/children", sys::gettid()));
        assert_eq!(children.unwrap().trim(), "");
        // Other tests of this process open descriptors, too.
        assert!(std::fs::read_dir("/proc/self/fd").unwrap().count() < before + 40);
    }

    #[test]
    fn the_program_has_none_of_our_descriptors() {
        // ls itself opens one descriptor, for the folder that it lists.
        let said = shell(c"ls /proc/self/fd | wc -l", 60_000).unwrap();
        assert_eq!(said.trim_ascii(), b"4");
    }
}
