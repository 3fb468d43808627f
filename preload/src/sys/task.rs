//! System calls that run a program in a separate task.

use core::arch::asm;
use core::ffi::{CStr, c_char, c_void};

use super::{CLOEXEC, EINTR, Errno, call, now_us, number, plain};

/// The main function of a task that [`spawn`] starts.
pub type TaskMain = unsafe extern "C" fn(*mut c_void) -> i32;

/// Starts a task that shares this process's memory and runs `main` on `stack`, from its top. The
/// task exits with the result of `main`. The caller sleeps until the task has executed a program or
/// has ended. `end_signal` is the signal that the caller gets at the task's end, or 0 for none.
///
/// # Safety
/// The stack must be large enough, and unused until the caller continues. `main` must be sound to
/// call with `argument`, touch no thread-local storage and return normally.
pub unsafe fn spawn(
    end_signal: usize,
    stack_top: usize,
    main: TaskMain,
    argument: *mut c_void,
) -> Result<i32, Errno> {
    const VM_VFORK: usize = 0x100 | 0x4000;
    let ret: isize;
    // SAFETY: for the caller, the same holds as in `call`. In the new task, rsp is the new stack,
    // and the two preserved registers have the values of the caller. The task uses nothing of this
    // frame, because it ends inside this block.
    unsafe {
        asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, r13",
            "call r12",
            "mov edi, eax",
            "mov eax, 231", // exit_group
            "syscall",
            "ud2",
            "2:",
            inlateout("rax") number::CLONE as isize => ret,
            in("rdi") VM_VFORK | end_signal,
            in("rsi") stack_top & !15,
            in("rdx") 0,
            in("r10") 0,
            in("r8") 0,
            in("r12") main,
            in("r13") argument,
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    if (-4095..0).contains(&ret) { Err(Errno(-ret as i32)) } else { Ok(ret as i32) }
}

/// Waits for the end of a child, and returns its status. This also works for a child that ends
/// without a signal.
pub fn wait_child(pid: i32) -> Result<i32, Errno> {
    const ALL: usize = 0x4000_0000;
    let mut status = 0_i32;
    loop {
        match plain(number::WAIT4, [pid as usize, &raw mut status as usize, ALL, 0, 0, 0]) {
            Err(EINTR) => {}
            other => return other.map(|_| status),
        }
    }
}

/// Kills a child. Must be called before the child is waited for, because its id could be reused
/// afterwards.
pub fn kill(child: i32) {
    const SIGKILL: usize = 9;
    let _ = plain(number::KILL, [child as usize, SIGKILL, 0, 0, 0, 0]);
}

/// Sets the default action of a signal. Must be called only in a task that has its own table of
/// signal handlers, such as a task of [`spawn`].
pub fn reset_handler(signal: usize) {
    const MASK_BYTES: usize = 8;
    // struct sigaction of the kernel: handler, flags, restorer and mask, all 0.
    let default = [0_u64; 4];
    let args = [signal, default.as_ptr() as usize, 0, MASK_BYTES, 0, 0];
    let _ = plain(number::RT_SIGACTION, args);
}

/// Makes the kernel end the calling task when the thread that created it ends.
pub fn die_with_parent() {
    const PR_SET_PDEATHSIG: usize = 1;
    const SIGKILL: usize = 9;
    let _ = plain(number::PRCTL, [PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0, 0]);
}

/// Creates a pipe, and returns its read end and its write end.
pub fn pipe() -> Result<[i32; 2], Errno> {
    let mut ends = [-1_i32; 2];
    plain(number::PIPE2, [ends.as_mut_ptr() as usize, CLOEXEC, 0, 0, 0, 0]).map(|_| ends)
}

/// Whether data or the end of the stream can be read before the timeout.
pub fn wait_readable(fd: i32, timeout_ms: u64) -> bool {
    const POLLIN: u64 = 1;
    // struct pollfd: the descriptor, then two 16-bit sets of events.
    let mut poll = u64::from(fd as u32) | POLLIN << 32;
    let end_us = now_us().saturating_add(timeout_ms.saturating_mul(1_000));
    loop {
        let left_ms = end_us.saturating_sub(now_us()).div_ceil(1_000).min(i32::MAX as u64) as usize;
        match plain(number::POLL, [&raw mut poll as usize, 1, left_ms, 0, 0, 0]) {
            Err(EINTR) if left_ms > 0 => {}
            answer => return answer.is_ok_and(|n| n > 0),
        }
    }
}

/// Reads bytes from a descriptor. Returns 0 at the end of the stream.
pub fn read(fd: i32, buffer: &mut [u8]) -> Result<usize, Errno> {
    plain(number::READ, [fd as usize, buffer.as_mut_ptr() as usize, buffer.len(), 0, 0, 0])
}

/// Sets `output` as the standard output, and `/dev/null` as the standard input and error. All other
/// descriptors are closed at the next [`execute`]. Must be called only in a task that has its own
/// descriptor table.
pub fn take_standard_streams(output: i32) {
    const CLOSE_RANGE_CLOEXEC: usize = 4;
    const O_RDWR: usize = 2;
    let path = c"/dev/null".as_ptr() as usize;
    let nothing = plain(number::OPEN, [path, O_RDWR, 0, 0, 0, 0]).unwrap_or(usize::MAX);
    for (from, to) in [(output as usize, 1), (nothing, 0), (nothing, 2)] {
        let _ = plain(number::DUP2, [from, to, 0, 0, 0, 0]);
    }
    // Before Linux 5.11, descriptors without close-on-exec are inherited.
    let all = [3, u32::MAX as usize, CLOSE_RANGE_CLOEXEC, 0, 0, 0];
    let _ = plain(number::CLOSE_RANGE, all);
}

/// Executes a program in this task. Returns only if the program cannot be executed.
///
/// # Safety
/// Both lists must contain pointers to strings, and end with a null pointer.
pub unsafe fn execute(
    path: &CStr,
    arguments: *const *const c_char,
    environment: *const *const c_char,
) {
    let args = [path.as_ptr() as usize, arguments as usize, environment as usize, 0, 0, 0];
    // SAFETY: the caller guarantees the form of the lists.
    let _ = unsafe { call(number::EXECVE, args) };
}
